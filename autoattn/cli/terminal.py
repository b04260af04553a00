"""What reaches the terminal: tables and JSON; nothing that a file holds is taken for markup or control codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoattn.report.figures import printable

PLAIN_WIDTH = 200  # characters; what is not a terminal has no width of its own


def console() -> Console:
    """Writes to stdout as it is now; plain and wide when that is not a terminal."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table; a column whose name starts with ">" is set flush right and kept on one line."""
    made = Table(title=Text(printable(title)), title_justify="left", title_style="bold", box=SIMPLE, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        made.add_column(Text(column.removeprefix(">")), justify="right" if right else "left", no_wrap=right)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    return made


def print_json(document: object) -> None:
    """Prints facts as one JSON document; a number that JSON cannot hold (NaN, infinity) becomes null."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")
