"""A bench as one SVG that needs nothing else: a group of bars for each problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from autoattn import report
from autoattn.bench.kernel_results import Row, Run
from autoattn.report import figures

WIDTH, LEFT, RIGHT = 960, 370, 50  # of the picture, of the problems' names, and for numbers behind the longest bar
TOP, BAR, GAP = 76, 10, 9  # head, one bar, and between two problems
FAR = 8.0  # from this ratio of the rows' best rates on, bars are drawn as shares of their own row's best
OURS = "autoattn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One contestant of one problem."""

    name: str
    style: str  # class of its colour
    y: float
    width: float
    label: str
    best: bool  # the fastest of its row


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One problem."""

    name: str
    ratio: str  # ours over the best peer
    y: float  # of the middle
    bars: tuple[Bar, ...]


def svg_text(run: Run) -> str:
    """The chart; rows in which nothing was timed are left out."""
    groups, height, shares = _groups(run)
    bars = "bars: share of the row's fastest; numbers: TFLOP/s" if shares else "TFLOP/s of the pairs that are kept"
    title = f"{run.machine['card']}, {run.options.inputs.value} inputs"
    return drawn(title, f"{bars}; behind a problem: ours over its best peer", "TFLOP/s", groups, height)


def drawn(title: str, unit: str, measure: str, groups: list[Group], height: float) -> str:
    """The picture of some groups.

    Args:
        unit: what bars and numbers mean, in words.
        measure: the unit behind each number.
    """
    present = {bar.name: bar.style for group in groups for bar in group.bars}
    return (
        report.environment(autoescape=True)
        .get_template("chart.svg.j2")
        .render(
            title=figures.printable(title),
            unit=unit,
            measure=measure,
            groups=groups,
            legend=[(name, style, LEFT + 105 * place) for place, (name, style) in enumerate(present.items())],
            width=WIDTH + max(0, 105 * len(present) + LEFT - WIDTH),
            height=height,
            left=LEFT,
            bar=BAR,
        )
    )


def barred(
    cases: Mapping[str, Mapping[str, float]],
    *,
    styles: Mapping[str, str],
    card: str,
    title: str,
    unit: str,
    measure: str,
    best: Callable[[Iterable[float]], float],
    shares: bool,
) -> str:
    """A group of bars for each case, by its name; in a case the numbers by theirs.

    Args:
        styles: of each number's name.
        unit, measure: as of `drawn`.
        best: max or min, of a case's numbers.
        shares: whether bars are shares of their case's longest, or all on one scale.
    """
    groups, y = [], float(TOP)
    widest = max((number for numbers in cases.values() for number in numbers.values()), default=1.0)
    for case, numbers in cases.items():
        full = max(numbers.values()) if shares else widest
        bars = tuple(
            Bar(
                name=name,
                style=styles[name],
                y=y + BAR * place,
                width=(WIDTH - LEFT - RIGHT) * number / (full or 1.0),
                label=figures.tflops(number),
                best=number == best(numbers.values()),
            )
            for place, (name, number) in enumerate(numbers.items())
        )
        groups.append(Group(name=case, ratio="", y=y + BAR * len(bars) / 2, bars=bars))
        y += BAR * len(bars) + GAP
    return drawn(f"{card}: {title}", unit, measure, groups, y + 8)


def _groups(run: Run) -> tuple[list[Group], float, bool]:
    """The groups, the height of all, and whether bars are shares of their own row's best."""
    timed = [(row, rates) for row in run.rows if (rates := _rates(row))]
    tops = [max(rates.values()) for _, rates in timed]
    shares = bool(tops) and max(tops) > FAR * min(tops)
    styles = {name: f"c{1 + place}" for place, name in enumerate(run.peers)} | {OURS: "c0"}
    groups, y = [], float(TOP)
    for (row, rates), top in zip(timed, tops, strict=True):
        full = top if shares else max(tops)
        bars = tuple(
            Bar(
                name=name,
                style=styles[name],
                y=y + BAR * place,
                width=(WIDTH - LEFT - RIGHT) * rate / full,
                label=figures.tflops(rate),
                best=rate == top,
            )
            for place, (name, rate) in enumerate(rates.items())
        )
        ratio = "" if row.ratio is None else figures.times(row.ratio)
        groups.append(Group(name=str(row.problem), ratio=ratio, y=y + BAR * len(bars) / 2, bars=bars))
        y += BAR * len(bars) + GAP
    return groups, y + 8, shares


def _rates(row: Row) -> dict[str, float]:
    """TFLOP/s of our fastest and of the peers that are right."""
    ours = row.ours
    rates = {} if ours is None else {OURS: row.tflops(ours)}
    return rates | {
        contestant.name: row.tflops(contestant)
        for contestant in row.contestants
        if contestant.timed and not contestant.ours
    }
