"""What each step of a kernel costs: one change at a time from a template's default, and the two products alone.

The default of a template is the same kernel on every machine, so tables of several cards can be compared. A change that
the default's other parameters forbid takes as few others along as possible; they are named, and stand as a row of
their own where they can.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autoattn.codegen import render, search_space
from autoattn.codegen.search_space import SearchSpace
from autoattn.codegen.template_facts import NO_SOFTMAX
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome, Prediction, StaticReport
from autoattn.core.variant import Value, Variant

BASELINE = "baseline"
BOUND = "no softmax (not attention)"
COMPANIONS = 2  # parameters that a change may take along


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One row of the table: the default, or what differs from it."""

    name: str
    step: str = ""  # the parameter that is studied; empty for the baseline, the bound and what others took along
    variant: Variant | None = None
    why_not: str = ""  # why there is no such kernel, in words

    @property
    def bound(self) -> bool:
        """Whether it is no attention, but what the two products alone take."""
        return self.name == BOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What came of one change."""

    change: Change
    outcome: Outcome
    detail: str = ""  # why not, in words
    times_us: tuple[float, ...] = ()  # one a round
    clocks_mhz: tuple[int, ...] = ()  # of the SMs, behind each of its samples
    prediction: Prediction | None = None
    report: StaticReport | None = None

    @property
    def time_us(self) -> float:
        """Median of what was measured, else the prediction; NaN without either."""
        if self.times_us:
            return statistics.median(self.times_us)
        return self.prediction.time_us if self.prediction is not None else math.nan

    @property
    def clock_mhz(self) -> float:
        """Median; NaN where no clock was read."""
        return statistics.median(self.clocks_mhz) if self.clocks_mhz else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem with one template."""

    problem: Problem
    template: str
    cells: tuple[Cell, ...]
    note: str = ""

    @property
    def baseline(self) -> Cell | None:
        """The cell that all others are compared with; None where it has no time."""
        return self.named(BASELINE)

    @property
    def bound(self) -> Cell | None:
        """What the two products alone take; None where that has no time."""
        return self.named(BOUND)

    @property
    def barrier(self) -> Cell | None:
        """The fastest of the kernels whose barriers were placed otherwise."""
        barriers = search_space.load(self.template).barriers
        placed = [cell for cell in self.cells if cell.change.step in barriers and math.isfinite(cell.time_us)]
        return min(placed, key=lambda cell: cell.time_us, default=None)

    def named(self, name: str) -> Cell | None:
        """The cell of that name that has a time."""
        return next((cell for cell in self.cells if cell.change.name == name and math.isfinite(cell.time_us)), None)

    def over_baseline(self, cell: Cell) -> float:
        """How many times as fast as the baseline; NaN where either has no time."""
        return self.baseline.time_us / cell.time_us if self.baseline is not None else math.nan

    def tflops(self, cell: Cell) -> float:
        """Of the pairs that the mask keeps."""
        return self.problem.flops() / cell.time_us / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to measure."""

    rounds: int = 15
    seed: int = 0  # of the inputs, and of the order within rounds


@dataclass(slots=True, kw_only=True)
class Run:
    """All rows, and what a reader must know to believe and to repeat them."""

    machine: dict[str, str]
    command: str
    device: Device
    measured: bool
    planned: int = 0
    rows: list[Row] = field(default_factory=list)


def changes(space: SearchSpace, problem: Problem, device: Device) -> list[Change]:
    """The baseline, each change of a step with what it takes along, and the bound.

    Raises:
        SpaceError: the template has no default for the problem.
    """
    base = space.default(problem, device)
    params = space.params_of(base)
    named = {BASELINE: Change(name=BASELINE, variant=base)}
    for step in space.ablation:
        for value in (value for value in space.choices[step] if value != params[step]):
            variant = _nearest(space, params, step, value, problem, device)
            if variant is None:
                wanted = space.variant({**params, step: value})
                why = space.why_infeasible(wanted, problem, device) or "no two other parameters make room for it"
                named.setdefault(f"{step} {value}", Change(name=f"{step} {value}", step=step, why_not=why))
                continue
            now = space.params_of(variant)
            companions = {name: now[name] for name in space.choices if now[name] != params[name] and name != step}
            alone = space.variant({**params, **companions})
            if companions and space.why_infeasible(alone, problem, device) is None:
                named.setdefault(_name(companions), Change(name=_name(companions), variant=alone))
            name = f"{step} {value}" + (f" ({_name(companions)})" if companions else "")
            named[name] = Change(name=name, step=step, variant=variant)
    return [*_distinct(named.values()), _bound(base, problem)]


def _distinct(candidates: Iterable[Change]) -> list[Change]:
    """Each kernel once: what a change took along may be a change of its own."""
    kept: dict[object, Change] = {}
    for change in candidates:
        key = change.variant or change.name
        if key not in kept or (change.step and not kept[key].step):
            kept[key] = change
    return list(kept.values())


def _name(params: Mapping[str, Value]) -> str:
    return ", ".join(f"{name} {value}" for name, value in params.items())


def _nearest(
    space: SearchSpace, base: Mapping[str, Value], step: str, value: Value, problem: Problem, device: Device
) -> Variant | None:
    """The feasible variant with the changed step that changes the fewest other parameters; None beyond COMPANIONS."""
    params = {**base, step: value}
    companions = [name for name in space.choices if name != step]
    for count in range(COMPANIONS + 1):
        for names in itertools.combinations(companions, count):
            choices = ([choice for choice in space.choices[name] if choice != base[name]] for name in names)
            for values in itertools.product(*choices):
                variant = space.variant({**params, **dict(zip(names, values, strict=True))})
                if space.why_infeasible(variant, problem, device) is None:
                    return variant
    return None


def _bound(base: Variant, problem: Problem) -> Change:
    """The baseline without its softmax, which no search space offers."""
    variant = Variant.of(base.template, {**base.as_dict(), "softmax": NO_SOFTMAX})
    why_not = render.why_not(variant, problem, render.natural_traits(problem))
    if why_not is not None:
        return Change(name=BOUND, why_not=why_not)
    return Change(name=BOUND, variant=variant)
