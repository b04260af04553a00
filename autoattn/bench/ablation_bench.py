"""Runs ablations: on the card, each kernel checked first and all timed in interleaved rounds; else by the model."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

import autoattn
from autoattn.bench.ablation import Cell, Change, Options, Row, changes
from autoattn.codegen import render, search_space
from autoattn.codegen.search_space import SearchSpace
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome, StaticReport, Verdict
from autoattn.core.variant import Source
from autoattn.cost_model import occupancy, predictor
from autoattn.errors import CompileError, SpaceError
from autoattn.hardware import nvidia
from autoattn.hardware.timer import Stopwatch
from autoattn.kernels import compiler, forward
from autoattn.reference import attention_formula, inputs
from autoattn.search.trial_pipeline import GPU_MODULE
from autoattn.tensors.operands import Operands
from autoattn.validation import output_check
from autoattn.validation.output_check import Case
from autoattn.workers.compile_job import Inspect
from autoattn.workers.worker_pool import Failure, Pool, cores

ROWS = 64  # query rows that are compared with the reference, of all heads and sequences
COMPILE_SECONDS = 120.0
CHECK_SECONDS = 25.0
RACE_SECONDS = 120.0


def machine(device: Device, *, measured: bool) -> dict[str, str]:
    """What stands in the header: the card, and versions of all that takes part."""
    driver = {"driver": nvidia.driver_version() or "unknown"} if measured else {}
    return {
        "device": f"{device.full_name}, sm_{device.arch}, {device.sm_count} SMs",
        **driver,
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "autoattn": autoattn.__version__,
    }


def run(problems: Iterable[Problem], device: Device, *, measured: bool, options: Options) -> Iterator[list[Row]]:
    """The rows of one problem after the other, one for each template that has a default for it.

    Args:
        measured: times on the card that `device` is, in processes of their own; else the model predicts.
    """
    with (
        Pool(size=cores(), environment={"CUDA_VISIBLE_DEVICES": ""}) as compilers,
        Pool(size=1, preload=GPU_MODULE) as bench,
    ):
        plans = {
            problem: {space.template: _planned(space, problem, device) for space in search_space.of(problem.op)}
            for problem in problems
        }
        sources: dict[str, Source] = {}
        for problem, plan in plans.items():
            sources |= _sources(problem, plan)
        inspected: dict[str, StaticReport | Failure] = {}
        inspect_kernels(compilers, sources, device, inspected)  # all before the first is timed: the cores are idle then
        bench_of = _Bench(pool=bench, options=options) if measured else None
        for problem, plan in plans.items():
            yield _rows(problem, device, plan, inspected, bench_of)


def _planned(space: SearchSpace, problem: Problem, device: Device) -> list[Change] | str:
    """The changes, or in words why the template has none."""
    try:
        return changes(space, problem, device)
    except SpaceError as error:
        return str(error)


def _sources(problem: Problem, plans: Mapping[str, list[Change] | str]) -> dict[str, Source]:
    variants = [change.variant for plan in plans.values() if not isinstance(plan, str) for change in plan]
    rendered = (render.render(problem, variant) for variant in variants if variant is not None)
    return {source.digest: source for source in rendered}


def inspect_kernels(
    pool: Pool, sources: Mapping[str, Source], device: Device, inspected: dict[str, StaticReport | Failure]
) -> None:
    """Compiles by all cores; on the card, Triton's cache has the kernels afterwards."""
    jobs = {digest: Inspect(source=source, arch=device.arch) for digest, source in sources.items()}
    inspected.update(pool.results(jobs, COMPILE_SECONDS))


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
    if (reason := occupancy.why_unlaunchable(device, result)) is not None:
        return Cell(change=change, outcome=Outcome.INFEASIBLE, detail=reason, report=result)
    return Cell(change=change, outcome=Outcome.OK, report=result)


