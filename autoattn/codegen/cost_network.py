"""A small neural network that estimates what each variant of a portfolio costs on a problem.

Two hidden layers of rectified linear units, trained by `benchmarks/portfolio_network.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autoattn.errors import SpaceError

Array: TypeAlias = npt.NDArray[np.float64]
LEAST = 2.0**-10  # added to a fact before its logarithm is taken, as facts may be 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostNetwork:
    """Weights, and the ranges of the facts that they were trained on."""

    inputs: tuple[str, ...]  # facts
    ranges: Array  # [inputs, 2]: the least and the most of each
    layers: tuple[Array, ...]  # [inputs and one, outputs] each; the last row is added to every product

    @classmethod
    def of(cls, inputs: Mapping[str, tuple[float, float]], layers: Sequence[Sequence[Sequence[float]]]) -> CostNetwork:
        """The network of a file.

        Args:
            inputs: facts, and the range of each.
            layers: rows of each.

        Raises:
            SpaceError: rows of a layer differ in length, or the layers do not fit one another.
        """
        try:
            matrices = tuple(np.array(layer, dtype=np.float64) for layer in layers)
        except ValueError:
            raise SpaceError("rows of a layer must be of one length; see docs/search-spaces.md") from None
        ranges = np.array(list(inputs.values()), dtype=np.float64).reshape(-1, 2)
        return cls(inputs=tuple(inputs), ranges=ranges, layers=matrices)

    def __post_init__(self) -> None:
        """Checks that each layer takes what the one before gives.

        Raises:
            SpaceError: the shapes do not fit.
        """
        if not self.layers or any(layer.ndim != 2 for layer in self.layers):
            raise SpaceError("layers of a network must be matrices, one at least; see docs/search-spaces.md")
        rows = [layer.shape[0] for layer in self.layers]
        expected = [len(self.inputs) + 1, *(layer.shape[1] + 1 for layer in self.layers[:-1])]
        if rows != expected:
            raise SpaceError(
                f"layers of a network must have a row for each input and one more, {expected} here, got {rows}; see "
                "docs/search-spaces.md"
            )

    @property
    def outputs(self) -> int:
        """How many variants it estimates."""
        return int(self.layers[-1].shape[1])

    def costs(self, facts: Sequence[float]) -> Array:
        """What each variant is expected to cost: [variants].

        Args:
            facts: in the order of `inputs`.
        """
        activations = logarithms(np.array(facts), self.ranges)
        *hidden, last = self.layers
        for layer in hidden:
            activations = np.maximum(activations @ layer[:-1] + layer[-1], 0.0)
        costs: Array = activations @ last[:-1] + last[-1]
        return costs


def logarithms(facts: Array, ranges: Array) -> Array:
    """Facts as the network takes them: the logarithm to base 2, linear between powers of two: [..., inputs].

    Only its values at the powers are exact, but all machines have the same bits.

    Args:
        facts: [..., inputs].
        ranges: the least and the most of each that the network was trained on: [inputs, 2].
    """
    halves, exponents = np.frexp(np.clip(facts, ranges[:, 0], ranges[:, 1]) + LEAST)
    values: Array = exponents + 2.0 * halves - 2.0
    return values
