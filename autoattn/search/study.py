"""Proposes the next variant; the only module that uses Optuna's samplers."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial

from autoattn.codegen.search_space import SearchSpace
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome, Trial
from autoattn.core.variant import Variant
from autoattn.search.shared_trials import Ledger

BAD = 1e12  # microseconds that a failed trial is told to have taken: the sampler must learn from failures
STARTUP = 10  # random feasible variants between the seeds and the first that the sampler proposes
DRAWS = 64  # random variants of which those that are expected to be fastest are tried
TOO_SLOW = "by arithmetic it takes longer than a variant that was tried"
ATTEMPTS = 40  # proposals that may be infeasible or known before a random feasible variant takes their place


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What is known of a feasible variant's time before anything is compiled, in microseconds."""

    least_us: Callable[[Variant], float]  # less what the model errs by
    expected_us: Callable[[Variant], float]  # infinite where it cannot be the fastest


optuna.logging.set_verbosity(optuna.logging.WARNING)


class Sampler(str, Enum):
    """Who proposes variants after the seeds and the first random ones; benchmarks/samplers.py compares them."""

    TPE = "tpe"  # Optuna's Tree-structured Parzen Estimator, parameters together
    TPE_EACH = "tpe, each parameter by itself"
    GENETIC = "genetic"  # Optuna's NSGA-II, with one objective
    NEIGHBOURS = "neighbours"  # one parameter of the best variant changed, then of the next best
    RANDOM = "random"
    ORDER = "in order"  # as the space lists them, from the first on


DEFAULT = Sampler.TPE  # docs/decisions/sampler.md says why
POPULATION = 8  # of the genetic sampler: Optuna's 50 would be chance for as long as a search lasts


