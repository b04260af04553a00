"""A Gaussian process whose samples are many: its covariance in single precision, its weights in double."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from cholesky import CholeskyFactor

Array: TypeAlias = npt.NDArray[np.float64]
LENGTH_SCALE = 14.0  # of the kernel, in standard deviations of the features, which each have a weight of their own
IN_COMMON = 0.003  # variance of what all values of an owner have in common
MOST_RESIDUAL = 1e-9  # of the samples' values, when their weights are exact enough
MOST_STEPS = 50  # of conjugate gradients towards these
SAMPLES_AT_ONCE = 512  # of a prediction, or of each side of a tile, so that their covariances stay in a core's cache
FACTORED_AT_ONCE = 8 * SAMPLES_AT_ONCE  # rows of the covariance of all samples
GROUPS_AT_ONCE = 100  # of inputs, whose covariance with all samples takes 0.4 GB


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Samples of a Gaussian process."""

    inputs: Array  # [samples, features]
    values: Array  # [samples]
    noise: Array  # [samples], variances of these
    owners: tuple[Hashable, ...]  # of each sample; the values of one have something in common

    def numbers(self) -> npt.NDArray[np.intp]:
        """A number for each sample, which those of one owner share: [samples]."""
        known = {owner: number for number, owner in enumerate(dict.fromkeys(self.owners))}
        return np.array([known[owner] for owner in self.owners])


class GaussianProcess:
    """What samples say of other inputs."""

    def __init__(self, known: Targets, weights: Sequence[float], *, with_errors: bool = False) -> None:
        """Fits.

        Args:
            known: the samples.
            weights: of the features.
            with_errors: whether to keep what `believed` needs, 2 bytes times the square of the samples.
        """
        self._mean = known.inputs.mean(axis=0)
        self._deviation = (known.inputs.std(axis=0) + 1e-9) / np.array(weights)
        self._offset = float(known.values.mean())
        self._columns = _columns(self._scaled(known.inputs))
        factor = self._factored(known)
        self._weights = self._weighted(known, factor)
        self._factor = factor if with_errors else None
        self._in_common = dict.fromkeys(known.owners, 0.0)
        for owner, weight in zip(known.owners, self._weights, strict=True):
            self._in_common[owner] += IN_COMMON * float(weight)

    def __getstate__(self) -> dict[str, Any]:
        """What other processes need to predict: not what its errors need, which has gigabytes."""
        return vars(self) | {"_factor": None}

    def predict(self, inputs: Array, owner: Hashable = None) -> Array:
        """The values of other inputs, which all are of one owner."""
        rows = _rows(self._scaled(inputs))
        predicted = np.full(len(rows), self._offset + self._in_common.get(owner, 0.0))
        for known in _slices(0, len(self._weights)):
            predicted += _covariance(rows, self._columns[:, known]) @ self._weights[known]
        return predicted

    def believed(self, groups: Sequence[Array]) -> Iterator[tuple[Array, Array]]:
        """The values of each group of inputs, [inputs], and how their errors go together, [inputs, inputs].

        Without what the values of an owner have in common, which says nothing of which is the least.
        """
        assert self._factor is not None, "the process was fitted without errors"
        for begin in range(0, len(groups), GROUPS_AT_ONCE):
            scaled = [self._scaled(inputs) for inputs in groups[begin : begin + GROUPS_AT_ONCE]]
            cross = _covariance(_rows(np.concatenate(scaled)), self._columns).T  # [samples, inputs of the groups]
            explained = _solved(self._factor, cross)
            ends = np.cumsum([len(inputs) for inputs in scaled])[:-1]
            for inputs, of_known, by_known in zip(
                scaled, np.split(cross, ends, axis=1), np.split(explained, ends, axis=1), strict=True
            ):
                expected = self._offset + of_known.T @ self._weights
                yield expected, _covariance(_rows(inputs), _columns(inputs)) - of_known.T @ by_known

    def _factored(self, known: Targets) -> CholeskyFactor:
        """The factor of the samples' covariance.

        On a GPU where there is one, which factors in seconds what two cores take ten minutes for.
        """
        place, count, numbers = device_of_matrices(), len(known.noise), known.numbers()
        noise = torch.from_numpy(known.noise).to(place, torch.float32)
        factor = CholeskyFactor()
        for begin in range(0, count, FACTORED_AT_ONCE):
            end = min(begin + FACTORED_AT_ONCE, count)
            panel = torch.zeros((end - begin, end), dtype=torch.float32, device=place)
            for rows, others, tile in self._tiles(begin, end):
                tile += IN_COMMON * (numbers[rows, None] == numbers[others])
                panel[rows.start - begin : rows.stop - begin, others] = torch.from_numpy(tile).to(place, torch.float32)
            panel.diagonal(begin).add_(noise[begin:end])
            factor.append(panel)
        return factor

    def _tiles(self, begin: int, end: int) -> Iterator[tuple[slice, slice, Array]]:
        """These rows of the lower half of the samples' covariance: rows, columns, and their values.

        Without noise and what owners have in common. `begin` is a multiple of SAMPLES_AT_ONCE.
        """
        for rows in _slices(begin, end):
            left = _rows(self._columns[:-2, rows].T)  # behind the features there are ones and squares
            for others in _slices(0, rows.stop):
                yield rows, others, _covariance(left, self._columns[:, others])

    def _image(self, known: Targets, numbers: npt.NDArray[np.intp], vector: Array) -> Array:
        """The covariance of samples, whose owners have these numbers, times a vector in double precision: [samples]."""
        image: Array = known.noise * vector + IN_COMMON * np.bincount(numbers, weights=vector)[numbers]
        for rows, others, tile in self._tiles(0, len(vector)):
            image[rows] += tile @ vector[others]
            if rows != others:
                image[others] += vector[rows] @ tile
        return image

    def _weighted(self, known: Targets, factor: CholeskyFactor) -> Array:
        """What the samples' covariance takes to their values, in double precision: [samples].

        By conjugate gradients, which the factor of single precision lets end in a few steps (Golub and Van Loan, Matrix
        Computations, 11.5).
        """
        residual, numbers = known.values - self._offset, known.numbers()
        weights, solved = np.zeros_like(residual), _solved(factor, residual[:, None])[:, 0]
        direction, product = solved, residual @ solved
        for _ in range(MOST_STEPS):
            image = self._image(known, numbers, direction)
            step = product / (direction @ image)
            weights += step * direction
            residual = residual - step * image
            if np.abs(residual).max() < MOST_RESIDUAL:
                return weights
            solved = _solved(factor, residual[:, None])[:, 0]
            product, before = residual @ solved, product
            direction = solved + product / before * direction
        raise AssertionError(f"the weights of {len(residual)} samples are not known after {MOST_STEPS} steps")

    def _scaled(self, inputs: Array) -> Array:
        scaled: Array = (inputs - self._mean) / (self._deviation * LENGTH_SCALE)
        return scaled


