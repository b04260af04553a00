"""Says from measured times, by head dim, how much longer Hopper's tiles of 64 rows take than those of 128.

python benchmarks/tile_heights.py

Beside that stands what a box of keys costs the TMA unit (`box_costs.py`). Tiles of 64 rows have each key copied twice
as often as those of 128.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable

import portfolio_examples
from box_costs import box_cost
from portfolio_examples import DATA, Example, mask_name
from variant_pool import GLUON

from autoattn.codegen import search_space
from autoattn.core.problem import Problem

HEIGHTS = 64, 128
FEWEST_QUERIES, FEWEST_KEYS = 512, 700  # of problems that count: few have a height of their own
FEWEST_KEYS_OF_BLOCK = 64
FEWEST_PROBLEMS = 5  # of a row


def ratio(example: Example) -> float | None:
    """The best time in tiles of 64 rows over that in 128, of one head held whole; None where either is missing."""
    low, high = (_best_us(example, rows) for rows in HEIGHTS)
    return low / high if low is not None and high is not None else None


def _best_us(example: Example, rows: int) -> float | None:
    """The shortest time of a variant with so many rows of one head, held whole, in a tile; None where there is none."""
    times_us = (
        time_us
        for variant, time_us in example.times_us.items()
        if variant.template == GLUON
        and (params := variant.as_dict())["BLOCK_M"] == rows
        and int(params["BLOCK_N"]) >= FEWEST_KEYS_OF_BLOCK
        and not params.get("HEAD_SPLIT", 0)
        and search_space.load(GLUON).heads_of_tile(params, example.problem) == 1
    )
    return min(times_us, default=None)


def table(examples: Iterable[Example]) -> list[str]:
    """A row for each head dim of 16 bits and each kind of mask that enough problems have."""
    ratios: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for example in examples:
        if _counts(example.problem) and (known := ratio(example)) is not None:
            ratios[example.problem.head_dim, mask_name(example.problem.mask)].append(known)
    lines = ["| head dim | cost of a box | mask | problems | 64 rows over 128, median |", "|--:|--:|---|--:|--:|"]
    for (head_dim, kind), some in sorted(ratios.items()):
        if len(some) >= FEWEST_PROBLEMS:
            median = statistics.median(some)
            lines.append(f"| {head_dim} | {box_cost(2 * head_dim)} | {kind} | {len(some)} | {median:.2f} |")
    return lines


def _counts(problem: Problem) -> bool:
    """Whether a problem is long, of 16 bits, and has no window."""
    long = problem.seq_q >= FEWEST_QUERIES and problem.seq_kv >= FEWEST_KEYS
    return long and problem.dtype.bytes == 2 and not problem.mask.bounded_left


if __name__ == "__main__":
    print("\n".join(table(portfolio_examples.examples_of(DATA))))
