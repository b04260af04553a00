"""By how much predictions for good variants err from one another: `python benchmarks/model_spread.py [--write]`.

The data are the finalists of the problems that portfolios rest on (benchmarks/data/portfolios/), on an H100 and H200:
variants that were the fastest first looks, which met in rounds. Each is compiled, and predicted by the constants that
the package has. Errors are those of model_quality.py, whose variants are random ones of 16 bits.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import model_quality
import portfolios
from kept import tell
from model_quality import Case, Quality, Row
from portfolio_tree import Example

from autoattn.codegen import render
from autoattn.core.problem import DType
from autoattn.core.trial import StaticReport
from autoattn.core.variant import Variant
from autoattn.cost_model import predictor
from autoattn.workers.compile_job import Inspect
from autoattn.workers.worker_pool import Failure, Pool, cores

LEAST = 4  # finalists of a problem
COMPILE_SECONDS = 120.0


def kind_of(example: Example) -> str:
    """Whose error the finalists of a problem tell: the type of the numbers, and the templates' families."""
    families = {variant.template.partition("/")[0] for variant in example.times_us}
    numbers = example.problem.precision.value if example.problem.dtype is DType.FLOAT32 else "16 bits"
    return f"{numbers}, {' and '.join(sorted(families))}"


def drawn(count: int, seed: int) -> list[Example]:
    """So many problems of each kind, of those that have enough finalists."""
    kinds: dict[str, list[Example]] = defaultdict(list)
    for example in portfolios.examples_of(portfolios.DATA):
        if len(example.times_us) >= LEAST:
            kinds[kind_of(example)].append(example)
    generator = random.Random(seed)
    return [
        example for kind in sorted(kinds) for example in generator.sample(kinds[kind], min(count, len(kinds[kind])))
    ]


def qualities(examples: Iterable[Example]) -> Iterator[Quality]:
    """Compiles and predicts them, on all cores; without problems of which too few variants are compiled."""
    with Pool(size=cores()) as pool:
        for example in examples:
            reports = reports_of(example, pool)
            if len(reports) >= LEAST:
                yield quality(example, reports)


def reports_of(example: Example, pool: Pool) -> dict[Variant, StaticReport]:
    """The machine code of a problem's measured variants, of those that compile."""
    waiting = {
        pool.submit(
            Inspect(source=render.render(example.problem, variant), arch=example.device.arch), COMPILE_SECONDS
        ): variant
        for variant in example.times_us
    }
    reports: dict[Variant, StaticReport] = {}
    while results := pool.next_results():
        reports |= {waiting[ticket]: result for ticket, result in results if not isinstance(result, Failure)}
    return reports


def quality(example: Example, reports: Mapping[Variant, StaticReport]) -> Quality:
    """Of the predictions for the finalists that were compiled."""
    problem, device = example.problem, example.device
    cases = tuple(
        Case(problem=problem, variant=variant, report=report, median_ms=example.times_us[variant] / 1e3)
        for variant, report in reports.items()
    )
    predicted = [predictor.predict(problem, device, case.variant, case.report).time_us / 1e3 for case in cases]
    return model_quality.quality(Row(name=kind_of(example), problem=problem, cases=cases), predicted)


def table(judged: Iterable[Quality]) -> list[str]:
    """A row for each kind."""
    lines = ["| kind | problems | variants | error: median, largest | bias | first choice: median, worst |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    kinds: dict[str, list[Quality]] = defaultdict(list)
    for judgement in judged:
        kinds[judgement.row.name].append(judgement)
    for kind, own in sorted(kinds.items()):
        errors, regrets = [judgement.error for judgement in own], [1 + judgement.first for judgement in own]
        bias = math.exp(statistics.fmean(math.log(judgement.bias) for judgement in own))
        lines.append(
            f"| {kind} | {len(own)} | {sum(len(judgement.row.cases) for judgement in own)} "
            f"| {statistics.median(errors):.2f}, {max(errors):.2f} | {bias:.2f} "
            f"| {statistics.median(regrets):.2f}, {max(regrets):.2f} |"
        )
    return lines


def main() -> None:
    """Prints a table, and keeps it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=8, help="problems of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results/")
    given = parser.parse_args()
    command = f"python benchmarks/model_spread.py --count {given.count} --seed {given.seed}"
    text = "\n".join(table(qualities(drawn(given.count, given.seed))))
    tell("How predictions of good variants err", command, text, "model_spread" if given.write else None)


if __name__ == "__main__":
    main()
