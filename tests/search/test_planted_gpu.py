"""The tuner's self-test on a card: what only hardware can do wrong, and what the workshop makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_pool import Studied
from planted_kernels import FAULTS, Fault
from planted_variants import BAD, GONE, GOOD, large

from autoattn.codegen import render
from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome, Trial
from autoattn.core.variant import Source, Variant
from autoattn.hardware import nvidia
from autoattn.search import trial_pipeline
from autoattn.search.gpu_jobs import Finished, Screened
from autoattn.search.trial_pipeline import Workshop
from autoattn.workers.worker_pool import Failure

pytestmark = pytest.mark.gpu

HANGS = 10.0  # seconds after which a kernel is taken to hang, the gate's cases included
# Each program adds its rows to what is there, so that two heads that share them race.
RACE = Fault(
    right="    tl.store(output_ptrs, (acc * share[:, None]).to(output_ptr.dtype.element_ty), mask=m_o)\n",
    wrong="""    other_ptrs = output_ptrs + tl.where(i_h % 2 == 0, stride_oh, -stride_oh)
    tl.store(output_ptrs, (acc * share[:, None]).to(output_ptr.dtype.element_ty), mask=m_o)
    tl.store(other_ptrs, (acc * share[:, None]).to(output_ptr.dtype.element_ty), mask=m_o)
""",
)


def searched(problem: Problem, variants: list[Variant]) -> list[Trial]:
    """The trials of some variants, each on the card."""
    device = nvidia.present()
    assert device is not None
    heard: list[Trial] = []
    study: Any = Studied(list(variants), problem)
    with Workshop(device, measured=True, jobs=2) as shop:
        shop.alone(shop.search(study, more=lambda: True, late=lambda: False, heard=heard.append))
    return heard


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if not fault.lse])
def test_on_the_card_a_search_records_and_survives_a_kernel_that(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault = FAULTS[name]
    monkeypatch.setattr(render, "render", fault.renderer(lambda variant: variant == BAD))
    monkeypatch.setattr(
        trial_pipeline, "GPU_SECONDS", HANGS if fault.outcome is Outcome.TIMEOUT else trial_pipeline.GPU_SECONDS
    )
    before, bad, after = searched(large(fault.problem), [GOOD, BAD, replace(GOOD, params=changed(GOOD))])
    assert (before.outcome, after.outcome) == (Outcome.OK, Outcome.OK), (before.detail, after.detail)
    assert bad.outcome in (GONE if fault.outcome is Outcome.CRASH else (fault.outcome,)), bad.detail
    assert bad.time_us is None, "what is wrong is never timed"


def changed(variant: Variant) -> tuple[tuple[str, Any], ...]:
    """Another variant's parameters."""
    return tuple({**variant.as_dict(), "num_stages": 2}.items())


def test_a_problem_that_the_card_cannot_hold_costs_its_trials_and_the_next_one_nothing() -> None:
    """Queries, keys, values and outputs of 16 TiB each."""
    full = large(FAULTS["hangs"].problem)
    huge = replace(full, batch=2**21, heads_q=64, heads_kv=64, seq_q=1024, seq_kv=1024)
    device = nvidia.present()
    assert device is not None
    heard: list[Trial] = []
    with Workshop(device, measured=True, jobs=2) as shop:
        for problem in (huge, full):
            study: Any = Studied([GOOD], problem)
            shop.alone(shop.search(study, more=lambda: True, late=lambda: False, heard=heard.append))
        jobs = [worker.jobs for worker in shop.bench.workers]
    assert [trial.outcome for trial in heard] == [Outcome.LAUNCH_ERROR, Outcome.OK], [trial.detail for trial in heard]
    assert "out of GPU memory" in heard[0].detail
    assert jobs == [4], "the worker lived on: each problem is made ready and has one look"


def test_programs_that_write_the_same_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "render", RACE.renderer(lambda variant: variant == BAD))
    (bad,) = searched(large(RACE.problem), [BAD])
    assert bad.outcome is Outcome.WRONG_RESULT


def test_an_lse_in_powers_of_two_is_refused() -> None:
    from autoattn.kernels import compiler
    from autoattn.validation.output_check import Gate

    fault = FAULTS["gives the LSE in powers of two"]
    cuda = torch.device("cuda")
    verdict = Gate(fault.problem, cuda).judge(compiler.load(fault.source(), cuda))
    assert not verdict.ok
    assert "LSE" in verdict.reason


def test_a_finalist_that_is_wrong_at_full_size_alone_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate's small cases all pass."""
    problem = large(FAULTS["leaves a row unwritten"].problem)
    fault = Fault(right="m_o = (o_m < seq_q)[:, None]", wrong="m_o = ((o_m < seq_q) & (o_m != 500))[:, None]")
    monkeypatch.setattr(render, "render", fault.renderer(lambda variant: variant == BAD))
    device = nvidia.present()
    assert device is not None
    with Workshop(device, measured=True, jobs=1) as shop:
        assert isinstance(shop.check(problem, BAD), Screened)
        result = shop.alone(shop.final(problem, [GOOD, BAD], seconds=0.5, seed=0))
    assert isinstance(result, Finished)
    assert [verdict.ok for verdict in result.verdicts] == [True, False]
    assert result.measurements[0] is not None
    assert result.measurements[1] is None


def test_finals_with_a_finalist_that_hangs_end_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS["hangs"]
    monkeypatch.setattr(render, "render", fault.renderer(lambda variant: variant == BAD))
    monkeypatch.setattr(trial_pipeline, "FINAL_SECONDS", HANGS)
    device = nvidia.present()
    assert device is not None
    with Workshop(device, measured=True, jobs=1) as shop:
        result = shop.alone(shop.final(large(fault.problem), [GOOD, BAD], seconds=0.5, seed=0))
        again = shop.check(large(fault.problem), GOOD)
    assert isinstance(result, Failure)
    assert result.outcome is Outcome.TIMEOUT
    assert isinstance(again, Screened), "the next worker finds a healthy card"


def test_the_same_kernels_pass_on_the_card_without_a_fault() -> None:
    for problem in {fault.problem for fault in FAULTS.values()}:
        source: Source = render.render(large(problem), GOOD)
        assert source.text
        (trial,) = searched(large(problem), [GOOD])
        assert trial.outcome is Outcome.OK, trial.detail
