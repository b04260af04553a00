"""By how much predictions for good variants err from one another: `python benchmarks/model_spread.py [--write]`.

The data are the finalists of the problems that portfolios rest on (benchmarks/data/portfolios/), on an H100 and H200:
variants that were the fastest first looks, which met in rounds. Each is compiled, and predicted by the constants that
the package has. A spread is the standard deviation of the logarithm of predicted over measured time among a problem's
finalists, as in model_quality.py, whose variants are random ones of 16 bits.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from kept import tell

from autoattn.codegen import render
from autoattn.core import device_profiles
from autoattn.core.device import Device
from autoattn.core.problem import DType, Problem
from autoattn.core.trial import StaticReport
from autoattn.core.variant import Variant
from autoattn.cost_model import predictor
from autoattn.workers.compile_job import Inspect
from autoattn.workers.worker_pool import Failure, Pool, cores

DATA = Path(__file__).parent / "data" / "portfolios"
LEAST = 4  # finalists of a problem
COMPILE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalists:
    """The finalists of one problem on one card."""

    problem: Problem
    card: Device
    times_us: dict[Variant, float]

    @property
    def kind(self) -> str:
        """Whose error they tell: the type of the numbers, and the templates' family."""
        families = {variant.template.partition("/")[0] for variant in self.times_us}
        numbers = self.problem.precision.value if self.problem.dtype is DType.FLOAT32 else "16 bits"
        return f"{numbers}, {' and '.join(sorted(families))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How predictions of a problem's finalists compare with their times."""

    kind: str
    variants: int
    error: float  # standard deviation of the logarithm of predicted over measured
    bias: float  # predicted over measured, geometric mean
    regret: float  # the time of the first choice over the least


def finalists() -> Iterator[Finalists]:
    """Those of all problems that have enough of them."""
    for path in sorted(DATA.glob("*.jsonl")):
        card = device_profiles.named(path.name.partition("_")[0])
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            times = {Variant.of(template, params): time for template, params, time in line["times_us"]}
            if len(times) >= LEAST:
                yield Finalists(problem=msgspec.convert(line["problem"], Problem), card=card, times_us=times)


def drawn(count: int, seed: int) -> list[Finalists]:
    """So many problems of each kind."""
    kinds: dict[str, list[Finalists]] = defaultdict(list)
    for each in finalists():
        kinds[each.kind].append(each)
    generator = random.Random(seed)
    return [each for kind in sorted(kinds) for each in generator.sample(kinds[kind], min(count, len(kinds[kind])))]


def spreads(chosen: Iterable[Finalists]) -> Iterator[Spread]:
    """Compiles and predicts them, on all cores; without problems of which too few variants are compiled."""
    with Pool(size=cores()) as pool:
        for each in chosen:
            waiting = {pool.submit(_compilation(each, variant), COMPILE_SECONDS): variant for variant in each.times_us}
            reports: dict[Variant, StaticReport] = {}
            while results := pool.next_results():
                reports |= {waiting[ticket]: result for ticket, result in results if not isinstance(result, Failure)}
            if len(reports) >= LEAST:
                yield spread(each, reports)


def _compilation(each: Finalists, variant: Variant) -> Inspect:
    return Inspect(source=render.render(each.problem, variant), arch=each.card.arch)


def spread(each: Finalists, reports: Mapping[Variant, StaticReport]) -> Spread:
    """Of the finalists that were compiled."""
    pairs = [
        (predictor.predict(each.problem, each.card, variant, report).time_us, each.times_us[variant])
        for variant, report in reports.items()
    ]
    logs = [math.log(predicted / measured) for predicted, measured in pairs]
    return Spread(
        kind=each.kind,
        variants=len(pairs),
        error=statistics.pstdev(logs),
        bias=math.exp(statistics.fmean(logs)),
        regret=min(pairs)[1] / min(measured for _, measured in pairs),
    )


def table(found: Iterable[Spread]) -> list[str]:
    """A row for each kind."""
    lines = ["| kind | problems | variants | error: median, largest | bias | first choice: median, worst |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    kinds: dict[str, list[Spread]] = defaultdict(list)
    for each in found:
        kinds[each.kind].append(each)
    for kind, own in sorted(kinds.items()):
        errors, regrets = [each.error for each in own], [each.regret for each in own]
        bias = math.exp(statistics.fmean(math.log(each.bias) for each in own))
        lines.append(
            f"| {kind} | {len(own)} | {sum(each.variants for each in own)} | {statistics.median(errors):.2f}, "
            f"{max(errors):.2f} | {bias:.2f} | {statistics.median(regrets):.2f}, {max(regrets):.2f} |"
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
    text = "\n".join(table(spreads(drawn(given.count, given.seed))))
    tell("How predictions of good variants err", command, text, "model_spread" if given.write else None)


if __name__ == "__main__":
    main()
