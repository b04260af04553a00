"""`autoattn warm`: compile ahead what calls will need."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from autoattn.cli import options

EXAMPLES = (
    "Examples:\n\n[bold]autoattn warm shapes.yaml[/]\n\n[bold]autoattn warm shapes.yaml --device h200 --jobs 8[/]"
)


def command(
    shapes: Annotated[Path, typer.Argument(metavar="SHAPES", help="YAML file of problems (docs/shapes.md).")],
    device: options.Device = "auto",
    group: options.Groups = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="DIR", help="Only this cache; yours and the shipped if left out.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Compiler processes; one for each core if left out.")
    ] = None,
) -> None:
    """Compile the kernels that calls of these problems need, so that no call waits for a compiler.

    For each problem: the output, the output with the LSE, and the gradients where a kernel computes them. Kernels go to
    Triton's cache, where other processes find them. The device need not be in this machine. Exits with 1 if the
    compiler refuses all kernels of an answer.
    """
    options.at_least("--jobs", 1, jobs)
    problems = [named.problem for named in options.problems_of(shapes, group, None)]
    from autoattn.hardware import nvidia
    from autoattn.report import figures
    from autoattn.runtime import warm_up

    card, _ = nvidia.resolve(device)
    begin, ready, refused = time.monotonic(), 0, 0
    for kernel in warm_up.kernels_of(problems, card, cache=cache, jobs=jobs):
        ready += kernel.variant is not None
        refused += kernel.refused
        print(figures.printable(str(kernel)), flush=True)
    print(f"{ready} ready in {time.monotonic() - begin:.1f} s, {refused} refused")
    if refused:
        raise typer.Exit(1)
