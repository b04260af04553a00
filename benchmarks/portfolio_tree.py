"""Grows a decision tree of a portfolio from measured and predicted times."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autoattn.codegen import portfolio
from autoattn.codegen.feasibility import DerivedFacts
from autoattn.codegen.portfolio import Question, Tree, Vote
from autoattn.codegen.space_facts import facts_of
from autoattn.codegen.space_rules import Rule
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.variant import Variant

# What the tree may ask, in the words of search spaces.
LET = {
    "head": "head_dim_padded + (head_dim_v_padded > head_dim_padded) * (head_dim_v_padded - head_dim_padded)",
    "ieee": "dtype == 'float32' and precision == 'ieee'",
    "tf32": "dtype == 'float32' and precision == 'tf32'",
    "rows": "queries / batch",
    "sides": "bounded_left + bounded_right",
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
    # The share of the rows of tiles of 64 that hold a query, of one head and of heads that share a tile, and how many
    # tiles heads apart have for one of theirs
    "rows_used": "rows / (64 * -(-rows // 64))",
    "shared_rows_used": "shared_rows / (64 * -(-shared_rows // 64))",
    "tiles_apart": "group_size * -(-rows // 64) / -(-shared_rows // 64)",
    # Keys that the tiles of an SM walk over, and the share of a sequence's keys that a query sees
    "keys_walked": "tiles * keys_per_row",
    "shared_keys_walked": "shared_tiles * keys_per_row",
    "keys_seen": "keys_per_row / seq_kv",
}
_RULES = {name: Rule(text) for name, text in LET.items()}
FEATURES = (
    "element_bytes", "ieee", "tf32", "head", "split", "rows", "keys_per_row", "group_size", "sides", "sequence_tiles",
    "key_heads", "shared_rows", "tiles", "half_tiles", "shared_tiles", "last_turn", "last_half_turn",
    "last_shared_turn", "last_wide_turn", "half_rows", "wide_rows", "rows_used", "shared_rows_used", "tiles_apart",
    "keys_walked", "shared_keys_walked", "keys_seen",
)  # fmt: skip
DRAWN_FEATURES = 10  # that a split chooses among, drawn anew for each, so that the trees of a vote differ
LEAST_PROBLEMS = 6  # of a leaf
MOST_DEPTH = 24  # below these
LEAST_GAIN = 0.000003  # of a split: what it saves of the costs, in the mean of all problems
SLOW = 1.0  # what is far from the best costs more than its time: a logarithm l of it costs l + SLOW * l * l
MOST_VARIANTS = 4  # of a leaf, those that its own examples chose; some of these are for searches alone
MOST_LISTED = 8  # of a leaf, with those that examples near it chose, without its last resort
MOST_NEAR = 5000  # examples of a question that is near the leaves below it
MOST_THRESHOLDS = 24  # of a question at a node, which divide its problems evenly
# Logarithms of time over the best, of problems that a variant cannot run: by the next one of its list, and by seeds.
NEXT = 0.02
SEEDS = math.log(1.3)
Array: TypeAlias = npt.NDArray[np.float64]
Rows: TypeAlias = npt.NDArray[np.intp]  # of a table


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One measured problem."""

    problem: Problem
    device: Device
    times_us: Mapping[Variant, float]  # measured, or of all that can run where they are predicted
    rivals_us: Mapping[str, float]
    met_cover: bool = True  # all variants of a cover were tried, so that what has no time is slow or failed

    @cached_property
    def facts(self) -> DerivedFacts:
        """What rules may ask of it."""
        return DerivedFacts(facts_of(self.problem, self.device), _RULES)

    @cached_property
    def best_us(self) -> float:
        """The shortest time of a variant."""
        return min(self.times_us.values())


