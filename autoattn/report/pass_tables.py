"""Writes the pass benchmark as Markdown tables, a CSV with every number, and charts of time and of memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoattn import report
from autoattn.bench.pass_results import Case, Part, Row, Run, Table, over_ours
from autoattn.bench.training_results import State, Whose
from autoattn.report import figures, files, kernel_chart
from autoattn.report.training_tables import STYLES

COLUMNS = (
    "table", "context", "head_dim", "dtype", "attention", "part", "state", "detail", "ran", "median_ms",
    "over_autoattn", "timing", "calls_per_sample", "before_backward_bytes", "peak_bytes", "samples_us",
)  # fmt: skip


def write(run: Run, out: Path) -> tuple[Path, ...]:
    """Writes `passes.md`, `.csv`, `.svg` and `-memory.svg` into `out`, which is made when it is missing.

    Returns:
        The paths.

    Raises:
        OSError: `out` cannot be written.
    """
    return files.write_charted(
        out, "passes", markdown=markdown_text(run), numbers=csv_text(run), chart=time_text(run),
        memory=memory_text(run),
    )  # fmt: skip


def tokens(case: Case) -> str:
    """A call's context, with a mark where the tables have no numbers."""
    return f"{case.context:,}{' †' if case.lost else ''}"


def milliseconds(row: Row, part: Part) -> str:
    """A part's time, with a mark where it was a graph's; a word where there is none."""
    if part not in row.times:
        return "-" if row.state is State.OK else row.state.value
    time = row.times[part]
    digits = 3 if time.ms < 10 else 2
    return f"{time.ms:.{digits}f}{' g' if time.graph else ''}"


def line(row: Row) -> str:
    """A row on one line: its times and memory, or why it has none."""
    if not row.times:
        return f"{row.state.value}, {row.detail}"
    times = " / ".join(milliseconds(row, part) for part in Part)
    return f"{times} ms, {mebibytes(row.peak_bytes)} MiB"


def mebibytes(count: int | None) -> str:
    """Bytes in MiB."""
    return "-" if count is None else f"{count / 2**20:,.1f}"


def markdown_text(run: Run) -> str:
    """Header, tables of times and of memory, and what has no numbers with the reason."""
    jinja_environment = report.environment(finalize=report.markdown_cell)
    jinja_environment.filters.update(tokens=tokens, ms=milliseconds, mib=mebibytes)
    peers = [whose for whose in run.options.attention if whose is not Whose.OURS]

    def ratio(rows: list[Row], whose: Whose, part: Part) -> str:
        return figures.times(over_ours(rows, whose, part))

    return jinja_environment.get_template("passes.md.j2").render(
        run=run, fenced=report.fenced, tables=list(Table), parts=list(Part), others=peers, ratio=ratio,
        whose=run.options.attention,
    )  # fmt: skip


def csv_text(run: Run) -> str:
    """A line for each part of each row, with every sample."""
    return files.csv_text(COLUMNS, (_line(rows, row, part) for rows in run.cases for row in rows for part in Part))


def _line(rows: list[Row], row: Row, part: Part) -> dict[str, object]:
    case = row.case
    facts: dict[str, object] = {
        "table": case.table.value,
        "context": case.context,
        "head_dim": case.head_dim,
        "dtype": case.numbers.value,
        "attention": row.whose.value,
        "part": part.value,
        "state": row.state.value,
        "detail": row.detail,
        "ran": row.ran,
        "before_backward_bytes": "" if row.before_bytes is None else row.before_bytes,
        "peak_bytes": "" if row.peak_bytes is None else row.peak_bytes,
    }
    if part not in row.times:
        return facts
    time, over = row.times[part], over_ours(rows, row.whose, part)
    return facts | {
        "median_ms": f"{time.ms:.6g}",
        "over_autoattn": f"{over:.6g}" if math.isfinite(over) else "",
        "timing": "graph" if time.graph else "events",
        "calls_per_sample": time.calls,
        "samples_us": " ".join(f"{sample:.6g}" for sample in time.samples_us),
    }


# --- charts -----------------------------------------------------------------------------------------------------------


def time_text(run: Run) -> str:
    """Forward and backward together: bars are shares of the slowest of their own call."""
    return _barred(
        run,
        lambda row: row.ms(Part.BOTH) if Part.BOTH in row.times else None,
        title="forward and backward of one attention",
        unit="bars: share of the call's slowest; numbers: milliseconds",
        measure="ms",
        shares=True,
    )


def memory_text(run: Run) -> str:
    """What both passes allocate at most; all bars on one scale, so that growth is seen."""
    return _barred(
        run,
        lambda row: row.peak_bytes / 2**20 if row.peak_bytes is not None else None,
        title="memory of one attention's forward and backward",
        unit="MiB allocated at most: inputs, output, what autograd keeps, and gradients",
        measure="MiB",
        shares=False,
    )


def _barred(run: Run, number: Callable[[Row], float | None], **facts: Any) -> str:
    """A chart of the calls that have such a number; the fewer the better."""
    cases: dict[str, dict[str, float]] = {}
    for rows in run.cases:
        numbers = {row.whose.value: value for row in rows if (value := number(row)) is not None}
        if numbers:
            cases[str(rows[0].case)] = numbers
    return kernel_chart.barred(cases, styles=STYLES, card=run.machine["card"], best=min, **facts)
