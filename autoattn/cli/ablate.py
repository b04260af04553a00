"""`autoattn ablate`: what each step of our kernels costs, and what the two products alone would take."""

from __future__ import annotations

import shlex
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoattn.cli import options, rows
from autoattn.cli.bench import picked
from autoattn.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoattn.bench.ablation import Row, Run

EXAMPLES = (
    "Examples:\n\n[bold]autoattn ablate benchmarks/shapes/flash2_a100.yaml --out ablations[/]\n\n"
    "[bold]autoattn ablate benchmarks/shapes/flash2_a100.yaml --device a30 --out ablations[/]"
)


def command(
    shapes: Annotated[Path, typer.Argument(metavar="SHAPES", help="YAML file of problems (docs/shapes.md).")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write into.")] = Path("ablations"),
    device: options.Device = "auto",
    group: options.Groups = None,
    only: options.Only = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Of each problem: a sample of every kernel a round.")] = 15,
    seed: Annotated[int, typer.Option("--seed", help="Of the order within rounds.")] = 0,
) -> None:
    """Change one step of a template's default kernel at a time (barriers, softmax, masks, persistence) and time each,
    beside the same kernel without softmax: not attention, but the bound that the two products set.

    When the device is in this machine, kernels are checked and measured; when it is not, the model predicts what it
    knows. Writes DIR/ablations.md and DIR/ablations.csv anew after each problem.
    """
    options.at_least("--rounds", 1, rounds)
    options.seed(seed)
    problems = picked(shapes, group, only)
    for problem in problems:
        if problem.op.value != "forward":
            raise UsageError(f"ablate times outputs alone, got {problem}; leave it out: bench times gradients")
    from autoattn.bench import ablation, ablation_bench
    from autoattn.hardware import nvidia

    card, measured = nvidia.resolve(device)
    words = ["autoattn", "ablate", str(shapes), "--device", card.name]
    for name, values in (("--group", group), ("--only", only)):
        words += [word for value in values or () for word in (name, value)]
    run = ablation.Run(
        machine=ablation_bench.machine(card, measured=measured),
        command=shlex.join([*words, "--rounds", str(rounds), "--seed", str(seed), "--out", str(out)]),
        device=card,
        measured=measured,
        planned=len(problems),
    )
    settings = ablation.Options(rounds=rounds, seed=seed)
    _go(run, ablation_bench.run(problems, card, measured=measured, options=settings), out)


def _go(run: Run, results: Iterator[list[Row]], out: Path) -> None:
    from autoattn.report import ablation_tables

    numbers = count(1)

    def numbered(problem: list[Row]) -> list[str]:
        number = next(numbers)
        return [f"[{number}/{run.planned}] {line(row)}" for row in problem]

    how = "measured" if run.measured else "predicted by the model"
    rows.take(
        results,
        head=[f"{run.device.full_name}: {run.planned} problems, {how}"],
        keep=run.rows.extend,
        lines=numbered,
        write=lambda: ablation_tables.write(run, out),
        failed=lambda: all(row.baseline is None for row in run.rows),
    )


def line(row: Row) -> str:
    """One finished problem with one template."""
    from autoattn.report import ablation_tables, figures

    head = f"{row.problem}, {row.template}: "
    if not row.cells:
        return head + figures.printable(row.note)
    if row.baseline is None:
        return head + figures.printable(f"no baseline: {ablation_tables.state(row.cells[0])}")
    words = [f"baseline {figures.tflops(row.tflops(row.baseline))} TFLOP/s"]
    if row.bound is not None:
        words.append(f"no softmax {figures.tflops(row.tflops(row.bound))}")
    changes = [cell for cell in row.cells if cell not in (row.baseline, row.bound)]
    best = max(changes, key=lambda cell: _or_nothing(row.over_baseline(cell)), default=None)
    if best is not None:
        words.append(f"best change {best.change.name} {ablation_tables.precise(row.over_baseline(best))}")
    return head + ", ".join(words)


def _or_nothing(ratio: float) -> float:
    return ratio if ratio == ratio else 0.0
