"""How well the cost model ranks kernels that were measured: `python benchmarks/model_quality.py`.

The data are random variants of eight problems and an older kernel's, and finalists of many (measured_kernels.py). A
table of random variants says how well the model finds the fast ones, and a table of finalists by how much its
predictions of the fastest ones err. `--left-out` fits the constants anew for each problem of the first table on all the
others, and for a fifth of the finalists on the other four: these are the honest tables.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import measured_kernels
import model_fit
from kept import tell
from measured_kernels import DEVICE, Case, Row, milliseconds

from autoattn.core.problem import Problem
from autoattn.cost_model.constants import CONSTANTS, Constants
from autoattn.cost_model.kernel_kind import Path
from autoattn.cost_model.occupancy import occupancy

FEWEST = 10  # variants of a row of the first table: of fewer, the first ten are all
FOLDS = 5  # parts of the finalists that are left out in turn


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0, the mean rank where values tie."""
    order = sorted(range(len(values)), key=values.__getitem__)
    mean_ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop + 1 < len(order) and values[order[stop + 1]] == values[order[start]]:
            stop += 1
        for place in order[start : stop + 1]:
            mean_ranks[place] = (start + stop) / 2
        start = stop + 1
    return mean_ranks


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation."""
    x, y = ranks(a), ranks(b)
    mean = (len(x) - 1) / 2
    spread = math.sqrt(sum((i - mean) ** 2 for i in x) * sum((j - mean) ** 2 for j in y))
    return sum((i - mean) * (j - mean) for i, j in zip(x, y, strict=True)) / spread if spread else 0.0


def regret(cases: Sequence[Case], predicted: Sequence[float], first: int) -> float:
    """How much slower than the best the best measured one of the first choices is."""
    chosen = sorted(range(len(cases)), key=lambda i: (predicted[i], i))[:first]
    return min(cases[i].median_ms for i in chosen) / min(case.median_ms for case in cases) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of predictions for one row."""

    row: Row
    spearman: float
    first: float  # regret of the first choice
    ten: float  # and of the first ten
    error: float  # root mean square of log time, about its mean
    bias: float  # predicted over measured, geometric mean

    def cells(self) -> str:
        """The row of a Markdown table."""
        return (
            f"| {self.row.name} | {self.row.problem} | {len(self.row.cases)} | {self.spearman:.3f} | {self.first:.1%} "
            f"| {self.ten:.1%} | {self.error:.0%} | {self.bias:.2f} |"
        )


def quality(row: Row, predicted: Sequence[float]) -> Quality:
    measured = [case.median_ms for case in row.cases]
    logs = [math.log(p / m) for p, m in zip(predicted, measured, strict=True)]
    return Quality(
        row=row,
        spearman=spearman(predicted, measured),
        first=regret(row.cases, predicted, 1),
        ten=regret(row.cases, predicted, 10),
        error=statistics.pstdev(logs),
        bias=math.exp(statistics.fmean(logs)),
    )


def table(judgements: Sequence[Quality]) -> list[str]:
    """A row for each family and problem, and one for each family."""
    lines = ["| family | problem | variants | Spearman | first choice | best of ten | error | bias |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|")
    judged = [judgement for judgement in judgements if len(judgement.row.cases) > FEWEST]
    lines += [judgement.cells() for judgement in judged]
    lines += ["", "| family | problems | variants | Spearman: median, lowest | best of ten: median, worst |"]
    lines.append("|---|--:|--:|--:|--:|")
    for family in [*sorted({judgement.row.name for judgement in judged}), "all"]:
        own = [judgement for judgement in judged if family in (judgement.row.name, "all")]
        scores, tens = [judgement.spearman for judgement in own], [judgement.ten for judgement in own]
        lines.append(
            f"| {family} | {len(own)} | {sum(len(judgement.row.cases) for judgement in own)} "
            f"| {statistics.median(scores):.3f}, {min(scores):.3f} | {statistics.median(tens):.1%}, {max(tens):.1%} |"
        )
    return lines


