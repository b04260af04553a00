"""Rows that a bench gives one by one: what is printed, what is written, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from autoattn.cli import rows


def taken(numbers: Iterator[int], *, failed: bool = False) -> tuple[list[int], int]:
    """The rows that were noted at each time of writing, and the exit code."""
    noted: list[int] = []
    written: list[int] = []

    def write() -> list[Path]:
        written.append(len(noted))
        return [Path("bench.md")]

    try:
        rows.take(
            numbers,
            head=["head"],
            keep=noted.append,
            lines=lambda row: [f"row {row} of {len(noted)}"],
            write=write,
            tail=lambda: [f"{len(noted)} rows"],
            failed=lambda: failed,
        )
    except typer.Exit as done:
        return written, done.exit_code
    return written, 0


def stopped() -> Iterator[int]:
    yield 1
    raise KeyboardInterrupt


def test_all_that_is_known_is_written_after_each_row_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert taken(iter([7, 9])) == ([1, 2, 2], 0)
    assert capsys.readouterr().out.split("\n") == ["head", "row 7 of 1", "row 9 of 2", "2 rows", "bench.md", ""]


def test_ctrl_c_keeps_what_was_done_and_is_told_by_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert taken(stopped(), failed=True) == ([1, 1], 130)
    assert "1 rows\nbench.md" in capsys.readouterr().out


def test_a_failure_is_told_by_the_exit_code() -> None:
    assert taken(iter([1]), failed=True) == ([1, 1], 1)
