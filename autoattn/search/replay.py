"""Replays a search without a GPU and a compiler: the study proposes, a recording answers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autoattn.cache import search_recording
from autoattn.cache.search_recording import Recording
from autoattn.core import device_profiles
from autoattn.core.problem import Problem
from autoattn.core.trial import Evidence, Trial
from autoattn.core.variant import Variant
from autoattn.errors import UsageError
from autoattn.search import shared_trials
from autoattn.search.study import Sampler, Study


class Search(Protocol):
    """What proposes variants and is told what became of them: a Study, or whatever a test puts in its place."""

    def propose(self) -> Variant | None:
        """The next variant; None when there is none."""

    def record(self, trial: Trial) -> None:
        """Takes what became of a proposed variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a simulated search found, trial by trial."""

    best_us: float  # of the whole recording
    times_us: tuple[float, ...]  # in the order of the trials; infinite where one failed

    def trials_to(self, share: float) -> int | None:
        """Trials until one is at most so much slower than the recording's best (0.05: 5%); None when none was."""
        for number, time_us in enumerate(self.times_us, start=1):
            if time_us <= self.best_us * (1 + share):
                return number
        return None

    def regret(self, trials: int) -> float:
        """How much slower the best of the first so many trials is than the recording's best; 0 is as good."""
        return min(self.times_us[:trials], default=math.inf) / self.best_us - 1


def run(recorded: Recording, search: Search, *, trials: int, window: int = 1) -> Run:
    """Answers a search's proposals from a recording.

    Args:
        trials: the most that are tried.
        window: proposals in flight, as when a tuner compiles ahead; results come in the order of the proposals.

    Raises:
        KeyError: the search proposed a variant that nobody recorded.
    """
    flying: deque[Variant] = deque()
    times: list[float] = []
    begun = 0
    while True:
        while len(flying) < window and begun < trials and (variant := search.propose()) is not None:
            flying.append(variant)
            begun += 1
        if not flying:
            return Run(best_us=recorded.best_us, times_us=tuple(times))
        trial = recorded.trials[flying.popleft()]
        search.record(trial)
        times.append(trial.time_us if trial.time_us is not None else math.inf)


def search_of(
    recorded: Recording, sampler: Sampler, *, seed: int, seeds: Iterable[Variant] = (), budget: int = 0
) -> Study:
    """A study of the recorded variants that keeps no journal.

    Args:
        seed: of chance; the same one gives the same search.
        seeds: variants to try first, where they were recorded.
        budget: as in Study, which tries all when there are no more than so many.
    """
    device = device_profiles.named(recorded.header.device)
    study = Study(None, recorded.space, recorded.header.problem, device, seed=seed, budget=budget, sampler=sampler)
    study.enqueue(seeds)
    return study


def of_journal(journal: Path, name: str, *, problem: Problem, device: str, versions: dict[str, str]) -> Recording:
    """What a study of `autoattn tune` tried, as a recording.

    Args:
        journal: `<cache>/<device>/studies/<problem>.journal`.
        name: the study's, of those that the journal holds (ledger.journalled).

    Raises:
        CacheError: the journal cannot be read.
        UsageError: it holds no such study, or no trial of it worked.
    """
    studies = shared_trials.journalled(journal)
    if name not in studies:
        raise UsageError(f"{journal} must hold the study {name!r}, got {', '.join(studies)}; name one of them")
    trials = studies[name]
    measured = any(trial.measurement is not None for trial in trials)
    return search_recording.of_trials(
        trials,
        problem=problem,
        device=device,
        evidence=Evidence.MEASURED if measured else Evidence.PREDICTED,
        versions=versions,
        source=f"the study {name}",
    )
