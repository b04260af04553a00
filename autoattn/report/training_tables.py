"""Writes the training benchmark as a Markdown table, a CSV with every number, and charts of speed and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoattn import report
from autoattn.bench.training_results import Row, Run, Whose, over_ours
from autoattn.report import figures, files, kernel_chart

PARTS = ("forward_ms", "backward_ms", "total_ms")
COLUMNS = (
    "model", "context", "batch", "dtype", "mode", "attention", "state", "detail", "ran",
    "forward_ms", "forward_std_ms", "backward_ms", "backward_std_ms", "total_ms", "total_std_ms", "tokens_per_s",
    "over_autoattn", "attention_forward_ms", "attention_backward_ms", "attention_share", "amdahl", "peak_bytes",
    "first_step_s", "loss", "warmup", "steps", "forward_samples_ms", "backward_samples_ms", "total_samples_ms",
)  # fmt: skip
STYLES = {Whose.OURS.value: "c0", Whose.NAIVE.value: "c1", Whose.SDPA.value: "c2", Whose.FLEX.value: "c3"}


def write(run: Run, out: Path) -> tuple[Path, ...]:
    """Writes `model.md`, `model.csv`, `model.svg` and `model-memory.svg` into `out`, which is made when it is missing.

    Returns:
        The paths.

    Raises:
        OSError: `out` cannot be written.
    """
    return files.write_charted(
        out, "model", markdown=markdown_text(run), numbers=csv_text(run), chart=speed_text(run), memory=memory_text(run)
    )


def case_of(row: Row) -> str:
    """What the rows of all attentions share, in words."""
    return f"{row.model} {row.context:,} {row.numbers.value} {row.mode.value}"


def milliseconds(row: Row, part: str) -> str:
    """Mean and standard deviation of a part of the step."""
    mean, spread = row.mean(part), row.spread(part)
    if not math.isfinite(mean):
        return "-"
    return f"{mean:.2f}" + (f" ± {spread:.2f}" if math.isfinite(spread) else "")


def gibibytes(row: Row) -> str:
    """What was allocated at most, in GiB."""
    return "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}"


def markdown_text(run: Run) -> str:
    """Header, table, and what has no numbers with the reason."""
    jinja_environment = report.environment(finalize=report.markdown_cell)
    jinja_environment.filters.update(
        ms=milliseconds,
        gib=gibibytes,
        case=case_of,
        ratio=lambda rows, row: figures.times(over_ours(rows, row.whose) or math.nan),
    )
    return jinja_environment.get_template("timetable.md.j2").render(run=run, fenced=report.fenced)


def csv_text(run: Run) -> str:
    """A line for each row, with every sample."""
    lines = (_facts(run, row) | _numbers(rows, row) for rows in run.cases() for row in rows)
    return files.csv_text(COLUMNS, lines)


def _facts(run: Run, row: Row) -> dict[str, object]:
    return {
        "model": row.model,
        "context": row.context,
        "batch": row.batch,
        "dtype": row.numbers.value,
        "mode": row.mode.value,
        "attention": row.whose.value,
        "state": row.state.value,
        "detail": row.detail,
        "ran": row.ran,
        "peak_bytes": "" if row.peak_bytes is None else row.peak_bytes,
        "first_step_s": _short(row.first_s),
        "loss": _short(row.loss),
        "warmup": run.options.warmup,
        "steps": len(row.times),
    }


def _numbers(rows: list[Row], row: Row) -> dict[str, object]:
    numbers: dict[str, object] = {}
    for part in PARTS:
        name = part.removesuffix("_ms")
        numbers[part] = _short(row.mean(part))
        numbers[f"{name}_std_ms"] = _short(row.spread(part))
        numbers[f"{name}_samples_ms"] = " ".join(_short(getattr(step, part)) for step in row.times)
    return numbers | {
        "tokens_per_s": _short(row.tokens_per_second),
        "over_autoattn": _short(over_ours(rows, row.whose)),
        "attention_forward_ms": _short(row.attention_ms("forward_ms")),
        "attention_backward_ms": _short(row.attention_ms("backward_ms")),
        "attention_share": _short(row.share),
        "amdahl": _short(row.bound),
    }


def _short(number: float | None) -> str:
    """Six significant digits; nothing where there is no number."""
    return "" if number is None or not math.isfinite(number) else f"{number:.6g}"


# --- charts -----------------------------------------------------------------------------------------------------------


def speed_text(run: Run) -> str:
    """Tokens a second: bars are shares of the fastest of their own case."""
    return _bars(
        run,
        lambda row: row.tokens_per_second / 1e3,
        title="training steps",
        unit="bars: share of the case's fastest; numbers: thousands of tokens a second",
        measure="thousand tokens a second",
        best=max,
        shares=True,
    )


def memory_text(run: Run) -> str:
    """GiB that were allocated at most; all bars on one scale, so that growth is seen."""
    return _bars(
        run,
        lambda row: (row.peak_bytes or 0) / 2**30,
        title="memory of training steps",
        unit="GiB allocated at most: weights, gradients and activations",
        measure="GiB",
        best=min,
        shares=False,
    )


def _bars(run: Run, value: Callable[[Row], float], **facts: Any) -> str:
    cases = [timed for rows in run.cases() if (timed := [row for row in rows if row.timed])]
    named = {case_of(rows[0]): {row.whose.value: value(row) for row in rows} for rows in cases}
    return kernel_chart.barred(named, styles=STYLES, card=run.machine["card"], **facts)
