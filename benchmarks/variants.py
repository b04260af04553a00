"""Measures random variants with what their machine code says: `python benchmarks/variants.py --cards 0,1`.

Needs a Hopper card. For each problem of benchmarks/shapes/variants.yaml and each family of kernels it draws the seeds,
neighbours of seeds and uniformly random variants, checks each against the reference and times those that are right,
however slow; what is recorded already is left out. The group `ampere` is compiled to sm_80's PTX, of which the driver
makes the card's machine code. Each family of a problem becomes a recording with reports, on which
benchmarks/model_quality.py judges the model.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from looks import Inspect, Look, Looked, Translate

from autoattn.cache import search_recording
from autoattn.cache.search_recording import Recording
from autoattn.codegen import render, search_space
from autoattn.core import device_profiles
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.trial import Evidence, Outcome, StaticReport, Trial
from autoattn.core.variant import Source, Variant
from autoattn.shapes import shapes_file
from autoattn.workers.worker_pool import Failure, Pool, cores, next_results

HERE = Path(__file__).parent
SHAPES = HERE / "shapes" / "variants.yaml"
TARGET = HERE / "data" / "variants"
FAMILIES = ("triton/forward", "gluon/forward")
DEVICE = device_profiles.named("h200")
AMPERE = device_profiles.named("a100")  # whose variants are translated
COMPILE_SECONDS, TRANSLATE_SECONDS, LOOK_SECONDS = 30.0, 60.0, 10.0
AHEAD = 6  # subjects that are compiled while others are measured


@dataclass(slots=True, kw_only=True, eq=False)
class Subject:
    """One family's variants for one problem, which one card measures."""

    problem: Problem
    template: str
    ptx_arch: int | None
    gate: bool
    card: int
    variants: dict[Variant, Source]
    reports: dict[Variant, StaticReport | Failure] = field(default_factory=dict)
    looks: dict[Variant, Looked | Failure] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether all of its variants were tried."""
        failed = sum(isinstance(report, Failure) for report in self.reports.values())
        return len(self.reports) == len(self.variants) and len(self.looks) + failed == len(self.variants)

    @property
    def name(self) -> str:
        """Of its recording."""
        return name_of(self.problem, self.template, self.ptx_arch)


def name_of(problem: Problem, template: str, ptx_arch: int | None) -> str:
    """What tells a family's recording of a problem from others."""
    family = f"sm_{ptx_arch}" if ptx_arch else template.partition("/")[0]
    return f"{DEVICE.name}_{family}_{problem.key}"


def _families(group: str) -> tuple[str, ...]:
    return FAMILIES if group == "hopper" else FAMILIES[:1]


def _ptx_arch(group: str) -> int | None:
    return None if group == "hopper" else AMPERE.arch


def drawn(problem: Problem, template: str, device: Device, count: int, seed: int) -> list[Variant]:
    """Seeds, then in turn neighbours of seeds and uniform draws, each once; fewer where the space has no more."""
    shipped, draw = search_space.load(template), random.Random(seed)
    variants = dict.fromkeys(shipped.seeds_for(problem, device))
    near = _near(list(variants), template, problem, device, draw)
    anywhere = (next(shipped.feasible(problem, device, draw), None) for _ in range(20 * count))
    for variant in itertools.chain.from_iterable(itertools.zip_longest(anywhere, near)):
        if len(variants) >= count:
            break
        if variant is not None:
            variants.setdefault(variant)
    return list(variants)[:count]


def _near(
    seeds: list[Variant], template: str, problem: Problem, device: Device, draw: random.Random
) -> Iterator[Variant]:
    """Feasible variants that differ from a seed in one parameter or two."""
    shipped = search_space.load(template)
    for _ in range(2000):
        params = shipped.params_of(draw.choice(seeds))
        for name in draw.sample(sorted(shipped.choices), draw.choice((1, 2))):
            params[name] = draw.choice(shipped.choices[name])
        variant = shipped.variant(params)
        if shipped.why_infeasible(variant, problem, device) is None:
            yield variant


def subjects(cards: int, count: int, known: Callable[[str], bool] = lambda name: False) -> Iterator[Subject]:
    """What is measured: a part of each group, then the next, so that a run that is cut short has some of all.

    The two families of a problem are measured on one card. Subjects whose names are known are left out.
    """
    groups: dict[str, list[Problem]] = {}
    for named in shapes_file.load(SHAPES):
        groups.setdefault(named.groups[0], []).append(named.problem)
    order = [
        ((n + 0.5) / len(problems), group, problem)
        for group, problems in groups.items()
        for n, problem in enumerate(problems)
    ]
    wanted = [
        (seed, group, problem, templates)
        for seed, (_, group, problem) in enumerate(sorted(order, key=lambda entry: entry[0]))
        if (
            templates := [
                template for template in _families(group) if not known(name_of(problem, template, _ptx_arch(group)))
            ]
        )
    ]
    for place, (seed, group, problem, templates) in enumerate(wanted):
        for template in templates:
            device = DEVICE if group == "hopper" else AMPERE
            variants = drawn(problem, template, device, count, seed)
            if group == "numbers":
                variants = search_space.load(template).seeds_for(problem, device)
            sources = {variant: render.render(problem, variant) for variant in variants}
            yield Subject(
                problem=problem, template=template, ptx_arch=_ptx_arch(group),
                gate=group != "hopper", card=place % cards, variants=sources,
            )  # fmt: skip


