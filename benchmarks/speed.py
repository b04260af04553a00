"""How fast the tuner is: `python benchmarks/speed.py throughput|autotune [--write]`.

All of it needs a GPU, and all of it begins with empty caches: Triton's, ours, and no study to go on from.

throughput: how many distinct variants a second are compiled, validated and screened. First each family by itself on a
few problems that share no kernel, with as many variants as fit the time; then `autoattn tune` over several problems at
quick effort, finals included. "Sustained" counts from the first result to the last, "with the start" from the first
proposal on, when no worker runs yet. Beside it: how busy the workers were, and the seconds that a compiler had a
kernel; cores over those is what no pipeline can exceed. The second table takes apart what one variant costs the GPU's
worker, one after another in one process.

autotune: wall-clock of `triton.autotune` and of ours over the same list of variants of triton/forward on one problem,
each in a fresh process, from its start to its winner. It is Triton's own Autotuner with its own do_bench, as a user's
decorator would make it; what it tunes stands for one kernel and runs the rendered kernel that a config names, through
Triton's JIT with the config's num_warps, num_stages and maxnreg, since our kernels hold their constants in the text. It
compiles and times one variant after the other, checks no numbers, and takes the lowest median. Ours compiles them on
all cores, reads their machine code, puts each before the gate, screens it and holds the finals of quick effort with
every rival. The two winners then meet in one more contest.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer
from kept import tell
from triton.runtime.errors import OutOfResources

from autoattn.codegen import render
from autoattn.core import paired_stats
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome, Trial
from autoattn.core.variant import Variant
from autoattn.errors import UsageError
from autoattn.hardware import nvidia
from autoattn.hardware.timer import Stopwatch
from autoattn.kernels import compiler, forward
from autoattn.search import finals, multi_template
from autoattn.search import tuner as tuning
from autoattn.search.gpu_jobs import Finished, finalist_name
from autoattn.search.multi_template import Contest
from autoattn.search.search_options import PROFILES, Effort, Objective, Options
from autoattn.search.study import Study
from autoattn.search.trial_pipeline import Workshop
from autoattn.shapes import shapes_file
from autoattn.validation import output_check
from autoattn.validation.output_check import Case, Gate
from autoattn.workers.worker_pool import cores

SHAPES = Path(__file__).parent / "shapes" / "speed.yaml"
TEMPLATE = "triton/forward"  # whose variants triton.autotune can tune too
# A template, and one problem of each of these groups, by its place: kinds of kernel that share none.
FAMILIES = (
    (TEMPLATE, {"d64-full": 2, "d64-causal": 1, "d64-window": 0}),
    (TEMPLATE, {"d128-causal": 2, "d128-full": 2}),
    ("gluon/forward", {"d128-causal": 2, "d128-full": 2, "d64-causal": 1}),
)
TUNED = ("d128-causal", "d64-causal")  # the groups that `autoattn tune` is timed on
BUDGET = 200  # of a family's search: that of effort max, which decides how many variants are in flight
LOOKED_AT = 8  # variants whose costs are taken apart

app = typer.Typer(help=__doc__, add_completion=False)
Write = Annotated[bool, typer.Option("--write", help="Keep the tables under benchmarks/results/.")]


@contextmanager
def empty_caches() -> Iterator[Path]:
    """An empty folder that Triton and autoattn keep everything in, here and in workers started meanwhile."""
    with tempfile.TemporaryDirectory(prefix="speed-") as name:
        folder = Path(name)
        chosen = {"TRITON_CACHE_DIR": str(folder / "triton"), "AUTOATTN_CACHE": str(folder / "autoattn")}
        before = {key: os.environ.get(key) for key in chosen}
        os.environ.update(chosen)
        try:
            yield folder
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})


def card() -> Device:
    """The GPU in this machine."""
    device = nvidia.present()
    if device is None:
        raise UsageError("benchmarks/speed.py must run on a machine with an NVIDIA GPU, found none; take another one")
    return device


def machine() -> str:
    """What the figures were taken on."""
    return f"{card().full_name}, {cores()} cores, torch {torch.__version__}, triton {triton.__version__}"


def grouped(*groups: str) -> list[Problem]:
    """The problems of some groups of the shapes file, in its order."""
    return [named.problem for named in shapes_file.load(SHAPES) if set(named.groups) & set(groups)]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of Markdown."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


# --- throughput -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One family on some problems."""

    row: tuple[str, ...]
    first: list[Variant]  # of the first problem, those that are right


