"""Says which order of heads is the fastest where rows differ in length, from measured times of variants in several.

python benchmarks/head_orders.py [data/portfolios/h200_chosen_1035.jsonl ...]

For each share of the L2 that keys and values of heads side by side may fill (`head_order.L2_SHARE`): the geometric mean
and the largest of the time in the order that the rule then chooses, over one head after another and over the fastest
order. Only variants that were measured in several orders count.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import portfolio_examples
import typer
from portfolio_examples import DATA, Example

from autoattn.codegen import head_order
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.variant import Variant

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5)
MEASURED = DATA / "h200_chosen_1035.jsonl"
Orders: TypeAlias = Mapping[Variant, float]  # of one variant -> us


def orders_of(examples: Iterable[Example]) -> Iterator[tuple[Problem, Device, Orders]]:
    """The times of each variant that was measured in several orders, one head after another among them."""
    for example in examples:
        if not head_order.is_uneven(example.problem):
            continue
        orders: defaultdict[Variant, dict[Variant, float]] = defaultdict(dict)
        for variant, time_us in example.times_us.items():
            orders[head_order.in_order(variant, 1)][variant] = time_us
        for first, times_us in orders.items():
            if first in times_us and len(times_us) > 1:
                yield example.problem, example.device, times_us


def losses(share: float, measured: Iterable[tuple[Problem, Device, Orders]]) -> Iterator[tuple[float, float]]:
    """Time in the order that the rule chooses, over one head after another and over the fastest order."""
    for problem, device, times_us in measured:
        first = head_order.in_order(next(iter(times_us)), 1)
        chosen = head_order.suiting(first, problem, device, share)
        if chosen in times_us:
            yield times_us[chosen] / times_us[first], times_us[chosen] / min(times_us.values())


def main(paths: Annotated[list[Path] | None, typer.Argument(help="Files of measured problems.")] = None) -> None:
    """Print a table."""
    examples = [example for path in paths or [MEASURED] for example in portfolio_examples.read(path)]
    measured = list(orders_of(examples))
    print(f"{len(measured)} variants on {len({problem for problem, *_ in measured})} problems\n")
    print("| share of the L2 | over one head after another | largest | over the fastest order | largest |")
    print("|--:|--:|--:|--:|--:|")
    for share in SHARES:
        columns = list(zip(*losses(share, measured), strict=True))
        cells = [f"{number:.3f}" for each in columns for number in (statistics.geometric_mean(each), max(each))]
        print(f"| {share} | {' | '.join(cells)} |")


if __name__ == "__main__":
    typer.run(main)
