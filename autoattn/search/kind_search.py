"""One search for problems whose kernels are the same texts: what is compiled for one of them is predicted for all.

Without the card a kernel's machine code depends on the kind of problem alone, and its time for other sizes is
arithmetic on the same report. On the card each problem is searched by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from autoattn.core import kernel_kind
from autoattn.core.problem import DType, Problem
from autoattn.core.trial import Trial
from autoattn.core.variant import Variant
from autoattn.search.multi_template import Contest

Carry = Callable[[Problem, Trial], Trial]  # what a trial of a kernel says of another problem of its kind


class Proposer(Protocol):
    """Who proposes variants of a problem and hears what became of them, as a contest does."""

    @property
    def problem(self) -> Problem:
        """That the latest proposal is for."""

    @property
    def trials(self) -> dict[Variant, Trial]:
        """The trials of the problem."""

    @property
    def waiting(self) -> bool:
        """Whether variants that were enqueued are still to be tried."""

    def propose(self, more: Callable[[], bool] = ...) -> Variant | None:
        """The next variant to try; None when there is none."""

    def record(self, trial: Trial) -> None:
        """Takes what became of a proposed variant."""


class KindSearch:
    """The contests of some problems of one kind, which take turns at proposing.

    Each proposes by its own sizes; every kernel becomes a trial of all of them. So each problem is ranked over all
    kernels of the kind, whoever of them proposed a kernel.
    """

    def __init__(self, contests: Sequence[Contest], carry: Carry, *, budget: int, seeds_only: bool) -> None:
        """Takes each problem's contest, and the distinct variants that each may propose."""
        self.contests = {contest.problem: contest for contest in contests}
        self._latest = contests[0].problem
        self.recorded = contests[0].problem  # that the latest trial was proposed for
        self.gain = 1.0  # how many times faster the latest trial made the best one of some problem
        self.ended = False  # whether nothing was left to propose when it was last asked for
        self._carry, self._budget, self._seeds_only = carry, budget, seeds_only
        self._turns = list(self.contests)  # whoever proposed longest ago is first
        self._in_flight: dict[Variant, Problem] = {}
        self._draws: Counter[Problem] = Counter()  # proposals of each problem beside the seeds
        self._carried: Counter[Problem] = Counter()  # trials of a problem that another one proposed

    @property
    def problem(self) -> Problem:
        """That the latest proposal is for."""
        return self._latest

    @property
    def trials(self) -> dict[Variant, Trial]:
        """The trials of that problem."""
        return self.contests[self._latest].trials

    @property
    def waiting(self) -> bool:
        """Whether variants that were enqueued are still to be tried."""
        return any(contest.waiting for contest in self.contests.values())

    @property
    def elsewhere(self) -> int:
        """How many variants other processes were trying when they were last heard of."""
        return sum(contest.elsewhere for contest in self.contests.values())

    def hear(self) -> None:
        """Takes what other processes finished or gave up."""
        for contest in self.contests.values():
            contest.hear()

    def more(self) -> bool:
        """Whether a problem may try another variant."""
        return any(self._open(contest) for contest in self.contests.values())

    def propose(self, more: Callable[[], bool] = lambda: True) -> Variant | None:
        """The next variant to try, for the problem whose turn it is; None when every feasible one was tried.

        Args:
            more: whether there is another one to try when another process was faster with one.
        """
        drawn = not self.waiting
        for problem in self._by_promise() if drawn else self._by_seeds():
            variant = self._proposed(self.contests[problem], more)
            if variant is not None:
                self._latest = problem
                self._draws[problem] += drawn
                self._in_flight[variant] = problem
                self._turns.remove(problem)
                self._turns.append(problem)
                return variant
            if not more():
                break
        self.ended = True
        return None

    def record(self, trial: Trial) -> None:
        """Takes what became of a proposed variant, for each problem that it is feasible for."""
        before = {problem: contest.best_us for problem, contest in self.contests.items()}
        self.recorded = self._in_flight.pop(trial.variant)
        self.contests[self.recorded].record(trial)
        for problem, contest in self.contests.items():
            if problem is self.recorded or not contest.takes(trial.variant):
                continue
            self._carried[problem] += not contest.tries(trial.variant)
            contest.record(self._carry(problem, trial))
        gains = [old / self.contests[problem].best_us for problem, old in before.items() if math.isfinite(old)]
        self.gain = max(gains, default=1.0)

    def _by_seeds(self) -> list[Problem]:
        """The problems, those first for which seeds wait, and of these whoever proposed longest ago."""
        return sorted(self._turns, key=lambda problem: not self.contests[problem].waiting)

    def _by_promise(self) -> list[Problem]:
        """The problems, those first that may gain most; each turn since the seeds makes a gain less likely."""
        if len(self._turns) == 1:
            return list(self._turns)
        gains = {
            problem: math.log(max(1.0, contest.promise)) / (1 + self._draws[problem])
            for problem, contest in self.contests.items()
        }
        return sorted(self._turns, key=lambda problem: -gains[problem])

    def _proposed(self, contest: Contest, more: Callable[[], bool]) -> Variant | None:
        """What a contest proposes that is not on its way for another problem."""
        if self._open(contest):
            contest.hear()  # what others began since counts too, or each tuner would try one variant too many
        while self._open(contest):
            variant = contest.propose(more)
            if variant not in self._in_flight:
                return variant
        return None

    def _open(self, contest: Contest) -> bool:
        """Whether a contest may propose another variant."""
        return (contest.waiting or not self._seeds_only) and self._taken(contest) < self._budget

    def _taken(self, contest: Contest) -> int:
        return contest.taken - self._carried[contest.problem]


def kinds_of(problems: Sequence[Problem]) -> list[list[int]]:
    """The numbers of problems that share kernels, together; kinds that compile fastest first, as they come else."""
    kinds: dict[kernel_kind.KernelKind, list[int]] = {}
    for number, problem in enumerate(problems):
        kinds.setdefault(kernel_kind.of(problem), []).append(number)
    return sorted(kinds.values(), key=lambda numbers: cost_of(problems[numbers[0]]))


def cost_of(problem: Problem) -> float:
    """About how long a kernel takes to compile, compared with those of other kinds; no unit.

    Of 32 kernels for sm_80 each, on two cores: head dim 16 took 16 s in bfloat16 and 21 to 33 s in float32, 32 took 19
    and 30 to 49 s, 64 took 37 and 33 to 54 s, and 128 took 62 to 103 s
    (benchmarks/results/2026-11-24_a30_predicted.md).
    """
    width = max(problem.head_dim_padded, problem.head_dim_v_padded)
    return (32 + width) * (1.5 if problem.dtype is DType.FLOAT32 else 1.0)
