"""Parts of a chart: scales, ticks, marks and lines, in percent of the plot, so that it fits any width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Marks that can be told apart without their colour; the page defines each once (report/charts.html.j2).
SHAPES = ("circle", "diamond", "square", "triangle", "cross", "ring", "down")
STEPS = (1.0, 2.0, 5.0)  # of ticks, in each decade
FEWEST_TICKS, MOST_TICKS = 3, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A number on an axis."""

    at: float  # percent from the axis's beginning
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point of a chart."""

    x: float  # percent from the left
    y: float  # percent from the top
    style: str  # class of its colour
    shape: str
    title: str  # what a pointer that rests on it is told
    low: float | None = None  # ends of its interval along x, percent
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line through a chart."""

    path: str  # of an SVG, in thousandths of the plot
    style: str
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One word of a legend."""

    style: str
    shape: str  # of SHAPES, or "line"
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A chart with two axes."""

    title: str
    x_label: str  # with its unit
    y_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[Mark, ...] = ()
    lines: tuple[Line, ...] = ()
    legend: tuple[Key, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Numbers -> percent of an axis."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], *, log: bool = False, room: float = 0.06) -> Scale:
        """A scale that holds all values, with some room at both ends."""
        finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
        low, high = (min(finite), max(finite)) if finite else (1.0, 10.0)
        if log:
            factor = max((high / low) ** room, 1.08)
            return cls(low=low / factor, high=high * factor, log=True)
        more = (high - low) * room or max(abs(high), 1.0) * room
        return cls(low=low - more, high=high + more)

    def at(self, value: float) -> float:
        """Percent from the beginning, cut at both ends."""
        if self.log:
            part = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return 100.0 * min(1.0, max(0.0, part))

    def ticks(self) -> tuple[Tick, ...]:
        """Round numbers, as few as tell the scale."""
        values = self._log_values() if self.log else self._values()
        return tuple(Tick(at=self.at(value), label=label(value)) for value in values)

    def _values(self) -> list[float]:
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / FEWEST_TICKS))
        step *= next((more for more in (5.0, 2.0) if (self.high - self.low) / (step * more) >= FEWEST_TICKS), 1.0)
        first = math.ceil(self.low / step)
        return [place * step for place in range(first, math.floor(self.high / step) + 1)]

    def _log_values(self) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1.0,), (1.0, 3.0), STEPS, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
            values = [step * 10.0**decade for decade in decades for step in steps]
            values = [value for value in values if self.low <= value <= self.high]
            if len(values) >= FEWEST_TICKS:
                return values[:: max(1, -(-len(values) // MOST_TICKS))]
        return self._values()  # less than a factor of about two


def label(value: float) -> str:
    """A tick's number: three digits at most, thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def path(points: Sequence[tuple[float, float]]) -> str:
    """An SVG path through points in percent."""
    return "M" + "L".join(f"{x * 10:.0f} {y * 10:.0f}" for x, y in points) if points else ""


def staircase(points: Sequence[tuple[float, float]], end: float) -> str:
    """An SVG path that keeps each point's height until the next one, and the last one's until `end`."""
    if not points:
        return ""
    first, *rest = points
    steps = "".join(f"H{x * 10:.0f}V{y * 10:.0f}" for x, y in rest)
    return f"M{first[0] * 10:.0f} {first[1] * 10:.0f}{steps}H{end * 10:.0f}"
