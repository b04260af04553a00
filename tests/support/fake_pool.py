"""Workers without processes: a workshop that compiles and looks at what a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import kernels
import pytest

from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome, StaticReport, Trial, Verdict
from autoattn.core.variant import Variant
from autoattn.search import trial_pipeline
from autoattn.search.gpu_jobs import Admit, Final, Finished, Prepare, Rehearse, Screen, Screened
from autoattn.search.trial_pipeline import Workshop
from autoattn.workers.compile_job import Inspect
from autoattn.workers.worker_pool import Failure

LARGE = kernels.problem(batch=8, heads_q=16, heads_kv=4, seq_q=2048, seq_kv=4096, head_dim=64, mask="causal")
GOOD = Verdict(ok=True, checks=11, max_error=1e-3, rms_error=1e-4, allowed=4e-3)
FINISHED = Finished(verdicts=(GOOD,), measurements=(None,), rivals=())
BROKEN = Failure(outcome=Outcome.COMPILE_ERROR, detail="ptxas said no")


def report_of(job: Inspect, **changes: Any) -> StaticReport:
    facts: dict[str, Any] = {
        "digest": job.source.digest, "arch": job.arch, "registers": 128, "spilled_bytes": 0, "shared_bytes": 65536,
        "num_warps": int(job.source.variant["num_warps"]), "code_bytes": 8192,
        "loop": {"HMMA": 64, "MUFU.EX2": 32, "FFMA": 96, "LDSM": 24, "LDGSTS": 8},
    }  # fmt: skip
    return StaticReport(**{**facts, **changes})


@dataclass
class FakePool:
    """Answers jobs without a process: those of a place in order, but the last place, or the last of no place, first."""

    size: int
    environment: dict[str, str]
    answer: Callable[[Any], Any]
    apart: Sequence[Any] = ()
    waiting: list[tuple[int, Any, int | None]] = field(default_factory=list)
    jobs: list[Any] = field(default_factory=list)
    places: list[int | None] = field(default_factory=list)  # of the workers that had to do it
    closed: bool = False

    def submit(self, job: Any, seconds: float, *, place: int | None = None) -> int:
        assert seconds > 0
        self.jobs.append(job)
        self.places.append(place)
        self.waiting.append((len(self.jobs), job, place))
        return len(self.jobs)

    def result(self, job: Any, seconds: float, place: int | None = None) -> Any:
        return self.results([job], seconds)[0]

    def results(self, jobs: Sequence[Any], seconds: float) -> list[Any]:
        assert seconds > 0
        self.jobs += jobs
        return [self.answer(job) for job in jobs]

    @staticmethod
    def next_results(*pools: FakePool) -> list[tuple[FakePool, int, Any]]:
        """A look on the GPU ends before a compile."""
        pool = next((pool for pool in reversed(pools) if pool.waiting), None)
        assert pool is not None, "nothing to wait for: a real pool would give an empty list forever"
        *_, place = pool.waiting[-1]
        number = -1 if place is None else [waiting[-1] for waiting in pool.waiting].index(place)
        ticket, job, _ = pool.waiting.pop(number)
        return [(pool, ticket, pool.answer(job))]

    def close(self) -> None:
        self.closed = True


@dataclass
class Bench:
    """What the fake workers answer."""

    inspect: Callable[[Inspect], Any] = report_of
    screen: Callable[[Screen], Any] = lambda job: Screened(verdict=GOOD, median_us=100.0, samples=9)
    rehearse: Callable[[Rehearse], Any] = lambda job: GOOD
    admit: Callable[[Admit], Any] = lambda job: None
    final: Callable[[Final], Any] = lambda job: FINISHED
    code: Callable[[Inspect], str] = lambda job: job.source.digest

    def __call__(self, job: Any) -> Any:
        if isinstance(job, Inspect):
            report = self.inspect(job)
            return report if isinstance(report, Failure) else replace(report, code=self.code(job))
        if isinstance(job, Prepare):
            return None
        if isinstance(job, Admit | Final):
            return self.admit(job) if isinstance(job, Admit) else self.final(job)
        return self.screen(job) if isinstance(job, Screen) else self.rehearse(job)


def set_pool(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Gives workshops such workers; what they answer can be changed."""
    answers = Bench()
    monkeypatch.setattr(
        trial_pipeline,
        "Pool",
        lambda size, environment=None, apart=(), **_: FakePool(size, environment or {}, answers, apart),
    )
    monkeypatch.setattr(trial_pipeline, "next_results", FakePool.next_results)
    return answers


@dataclass
class Studied:
    """A study that proposes what it is told to."""

    proposals: list[Variant]
    problem: Problem = LARGE
    waiting: bool = False
    trials: dict[Variant, Trial] = field(default_factory=dict)

    def propose(self, more: Callable[[], bool] = lambda: True) -> Variant | None:
        return self.proposals.pop(0) if self.proposals else None

    def record(self, trial: Trial) -> None:
        self.trials[trial.variant] = trial


def variants(count: int) -> list[Variant]:
    tiles = [(64, 64), (64, 32), (128, 64), (32, 64), (64, 16), (32, 32), (16, 64), (128, 32), (16, 16), (32, 16)]
    return [kernels.variant(BLOCK_M=m, BLOCK_N=n, num_warps=1, num_stages=2) for m, n in tiles[:count]]


def searched(
    shop: Workshop, study: Any, *, more: Callable[[], bool] = lambda: True, late: Callable[[], bool] = lambda: False
) -> list[Trial]:
    heard: list[Trial] = []
    shop.alone(shop.search(study, more=more, late=late, heard=heard.append))
    return heard


def compile_jobs(shop: Workshop) -> list[Any]:
    return shop.compilers.jobs  # type: ignore[attr-defined, no-any-return]


def benched(shop: Workshop) -> list[Any]:
    """What the GPU's workers were asked, but for what they make ready."""
    return [job for job in shop.bench.jobs if not isinstance(job, Prepare)]  # type: ignore[attr-defined]