HEAD = (
    "what", "variants", "right", "kernels", "a second, sustained", "with the start", "compilers busy", "GPU busy",
    "compiler s a kernel",
)  # fmt: skip


def search(template: str, problems: Sequence[Problem], seconds: float) -> Search:
    """Searches one family on several problems at once until the time is up."""
    ended: list[float] = []
    trials: dict[Problem, list[Trial]] = {problem: [] for problem in problems}
    begin = time.monotonic()

    def heard(problem: Problem, trial: Trial) -> None:
        trials[problem].append(trial)
        ended.append(time.monotonic())

    def late() -> bool:
        return bool(ended) and time.monotonic() - ended[0] > seconds

    with Workshop(card(), measured=True) as shop:
        works = []
        for problem in problems:
            spaces = [space for space in multi_template.spaces(problem, card(), True) if space.template == template]
            study = Contest([Study(None, space, problem, card(), seed=0, budget=BUDGET) for space in spaces])
            study.enqueue(seed for space in spaces for seed in space.seeds_for(problem, card()))
            works.append(shop.search(study, budget=BUDGET, more=lambda: True, late=late, heard=partial(heard, problem)))
        while works := [work for work in works if next(work, "ended") != "ended"]:
            shop.wait()
        compiling, looking = shop.busy_seconds
        kernels, begun = shop.kernels, shop.begun
    span = ended[-1] - ended[0]
    right = [
        trial.variant for problem_trials in trials.values() for trial in problem_trials if trial.outcome is Outcome.OK
    ]
    row = (
        f"{template}: {'; '.join(map(str, problems))}", f"{len(ended)}", f"{len(right)}", f"{kernels}",
        f"{(len(ended) - 1) / span:.1f}", f"{len(ended) / (ended[-1] - begin):.1f}",
        f"{compiling / cores() / (ended[-1] - begin):.0%}", f"{looking / (ended[-1] - begin):.0%}",
        f"{compiling / max(1, begun):.2f}",
    )  # fmt: skip
    first = [trial.variant for trial in trials[problems[0]] if trial.outcome is Outcome.OK]
    return Search(row=row, first=first)


def tuned(problems: Sequence[Problem], folder: Path) -> tuple[str, ...]:
    """`autoattn tune` over several problems at quick effort."""
    ended: list[float] = []
    begin = time.monotonic()

    def listen(progress: tuning.Progress) -> None:
        if progress.phase == "search":
            ended.append(time.monotonic())

    summary = tuning.tune(
        problems, card(), measured=True, options=Options(effort=Effort.QUICK, cache=folder), listen=listen
    )
    end, count = time.monotonic(), sum(summary.outcomes.values())
    return (
        f"tune --effort quick, {len(problems)} problems, {summary.kernels} kernels", f"{count}",
        f"{summary.outcomes.get(Outcome.OK.value, 0)}", f"{(count - 1) / (end - ended[0]):.1f}",
        f"{count / (end - begin):.1f}", f"{summary.compiling_seconds / cores() / (end - begin):.0%}",
        f"{summary.card_seconds / (end - begin):.0%}",
        f"{summary.compiling_seconds / max(1, summary.kernels):.2f}",
    )  # fmt: skip


def stages(what: str, problem: Problem, variants: Sequence[Variant]) -> tuple[str, ...]:
    """Median milliseconds of what a variant costs the GPU's worker; the compiler has been at it."""
    device = torch.device("cuda")
    stopwatch = Stopwatch(device)
    taken: dict[str, list[float]] = {"load": [], "gate": [], "look": []}

    def timed(name: str, begin: float) -> float:
        torch.cuda.synchronize()
        taken[name].append((time.perf_counter() - begin) * 1e3)
        return time.perf_counter()

    begin = time.perf_counter()
    gate = Gate(problem, device)
    case = output_check.full_case(problem, device, torch.Generator().manual_seed(1))
    once = (time.perf_counter() - begin) * 1e3
    output = forward.empty_output(problem, case.operands.query)
    stopwatch.warm()
    for variant in variants:
        source = render.render(problem, variant)
        begin = time.perf_counter()
        kernel = compiler.load(source, device)
        begin = timed("load", begin)
        gate.judge(kernel)
        begin = timed("gate", begin)
        stopwatch.screen(lambda kernel=kernel: forward.launch(kernel, problem, case.operands, output, None), None)
        timed("look", begin)
    return (what, f"{len(variants)}", *(f"{statistics.median(values):.0f}" for values in taken.values()), f"{once:.0f}")


