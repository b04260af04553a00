"""What a report says, gathered from cache files before a template lays it out."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoattn import render, space
from autoattn.entry import CacheEntry
from autoattn.errors import AutoattnError
from autoattn.problem import Bias, DType, Modifiers, Numerics, Problem
from autoattn.report import figures
from autoattn.report.finals import Contestant, contestants
from autoattn.rounds import Interval
from autoattn.trial import Evidence, Measurement

if TYPE_CHECKING:
    from autoattn.cache import CacheFile


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
    lead: float  # its time over the kernel's; above 1 the kernel is faster
    interval: Interval | None  # of the lead; None where the rounds were too few, or before they were kept
    max_error: float | None
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
    timings: tuple[Timing, ...]
    contestants: tuple[Contestant, ...]  # of the finals, with error, energy and resources; empty where nobody knows
    parts: tuple[Part, ...]
    reproduce: str  # the command that searches again
    render: str  # the command that writes the kernel
    source: str  # the kernel's text; empty when it cannot be rendered or another card shows it
    source_note: str  # why it is empty, or in what it differs from what the entry holds
    same_as: str  # anchor of the card that shows the same source


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The measured kernels of one section against one rival."""

    name: str
    problems: int
    mean: float  # geometric mean of the leads
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One device and operation."""

    device: str
    full_name: str
    fingerprint: str
    op: str
    anchor: str
    measured: tuple[Card, ...]
    predicted: tuple[Card, ...]
    standings: tuple[Standing, ...]
    outcomes: dict[str, int] = field(default_factory=dict)  # outcome -> trials, over all problems
    versions: tuple[str, ...] = ()


def gather(files: list[CacheFile]) -> list[Section]:
    """Turns cache files into sections, one for each device and operation."""
    sections = []
    for file in sorted(files, key=lambda file: file.device):
        for op in sorted({entry.problem.op.value for entry in file.entries.values()}):
            sections.append(_section(file, op))
    return sorted(sections, key=lambda section: not section.measured)  # what was measured comes first


def _section(file: CacheFile, op: str) -> Section:
    shown: dict[str, str] = {}  # source -> anchor of the card that shows it
    entries = [entry for entry in file.entries.values() if entry.problem.op.value == op]
    entries.sort(key=lambda entry: entry.problem.order)
    # Measured first, so that the source stands beside a measurement where it can.
    entries.sort(key=lambda entry: entry.evidence is not Evidence.MEASURED)
    cards = [_card(entry, file.device, shown) for entry in entries]
    outcomes: Counter[str] = Counter()
    for entry in entries:
        outcomes.update(entry.search.outcomes)
    return Section(
        device=file.device,
        full_name=file.fingerprint.split("/")[0] or file.device,
        fingerprint=file.fingerprint,
        op=op,
        anchor=_anchor(file.device, op),
        measured=tuple(card for card in cards if card.entry.evidence is Evidence.MEASURED),
        predicted=tuple(card for card in cards if card.entry.evidence is not Evidence.MEASURED),
        standings=_standings(entries),
        outcomes=dict(outcomes.most_common()),
        versions=tuple(sorted({versions(entry) for entry in entries})),
    )


def versions(entry: CacheEntry) -> str:
    """The versions that an entry was made with, on one line."""
    return ", ".join(f"{name} {version}" for name, version in sorted(entry.versions.items()))


def _anchor(*words: str) -> str:
    return "-".join("".join(sign if sign.isalnum() and sign.isascii() else "-" for sign in word) for word in words)


def _card(entry: CacheEntry, device: str, shown: dict[str, str]) -> Card:
    anchor = _anchor(device, entry.problem.key)
    source, note = _source(entry)
    same_as = shown.get(source, "") if source else ""
    if source:
        shown.setdefault(source, anchor)
    return Card(
        anchor=anchor,
        entry=entry,
        timings=_timings(entry),
        contestants=contestants(entry, device),
        parts=_parts(entry),
        reproduce=reproduce(entry, device),
        render=rendering(entry, device),
        source="" if same_as else source,
        source_note=note,
        same_as=same_as,
    )


def reproduce(entry: CacheEntry, device: str) -> str:
    """The command that searches an entry again."""
    return (
        f"autoattn tune --device {shlex.quote(device)} {arguments(entry.problem)}"
        f" --effort {shlex.quote(entry.search.effort)} --seed {entry.search.seed}"
        + (f" --objective {shlex.quote(entry.search.objective)}" if entry.search.objective != "time" else "")
    )


def rendering(entry: CacheEntry, device: str) -> str:
    """The command that writes an entry's kernel."""
    return f"autoattn render --device {shlex.quote(device)} {arguments(entry.problem)} --out kernel.py"