def device_of_matrices() -> str:
    """Where covariances of many samples are factored: on a GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _solved(factor: CholeskyFactor, right: Array) -> Array:
    """What the factored covariance takes to this, in single precision: [samples, columns]."""
    single = torch.from_numpy(right).to(device_of_matrices(), torch.float32)
    solved: Array = factor.solve(single).double().cpu().numpy()
    return solved


def _slices(begin: int, end: int) -> list[slice]:
    """Samples, so many at once."""
    return [slice(each, min(each + SAMPLES_AT_ONCE, end)) for each in range(begin, end, SAMPLES_AT_ONCE)]


def _rows(scaled: Array) -> Array:
    """Scaled features, [inputs, features], as the left factor of a product that gives three times squared distances."""
    return np.concatenate([-6.0 * scaled, 3.0 * _squares(scaled), np.full((len(scaled), 1), 3.0)], axis=1)


def _columns(scaled: Array) -> Array:
    """The right factor of that product: [features and two, inputs]."""
    return np.ascontiguousarray(np.concatenate([scaled, np.ones((len(scaled), 1)), _squares(scaled)], axis=1).T)


def _squares(scaled: Array) -> Array:
    squares: Array = (scaled**2).sum(axis=1)[:, None]
    return squares


def _covariance(rows: Array, columns: Array) -> Array:
    """Matern's, of smoothness 3/2, in as few arrays as will do: [inputs of the rows, inputs of the columns]."""
    distance: Array = rows @ columns
    np.maximum(distance, 0.0, out=distance)
    np.sqrt(distance, out=distance)
    covariance = np.negative(distance)
    np.exp(covariance, out=covariance)
    distance += 1.0
    covariance *= distance
    return covariance
