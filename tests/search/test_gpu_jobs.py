"""What the finals make of rounds, with a fake timer; on a card see test_gpu_jobs_gpu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import kernels
import pytest
import torch

from autoattn.codegen import render
from autoattn.core.paired_stats import Pulse, Round
from autoattn.core.trial import Energy, Verdict
from autoattn.hardware.timer import Rounds
from autoattn.search.gpu_jobs import Final, Outgrow, finalist_name

PROBLEM = kernels.problem(batch=1, heads_q=2, heads_kv=2, seq_q=64, seq_kv=64, head_dim=16, mask="causal")
GOOD = Verdict(ok=True, checks=1, max_error=1e-3, rms_error=1e-4, allowed=4e-3)
TIMES = {finalist_name(0): 10.0, finalist_name(2): 12.0, "sdpa": 15.0}


@dataclass
class FinalsTimer:
    """A stopwatch on a card that is slowed down, and ten times slower, in every fifth round."""

    requests: list[Any] = field(default_factory=list)

    def finals(self, calls: Mapping[str, Any], finalists: Sequence[str], *, seconds: float, seed: int) -> list[Round]:
        self.requests.append((list(calls), list(finalists), seconds, seed))
        rounds = []
        for number in range(20):
            slow = number % 5 == 0
            times = {name: TIMES[name] * (10.0 if slow else 1.0) for name in calls}
            rounds.append(Round(times_us=times, pulse=Pulse(clock_mhz=900 if slow else 1800, slowed=slow)))
        return rounds

    def energy(self, call: Any, seconds: float) -> Energy | None:
        self.requests.append(seconds)
        return Energy(joules=call(), watts=500.0)


def final(**changes: Any) -> Final:
    sources = tuple(render.render(PROBLEM, kernels.variant(BLOCK_M=size)) for size in (16, 32, 64))
    return Final(problem=PROBLEM, finalists=sources, seconds=0.5, seed=7, **changes)


def finished(job: Final, stopwatch: Any) -> Any:
    bad = Verdict(ok=False, checks=1, max_error=1.0, rms_error=1.0, allowed=4e-3, reason="error 1")
    ours = {finalist_name(0): lambda: 0.1, finalist_name(2): lambda: 0.3}
    return job.time(stopwatch, ours, {"sdpa": lambda: 0.5}, (GOOD, bad, GOOD), {"sdpa": (2e-3, 3e-4)})


def test_rounds_of_a_slowed_card_are_kept_but_not_counted() -> None:
    result = finished(final(), FinalsTimer())
    assert len(result.rounds) == 20
    first, wrong, third = result.measurements
    assert wrong is None
    assert (first.median_us, first.samples, first.clock_mhz, first.throttled) == (10.0, 16, 1800, False)
    assert third.p80_us == 12.0
    (rival,) = result.rivals
    assert (rival.name, rival.measurement.median_us) == ("sdpa", 15.0)
    assert (rival.max_error, rival.rms_error) == (2e-3, 3e-4)


def test_the_finalists_are_told_from_the_rivals() -> None:
    stopwatch = FinalsTimer()
    finished(final(), stopwatch)
    ours = [finalist_name(0), finalist_name(2)]
    assert stopwatch.requests == [(["sdpa", *ours], ours, 0.5, 7)]


def test_energy_is_counted_where_it_is_asked_for() -> None:
    stopwatch = FinalsTimer()
    assert finished(final(), stopwatch).energies == (None, None, None)
    result = finished(final(energy_seconds=0.25), stopwatch)
    assert result.energies == (Energy(joules=0.1, watts=500.0), None, Energy(joules=0.3, watts=500.0))
    assert result.rivals[0].energy == Energy(joules=0.5, watts=500.0)
    assert stopwatch.requests[-3:] == [0.25] * 3


class PairedTimer:
    """A stopwatch on a card that slows down and down, and on which the worst case takes 2, 3 and 2.5 times as long."""

    def rounds(self, calls: Mapping[str, Any], *, seconds: float, seed: int) -> Rounds:
        assert (list(calls), seconds, seed) == (["usual", "worst"], 0.02, 7)
        usual = [10.0, 100.0, 1000.0]
        return Rounds(times_us={"usual": usual, "worst": [20.0, 300.0, 2500.0]}, pulses=[])


@pytest.mark.parametrize(
    ("flags", "counted"), [(torch.tensor([1, 0, 1, 1], dtype=torch.int32), (4, 3)), (None, (0, 0))]
)
def test_the_worst_case_is_told_over_the_usual_one_of_the_same_rounds(
    flags: torch.Tensor | None, counted: tuple[int, int]
) -> None:
    job = Outgrow(problem=PROBLEM, source=render.render(PROBLEM, kernels.variant()), seed=7)
    worst_case = job.time(PairedTimer(), lambda: None, lambda: None, GOOD, flags)  # type: ignore[arg-type]
    assert (worst_case.slowdown, worst_case.median_us, worst_case.rounds, worst_case.max_error) == (2.5, 300.0, 3, 1e-3)
    assert (worst_case.tiles, worst_case.redone) == counted
