"""Trains the network of a portfolio on measured and predicted times: what each variant costs on a problem.

The cost of a variant is the logarithm of its time over the best one. The same examples give the same weights to the bit
on every machine. A BLAS library adds up the terms of a matrix product in an order of its own; so the factors are
rounded to few bits, and every sum is exact (`exact_product`). All else is one operation of IEEE 754 for each number,
which rounds alike everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from portfolio_examples import Example

from autoattn.codegen import cost_network, portfolio
from autoattn.codegen.cost_network import Array, CostNetwork
from autoattn.codegen.feasibility import DerivedFacts
from autoattn.codegen.portfolio import Portfolio
from autoattn.codegen.space_facts import facts_of
from autoattn.codegen.space_rules import Rule
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.variant import Variant

# Facts of a problem on a card, in the words of search spaces.
LET = {
    "head": "head_dim_padded + (head_dim_v_padded > head_dim_padded) * (head_dim_v_padded - head_dim_padded)",
    "ieee": "dtype == 'float32' and precision == 'ieee'",
    "tf32": "dtype == 'float32' and precision == 'tf32'",
    "rows": "queries / batch",
    "sides": "bounded_left + bounded_right",
    # Rows of a head begin at multiples of so many bytes, down to 16: with lines, with sectors, or within them, which
    # the TMA unit takes longer to copy (`box_costs.py`)
    "row_bytes": "head_dim * element_bytes",
    "line_part": "128 / (1 + (row_bytes % 128 > 0)) / (1 + (row_bytes % 64 > 0)) / (1 + (row_bytes % 32 > 0))",
    # Bytes of the lines that hold a part of a row over those of the row, where heads of a token share lines
    "lines_over_row": "1 + token_major * (heads_kv > 1) * (128 - line_part) / row_bytes",
    "sequence_tiles": "heads_q * queries / 128 / sm_count",
    "key_heads": "heads_kv * batch / sm_count",
    "shared_rows": "rows * group_size",
    # Tiles for each SM, of which the last wave may be short. Packed sequences have less than a row each where some are
    # empty: a quotient is rounded up as it is.
    "tiles": "heads_q * batch * -(-rows // 128) / sm_count",
    "half_tiles": "heads_q * batch * -(-rows // 64) / sm_count",
    "shared_tiles": "heads_kv * batch * -(-shared_rows // 128) / sm_count",
    "wide_tiles": "heads_q * batch * -(-rows // 192) / sm_count",
    # Turns that these take on the SMs, how full the last one is, and the rows that half and wide tiles compute for each
    # row of the others
    "turns": "-(-tiles // 1)",
    "half_turns": "-(-half_tiles // 1)",
    "wide_turns": "-(-wide_tiles // 1)",
    "last_turn": "turns / tiles",
    "last_half_turn": "half_turns / half_tiles",
    "last_shared_turn": "-(-shared_tiles // 1) / shared_tiles",
    "last_wide_turn": "wide_turns / wide_tiles",
    "half_rows": "0.5 * half_turns / turns",
    "wide_rows": "1.5 * wide_turns / turns",
    # The share of the rows of tiles of 64 that hold a query, of one head and of heads that share a tile; the same of
    # tiles of 128 and of 192; and how many tiles heads apart have for one of theirs
    "rows_used": "rows / (64 * -(-rows // 64))",
    "shared_rows_used": "shared_rows / (64 * -(-shared_rows // 64))",
    "full_rows_used": "rows / (128 * -(-rows // 128))",
    "shared_full_rows_used": "shared_rows / (128 * -(-shared_rows // 128))",
    "wide_rows_used": "rows / (192 * -(-rows // 192))",
    "tiles_apart": "group_size * -(-rows // 64) / -(-shared_rows // 64)",
    # The share of the rows that hold a query where so many heads share a tile
    "pairs_used": "group_size / (2 * -(-group_size // 2))",
    "fours_used": "group_size / (4 * -(-group_size // 4))",
    "eights_used": "group_size / (8 * -(-group_size // 8))",
    # Keys that the tiles of an SM walk over, and the share of a sequence's keys that a query sees
    "keys_walked": "tiles * keys_per_row",
    "shared_keys_walked": "shared_tiles * keys_per_row",
    "keys_seen": "keys_per_row / seq_kv",
    # The share of a sequence's blocks of 64 and of 128 keys that holds keys
    "keys_used": "seq_kv / (64 * -(-seq_kv // 64))",
    "wide_keys_used": "seq_kv / (128 * -(-seq_kv // 128))",
}
RULES = {name: Rule(text) for name, text in LET.items()}
# Of these and of the facts that search spaces know, the inputs of the network.
INPUTS = (
    "element_bytes", "ieee", "tf32", "head", "split", "rows", "keys_per_row", "group_size", "sides", "sequence_tiles",
    "key_heads", "shared_rows", "tiles", "half_tiles", "shared_tiles", "last_turn", "last_half_turn",
    "last_shared_turn", "last_wide_turn", "half_rows", "wide_rows", "rows_used", "shared_rows_used", "tiles_apart",
    "pairs_used", "fours_used", "eights_used", "keys_walked", "shared_keys_walked", "keys_seen", "full_rows_used",
    "wide_rows_used", "shared_full_rows_used", "keys_used", "wide_keys_used", "head_dim", "batch",
    "line_part", "lines_over_row",
)  # fmt: skip
# What is left to the templates' seeds: cards with other products, which nobody measured, and 16 bits beside a bias of
# pairs, or a score_mod that reads a tensor once a pair, with many rows. Most variants cannot run there, and the others
# were measured to suit other problems.
LEFT_OUT = "not wgmma or (bias_of_pairs or reads_pairs) and element_bytes < 4 and shared_rows >= 80"

HIDDEN = (128, 128)  # units
EPOCHS = 100
BATCH = 512  # examples of a step
RATE = 0.004  # of a step at most; it grows over the first tenth of all steps, then shrinks
DECAY = 0.0001  # of the weights, in a step of rate 1
MEAN, SQUARES = 0.9, 0.999  # of what is kept of the gradient's moments: Adam (Kingma and Ba, arXiv:1412.6980)
FAR = 0.7  # a cost that is not told from higher ones: twice the best time
NEAR = 0.15  # a cost whose error counts a quarter of one of the best variant
SOFTNESS = 0.02  # a variant that is expected to cost so much more than another has a sixteenth of its share in a choice
BITS = 21  # of a factor: a product has 42, and a sum of 2048 of them the 53 of a double
DIGITS = 5  # of a weight in the file


def train(examples: Sequence[Example]) -> Portfolio:
    """A network of all variants that have times."""
    ordered = sorted(examples, key=lambda example: (example.problem.key, example.device.name))
    facts = np.array([facts_of_inputs(example.problem, example.device) for example in ordered])
    ranges = _short(np.stack([facts.min(axis=0), facts.max(axis=0)], axis=1))
    variants = sorted({variant for example in examples for variant in example.times_us}, key=_order)
    costs, counts = _costs(ordered, variants)
    layers = _trained(cost_network.logarithms(facts, ranges), costs, counts)
    network = CostNetwork(inputs=INPUTS, ranges=ranges, layers=layers)
    return Portfolio(let=RULES, left_out=Rule(LEFT_OUT), variants=tuple(variants), network=network)


def choice(example: Example, derived: Portfolio) -> Variant | None:
    """The variant that a call of an example's problem runs; None where seeds are left."""
    ranked = derived.ranked(example.problem, example.device)
    return next((each for each in ranked if portfolio.is_feasible(each, example.problem, example.device)), None)


