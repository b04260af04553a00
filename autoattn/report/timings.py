"""One problem's kernel and its rivals as rows, and the units of the GPU as the model sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoattn.core.cache_entry import CacheEntry
from autoattn.core.paired_stats import Interval
from autoattn.core.trial import Energy, Measurement
from autoattn.report import figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One row of a problem's comparison."""

    name: str
    kernel: bool  # the entry's own kernel, not a rival
    chosen: bool  # what a call runs on
    median_us: float
    p20_us: float
    p80_us: float
    tflops: float
    lead: float | Interval  # its time over the kernel's; above 1 the kernel is faster
    max_error: float | None
    joules: float | None  # of one call
    watts: float | None
    share: float  # its time over the slowest one's, 0..1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one unit of the GPU would need alone, as the model sees it."""

    name: str
    time_us: float
    share: float  # over the longest part's, 0..1
    bound: bool  # the unit that the model expects to bind

    def __str__(self) -> str:
        return f"{self.name} {figures.microseconds(self.time_us)} us"


def timings(entry: CacheEntry) -> tuple[Timing, ...]:
    """The kernel and its rivals, fastest first; empty where nothing was measured."""
    own = entry.measurement
    if own is None:
        return ()
    slowest = max([own.median_us, *(rival.measurement.median_us for rival in entry.rivals)])

    def row(
        name: str, measurement: Measurement, lead: float | Interval, error: float | None, energy: Energy | None
    ) -> Timing:
        return Timing(
            name=name,
            kernel=measurement is own,
            chosen=name == figures.choice(entry),
            median_us=measurement.median_us,
            p20_us=measurement.p20_us,
            p80_us=measurement.p80_us,
            tflops=measurement.tflops,
            lead=lead,
            max_error=error,
            joules=energy.joules if energy is not None else None,
            watts=energy.watts if energy is not None else None,
            share=_share(measurement.median_us, slowest),
        )

    best = entry.finals.finalists[0] if entry.finals is not None else None
    error = best.max_error if best is not None else entry.verdict.max_error if entry.verdict is not None else None
    rows = [row(entry.template, own, 1.0, error, best.energy if best is not None else None)]
    for rival in entry.rivals:
        rows.append(row(rival.name, rival.measurement, figures.lead_over(entry, rival), rival.max_error, rival.energy))
    return tuple(sorted(rows, key=lambda timing: (timing.median_us, timing.name)))


def parts(entry: CacheEntry) -> tuple[Part, ...]:
    """The units of the GPU by the time that each would need alone; empty where nothing was predicted."""
    if entry.prediction is None:
        return ()
    alone = entry.prediction.parts_us
    longest = max(alone.values(), default=0.0)
    return tuple(
        Part(name=name, time_us=time_us, share=_share(time_us, longest), bound=name == entry.prediction.bound)
        for name, time_us in sorted(alone.items(), key=lambda part: -part[1])
    )


def _share(value: float, largest: float) -> float:
    share = value / largest if largest else 0.0
    return min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0