def finalist_table(judgements: Sequence[Quality]) -> list[str]:
    """A row for each kind of numbers and families of finalists."""
    lines = ["| finalists | problems | variants | error: median, largest | bias | first choice: mean, worst |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    kinds: dict[str, list[Quality]] = defaultdict(list)
    for judgement in judgements:
        kinds[judgement.row.name].append(judgement)
    for kind, own in [*sorted(kinds.items()), ("all", list(judgements))]:
        errors = [judgement.error for judgement in own]
        bias, first = (
            math.exp(statistics.fmean(map(math.log, ratios)))
            for ratios in ([judgement.bias for judgement in own], [1 + judgement.first for judgement in own])
        )
        lines.append(
            f"| {kind} | {len(own)} | {sum(len(judgement.row.cases) for judgement in own)} "
            f"| {statistics.median(errors):.2f}, {max(errors):.2f} | {bias:.2f} "
            f"| {first:.3f}, {1 + max(judgement.first for judgement in own):.2f} |"
        )
    return lines


def judged(rows: Sequence[Row], constants: Mapping[Path, Constants] = CONSTANTS) -> list[Quality]:
    """The quality of each row."""
    return [quality(row, [milliseconds(case, constants) for case in row.cases]) for row in rows]


def left_out(problems: Sequence[Problem]) -> list[Quality]:
    """The rows of some problems, by constants fitted on all the others."""
    constants = model_fit.fit(model_fit.all_rows(without=problems))
    return judged([row for row in model_fit.all_rows() if row.problem in problems], constants)


def parts_to_leave_out() -> list[list[Problem]]:
    """Each problem of the random variants, and the finalists' in FOLDS parts."""
    finalists = [row.problem for row in measured_kernels.finalist_rows()]
    recorded = dict.fromkeys(row.problem for row in measured_kernels.recorded_rows())
    return [*([problem] for problem in recorded), *(finalists[fold::FOLDS] for fold in range(FOLDS))]


NAIVE: dict[str, Callable[[Case], float]] = {
    "fewest instructions a score": lambda c: (
        sum(c.report.loop.values()) * c.report.num_warps / (int(c.variant["BLOCK_M"]) * int(c.variant["BLOCK_N"]))
    ),
    "most warps on an SM": lambda c: (
        1 / (occupancy(DEVICE, c.report.registers, c.report.shared_bytes, c.report.num_warps) * c.report.num_warps)
    ),
    "largest tile without spills": lambda c: (
        (1 + c.report.spilled_bytes) / (int(c.variant["BLOCK_M"]) * int(c.variant["BLOCK_N"]))
    ),
}


def naive() -> list[str]:
    """What simpler rules reach on the random variants."""
    lines = ["| rule | Spearman: median, lowest | best of ten: median, worst |", "|---|--:|--:|"]
    rows = [row for row in measured_kernels.recorded_rows() if len(row.cases) > FEWEST]
    for name, rule in NAIVE.items():
        judgements = [quality(row, [rule(case) for case in row.cases]) for row in rows]
        scores, tens = [judgement.spearman for judgement in judgements], [judgement.ten for judgement in judgements]
        lines.append(
            f"| {name} | {statistics.median(scores):.2f}, {min(scores):.2f} | {statistics.median(tens):.0%}, "
            f"{max(tens):.0%} |"
        )
    return lines


def main() -> None:
    """Prints the tables, and keeps them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--left-out", action="store_true", help="judge problems by constants fitted on the others")
    parser.add_argument("--jobs", type=int, default=2, help="processes that fit")
    parser.add_argument("--write", action="store_true", help="keep the tables under benchmarks/results/")
    options = parser.parse_args()
    if options.left_out:
        with ProcessPoolExecutor(options.jobs) as pool:
            judgements = [judgement for part in pool.map(left_out, parts_to_leave_out()) for judgement in part]
    else:
        judgements = judged(model_fit.all_rows())
    finalists = {row.problem for row in measured_kernels.finalist_rows()}
    of_finalists = [judgement for judgement in judgements if judgement.row.problem in finalists]
    of_random = [judgement for judgement in judgements if judgement.row.problem not in finalists]
    random_table = table(sorted(of_random, key=lambda judgement: judgement.row.name))
    command = "python benchmarks/model_quality.py" + " --left-out" * options.left_out
    text = "\n".join([*random_table, "", *naive(), "", *finalist_table(of_finalists)])
    tell(
        "How well the model ranks",
        command,
        text,
        "model_quality" + "_left_out" * options.left_out if options.write else None,
    )


if __name__ == "__main__":
    main()
