"""Which variant to try next, and what was tried before: with `tune`, the only door to Optuna."""

from __future__ import annotations

import itertools
import json
import math
import random
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import filelock
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
from autoattn.trial import Trial
from autoattn.variant import Variant

BAD = 1e12  # microseconds that a failed trial is told to have taken: the sampler must learn from failures
STARTUP = 10  # random feasible variants between the seeds and the first that the sampler proposes
ATTEMPTS = 40  # proposals that may be infeasible or known before a random feasible variant takes their place
LOCK_SECONDS = 30.0  # a writer holds the journal for milliseconds; longer means a dead file system

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Sampler(str, Enum):
    """Who proposes variants after the seeds and the first random ones; benchmarks/samplers.py compares them."""

    TPE = "tpe"  # Optuna's Tree-structured Parzen Estimator, parameters together
    TPE_EACH = "tpe, each parameter by itself"
    GENETIC = "genetic"  # Optuna's NSGA-II, with one objective
    NEIGHBOURS = "neighbours"  # one parameter of the best variant changed, then of the next best
    RANDOM = "random"
    ORDER = "in order"  # as the space lists them, from the first on


DEFAULT = Sampler.TPE  # docs/design.md says why
POPULATION = 8  # of the genetic sampler: Optuna's 50 would be chance for as long as a search lasts


class Study:
    """The search of one problem on one device with one template.

    Trials live twice: in memory, where the sampler thinks, and in a journal file that is appended once per finished
    trial. A killed tuner loses the trials in flight and nothing else; the same study reads the journal and goes on.
    Without a journal nothing outlives the process, as simulations want it.

    Raises:
        CacheError: the journal cannot be read or written.
    """

    def __init__(
        self,
        name: str,
        journal: Path | None,
        space: SearchSpace,
        problem: Problem,
        device: Device,
        *,
        seed: int,
        budget: int,
        sampler: Sampler = DEFAULT,
    ) -> None:
        self.space, self.problem, self.device = space, problem, device
        self.trials: dict[Variant, Trial] = {}
        self.refused: dict[str, int] = {}  # why proposals were infeasible, in words -> how often
        self._pending: dict[Variant, optuna.Trial | None] = {}
        self._queue: deque[Variant] = deque()
        self._rng = random.Random(seed)
        self._distributions = {name: CategoricalDistribution(values) for name, values in space.choices.items()}
        self._sampler = sampler
        self._live = optuna.create_study(sampler=_optunas(sampler, seed))
        self._journal = journal
        self._stored = _open(name, journal) if journal is not None else None
        if journal is not None and self._stored is not None:
            for trial in _trials(self._stored, journal, space):
                self._remember(trial)
        self._everything = self._all_if_few(budget)

    @property
    def best_us(self) -> float:
        """The shortest time so far, in microseconds; infinite before there is one."""
        return min((trial.time_us for trial in self.trials.values() if trial.time_us is not None), default=math.inf)

    @property
    def waiting(self) -> bool:
        """Whether variants that were enqueued are still to be tried."""
        return bool(self._queue)

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
        if self._sampler is Sampler.ORDER:
            return self._first_new(self.space.feasible(self.problem, self.device))
        if len(self.trials) + len(self._pending) < STARTUP or self._sampler is Sampler.RANDOM:
            return self._random()
        if self._sampler is Sampler.NEIGHBOURS:
            return self._first_new(self._neighbours()) or self._random()
        return self._sampled() or self._random()

    def record(self, trial: Trial) -> None:
        """Takes what became of a proposed variant, for the sampler and for the journal."""
        asked = self._pending.pop(trial.variant, None)
        if asked is not None:
            self._live.tell(asked, _value(trial))
            self.trials[trial.variant] = trial
        else:
            self._remember(trial)
        if self._journal is None or self._stored is None:
            return
        frozen = self._frozen(trial, {"trial": msgspec.to_builtins(trial)})
        try:
            self._stored.add_trial(frozen)
        except Exception as error:  # whatever Optuna makes of a full disk or of another writer's damage
            raise _refusal(self._journal, error) from None

    def _remember(self, trial: Trial) -> None:
        self.trials[trial.variant] = trial
        self._live.add_trial(self._frozen(trial, {}))

    def _frozen(self, trial: Trial, attributes: dict[str, Any]) -> optuna.trial.FrozenTrial:
        return create_trial(
            params=self.space.params_of(trial.variant),
            distributions=dict(self._distributions),
            value=_value(trial),
            user_attrs=attributes,
        )

    def _sampled(self) -> Variant | None:
        for _ in range(ATTEMPTS):
            asked = self._live.ask(dict(self._distributions))
            variant = self.space.variant(asked.params)
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
        """A feasible variant that was not tried; None when there is none left."""
        lucky = (next(self.space.feasible(self.problem, self.device, self._rng), None) for _ in range(ATTEMPTS))
        # Each of the lucky ones begins at another place; when few variants are left, one walk passes them all.
        walk = itertools.chain(lucky, self.space.feasible(self.problem, self.device, self._rng))
        return self._first_new(variant for variant in walk if variant is not None)

    def _first_new(self, variants: Iterable[Variant]) -> Variant | None:
        for variant in variants:
            if variant not in self.trials and variant not in self._pending:
                self._pending[variant] = None
                return variant
        return None

    def _neighbours(self) -> Iterator[Variant]:
        """Feasible variants that differ from a trial in one parameter: the fastest trial's first, in random order."""
        for trial in sorted(self.trials.values(), key=lambda trial: (_value(trial), trial.variant.digest)):
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
        found: list[Variant] = []
        for variant in self.space.feasible(self.problem, self.device):
            found.append(variant)
            if len(found) > budget:
                return None
        return found


