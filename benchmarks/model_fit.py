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


class _Places:
    """Constants as places between their bounds, from 0 to 1, and the predictions that they give."""

    def __init__(self, data: _Data, paths: Collection[Path]) -> None:
        self.data, self.paths = data, paths
        self.names = [(path, name) for path in paths if data.places[path] for name in FITTED[path]]
        self.low, self.high = (np.array([BOUNDS[name][side] for _, name in self.names]) for side in (0, 1))

    def start(self) -> Array:
        """Those of the constants that the package has."""
        values = np.array([getattr(CONSTANTS[path], name) for path, name in self.names])
        return np.clip((values - self.low) / (self.high - self.low), 0.0, 1.0)

    def constants(self, place: Array) -> dict[Path, Constants]:
        """Those of all kinds of machine code."""
        changed: dict[Path, dict[str, float]] = {path: {} for path in self.paths}
        for (path, name), value in zip(self.names, (self.low + place * (self.high - self.low)).tolist(), strict=True):
            changed[path][name] = value
        return {**CONSTANTS, **{path: replace(CONSTANTS[path], **of_path) for path, of_path in changed.items()}}

    def predicted(self, place: Array, changed: Iterable[Path], before: Array) -> Array:
        """Logarithms of all predicted times, where those of some kinds of machine code changed."""
        logs, constants = before.copy(), self.constants(place)
        for path in changed:
            logs[self.data.places[path]] = self.data.logs(constants, path)
        return logs

    def slopes(self, place: Array, logs: Array, residuals: Array) -> Array:
        """What a step of each constant does to the residuals, over the step."""
        columns = []
        for column, (path, _) in enumerate(self.names):
            moved = place.copy()
            moved[column] += STEP if place[column] < 0.5 else -STEP
            there = self.data.residuals(self.predicted(moved, (path,), logs))
            columns.append((there - residuals) / (moved[column] - place[column]))
        return np.stack(columns, axis=1)


def fit(rows: Sequence[Row], paths: Collection[Path] = tuple(FITTED)) -> dict[Path, Constants]:
    """Constants of some kinds of machine code, by Levenberg and Marquardt inside BOUNDS; the others stay.

    Least squares of the logarithm of the time about each row's mean. Equal kernels are predicted once.
    """
    data = _Data(rows)
    places = _Places(data, paths)
    place, damping = places.start(), 0.1
    logs = places.predicted(place, Path, np.zeros(len(data.kernels)))
    residuals = data.residuals(logs)
    for _ in range(ROUNDS):
        slopes = places.slopes(place, logs, residuals)
        square = slopes.T @ slopes
        for _ in range(4):
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-6), -slopes.T @ residuals)
            tried = np.clip(place + step, 0.0, 1.0)
            tried_logs = places.predicted(tried, paths, logs)
            tried_residuals = data.residuals(tried_logs)
            if tried_residuals @ tried_residuals < residuals @ residuals:
                place, logs, residuals, damping = tried, tried_logs, tried_residuals, damping / 3
                break
            damping *= 4
        else:
            break
    fitted = places.constants(place)
    return {**CONSTANTS, **{path: _rounded(fitted[path], FITTED[path]) for path in paths}}


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
