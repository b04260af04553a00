"""Whether a learned correction helps the model: `python benchmarks/correction.py`.

The data are the random variants of measured_kernels.py.
A ridge regression, by numpy, of what the model leaves of each variant's log time, on what the prediction and the
machine code say; each kind of machine code has one of its own. Every problem is corrected by a regression on the
others. Features and remainders are taken about the mean of their row, since ranks within a problem are what matters.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from kept import tell
from measured_kernels import DEVICE, Case, Row, recorded_rows
from model_fit import Array
from model_quality import FEWEST, Quality, quality

from autoattn.core.problem import Problem
from autoattn.cost_model import predictor
from autoattn.cost_model.kernel_kind import Path

RIDGES = (3.0, 30.0, 100.0)
FAR = 0.6  # of log time: what is further off counts as so much
UNITS = ("tensor", "issue", "exp", "shared", "l2", "dram")
SIZES = ("BLOCK_M", "BLOCK_N", "num_stages")
OPCODES = (("LDL", "STL"), ("BAR",), ("BRA",), ("WARPGROUP",), ("",))  # those of the loop that begin so


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The variants of a row that are one kind of machine code."""

    path: Path
    problem: Problem
    features: Array  # [variants, features]
    left: Array  # [variants] log of measured over predicted


def features(case: Case) -> tuple[list[float], float]:
    """What a correction may lean on, and the predicted milliseconds."""
    prediction = predictor.predict(case.problem, DEVICE, case.variant, case.report)
    loop = case.report.loop
    shares = [prediction.parts_us[unit] / prediction.time_us for unit in UNITS]
    warps = [math.log(prediction.occupancy), math.log(prediction.occupancy * case.report.num_warps)]
    sizes = [math.log(int(case.variant[name])) for name in SIZES]
    counts = [math.log1p(sum(n for opcode, n in loop.items() if opcode.startswith(kind))) for kind in OPCODES]
    return [*shares, *warps, *sizes, *counts], prediction.time_us / 1e3


@cache
def parts() -> tuple[Part, ...]:
    """All rows, apart by kind of machine code; of fewer than four variants nothing is learnt."""
    all_parts = []
    for row in recorded_rows():
        for path in Path:
            own = [(features(case), case.median_ms) for case in row.cases if case.path is path]
            if len(own) > 3:
                left = [math.log(ms / predicted) for (_, predicted), ms in own]
                seen = np.array([values for (values, _), _ in own])
                all_parts.append(Part(path=path, problem=row.problem, features=seen, left=np.array(left)))
    return tuple(all_parts)


def learnt(path: Path, without: Problem, ridge: float) -> Array:
    """The weight of each feature, from all problems but one."""
    own = [part for part in parts() if part.path is path and part.problem != without]
    width = len(parts()[0].features[0])
    if not own:
        return np.zeros(width)
    seen = np.vstack([part.features - part.features.mean(0) for part in own])
    left = np.concatenate([np.clip(part.left - part.left.mean(), -FAR, FAR) for part in own])
    scale = seen.std(0) + 1e-9
    seen = seen / scale
    weights: Array = np.linalg.solve(seen.T @ seen + ridge * np.eye(width), seen.T @ left) / scale
    return weights


def corrected(row: Row, ridge: float | None) -> Quality:
    """The quality of a row's corrected predictions; without a ridge, of the model's own."""
    seen = [features(case) for case in row.cases]
    predicted = [milliseconds for _, milliseconds in seen]
    if ridge is not None:
        for path in {case.path for case in row.cases}:
            places = [place for place, case in enumerate(row.cases) if case.path is path]
            own = np.array([seen[place][0] for place in places])
            shifts = (own - own.mean(0)) @ learnt(path, row.problem, ridge)
            for place, shift in zip(places, shifts.tolist(), strict=True):
                predicted[place] *= math.exp(shift)
    return quality(row, predicted)


def line(name: str, judgements: Sequence[Quality]) -> str:
    scores = [judgement.spearman for judgement in judgements]
    firsts, tens = [judgement.first for judgement in judgements], [judgement.ten for judgement in judgements]
    error = statistics.median(judgement.error for judgement in judgements)
    return (
        f"| {name} | {statistics.median(scores):.3f}, {min(scores):.3f} | {statistics.fmean(firsts):.1%}, "
        f"{max(firsts):.1%} | {statistics.median(tens):.1%}, {max(tens):.1%} | {error:.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results/")
    judged = [row for row in recorded_rows() if len(row.cases) > FEWEST]
    lines = [
        f"{len(judged)} rows, constants as shipped.",
        "",
        "| correction | Spearman: median, lowest | first choice: mean, worst | best of ten: median, worst | error |",
        "|---|--:|--:|--:|--:|",
    ]
    for ridge in (None, *RIDGES):
        judgements = [corrected(row, ridge) for row in judged]
        lines.append(line("none" if ridge is None else f"ridge {ridge:g}", judgements))
    name = "model_correction" if parser.parse_args().write else None
    tell("Whether a learned correction helps the model", "python benchmarks/correction.py", "\n".join(lines), name)


if __name__ == "__main__":
    main()