def regret(example: Example, derived: Portfolio) -> float | None:
    """The time of what a call runs over the best time; None where that was not measured."""
    variant = choice(example, derived)
    time_us = example.times_us.get(variant) if variant is not None else None
    return None if time_us is None else time_us / example.best_us


def facts_of_inputs(problem: Problem, device: Device) -> list[float]:
    """The facts that the network takes, in their order."""
    facts = DerivedFacts(facts_of(problem, device), RULES)
    return [float(facts[name]) for name in INPUTS]


def _order(variant: Variant) -> tuple[str, str]:
    return variant.template, str(variant)


def _short(numbers: Array) -> Array:
    """Numbers as the file has them."""
    short: Array = np.vectorize(lambda number: float(f"{number:.{DIGITS}g}"))(numbers)
    return short


def _costs(examples: Sequence[Example], variants: Sequence[Variant]) -> tuple[Array, Array]:
    """What each variant costs on each example, and how much its error counts: [examples, variants].

    A variant that cannot run, or was not measured, counts nothing.
    """
    costs = np.full((len(examples), len(variants)), FAR)
    counts = np.zeros(costs.shape)
    columns = {variant: column for column, variant in enumerate(variants)}
    for row, example in enumerate(examples):
        for variant, time_us in example.times_us.items():
            # Rounded, as the last bits of a logarithm are the machine's.
            cost = min(FAR, round(math.log(time_us / example.best_us), 4))
            costs[row, columns[variant]] = cost
            counts[row, columns[variant]] = 1.0 / ((1.0 + cost / NEAR) * (1.0 + cost / NEAR))
    return costs, counts


