"""The finals of one problem as a table: time, error, energy and resources of each contestant, and who is not beaten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoattn.baselines.pytorch_sdpa import SDPA
from autoattn.core import device_profiles
from autoattn.core.cache_entry import OURS, CacheEntry, Finalist
from autoattn.core.device import Device
from autoattn.core.paired_stats import Interval
from autoattn.core.problem import DType, Precision, Problem
from autoattn.core.trial import Energy
from autoattn.core.variant import Variant
from autoattn.cost_model import occupancy
from autoattn.errors import DeviceError
from autoattn.report import figures

HEAD = (
    "Contestant", "Median us", "Over the winner's", "Max error", "RMS error", "RMS over SDPA's", "mJ a call", "W",
    "Registers", "Spilled", "Shared", "Blocks per SM", "Of tensor peak", "Of bandwidth", "Place",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One row: a finalist, or a rival, which has no resources of ours."""

    name: str
    winner: bool = False
    tied: bool = False
    median_us: float
    lead: Interval | None  # its time over the winner's
    max_error: float | None
    rms_error: float | None
    error_ratio: float | None  # its RMS error over SDPA's on the same inputs
    energy: Energy | None
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None
    occupancy: int | None = None  # blocks that fit on one SM
    tensor_share: float | None  # of the tensor cores' peak, by the kept pairs
    bandwidth_share: float | None  # of the memory's peak, each input and output moved once
    front: bool = False  # nobody here is at least as good in time, error and energy and better in one of them

    @property
    def cells(self) -> tuple[str, ...]:
        """What stands under HEAD."""
        energy = (f"{self.energy.joules * 1e3:.3g}", f"{self.energy.watts:.0f}") if self.energy else ("-", "-")
        marks = [word for word, there in (("winner", self.winner), ("tied", self.tied and not self.winner)) if there]
        return (
            self.name,
            figures.microseconds(self.median_us),
            "-" if self.lead is None else figures.within(self.lead),
            figures.error(self.max_error),
            figures.error(self.rms_error),
            "-" if self.error_ratio is None else f"{self.error_ratio:.2f}",
            *energy,
            *(
                "-" if number is None else f"{number:,}"
                for number in (self.registers, self.spilled_bytes, self.shared_bytes)
            ),
            "-" if self.occupancy is None else str(self.occupancy),
            *("-" if share is None else f"{share:.0%}" for share in (self.tensor_share, self.bandwidth_share)),
            ", ".join([*marks, *(["front"] if self.front else [])]),
        )


def columns(contestants: Sequence[Contestant]) -> list[tuple[str, ...]]:
    """HEAD and the cells of each row, without the columns in which no row has anything."""
    rows = [HEAD, *(row.cells for row in contestants)]
    filled = [any(cell not in ("", "-") for cell in column[1:]) for column in zip(*rows, strict=True)]
    return [tuple(cell for cell, kept in zip(row, filled, strict=True) if kept) for row in rows]


def contestants(entry: CacheEntry, device: str) -> tuple[Contestant, ...]:
    """The finalists and the rivals, fastest first; none where the entry does not tell of its finals."""
    if entry.finals is None:
        return ()
    try:
        card = device_profiles.named(device)
    except DeviceError:  # a card that nobody described: its peaks are not known
        card = None
    base = next((rival.rms_error for rival in entry.rivals if rival.name == SDPA), None)
    rows = [_kernel(entry, finalist, card, base) for finalist in entry.finals.finalists]
    rows += [
        Contestant(
            name=rival.name,
            median_us=rival.measurement.median_us,
            lead=rival.lead,
            max_error=rival.max_error,
            rms_error=rival.rms_error,
            error_ratio=_ratio(rival.rms_error, base),
            energy=rival.energy,
            tensor_share=_tensor_share(entry.problem, card, rival.measurement.median_us),
            bandwidth_share=_bandwidth_share(entry.problem, card, rival.measurement.median_us),
        )
        for rival in entry.rivals
        if rival.name not in OURS  # they are finalists
    ]
    unbeaten = front([_point(row) for row in rows])
    return tuple(
        sorted(
            (_marked(row, there) for row, there in zip(rows, unbeaten, strict=True)),
            key=lambda row: (row.median_us, row.name),
        )
    )


def front(points: Sequence[tuple[float | None, ...]]) -> list[bool]:
    """Whether each point is on the Pareto front: no other is as small in all coordinates and smaller in one.

    A coordinate that some point does not know counts for nobody.
    """
    places = range(len(points[0]) if points else 0)
    known = [place for place in places if all(point[place] is not None for point in points)]
    plain = [tuple(point[place] or 0.0 for place in known) for point in points]
    return [
        not any(rival != point and all(a <= b for a, b in zip(rival, point, strict=True)) for rival in plain)
        for point in plain
    ]


def _point(row: Contestant) -> tuple[float | None, ...]:
    return row.median_us, row.rms_error, row.energy.joules if row.energy is not None else None


def _marked(row: Contestant, unbeaten: bool) -> Contestant:
    return replace(row, front=unbeaten)


def _kernel(entry: CacheEntry, finalist: Finalist, card: Device | None, base: float | None) -> Contestant:
    facts = (finalist.registers, finalist.shared_bytes, finalist.num_warps)
    fitting = None
    if card is not None and None not in facts:
        fitting = occupancy.occupancy(card, *(fact or 0 for fact in facts))
    return Contestant(
        name=_name(entry, finalist),
        winner=finalist.source_digest == entry.source_digest,
        tied=finalist.tied,
        median_us=finalist.median_us,
        lead=finalist.lead,
        max_error=finalist.max_error,
        rms_error=finalist.rms_error,
        error_ratio=_ratio(finalist.rms_error, base),
        energy=finalist.energy,
        registers=finalist.registers,
        spilled_bytes=finalist.spilled_bytes,
        shared_bytes=finalist.shared_bytes,
        occupancy=fitting,
        tensor_share=_tensor_share(entry.problem, card, finalist.median_us),
        bandwidth_share=_bandwidth_share(entry.problem, card, finalist.median_us),
    )


def _name(entry: CacheEntry, finalist: Finalist) -> str:
    """Its tile, where the entry has its parameters, and how its digest begins."""
    known: dict[str, Variant] = {candidate.source_digest: candidate.variant for candidate in entry.candidates}
    variant = {**known, entry.source_digest: entry.variant}.get(finalist.source_digest)
    short = finalist.source_digest[:8]
    return f"{variant.template} {figures.tile_of(variant)} {short}" if variant is not None else short


def _ratio(error: float | None, base: float | None) -> float | None:
    return error / base if error is not None and base else None


def _tensor_share(problem: Problem, card: Device | None, time_us: float) -> float | None:
    peak = _peak(problem, card.peak_flops) if card is not None else None
    return problem.flops() / time_us * 1e6 / peak if peak else None


def _bandwidth_share(problem: Problem, card: Device | None, time_us: float) -> float | None:
    return problem.bytes() / time_us * 1e6 / card.bandwidth if card is not None and card.bandwidth else None


def _peak(problem: Problem, peaks: Mapping[str, float]) -> float | None:
    """Flop per second of the tensor cores in the problem's own type; None where there is no such rate."""
    if problem.dtype is DType.FLOAT8:  # twice the rate of 16 bits on every card that has it, by their data sheets
        return 2 * peaks.get(DType.FLOAT16.value, 0.0)
    if problem.dtype is DType.FLOAT32:
        return peaks.get("tf32") if problem.precision is not Precision.IEEE else None
    return peaks.get(problem.dtype.value)
