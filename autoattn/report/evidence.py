"""What an entry may hold beside its times: intervals, finals, energy. Entries of older versions have none of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoattn.entry import CacheEntry, Rival
from autoattn.rivals import SDPA


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """A rival's time over the kernel's: above 1 the kernel is faster."""

    ratio: float
    low: float | None = None  # ends of its confidence interval; None where the rounds were too few, or are not told
    high: float | None = None

    @property
    def even(self) -> bool:
        """Whether its interval holds 1, so that nobody is known to be faster."""
        return self.low is not None and self.high is not None and self.low <= 1.0 <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A kernel of the finals."""

    digest: str
    winner: bool
    tied: bool
    median_us: float
    lead: Lead | None
    max_error: float | None
    rms_error: float | None
    joules: float | None
    registers: int | None
    spilled_bytes: int | None
    shared_bytes: int | None


def lead(entry: CacheEntry, rival: Rival) -> Lead:
    """A rival's time over the kernel's, with its interval where the entry has one."""
    interval = getattr(rival, "lead", None)
    if interval is not None:
        return Lead(ratio=interval.ratio, low=interval.low, high=interval.high)
    return Lead(ratio=rival.measurement.median_us / entry.time_us)


def finalists(entry: CacheEntry) -> tuple[Finalist, ...]:
    """The kernels of the finals, the winner first; empty where the entry does not tell them."""
    finals = getattr(entry, "finals", None)
    if finals is None:
        return ()
    return tuple(
        Finalist(
            digest=one.source_digest,
            winner=place == 0,
            tied=bool(one.tied),
            median_us=one.median_us,
            lead=Lead(ratio=one.lead.ratio, low=one.lead.low, high=one.lead.high) if one.lead is not None else None,
            max_error=one.max_error,
            rms_error=one.rms_error,
            joules=joules(one),
            registers=one.registers,
            spilled_bytes=one.spilled_bytes,
            shared_bytes=one.shared_bytes,
        )
        for place, one in enumerate(finals.finalists)
    )


def rounds(entry: CacheEntry) -> str:
    """How many rounds the finals took and whether they decided, in words; empty where the entry does not tell."""
    finals = getattr(entry, "finals", None)
    if finals is None:
        return ""
    thrown = f", {finals.discarded} discarded since the card was slowed down" if finals.discarded else ""
    decided = "more would have changed no place" if finals.decided else "the time was used up before all was decided"
    return f"{finals.rounds} rounds{thrown}; {decided}"


def objective(entry: CacheEntry) -> str:
    """What the winner is best at."""
    return str(getattr(entry.search, "objective", "time"))


def joules(one: Any) -> float | None:
    """Of one call; None where nobody counted."""
    energy = getattr(one, "energy", None)
    return float(energy.joules) if energy is not None else None


def watts(one: Any) -> float | None:
    """On average while calls follow one another; None where nobody counted."""
    energy = getattr(one, "energy", None)
    return float(energy.watts) if energy is not None else None


def kernel_energy(entry: CacheEntry) -> Any:
    """What holds the winner's energy: its measurement, or its place in the finals; None where neither does."""
    if getattr(entry.measurement, "energy", None) is not None:
        return entry.measurement
    finals = getattr(entry, "finals", None)
    return finals.finalists[0] if finals is not None and finals.finalists else None


def kernel_error(entry: CacheEntry) -> float | None:
    """The winner's largest error at full size, as the rivals' is counted; None where the entry does not tell it."""
    found = finalists(entry)
    return found[0].max_error if found else None


def error_over_sdpa(entry: CacheEntry) -> float | None:
    """The winner's largest error over that of PyTorch's own attention, at full size; None where either is missing."""
    own = kernel_error(entry)
    theirs = next((rival.max_error for rival in entry.rivals if rival.name == SDPA), None)
    return own / theirs if own is not None and theirs else None
