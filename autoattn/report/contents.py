"""What a report says, gathered from cache files and journals before a template lays it out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoattn.cache import sister_cards
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.paired_stats import Interval
from autoattn.core.trial import Energy, Evidence, Measurement
from autoattn.cost_model import accuracy, published_times
from autoattn.cost_model.published_times import Published
from autoattn.report import attendance, charts, figures, history, listing
from autoattn.report.charts import Detail, Parallel, Strips
from autoattn.report.commands import rendering, reproduce
from autoattn.report.finals_table import Contestant, contestants
from autoattn.report.history import History, Importance, Reason
from autoattn.report.listing import Choice, Difference, Listing, Shelf
from autoattn.report.plot import Plot

if TYPE_CHECKING:
    from autoattn.cache.file_format import CacheFile

Homes = Mapping[tuple[str, str], Path]  # device and problem key -> the cache folder of the entry


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
    """The measured kernels of one section against one rival."""

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
    mean: float | None  # geometric mean of the leads over each problem's best rival; None where there is none
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
    shelf, detail = Shelf(), Detail.among(sum(len(file.entries) for file in files))
    for file in sorted(files, key=lambda file: file.device):
        for op in sorted({entry.problem.op.value for entry in file.entries.values()}):
            sections.append(_section(file, op, homes or {}, shelf, detail))
    return sorted(sections, key=lambda section: section.measured is None)  # what was measured comes first


def _section(file: CacheFile, op: str, homes: Homes, shelf: Shelf, detail: Detail) -> Section:
    device = charts.device_of(file.device)
    entries = [entry for entry in file.entries.values() if entry.problem.op.value == op]
    entries.sort(key=lambda entry: entry.problem.order)
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
        mean=figures.geometric_mean(map(figures.middle, leads)) if leads else None,
        faster=sum(figures.standing(lead) == "good" for lead in leads),
        even=sum(map(figures.even, leads)),
        with_rivals=len(leads),
        met=attendance.met([card.entry for card in cards if card.best is not None]),
        attendance=tuple(attendance.sentences(entries)),
        strips=charts.strips(entries) if measured else None,
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
        timings=_timings(entry),
        contestants=contestants(entry, name),
        parts=_parts(entry),
        choices=listing.choices(entry),
        reproduce=reproduce(entry, name),
        render=rendering(entry, name),
        source=shelf.listing(entry, anchor),
        difference=shelf.difference(entry, anchor),
        history=search,
        progress=charts.progress(search, detail, measured=entry.evidence is Evidence.MEASURED),
        parallel=tuple((template, plot) for template, plot in drawn if plot is not None),
        published=None if entry.measurement is not None else published_times.time_of(entry.problem, name),
    )


def _timings(entry: CacheEntry) -> tuple[Timing, ...]:
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
    timings = [row(entry.template, own, 1.0, error, best.energy if best is not None else None)]
    for rival in entry.rivals:
        timings.append(
            row(rival.name, rival.measurement, figures.lead_over(entry, rival), rival.max_error, rival.energy)
        )
    return tuple(sorted(timings, key=lambda timing: (timing.median_us, timing.name)))


def _parts(entry: CacheEntry) -> tuple[Part, ...]:
    if entry.prediction is None:
        return ()
    parts = entry.prediction.parts_us
    longest = max(parts.values(), default=0.0)
    return tuple(
        Part(name=name, time_us=time_us, share=_share(time_us, longest), bound=name == entry.prediction.bound)
        for name, time_us in sorted(parts.items(), key=lambda part: -part[1])
    )


def _share(value: float, largest: float) -> float:
    share = value / largest if largest else 0.0
    return min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0


def _standings(entries: list[CacheEntry]) -> tuple[Standing, ...]:
    leads: dict[str, list[float | Interval]] = {}
    for entry in entries:
        for rival in entry.rivals:
            leads.setdefault(rival.name, []).append(figures.lead_over(entry, rival))
    return tuple(
        Standing(
            name=name,
            problems=len(ratios),
            mean=figures.geometric_mean(map(figures.middle, ratios)),
            lowest=min(map(figures.middle, ratios)),
            highest=max(map(figures.middle, ratios)),
            faster=sum(figures.standing(lead) == "good" for lead in ratios),
            even=sum(map(figures.even, ratios)) if any(isinstance(lead, Interval) for lead in ratios) else None,
        )
        for name, ratios in sorted(leads.items())
    )