@app.command()
def throughput(
    seconds: Annotated[float, typer.Option(help="Of each family's search, from its first result on.")] = 15.0,
    problems: Annotated[int, typer.Option(help="That tune is timed on.")] = 10,
    write: Write = False,
) -> None:
    """Distinct variants a second: compiled, validated and screened."""
    rows, costs = [], []
    for template, places in FAMILIES:
        several = [grouped(group)[place] for group, place in places.items()]
        with empty_caches():
            family_search = search(template, several, seconds)
            rows.append(family_search.row)
            print(*family_search.row, sep=" | ", flush=True)
            costs.append(stages(f"{template}, {several[0]}", several[0], family_search.first[:LOOKED_AT]))
            print(*costs[-1], sep=" | ", flush=True)
    if problems:
        with empty_caches() as folder:
            rows.append(tuned(grouped(*TUNED)[:problems], folder / "autoattn"))
    costs_head = ("ms of the GPU's worker a variant", "variants", "load", "gate", "first look", "once: its cases")
    lines = [machine(), "", *table(HEAD, rows), "", *table(costs_head, costs)]
    command = f"python benchmarks/speed.py throughput --seconds {seconds:g} --problems {problems}"
    tell("Variants a second", command, "\n".join(lines), "h200_throughput" if write else None)


# --- autotune ---------------------------------------------------------------------------------------------------------


class Rendered:
    """Several rendered kernels as one that triton.autotune can tune: a config's VARIANT names the kernel."""

    def __init__(self, problem: Problem, variants: Sequence[Variant]) -> None:
        self.arg_names = ["operands"]  # the only argument, which is all that forward.launch takes of a call
        self.problem = problem
        self.sources = [render.render(problem, variant) for variant in variants]
        self.modules = [compiler.load_module(source) for source in self.sources]
        self.fn = getattr(self.modules[0], self.sources[0].name)  # whose name Triton prints

    def configs(self) -> list[triton.Config]:
        """The options of each, as the search space chose them."""
        return [triton.Config({"VARIANT": place}, **module.OPTIONS) for place, module in enumerate(self.modules)]

    def run(self, case: Case, *, grid: object, warmup: bool, VARIANT: int, **options: object) -> None:
        """Compiles the kernel when it is first run, as Triton's JIT does, and runs it."""
        del grid, warmup  # each variant has a grid of its own
        source, module, device = self.sources[VARIANT], self.modules[VARIANT], case.operands.query.device
        jit = Jitted(getattr(module, source.name), options)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        kernel = compiler.Kernel(source=source, module=module, compiled=jit, device=device, sm_count=sms)
        output = forward.empty_output(self.problem, case.operands.query)
        forward.launch(kernel, self.problem, case.operands, output, None)


@dataclass(frozen=True, slots=True)
class Jitted:
    """A JIT function with its options, launched like a compiled kernel."""

    function: Any
    options: Mapping[str, object]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def launched(*arguments: object) -> object:
            try:
                return self.function.run(*arguments, grid=grid, warmup=False, **self.options)
            except Exception as error:  # what Triton does not count among a config's failures would end its tuning
                raise OutOfResources(0, 0, str(error)[:80]) from error

        return launched


def of_triton(problem: Problem, variants: Sequence[Variant]) -> dict[str, Any]:
    """What triton.autotune makes of a list of variants."""
    case = output_check.full_case(problem, torch.device("cuda"), torch.Generator().manual_seed(1))
    rendered = Rendered(problem, variants)
    tuned: Any = triton.autotune(configs=rendered.configs(), key=[])(rendered)
    tuned[(1,)](case)
    times = {config.kwargs["VARIANT"]: timing[0] for config, timing in tuned.configs_timings.items()}
    return {
        "winner": tuned.best_config.kwargs["VARIANT"],
        "right": sum(math.isfinite(time_ms) for time_ms in times.values()),
    }


