"""What each step of a kernel costs: one change at a time from a template's default, and the two products alone.

The default of a template is the same kernel on every machine, so tables of several cards can be compared. A change that
the default's other parameters forbid takes as few others along as possible; they are named, and stand as a row of
their own where they can.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
from torch import Tensor

import autoattn
from autoattn import compile, gpu, model, reference, render, space, validate
from autoattn.device import Device
from autoattn.errors import CompileError, SpaceError
from autoattn.jobs import Inspect
from autoattn.measure import Stopwatch
from autoattn.operands import Operands
from autoattn.ops import forward
from autoattn.problem import Problem
from autoattn.render import NO_SOFTMAX
from autoattn.space import SearchSpace
from autoattn.trial import Outcome, Prediction, StaticReport, Verdict
from autoattn.validate import Case
from autoattn.variant import Source, Value, Variant
from autoattn.workers import Failure, Pool

BASELINE = "baseline"
BOUND = "no softmax (not attention)"
# The parameters that are changed one at a time, in the order of the table; a template has some of them.
STEPS = ("barrier", "ping_pong", "slot_release", "v_wait", "overlap", "softmax", "mask_loop", "PERSISTENT", "schedule")
BARRIERS = ("barrier", "slot_release", "v_wait")  # those that place barriers or choose their kind
COMPANIONS = 2  # parameters that a change may take along
ROWS = 64  # query rows that are compared with the reference, of all heads and sequences
COMPILE_SECONDS = 120.0
CHECK_SECONDS = 25.0
RACE_SECONDS = 120.0


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
        placed = [cell for cell in self.cells if cell.change.step in BARRIERS and math.isfinite(cell.time_us)]
        return min(placed, key=lambda cell: cell.time_us, default=None)

    def named(self, name: str) -> Cell | None:
        """The cell of that name that has a time."""
        return next((one for one in self.cells if one.change.name == name and math.isfinite(one.time_us)), None)

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


def machine(device: Device, *, measured: bool) -> dict[str, str]:
    """What stands in the header: the card, and versions of all that takes part."""
    driver = {"driver": gpu.driver_version() or "unknown"} if measured else {}
    return {
        "device": f"{device.full_name}, sm_{device.arch}, {device.sm_count} SMs",
        **driver,
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "autoattn": autoattn.__version__,
    }


def changes(one: SearchSpace, problem: Problem, device: Device) -> list[Change]:
    """The baseline, each change of a step with what it takes along, and the bound.

    Raises:
        SpaceError: the template has no default for the problem.
    """
    base = one.default(problem, device)
    found = {BASELINE: Change(name=BASELINE, variant=base)}
    for step in (step for step in STEPS if step in one.choices):
        for value in (value for value in one.choices[step] if value != base[step]):
            variant = _nearest(one, base, step, value, problem, device)
            if variant is None:
                wanted = Variant.of(one.template, {**base.as_dict(), step: value})
                why = one.why_infeasible(wanted, problem, device) or "no two other parameters make room for it"
                found.setdefault(f"{step} {value}", Change(name=f"{step} {value}", step=step, why_not=why))
                continue
            others = {name: now for name, now in variant.params if now != base[name] and name != step}
            alone = Variant.of(one.template, {**base.as_dict(), **others})
            if others and one.why_infeasible(alone, problem, device) is None:
                found.setdefault(_name(others), Change(name=_name(others), variant=alone))
            name = f"{step} {value}" + (f" ({_name(others)})" if others else "")
            found[name] = Change(name=name, step=step, variant=variant)
    return [*_distinct(found.values()), _bound(base, problem)]


def _distinct(found: Iterable[Change]) -> list[Change]:
    """Each kernel once: what a change took along may be a change of its own."""
    kept: dict[object, Change] = {}
    for change in found:
        key = change.variant or change.name
        if key not in kept or (change.step and not kept[key].step):
            kept[key] = change
    return list(kept.values())


def _name(params: Mapping[str, Value]) -> str:
    return ", ".join(f"{name} {value}" for name, value in params.items())


def _nearest(
    one: SearchSpace, base: Variant, step: str, value: Value, problem: Problem, device: Device
) -> Variant | None:
    """The feasible variant with the changed step that changes the fewest other parameters; None beyond COMPANIONS."""
    params = {**base.as_dict(), step: value}
    others = [name for name in one.choices if name != step]
    for count in range(COMPANIONS + 1):
        for names in itertools.combinations(others, count):
            choices = ([choice for choice in one.choices[name] if choice != base[name]] for name in names)
            for values in itertools.product(*choices):
                variant = Variant.of(one.template, {**params, **dict(zip(names, values, strict=True))})
                if one.why_infeasible(variant, problem, device) is None:
                    return variant
    return None


def _bound(base: Variant, problem: Problem) -> Change:
    """The baseline without its softmax, which no search space offers."""
    variant = Variant.of(base.template, {**base.as_dict(), "softmax": NO_SOFTMAX})
    why_not = render.why_not(variant, problem, render.natural_traits(problem))
    if why_not is not None:
        return Change(name=BOUND, why_not=why_not)
    return Change(name=BOUND, variant=variant)


def run(problems: Iterable[Problem], device: Device, *, measured: bool, options: Options) -> Iterator[list[Row]]:
    """The rows of one problem after the other, one for each template that has a default for it.

    Args:
        measured: times on the card that `device` is, in processes of their own; else the model predicts.
    """
    with Pool(size=os.cpu_count() or 1, environment={"CUDA_VISIBLE_DEVICES": ""}) as compilers, Pool(size=1) as bench:
        inspected: dict[str, StaticReport | Failure] = {}
        for problem in problems:
            plans = {one.template: _planned(one, problem, device) for one in space.of(problem.op)}
            sources = _sources(problem, plans)
            _inspect(compilers, {digest: one for digest, one in sources.items() if digest not in inspected}, device,
                     inspected)  # fmt: skip
            bench_of = _Bench(bench, options) if measured else None
            yield _rows(problem, device, plans, inspected, bench_of)


def _planned(one: SearchSpace, problem: Problem, device: Device) -> list[Change] | str:
    """The changes, or in words why the template has none."""
    try:
        return changes(one, problem, device)
    except SpaceError as error:
        return str(error)


def _sources(problem: Problem, plans: Mapping[str, list[Change] | str]) -> dict[str, Source]:
    variants = [change.variant for plan in plans.values() if not isinstance(plan, str) for change in plan]
    found = (render.render(problem, variant) for variant in variants if variant is not None)
    return {source.digest: source for source in found}


def _inspect(
    pool: Pool, sources: Mapping[str, Source], device: Device, inspected: dict[str, StaticReport | Failure]
) -> None:
    """Compiles by all cores; on the card, Triton's cache has the kernels afterwards."""
    tickets = {
        pool.submit(Inspect(source=source, arch=device.arch), COMPILE_SECONDS): digest
        for digest, source in sources.items()
    }
    while results := pool.next_results():
        inspected |= {tickets[ticket]: result for ticket, result in results}


