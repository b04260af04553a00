"""Writes ablations as tables in the layout of published ones of an A100 and in rates of kept pairs, and a CSV."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from autoattn import report
from autoattn.bench.ablation import Cell, Row, Run
from autoattn.core.mask import Mask, MaskKind
from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome
from autoattn.report import figures, files

COLUMNS = (
    "problem", "key", "template", "change", "step", "attention", "outcome", "detail", "evidence", "time_us",
    "tflops", "over_baseline", "share_of_bound", "clock_mhz_median", "clock_mhz_min", "samples", "registers",
    "spilled_bytes", "shared_bytes", "params", "samples_us",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One change over all problems of a template."""

    name: str
    problems: int
    mean: float  # geometric mean of the baseline's time over its own; above 1 it is faster
    lowest: float
    highest: float


def write(run: Run, out: Path) -> tuple[Path, ...]:
    """Writes `ablations.md` and `ablations.csv` into `out`, which is made when it is missing; returns the paths.

    Raises:
        OSError: `out` cannot be written.
    """
    texts = {"ablations.md": markdown_text(run), "ablations.csv": csv_text(run)}
    return files.write_all(out, texts)


def effects(rows: Iterable[Row]) -> list[Effect]:
    """What each change does to the time, in the order of the table."""
    by_change: dict[str, list[float]] = {}
    for row in rows:
        for cell in row.cells:
            if math.isfinite(row.over_baseline(cell)) and cell is not row.baseline:
                by_change.setdefault(cell.change.name, []).append(row.over_baseline(cell))
    return [
        Effect(
            name=name,
            problems=len(ratios),
            mean=figures.geometric_mean(ratios),
            lowest=min(ratios),
            highest=max(ratios),
        )
        for name, ratios in by_change.items()
    ]


def published_flops(problem: Problem) -> float:
    """Operations as the A100 tables (flash2_a100.yaml) count them: of the full mask, and half for a causal one."""
    full = replace(problem, mask=Mask()).flops()
    return full / 2 if problem.mask.causal else float(full)


def published(row: Row, cell: Cell | None) -> str:
    """TFLOP/s as the A100 tables count them."""
    return "-" if cell is None else f"{published_flops(row.problem) / cell.time_us / 1e6:.2f}"


def milliseconds(cell: Cell | None) -> str:
    """The time in milliseconds, three digits behind the point as in the A100 tables."""
    return "-" if cell is None else f"{cell.time_us / 1e3:.3f}"


def clock(run: Run, cells: Iterable[Cell | None]) -> str:
    """The SM clock behind the cells' samples: median and lowest; without a measurement the one that is assumed."""
    if not run.measured:
        return f"{run.device.sustained_clock_mhz} (assumed)"
    clocks = sorted(clock for cell in cells if cell is not None for clock in cell.clocks_mhz)
    return f"{clocks[len(clocks) // 2]} ({clocks[0]})" if clocks else "-"


def state(cell: Cell) -> str:
    """Why a cell has no time, in words."""
    if math.isfinite(cell.time_us):
        return ""
    return cell.detail if cell.outcome is Outcome.OK else f"{cell.outcome.value}: {cell.detail}"


def precise(ratio: float) -> str:
    """A ratio with three digits."""
    return f"{ratio:.3f}x" if math.isfinite(ratio) else "-"


def of_bound(row: Row, cell: Cell) -> float:
    """The share of the bound's rate that a cell reaches; NaN where either has no time."""
    return row.bound.time_us / cell.time_us if row.bound is not None else math.nan


def share(part: float) -> str:
    """A share in percent."""
    return f"{100 * part:.0f}%" if math.isfinite(part) else "-"


def markdown_text(run: Run) -> str:
    """Header, what each change does on average, the tables in the layout of the A100 tables, and every row."""
    jinja_environment = report.environment(finalize=report.markdown_cell)
    jinja_environment.filters.update(
        effects=effects, precise=precise, share=share, ms=milliseconds, why=state, clock=lambda cells: clock(run, cells)
    )
    templates = list(dict.fromkeys(row.template for row in run.rows if row.baseline is not None))
    return jinja_environment.get_template("ablation.md.j2").render(
        run=run,
        templates=templates,
        rows_of={name: [row for row in run.rows if row.template == name and row.cells] for name in templates},
        without=[row for row in run.rows if not row.cells],
        full=MaskKind.FULL,
        published=published,
        of_bound=of_bound,
        fenced=report.fenced,
    )


def csv_text(run: Run) -> str:
    """A line for each problem, template and change, with every sample."""
    lines = (
        _facts(run, row, cell) | (_numbers(row, cell) if math.isfinite(cell.time_us) else {})
        for row in run.rows
        for cell in row.cells
    )
    return files.csv_text(COLUMNS, lines)


def _facts(run: Run, row: Row, cell: Cell) -> dict[str, object]:
    compiled = cell.report
    return {
        "problem": row.problem,
        "key": row.problem.key,
        "template": row.template,
        "change": cell.change.name,
        "step": cell.change.step,
        "attention": int(not cell.change.bound),
        "outcome": cell.outcome.value,
        "detail": cell.detail,
        "evidence": "measured" if run.measured else "predicted",
        "registers": compiled.registers if compiled is not None else "",
        "spilled_bytes": compiled.spilled_bytes if compiled is not None else "",
        "shared_bytes": compiled.shared_bytes if compiled is not None else "",
        "params": figures.settings(cell.change.variant.as_dict()) if cell.change.variant is not None else "",
    }


def _numbers(row: Row, cell: Cell) -> dict[str, object]:
    numbers = {
        "time_us": cell.time_us,
        "tflops": row.tflops(cell),
        "over_baseline": row.over_baseline(cell),
        "share_of_bound": of_bound(row, cell),
        "clock_mhz_median": cell.clock_mhz,
        "clock_mhz_min": min(cell.clocks_mhz, default=math.nan),
    }
    return {
        **{name: f"{number:.6g}" if math.isfinite(number) else "" for name, number in numbers.items()},
        "samples": len(cell.times_us),
        "samples_us": " ".join(f"{sample:.6g}" for sample in cell.times_us),
    }