class Table:
    """Costs of times over the best: a row for each example, a column for each variant."""

    def __init__(self, examples: Sequence[Example], least_gain: float) -> None:
        self.least_gain = least_gain  # of a split, in the sum of these examples
        self.variants = sorted({variant for example in examples for variant in example.times_us}, key=_order)
        shape = len(examples), len(self.variants)
        self.able = np.zeros(shape, dtype=bool)  # whether it can run
        self.costs: Array = np.zeros(shape)  # 0 where it cannot
        for row, example in enumerate(examples):
            for column, variant in enumerate(self.variants):
                if variant in example.times_us:
                    self.able[row, column] = True
                    self.costs[row, column] = _cost(math.log(example.times_us[variant] / example.best_us))
        self.features = np.array([[float(example.facts[name]) for name in FEATURES] for example in examples])
        # What most examples can run, and of these the cheapest: a leaf's examples are not all problems that come to it.
        self.last_resort = int(np.lexsort((self.costs.sum(axis=0), -self.able.sum(axis=0)))[0])

    def list_of(self, rows: Rows) -> tuple[float, list[int]]:
        """The variants of which the first that can run is the fastest over some examples, and the sum of costs."""
        able, costs, columns, total = self.able[rows], self.costs[rows], [], 0.0
        while len(costs) and len(columns) < MOST_VARIANTS:
            behind = _cost(NEXT if len(columns) < MOST_VARIANTS - 1 else SEEDS)
            counts, sums = able.sum(axis=0), costs.sum(axis=0)
            column = int(np.where(counts == 0, np.inf, sums + behind * (len(costs) - counts)).argmin())
            if not counts[column]:
                break
            total += float(sums[column])
            columns.append(column)
            left = ~able[:, column]
            able, costs = able[left], costs[left]
        return total + _cost(SEEDS) * len(costs), columns

    def completed(self, ancestors: Sequence[Rows]) -> list[int]:
        """The list of a leaf, with a variant for each example near it.

        Also problems come to a leaf that cannot run what its few examples can. The examples of the questions above it
        know such problems, the nearest question first.

        Args:
            ancestors: the examples of the questions above the leaf, the topmost first, then its own.
        """
        columns: list[int] = []
        for rows in reversed(ancestors):
            left = self._left(rows, columns)
            while len(left) and len(columns) < MOST_LISTED and (not columns or len(rows) <= MOST_NEAR):
                columns.append(self.list_of(left)[1][0])
                left = self._left(rows, columns)
        return self._complemented(ancestors[-1], self._with_single_turns(ancestors[-1], columns))

    def _with_single_turns(self, rows: Rows, columns: Sequence[int]) -> list[int]:
        """The list with a variant for each example whose programs end with their tile.

        Programs that take one tile after the other need more tiles than there are SMs. All examples of a leaf may have
        them, and problems that come to it not.
        """
        columns, single = list(columns), [not _takes_turns(variant) for variant in self.variants]
        able, costs = self.able[rows] & single, self.costs[rows]
        left = ~able[:, columns].any(axis=1)
        while (able := able[left]).any():
            costs = costs[left]
            sums = np.where(able, costs, _cost(SEEDS)).sum(axis=0)
            column = int(np.where(able.any(axis=0), sums, np.inf).argmin())
            columns.append(column)
            left = ~able[:, column]
        return columns

    def _left(self, rows: Rows, columns: list[int]) -> Rows:
        """Those of some examples that can run no variant of these columns."""
        left: Rows = rows[~self.able[rows][:, columns].any(axis=1)]
        return left

    def _complemented(self, rows: Rows, columns: Sequence[int]) -> list[int]:
        """The list with variants behind it that a search tries, each of which saves most where the others are slow.

        Then comes the last resort, for problems that none of these can run.
        """
        columns = list(columns)
        costs = np.where(self.able[rows], self.costs[rows], _cost(SEEDS))
        best = costs[:, columns].min(axis=1) if columns else np.full(len(rows), _cost(SEEDS))
        while len(columns) < MOST_VARIANTS:
            sums = np.minimum(costs, best[:, None]).sum(axis=0)
            column = int(sums.argmin())
            if sums[column] > best.sum() - 0.01 * len(rows):
                break
            columns.append(column)
            best = np.minimum(best, costs[:, column])
        return columns if self.last_resort in columns else [*columns, self.last_resort]


def _cost(regret: float) -> float:
    """What a logarithm of time over the best costs."""
    return regret + SLOW * regret * regret


def _takes_turns(variant: Variant) -> bool:
    """Whether a program takes one tile after the other."""
    params = variant.as_dict()
    return params.get("schedule", "one_tile") != "one_tile" or params.get("PERSISTENT") == 1


def _order(variant: Variant) -> tuple[str, str]:
    return variant.template, str(variant)


