"""`autoattn verify`: are the cached kernels still right?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoattn.cli import options

EXAMPLES = "Example: [bold]autoattn verify --device a30 --cache cache[/]"


def command(
    device: options.Device = "auto",
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="DIR", help="Only this cache; yours and the shipped if left out.")
    ] = None,
) -> None:
    """Check cached kernels again: on the GPU when it is in this machine, else by digests and Triton's interpreter.

    Exits with 1 when a kernel fails.
    """
    from autoattn import gpu
    from autoattn.cli import show, terminal
    from autoattn.errors import StateError
    from autoattn.verify import verify

    card, _ = gpu.resolve(device)
    # The user's entry shadows the shipped one of the same problem, as it does when a model runs.
    entries = {}
    for _, file in reversed(show.read(card.name, cache)):
        entries.update(file.entries)
    if not entries:
        raise StateError(
            f"there must be cached kernels to verify, found none for {card.name}; run autoattn tune, or name a --cache"
        )
    checked = verify([entry for _, entry in sorted(entries.items())], card)
    rows = [(check.problem, "ok" if check.ok else "FAILED", check.detail) for check in checked]
    terminal.print_table(terminal.console(), f"{card.name}, {len(rows)} kernels", ("=Problem", "", "Detail"), rows)
    if not all(check.ok for check in checked):
        raise typer.Exit(1)
