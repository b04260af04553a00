"""`autoattn bench model`: training steps of five language models, with everybody's attention."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoattn.bench.training_results import CONTEXTS, Mode, Numbers, Options, Row, Run, State, Whose
from autoattn.cli import options, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = (
    "Examples:\n\n[bold]autoattn bench model --out bench[/]\n\n"
    "[bold]autoattn bench model --models S,2.7B --contexts 1024,4096 --dtype bf16 --modes compiled --out bench[/]"
)
ALL_MODELS = "S,M,L,XL,2.7B"


def command(
    models: Annotated[str, typer.Option("--models", metavar="A,B,C", help="Which models.")] = ALL_MODELS,
    contexts: Annotated[str, typer.Option("--contexts", metavar="A,B,C", help="Tokens of a sequence.")] = ",".join(
        map(str, CONTEXTS)
    ),
    attention: Annotated[
        str, typer.Option("--attention", metavar="A,B,C", help="Whose attention.")
    ] = "autoattn,naive,sdpa,flex",
    dtype: Annotated[str, typer.Option("--dtype", metavar="A,B", help="fp32, and bf16 by autocast.")] = "fp32,bf16",
    modes: Annotated[str, typer.Option("--modes", metavar="A,B", help="eager, and compiled by torch.compile.")] = (
        "eager,compiled"
    ),
    batch: Annotated[int, typer.Option("--batch", help="Sequences in a step.")] = 4,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps before those that are timed.")] = 3,
    steps: Annotated[int, typer.Option("--steps", help="Steps that are timed.")] = 10,
    limit: Annotated[float, typer.Option("--limit", help="Seconds of a row's steps, after its first one.")] = 120.0,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write into.")] = Path("bench"),
) -> None:
    """Time training steps of five language models on the GPU in this machine: forward, backward and both, with
    autoattn's attention, the formula, SDPA and FlexAttention.

    Writes DIR/model.md, DIR/model.csv, DIR/model.svg and DIR/model-memory.svg anew after each row, so that Ctrl-C keeps
    what was done. A row that runs out of memory, takes too long or fails says so, and the others go on.
    """
    for name, lowest, value in (("--batch", 1, batch), ("--warmup", 0, warmup), ("--steps", 1, steps)):
        options.at_least(name, lowest, value)
    options.at_least("--limit", 0.0, limit)
    settings = Options(
        models=options.words("--models", models, ALL_MODELS.split(",")),
        contexts=options.lengths("--contexts", contexts),
        attention=options.choices("--attention", attention, Whose),
        numbers=options.choices("--dtype", dtype, Numbers),
        modes=options.choices("--modes", modes, Mode),
        batch=batch,
        warmup=warmup,
        steps=steps,
        limit=limit,
    )
    from autoattn.bench import kernel_bench

    machine = kernel_bench.machine(())
    from autoattn.bench import training_bench, transformer

    run = Run(machine=machine, command=spelled(settings, out), options=settings)
    _go(run, training_bench.rows([transformer.SIZES[name] for name in settings.models], settings), out)


def spelled(settings: Options, out: Path) -> str:
    """The command that repeats the run."""
    lists = {
        "models": settings.models,
        "contexts": settings.contexts,
        "attention": [whose.value for whose in settings.attention],
        "dtype": [numbers.value for numbers in settings.numbers],
        "modes": [mode.value for mode in settings.modes],
    }
    words = ["autoattn", "bench", "model"]
    for name, values in lists.items():
        words += [f"--{name}", ",".join(map(str, values))]
    for name in ("batch", "warmup", "steps", "limit"):
        words += [f"--{name}", f"{getattr(settings, name):g}"]
    return shlex.join([*words, "--out", str(out)])


def _go(run: Run, results: Iterator[Row], out: Path) -> None:
    from autoattn.report import training_tables

    rows.take(
        results,
        head=[f"{run.machine['card']}: {run.options.planned} rows"],
        keep=run.rows.append,
        lines=lambda row: [line(run, row)],
        write=lambda: training_tables.write(run, out),
        failed=lambda: any(row.state in (State.FAILED, State.WRONG) for row in run.rows),
    )


def line(run: Run, row: Row) -> str:
    """One finished row."""
    from autoattn.report import figures, training_tables

    planned = run.options.planned
    head = f"[{len(run.rows):>{len(str(planned))}}/{planned}] {training_tables.case_of(row)}, {row.whose.value}: "
    if not row.timed:
        return head + figures.printable(f"{row.state.value}, {row.detail}")
    times = f"{row.mean('forward_ms'):.2f} + {row.mean('backward_ms'):.2f} ms, total {row.mean('total_ms'):.2f} ms"
    return f"{head}{times}, attention {figures.percent(row.share)}, {training_tables.gibibytes(row)} GiB, {row.ran}"
