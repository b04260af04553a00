"""What reaches the terminal: tables and JSON; nothing that a file holds is taken for markup or control codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoattn.report.figures import printable as printable

FOLDED = 24  # characters that a column of words wants before it is folded
PLAIN_WIDTH = 200  # characters; what is not a terminal has no width of its own


def console() -> Console:
    """Writes to stdout as it is now; plain and wide when that is not a terminal."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def print_table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table; the most important columns come first, and the last ones give way on a narrow terminal.

    ">" before a column's name sets it flush right on one line, "=" keeps it on one line.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    shown = _fitting(console.width, columns, cells)
    table = Table(title=Text(printable(title)), title_justify="left", title_style="bold", box=SIMPLE, pad_edge=False)
    for column in columns[:shown]:
        whole = column.startswith((">", "="))
        right = column.startswith(">")
        table.add_column(Text(column[whole:]), justify="right" if right else "left", no_wrap=whole)
    for row in cells:
        table.add_row(*map(Text, row[:shown]))
    console.print(table)
    if shown < len(columns):
        left_out = ", ".join(column.lstrip(">=") for column in columns[shown:])
        console.print(f" (left out on {console.width} columns: {left_out})\n", soft_wrap=True)


def _fitting(width: int, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """How many of the columns fit into `width`; the first three always do."""
    used = 2
    for position, column in enumerate(columns):
        whole = column.startswith((">", "="))
        longest = max((len(row[position]) for row in cells), default=0)
        used += max(len(column) - whole, longest if whole else min(longest, FOLDED)) + 3
        if used > width and position >= 3:
            return position
    return len(columns)


def print_json(document: object) -> None:
    """Prints facts as one JSON document; a number that JSON cannot hold (NaN, infinity) becomes null."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")