def _rows(
    problem: Problem,
    device: Device,
    plans: Mapping[str, list[Change] | str],
    inspected: Mapping[str, StaticReport | Failure],
    bench: _Bench | None,
) -> list[Row]:
    cells: dict[str, list[Cell]] = {}
    for template, plan in plans.items():
        if not isinstance(plan, str):
            cells[template] = [_compiled(problem, device, change, inspected) for change in plan]
    if bench is not None:
        bench.time(problem, cells)
    else:
        cells = {template: [_predicted(problem, device, cell) for cell in row] for template, row in cells.items()}
    return [
        Row(problem=problem, template=template, cells=(), note=plan)
        if isinstance(plan, str)
        else Row(problem=problem, template=template, cells=tuple(cells[template]))
        for template, plan in plans.items()
    ]


def _compiled(
    problem: Problem, device: Device, change: Change, inspected: Mapping[str, StaticReport | Failure]
) -> Cell:
    if change.variant is None:
        return Cell(change=change, outcome=Outcome.INFEASIBLE, detail=change.why_not)
    result = inspected[render.render(problem, change.variant).digest]
    if isinstance(result, Failure):
        return Cell(change=change, outcome=result.outcome, detail=result.detail)
    if (reason := model.why_unlaunchable(device, result)) is not None:
        return Cell(change=change, outcome=Outcome.INFEASIBLE, detail=reason, report=result)
    return Cell(change=change, outcome=Outcome.OK, report=result)


