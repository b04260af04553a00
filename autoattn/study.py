"""Which variant to try next, and what was tried before: with `tune`, the only door to Optuna."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState, create_trial

from autoattn.device import Device
from autoattn.errors import CacheError
from autoattn.problem import Problem
from autoattn.space import SearchSpace
from autoattn.trial import Outcome, Trial
from autoattn.variant import Variant

BAD = 1e12  # microseconds that a failed trial is told to have taken: the sampler must learn from failures
STARTUP = 10  # random feasible variants between the seeds and the first that the sampler proposes
ATTEMPTS = 40  # proposals that may be infeasible or known before a random feasible variant takes their place

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Study:
    """The search of one problem on one device with one template.

    Trials live twice: in memory, where the sampler thinks, and in a journal file that is appended once per finished
    trial. A killed tuner loses the trials in flight and nothing else; the same study reads the journal and goes on.

    Raises:
        CacheError: the journal cannot be read or written.
    """

    def __init__(
        self, name: str, journal: Path, space: SearchSpace, problem: Problem, device: Device, *, seed: int, budget: int
    ) -> None:
        self.space, self.problem, self.device = space, problem, device
        self.trials: dict[Variant, Trial] = {}
        self.refused: dict[str, int] = {}  # why proposals were infeasible, in words -> how often
        self._pending: dict[Variant, optuna.Trial | None] = {}
        self._queue: deque[Variant] = deque()
        self._rng = random.Random(seed)
        self._distributions = {name: CategoricalDistribution(values) for name, values in space.choices.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=0, constant_liar=True)
        self._live = optuna.create_study(sampler=sampler)
        self._stored = _open(name, journal)
        for frozen in self._stored.get_trials(deepcopy=False):
            self._remember(msgspec.convert(frozen.user_attrs["trial"], Trial))
        self._everything = self._all_if_few(budget)

    def enqueue(self, variants: Iterable[Variant]) -> None:
        """Has these tried first, where they are feasible and new."""
        for variant in variants:
            known = variant in self.trials or variant in self._queue
            if not known and self.space.why_infeasible(variant, self.problem, self.device) is None:
                self._queue.append(variant)

    def propose(self) -> Variant | None:
        """The next variant to try; None when every feasible one was tried."""
        if self._everything is not None:
            self._queue.extend(self._everything)
            self._everything = []
        while self._queue:
            variant = self._queue.popleft()
            if variant not in self.trials and variant not in self._pending:
                self._pending[variant] = None
                return variant
        if self._everything is not None:
            return None
        if len(self.trials) + len(self._pending) < STARTUP:
            return self._random()
        return self._sampled() or self._random()

    def record(self, trial: Trial) -> None:
        """Takes what became of a proposed variant, for the sampler and for the journal."""
        asked = self._pending.pop(trial.variant, None)
        if asked is not None:
            self._live.tell(asked, _value(trial))
            self.trials[trial.variant] = trial
        else:
            self._remember(trial)
        frozen = self._frozen(trial, {"trial": msgspec.to_builtins(trial)})
        try:
            self._stored.add_trial(frozen)
        except OSError as error:
            raise CacheError(
                f"the study's journal must be writable, but {error}; free the disk or use --cache"
            ) from None

    def _remember(self, trial: Trial) -> None:
        self.trials[trial.variant] = trial
        self._live.add_trial(self._frozen(trial, {}))

    def _frozen(self, trial: Trial, attributes: dict[str, Any]) -> optuna.trial.FrozenTrial:
        return create_trial(
            params=trial.variant.as_dict(),
            distributions=dict(self._distributions),
            value=_value(trial),
            user_attrs=attributes,
        )

    def _sampled(self) -> Variant | None:
        for _ in range(ATTEMPTS):
            asked = self._live.ask(dict(self._distributions))
            variant = Variant.of(self.space.template, asked.params)
            if variant in self._pending:
                self._live.tell(asked, state=TrialState.FAIL)
                continue
            if variant in self.trials:
                self._live.tell(asked, _value(self.trials[variant]))
                continue
            reason = self.space.why_infeasible(variant, self.problem, self.device)
            if reason is not None:
                self.refused[reason] = self.refused.get(reason, 0) + 1
                self._live.tell(asked, BAD)
                continue
            self._pending[variant] = asked
            return variant
        return None

    def _random(self) -> Variant | None:
        for _ in range(ATTEMPTS):
            variant = next(self.space.feasible(self.problem, self.device, self._rng), None)
            if variant is not None and variant not in self.trials and variant not in self._pending:
                self._pending[variant] = None
                return variant
        return None

    def _all_if_few(self, budget: int) -> list[Variant] | None:
        """Every feasible variant when there are no more than may be tried; else None."""
        found: list[Variant] = []
        for variant in self.space.feasible(self.problem, self.device):
            found.append(variant)
            if len(found) > budget:
                return None
        return found


def _value(trial: Trial) -> float:
    time_us = trial.time_us
    return BAD if trial.outcome is not Outcome.OK or time_us is None else time_us


def _open(name: str, journal: Path) -> optuna.Study:
    try:
        journal.parent.mkdir(parents=True, exist_ok=True)
        storage = JournalStorage(JournalFileBackend(str(journal)))
        return optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
    except OSError as error:
        raise CacheError(f"the study's journal {journal} must be writable, but {error}; use --cache DIR") from None
    except (ValueError, KeyError, RuntimeError) as error:
        raise CacheError(f"the study's journal {journal} is damaged ({error}); remove it to start anew") from None