class Study:
    """The search of one problem on one device with one template.

    Trials live twice: in memory, where the sampler thinks, and in a ledger that other processes share. What they tried
    or are trying is not proposed, and the sampler learns from their results. A killed tuner loses the trials in flight
    and nothing else; the same study reads the ledger and goes on. Without a ledger nothing outlives the process, as
    simulations want it.

    Raises:
        CacheError: the ledger's journal cannot be read or written.
        StorageError: the ledger's server cannot.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        space: SearchSpace,
        problem: Problem,
        device: Device,
        *,
        seed: int,
        budget: int,
        sampler: Sampler = DEFAULT,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        """Takes what arithmetic says of times, where the search is to ask it.

        Then variants that could not be the fastest are left out, and of those that were offered and of random ones come
        first which are expected to be fastest: no sampler learns as much from few trials.
        """
        self.space, self.problem, self.device = space, problem, device
        self.trials: dict[Variant, Trial] = {}
        self.too_slow: dict[Variant, Trial] = {}  # what was left out, in no ledger: arithmetic says it again
        self._arithmetic = arithmetic
        self._offered: list[Variant] = []
        self._drawn: list[Variant] = []  # at random
        self.refused: dict[str, int] = {}  # why proposals were infeasible, in words -> how often
        self._pending: dict[Variant, optuna.Trial | None] = {}
        self._queue: deque[Variant] = deque()
        self._rng = random.Random(seed)
        self._distributions = {name: CategoricalDistribution(values) for name, values in space.choices.items()}
        self._sampler = sampler
        self.optuna_study = optuna.create_study(sampler=_optunas(sampler, seed, self._distributions))
        self.ledger = ledger
        self.hear()
        self._everything = self._all_if_few(budget)

    @property
    def best_us(self) -> float:
        """The shortest time so far, in microseconds; infinite before there is one."""
        return min((trial.time_us for trial in self.trials.values() if trial.time_us is not None), default=math.inf)

    @property
    def promise(self) -> float:
        """How many times as fast as the best one the next variant may be, once all that was enqueued is tried.

        By arithmetic; 0 where there is none, or nothing bounds its time.
        """
        if self._arithmetic is None or self._everything is not None or (favoured := self._favoured()) is None:
            return 0.0
        least = self._arithmetic.least_us(favoured)
        return self.best_us / least if least > 0 else 0.0

    @property
    def waiting(self) -> bool:
        """Whether variants that were enqueued are still to be tried."""
        return bool(self._queue)

    @property
    def elsewhere(self) -> int:
        """How many variants other processes are trying."""
        return len(self._claimed.keys() - self._pending.keys())

    @property
    def taken(self) -> int:
        """How many variants were tried or are being tried, by whomever."""
        return len(self.trials) + len(self._pending) + self.elsewhere

    def enqueue(self, variants: Iterable[Variant]) -> None:
        """Has these tried first, where they are feasible and new."""
        for variant in variants:
            known = variant in self.trials or variant in self._queue
            if not known and self.space.why_infeasible(variant, self.problem, self.device) is None:
                self._queue.append(variant)

    def offer(self, variants: Iterable[Variant]) -> None:
        """Has these compared with random ones, where they are feasible; arithmetic picks what is tried."""
        self._offered += [
            variant for variant in variants if self.space.why_infeasible(variant, self.problem, self.device) is None
        ]

    def takes(self, variant: Variant) -> bool:
        """Whether a variant is feasible here, and there is no trial of it yet."""
        return variant not in self.trials and self.space.why_infeasible(variant, self.problem, self.device) is None

    def tries(self, variant: Variant) -> bool:
        """Whether a variant was proposed here, and its trial is awaited."""
        return variant in self._pending

    def propose(self, more: Callable[[], bool] = lambda: True) -> Variant | None:
        """The next variant to try; None when every feasible one was tried or is being tried.

        What other processes finished or gave up counts as far as it was heard of (`hear`).

        Args:
            more: whether there is another one to try when another process was faster with this one.
        """
        while True:
            variant = self._next()
            if variant is None or self.ledger is None or self.ledger.claim(variant):
                return variant
            proposal = self._pending.pop(variant)  # another process was faster
            if proposal is not None:
                self.optuna_study.tell(proposal, state=TrialState.FAIL)
            self.hear()
            if not more():
                return None

    def record(self, trial: Trial) -> None:
        """Takes what became of a proposed variant, for the sampler and for the ledger.

        What the machine is to blame for is not written: another run, or another process, tries the variant anew.
        """
        self.too_slow.pop(trial.variant, None)
        proposal = self._pending.pop(trial.variant, None)
        if proposal is not None:
            self.optuna_study.tell(proposal, value_of(trial))
            self.trials[trial.variant] = trial
        else:
            self._remember(trial)
        if self.ledger is None:
            return
        if trial.outcome.of_environment:
            self.ledger.give_up(trial.variant)
        else:
            self.ledger.finish(trial, value_of(trial))

    def hear(self) -> None:
        """Takes what other processes finished; what they gave up is tried next."""
        if self.ledger is None:
            return
        news = self.ledger.news()
        for trial in news.finished:
            if trial.variant not in self.trials:
                self._remember(trial)
        self._queue.extend(news.freed)

    def close(self) -> None:
        """Gives up what was proposed and not recorded, for others to try."""
        if self.ledger is not None:
            self.ledger.leave()

    @property
    def _claimed(self) -> dict[Variant, int]:
        return self.ledger.claimed if self.ledger is not None else {}

    def _new(self, variant: Variant) -> bool:
        """Whether nobody tried or tries a variant, and it may be the fastest."""
        tried = variant in self.trials or variant in self._pending or variant in self._claimed
        return not tried and not self._is_too_slow(variant)

    def _is_too_slow(self, variant: Variant) -> bool:
        """Whether arithmetic says that a variant takes longer than the best one that was tried."""
        if self._arithmetic is None or math.isinf(self.best_us):
            return False
        if self._arithmetic.least_us(variant) <= self.best_us and math.isfinite(self._arithmetic.expected_us(variant)):
            return False
        self.too_slow.setdefault(variant, Trial(variant=variant, outcome=Outcome.TOO_SLOW, detail=TOO_SLOW))
        return True

    def _next(self) -> Variant | None:
        if self._everything is not None:
            self._queue.extend(self._everything)
            self._everything = []
        while self._queue:
            variant = self._queue.popleft()
            if self._new(variant):
                self._pending[variant] = None
                return variant
        if self._everything is not None:
            return None
        if self._sampler is Sampler.ORDER:
            return self._first_new(self.space.feasible(self.problem, self.device))
        if self._arithmetic is not None:
            return self._first_new(variant for variant in [self._favoured()] if variant is not None)
        if self.taken < STARTUP or self._sampler is Sampler.RANDOM:
            return self._random()
        if self._sampler is Sampler.NEIGHBOURS:
            return self._first_new(self._neighbours()) or self._random()
        return self._sampled() or self._random()

    def _remember(self, trial: Trial) -> None:
        self.trials[trial.variant] = trial
        self.optuna_study.add_trial(
            create_trial(
                params=self.space.params_of(trial.variant),
                distributions=dict(self._distributions),
                value=value_of(trial),
            )
        )

    def _sampled(self) -> Variant | None:
        for _ in range(ATTEMPTS):
            proposal = self.optuna_study.ask(dict(self._distributions))
            variant = self.space.variant(proposal.params)
            if variant in self._pending or variant in self._claimed:
                self.optuna_study.tell(proposal, state=TrialState.FAIL)
                continue
            if variant in self.trials:
                self.optuna_study.tell(proposal, value_of(self.trials[variant]))
                continue
            reason = self.space.why_infeasible(variant, self.problem, self.device)
            if reason is not None:
                self.refused[reason] = self.refused.get(reason, 0) + 1
                self.optuna_study.tell(proposal, BAD)
                continue
            self._pending[variant] = proposal
            return variant
        return None

    def _random(self) -> Variant | None:
        """A feasible variant that was not tried; None when there is none left."""
        lucky = (next(self.space.feasible(self.problem, self.device, self._rng), None) for _ in range(ATTEMPTS))
        # Each of the lucky ones begins at another place; when few variants are left, one walk passes them all.
        walk = itertools.chain(lucky, self.space.feasible(self.problem, self.device, self._rng))
        return self._first_new(variant for variant in walk if variant is not None)

    def _favoured(self) -> Variant | None:
        """Of what was offered and of random variants the new one that is expected to be fastest; None if there is none.

        What was offered goes first where arithmetic sees no difference.
        """
        assert self._arithmetic is not None
        self._offered = [variant for variant in self._offered if self._new(variant)]
        self._drawn = [variant for variant in self._drawn if self._new(variant)]
        if not self._drawn:
            draws = (next(self.space.feasible(self.problem, self.device, self._rng), None) for _ in range(DRAWS))
            self._drawn = [variant for variant in dict.fromkeys(draws) if variant is not None and self._new(variant)]
        return min([*self._offered, *self._drawn], key=self._arithmetic.expected_us, default=None)

    def _first_new(self, variants: Iterable[Variant]) -> Variant | None:
        for variant in variants:
            if self._new(variant):
                self._pending[variant] = None
                return variant
        return None

    def _neighbours(self) -> Iterator[Variant]:
        """Feasible variants that differ from a trial in one parameter: the fastest trial's first, in random order."""
        for trial in sorted(self.trials.values(), key=lambda trial: (value_of(trial), trial.variant.digest)):
            params = self.space.params_of(trial.variant)
            near = [
                self.space.variant({**params, name: value})
                for name, values in self.space.choices.items()
                for value in values
                if value != params[name]
            ]
            self._rng.shuffle(near)
            for variant in near:
                if self.space.why_infeasible(variant, self.problem, self.device) is None:
                    yield variant

    def _all_if_few(self, budget: int) -> list[Variant] | None:
        """Every feasible variant when there are no more than may be tried; else None."""
        variants: list[Variant] = []
        for variant in self.space.feasible(self.problem, self.device):
            variants.append(variant)
            if len(variants) > budget:
                return None
        return variants


