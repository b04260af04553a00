"""Turns the facts of a report into what its charts draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoattn.core import device_profiles
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.problem import DType, Precision, Problem
from autoattn.core.roofline import peak_flops
from autoattn.core.trial import Outcome, Trial
from autoattn.core.variant import Value
from autoattn.errors import DeviceError
from autoattn.report import figures
from autoattn.report.history import History
from autoattn.report.plot import SHAPES, Key, Line, Mark, Plot, Scale, Tick, path, staircase
from autoattn.search.importance import params_of

# Time over the best -> class of a line and its words; the last is for all that are slower.
BANDS = ((1.02, "q0", "within 2% of the best"), (1.1, "q1", "within 10%"), (1.5, "q2", "within 50%"),
         (3.0, "q3", "within 3x"), (math.inf, "q4", "slower"))  # fmt: skip
FAILED = {
    Outcome.INFEASIBLE: ("s6", "cross"),
    Outcome.COMPILE_ERROR: ("s3", "down"),
    Outcome.LAUNCH_ERROR: ("s4", "down"),
    Outcome.WRONG_RESULT: ("s7", "diamond"),
    Outcome.TIMEOUT: ("s1", "square"),
    Outcome.CRASH: ("s7", "triangle"),
    Outcome.TOO_SLOW: ("s6", "down"),
    Outcome.INTERPRETER_CRASH: ("s1", "triangle"),
}
OURS = "s0"
DASHES = ("dashed", "dotted", "long", "dashdot")  # classes of the roofs, so that each differs from the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """How much each problem's charts may draw, so that reports of many problems stay small."""

    marks: int  # trials of a search history
    lines: int  # variants of parallel coordinates, of all templates

    @classmethod
    def among(cls, problems: int) -> Detail:
        """As much as a report of so many problems has room for."""
        count = max(1, problems)
        return cls(marks=min(300, max(40, 6000 // count)), lines=min(120, max(20, 3000 // count)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One parameter of parallel coordinates, or the time."""

    at: float  # percent from the left
    name: str
    ticks: tuple[Tick, ...]  # percent from the top


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Parallel coordinates: a line for each variant, through its value of each parameter."""

    axes: tuple[Axis, ...]
    lines: tuple[Line, ...]  # the slowest first, so that the fastest lie on top
    legend: tuple[Key, ...]
    note: str


# --- roofline ---------------------------------------------------------------------------------------------------------


def device_of(name: str) -> Device | None:
    """What is known of a card; None where nobody described it."""
    try:
        return device_profiles.named(name)
    except DeviceError:
        return None


def peak_share(entry: CacheEntry, device: Device | None) -> float | None:
    """The share of the card's peak that a kernel reaches; None where that is unknown."""
    top = peak_flops(entry.problem, device)
    return entry.tflops * 1e12 / top if top else None


def roofline(entries: Sequence[CacheEntry], device: Device | None, *, measured: bool) -> Plot | None:
    """Rate over operations per byte, below what the card's tensor cores and memory allow; None without a profile."""
    tops = {label: top for entry in entries for label, top in _roofs(entry.problem, device)}
    if not tops or device is None or not device.bandwidth:
        return None
    intensities = [entry.problem.flops() / entry.problem.bytes() for entry in entries]
    rates = [entry.tflops for entry in entries]
    ridge = max(tops.values()) / device.bandwidth
    x = Scale.over([*intensities, ridge / 2, ridge * 2], log=True)
    rates += [entry.tflops / best[1] for entry in entries if measured and (best := figures.best_rival(entry))]
    y = Scale.over([*rates, *(top / 1e12 for top in tops.values())], log=True, room=0.1)
    peaks = {name: f"data sheet's peak of {name}: {top / 1e12:,.0f} TFLOP/s" for name, top in tops.items()}
    dashes = {name: DASHES[place % len(DASHES)] for place, name in enumerate(tops)}
    lines = [
        Line(path=_roof(top, device.bandwidth, x, y), style=f"roof {dashes[name]}", title=peaks[name])
        for name, top in tops.items()
    ]
    marks = [
        mark
        for entry, intensity in zip(entries, intensities, strict=True)
        for mark in _points(entry, intensity, x, y)
        if measured or mark.style == OURS
    ]
    words = "kernel" if measured else "kernel, as predicted"
    legend = [Key(style=OURS, shape="circle", words=words)]
    if any(mark.style != OURS for mark in marks):
        legend.append(Key(style="s6", shape="ring", words="best rival"))
    legend += [Key(style=f"roof {dash}", shape="line", words=peaks[name]) for name, dash in dashes.items()]
    return Plot(
        title="Roofline",
        x_label="operations per byte of device memory, FLOP/B",
        y_label="TFLOP/s",
        x_ticks=x.ticks(),
        y_ticks=_upward(y),
        marks=tuple(marks),
        lines=tuple(lines),
        legend=tuple(legend),
        note=f"Memory: {device.bandwidth / 1e9:,.0f} GB/s. Only pairs that the mask keeps count as operations; bytes "
        "are those of each input read once and of the output written once.",
    )


def _roofs(problem: Problem, device: Device | None) -> list[tuple[str, float]]:
    top = peak_flops(problem, device)
    name = "tf32" if problem.dtype is DType.FLOAT32 and problem.precision is not Precision.IEEE else problem.dtype.value
    return [(name, top)] if top else []


def _roof(top: float, bandwidth: float, x: Scale, y: Scale) -> str:
    ends = sorted({x.low, min(max(top / bandwidth, x.low), x.high), max(y.low * 1e12 / bandwidth, x.low), x.high})
    points = [(end, min(top, end * bandwidth) / 1e12) for end in ends]
    return path([(x.at(end), 100 - y.at(rate)) for end, rate in points if rate >= y.low])


def _points(entry: CacheEntry, intensity: float, x: Scale, y: Scale) -> list[Mark]:
    marks = []
    best = figures.best_rival(entry)
    if best is not None:
        rate = entry.tflops / best[1]
        words = f"{entry.problem}: {best[0]}, {figures.tflops(rate)} TFLOP/s"
        marks.append(Mark(x=x.at(intensity), y=100 - y.at(rate), style="s6", shape="ring", title=words))
    words = f"{entry.problem}: {figures.tflops(entry.tflops)} TFLOP/s at {intensity:,.0f} FLOP/B"
    own = Mark(x=x.at(intensity), y=100 - y.at(entry.tflops), style=OURS, shape="circle", title=words)
    return [*marks, own]


def _upward(scale: Scale) -> tuple[Tick, ...]:
    """The ticks of an axis that runs from the bottom up."""
    return tuple(Tick(at=100 - tick.at, label=tick.label) for tick in scale.ticks())


# --- the search of one problem ----------------------------------------------------------------------------------------


def progress(history: History, detail: Detail, *, measured: bool) -> Plot | None:
    """Each trial's time and the best so far; failed trials stand at the top. None without trials that worked."""
    timed = [(number, trial.time_us) for number, trial in enumerate(history.trials, start=1) if trial.time_us]
    if not timed:
        return None
    x = Scale(low=0.0, high=len(history.trials) + 1.0)
    y = Scale.over([time_us for _, time_us in timed], log=True, room=0.12)
    best = [(x.at(number), 100 - y.at(trial.time_us or 0.0)) for number, trial in history.improvements]
    failed = {trial.outcome for trial in history.trials if trial.outcome is not Outcome.OK}
    shown = _thinned(history, detail.marks)
    notes = ["Failed trials stand at the upper edge."] * bool(failed)
    notes += [f"{len(shown)} of {len(history.trials)} trials are drawn."] * (len(shown) < len(history.trials))
    templates = sorted({trial.variant.template for trial in history.trials})
    looks = {name: (f"s{2 * place}", SHAPES[place]) for place, name in enumerate(templates)}
    legend = [Key(style=style, shape=shape, words=name) for name, (style, shape) in looks.items()]
    legend.append(Key(style="best", shape="line", words="best so far"))
    legend += [
        Key(style=FAILED[outcome][0], shape=FAILED[outcome][1], words=outcome.value)
        for outcome in Outcome
        if outcome in failed
    ]
    return Plot(
        title="Search history",
        x_label="trial",
        y_label="us, first look" if measured else "us, predicted",
        x_ticks=tuple(tick for tick in x.ticks() if float(tick.label.replace(",", "")).is_integer()),
        y_ticks=_upward(y),
        marks=tuple(_trial(number, trial, x, y, looks) for number, trial in shown),
        lines=(Line(path=staircase(best, 100.0), style="best"),),
        legend=tuple(legend),
        note=" ".join(notes),
    )


def _thinned(history: History, most: int) -> list[tuple[int, Trial]]:
    """Trials with their numbers: all improvements, and of the others each n-th."""
    numbered = list(enumerate(history.trials, start=1))
    if len(numbered) <= most:
        return numbered
    kept = {number for number, _ in history.improvements}
    step = -(-len(numbered) // max(1, most - len(kept)))
    return [(number, trial) for number, trial in numbered if number in kept or number % step == 0]


def _trial(number: int, trial: Trial, x: Scale, y: Scale, looks: dict[str, tuple[str, str]]) -> Mark:
    if trial.time_us is None:
        style, shape = FAILED.get(trial.outcome, ("s6", "cross"))
        words = f"{number}: {trial.outcome.value}, {figures.printable(trial.detail)[:200]}"
        return Mark(x=x.at(number), y=2.0, style=style, shape=shape, title=words)
    style, shape = looks[trial.variant.template]
    words = f"{number}: {figures.microseconds(trial.time_us)} us, {figures.tile_of(trial.variant)}"
    return Mark(x=x.at(number), y=100 - y.at(trial.time_us), style=style, shape=shape, title=words)


# --- parallel coordinates ---------------------------------------------------------------------------------------------


def parallel(history: History, template: str, most: int) -> Parallel | None:
    """The trials of one template that worked; None where there are fewer than three, or nothing varied.

    Args:
        most: lines: the fastest, and of the others as many as fit, evenly.
    """
    timed = [trial for trial in history.trials if trial.time_us is not None and trial.variant.template == template]
    params = _varied(timed)
    if len(timed) < 3 or not params:
        return None
    timed.sort(key=lambda trial: trial.time_us or 0.0)
    shown, rest = timed[: most // 2], timed[most // 2 :]
    shown += rest[:: max(1, -(-len(rest) // max(1, most - len(shown))))] if rest else []
    times = Scale.over([trial.time_us or 0.0 for trial in shown], log=True)
    width = 100.0 / len(params)
    axes = [
        Axis(at=width * (place + 0.5) * 0.94, name=name, ticks=_choices(values))
        for place, (name, values) in enumerate(params.items())
    ]
    lines = [_variant(trial, place, params, axes, times, shown[0]) for place, trial in enumerate(shown)]
    used = {line.style for line in lines}
    axes.append(Axis(at=97.0, name="us", ticks=_upward(times)))
    left_out = len(timed) - len(shown)
    failed = sum(trial.time_us is None and trial.variant.template == template for trial in history.trials)
    note = f"{len(shown)} variants" + (f" of {len(timed)}: the fastest, and of the others each n-th" * bool(left_out))
    return Parallel(
        axes=tuple(axes),
        lines=tuple(reversed(lines)),
        legend=tuple(Key(style=style, shape="line", words=words) for _, style, words in BANDS if style in used),
        note=note + f"; {failed} that failed are not drawn" * bool(failed),
    )


def _varied(trials: Iterable[Trial]) -> dict[str, list[Value]]:
    """Parameters that took more than one value, with these in order."""
    seen: dict[str, dict[Value, None]] = {}
    for trial in trials:
        for name, value in params_of(trial.variant).items():
            seen.setdefault(name, {})[value] = None
    ordered = {name: sorted(values, key=lambda value: (isinstance(value, str), value)) for name, values in seen.items()}
    return {name: values for name, values in ordered.items() if len(values) > 1}


def _choices(values: Sequence[Value]) -> tuple[Tick, ...]:
    return tuple(Tick(at=_height(place, len(values)), label=str(value)) for place, value in enumerate(values))


def _height(place: int, count: int) -> float:
    """The smallest value lies at the bottom."""
    return 94.0 - 88.0 * place / (count - 1)


def _variant(
    trial: Trial, place: int, params: dict[str, list[Value]], axes: Sequence[Axis], times: Scale, best: Trial
) -> Line:
    spread = (place * 7 % 13 - 6) * 0.35  # lines through the same value lie side by side
    known = params_of(trial.variant)
    points = [
        (axis.at, _height(values.index(known[name]), len(values)) + spread)
        for axis, (name, values) in zip(axes, params.items(), strict=True)
        if name in known
    ]
    time_us = trial.time_us or 0.0
    style = next(style for limit, style, _ in BANDS if time_us <= limit * (best.time_us or 1.0))
    words = f"{figures.microseconds(time_us)} us: {figures.tile_of(trial.variant)}"
    return Line(path=path([*points, (97.0, 100 - times.at(time_us))]), style=style, title=words)
