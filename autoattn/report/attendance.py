"""Who was in the finals beside our kernels, and who was not: what it means to be the fastest there.

Entries of older versions do not record who was absent. Their finals met PyTorch's backends alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autoattn.baselines import external
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.trial import Evidence
from autoattn.report import figures

OLD = "met PyTorch's backends alone"
UNRECORDED = "who else was installed is not recorded"
REASONS = 4  # of one peer's absence that are shown; the others are counted


@dataclass(slots=True, kw_only=True)
class Attendance:
    """One rival over the finals of several problems."""

    name: str
    took_part: int = 0  # problems
    absent: Counter[str] = field(default_factory=Counter)  # why -> problems

    def __str__(self) -> str:
        """What it missed, as a part of a sentence; "" where that is nothing."""
        shown = self.absent.most_common(REASONS)
        words = [f"{reason} ({count})" for reason, count in shown]
        rest = self.absent.total() - sum(count for _, count in shown)
        return "; ".join([*words, *([f"other reasons ({rest})"] if rest else [])])


def title(name: str) -> str:
    """What a sentence calls a rival: FlashAttention-4 (fa4)."""
    peer = external.PEERS.get(name)
    return f"{peer.title} ({name})" if peer is not None and peer.title else name


def of(entries: Iterable[CacheEntry]) -> list[Attendance]:
    """All that met our kernels, or could have; PyTorch's backends first, then the peers of other packages."""
    rows: dict[str, Attendance] = {}
    for entry in entries:
        for rival in figures.others(entry):
            rows.setdefault(rival.name, Attendance(name=rival.name)).took_part += 1
        for name, reason in (entry.absent or {}).items():
            rows.setdefault(name, Attendance(name=name)).absent[reason] += 1
    return sorted(rows.values(), key=lambda row: (row.name in external.FINALS_PEERS, row.name))


def met(entries: Sequence[CacheEntry]) -> str:
    """Whom our kernels met in the finals, each with its problems where these were not all; "nobody"."""
    names = [
        title(row.name) + (f" in {row.took_part}" if row.took_part < len(entries) else "")
        for row in of(entries)
        if row.took_part
    ]
    return ", ".join(names) or "nobody"


def sentences(entries: Iterable[CacheEntry]) -> list[str]:
    """Who took part in the finals of measured entries and who did not; none where nothing was measured.

    There is a sentence for each peer of another package, and for each backend that is recorded as absent.
    """
    measured = [entry for entry in entries if entry.evidence is Evidence.MEASURED]
    total = len(measured)
    alone = [entry for entry in measured if not figures.others(entry)]
    old = [entry for entry in measured if entry.absent is None and figures.others(entry)]
    lines = [
        f"{title(row.name)} took part in {row.took_part} of {_problems(total)}"
        + (f"; absent: {row}" if row.absent else "")
        for row in of(measured)
        if row.absent or row.name in external.FINALS_PEERS
    ]
    lines += [f"{len(old)} of {_problems(total)} {OLD}: {UNRECORDED}"] if old else []
    return lines + ([f"{len(alone)} of {_problems(total)} met nobody"] if alone else [])


def sentence(entry: CacheEntry) -> str:
    """Whom the kernel of one measured entry met, and who was absent and why."""
    names = met([entry])
    if entry.absent is None:
        return f"{OLD} ({names}); {UNRECORDED}" if figures.others(entry) else f"met {names}; {UNRECORDED}"
    missed = "; ".join(f"{title(name)}: {reason}" for name, reason in sorted(entry.absent.items()))
    return f"met {names}" + (f"; absent: {missed}" if missed else "; nobody was absent")


def _problems(count: int) -> str:
    return f"{count} problem{'' if count == 1 else 's'}"
