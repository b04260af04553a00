"""The stopwatch and the whole tuner on a real GPU."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
import torch

from autoattn.baselines import pytorch_sdpa
from autoattn.cache import finals_samples
from autoattn.codegen import render, search_space
from autoattn.core import paired_stats
from autoattn.core.cache_entry import KERNEL
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Problem
from autoattn.core.trial import Evidence, Outcome
from autoattn.core.variant import Source
from autoattn.hardware import nvidia
from autoattn.hardware.timer import Stopwatch
from autoattn.search import gpu_jobs, search_options, tuner
from autoattn.workers.worker_pool import Failure, Pool

pytestmark = pytest.mark.gpu

SMALL = Problem(
    dtype=DType.BFLOAT16, batch=2, heads_q=8, heads_kv=4, seq_q=512, seq_kv=512, head_dim=64, mask=Mask.parse("causal")
)
HANG = """
import triton
import triton.language as tl
OPTIONS = {"num_warps": 1}
SIGNATURE = {"output_ptr": "*bf16", "seq_q": "i32"}
DIVISIBLE = {}


def grid(batch, heads_q, seq_q, sm_count):
    return (1,)


@triton.jit
def forward(output_ptr, seq_q):
    turns = seq_q
    while turns > 0:
        turns = tl.load(output_ptr, volatile=True).to(tl.int32) * 0 + 1