class _WholeSpaceTpe(optuna.samplers.TPESampler):
    """TPE over parameters that every trial has.

    Optuna's own reads at each proposal which parameters its trials have in common: half of a proposal's time.
    """

    def __init__(self, distributions: Mapping[str, CategoricalDistribution], seed: int) -> None:
        super().__init__(seed=seed, multivariate=True, n_startup_trials=0, constant_liar=True)
        # In the order of names, as Optuna has them.
        self._parameters = {name: choice for name, choice in sorted(distributions.items()) if not choice.single()}

    def infer_relative_search_space(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial
    ) -> dict[str, optuna.distributions.BaseDistribution]:
        """All parameters that have a choice."""
        return dict(self._parameters)


def _optunas(
    sampler: Sampler, seed: int, distributions: Mapping[str, CategoricalDistribution]
) -> optuna.samplers.BaseSampler:
    """Optuna's part in a sampler; those that are ours never ask it."""
    if sampler is Sampler.GENETIC:
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=POPULATION)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if sampler is Sampler.TPE:
            return _WholeSpaceTpe(distributions, seed)
        return optuna.samplers.TPESampler(seed=seed, multivariate=False, n_startup_trials=0, constant_liar=True)


def value_of(trial: Trial) -> float:
    """What samplers are told of a trial: its time in microseconds, or BAD."""
    time_us = trial.time_us
    return time_us if time_us is not None and math.isfinite(time_us) else BAD
