"""`autoattn bench`: our kernels and everybody else's, side by side."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autoattn.cli import options, rows
from autoattn.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoattn.bench.kernel_results import Options, Row, Run
    from autoattn.core.problem import Problem

EXAMPLES = (
    "Examples:\n\n[bold]autoattn bench benchmarks/shapes/h200_dense.yaml --out bench[/]\n\n"
    "[bold]autoattn bench shapes.yaml --peers sdpa-flash,sdpa-cudnn,fa4 --only D128 --inputs trained --out bench[/]"
    "\n\nTraining steps of whole models: [bold]autoattn bench model --help[/]; passes of one attention: "
    "[bold]autoattn bench passes --help[/]; one over GPUs: [bold]autoattn bench ranks --help[/]"
)
PEERS = "sdpa-flash,sdpa-cudnn,sdpa-efficient,varlen-flash,flex,fa2,fa3,fa4,flashinfer"


def command(
    shapes: Annotated[Path, typer.Argument(metavar="SHAPES", help="YAML file of problems (docs/shapes.md).")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write into.")] = Path("bench"),
    peers: Annotated[
        str, typer.Option("--peers", metavar="A,B,C", help="Whom to run beside ours: sdpa, or any of the default's.")
    ] = PEERS,
    group: options.Groups = None,
    only: options.Only = None,
    inputs: Annotated[
        Literal["random", "trained"],
        typer.Option("--inputs", help="Normal numbers, or numbers with a trained model's sinks and heavy tails."),
    ] = "random",
    ours: Annotated[
        Literal["dispatch", "variants"],
        typer.Option("--ours", help="What a call runs, or also each kernel that the cache and the seeds name."),
    ] = "dispatch",
    seconds: Annotated[float, typer.Option("--seconds", help="Of rounds, for each contestant of a problem.")] = 0.2,
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Rounds of each problem, in place of --seconds.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the inputs, and of the order within rounds.")] = 0,
) -> None:
    """Time our kernels beside other people's on the GPU in this machine: in one process, on the same inputs, in
    interleaved rounds.

    Of problems whose operation is backward, the backward passes alone are timed. Every answer is checked first. Writes
    DIR/bench.md, DIR/bench.csv and DIR/bench.svg anew after each problem, so that Ctrl-C keeps what was done. What is
    missing, fails or is wrong is named, and the others go on.
    """
    options.at_least("--seconds", 0.0, seconds)
    options.at_least("--rounds", 1, rounds)
    options.seed(seed)
    problems = picked(shapes, group, only)
    from autoattn.baselines import external as others
    from autoattn.bench import kernel_bench
    from autoattn.bench.kernel_results import Inputs, Options, Ours, Run
    from autoattn.cli import memory
    from autoattn.hardware import nvidia

    chosen = others.named(peers)
    settings = Options(seconds=seconds, rounds=rounds, inputs=Inputs(inputs), ours=Ours(ours), seed=seed)
    run = Run(
        machine=kernel_bench.machine(chosen),
        command=_spelled(shapes, out, peers, group, only, settings),
        options=settings,
        peers=tuple(peer.name for peer in chosen),
        missing={peer.name: why for peer in chosen if (why := peer.why_missing()) is not None},
        planned=len(problems),
    )
    card = nvidia.present()
    _go(
        run,
        kernel_bench.rows(problems, chosen, settings),
        out,
        memory.warning(problems, card) if card is not None else None,
    )


def picked(shapes: Path, group: list[str] | None, only: list[str] | None) -> list[Problem]:
    """The problems of a file that --group and --only leave.

    Raises:
        UsageError: they leave none.
    """
    problems = [shape.problem for shape in options.problems_of(shapes, group, None)]
    picked = [problem for problem in problems if not only or any(text in str(problem) for text in only)]
    if not picked:
        raise UsageError(
            f"--only must be part of a problem's printed name, got {', '.join(map(repr, only or ()))}; {shapes} has "
            f"{problems[0]} and {len(problems) - 1} more"
        )
    return picked


def _spelled(
    shapes: Path, out: Path, peers: str, group: list[str] | None, only: list[str] | None, settings: Options
) -> str:
    """The command that repeats the run."""
    words = ["autoattn", "bench", str(shapes), "--peers", peers]
    for name, values in (("--group", group), ("--only", only)):
        for value in values or ():
            words += [name, value]
    for name in ("inputs", "ours", "seconds", "rounds", "seed"):
        value = getattr(settings, name)
        words += [] if value is None else [f"--{name}", f"{getattr(value, 'value', value)}"]
    return shlex.join([*words, "--out", str(out)])


def _go(run: Run, results: Iterator[Row], out: Path, warning: str | None) -> None:
    from autoattn.report import kernel_tables

    def standing() -> list[str]:
        best = kernel_tables.against_best(run.rows)
        if best is None:
            return []
        return [
            f"Ours over the best peer: {best.mean:.3f} in the geometric mean of {best.rows} problems, lowest "
            f"{best.lowest:.3f} ({best.worst.problem}), {best.below} below 1"
        ]

    problems = f"{run.planned} problems, {run.options.inputs.value} inputs; kernels are compiled first"
    rows.take(
        results,
        head=[
            f"{run.machine['card']}: {problems}",
            *(f"{name} is missing: {why}" for name, why in run.missing.items()),
            *([warning] if warning is not None else []),
        ],
        keep=run.rows.append,
        lines=lambda row: [line(run, row)],
        write=lambda: kernel_tables.write(run, out),
        tail=standing,
        failed=lambda: any(row.ours is None for row in run.rows),
    )


def line(run: Run, row: Row) -> str:
    """One finished problem."""
    from autoattn.report import figures

    width = len(str(run.planned))
    head = f"[{len(run.rows):>{width}}/{run.planned}] {row.problem}: "
    if row.ours is None:
        first = row.contestants[0] if row.contestants else None
        return head + figures.printable(f"{first.name} {first.state.value}, {first.detail}" if first else row.note)
    words = [f"{figures.tflops(row.tflops(row.ours))} TFLOP/s"]
    if row.ratio is not None:
        words.append(f"{row.ratio:.3f}x the best peer")
    words += [
        f"{contestant.name} {figures.tflops(row.tflops(contestant))}"
        for contestant in row.contestants
        if contestant.timed and not contestant.ours
    ]
    words += [
        f"{contestant.name} {contestant.state.value}"
        for contestant in row.contestants
        if contestant.state.value not in ("ok", "absent")
    ]
    return head + ", ".join(words)
