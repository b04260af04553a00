"""Keeps the machine code of variants that were measured: `python benchmarks/finalists.py`.

Needs no GPU, and takes half an hour. The data are the problems that portfolios rest on (benchmarks/data/portfolios/):
the fastest first looks of each met in rounds on an H100 or an H200. The script draws problems of every kind of numbers
and of every range of times, compiles their finalists, and writes what the model of docs/model.md reads of them to
benchmarks/data/finalists.jsonl.gz. The model is fitted on them (model_quality.py) and judged by them (model_spread.py,
taken_predictions.py).
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import portfolio_examples
from portfolio_examples import Example

from autoattn.codegen import render
from autoattn.core import device_profiles
from autoattn.core.device import Device
from autoattn.core.problem import DType, Problem
from autoattn.core.trial import StaticReport
from autoattn.core.variant import Variant
from autoattn.workers.compile_job import Inspect
from autoattn.workers.worker_pool import Failure, Pool, cores

DATA = Path(__file__).parent / "data" / "finalists.jsonl.gz"
LEAST = 5  # finalists of a problem
SIXTEEN_BITS = "16 bits"
# Problems of each kind of numbers, for each range of times that ends with one of these microseconds.
COUNTS = {SIXTEEN_BITS: 32, "tf32": 8, "tf32x3": 4, "ieee": 6}
RANGES_US = 8.0, 20.0, 80.0, math.inf
SEED = 5
COMPILE_SECONDS = 120.0
# What a report has that the model does not read.
UNREAD = ("digest", "arch", "code")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalists:
    """A measured problem, with the machine code of those of its finalists that compiled."""

    problem: Problem
    device: Device  # that measured it
    times_us: Mapping[Variant, float]  # of those that compiled
    reports: Mapping[Variant, StaticReport]

    def document(self) -> dict[str, Any]:
        """A line of the file."""
        return {
            "problem": self.problem,
            "device": self.device.name,
            "variants": [
                [variant.template, variant.as_dict(), time_us, _read_by_the_model(self.reports[variant])]
                for variant, time_us in self.times_us.items()
            ],
        }


def numbers_of(problem: Problem) -> str:
    """The kind of a problem's numbers, as COUNTS names it."""
    return problem.precision.value if problem.dtype is DType.FLOAT32 else SIXTEEN_BITS


def drawn(examples: Iterable[Example]) -> list[Example]:
    """So many problems of each kind of numbers and each range of times as COUNTS has, the kinds in turn."""
    shuffled = [example for example in examples if len(example.times_us) >= LEAST]
    random.Random(SEED).shuffle(shuffled)
    alike: dict[tuple[str, float], list[Example]] = defaultdict(list)
    for example in shuffled:
        bound = next(bound for bound in RANGES_US if example.best_us < bound)
        alike[numbers_of(example.problem), bound].append(example)
    return [
        alike[kind][place]
        for place in range(max(COUNTS.values()))
        for kind in sorted(alike)
        if place < min(COUNTS[kind[0]], len(alike[kind]))
    ]


def compiled(example: Example, pool: Pool) -> Finalists:
    """Compiles a problem's measured variants for the card that measured them."""
    jobs = {
        variant: Inspect(source=render.render(example.problem, variant), arch=example.device.arch)
        for variant in example.times_us
    }
    results = pool.results(jobs, COMPILE_SECONDS)
    return of(example, {variant: result for variant, result in results if not isinstance(result, Failure)})


def of(example: Example, reports: Mapping[Variant, StaticReport]) -> Finalists:
    """The variants that were compiled, in the order of their times."""
    times_us = {variant: time_us for variant, time_us in example.times_us.items() if variant in reports}
    return Finalists(problem=example.problem, device=example.device, times_us=times_us, reports=reports)


def write(problems: Iterable[Finalists], path: Path = DATA) -> None:
    """Writes a line for each problem; the same problems give the same bytes."""
    lines = b"".join(msgspec.json.encode(problem.document()) + b"\n" for problem in problems)
    path.write_bytes(gzip.compress(lines, 9, mtime=0))


def read(path: Path = DATA) -> Iterator[Finalists]:
    """The problems of the file."""
    for line in gzip.decompress(path.read_bytes()).splitlines():
        document = json.loads(line)
        problem, device = msgspec.convert(document["problem"], Problem), device_profiles.named(document["device"])
        times_us: dict[Variant, float] = {}
        reports: dict[Variant, StaticReport] = {}
        for template, params, time_us, report in document["variants"]:
            variant = Variant.of(template, params)
            times_us[variant] = time_us
            reports[variant] = StaticReport(digest="", arch=device.arch, **report)
        yield Finalists(problem=problem, device=device, times_us=times_us, reports=reports)


def _read_by_the_model(report: StaticReport) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(report)
    return {name: value for name, value in fields.items() if name not in UNREAD}


def main() -> None:
    """Compiles them, and says how far it is."""
    examples = drawn(portfolio_examples.examples_of(portfolio_examples.DATA))
    problems: list[Finalists] = []
    with Pool(size=cores()) as pool:
        for number, example in enumerate(examples, start=1):
            problems.append(compiled(example, pool))
            print(f"[{number}/{len(examples)}] {example.problem}: {len(problems[-1].reports)} kernels", flush=True)
    write([problem for problem in problems if problem.reports])


if __name__ == "__main__":
    main()
