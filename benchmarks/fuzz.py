"""Random attention calls, each kernel's answer against the reference: `python benchmarks/fuzz.py --count 20000`.

Without a GPU, tiny calls run in Triton's interpreter; with `--gpu`, larger ones on the card, with kernels that the
search space allows there. With `--gradients`, they are gradients of packed sequences, of 0, 1 and thousands of tokens;
`--repeats 250` launches those that must repeat to the bit so often. A seed names the calls: the same `--seed`, and
`--only` its number, finds a failure again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import drawn  # noqa: E402
import drawn_gradients  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from drawn import Call, Compare, Drawn  # noqa: E402
from drawn_gradients import CompareGradients  # noqa: E402
from kept import keep  # noqa: E402

from autoattn.codegen import render, search_space  # noqa: E402
from autoattn.core.device import Device  # noqa: E402
from autoattn.core.problem import Op  # noqa: E402
from autoattn.core.trial import Outcome  # noqa: E402
from autoattn.errors import SpaceError  # noqa: E402
from autoattn.hardware import nvidia  # noqa: E402
from autoattn.workers.worker_pool import Failure, Pool, cores  # noqa: E402

SECONDS = 120.0  # of one job; a hanging kernel costs as much
CALLS_PER_KERNEL = 4  # on the card, where compiling takes longer than running
AHEAD = 4  # jobs a worker that are drawn before they can run
SHOWN = 40  # failures that are printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One kernel and its calls."""

    number: int
    params: str
    job: Compare | CompareGradients


def gradient_tasks(seed: int, device: Device | None, repeats: int) -> Iterator[Task]:
    """The same of gradients."""
    sizes = drawn_gradients.TINY if device is None else drawn_gradients.LARGE
    for number in itertools.count():
        rng = random.Random(f"{seed} {number}")
        draw = drawn_gradients.drawn_packed(rng, sizes)
        calls: tuple[Call, ...] = (draw.call,)
        if device is not None:
            draw = _on_the_card(rng, draw, device)
            calls += tuple(drawn_gradients.resized(rng, draw.call.problem, sizes) for _ in range(CALLS_PER_KERNEL - 1))
        job = CompareGradients(
            source=draw.source, calls=calls, device="cpu" if device is None else "cuda", repeats=repeats
        )
        yield Task(number=number, params=str(draw.source.variant) + f" {draw.traits}", job=job)


def tasks(seed: int, device: Device | None) -> Iterator[Task]:
    """The calls that a seed names, by kernel; there is no end of them."""
    for number in itertools.count():
        rng = random.Random(f"{seed} {number}")
        draw = drawn.drawn(rng, drawn.TINY if device is None else drawn.LARGE)
        calls = (draw.call,) if device is None else _more_calls(rng, draw)
        if device is not None:
            draw = _on_the_card(rng, draw, device)
        job = Compare(source=draw.source, calls=calls, device="cpu" if device is None else "cuda")
        yield Task(number=number, params=str(draw.source.variant) + f" {draw.traits}", job=job)


def _more_calls(rng: random.Random, draw: Drawn) -> tuple[Call, ...]:
    others = (drawn.resized(rng, draw.call.problem, drawn.LARGE) for _ in range(CALLS_PER_KERNEL - 1))
    return (draw.call, *others)


def _on_the_card(rng: random.Random, draw: Drawn, device: Device) -> Drawn:
    """The same call with a variant that the search could try on the card."""
    spaces = list(search_space.of(draw.call.problem.op))
    rng.shuffle(spaces)
    for points in spaces:
        variant = next(points.feasible(draw.call.problem, device, rng), None)
        if variant is not None and render.why_not(variant, draw.call.problem, draw.traits) is None:
            return replace(draw, template=variant.template, params=variant.as_dict())
    raise SpaceError(f"a search space must have a variant for every problem, got none for {draw.call.problem}")


