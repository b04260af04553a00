"""`autoattn bench passes`: the passes of one attention: forward, backward and both."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoattn.bench.pass_results import Options, Row, Run, Table
from autoattn.bench.training_results import Numbers, State, Whose
from autoattn.cli import options, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = (
    "Examples:\n\n[bold]autoattn bench passes --out bench[/]\n\n"
    "[bold]autoattn bench passes --tables flash --contexts 16384,32768 --dtype bf16 --out bench[/]"
)


def command(
    tables: Annotated[str, typer.Option("--tables", metavar="A,B", help="Which tables.")] = "attention,flash",
    contexts: Annotated[
        str | None, typer.Option("--contexts", metavar="A,B,C", help="Tokens of a sequence; the tables' if left out.")
    ] = None,
    head_dims: Annotated[
        str | None, typer.Option("--head-dims", metavar="A,B,C", help="Head dims; the tables' if left out.")
    ] = None,
    attention: Annotated[
        str, typer.Option("--attention", metavar="A,B,C", help="Whose attention: any of these, and flex.")
    ] = "autoattn,naive,sdpa",
    dtype: Annotated[str, typer.Option("--dtype", metavar="A,B", help="fp32 and bf16; the first table has fp32.")] = (
        "fp32,bf16"
    ),
    seconds: Annotated[float, typer.Option("--seconds", help="Of rounds, for each attention and part.")] = 0.1,
    seed: Annotated[int, typer.Option("--seed", help="Of the inputs, and of the order within rounds.")] = 0,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write into.")] = Path("bench"),
) -> None:
    """Time forward, backward and both of one attention on the GPU in this machine, and weigh the memory that they take:
    two published tables (benchmarks/shapes/passes.yaml), with autoattn's attention, the formula and SDPA.

    Outputs and gradients are checked first. Writes DIR/passes.md, DIR/passes.csv, DIR/passes.svg and
    DIR/passes-memory.svg anew after each call, so that Ctrl-C keeps what was done.
    """
    options.at_least("--seconds", 0.0, seconds)
    options.seed(seed)
    settings = Options(
        tables=options.choices("--tables", tables, Table),
        attention=options.choices("--attention", attention, Whose),
        contexts=() if contexts is None else options.lengths("--contexts", contexts),
        head_dims=() if head_dims is None else options.lengths("--head-dims", head_dims),
        numbers=options.choices("--dtype", dtype, Numbers),
        seconds=seconds,
        seed=seed,
    )
    from autoattn.bench import kernel_bench

    machine = kernel_bench.machine(())
    from autoattn.bench import pass_bench

    run = Run(machine=machine, command=spelled(settings, out), options=settings)
    _go(run, pass_bench.rows(settings), out)


def spelled(settings: Options, out: Path) -> str:
    """The command that repeats the run."""
    lists = {
        "tables": [table.value for table in settings.tables],
        "contexts": settings.contexts,
        "head-dims": settings.head_dims,
        "attention": [whose.value for whose in settings.attention],
        "dtype": [numbers.value for numbers in settings.numbers],
    }
    words = ["autoattn", "bench", "passes"]
    for name, values in lists.items():
        words += [f"--{name}", ",".join(map(str, values))] if values else []
    return shlex.join([*words, "--seconds", f"{settings.seconds:g}", "--seed", str(settings.seed), "--out", str(out)])


def _go(run: Run, results: Iterator[list[Row]], out: Path) -> None:
    from autoattn.report import pass_tables

    rows.take(
        results,
        head=[f"{run.machine['card']}: {len(run.options.cases())} calls"],
        keep=run.cases.append,
        lines=lambda case: [line(run, case)],
        write=lambda: pass_tables.write(run, out),
        failed=lambda: any(row.state in (State.FAILED, State.WRONG) for case in run.cases for row in case),
    )


def line(run: Run, case: list[Row]) -> str:
    """One finished call."""
    from autoattn.report import figures, pass_tables

    planned = len(run.options.cases())
    words = [f"{row.whose.value} {pass_tables.line(row)}" for row in case]
    return f"[{len(run.cases):>{len(str(planned))}}/{planned}] {case[0].case}: " + figures.printable("; ".join(words))