def _predicted(problem: Problem, device: Device, cell: Cell) -> Cell:
    if cell.outcome is not Outcome.OK or cell.change.variant is None or cell.report is None:
        return cell
    if cell.change.bound:
        return replace(cell, detail="the model finds the loop over keys by its softmax; only a measurement has it")
    if not space.load(cell.change.variant.template).interpreted or not device.peak_flops:
        return replace(cell, detail="the model knows neither this template nor its loops; only a measurement has it")
    return replace(cell, prediction=model.predict(problem, device, cell.change.variant.as_dict(), cell.report))


# --- on the card ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """Checks and times in a process that may hang or crash without harm to the others."""

    pool: Pool
    options: Options

    def time(self, problem: Problem, cells: dict[str, list[Cell]]) -> None:
        """Replaces the cells by what became of them; all templates run in the same rounds."""
        runners: dict[str, tuple[str, int, Source]] = {}
        for template, row in cells.items():
            for place, cell in enumerate(row):
                if cell.outcome is Outcome.OK and cell.change.variant is not None:
                    row[place] = self._checked(problem, cell)
                if row[place].outcome is Outcome.OK and cell.change.variant is not None:
                    runners[f"{template} {place}"] = template, place, render.render(problem, cell.change.variant)
        race = Race(
            problem=problem,
            sources={name: source for name, (_, _, source) in runners.items()},
            rounds=self.options.rounds,
            seed=self.options.seed,
        )
        ended: Raced | Failure = self.pool.result(race, RACE_SECONDS)
        for name, (template, place, _) in runners.items():
            cell = cells[template][place]
            if isinstance(ended, Failure):
                cells[template][place] = replace(cell, outcome=ended.outcome, detail=ended.detail)
            else:
                times, clocks = tuple(ended.times_us[name]), tuple(ended.clocks_mhz[name])
                cells[template][place] = replace(cell, times_us=times, clocks_mhz=clocks)

    def _checked(self, problem: Problem, cell: Cell) -> Cell:
        assert cell.change.variant is not None
        job = Check(problem=problem, source=render.render(problem, cell.change.variant), bound=cell.change.bound)
        verdict: Verdict | Failure = self.pool.result(job, CHECK_SECONDS)
        if isinstance(verdict, Failure):
            return replace(cell, outcome=verdict.outcome, detail=verdict.detail)
        return cell if verdict.ok else replace(cell, outcome=Outcome.WRONG_RESULT, detail=verdict.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Compares a kernel at full size with the reference, or with the two products alone."""

    problem: Problem
    source: Source
    bound: bool  # it has no softmax

    def run(self, memory: dict[Hashable, Any]) -> Verdict | Failure:
        """The verdict, or why there is none."""
        try:
            case = _case(memory, self.problem)
            kernel = _kernel(memory, self.source)
            return judge_products(kernel, case) if self.bound else validate.judge(kernel, [case])
        except (CompileError, torch.cuda.OutOfMemoryError) as error:
            return Failure(outcome=Outcome.LAUNCH_ERROR, detail=" ".join(str(error).split())[:200])


@dataclass(frozen=True, slots=True, kw_only=True)
class Raced:
    """What a race took, raw."""

    times_us: dict[str, list[float]]  # one sample a round
    clocks_mhz: dict[str, list[int]]  # right behind each sample; empty without NVML


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Times kernels in interleaved rounds, and reads the SM clock behind each sample."""

    problem: Problem
    sources: dict[str, Source]
    rounds: int
    seed: int

    def run(self, memory: dict[Hashable, Any]) -> Raced:
        """All samples."""
        case = _case(memory, self.problem)
        output = forward.empty_output(self.problem, case.operands.query)
        calls = {name: _call(_kernel(memory, source), case, output) for name, source in self.sources.items()}
        if "stopwatch" not in memory:
            memory["stopwatch"] = Stopwatch(torch.device("cuda"))
        stopwatch: Stopwatch = memory["stopwatch"]
        rng, order = random.Random(self.seed), list(calls)
        times: dict[str, list[float]] = {name: [] for name in order}
        clocks: dict[str, list[int]] = {name: [] for name in order}
        stopwatch.warm()
        for call in calls.values():
            call()
        for _ in range(self.rounds):
            rng.shuffle(order)
            for name in order:
                times[name] += stopwatch.samples(calls[name], 1)
                pulse = gpu.pulse(stopwatch.index)
                clocks[name] += [] if pulse is None else [pulse.clock_mhz]
        return Raced(times_us=times, clocks_mhz=clocks)


def judge_products(kernel: compile.Kernel, case: Case) -> Verdict:
    """Compares a kernel without softmax with (Q K^T, 0 where the mask hides) V in float64, at the case's rows.

    Allowed is twice the error that comes of rounding the scores to the tensors' type, plus an ulp of the largest answer.
    """
    dtype = case.operands.query.dtype
    exact, rough = (products(case.problem, case.operands, case.rows, rounded) for rounded in (None, dtype))
    allowed = 2 * float((rough - exact).abs().max()) + torch.finfo(dtype).eps * float(exact.abs().max())
    output, _ = validate.run(kernel, case)
    error = (output[:, :, case.rows].double() - exact).abs()
    worst, rms = float(error.max()), float(error.square().mean().sqrt())
    ok = worst <= allowed
    reason = "" if ok else f"error {worst:.3g} of the bare products where {allowed:.3g} is allowed"
    return Verdict(ok=ok, checks=1, max_error=worst, rms_error=rms, allowed=allowed, reason=reason)


def products(problem: Problem, operands: Operands, rows: Tensor, rounded: torch.dtype | None) -> Tensor:
    """[batch, heads_q, rows, head_dim_v] in float64: Q K^T, 0 where the mask hides the pair, times V.

    Args:
        rows: [rows] query positions.
        rounded: what scores are rounded to between the products, as tensor cores want them; None leaves them exact.
    """
    seen = reference.visible(problem, operands, rows)[:1].double()
    answers = []
    for head in range(problem.heads_q):
        group = head // problem.group_size
        key, value = (tensor[:, group].double() for tensor in (operands.key, operands.value))
        scores = operands.query[:, head][:, rows].double() @ key.transpose(1, 2) * seen
        answers.append((scores if rounded is None else scores.to(rounded).double()) @ value)
    return torch.stack(answers, 1)


def _call(kernel: compile.Kernel, case: Case, output: Tensor) -> Callable[[], object]:
    return lambda: forward.launch(kernel, case.problem, case.operands, output, None)


def _case(memory: dict[Hashable, Any], problem: Problem) -> Case:
    """The problem with contiguous inputs; one at a time, since it can fill a large part of the card."""
    if memory.get("ablated problem") != problem:
        memory.pop("ablated case", None)
        torch.cuda.empty_cache()
        memory["ablated case"] = validate.make_case(
            problem, torch.device("cuda"), torch.Generator().manual_seed(1), rows=ROWS, guard=0
        )
        memory["ablated problem"] = problem
    case: Case = memory["ablated case"]
    return case


def _kernel(memory: dict[Hashable, Any], source: Source) -> compile.Kernel:
    if ("ablated kernel", source.digest) not in memory:
        memory["ablated kernel", source.digest] = compile.load(source, torch.device("cuda"))
    kernel: compile.Kernel = memory["ablated kernel", source.digest]
    return kernel
