"""Several templates in one search: which take part, and which proposes the next variant."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from autoattn.codegen import search_space
from autoattn.codegen.search_space import SearchSpace
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome, Trial
from autoattn.core.variant import Variant
from autoattn.cost_model import predictor
from autoattn.errors import SpaceError
from autoattn.search.study import Study

TURNS = 4  # once all seeds are tried, the template that is ahead takes all of so many turns but one


class Contest:
    """The studies of one problem, a template each, that share a budget.

    Their parameters differ, so no sampler could learn from one about another; what they share is which is ahead.
    """

    def __init__(self, studies: Sequence[Study]) -> None:
        self.problem = studies[0].problem
        self._studies = {study.space.template: study for study in studies}
        self._turn = 0
        self._until_working: deque[Variant] = deque()

    @property
    def trials(self) -> dict[Variant, Trial]:
        """What was tried, of all templates."""
        return {variant: trial for study in self._studies.values() for variant, trial in study.trials.items()}

    @property
    def too_slow(self) -> dict[Variant, Trial]:
        """What was left out since arithmetic leaves it slower than a variant that was tried."""
        return {variant: trial for study in self._studies.values() for variant, trial in study.too_slow.items()}

    @property
    def best_us(self) -> float:
        """The shortest time so far, in microseconds; infinite before there is one."""
        return min(study.best_us for study in self._studies.values())

    @property
    def promise(self) -> float:
        """How many times as fast as its study's best one the next variant may be, by arithmetic."""
        return max(study.promise for study in self._studies.values())

    @property
    def waiting(self) -> bool:
        """Whether variants that were enqueued are still to be tried."""
        return any(study.waiting for study in self._studies.values())

    @property
    def taken(self) -> int:
        """How many variants were tried or are being tried, by whomever."""
        return sum(study.taken for study in self._studies.values())

    @property
    def elsewhere(self) -> int:
        """How many variants other processes were trying when they were last heard of."""
        return sum(study.elsewhere for study in self._studies.values())

    def hear(self) -> None:
        """Takes what other processes finished or gave up."""
        for study in self._studies.values():
            study.hear()

    def close(self) -> None:
        """Gives up what was proposed and not recorded, for others to try."""
        for study in self._studies.values():
            study.close()

    def enqueue(self, variants: Iterable[Variant]) -> None:
        """Has these tried first, where their template takes part and they are feasible and new."""
        for variant in variants:
            if variant.template in self._studies:
                self._studies[variant.template].enqueue([variant])

    def enqueue_until_working(self, variants: Iterable[Variant]) -> None:
        """Has the first of these tried, and the next one whenever one does not work."""
        self._until_working = deque(variants)
        self._enqueue_next()

    def offer(self, variants: Iterable[Variant]) -> None:
        """Has arithmetic pick among these and random ones, where their template takes part and they are feasible."""
        for variant in variants:
            if variant.template in self._studies:
                self._studies[variant.template].offer([variant])

    def propose(self, more: Callable[[], bool] = lambda: True) -> Variant | None:
        """The next variant to try; None when every feasible one was tried.

        Args:
            more: whether there is another one to try when another process was faster with one.
        """
        self._turn += 1
        for study in self._by_turn():
            variant = study.propose(more)
            if variant is not None or not more():
                return variant
        return None

    def record(self, trial: Trial) -> None:
        """Takes what became of a variant that was proposed here, or for another problem of the kind."""
        self._studies[trial.variant.template].record(trial)
        if trial.outcome is not Outcome.OK and trial.variant in self._until_working:
            self._enqueue_next()

    def takes(self, variant: Variant) -> bool:
        """Whether a variant is feasible here, and there is no trial of it yet."""
        study = self._studies.get(variant.template)
        return study is not None and study.takes(variant)

    def tries(self, variant: Variant) -> bool:
        """Whether a variant was proposed here, and its trial is awaited."""
        return self._studies[variant.template].tries(variant)

    def fails(self, variant: Variant) -> bool:
        """Whether a variant's template takes no part, or it was tried and does not work."""
        study = self._studies.get(variant.template)
        if study is None:
            return True
        trial = study.trials.get(variant)
        return trial is not None and trial.outcome is not Outcome.OK

    def _enqueue_next(self) -> None:
        """Enqueues the first variant of `enqueue_until_working` that is not known to fail."""
        while self._until_working and self.fails(self._until_working[0]):
            self._until_working.popleft()
        self.enqueue(list(self._until_working)[:1])

    def _by_turn(self) -> list[Study]:
        """Who may propose, most wanted first: in turn while seeds wait, then mostly the one that is ahead."""
        studies = list(self._studies.values())
        first = self._turn % len(studies)
        turns = studies[first:] + studies[:first]
        if self.waiting:
            return sorted(turns, key=lambda study: not study.waiting)
        if self._turn % TURNS == 0:
            return turns
        return sorted(turns, key=lambda study: study.best_us)


def spaces(problem: Problem, device: Device, measured: bool) -> list[SearchSpace]:
    """The spaces that have a variant, none where the card is needed to judge it and is not there.

    The template's default of the first is what a call runs without an entry.
    """
    if not measured and predictor.why_unknown(problem, device) is not None:
        return []
    return [space for space in search_space.of(problem.op) if _why_no_default(space, problem, device) is None]


def _why_no_default(space: SearchSpace, problem: Problem, device: Device) -> str | None:
    try:
        space.default(problem, device)
    except SpaceError as error:
        return str(error)
    return None


def why_no_space(problem: Problem, device: Device) -> str:
    """Why no template has a variant, in words."""
    reasons = [_why_no_default(space, problem, device) for space in search_space.of(problem.op)]
    if None in reasons:
        return f"it must be tuned on the card: {predictor.why_unknown(problem, device)}"
    return "; ".join(reason for reason in reasons if reason is not None)


def digests(spaces: Iterable[SearchSpace]) -> dict[str, str]:
    """Template -> digest of its search space."""
    return {space.template: space.digest for space in spaces}
