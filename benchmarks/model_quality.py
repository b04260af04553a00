"""How well the cost model ranks kernels that were measured: `python benchmarks/model_quality.py`.

The data are what benchmarks/variants.py measured on an H200 (benchmarks/data/variants/), a recording for each family of
kernels and problem, and 284 variants of an older kernel (benchmarks/data/h200_triton_variants.json). `--left-out` fits
the constants anew for each problem on all the others, and judges them on it alone: that is the honest table. `--fit`
prints constants fitted on everything, which autoattn/cost_model/constants.py holds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path as File
from typing import Any

import numpy as np
from kept import tell

from autoattn.cache import search_recording
from autoattn.core import device_profiles
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Problem
from autoattn.core.trial import StaticReport
from autoattn.core.variant import Value, Variant
from autoattn.cost_model import predictor
from autoattn.cost_model.constants import BOUNDS, CONSTANTS, FITTED, Constants
from autoattn.cost_model.kernel_kind import Path, path_of
from autoattn.cost_model.occupancy import occupancy

DATA = File(__file__).parent / "data"
OLDER = DATA / "h200_triton_variants.json"
VARIANTS = DATA / "variants"
# The older file counts opcodes by their first word. These are 128 bits wide, or exp2, in every one of its loops.
SPELT_OUT = {"MUFU": "MUFU.EX2", "STS": "STS.128", "LDG": "LDG.128", "LDGSTS": "LDGSTS.128"}
# Code 2 stood before P V, below the load of the values: the machine code is that without a barrier, register for
# register. In the templates the load comes after the barrier, so that "before_pv" would say something else.
BARRIERS = {0: "none", 1: "after_qk", 2: "none"}
DEVICE = device_profiles.named("h200")
FEWEST = 10  # variants of a row of the table: of fewer, the first ten are all
# Of a fit
ROUNDS, STEP, FAR, SHIFT = 12, 0.02, 0.8, 0.15

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A variant that was measured."""

    problem: Problem
    variant: Variant
    report: StaticReport
    median_ms: float

    @property
    def path(self) -> Path:
        """Whose constants hold for it."""
        return path_of(self.report, self.variant.template)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The measured variants of one family for one problem."""

    name: str
    problem: Problem
    cases: tuple[Case, ...]


def older() -> list[Case]:
    """The 284 variants."""
    cases = []
    for number, trial in enumerate(json.loads(OLDER.read_text())["trials"]):
        head_dim, block_m, block_n, num_warps, num_stages, barrier = trial["variant"]
        counts = {SPELT_OUT.get(opcode, opcode): n for opcode, n in trial["loop_counts"].items()}
        params: dict[str, Value] = {
            "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages, "maxnreg": 0,
            "mask_loop": "every", "softmax": "online", "barrier": BARRIERS[barrier], "HEAD_GROUP": 1,
            "row_order": "ascending", "PERSISTENT": 0, "HEAD_SPLIT": 0, "products": "as_asked",
        }  # fmt: skip
        problem = Problem(
            dtype=DType.BFLOAT16, batch=4, heads_q=16, heads_kv=16, seq_q=4096, seq_kv=4096, head_dim=head_dim,
            mask=Mask.parse("causal"),
        )  # fmt: skip
        report = StaticReport(
            digest=str(number), arch=90, registers=trial["registers"], spilled_bytes=trial["stack_bytes"],
            shared_bytes=trial["shared_bytes"], num_warps=num_warps, code_bytes=0, loop=counts,
        )  # fmt: skip
        cases.append(
            Case(
                problem=problem,
                variant=Variant.of("triton/forward", params),
                report=report,
                median_ms=trial["median_ms"],
            )
        )
    return cases


@cache
def rows() -> tuple[Row, ...]:
    """All that was measured."""
    measured_rows = []
    for path in sorted(VARIANTS.glob("*.jsonl")):
        recorded = search_recording.read(path)
        cases = tuple(
            Case(problem=recorded.header.problem, variant=v, report=trial.report, median_ms=trial.time_us / 1e3)
            for v, trial in recorded.trials.items()
            if trial.time_us is not None and trial.report is not None
        )
        family = path.name.removeprefix(f"{DEVICE.name}_").partition("_forward")[0]
        measured_rows.append(Row(name=family, problem=recorded.header.problem, cases=cases))
    for head_dim in (64, 128):
        own = tuple(case for case in older() if case.problem.head_dim == head_dim)
        measured_rows.append(Row(name="older", problem=own[0].problem, cases=own))
    return tuple(measured_rows)


# --- quality ----------------------------------------------------------------------------------------------------------


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


def milliseconds(case: Case, constants: Mapping[Path, Constants] = CONSTANTS) -> float:
    """What the model says of a case."""
    return predictor.predict(case.problem, DEVICE, case.variant, case.report, constants).time_us / 1e3


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


# --- fitting ----------------------------------------------------------------------------------------------------------


def fit(training_rows: Sequence[Row], path: Path) -> Constants:
    """Least squares of the logarithm of the time about each row's mean, by Levenberg and Marquardt inside BOUNDS.

    The mean itself counts little: what a whole problem takes is no matter of ranks. Equal kernels are predicted once.
    """
    groups = [_distinct(row, path) for row in training_rows]
    groups = [group for group in groups if len(group) > 3]
    names = FITTED[path]
    low, high = (np.array([BOUNDS[name][side] for name in names]) for side in (0, 1))
    start = CONSTANTS[path]

    def residuals(place: Array) -> Array:
        values = dict(zip(names, (low + place * (high - low)).tolist(), strict=True))
        constants = {path: replace(start, **values)}
        parts = []
        for group in groups:
            logs = np.array([math.log(milliseconds(case, constants) / ms) for case, ms, _ in group])
            weights = np.sqrt([count for _, _, count in group])
            mean = float(np.average(logs, weights=weights**2))
            parts.append(weights * np.clip(logs - mean, -FAR, FAR))
            parts.append(np.array([math.sqrt(SHIFT * len(group)) * mean]))
        return np.concatenate(parts)

    place = np.full(len(names), 0.3)
    now, damping = residuals(place), 0.1
    for _ in range(ROUNDS):
        slopes = np.empty((len(now), len(names)))
        for at in range(len(names)):
            moved = place.copy()
            moved[at] += STEP if place[at] < 0.5 else -STEP
            slopes[:, at] = (residuals(moved) - now) / (moved[at] - place[at])
        for _ in range(4):
            square = slopes.T @ slopes
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-6), -slopes.T @ now)
            tried = np.clip(place + step, 0.0, 1.0)
            then = residuals(tried)
            if then @ then < now @ now:
                place, now, damping = tried, then, damping / 3
                break
            damping *= 4
    found_values = (low + place * (high - low)).tolist()
    return replace(start, **{name: float(f"{value:.3g}") for name, value in zip(names, found_values, strict=True)})


def _distinct(row: Row, path: Path) -> list[tuple[Case, float, int]]:
    """A case for each kernel, with the geometric mean of its times and how many there are."""
    kernels: dict[tuple[object, ...], list[Case]] = {}
    for case in row.cases:
        if case.path is path:
            key = (*case.variant.params, *case.report.loop.items(), case.report.registers)
            kernels.setdefault(key, []).append(case)
    return [
        (same[0], statistics.geometric_mean(case.median_ms for case in same), len(same)) for same in kernels.values()
    ]


def fitted(without: Problem | None = None) -> dict[Path, Constants]:
    """Constants of every kind of machine code, from all rows but those of one problem."""
    left = [row for row in rows() if row.problem != without]
    return {**CONSTANTS, **{path: fit(left, path) for path in FITTED}}


def left_out(problem: Problem) -> list[Quality]:
    """The rows of one problem, by constants fitted on the others."""
    constants = fitted(problem)
    own = [row for row in rows() if row.problem == problem]
    return [quality(row, [milliseconds(case, constants) for case in row.cases]) for row in own]


NAIVE = {
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
    """What simpler rules reach."""
    lines = ["| rule | Spearman: median, lowest | best of ten: median, worst |", "|---|--:|--:|"]
    for name, rule in NAIVE.items():
        judgements = [quality(row, [rule(case) for case in row.cases]) for row in rows() if len(row.cases) > FEWEST]
        scores, tens = [judgement.spearman for judgement in judgements], [judgement.ten for judgement in judgements]
        lines.append(
            f"| {name} | {statistics.median(scores):.2f}, {min(scores):.2f} | {statistics.median(tens):.0%}, "
            f"{max(tens):.0%} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--left-out", action="store_true", help="judge each problem by constants fitted on the others")
    parser.add_argument("--fit", action="store_true", help="fit the constants to all of the data and print them")
    parser.add_argument("--jobs", type=int, default=2, help="processes that fit")
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results/")
    options = parser.parse_args()
    if options.fit:
        for path, constants in fitted().items():
            print(
                path.value, {name: value for name, value in asdict(constants).items() if name in FITTED.get(path, ())}
            )
        return
    if options.left_out:
        with ProcessPoolExecutor(options.jobs) as pool:
            problems = list(dict.fromkeys(row.problem for row in rows()))
            judgements = [judgement for part in pool.map(left_out, problems) for judgement in part]
    else:
        judgements = [quality(row, [milliseconds(case) for case in row.cases]) for row in rows()]
    command = "python benchmarks/model_quality.py" + " --left-out" * options.left_out
    text = "\n".join([*table(sorted(judgements, key=lambda judgement: judgement.row.name)), "", *naive()])
    tell(
        "How well the model ranks",
        command,
        text,
        "model_quality" + "_left_out" * options.left_out if options.write else None,
    )


if __name__ == "__main__":
    main()
