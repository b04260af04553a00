"""Jobs of a tune that no compiler and no card takes, for the tests of scripts; imported by workers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from autoattn.core.cache_entry import Rival, WorstCase
from autoattn.core.paired_stats import Round
from autoattn.core.trial import Energy, Measurement, StaticReport, Verdict
from autoattn.hardware.timer import summary
from autoattn.search.gpu_jobs import Finished, Screened, finalist_name

RIGHT = Verdict(ok=True, checks=1, max_error=1e-3, rms_error=1e-4, allowed=4e-3)
ROUNDS = 40
RIVAL = "sdpa-flash"


def time_us(digest: str) -> float:
    """A kernel's time: any, but always the same."""
    return 50.0 + int(digest[:6], 16) % 1000 / 10.0


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Compiles nothing."""

    source: Any
    arch: int

    def run(self, memory: dict[Any, Any]) -> StaticReport:
        return StaticReport(
            digest=self.source.digest, arch=self.arch, registers=128, spilled_bytes=0, shared_bytes=4096, num_warps=4,
            code_bytes=4096, loop={"HMMA": 64, "MUFU.EX2": 64, "FFMA": 128}, code=self.source.digest,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Makes nothing."""

    problem: Any

    def run(self, memory: dict[Any, Any]) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Screen:
    """Makes a time of the text."""

    problem: Any
    source: Any
    verdict: Any
    best_us: Any

    def run(self, memory: dict[Any, Any]) -> Screened:
        return Screened(verdict=RIGHT, median_us=time_us(self.source.digest), samples=9)


@dataclass(frozen=True, kw_only=True)
class Final:
    """Rounds with a little noise, and one rival."""

    problem: Any
    finalists: Any
    seconds: float
    seed: int
    energy_seconds: float = 0.0
    peers: Any = ()

    def run(self, memory: dict[Any, Any]) -> Finished:
        rng = random.Random(self.seed)
        times = {finalist_name(place): time_us(finalist.digest) for place, finalist in enumerate(self.finalists)} | {
            RIVAL: 160.0
        }
        taken = [
            Round(times_us={name: each * rng.gauss(1.0, 0.001) for name, each in times.items()}) for _ in range(ROUNDS)
        ]

        def measurement_of(name: str) -> Measurement:
            return summary([sample.times_us[name] for sample in taken], self.problem.flops(), [])

        energy = Energy(joules=0.05, watts=500.0) if self.energy_seconds else None
        count = len(self.finalists)
        return Finished(
            verdicts=(RIGHT,) * count,
            measurements=tuple(measurement_of(finalist_name(place)) for place in range(count)),
            rivals=(
                Rival(name=RIVAL, measurement=measurement_of(RIVAL), max_error=1e-3, rms_error=1e-4, energy=energy),
            ),
            rounds=tuple(taken),
            energies=(energy,) * count if energy is not None else (),
        )


@dataclass(frozen=True, kw_only=True)
class Outgrow:
    """A worst case without a launch."""

    problem: Any
    source: Any
    seed: int

    def run(self, memory: dict[Any, Any]) -> WorstCase:
        return WorstCase(median_us=300.0, slowdown=2.0, rounds=3, max_error=1e-3)


PLANTED = {job_class.__name__: job_class for job_class in (Inspect, Prepare, Screen, Final, Outgrow)}