def grow(table: Table, chance: random.Random) -> Tree:
    """A decision tree of the examples of a table.

    Args:
        chance: draws the features that each split chooses among.
    """
    rows = np.arange(len(table.able))
    return _grown(table, [rows], table.list_of(rows)[0], chance)


def _grown(table: Table, ancestors: Sequence[Rows], cost: float, chance: random.Random) -> Tree:
    """A tree of the last of these rows, which are parts of those before, and cost so much with one list."""
    rows = ancestors[-1]
    split = _best_split(table, rows, cost, chance) if len(ancestors) <= MOST_DEPTH else None
    if split is None:
        return tuple(table.variants[column] for column in table.completed(ancestors))
    feature, threshold, below, above = split
    number = float(f"{threshold:g}")
    low = table.features[rows, FEATURES.index(feature)] < number
    then = _grown(table, [*ancestors, rows[low]], below, chance)
    otherwise = _grown(table, [*ancestors, rows[~low]], above, chance)
    return question(feature, number, then, otherwise)


def question(fact: str, below: float, then: Tree, otherwise: Tree) -> Tree:
    """A question, or its answer where both are alike: the second best of a half may differ where the first do not."""
    return then if then == otherwise else Question(fact=fact, below=below, then=then, otherwise=otherwise)


def leaves(tree: Tree) -> Iterator[tuple[Variant, ...]]:
    """The lists of variants of a tree, in its order."""
    if isinstance(tree, tuple):
        yield tree
        return
    for each in tree.trees if isinstance(tree, Vote) else (tree.then, tree.otherwise):
        yield from leaves(each)


_Split: TypeAlias = tuple[str, float, float, float]  # a question, and what the rows below and above its number cost


def _best_split(table: Table, rows: Rows, cost: float, chance: random.Random) -> _Split | None:
    """The question that saves most, of some that are drawn; None where none saves enough."""
    best: tuple[float, _Split] | None = None
    # No other method of a generator gives the same numbers in all versions of Python.
    for feature in sorted(FEATURES, key=lambda _: chance.random())[:DRAWN_FEATURES]:
        values = table.features[rows, FEATURES.index(feature)]
        for threshold in thresholds(_spread(values)):
            low = values < threshold
            if min(low.sum(), (~low).sum()) < LEAST_PROBLEMS:
                continue
            below, above = table.list_of(rows[low])[0], table.list_of(rows[~low])[0]
            gain = cost - below - above
            if gain > table.least_gain and (best is None or gain > best[0] + 1e-9):
                best = gain, (feature, threshold, below, above)
    return None if best is None else best[1]


def _spread(values: Array) -> list[float]:
    """Distinct values in order; where there are many, those that divide them evenly."""
    ordered = np.unique(values)
    if len(ordered) > MOST_THRESHOLDS:
        quantiles = np.quantile(values, np.linspace(0.0, 1.0, MOST_THRESHOLDS + 1), method="nearest")
        ordered = np.unique(quantiles)
    return [float(value) for value in ordered]


def thresholds(values: Sequence[float]) -> list[float]:
    """A round number between each two of these values, which ascend."""
    return [_round_between(low, high) for low, high in itertools.pairwise(values)]


def _round_between(low: float, high: float) -> float:
    """The power of two above `low` where it is not above `high`, else the mean to as few digits as tell them apart."""
    if low > 0:
        power = 2.0 ** (math.floor(math.log2(low)) + 1)
        if low < power <= high:
            return power
    middle = (low + high) / 2
    for digits in range(1, 12):
        rounded = float(f"{middle:.{digits}g}")
        if low < rounded <= high:
            return rounded
    return high


def choice(example: Example, tree: Tree) -> Variant | None:
    """The variant that a call of an example's problem runs; None where seeds are left."""
    can_run = partial(portfolio.is_feasible, problem=example.problem, device=example.device)
    return next(iter(portfolio.leaf_of(tree, example.facts, can_run)), None)


def regret(example: Example, tree: Tree) -> float | None:
    """The time of what a call runs over the best time; None where that was not measured."""
    variant = choice(example, tree)
    time_us = example.times_us.get(variant) if variant is not None else None
    return None if time_us is None else time_us / example.best_us
