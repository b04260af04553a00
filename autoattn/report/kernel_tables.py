"""Writes a kernel benchmark as a Markdown table, a CSV with every number, and a chart."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autoattn import report
from autoattn.bench.kernel_results import Contestant, Row, Run, State, Timing
from autoattn.core.problem import Op
from autoattn.report import figures, files, kernel_chart

COLUMNS = (
    "problem", "key", "contestant", "ours", "state", "detail", "timing", "calls_per_sample", "median_us", "p20_us",
    "p80_us", "samples", "tflops", "over_ours", "host_us", "first_call_s", "max_error", "allowed_error", "route",
    "level", "template", "params", "clock_mhz_median", "clock_mhz_min", "temperature_c_max", "slowed", "clock_reasons",
    "samples_us",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Our kernels against one peer, or against the best of each row."""

    name: str
    rows: int
    mean: float  # geometric mean of its time over ours; above 1 ours is faster
    lowest: float
    highest: float
    worst: Row  # where it is lowest
    below: int  # rows under 1


def write(run: Run, out: Path) -> tuple[Path, ...]:
    """Writes `bench.md`, `bench.csv` and `bench.svg` into `out`, which is made when it is missing; returns the paths.

    Raises:
        OSError: `out` cannot be written.
    """
    texts = {"bench.md": markdown_text(run), "bench.csv": csv_text(run), "bench.svg": kernel_chart.svg_text(run)}
    return files.write_all(out, texts)


def against_best(rows: Iterable[Row]) -> Standing | None:
    """Ours against the fastest right peer of each row; None where no row has both."""
    return _standing("best of each row", [(row.ratio, row) for row in rows if row.ratio is not None])


def against_each(rows: Iterable[Row]) -> list[Standing]:
    """Ours against each peer, over the rows that both have a time in."""
    by_peer: dict[str, list[tuple[float, Row]]] = {}
    for row in rows:
        ours = row.ours
        for contestant in row.contestants if ours is not None else ():
            if ours is not None and contestant.timed and not contestant.ours:
                by_peer.setdefault(contestant.name, []).append((contestant.median_us / ours.median_us, row))
    standings = (_standing(name, ratios) for name, ratios in by_peer.items())
    return [standing for standing in standings if standing is not None]


def _standing(name: str, ratios: list[tuple[float, Row]]) -> Standing | None:
    if not ratios:
        return None
    numbers = [ratio for ratio, _ in ratios]
    return Standing(
        name=name,
        rows=len(ratios),
        mean=figures.geometric_mean(numbers),
        lowest=min(numbers),
        highest=max(numbers),
        worst=min(ratios, key=lambda pair: pair[0])[1],
        below=sum(number < 1.0 for number in numbers),
    )


def ran(row: Row) -> str:
    """What our fastest ran: template and tile, or the rival that a call takes, and how dispatch came to it."""
    ours = row.ours
    if ours is None:
        return "-"
    what = f"{ours.route} {figures.tile_of(ours.variant)}" if ours.variant is not None else ours.route
    return f"{what}, {ours.level or ours.name}"


def cell(row: Row, name: str) -> str:
    """A peer's rate in a row, or in a word why it has none."""
    peer = next((contestant for contestant in row.contestants if contestant.name == name), None)
    if peer is None or peer.state is State.ABSENT:
        return "-"
    return figures.tflops(row.tflops(peer)) if peer.timed else peer.state.value


def remarks(run: Run) -> list[tuple[str, str, int]]:
    """(contestant, what is the matter, rows) of all that was not compared, or not quite; missing peers first."""
    counted: Counter[tuple[str, str]] = Counter()
    for row in run.rows:
        for contestant in row.contestants:
            if contestant.detail and contestant.name not in run.missing:
                known = "" if contestant.state in (State.OK, State.ABSENT) else f"{contestant.state.value}: "
                counted[contestant.name, known + contestant.detail] += 1
    missing = [(name, why, len(run.rows)) for name, why in run.missing.items()]
    return missing + [(name, why, count) for (name, why), count in counted.items()]


