"""What changed against a baseline cache: each problem's time now over its time there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autoattn.cache import inventory
from autoattn.cache.file_format import CacheFile
from autoattn.cache.precedence import DAY
from autoattn.core.cache_entry import CacheEntry
from autoattn.report import figures

KINDS = ("slower", "faster", "other evidence", "new", "gone", "as fast")  # in the order of the report


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One problem that differs, or a card that does."""

    kind: str  # of KINDS
    name: str  # the problem, else the card
    before_us: float | None  # None where there is no such entry
    after_us: float | None
    ratio: float | None  # time now over time there; below 1 it is faster now
    words: str  # in what the entries differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All problems that differ from the baseline, the most slowed down first."""

    folder: str
    changes: tuple[Change, ...]
    same: int  # problems whose entries are equal

    @property
    def counts(self) -> dict[str, int]:
        """Problems of each kind that there is."""
        counted = Counter(change.kind for change in self.changes)
        return {kind: counted[kind] for kind in KINDS if counted[kind]} | {"the same": self.same}


def compare(folder: str, before: Iterable[CacheFile], after: Iterable[CacheFile]) -> Comparison:
    """The changes from the entries of `folder` to those of a report."""
    before, after = list(before), list(after)
    differences = inventory.differences(before, after)
    changes = [_change(difference) for difference in differences]
    changes.sort(key=lambda change: (KINDS.index(change.kind), -(change.ratio or 0.0)))
    changed = sum(difference.second is not None for difference in differences)
    return Comparison(folder=folder, changes=tuple(changes), same=sum(len(file.entries) for file in after) - changed)


def _change(difference: inventory.Difference) -> Change:
    name = str(difference.problem) if difference.problem is not None else "card"
    return Change(
        kind=_kind(difference),
        name=f"{difference.device} {name}",
        before_us=_time(difference.first),
        after_us=_time(difference.second),
        ratio=difference.ratio,
        words="; ".join(difference.words),
    )


def _kind(difference: inventory.Difference) -> str:
    if difference.first is None and difference.second is not None:
        return "new"
    if difference.second is None and difference.first is not None:
        return "gone"
    if difference.ratio is None:
        return "other evidence"
    # Two days differ by as much for one kernel on one card.
    return "slower" if difference.ratio > 1 + DAY else "faster" if difference.ratio < 1 - DAY else "as fast"


def _time(entry: CacheEntry | None) -> float | None:
    return entry.time_us if entry is not None else None


def words_of(time_us: float | None) -> str:
    """A time of a change as text; "-" where there is none."""
    return "-" if time_us is None else figures.microseconds(time_us)