class Survey:
    """Compiles subjects ahead on all cores, and has each measured on its card once all of it is compiled."""

    def __init__(self, coming: Iterator[Subject], cards: list[str], seconds: float) -> None:
        self._coming, self._end = coming, time.monotonic() + seconds
        self.begun: list[Subject] = []
        paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        common = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        jobs = max(1, cores() - len(cards))
        self._compilers = Pool(size=jobs, environment={**common, "CUDA_VISIBLE_DEVICES": ""}, preload="looks")
        apart = [{"CUDA_VISIBLE_DEVICES": card} for card in cards]
        self._bench = Pool(size=len(cards), environment=common, apart=apart, preload="looks")
        self._compiling: dict[int, tuple[Subject, Variant]] = {}
        self._looking: dict[int, tuple[Subject, Variant]] = {}

    def run(self) -> None:
        """Measures until all is done or the time is over."""
        busy: list[Subject] = []
        while time.monotonic() < self._end:
            while len(busy) < AHEAD and (subject := next(self._coming, None)) is not None:
                busy.append(subject)
                self._compile(subject)
            if not (results := next_results(self._compilers, self._bench)):
                break
            for pool, ticket, result in results:
                subject = self._take(pool, ticket, result)
                if subject in busy and subject.done:
                    busy.remove(subject)
                    print(f"{self._end - time.monotonic():6.1f} s left. {summary(subject)}", flush=True)
        self._compilers.close()
        self._bench.close()

    def _compile(self, subject: Subject) -> None:
        self.begun.append(subject)
        for variant, source in subject.variants.items():
            job = Inspect(source=source, arch=DEVICE.arch, ptx_arch=subject.ptx_arch)
            self._compiling[self._compilers.submit(job, COMPILE_SECONDS)] = subject, variant

    def _take(self, pool: Pool, ticket: int, result: Any) -> Subject | None:
        """Notes a result; the subject that it is of, but None for a Translate, whose failures each Look has too."""
        if pool is self._compilers:
            subject, variant = self._compiling.pop(ticket)
            subject.reports[variant] = result
            if len(subject.reports) == len(subject.variants):
                self._look(subject)
            return subject
        if ticket not in self._looking:
            return None
        subject, variant = self._looking.pop(ticket)
        subject.looks[variant] = result
        return subject

    def _look(self, subject: Subject) -> None:
        """In random order, so that a drift of the card is no trend of a parameter."""
        fit = [variant for variant, report in subject.reports.items() if isinstance(report, StaticReport)]
        random.Random(0).shuffle(fit)
        if subject.ptx_arch is not None:
            ahead = Translate(sources=tuple(subject.variants[variant] for variant in fit), ptx_arch=subject.ptx_arch)
            self._bench.submit(ahead, TRANSLATE_SECONDS, place=subject.card)
        for variant in fit:
            job = Look(
                problem=subject.problem, source=subject.variants[variant], ptx_arch=subject.ptx_arch, gate=subject.gate
            )
            self._looking[self._bench.submit(job, LOOK_SECONDS, place=subject.card)] = subject, variant


def recorded(subject: Subject, where: str) -> Recording | None:
    """The subject's variants that were tried to the end; None when none worked."""
    trials = []
    shipped = search_space.load(subject.template)
    for variant, report in subject.reports.items():
        stated = Variant.of(subject.template, shipped.params_of(variant))  # what is implied too: all lines are alike
        static = report if isinstance(report, StaticReport) else None
        result = subject.looks.get(variant) if static is not None else report
        if isinstance(result, Failure):
            trials.append(Trial(variant=stated, outcome=result.outcome, detail=result.detail))
        elif isinstance(result, Looked):
            time_us, read = round(result.median_us, 3), result.report or static
            trials.append(
                search_recording.trial_of(subject.problem, Evidence.MEASURED, stated, Outcome.OK, time_us, read)
            )
    if not any(trial.outcome is Outcome.OK for trial in trials):
        return None
    return search_recording.of_trials(
        trials, problem=subject.problem, device=DEVICE.name, evidence=Evidence.MEASURED, reports=True,
        versions={"triton": triton.__version__}, source=f"python benchmarks/variants.py on {where}",
    )  # fmt: skip


def summary(subject: Subject) -> str:
    results = [*subject.looks.values(), *(report for report in subject.reports.values() if isinstance(report, Failure))]
    counts = Counter(result.outcome.value if isinstance(result, Failure) else "right" for result in results)
    looked = {variant: look for variant, look in subject.looks.items() if isinstance(look, Looked)}
    best = min((look.median_us for look in looked.values()), default=float("nan"))
    if subject.ptx_arch is not None:  # how far our ptxas is from the driver
        counts["read from the driver"] = sum(look.report is not None for look in looked.values())
        counts["other registers"] = sum(
            look.registers != report.registers
            for variant, look in looked.items()
            if isinstance(report := subject.reports[variant], StaticReport)
        )
    why = {
        result.detail[:110]
        for result in results
        if isinstance(result, Failure) and result.outcome is not Outcome.COMPILE_ERROR
    }
    return f"{subject.name}: {dict(counts)}, best {best:.1f} us {' | '.join(sorted(why)[:2])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cards", default="0", help="as CUDA_VISIBLE_DEVICES calls them")
    parser.add_argument("--seconds", type=float, default=150.0, help="of all, at most")
    parser.add_argument("--count", type=int, default=40, help="variants of each problem and family")
    parser.add_argument("--out", type=Path, default=TARGET, help="the folder of the recordings")
    options = parser.parse_args()
    cards = options.cards.split(",")
    coming = subjects(len(cards), options.count, lambda name: (options.out / f"{name}.jsonl").exists())
    survey = Survey(coming, cards, options.seconds)
    survey.run()
    for subject in survey.begun:
        if not subject.done:
            print(f"cut short: {summary(subject)}")
        if (recording := recorded(subject, DEVICE.full_name)) is not None:
            search_recording.write(recording, options.out / f"{subject.name}.jsonl")


if __name__ == "__main__":
    main()