def _optunas(sampler: Sampler, seed: int) -> optuna.samplers.BaseSampler:
    """Optuna's part in a sampler; those that are ours never ask it."""
    if sampler is Sampler.GENETIC:
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=POPULATION)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=sampler is Sampler.TPE, n_startup_trials=0, constant_liar=True
        )


def journalled(journal: Path) -> dict[str, list[Trial]]:
    """The trials of each study that a journal holds, by the study's name.

    Raises:
        CacheError: the journal cannot be read.
    """
    if not journal.is_file():
        raise CacheError(f"a journal must be a file that tune wrote, got {journal}; name another")
    try:
        storage = JournalStorage(JournalFileBackend(str(journal)))
        return {
            study.study_name: [
                msgspec.convert(frozen.user_attrs["trial"], Trial)
                for frozen in storage.get_all_trials(study._study_id, deepcopy=False)
            ]
            for study in storage.get_all_studies()
        }
    except Exception as error:  # as in _open
        raise _refusal(journal, error) from None


def _value(trial: Trial) -> float:
    time_us = trial.time_us
    return time_us if time_us is not None and math.isfinite(time_us) else BAD


def _open(name: str, journal: Path) -> optuna.Study:
    try:
        journal.parent.mkdir(parents=True, exist_ok=True)
        # Optuna's own locks outlive a killed process; this one the kernel takes back.
        lock = filelock.FileLock(f"{journal}.lock", timeout=LOCK_SECONDS)
        with lock:
            _mend(journal)
        storage = JournalStorage(JournalFileBackend(str(journal), lock))
        return optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
    except Exception as error:  # Optuna replays what the file says without looking at it first
        raise _refusal(journal, error) from None


def _mend(journal: Path) -> None:
    """Drops a last line that was not written whole; Optuna would append to it, and read neither."""
    if not journal.exists():
        return
    with journal.open("r+b") as file:
        data = file.read()
        if data and not data.startswith(_FIRST_BYTES[: len(data)]):
            raise ValueError("it does not begin as a journal")
        end = data.rfind(b"\n") + 1
        last = data.rfind(b"\n", 0, max(0, end - 1)) + 1
        try:
            json.loads(data[last:end] or b"{}")
        except ValueError:
            end = last
        if end < len(data):
            file.truncate(end)


_FIRST_BYTES = b'{"op_code":'  # of every journal that Optuna writes


def _trials(stored: optuna.Study, journal: Path, space: SearchSpace) -> list[Trial]:
    try:
        found = [msgspec.convert(frozen.user_attrs["trial"], Trial) for frozen in stored.get_trials(deepcopy=False)]
        for trial in found:
            space.check(trial.variant.as_dict())
    except Exception as error:  # as in _open
        raise _refusal(journal, error) from None
    return found


def _refusal(journal: Path, error: Exception) -> CacheError:
    words = " ".join(str(error).split())[:300]
    if isinstance(error, filelock.Timeout):
        return CacheError(f"the study's journal {journal} must be free, but another process holds it; wait for it")
    if isinstance(error, OSError):
        return CacheError(
            f"the study's journal {journal} must be writable, but {words}; correct that or use --cache DIR"
        )
    kind = type(error).__name__
    return CacheError(f"the study's journal {journal} is damaged ({kind}: {words}); remove it to start anew")
