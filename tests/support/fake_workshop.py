"""A fake workshop, in which every variant works: for the tests of the tuner's rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import samples

from autoattn.cache import store
from autoattn.codegen import render
from autoattn.core.cache_entry import KERNEL, Rival, WorstCase
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.paired_stats import Round
from autoattn.core.problem import DType, Op, Problem
from autoattn.core.trial import Energy, Outcome, Trial, Verdict
from autoattn.core.variant import Variant
from autoattn.search import search_options, tuner
from autoattn.search.gpu_jobs import Finished, finalist_name
from autoattn.search.kind_search import KindSearch
from autoattn.search.trial_pipeline import Steps
from autoattn.workers.worker_pool import Failure

SMALL = Problem(
    dtype=DType.FLOAT16, batch=1, heads_q=2, heads_kv=1, seq_q=64, seq_kv=64, head_dim=16, mask=Mask.parse("causal")
)
GOOD = Verdict(ok=True, checks=10, max_error=1e-3, rms_error=1e-4, allowed=4e-3)


def rounds_of(times: dict[str, float], count: int = 40) -> tuple[Round, ...]:
    """Rounds without any noise."""
    return tuple(Round(times_us=dict(times)) for _ in range(count))


class FakeWorkshop:
    """A workshop in which every variant works and the smaller tile is the faster one."""

    fails: frozenset[str] = frozenset()  # problem keys whose variants all fail
    refused: frozenset[Variant] = frozenset()  # variants that no compiler takes
    interrupts: frozenset[str] = frozenset()
    many: int = 1  # problems at once
    rivals: tuple[Rival, ...] = ()
    absent: ClassVar[dict[str, str]] = {}  # who was not in the finals, and why
    finals: ClassVar[list[list[Variant]]] = []  # the finalists of each problem
    budgets: ClassVar[list[dict[str, Any]]] = []  # what else the finals were asked
    outgrown: ClassVar[list[tuple[Variant, int]]] = []  # whose worst case was asked for, with the seed
    left_out: ClassVar[list[Trial]] = []
    tried: ClassVar[list[tuple[str, Variant]]] = []  # problem keys and variants, in order

    def __init__(self, device: Any, *, measured: bool, jobs: int | None = None, cards: Sequence[str] = ()) -> None:
        self.device, self.measured = device, measured
        self.outcomes: dict[Outcome, int] = {}
        self.rehearsals: Counter[Outcome] = Counter()
        self.reasons: Counter[str] = Counter()
        self.kernels = self.begun = 0
        self.busy_seconds, self.finals_seconds = (0.0, 0.0), 0.0
        self.idle = True
        self._known: set[str] = set()  # digests

    def __enter__(self) -> FakeWorkshop:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def at_once(self, problem: Problem) -> int:
        return self.many

    def wait(self) -> None:
        pass

    def search(
        self,
        study: KindSearch,
        *,
        budget: int,
        more: Callable[[], bool],
        late: Callable[[], bool],
        heard: Callable[[Trial], None],
    ) -> Steps[None]:
        if study.problem.key in self.interrupts:
            raise KeyboardInterrupt
        while not late() and more() and (variant := study.propose()) is not None:
            self.tried.append((study.problem.key, variant))
            digest = render.render(study.problem, variant).digest
            self._known.add(digest)
            self.kernels = self.begun = len(self._known)
            time_us = self.time_us(variant)
            trial = Trial(
                variant=variant,
                outcome=Outcome.OK,
                digest=digest,
                prediction=samples.prediction(time_us),
                verdict=GOOD if self.measured else None,
                measurement=samples.measurement(study.problem, time_us) if self.measured else None,
            )
            if self._is_refused(study.problem, variant):
                trial = Trial(variant=variant, outcome=Outcome.COMPILE_ERROR, detail="ptxas said no")
            study.record(trial)
            heard(trial)
            yield

    def carried(self, problem: Problem, trial: Trial) -> Trial:
        if self._is_refused(problem, trial.variant):
            return Trial(variant=trial.variant, outcome=Outcome.COMPILE_ERROR, detail="ptxas said no")
        time_us = self.time_us(trial.variant)
        return replace(trial, outcome=Outcome.OK, detail="", prediction=samples.prediction(time_us))

    def _is_refused(self, problem: Problem, variant: Variant) -> bool:
        return problem.key in self.fails or variant in self.refused

    def count_left_out(self, trials: Iterable[Trial]) -> None:
        self.left_out += list(trials)

    def knows_structure(self, problem: Problem, variant: Variant) -> bool:
        return True

    def rehearse(self, problem: Problem, *variants: Any) -> list[Verdict | Failure]:
        return [GOOD for _ in variants]

    def final(self, problem: Problem, variants: list[Any], **budgets: Any) -> Steps[Finished | Failure]:
        yield
        return self.finished(problem, variants, **budgets)

    def finished(self, problem: Problem, variants: list[Any], **budgets: Any) -> Finished | Failure:
        self.finals.append(variants)
        self.budgets.append(budgets)
        times = [samples.measurement(problem, self.time_us(variant)) for variant in variants]
        named = {finalist_name(place): measurement.median_us for place, measurement in enumerate(times)}
        named |= {rival.name: rival.measurement.median_us for rival in self.rivals}
        return Finished(
            verdicts=(GOOD,) * len(variants),
            measurements=tuple(times),
            rivals=self.rivals,
            rounds=rounds_of(named),
            energies=tuple(Energy(joules=self.joules(variant), watts=500.0) for variant in variants),
            absent=self.absent,
        )

    def outgrow(self, problem: Problem, variant: Variant, *, seed: int) -> Steps[WorstCase | Failure]:
        yield
        return self.computed_twice(problem, variant, seed=seed)

    def computed_twice(self, problem: Problem, variant: Variant, *, seed: int) -> WorstCase | Failure:
        self.outgrown.append((variant, seed))
        return WorstCase(
            median_us=2.5 * self.time_us(variant), slowdown=2.5, rounds=7, max_error=2e-3, tiles=64, redone=63
        )

    def joules(self, variant: Variant) -> float:
        return self.time_us(variant)

    def time_us(self, variant: Variant) -> float:
        return float(int(variant["BLOCK_M"]) + int(variant["BLOCK_N"]))


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorkshop]:
    fresh = type("Fresh", (FakeWorkshop,), {"finals": [], "budgets": [], "outgrown": [], "tried": [], "left_out": []})
    monkeypatch.setattr(tuner, "Workshop", fresh)
    return fresh


def run(folder: Path, *problems: Problem, measured: bool = False, **changes: Any) -> search_options.Summary:
    options = search_options.Options(
        **{"effort": search_options.Effort.QUICK, "trials": 6, "cache": folder, "jobs": 2, **changes}
    )
    device = samples.H200 if measured else samples.A30
    return tuner.tune(list(problems) or [SMALL], device, measured=measured, options=options)


def rival(name: str, time_us: float, max_error: float | None = 1e-3) -> Rival:
    return Rival(name=name, measurement=samples.measurement(SMALL, time_us), max_error=max_error)


def remember(folder: Path, variant: Variant, device: Device = samples.H200, problem: Problem = SMALL) -> None:
    """Writes a measured entry with this winner and no runners-up."""
    entry = replace(samples.measured(problem), params=variant.as_dict(), candidates=(), choice=KERNEL)
    store.merge(folder, device, Op.FORWARD, [entry])