def axes(call: Call) -> Iterator[str]:
    """What a call counts for in the table."""
    problem, modifiers = call.problem, call.problem.modifiers
    precision = f" {problem.precision.value}" if problem.dtype is drawn.DType.FLOAT32 else ""
    yield f"dtype: {problem.dtype.value}{precision}"
    mask = "top-left causal" if str(problem.mask) == "causal:top-left" else problem.mask.kind.value
    yield f"mask: {mask}{' with an expression' if problem.mask.mod else ''}"
    yield f"layout: {problem.layout.value}"
    yield f"scores: {call.scores.value}{' and wild values' if call.wild else ''}"
    if problem.op is Op.BACKWARD:
        yield f"gradients: {'to the bit' if problem.deterministic else 'in any order'}"
    yield f"head dims: {'alike' if problem.head_dim == problem.head_dim_v else 'of their own'}"
    for name in ("score_mod", "softcap", "alibi", "sinks", "dropout"):
        if getattr(modifiers, name):
            yield f"modifier: {name}"
    if modifiers.bias is not drawn.Bias.NONE:
        yield f"modifier: bias {modifiers.bias.value}"
    if not modifiers.names:
        yield "modifier: none"


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was found so far."""

    calls: Counter[str]
    wrong: Counter[str]
    failures: list[str]
    refused: int = 0  # kernels that the compiler refused
    kernels: int = 0

    def add(self, task: Task, result: tuple[str, ...] | Failure) -> None:
        self.kernels += 1
        if isinstance(result, Failure) and result.outcome is Outcome.COMPILE_ERROR:
            self.refused += 1  # a trial like others to the search; a test compiles what must compile
            return
        if isinstance(result, Failure):
            result = (f"{result.outcome.value}: {result.detail}",) * len(task.job.calls)
        for call, reason in zip(task.job.calls, result, strict=True):
            self.calls.update(["all", *axes(call)])
            if reason:
                self.wrong.update(["all", *axes(call)])
                self.failures.append(f"{task.number}: {reason}\n    {call}\n    {task.params}")
                print(self.failures[-1], flush=True)

    def table(self) -> str:
        """Markdown."""
        rows = [f"| {name} | {count:,} | {self.wrong[name]:,} |" for name, count in sorted(self.calls.items())]
        return "\n".join(["| what | calls | wrong |", "|---|---|---|", *rows])


def fuzz(drawn_tasks: Iterator[Task], count: int, jobs: int, device: Device | None) -> Tally:
    """Runs calls in `jobs` processes until `count` were judged; those of kernels that are refused do not count."""
    tally = Tally(calls=Counter(), wrong=Counter(), failures=[])
    paths = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if device is None:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    waiting: dict[int, Task] = {}
    with Pool(size=jobs, environment=environment, preload="drawn_gradients") as pool:
        while True:
            begun = tally.calls["all"] + sum(len(task.job.calls) for task in waiting.values())
            if begun < count and len(waiting) < AHEAD * jobs and (task := next(drawn_tasks, None)) is not None:
                waiting[pool.submit(task.job, SECONDS)] = task
            elif waiting:
                _collect(pool, waiting, tally)
            else:
                return tally


def _collect(pool: Pool, waiting: dict[int, Task], tally: Tally) -> None:
    for ticket, result in pool.next_results():
        tally.add(waiting.pop(ticket), result)


def report(tally: Tally, words: str, seconds: float, device: Device | None) -> str:
    """The run as Markdown."""
    where = "Triton's interpreter" if device is None else device.name
    summary = (
        f"{tally.calls['all']:,} calls on {tally.kernels:,} kernels in {seconds:,.0f} s with{words}: "
        f"{tally.wrong['all']:,} wrong, {tally.refused:,} kernels refused by the compiler."
    )
    versions = f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}"
    failures = ["```", *tally.failures[:SHOWN], "```"] if tally.failures else []
    command = f"`python benchmarks/fuzz.py --count {tally.calls['all']}{words}{'' if device is None else ' --gpu'}`"
    return "\n\n".join([f"# Fuzzing in {where}", command, summary, versions, tally.table(), *failures]) + "\n"


def main() -> int:
    """Draws, runs, prints and writes the result; 1 when a call was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="calls to judge")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=cores(), help="processes")
    parser.add_argument("--gpu", action="store_true", help="on the card in this machine")
    parser.add_argument("--gradients", action="store_true", help="of packed sequences")
    parser.add_argument("--repeats", type=int, default=2, help="launches of gradients that repeat to the bit")
    parser.add_argument("--only", type=int, help="the number of one kernel, of a failure")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    device = nvidia.present() if options.gpu else None
    if options.gpu and device is None:
        parser.error("--gpu needs an NVIDIA GPU, got none; leave it out")
    began = time.monotonic()
    drawn_tasks = tasks(options.seed, device)
    words = f" --seed {options.seed}"
    if options.gradients:
        drawn_tasks = gradient_tasks(options.seed, device, options.repeats)
        words += f" --gradients --repeats {options.repeats}"
    if options.only is not None:
        drawn_tasks = itertools.islice(drawn_tasks, options.only, options.only + 1)
    tally = fuzz(drawn_tasks, options.count, options.jobs, device)
    text = report(tally, words, time.monotonic() - began, device)
    print(text)
    if options.write:
        name = "cpu" if device is None else device.name
        keep(f"fuzz_{'gradients_' if options.gradients else ''}{name}", text)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
