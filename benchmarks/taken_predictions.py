"""Says whether predictions that beat a portfolio's choice make calls faster: `python benchmarks/taken_predictions.py`.

Needs no GPU, and takes half an hour; --write keeps the page. The problems are those of finalists.py, with the times
that an H100 or an H200 measured. The default of each is the choice of a portfolio that does not know it
(near_limit.py). What would be taken is the best prediction that beats the default's by a margin, if there is one. Each
row of a table is a margin, in errors that the model is known to make: how much slower than the best variant the calls
are then, and how often what was taken is slower than the default. `tune --device` takes none where a portfolio chose
the default (docs/decisions/predicted-entries.md).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import finalists
import near_limit
from kept import tell

from autoattn.core.problem import Problem
from autoattn.core.variant import Variant
from autoattn.cost_model import accuracy, predictor

MULTIPLES = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0  # of the model's error
SLOWER = 0.97  # a call that runs at less than this of the default's speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A problem whose default is known, with times of its variants."""

    problem: Problem
    arch: int
    default: Variant
    times_us: Mapping[Variant, float]
    predicted_us: Mapping[Variant, float]  # of those that were compiled

    def taken(self, multiple: float) -> Variant:
        """What a call runs where a prediction must beat the default's by so many errors."""
        best, best_us = self.default, math.inf
        for variant, time_us in self.predicted_us.items():
            templates = {variant.template, self.default.template}
            margin = multiple * accuracy.error_between(templates, self.arch, self.problem.dtype)
            if time_us * (1.0 + margin) < self.predicted_us[self.default] and time_us < best_us:
                best, best_us = variant, time_us
        return best

    def loss(self, variant: Variant) -> float:
        """The logarithm of a variant's time over the best."""
        return math.log(self.times_us[variant] / min(self.times_us.values()))


def prospects(problems: Iterable[finalists.Finalists], chosen: Mapping[Problem, Variant | None]) -> Iterator[Prospect]:
    """Those whose default is among the finalists."""
    for of_problem in problems:
        problem, device, default = of_problem.problem, of_problem.device, chosen[of_problem.problem]
        if default is not None and default in of_problem.times_us:
            predicted_us = {
                variant: predictor.predict(problem, device, variant, report).time_us
                for variant, report in of_problem.reports.items()
            }
            yield Prospect(
                problem=problem,
                arch=device.arch,
                default=default,
                times_us=of_problem.times_us,
                predicted_us=predicted_us,
            )


def table(known: Sequence[Prospect]) -> list[str]:
    """A row for each margin."""
    lines = [
        "| margin in errors | over the best | taken | of these 3% slower or more | slowest |",
        "|--:|--:|--:|--:|--:|",
    ]
    losses = [prospect.loss(prospect.default) for prospect in known]
    lines.append(f"| never taken | {_mean(losses):.3f} | 0 | 0 | 1.00 |")
    for multiple in MULTIPLES:
        taken = [(prospect, prospect.taken(multiple)) for prospect in known]
        speeds = [
            prospect.times_us[prospect.default] / prospect.times_us[variant]
            for prospect, variant in taken
            if variant != prospect.default
        ]
        losses = [prospect.loss(variant) for prospect, variant in taken]
        slower = sum(speed < SLOWER for speed in speeds)
        lines.append(
            f"| {multiple:g} | {_mean(losses):.3f} | {len(speeds)} | {slower} | {min(speeds, default=1.0):.2f} |"
        )
    return lines


def tables(known: Sequence[Prospect]) -> Iterator[str]:
    """A table of all problems, and one for each kind of numbers."""
    kinds: dict[str, Collection[str]] = {
        "All": finalists.COUNTS,
        "16 bits": {finalists.SIXTEEN_BITS},
        "tf32 and tf32x3": {"tf32", "tf32x3"},
        "IEEE float32": {"ieee"},
    }
    for name, numbers in kinds.items():
        if of_kind := [prospect for prospect in known if finalists.numbers_of(prospect.problem) in numbers]:
            yield f"## {name}: {len(of_kind)} problems\n\n" + "\n".join(table(of_kind))


def _mean(losses: Sequence[float]) -> float:
    return math.exp(statistics.fmean(losses))


def main() -> None:
    """Prints the tables, and keeps them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the tables under benchmarks/results/")
    given = parser.parse_args()
    known = list(prospects(finalists.read(), near_limit.without_problem(2, 12)))
    command = "python benchmarks/taken_predictions.py"
    text = "\n\n".join(tables(known))
    tell(
        "Which predictions make calls faster than the default",
        command,
        text,
        "taken_predictions" if given.write else None,
    )


if __name__ == "__main__":
    main()
