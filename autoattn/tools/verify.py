"""Verifies cached entries: on the card when it is here, else by digests and the interpreter.

On the card the kernel passes the gate once more and then meets its runners-up and rivals in rounds, as in the finals.
Ratios within those rounds say whether it still is the fastest. How it stands to its own time of old is a comparison of
two days, which differ by a few percent on one card: less than DAY is no finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autoattn.cache import store
from autoattn.cache.precedence import DAY
from autoattn.codegen import search_space, template_facts
from autoattn.core import paired_stats
from autoattn.core.cache_entry import KERNEL, CacheEntry, Finding, Mark
from autoattn.core.device import Device
from autoattn.core.paired_stats import Interval, Round
from autoattn.core.problem import Problem
from autoattn.core.trial import Evidence, Outcome
from autoattn.core.variant import Variant
from autoattn.errors import UsageError
from autoattn.hardware import nvidia
from autoattn.runtime.plan.kind_rules import ROUTES
from autoattn.search import entry_builder, finals
from autoattn.search.gpu_jobs import Finished, Screened, finalist_name
from autoattn.search.search_options import PROFILES, Effort
from autoattn.search.trial_pipeline import Steps, Workshop
from autoattn.workers.worker_pool import Failure

HELD = (Finding.SAME, Finding.FASTER)
_BEFORE = "before"  # the time of old, as a contestant of each round


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What became of one entry."""

    entry: CacheEntry
    finding: Finding
    detail: str
    choice: str = ""  # of OVERTAKEN: the rival that is the fastest now, where it is none of our kernels
    versions: dict[str, str]  # with which it was found; the driver's only on the card

    @property
    def problem(self) -> Problem:
        """The entry's."""
        return self.entry.problem

    @property
    def ok(self) -> bool:
        """Whether the entry holds."""
        return self.finding in HELD

    @property
    def mark(self) -> Mark | None:
        """What the entry is to be marked with: nothing where it holds, which only the card can say.

        That an entry is stale each call sees by itself, and what was not checked is as it was.
        """
        if self.finding in (Finding.STALE, Finding.UNCHECKED) or (self.ok and "driver" not in self.versions):
            return self.entry.mark
        if self.ok:
            return None
        return Mark(finding=self.finding, detail=self.detail, choice=self.choice, versions=self.versions)


def verify(entries: Iterable[CacheEntry], device: Device) -> list[Verification]:
    """Checks that each entry is up to date, then the kernel's numbers and, on the card, its time.

    Raises:
        HostError: the machine lacks what every check needs, as a folder that can be written; nothing is marked.
    """
    card = nvidia.present()
    measured = card is not None and card.fingerprint == device.fingerprint
    entries = list(entries)
    with Workshop(device, measured=measured) as shop:
        verifier = Verifier(device, shop, entry_builder.versions(on_card=measured))
        if measured:
            for entry in entries:  # all of them, while the first are looked at
                next(verifier.compiling(entry), None)
        return [verifier.verified(entry) for entry in entries]


@dataclass(frozen=True, slots=True)
class Verifier:
    """Checks one entry after the other."""

    device: Device
    shop: Workshop
    versions: dict[str, str]

    def verified(self, entry: CacheEntry) -> Verification:
        """What became of an entry."""
        if (stale := self._why_stale(entry)) is not None:
            return self._verification(entry, Finding.STALE, stale)
        # Ahead of the check on the card, else the GPU's worker compiles.
        runners_up = self.shop.alone(self.compiling(entry)) if self.shop.measured else []
        checked = self.shop.check(entry.problem, entry.variant)
        if isinstance(checked, Failure):
            return self._verification(entry, _finding_of(checked), f"{checked.outcome.value}: {checked.detail}")
        if not isinstance(checked, Screened):
            detail = f"digests agree; {checked.checks} checks of its structure in the interpreter"
            return self._verification(
                entry, *((Finding.SAME, detail) if checked.ok else (Finding.WRONG, checked.reason))
            )
        if entry.evidence is Evidence.PREDICTED:
            detail = f"{checked.verdict.checks} checks on the GPU; predicted, and not measured yet"
            return self._verification(entry, Finding.SAME, f"{detail}: {checked.median_us:.1f} us at a first look")
        result = self.shop.alone(
            self.shop.final(
                entry.problem, [entry.variant, *runners_up], seconds=PROFILES[Effort.QUICK].final_seconds, seed=0
            )
        )
        if isinstance(result, Failure):
            return self._verification(
                entry, _finding_of(result), f"{result.outcome.value} at full size: {result.detail}"
            )
        if not result.verdicts[0].ok:
            return self._verification(entry, Finding.WRONG, f"at full size: {result.verdicts[0].reason}")
        if template_facts.keeps_first_max(entry.variant):
            worst = self.shop.alone(self.shop.outgrow(entry.problem, entry.variant, seed=0))
            if isinstance(worst, Failure):
                return self._verification(
                    entry, _finding_of(worst), f"in its worst case, {worst.outcome.value}: {worst.detail}"
                )
        outcome = met(entry, result, runners_up)
        return replace(self._verification(entry, outcome.finding, outcome.detail), choice=outcome.choice)

    def compiling(self, entry: CacheEntry) -> Steps[list[Variant]]:
        """Compiles an entry's kernel and its runners-up; gives those runners-up that there still are."""
        if self._why_stale(entry) is not None:
            return []
        runners_up = [
            candidate.variant
            for candidate in entry.candidates
            if self._why_stale(
                replace(
                    entry,
                    template=candidate.template,
                    params=candidate.params,
                    source_digest=candidate.source_digest,
                    finals=None,
                )
            )
            is None
        ]
        taken = yield from self.shop.compiled(entry.problem, [entry.variant, *runners_up])
        return [variant for variant in runners_up if variant in taken and variant != entry.variant]

    def _why_stale(self, entry: CacheEntry) -> str | None:
        if (stale := store.why_stale(entry)) is not None:
            return stale
        try:
            reason = search_space.load(entry.template).why_infeasible(entry.variant, entry.problem, self.device)
        except UsageError as error:
            return str(error)
        return f"infeasible by now: {reason}" if reason is not None else None

    def _verification(self, entry: CacheEntry, finding: Finding, detail: str) -> Verification:
        changes = [
            f"{name} {entry.versions[name]} -> {version}"
            for name, version in self.versions.items()
            if entry.versions.get(name, version) != version
        ]
        detail += f" ({', '.join(changes)})" if changes else ""
        return Verification(entry=entry, finding=finding, detail=detail, versions=self.versions)


