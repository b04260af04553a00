"""Filters and sorts cache entries for `autoattn show`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoattn.errors import UsageError

if TYPE_CHECKING:
    from autoattn.core.cache_entry import CacheEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFilter:
    """Which entries a table lists, and in which order."""

    evidence: str | None = None  # measured or predicted; None for either, as of the others
    operation: str | None = None  # forward or backward
    route: str | None = None  # what a call runs on: kernel, a template, or a backend of PyTorch's
    only: tuple[str, ...] = ()  # texts, one of which the printed name of the problem holds
    sort: str = "problem"  # or time (shortest first), tflops (highest first), ratio (highest first)
    reverse: bool = False

    def check_route(self, entries: Iterable[CacheEntry]) -> None:
        """Refuses a route that no template, no backend and no entry has.

        Raises:
            UsageError: the route is unknown.
        """
        from autoattn.baselines import pytorch_sdpa
        from autoattn.codegen import resources
        from autoattn.core.problem import Op

        templates = [name for op in Op for name in resources.template_names(op)]
        known = {"kernel", *templates, pytorch_sdpa.SDPA, *pytorch_sdpa.BACKENDS, *(entry.choice for entry in entries)}
        if self.route is not None and self.route not in known:
            raise UsageError(f"--route must be of {', '.join(sorted(known))}, got {self.route!r:.60}; correct it")

    def apply(self, entries: Iterable[CacheEntry]) -> list[CacheEntry]:
        """The entries that pass, sorted; those without a ratio stand last when that is what counts."""
        passing = sorted((entry for entry in entries if self._passes(entry)), key=lambda entry: entry.problem.order)
        if self.sort == "problem":
            return passing[::-1] if self.reverse else passing
        ranked = [(_rank(entry, self.sort), entry) for entry in passing]
        known = [(rank, entry) for rank, entry in ranked if rank is not None]
        known.sort(key=lambda pair: pair[0], reverse=self.reverse)
        return [entry for _, entry in known] + [entry for rank, entry in ranked if rank is None]

    def _passes(self, entry: CacheEntry) -> bool:
        from autoattn.report import figures

        name = str(entry.problem)
        return (
            self.evidence in (None, entry.evidence.value)
            and self.operation in (None, entry.problem.op.value)
            and self.route in (None, entry.choice, figures.choice(entry))
            and (not self.only or any(text in name for text in self.only))
        )


def _rank(entry: CacheEntry, sort: str) -> float | None:
    """What an entry is sorted by, the least first; None where it has no such number."""
    from autoattn.report import figures

    if sort == "time":
        return entry.time_us
    if sort == "tflops":
        return -entry.tflops
    best = figures.best_rival(entry)
    return None if best is None else -best[1]