def _predicted(problem: Problem, device: Device, cell: Cell) -> Cell:
    if cell.outcome is not Outcome.OK or cell.change.variant is None or cell.report is None:
        return cell
    if (reason := predictor.why_unknown(problem, device)) is not None:
        return replace(cell, detail=f"{reason}; only a measurement has a time")
    return replace(cell, prediction=predictor.predict(problem, device, cell.change.variant, cell.report))


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
    """Compares a kernel with the reference, or with the two products alone: at full lengths, on one sequence.

    Sequences differ in nothing that the kernel's text knows, and the reference takes longer than all that is timed.
    """

    problem: Problem
    source: Source
    bound: bool  # it has no softmax

    def run(self, memory: dict[Hashable, Any]) -> Verdict | Failure:
        """The verdict, or why there is none."""
        try:
            case = _case(memory, replace(self.problem, batch=1))
            kernel = _kernel(memory, self.source)
            return judge_products(kernel, case) if self.bound else output_check.judge(kernel, [case])
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
        operands = inputs.make(self.problem, torch.device("cuda"), torch.Generator().manual_seed(self.seed))
        output = forward.empty_output(self.problem, operands.query)

        def call(source: Source) -> Callable[[], object]:
            kernel = _kernel(memory, source)
            return lambda: forward.launch(kernel, self.problem, operands, output, None)

        calls = {name: call(source) for name, source in self.sources.items()}
        if "stopwatch" not in memory:
            memory["stopwatch"] = Stopwatch(torch.device("cuda"))
        stopwatch: Stopwatch = memory["stopwatch"]
        rng, order = random.Random(self.seed), list(calls)
        times: dict[str, list[float]] = {name: [] for name in order}
        clocks: dict[str, list[int]] = {name: [] for name in order}
        stopwatch.warm()
        for first in calls.values():
            first()
        for _ in range(self.rounds):
            rng.shuffle(order)
            for name in order:
                times[name] += stopwatch.samples(calls[name], 1)
                pulse = nvidia.pulse(stopwatch.index)
                clocks[name] += [] if pulse is None else [pulse.clock_mhz]
        return Raced(times_us=times, clocks_mhz=clocks)


def judge_products(kernel: compiler.Kernel, case: Case) -> Verdict:
    """Compares a kernel without softmax with (Q K^T, 0 where the mask hides) V in float64, at the case's rows.

    Allowed is twice the error that comes of rounding the scores to the tensors' type, plus an ulp of the largest one.
    """
    dtype = case.operands.query.dtype
    exact, rough = (products(case.problem, case.operands, case.rows, rounded) for rounded in (None, dtype))
    allowed = 2 * float((rough - exact).abs().max()) + torch.finfo(dtype).eps * float(exact.abs().max())
    output, _ = output_check.run(kernel, case)
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
    seen = attention_formula.visible(problem, operands, rows)[:1].double()
    answers = []
    for head in range(problem.heads_q):
        group = head // problem.group_size
        key, value = (tensor[:, group].double() for tensor in (operands.key, operands.value))
        scores = operands.query[:, head][:, rows].double() @ key.transpose(1, 2) * seen
        answers.append((scores if rounded is None else scores.to(rounded).double()) @ value)
    return torch.stack(answers, 1)


def _case(memory: dict[Hashable, Any], problem: Problem) -> Case:
    """The problem with contiguous inputs; one at a time, since it can fill a large part of the card."""
    if memory.get("ablated problem") != problem:
        memory.pop("ablated case", None)
        torch.cuda.empty_cache()
        memory["ablated case"] = output_check.make_case(
            problem, torch.device("cuda"), torch.Generator().manual_seed(1), rows=ROWS, guard=0
        )
        memory["ablated problem"] = problem
    case: Case = memory["ablated case"]
    return case


def _kernel(memory: dict[Hashable, Any], source: Source) -> compiler.Kernel:
    if ("ablated kernel", source.digest) not in memory:
        memory["ablated kernel", source.digest] = compiler.load(source, torch.device("cuda"))
    kernel: compiler.Kernel = memory["ablated kernel", source.digest]
    return kernel
