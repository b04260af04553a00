"""`autoattn report`: the cache as one HTML file and one Markdown file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = "Example: [bold]autoattn report --cache cache --out report[/]"


def command(
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            metavar="DIR",
            help="Only this cache; yours and the shipped if left out.",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="DIR", help="A baseline cache: say what changed against it."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write into.")] = Path("report"),
) -> None:
    """Write a report of what was tuned: DIR/report.html, one file that needs no other, and a summary, DIR/report.md."""
    from autoattn import report

    for path in report.build(cache, out, against):
        print(path)