def _trained(inputs: Array, costs: Array, counts: Array) -> tuple[Array, ...]:
    """The layers of a network, with few digits, for inputs as they come."""
    mean = np.round(inputs.mean(axis=0), 3)
    deviation = np.round(inputs.std(axis=0), 3)
    deviation[deviation == 0.0] = 1.0
    scaled = _with_ones((inputs - mean) / deviation)
    chance = np.random.PCG64(0)
    training = _Training(_begun([len(mean), *HIDDEN, costs.shape[1]], chance))
    batch = min(BATCH, len(inputs))
    batches = len(inputs) // batch
    for epoch in range(EPOCHS):
        order = np.argsort(chance.random_raw(len(inputs)), kind="stable")
        for number in range(batches):
            rows = order[number * batch : (number + 1) * batch]
            done = (epoch * batches + number + 1) / (EPOCHS * batches)
            training.step(scaled[rows], costs[rows], counts[rows], RATE * min(done / 0.1, (1.0 - done) / 0.9))
    first, *others = training.layers
    first = np.vstack([first[:-1] / deviation[:, None], first[-1:] - (mean / deviation) @ first[:-1]])
    return tuple(map(_short, (first, *others)))


def _begun(widths: Sequence[int], chance: np.random.PCG64) -> list[Array]:
    """Layers to begin with (He et al., arXiv:1502.01852); the last row of each is added to every product."""
    layers = []
    for inputs, outputs in pairwise(widths):
        # Raw numbers of a generator are the same in all versions of NumPy.
        uniform = chance.random_raw(inputs * outputs).reshape(inputs, outputs) / 2.0**63 - 1.0
        layers.append(np.vstack([uniform * math.sqrt(6.0 / inputs), np.zeros((1, outputs))]))
    return layers


class _Training:
    """Layers, and the moments of their gradients."""

    def __init__(self, layers: list[Array]) -> None:
        self.layers = layers
        self._means = [np.zeros_like(layer) for layer in layers]
        self._squares = [np.zeros_like(layer) for layer in layers]
        self._forgotten = 1.0, 1.0  # what is left of the moments that training began with, which are 0

    def step(self, inputs: Array, costs: Array, counts: Array, rate: float) -> None:
        """One step of Adam, by a batch of examples: by their squared errors and by what their choices cost."""
        activations = [inputs]
        for layer in self.layers[:-1]:
            activations.append(_with_ones(np.maximum(exact_product(activations[-1], layer), 0.0)))
        expected = exact_product(activations[-1], self.layers[-1])
        error = (counts * (expected - costs) + choice_gradient(expected, costs, counts > 0.0)) / len(inputs)
        gradients = []
        for layer, factor in zip(reversed(self.layers), reversed(activations), strict=True):
            gradients.append(exact_product(factor.T, error))
            if factor is not inputs:
                error = exact_product(error, layer[:-1].T) * (factor[:, :-1] > 0.0)
        self._forgotten = self._forgotten[0] * MEAN, self._forgotten[1] * SQUARES
        for layer, mean, square, gradient in zip(
            self.layers, self._means, self._squares, reversed(gradients), strict=True
        ):
            mean += (1.0 - MEAN) * (gradient - mean)
            square += (1.0 - SQUARES) * (gradient * gradient - square)
            unbiased = square / (1.0 - self._forgotten[1])
            layer -= rate * (mean / (1.0 - self._forgotten[0]) / (np.sqrt(unbiased) + 1e-10) + DECAY * layer)


def choice_gradient(expected: Array, costs: Array, able: npt.NDArray[np.bool_]) -> Array:
    """By how much what a choice costs grows with each expected cost: [examples, variants].

    Squared errors spend a network on variants that nobody would choose. What counts is the cost of the variant that is
    expected to cost the least, but that changes in steps, without a gradient. So each variant that can run has a share
    in the choice: (1 + what it is expected to cost beyond the least / SOFTNESS)^-4, over the sum of these.
    """
    least = np.where(able, expected, np.inf).min(axis=1, keepdims=True)
    beyond = np.where(able, expected - least, 0.0)
    distance = 1.0 + beyond / SOFTNESS
    squares = distance * distance
    shares = able / (squares * squares)
    ones = np.ones((costs.shape[1], 1))
    total = exact_product(shares, ones)
    mean = exact_product(shares * costs, ones) / total
    gradient: Array = (mean - costs) * (4.0 / SOFTNESS) * shares / distance / total
    return gradient


def _with_ones(matrix: Array) -> Array:
    """The matrix with a column of ones behind it."""
    return np.hstack([matrix, np.ones((len(matrix), 1))])


def exact_product(left: Array, right: Array) -> Array:
    """The product of two matrices whose factors have BITS bits, so that it is exact whatever the order of its sums."""
    product: Array = _rounded(left) @ _rounded(right)
    return product


def _rounded(matrix: Array) -> Array:
    """A matrix of whole multiples of a power of two, which BITS bits hold."""
    largest = float(np.abs(matrix).max(initial=0.0))
    unit = math.ldexp(1.0, math.frexp(largest)[1] - BITS)
    rounded: Array = np.rint(matrix / unit) * unit
    return rounded
