"""What a report says, gathered from cache files and journals before a template lays it out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoattn.cache import sister_cards
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.paired_stats import Interval
from autoattn.core.trial import Evidence
from autoattn.cost_model import accuracy, published_times
from autoattn.cost_model.published_times import Published
from autoattn.report import attendance, charts, figures, groups, history, listing, strips, timings
from autoattn.report.charts import Detail, Parallel
from autoattn.report.commands import longer, rendering, reproduce
from autoattn.report.finals_table import Contestant, contestants
from autoattn.report.history import History, Importance, Reason
from autoattn.report.listing import Choice, Difference, Listing, Shelf
from autoattn.report.plot import Plot
from autoattn.report.strips import Strips
from autoattn.report.timings import Part, Timing

if TYPE_CHECKING:
    from autoattn.cache.file_format import CacheFile

Homes = Mapping[tuple[str, str], Path]  # device and problem key -> the cache folder of the entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Everything that a report says of one problem on one device."""

    anchor: str
    entry: CacheEntry
    best: tuple[str, float | Interval] | None  # the fastest rival from elsewhere
    peak_share: float | None  # of the card's peak rate; None where that is unknown
    timings: tuple[Timing, ...]
    contestants: tuple[Contestant, ...]  # of the finals, with error, energy and resources; empty where nobody knows
    parts: tuple[Part, ...]
    choices: tuple[Choice, ...]
    reproduce: str  # the command that searches again
    longer: str  # the command that searches with the largest effort
    render: str  # the command that writes the kernel
    source: Listing
    difference: Difference | None  # from the runner-up; None without one
    history: History
    progress: Plot | None
    parallel: tuple[tuple[str, Parallel], ...]  # template -> its variants
    published: Published | None  # what another kernel took on such a card, beside a prediction

    @property
    def kernel_joules(self) -> float | None:
        """Of one call of the kernel; None where nobody counted."""
        return next((timing.joules for timing in self.timings if timing.kernel), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The measured kernels of one kind and dtype of a section against one rival."""

    group: str  # kind and dtype
    name: str
    problems: int
    mean: float  # geometric mean of the leads
    lowest: float
    highest: float
    faster: int  # problems on which the kernel is faster than the rival
    even: int | None  # on which nobody is known to be: the interval holds 1; None where no entry has intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The problems of a section that were measured, or those that were predicted: they never share a table."""

    measured: bool
    cards: tuple[Card, ...]
    faster: int  # problems on which the kernel beats the best rival that it met
    even: int
    with_rivals: int
    met: str  # whom the kernels met in the finals
    attendance: tuple[str, ...]  # sentences: who took part in the finals, and who did not and why
    strips: Strips | None
    roofline: Plot | None
    outcomes: dict[str, int]  # outcome -> trials, over all problems
    reasons: tuple[Reason, ...]
    importances: tuple[Importance, ...]
    missing: dict[str, int]  # why a search's trials are not here -> problems

    @property
    def trials(self) -> int:
        """Of all problems."""
        return sum(self.outcomes.values())

    @property
    def energy(self) -> bool:
        """Whether any kernel or rival has its energy counted."""
        return any(timing.joules is not None for card in self.cards for timing in card.timings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One device and operation."""

    device: str
    full_name: str
    fingerprint: str
    op: str
    anchor: str
    measured: Ranking | None
    predicted: Ranking | None
    standings: tuple[Standing, ...]
    versions: tuple[str, ...] = ()
    facts: Device | None = None  # what is known of the card; None where nobody described it

    @property
    def rankings(self) -> list[Ranking]:
        """What is there, measured first."""
        return [ranking for ranking in (self.measured, self.predicted) if ranking is not None]

    @property
    def sisters(self) -> list[str]:
        """The cards that measured entries serve too, where nobody measured on those."""
        return sister_cards.names_of(self.facts) if self.measured is not None and self.facts is not None else []

    @property
    def quality(self) -> str:
        """How well predictions for such a card rank, as far as it is known."""
        return accuracy.known(self.facts.arch if self.facts is not None else 0)


def gather(files: list[CacheFile], homes: Homes | None = None) -> list[Section]:
    """Turns cache files into sections, one for each device and operation.

    Args:
        homes: the cache folder of each entry, where the journals of the searches lie; None leaves them out.
    """
    sections = []
    count = sum(len(file.entries) for file in files)
    shelf, detail = Shelf.among(count), Detail.among(count)
    for file in sorted(files, key=lambda file: (file.device, groups.OPERATIONS[file.op.value])):
        operations = {entry.problem.op.value for entry in file.entries.values()}
        for op in sorted(operations, key=groups.OPERATIONS.__getitem__):
            sections.append(_section(file, op, homes or {}, shelf, detail))
    return sorted(sections, key=lambda section: section.measured is None)  # what was measured comes first


def _section(file: CacheFile, op: str, homes: Homes, shelf: Shelf, detail: Detail) -> Section:
    device = charts.device_of(file.device)
    entries = [entry for entry in file.entries.values() if entry.problem.op.value == op]
    entries.sort(key=lambda entry: groups.order(entry.problem))
    measured = [entry for entry in entries if entry.evidence is Evidence.MEASURED]
    predicted = [entry for entry in entries if entry.evidence is not Evidence.MEASURED]
    # Measured first, so that the source stands beside a measurement where it can.
    rankings = [
        _ranking([_card(entry, file.device, device, homes, shelf, detail) for entry in kind], device) if kind else None
        for kind in (measured, predicted)
    ]
    return Section(
        device=file.device,
        full_name=file.fingerprint.split("/")[0] or file.device,
        fingerprint=file.fingerprint,
        op=op,
        anchor=_anchor(file.device, op),
        measured=rankings[0],
        predicted=rankings[1],
        standings=_standings(measured),
        versions=tuple(sorted({figures.versions(entry) for entry in entries})),
        facts=device,
    )


def _ranking(cards: list[Card], device: Device | None) -> Ranking:
    entries = [card.entry for card in cards]
    measured = entries[0].evidence is Evidence.MEASURED
    leads = [card.best[1] for card in cards if card.best is not None]
    outcomes: Counter[str] = Counter()
    for entry in entries:
        outcomes.update(entry.search.outcomes)
    histories = [card.history for card in cards]
    return Ranking(
        measured=measured,
        cards=tuple(cards),
        faster=sum(figures.standing(lead) == "good" for lead in leads),
        even=sum(map(figures.even, leads)),
        with_rivals=len(leads),
        met=attendance.met([card.entry for card in cards if card.best is not None]),
        attendance=tuple(attendance.sentences(entries)),
        strips=strips.strips(entries) if measured else None,
        roofline=charts.roofline(entries, device, measured=measured),
        outcomes=dict(outcomes.most_common()),
        reasons=tuple(history.reasons(histories)),
        importances=tuple(history.importances(histories)),
        missing=dict(Counter(_kind_of_missing(search.missing) for search in histories if search.missing).most_common()),
    )


def _kind_of_missing(words: str) -> str:
    """The same words for all problems whose journal is not there."""
    if words.startswith("there is no journal"):
        return "there is no journal beside the cache file: it stays on the machine that tuned"
    return words


def _anchor(*words: str) -> str:
    return "-".join("".join(sign if sign.isalnum() and sign.isascii() else "-" for sign in word) for word in words)


def _card(entry: CacheEntry, name: str, device: Device | None, homes: Homes, shelf: Shelf, detail: Detail) -> Card:
    anchor = _anchor(name, entry.problem.key)
    search = history.read(homes.get((name, entry.problem.key)), name, entry)
    rival = figures.best_rival(entry)
    templates = sorted({trial.variant.template for trial in search.trials})
    drawn = ((name, charts.parallel(search, name, detail.lines // len(templates))) for name in templates)
    return Card(
        anchor=anchor,
        entry=entry,
        best=None if rival is None else (rival[0], figures.lead_over(entry, figures.others(entry)[0])),
        peak_share=charts.peak_share(entry, device),
        timings=timings.timings(entry),
        contestants=contestants(entry, name),
        parts=timings.parts(entry),
        choices=listing.choices(entry),
        reproduce=reproduce(entry, name),
        longer=longer(entry, name),
        render=rendering(entry, name),
        source=shelf.listing(entry, anchor),
        difference=shelf.difference(entry, anchor),
        history=search,
        progress=charts.progress(search, detail, measured=entry.evidence is Evidence.MEASURED),
        parallel=tuple((template, plot) for template, plot in drawn if plot is not None),
        published=None if entry.measurement is not None else published_times.time_of(entry.problem, name),
    )


def _standings(entries: list[CacheEntry]) -> tuple[Standing, ...]:
    leads: dict[tuple[str, str], list[float | Interval]] = {}
    for entry in entries:  # in the order of their groups
        group = f"{groups.kind_of(entry.problem)}, {groups.dtype_of(entry.problem)}"
        for rival in sorted(entry.rivals, key=lambda rival: rival.name):
            leads.setdefault((group, rival.name), []).append(figures.lead_over(entry, rival))
    ordered = {group: None for group, _ in leads}
    return tuple(
        Standing(
            group=group,
            name=name,
            problems=len(ratios),
            mean=figures.geometric_mean(map(figures.middle, ratios)),
            lowest=min(map(figures.middle, ratios)),
            highest=max(map(figures.middle, ratios)),
            faster=sum(figures.standing(lead) == "good" for lead in ratios),
            even=sum(map(figures.even, ratios)) if any(isinstance(lead, Interval) for lead in ratios) else None,
        )
        for group in ordered
        for (own, name), ratios in sorted(leads.items())
        if own == group
    )
