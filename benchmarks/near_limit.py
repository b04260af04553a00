"""Derives how near a tuned problem must be to go before the portfolio: `python benchmarks/near_limit.py`.

Needs no GPU, and takes some minutes. Each measured problem is taken as a call that nobody tuned. Once, its time is that
of the winner of another measured problem of its kind, as a look-up among entries would have it. Once, it is that of the
first variant of a portfolio which was derived without it, and knows others of its kind. Both are over the best time of
the problem. The script prints both means by the distance between the two problems, and the limit that saves the most
time (`cache_lookup.NEAR`). Distances are octaves of sizes, as `tuned_entries` sums them.

A winner that did not come to the rounds counts as somewhat slower than the last that did, where it was tried. Pairs of
which a time is not known are left out.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import portfolio_derivation
import portfolio_examples
import portfolio_network
import portfolio_predictions
import variant_pool
from portfolio_examples import DATA, SCREENED, Example

from autoattn.codegen import portfolio
from autoattn.core import kernel_kind
from autoattn.core.kernel_kind import KernelKind
from autoattn.core.problem import Problem
from autoattn.core.variant import Variant
from autoattn.runtime.plan import tuned_entries

MOST = 3.0  # times the best: what a choice counts as that takes longer, so that no single one decides
STEP = 0.25  # octaves
FARTHEST = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A problem, and another one of its kind."""

    octaves: float
    neighbour: float  # logarithm of its winner's time over the best
    portfolio: float  # the same of the variant of a portfolio that knows nothing of the kind


def pairs(
    examples: Sequence[Example], chosen: Mapping[Problem, Variant | None], cover: Collection[Variant]
) -> Iterator[Pair]:
    """All pairs of which both times are known.

    Args:
        chosen: what the portfolio holds for each problem.
        cover: what was tried on all problems that met a cover.
    """
    for kind in of_kinds(examples).values():
        for example in kind:
            variant = chosen[example.problem]
            own = None if variant is None else loss(example, variant, cover)
            for other in kind:
                winner = min(other.times_us, key=lambda each: (other.times_us[each], str(each)))
                theirs = loss(example, winner, cover)
                if other is not example and own is not None and theirs is not None:
                    yield Pair(
                        octaves=tuned_entries.distance_between(example.problem, other.problem),
                        neighbour=theirs,
                        portfolio=own,
                    )


def of_kinds(examples: Sequence[Example]) -> dict[KernelKind, list[Example]]:
    """The examples that share kernels."""
    kinds: defaultdict[KernelKind, list[Example]] = defaultdict(list)
    for example in examples:
        kinds[kernel_kind.of(example.problem)].append(example)
    return kinds


def loss(example: Example, variant: Variant, cover: Collection[Variant]) -> float | None:
    """The logarithm of a variant's time over the best, at most that of MOST; None where it is not known."""
    time_us = example.times_us.get(variant)
    if time_us is None:
        tried = example.met_cover and variant in cover
        if not tried or not portfolio.is_feasible(variant, example.problem, example.device):
            return None
        time_us = portfolio_derivation.BEHIND * max(example.times_us.values())
    return math.log(min(MOST, time_us / example.best_us))


def limit(pairs: Sequence[Pair]) -> tuple[float, float]:
    """The limit below which neighbours save the most beside the portfolio, and the sum of logarithms that it saves."""
    saved = {0.0: 0.0}
    for end in ends():
        saved[end] = sum(pair.portfolio - pair.neighbour for pair in pairs if pair.octaves < end)
    best = max(saved, key=lambda end: (saved[end], -end))
    return best, saved[best]


def ends() -> list[float]:
    """The limits that are compared."""
    return [STEP * number for number in range(1, round(FARTHEST / STEP) + 1)]


def table(pairs: Sequence[Pair]) -> list[str]:
    """A row for each step of the distance."""
    lines = ["| octaves | pairs | winner of the neighbour | median | portfolio | median |", "|---|--:|--:|--:|--:|--:|"]
    for end in ends():
        inside = [pair for pair in pairs if end - STEP <= pair.octaves < end]
        if inside:
            cells = [f"{end - STEP:g} to {end:g}", str(len(inside))]
            for losses in ([pair.neighbour for pair in inside], [pair.portfolio for pair in inside]):
                cells += [f"{math.exp(mean(losses)):.3f}" for mean in (statistics.fmean, statistics.median)]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def without_problem(folds: int, drawn: int) -> dict[Problem, Variant | None]:
    """What portfolios hold for the measured problems that know nothing of them, and know others of their kinds."""
    measured, screened = (portfolio_examples.examples_of(folder) for folder in (DATA, SCREENED))
    problems = portfolio_predictions.drawn_problems()[::drawn]
    chosen: dict[Problem, Variant | None] = {}
    for fold in range(folds):
        known = [example for place, example in enumerate(measured) if place % folds != fold]
        derived = portfolio_derivation.derived(known, screened, problems)
        for example in measured[fold::folds]:
            chosen[example.problem] = portfolio_network.choice(example, derived)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=int, default=3, help="portfolios that each leave out as many problems")
    parser.add_argument("--drawn", type=int, default=3, help="one in so many of the predicted problems")
    options = parser.parse_args()
    chosen = without_problem(options.folds, options.drawn)
    examples = portfolio_examples.examples_of(DATA)
    cover = variant_pool.cover(portfolio_examples.examples_of(SCREENED))
    known = [
        own
        for example in examples
        if (variant := chosen[example.problem]) is not None and (own := loss(example, variant, cover)) is not None
    ]
    known_pairs = list(pairs(examples, chosen, cover))
    print(
        f"{len(known)} of {len(examples)} problems have the time of a portfolio that does not know them: "
        f"{math.exp(statistics.fmean(known)):.3f} of the best, in the median {math.exp(statistics.median(known)):.3f}; "
        f"{len(known_pairs)} pairs"
    )
    best, saved = limit(known_pairs)
    print(f"\na limit of {best:g} octaves saves most, {saved:.2f} in logarithms\n")
    print("\n".join(table(known_pairs)))


if __name__ == "__main__":
    main()