def of_ours(problem: Problem, variants: Sequence[Variant]) -> dict[str, Any]:
    """What our search and finals make of them."""
    space_ = next(
        candidate
        for candidate in multi_template.spaces(problem, card(), True)
        if candidate.template == variants[0].template
    )
    study = Contest([Study(None, space_, problem, card(), seed=0, budget=0)])
    study.enqueue(variants)
    heard: list[Trial] = []
    with Workshop(card(), measured=True) as shop:
        shop.alone(shop.search(study, more=lambda: study.waiting, late=lambda: False, heard=heard.append))
        working = [trial for trial in heard if trial.outcome is Outcome.OK]
        profile = PROFILES[Effort.QUICK]
        chosen = [trial.variant for trial in finals.shortlist(working, profile.finalists, Objective.TIME)]
        result = shop.alone(shop.final(problem, chosen, seconds=profile.final_seconds, seed=0))
    assert isinstance(result, Finished), result
    names = [finalist_name(place) for place in range(len(chosen))]
    winner = paired_stats.ties(paired_stats.good(result.rounds), names).leader
    return {"winner": variants.index(chosen[names.index(winner)]), "right": len(working)}


TUNERS = {"autoattn": of_ours, "triton.autotune": of_triton}  # the quick one first: a run that is cut short has it


@app.command(hidden=True)
def worker(tuner: str, group: str, place: int, path: Path) -> None:
    """One tuner over the variants in a file; prints its winner's place among them."""
    variants = [Variant.of(TEMPLATE, params) for params in json.loads(path.read_text(encoding="utf-8"))]
    print(json.dumps(TUNERS[tuner](grouped(group)[place], variants)))


def sampled(problem: Problem, count: int, template: str, seed: int) -> list[Variant]:
    """The seeds of a template and random feasible variants, `count` in all or as many as there are."""
    space = next(
        candidate for candidate in multi_template.spaces(problem, card(), True) if candidate.template == template
    )
    variants = dict.fromkeys(space.seeds_for(problem, card()))
    chance = random.Random(seed)
    for _ in range(20 * count):
        if len(variants) >= count:
            break
        variants |= dict.fromkeys(itertools.islice(space.feasible(problem, card(), chance), 1))
    return list(variants)[:count]


def timed(tuner: str, group: str, place: int, variants: Sequence[Variant]) -> tuple[float, dict[str, Any]]:
    """Seconds of one tuner in a fresh process with empty caches, and what it found."""
    with empty_caches() as folder:
        path = folder / "variants.json"
        path.write_text(json.dumps([variant.as_dict() for variant in variants]), encoding="utf-8")
        begin = time.monotonic()
        command = [sys.executable, __file__, "worker", tuner, group, str(place), str(path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        seconds, outcome = time.monotonic() - begin, json.loads(done.stdout.splitlines()[-1])
        print(f"{tuner}: {seconds:.1f} s, {outcome}", flush=True)
        return seconds, outcome


@app.command()
def autotune(
    variants: Annotated[int, typer.Option(help="In the list.")] = 64,
    group: Annotated[str, typer.Option(help="Of benchmarks/shapes/speed.yaml.")] = "d128-causal",
    place: Annotated[int, typer.Option(help="Of the problem in its group.")] = 2,
    write: Write = False,
) -> None:
    """Wall-clock beside triton.autotune over the same list of variants."""
    problem = grouped(group)[place]
    listed = sampled(problem, variants, TEMPLATE, seed=0)
    outcomes = {tuner: timed(tuner, group, place, listed) for tuner in TUNERS}
    winners = {tuner: result["winner"] for tuner, (_, result) in outcomes.items()}
    with empty_caches(), Workshop(card(), measured=True) as shop:
        met = shop.alone(shop.final(problem, [listed[winner] for winner in winners.values()], seconds=2.0, seed=1))
    assert isinstance(met, Finished), met
    medians = [measurement.median_us if measurement is not None else math.nan for measurement in met.measurements]
    rows = [
        (tuner, len(listed), result["right"], f"{seconds:.1f}", f"{winners[tuner]}", f"{median:.1f}")
        for (tuner, (seconds, result)), median in zip(outcomes.items(), medians, strict=True)
    ]
    head = ("tuner", "variants", "with a time", "seconds", "winner's place", "us, in one contest")
    ratio = outcomes["triton.autotune"][0] / outcomes["autoattn"][0]
    lines = [machine(), "", str(problem), "", *table(head, rows), "", f"{ratio:.1f} times less wall-clock"]
    command = f"python benchmarks/speed.py autotune --variants {variants} --group {group} --place {place}"
    tell("Beside triton.autotune", command, "\n".join(lines), "h200_autotune" if write else None)


if __name__ == "__main__":
    app()