def _finding_of(failure: Failure) -> Finding:
    if failure.outcome is Outcome.INTERPRETER_CRASH or failure.outcome.of_environment:
        return Finding.UNCHECKED
    return Finding.WRONG if failure.outcome is Outcome.WRONG_RESULT else Finding.BROKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """What the rounds say of an entry's choice."""

    finding: Finding
    detail: str
    choice: str = ""  # as in Verification


def met(entry: CacheEntry, result: Finished, others: Sequence[Variant]) -> Met:
    """What the rounds say: whether the choice still is the fastest, and how it stands to its time of old.

    Args:
        result: of a contest of the entry's kernel, the `others` in this order, and the rivals.
    """
    counted = paired_stats.good(result.rounds)
    runs = finalist_name(0) if entry.choice == KERNEL else entry.choice
    room = result.verdicts[0].allowed * finals.RIVAL_ERROR
    names = {finalist_name(0): "the kernel"}
    names |= {
        finalist_name(place): f"the runner-up {variant}"
        for place, variant in enumerate(others, start=1)
        if result.verdicts[place].ok
    }
    names |= {
        rival.name: rival.name for rival in result.rivals if rival.name in ROUTES and (rival.max_error or 0.0) <= room
    }
    if not counted or runs not in names:
        return Met(finding=Finding.BROKEN, detail=f"{entry.choice} gives no right answer to it any more")
    leads = {name: paired_stats.interval(counted, runs, name, finalists=len(names)) for name in names if name != runs}
    ahead = {name: lead for name, lead in leads.items() if lead is not None and _is_ahead(lead)}
    if ahead:
        first = max(ahead, key=lambda name: ahead[name].ratio)
        detail = f"{names[first]} is faster by {_share(ahead[first])}"
        return Met(finding=Finding.OVERTAKEN, detail=detail, choice=first if first in ROUTES else "")
    return _since(entry, counted, runs, result.verdicts[0].checks)


def _is_ahead(lead: Interval) -> bool:
    """Whether the other one is faster, by more than two tunes differ."""
    return lead.low > 1.0 + paired_stats.INDIFFERENT and lead.ratio > 1.0 + finals.MARGIN


def _since(entry: CacheEntry, counted: Sequence[Round], runs: str, checks: int) -> Met:
    """How the choice stands to its time of old."""
    rival = next((rival for rival in entry.rivals if rival.name == entry.choice), None)
    old_us = entry.time_us if rival is None else rival.measurement.median_us
    lead = paired_stats.interval(
        [Round(times_us={**round_.times_us, _BEFORE: old_us}) for round_ in counted], runs, _BEFORE, finalists=1
    )
    if lead is None:
        return Met(finding=Finding.SAME, detail=f"right; too few rounds to speak of its time, {old_us:.1f} us before")
    words = f"{lead.ratio * old_us:.1f} us, {old_us:.1f} us before"
    if lead.low > 1.0 + DAY:
        return Met(finding=Finding.SLOWER, detail=f"by {_share(lead)}: {words}")
    if lead.high < 1.0 - DAY:
        return Met(finding=Finding.FASTER, detail=f"by {_share(lead)}: {words}")
    return Met(finding=Finding.SAME, detail=f"right and the fastest; {words}")


def _share(lead: Interval) -> str:
    """By how much a ratio is off 1, with its interval: 3.0% (2.1 to 4.0)."""
    ratio, *ends = (100 * abs(end - 1.0) for end in (lead.ratio, lead.low, lead.high))
    return f"{ratio:.1f}% ({min(ends):.1f} to {max(ends):.1f})"
