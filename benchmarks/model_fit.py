"""Fits the cost model's constants to measured kernels: `python benchmarks/model_fit.py` prints them.

Needs no GPU, and takes some minutes. autoattn/cost_model/constants.py holds what it prints. Within a problem, variants
of all kinds of machine code count together, since a search ranks them together.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import measured_kernels
import numpy as np
from measured_kernels import Case, Row, milliseconds

from autoattn.core.problem import Problem
from autoattn.cost_model.constants import BOUNDS, CONSTANTS, FITTED, Constants
from autoattn.cost_model.kernel_kind import Path

LEAST = 4  # different kernels of a row
ROUNDS, STEP = 8, 0.02  # steps of a fit, and of a constant within its bounds to see what it changes
FAR = 0.8  # of log time about the row's mean: what is further off counts as so much
SHIFT = 0.15  # weight of a row's mean: what a whole problem takes is no matter of ranks

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """Equal kernels of a row."""

    case: Case
    log_ms: float  # of the geometric mean of their times
    count: int


class _Data:
    """The kernels of all rows, and their residuals."""

    def __init__(self, rows: Sequence[Row]) -> None:
        groups = [group for row in rows if len(group := _distinct(row)) >= LEAST]
        self.kernels = list(itertools.chain(*groups))
        self.log_ms = np.array([kernel.log_ms for kernel in self.kernels])
        self.weights = np.sqrt([float(kernel.count) for kernel in self.kernels])
        ends = np.cumsum([len(group) for group in groups])
        self.rows = [slice(end - len(group), end) for group, end in zip(groups, ends, strict=True)]
        self.places = {
            path: [place for place, kernel in enumerate(self.kernels) if kernel.case.path is path] for path in Path
        }

    def logs(self, constants: Mapping[Path, Constants], path: Path) -> Array:
        """Logarithms of the predicted times of one kind of machine code, in milliseconds."""
        return np.array([math.log(milliseconds(self.kernels[place].case, constants)) for place in self.places[path]])

    def residuals(self, predicted: Array) -> Array:
        """Of the logarithm of predicted over measured time: about each row's mean, then these means."""
        logs, means = predicted - self.log_ms, []
        about = np.empty(len(logs))
        for row in self.rows:
            mean = float(np.average(logs[row], weights=self.weights[row] ** 2))
            about[row] = self.weights[row] * np.clip(logs[row] - mean, -FAR, FAR)
            means.append(math.sqrt(SHIFT * (row.stop - row.start)) * mean)
        return np.concatenate([about, np.array(means)])


def fit(rows: Sequence[Row], paths: Collection[Path] = tuple(FITTED)) -> dict[Path, Constants]:
    """Constants of some kinds of machine code, by Levenberg and Marquardt inside BOUNDS; the others stay.

    Least squares of the logarithm of the time about each row's mean. Equal kernels are predicted once.
    """
    data, constants = _Data(rows), dict(CONSTANTS)
    names = [(path, name) for path in paths if data.places[path] for name in FITTED[path]]
    low, high = (np.array([BOUNDS[name][side] for _, name in names]) for side in (0, 1))

    def at(place: Array) -> dict[Path, Constants]:
        values = zip(names, (low + place * (high - low)).tolist(), strict=True)
        changed: dict[Path, dict[str, float]] = {path: {} for path in paths}
        for (path, name), value in values:
            changed[path][name] = value
        return {**CONSTANTS, **{path: replace(CONSTANTS[path], **of_path) for path, of_path in changed.items()}}

    def predicted(constants: Mapping[Path, Constants], changed: Iterable[Path], before: Array) -> Array:
        logs = before.copy()
        for path in changed:
            logs[data.places[path]] = data.logs(constants, path)
        return logs

    start = np.array([getattr(CONSTANTS[path], name) for path, name in names])
    place = np.clip((start - low) / (high - low), 0.0, 1.0)
    logs = predicted(at(place), Path, np.zeros(len(data.kernels)))
    now, damping = data.residuals(logs), 0.1
    for _ in range(ROUNDS):
        slopes = np.empty((len(now), len(names)))
        for column, (path, _) in enumerate(names):
            moved = place.copy()
            moved[column] += STEP if place[column] < 0.5 else -STEP
            there = data.residuals(predicted(at(moved), (path,), logs))
            slopes[:, column] = (there - now) / (moved[column] - place[column])
        for _ in range(4):
            square = slopes.T @ slopes
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-6), -slopes.T @ now)
            tried = np.clip(place + step, 0.0, 1.0)
            tried_logs = predicted(at(tried), paths, logs)
            then = data.residuals(tried_logs)
            if then @ then < now @ now:
                place, logs, now, damping = tried, tried_logs, then, damping / 3
                break
            damping *= 4
        else:
            break
    constants |= {path: _rounded(at(place)[path], FITTED[path]) for path in paths}
    return constants


def all_rows(without: Collection[Problem] = ()) -> list[Row]:
    """Everything that was measured, but for some problems."""
    rows = [*measured_kernels.recorded_rows(), *measured_kernels.finalist_rows()]
    return [row for row in rows if row.problem not in without]


def _rounded(constants: Constants, names: Sequence[str]) -> Constants:
    """To three digits: what constants.py holds is what a fit gave."""
    return replace(constants, **{name: float(f"{getattr(constants, name):.3g}") for name in names})


def _distinct(row: Row) -> list[_Kernel]:
    """Each kernel once."""
    kernels: dict[tuple[object, ...], list[Case]] = {}
    for case in row.cases:
        key = (case.variant.template, *case.variant.params, *case.report.loop.items(), case.report.registers)
        kernels.setdefault(key, []).append(case)
    return [
        _Kernel(
            case=same[0],
            log_ms=math.log(statistics.geometric_mean(case.median_ms for case in same)),
            count=len(same),
        )
        for same in kernels.values()
    ]


def main() -> None:
    """Prints the constants that were fitted to everything."""
    for path, constants in fit(all_rows()).items():
        if path in FITTED:
            print(path.value, {name: getattr(constants, name) for name in FITTED[path]})


if __name__ == "__main__":
    main()
