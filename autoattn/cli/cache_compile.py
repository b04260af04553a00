"""`autoattn cache compile`: machine code for the kernels of a cache."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from autoattn.cli import options
from autoattn.errors import StateError


def command(
    cache: Annotated[Path, typer.Option("--cache", metavar="DIR", help="The cache folder to read and to add to.")],
    device: options.Device = "auto",
    shapes: Annotated[
        Path | None,
        typer.Option("--shapes", metavar="FILE", help="Problems beside those of the cache (docs/shapes.md)."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Compiler processes; one for each core if left out.")
    ] = None,
) -> None:
    """Keep the machine code of a cache's kernels beside its entries, so that calls run without a compiler.

    Compiled is what calls of the tuned problems, and of those in FILE, need: the output, the output with the LSE, and
    the gradients. Problems that were tuned on another card of its architecture count too. The device need not be in
    this machine. Kernels whose machine code the folder has stay as they are; those whose text changed are removed.
    """
    options.at_least("--jobs", 1, jobs)
    from autoattn.codegen import precompiled
    from autoattn.hardware import nvidia
    from autoattn.report import figures
    from autoattn.runtime import warm_up
    from autoattn.tools import compiled

    card, _ = nvidia.resolve(device)
    problems = [] if shapes is None else [named.problem for named in options.problems_of(shapes, None, None)]
    problems += compiled.problems_of(cache, card.arch)
    if not problems:
        raise StateError(
            f"{cache} must hold entries of a card of sm_{card.arch}, found none; tune first, or name --shapes"
        )
    begin, refused = time.monotonic(), 0
    removed = compiled.prune(cache, card.arch)
    before = set(precompiled.paths_in(cache, card.arch))
    for kernel in warm_up.kernels_of(problems, card, cache=cache, jobs=jobs, keep=cache):
        refused += kernel.refused
        print(figures.printable(str(kernel)), flush=True)
    paths = precompiled.paths_in(cache, card.arch)
    megabytes = sum(path.stat().st_size for path in paths) / 1e6
    counts = f"{len(set(paths) - before)} compiled in {time.monotonic() - begin:.1f} s, {removed} stale removed"
    print(f"{counts}, {refused} refused; {len(paths)} in {cache} ({megabytes:.1f} MB)")
    if refused:
        raise typer.Exit(1)