"""
ILLEGAL = HANG.replace("    turns = seq_q\n", "    turns = 0\n    tl.store(output_ptr + (1 << 40), 1.0)\n")


@pytest.fixture(scope="module")
def stopwatch() -> Stopwatch:
    return Stopwatch(torch.device("cuda"))


def test_a_copy_twice_as_large_takes_about_twice_as_long(stopwatch: Stopwatch) -> None:
    small, large = (torch.empty(size * 2**28, dtype=torch.int8, device="cuda") for size in (1, 2))
    into = torch.empty_like(large)
    looked = [
        stopwatch.screen(lambda source=source: into[: len(source)].copy_(source), None).median_us
        for source in (small, large)
    ]
    assert 1.6 < looked[1] / looked[0] < 2.4


def test_a_clear_loser_is_not_measured_further(stopwatch: Stopwatch) -> None:
    slow = stopwatch.screen(lambda: torch.cuda._sleep(100_000_000), 10.0)
    assert slow.samples <= 2


def test_the_host_is_hidden(stopwatch: Stopwatch) -> None:
    tiny = torch.empty(1, device="cuda")
    assert stopwatch.screen(lambda: tiny.add_(1), None).median_us < 15.0


@pytest.mark.parametrize(("spins", "calls"), [(4, 10), (1, 11)])
def test_a_sample_for_which_the_host_came_late_is_taken_again(spins: int, calls: int) -> None:
    tensor, begun = torch.zeros(1, device="cuda"), []

    def call() -> None:
        begun.append(tensor.add_(1.0))
        time.sleep(500e-6)
        tensor.add_(1.0)

    assert statistics.median(Stopwatch(torch.device("cuda"), spins=spins).samples(call, 10)) < 50.0
    assert len(begun) >= calls


def test_the_time_of_a_call_that_the_longest_spin_does_not_hide_has_some_of_the_host_s(stopwatch: Stopwatch) -> None:
    tensor = torch.zeros(1, device="cuda")

    def call() -> None:
        tensor.add_(1.0)
        time.sleep(0.02)
        tensor.add_(1.0)

    assert min(stopwatch.samples(call, 1)[0] for _ in range(3)) > 5000.0


def test_a_contest_times_everybody(stopwatch: Stopwatch) -> None:
    tiny = torch.empty(1, device="cuda")
    times = stopwatch.contest(
        {"a": lambda: tiny.add_(1), "b": lambda: torch.cuda._sleep(1_000_000)}, 1, seconds=0.1, seed=0
    )
    assert set(times) == {"a", "b"}
    assert times["a"].median_us < times["b"].median_us
    assert times["a"].samples == times["b"].samples >= 3


def test_finals_end_when_all_is_decided(stopwatch: Stopwatch) -> None:
    calls = {
        "a": lambda: torch.cuda._sleep(1_000_000),
        "b": lambda: torch.cuda._sleep(1_500_000),
        "sdpa": lambda: torch.cuda._sleep(2_000_000),
    }
    taken = stopwatch.finals(calls, ["a", "b"], seconds=30.0, seed=0)
    assert paired_stats.LOOKS[0] <= len(taken) <= paired_stats.LOOKS[1]
    assert len({tuple(round_.times_us) for round_ in taken}) > 1, "in random order"
    lead = paired_stats.interval(paired_stats.good(taken), "b", "a", finalists=2)
    assert lead is not None
    assert 1.4 < lead.low < lead.high < 1.6


def test_energy_is_counted_and_more_work_costs_more(stopwatch: Stopwatch) -> None:
    if nvidia.joules(stopwatch.index) is None:
        pytest.skip("this card tells no energy")
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")

    def product() -> None:
        matrix @ matrix

    def two() -> None:
        product()
        product()

    ratios = []
    for _ in range(5):  # a card that waits for its host takes energy all the same, and a host may stand still once
        single, double = stopwatch.energy(product, 0.3), stopwatch.energy(two, 0.3)
        assert single is not None
        assert double is not None
        assert 50.0 < single.watts < 1500.0
        ratios.append(double.joules / single.joules)
    assert 1.7 < statistics.median(ratios) < 2.3


@pytest.mark.parametrize(
    ("text", "outcomes"), [(HANG, {Outcome.TIMEOUT}), (ILLEGAL, {Outcome.LAUNCH_ERROR, Outcome.CRASH})]
)
def test_a_kernel_that_hangs_or_writes_where_it_must_not_costs_its_trial_alone(
    text: str, outcomes: set[Outcome]
) -> None:
    card = nvidia.present()
    assert card is not None
    variant = search_space.load("triton/forward").default(SMALL, card)
    good = render.render(SMALL, variant)
    bad = Source(name="forward", text=text, variant=variant, traits=good.traits)
    with Pool(size=1, preload=gpu_jobs.__name__) as pool:
        failed = pool.result(gpu_jobs.Screen(problem=SMALL, source=bad, verdict=None, best_us=None), 20.0)
        assert isinstance(failed, Failure)
        assert failed.outcome in outcomes
        fine = pool.result(gpu_jobs.Screen(problem=SMALL, source=good, verdict=None, best_us=None), 60.0)
    assert isinstance(fine, gpu_jobs.Screened)
    assert fine.verdict.ok


def test_a_tune_measures_against_the_rivals_and_resumes(tmp_path: Path) -> None:
    card = nvidia.present()
    assert card is not None
    options = search_options.Options(effort=search_options.Effort.QUICK, trials=4, cache=tmp_path)
    summary = tuner.tune([SMALL], card, measured=True, options=options)
    entry = summary.entries[SMALL.key]
    assert entry.evidence is Evidence.MEASURED
    assert entry.verdict is not None
    assert entry.verdict.ok
    assert {pytorch_sdpa.SDPA, "sdpa-flash"} <= {rival.name for rival in entry.rivals}
    assert entry.choice == KERNEL or entry.choice in {rival.name for rival in entry.rivals}
    assert entry.finals is not None
    assert entry.finals.finalists[0].source_digest == entry.source_digest
    samples = finals_samples.read(finals_samples.path_of(tmp_path, card.name, SMALL.key))
    assert samples is not None
    assert samples.winner == entry.source_digest
    assert len(samples.rounds) == entry.finals.rounds + entry.finals.discarded
    again = tuner.tune([SMALL], card, measured=True, options=options)
    assert again.kept == 1
    assert again.kernels == 0
