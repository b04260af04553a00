"""Prints the rows of a benchmark as they come, and writes all known results after each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import typer

from autoattn.cli.exit_codes import INTERRUPTED

Row = TypeVar("Row")


def take(
    rows: Iterator[Row],
    *,
    head: Iterable[str],
    keep: Callable[[Row], object],
    lines: Callable[[Row], Iterable[str]],
    write: Callable[[], Iterable[Path]],
    tail: Callable[[], Iterable[str]] = tuple,
    failed: Callable[[], bool],
) -> None:
    """Prints and writes until the rows or the user's patience end; what was done before Ctrl-C is kept.

    Args:
        head, tail: lines before the rows and behind them.
        keep: adds a row to what is known.
        lines: tells of it, once it is kept.
        write: writes all that is known; gives the paths.
        failed: whether it was all in vain, or some of it.

    Raises:
        typer.Exit: with 130 after Ctrl-C, else with 1 where it `failed`.
    """
    from autoattn.cli import terminal

    console = terminal.console()

    def say(texts: Iterable[str]) -> None:
        for text in texts:
            console.print(text, soft_wrap=True)

    say(head)
    interrupted = False
    try:
        for row in rows:
            keep(row)
            say(lines(row))
            write()
    except KeyboardInterrupt:
        interrupted = True
    say(tail())
    say(map(str, write()))
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if failed():
        raise typer.Exit(1)
