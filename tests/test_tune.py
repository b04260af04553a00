"""The tuner without a GPU: a real small run, and its rules with a workshop that only pretends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import samples

from autoattn import cache, plan, tune
from autoattn.entry import KERNEL, CacheEntry, Rival
from autoattn.jobs import Finished
from autoattn.problem import DType, Mask, Op, Problem
from autoattn.study import Study
from autoattn.trial import Evidence, Outcome, Trial, Verdict
from autoattn.workers import Failure

SMALL = Problem(
    dtype=DType.FLOAT16, batch=1, heads_q=2, heads_kv=1, seq_q=64, seq_kv=64, head_dim=16, mask=Mask.parse("causal")
)
GOOD = Verdict(ok=True, checks=10, max_error=1e-3, rms_error=1e-4, allowed=4e-3)


class Pretended:
    """A workshop in which every variant works and the smaller tile is the faster one."""

    fails: frozenset[str] = frozenset()  # problem keys whose variants all fail
    interrupts: frozenset[str] = frozenset()
    rivals: tuple[Rival, ...] = ()

    def __init__(self, device: Any, *, measured: bool, jobs: int | None = None) -> None:
        self.measured = measured
        self.outcomes: dict[Outcome, int] = {}
        self.kernels = self.begun = 0

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def search(
        self, study: Study, *, more: Callable[[int], bool], late: Callable[[], bool], heard: Callable[[Trial], None]
    ) -> None:
        if study.problem.key in self.interrupts:
            raise KeyboardInterrupt
        begun = 0
        while more(begun) and (variant := study.propose()) is not None:
            begun += 1
            self.kernels = self.begun = self.kernels + 1
            time_us = float(variant["BLOCK_M"]) + float(variant["BLOCK_N"])
            trial = Trial(
                variant=variant,
                outcome=Outcome.OK,
                digest=variant.digest,
                prediction=samples.prediction(time_us),
                verdict=GOOD if self.measured else None,
                measurement=samples.measurement(study.problem, time_us) if self.measured else None,
            )
            if study.problem.key in self.fails:
                trial = Trial(variant=variant, outcome=Outcome.COMPILE_ERROR, detail="ptxas said no")
            study.record(trial)
            heard(trial)

    def rehearse(self, problem: Problem, variant: Any) -> Verdict | Failure:
        return GOOD

    def final(self, problem: Problem, variants: list[Any], *, seconds: float, seed: int) -> Finished | Failure:
        times = [samples.measurement(problem, float(one["BLOCK_M"]) + float(one["BLOCK_N"])) for one in variants]
        return Finished(verdicts=(GOOD,) * len(variants), measurements=tuple(times), rivals=self.rivals)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> type[Pretended]:
    fresh = type("Fresh", (Pretended,), {})
    monkeypatch.setattr(tune, "Workshop", fresh)
    return fresh


def run(folder: Path, *problems: Problem, measured: bool = False, **changes: Any) -> plan.Summary:
    options = plan.Options(**{"effort": plan.Effort.QUICK, "trials": 6, "cache": folder, "jobs": 2, **changes})
    device = samples.H200 if measured else samples.A30
    return tune.tune(list(problems) or [SMALL], device, measured=measured, options=options)


def rival(name: str, time_us: float, max_error: float | None = 1e-3) -> Rival:
    return Rival(name=name, measurement=samples.measurement(SMALL, time_us), max_error=max_error)


def test_a_real_run_without_the_card_gives_a_predicted_entry_and_resumes(tmp_path: Path) -> None:
    summary = run(tmp_path, trials=3)
    entry = summary.entries[SMALL.key]
    assert (entry.evidence, entry.verdict, entry.measurement) == (Evidence.PREDICTED, None, None)
    assert entry.report is not None
    assert entry.report.registers > 0
    assert summary.kernels == 3
    assert cache.read(summary.path).entries[SMALL.key].params == entry.params
    again = run(tmp_path, trials=3)
    assert (again.kept, again.kernels) == (1, 0)


def test_the_same_seed_gives_the_same_entry(pretended: type[Pretended], tmp_path: Path) -> None:
    one, other = (run(tmp_path / name, trials=30, seed=5).entries[SMALL.key] for name in ("a", "b"))
    assert replace(one, versions={}) == replace(other, versions={})


def test_more_trials_go_on_where_the_last_run_stopped(pretended: type[Pretended], tmp_path: Path) -> None:
    run(tmp_path, trials=6)
    summary = run(tmp_path, trials=10)
    assert summary.kept == 0
    assert summary.entries[SMALL.key].search.trials == 10
    assert summary.kernels == 4


def test_an_entry_of_another_template_text_is_tuned_anew(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    monkeypatch.setattr("autoattn.render.template_digest", lambda template: "another")
    assert run(tmp_path).kept == 0


def test_a_problem_without_a_working_variant_does_not_stop_the_others(
    pretended: type[Pretended], tmp_path: Path
) -> None:
    other = replace(SMALL, seq_q=128, seq_kv=128)
    pretended.fails = frozenset({SMALL.key})
    summary = run(tmp_path, SMALL, other)
    assert list(summary.entries) == [other.key]
    assert "ptxas said no" in summary.failed[SMALL.key]


def test_ctrl_c_keeps_what_was_finished(pretended: type[Pretended], tmp_path: Path) -> None:
    other = replace(SMALL, seq_q=128, seq_kv=128)
    pretended.interrupts = frozenset({other.key})
    summary = run(tmp_path, SMALL, other)
    assert summary.interrupted
    assert list(cache.read(summary.path).entries) == [SMALL.key]


def test_the_fastest_finalist_wins_and_the_kernel_is_the_choice(pretended: type[Pretended], tmp_path: Path) -> None:
    pretended.rivals = (rival("sdpa", 1000.0),)
    entry = run(tmp_path, measured=True).entries[SMALL.key]
    assert entry.evidence is Evidence.MEASURED
    assert entry.choice == KERNEL
    assert all(entry.time_us <= candidate.time_us for candidate in entry.candidates)


@pytest.mark.parametrize(
    ("others", "choice"),
    [
        ((("sdpa", 1.0),), "sdpa"),
        ((("sdpa", 1000.0), ("sdpa-cudnn", 1.0)), "sdpa-cudnn"),
        ((("sdpa", 1.005), ("sdpa-cudnn", 1.0)), "sdpa"),  # PyTorch's own choice wins ties
    ],
)
def test_a_faster_rival_is_chosen(
    pretended: type[Pretended], tmp_path: Path, others: tuple[tuple[str, float], ...], choice: str
) -> None:
    pretended.rivals = tuple(rival(name, time_us) for name, time_us in others)
    assert run(tmp_path, measured=True).entries[SMALL.key].choice == choice


def test_a_rival_faster_by_less_than_the_margin_is_not_chosen(pretended: type[Pretended], tmp_path: Path) -> None:
    best = run(tmp_path / "a", measured=True).entries[SMALL.key].time_us
    pretended.rivals = (rival("sdpa", best * (1.0 - tune.MARGIN / 2)),)
    assert run(tmp_path / "b", measured=True).entries[SMALL.key].choice == KERNEL


def test_a_rival_that_is_wrong_is_no_rival(pretended: type[Pretended], tmp_path: Path) -> None:
    pretended.rivals = (rival("sdpa", 1.0, max_error=1.0),)
    entry = run(tmp_path, measured=True).entries[SMALL.key]
    assert entry.choice == KERNEL
    assert "sdpa" not in {one.name for one in entry.rivals}


def test_what_was_measured_elsewhere_is_tried_and_leaned_on(pretended: type[Pretended], tmp_path: Path) -> None:
    measured: CacheEntry = run(tmp_path, measured=True).entries[SMALL.key]
    predicted = run(tmp_path).entries[SMALL.key]
    rank = measured.time_us * tune.ELSEWHERE
    assert predicted.params == measured.params or predicted.time_us <= rank


def test_entries_that_another_card_measured_are_not_kept(pretended: type[Pretended], tmp_path: Path) -> None:
    run(tmp_path, measured=True)
    sister = replace(samples.H200, sm_count=78)
    options = plan.Options(effort=plan.Effort.QUICK, trials=6, cache=tmp_path)
    with pytest.raises(Exception, match="use another --cache DIR"):
        tune.tune([SMALL], sister, measured=True, options=options)
    assert cache.lookup(tmp_path, samples.H200, Op.FORWARD)
