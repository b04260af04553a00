"""Samples of finals that no GPU ever took."""

from __future__ import annotations

from samples import H200, problem

from autoattn.cache.finals_samples import Samples
from autoattn.core.paired_stats import Pulse, Round


def taken(winner: str, rounds: int = 131) -> Samples:
    """Raw samples of finals with that winner."""
    return Samples(
        problem=problem(),
        fingerprint=H200.fingerprint,
        winner=winner,
        seed=0,
        kernels={"finalist 0": winner, "finalist 1": "aa" * 8},
        rounds=tuple(
            Round(
                times_us={"finalist 1": 401.25, "sdpa": 430.0 + number, "finalist 0": 400.0},
                pulse=Pulse(clock_mhz=1755, slowed=False, temperature_c=60, reasons=("power cap",)),
            )
            for number in range(rounds)
        ),
    )