def clock(row: Row) -> str:
    """Clock, temperature and what held the clock down, over the rounds of a row."""
    if not row.pulses:
        return "-"
    clocks = [pulse.clock_mhz for pulse in row.pulses]
    heat = max((pulse.temperature_c for pulse in row.pulses if pulse.temperature_c is not None), default=None)
    reasons = Counter(reason for pulse in row.pulses for reason in pulse.reasons)
    words = [f"{statistics.median(clocks):.0f} MHz ({min(clocks)} to {max(clocks)})"]
    words += [f"{heat} C"] if heat is not None else []
    words += [f"{reason} in {100 * count / len(clocks):.0f}% of rounds" for reason, count in reasons.items()]
    return ", ".join(words)


def markdown_text(run: Run) -> str:
    """Header, table, standings, what was not compared, kernels and clocks."""
    jinja_environment = report.environment(finalize=report.markdown_cell)
    jinja_environment.filters.update(ran=ran, cell=cell, clock=clock, spread=_spread, precise=precise)
    return jinja_environment.get_template("comparison.md.j2").render(
        run=run,
        best=against_best(run.rows),
        each=against_each(run.rows),
        remarks=remarks(run),
        shown=[name for name in run.peers if name not in run.missing],
        graph=Timing.GRAPH,
        backward=Op.BACKWARD,
        fenced=report.fenced,
    )


def precise(ratio: float) -> str:
    """A ratio with three digits, so that what is just below 1 is seen to be."""
    return f"{ratio:.3f}x"


def _spread(contestant: Contestant) -> str:
    return f"{figures.microseconds(contestant.quantile_us(0.2))} to {figures.microseconds(contestant.quantile_us(0.8))}"


def csv_text(run: Run) -> str:
    """A line for each problem and contestant, with every sample."""
    lines = (
        _facts(row, contestant) | (_numbers(row, contestant) if contestant.times_us else {})
        for row in run.rows
        for contestant in row.contestants or (Contestant(name="", state=State.FAILED, detail=row.note),)
    )
    return files.csv_text(COLUMNS, lines)


def _facts(row: Row, contestant: Contestant) -> dict[str, object]:
    return {
        "problem": row.problem,
        "key": row.problem.key,
        "contestant": contestant.name,
        "ours": int(contestant.ours),
        "state": contestant.state.value,
        "detail": contestant.detail,
        "first_call_s": _short(contestant.first_s),
        "max_error": _short(contestant.max_error),
        "allowed_error": _short(contestant.allowed),
        "route": contestant.route,
        "level": contestant.level,
        "template": contestant.variant.template if contestant.variant is not None else "",
        "params": figures.settings(contestant.variant.as_dict()) if contestant.variant is not None else "",
    }


def _numbers(row: Row, contestant: Contestant) -> dict[str, object]:
    clocks = [pulse.clock_mhz for pulse in row.pulses]
    heats = [pulse.temperature_c for pulse in row.pulses if pulse.temperature_c is not None]
    return {
        "timing": row.timing.value,
        "calls_per_sample": contestant.calls,
        "median_us": _short(contestant.median_us),
        "p20_us": _short(contestant.quantile_us(0.2)),
        "p80_us": _short(contestant.quantile_us(0.8)),
        "samples": len(contestant.times_us),
        "tflops": _short(row.tflops(contestant)),
        "over_ours": _short(contestant.median_us / row.ours.median_us) if row.ours is not None else "",
        "host_us": _short(contestant.host_us),
        "clock_mhz_median": _short(statistics.median(clocks)) if clocks else "",
        "clock_mhz_min": min(clocks, default=""),
        "temperature_c_max": max(heats, default=""),
        "slowed": int(any(pulse.slowed for pulse in row.pulses)),
        "clock_reasons": "; ".join(dict.fromkeys(reason for pulse in row.pulses for reason in pulse.reasons)),
        "samples_us": " ".join(_short(sample) for sample in contestant.times_us),
    }


def _short(number: float | None) -> str:
    """Six significant digits, which is more than any clock here has."""
    return "" if number is None else f"{number:.6g}"