def arguments(problem: Problem) -> str:
    """The problem as options of the command line."""
    words = [f"--dtype {problem.dtype.value} --batch {problem.batch} --heads {problem.heads_q}"]
    if problem.heads_kv != problem.heads_q:
        words.append(f"--heads-kv {problem.heads_kv}")
    words.append(f"--seq-q {problem.seq_q}")
    if problem.seq_kv != problem.seq_q:
        words.append(f"--seq-kv {problem.seq_kv}")
    words.append(f"--head-dim {problem.head_dim}")
    if problem.head_dim_v != problem.head_dim:
        words.append(f"--head-dim-v {problem.head_dim_v}")
    words.append(f"--mask {problem.mask} --layout {problem.layout.value}")
    if problem.packed:
        words.append(f"--tokens {problem.tokens_q}x{problem.tokens_kv}")
    if problem.dtype is DType.FLOAT32:
        words.append(f"--precision {problem.precision.value}")
    if problem.numerics is not Numerics.ANY:
        words.append(f"--numerics {problem.numerics.value}")
    words += [f"--modifier {shlex.quote(modifier)}" for modifier in _modifiers(problem.modifiers)]
    return " ".join(words)


def _modifiers(modifiers: Modifiers) -> list[str]:
    found = [name for name in ("softcap", "alibi", "sinks", "dropout") if getattr(modifiers, name)]
    found += [f"bias={modifiers.bias.value}"] if modifiers.bias is not Bias.NONE else []
    return [*found, *([f"score_mod={modifiers.score_mod}"] if modifiers.score_mod else [])]


def _source(entry: CacheEntry) -> tuple[str, str]:
    """The winner's text, and what a reader must know of it."""
    try:
        if not space.load(entry.template).holds(entry.params):
            return "", f"The kernel cannot be rendered: it was tuned in another search space of {entry.template}."
        source = render.render(entry.problem, entry.variant)
    except (AutoattnError, OSError) as error:
        return "", f"The kernel cannot be rendered: {error}"
    if source.digest != entry.source_digest:
        return source.text, (
            f"The template has changed since: this is {source.digest}, the entry rests on {entry.source_digest}."
        )
    return source.text, ""


def _timings(entry: CacheEntry) -> tuple[Timing, ...]:
    """The kernel and its rivals, fastest first; empty where nothing was measured."""
    own = entry.measurement
    if own is None:
        return ()
    error = entry.verdict.max_error if entry.verdict is not None else None
    rows: list[tuple[str, bool, Measurement, float | None, Interval | None]]
    rows = [(entry.template, True, own, error, None)]
    rows += [(r.name, False, r.measurement, r.max_error, r.lead) for r in entry.rivals]
    slowest = max(measurement.median_us for _, _, measurement, _, _ in rows)
    timings = [
        Timing(
            name=name,
            kernel=kernel,
            chosen=name == figures.choice(entry),
            median_us=measurement.median_us,
            p20_us=measurement.p20_us,
            p80_us=measurement.p80_us,
            tflops=measurement.tflops,
            lead=interval.ratio if interval is not None else measurement.median_us / own.median_us,
            interval=interval,
            max_error=error,
            share=_share(measurement.median_us, slowest),
        )
        for name, kernel, measurement, error, interval in rows
    ]
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
    leads: dict[str, list[float]] = {}
    for entry in entries:
        if entry.evidence is Evidence.MEASURED:
            for rival in entry.rivals:
                leads.setdefault(rival.name, []).append(figures.lead(entry, rival))
    return tuple(
        Standing(
            name=name,
            problems=len(ratios),
            mean=figures.geometric_mean(ratios),
            lowest=min(ratios),
            highest=max(ratios),
        )
        for name, ratios in sorted(leads.items())
    )
