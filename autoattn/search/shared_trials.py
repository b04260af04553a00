"""Trials of one study that all processes share: which variants were tried, and who tries which (Optuna's storage)."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from autoattn.codegen.search_space import SearchSpace
from autoattn.core.trial import Outcome, Trial
from autoattn.core.variant import Variant
from autoattn.hardware import host_faults
from autoattn.search import storage
from autoattn.search.storage import Storage

BEAT_SECONDS = 10.0  # between two signs of life for other machines
SILENCE_SECONDS = 60.0  # without one, after which what another machine was trying is free again
_TRIAL, _OWNER = "trial", "owner"  # attributes of Optuna's trials: what became of it, and who tries it


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What happened in a study since it was last asked."""

    finished: list[Trial]  # by others, or before this process began
    freed: list[Variant]  # others gave them up, or died


class Ledger:
    """One study in a storage, which several processes may share.

    A variant is claimed before it is tried: the claim is written first and the others' are read after, so that of two
    processes one sees the other, and the earlier claim holds. It ends with the trial's outcome, when its process
    leaves, and when its process is dead: on the same machine the system says so, on another one its signs of life
    cease. So a killed process costs the trials that it had in flight, and nobody waits for them.

    Raises:
        CacheError: the journal cannot be read or written.
        StorageError: the server cannot.
    """

    def __init__(self, name: str, kept: Storage, space: SearchSpace) -> None:
        self.claimed: dict[Variant, int] = {}  # what others are trying -> Optuna's id of the claim
        self._space, self._refusal = space, kept.refusal
        self._distributions = {name: CategoricalDistribution(values) for name, values in space.choices.items()}
        self.owner = str(Owner.this())  # as its claims name it
        self._mine: dict[Variant, int] = {}  # what this process is trying
        self._settled: set[int] = set()  # ids of trials that change no more
        self._done: set[Variant] = set()  # by others, or before this process began
        self._news = News(finished=[], freed=[])
        self._signs: Mapping[str, Any] = {}  # of life, by owner
        self._listened = -BEAT_SECONDS  # when they were read
        self._heard: dict[str, tuple[object, float]] = {}  # owner -> its latest sign, and when it was new to us
        self.gone = threading.Event()  # once it is set, this process gives no more signs of life
        self._beating: threading.Thread | None = None
        try:
            self._study = optuna.create_study(storage=kept.kept, study_name=name, load_if_exists=True)
            self.storage, self._id = kept.kept, self._study._study_id
        except Exception as error:  # whatever Optuna makes of what the storage says
            raise kept.refusal(error) from None

    def news(self) -> News:
        """What others finished or gave up since the last call."""
        try:
            self._read()
        except Exception as error:
            raise self._refusal(error) from None
        news, self._news = self._news, News(finished=[], freed=[])
        return news

    def claim(self, variant: Variant) -> bool:
        """Announces that this process tries a variant; False when another one is at it, or was."""
        try:
            claim = self.storage.create_new_trial(self._id, self._frozen(variant, {_OWNER: self.owner}))
            self._mine[variant] = claim
            self._read()
            if variant in self._done or self.claimed.get(variant, claim) < claim:
                self._withdraw(variant)
                return False
        except Exception as error:
            raise self._refusal(error) from None
        if self._beating is None:
            self._beating = threading.Thread(target=self._beat, daemon=True)
            self._beating.start()
        return True

    def finish(self, trial: Trial, value: float) -> None:
        """Writes what became of a variant; `value` is what samplers are told.

        Raises:
            ValueError: the machine failed rather than the variant.
        """
        if trial.outcome.of_environment:
            raise ValueError(f"a trial that ended with {trial.outcome.value} says nothing of its variant; give it up")
        outcome = {_TRIAL: msgspec.to_builtins(trial)}
        try:
            claim = self._mine.pop(trial.variant, None)
            if claim is None or not self._close(claim, outcome, value):
                self._settled.add(self.storage.create_new_trial(self._id, self._frozen(trial.variant, outcome, value)))
        except Exception as error:  # a full disk, another writer's damage, a server that went away
            raise self._refusal(error) from None

    def give_up(self, variant: Variant) -> None:
        """Ends the claim of a variant of which nothing was learned."""
        if variant not in self._mine:
            return
        try:
            self._withdraw(variant)
        except Exception as error:
            raise self._refusal(error) from None

    def leave(self) -> None:
        """Gives up what this process claimed; of a storage that fails, others learn it by our silence."""
        self.gone.set()
        with contextlib.suppress(Exception):
            for variant in list(self._mine):
                self._withdraw(variant)

    def _close(self, claim: int, outcome: dict[str, Any], value: float) -> bool:
        """Ends a claim with its outcome; False when another process took this one for dead."""
        self._settled.add(claim)
        try:
            # In this order: what has an outcome is finished, whatever its state says when this process is killed.
            self.storage.set_trial_user_attr(claim, _TRIAL, outcome[_TRIAL])
            self.storage.set_trial_state_values(claim, TrialState.COMPLETE, [value])
        except UpdateFinishedTrialError:
            return False
        return True

    def _withdraw(self, variant: Variant) -> None:
        self._end(self._mine.pop(variant))

    def _end(self, claim: int) -> None:
        with contextlib.suppress(UpdateFinishedTrialError):  # another process was faster
            self.storage.set_trial_state_values(claim, TrialState.FAIL)

    def _frozen(self, variant: Variant, attributes: dict[str, Any], value: float | None = None) -> FrozenTrial:
        return create_trial(
            state=TrialState.RUNNING if value is None else TrialState.COMPLETE,
            value=value,
            params=self._space.params_of(variant),
            distributions=dict(self._distributions),
            user_attrs=attributes,
        )

    def _read(self) -> None:
        """Brings what is known of others up to date."""
        claims: dict[Variant, int] = {}
        mine = set(self._mine.values())
        for frozen in self._study.get_trials(deepcopy=False):
            number = frozen._trial_id
            if number in self._settled or number in mine:
                continue
            if _TRIAL in frozen.user_attrs or frozen.state is TrialState.COMPLETE:
                trial = _trial(frozen, self._space)
                self._settled.add(number)
                if _says_nothing(trial):
                    continue
                self._news.finished.append(trial)
                self._done.add(trial.variant)
            elif frozen.state is not TrialState.RUNNING:
                self._settled.add(number)
            elif self._dead(frozen.user_attrs[_OWNER]):
                self._end(number)
            else:
                claims.setdefault(self._space.variant(frozen.params), number)
        self._news.freed.extend(
            variant for variant in self.claimed if variant not in claims and variant not in self._done
        )
        self.claimed = claims

    def _dead(self, text: str) -> bool:
        owner, here = Owner.parse(text), Owner.parse(self.owner)
        if owner.machine == here.machine:
            return not owner.runs
        now = time.monotonic()
        if now - self._listened >= BEAT_SECONDS / 2:
            self._signs, self._listened = self.storage.get_study_user_attrs(self._id), now
        sign = self._signs.get(_alive(text))
        latest, since = self._heard.get(text, (None, -1.0))
        if since < 0 or sign != latest:
            self._heard[text] = (sign, now)
            return False
        return now - since > SILENCE_SECONDS

    def _beat(self) -> None:
        """Gives signs of life; clocks of two machines differ, so they only count."""
        count = 0
        while not self.gone.wait(BEAT_SECONDS):
            count += 1
            with contextlib.suppress(Exception):  # the search itself will tell
                self.storage.set_study_user_attr(self._id, _alive(self.owner), count)
        self.storage.remove_session()  # a database session is a thread's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that claims variants, for others to find out whether it lives."""

    machine: str  # its boot and its process numbers: containers on one machine have their own
    process: int
    begun: str  # in the system's ticks, since process numbers come again
    unique: str  # a process may hold a study twice

    @classmethod
    def this(cls) -> Owner:
        """The process that asks."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot},{os.readlink('/proc/self/ns/pid')}"
        except OSError:  # then nobody but its signs of life tells of this process
            machine = uuid.uuid4().hex
        return cls(machine=machine, process=os.getpid(), begun=_begun(os.getpid()) or "", unique=uuid.uuid4().hex[:8])

    @classmethod
    def parse(cls, text: str) -> Owner:
        """The owner whose text this is."""
        machine, process, begun, unique = text.split(" ")
        return cls(machine=machine, process=int(process), begun=begun, unique=unique)

    def __str__(self) -> str:
        return f"{self.machine} {self.process} {self.begun} {self.unique}"

    @property
    def runs(self) -> bool:
        """Whether it runs, seen from the same machine."""
        return _begun(self.process) == self.begun


def _begun(process: int) -> str | None:
    """When a process began, in ticks of the system; None when there is none, or only what is left of one."""
    try:
        facts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if facts[0] in "ZX" else facts[19]  # proc(5): state is field 3, starttime field 22


def _alive(owner: str) -> str:
    return f"alive {owner}"


def _trial(frozen: FrozenTrial, space: SearchSpace | None = None) -> Trial:
    """What was written of a finished trial."""
    trial = msgspec.convert(frozen.user_attrs[_TRIAL], Trial)
    if space is not None:
        space.check(trial.variant.as_dict())
    return trial


def _says_nothing(trial: Trial) -> bool:
    """Whether a trial failed of the machine; autoattn 0.1 wrote such failures as if the variant were to blame."""
    blamed = trial.outcome in (Outcome.LAUNCH_ERROR, Outcome.COMPILE_ERROR)
    return trial.outcome.of_environment or (blamed and host_faults.tells_of_environment(trial.detail))


def studies(kept: Storage) -> dict[str, list[Trial]]:
    """The finished trials of each study in a storage, by the study's name.

    Raises:
        CacheError: the journal cannot be read.
        StorageError: the server cannot.
    """
    return {name: [trial for _, trial in trials] for name, trials in _dated(kept).items()}


def _dated(kept: Storage) -> dict[str, list[tuple[datetime, Trial]]]:
    try:
        return {
            study.study_name: [
                (frozen.datetime_complete or frozen.datetime_start or datetime.fromtimestamp(0), _trial(frozen))
                for frozen in kept.kept.get_all_trials(study._study_id, deepcopy=False)
                if _TRIAL in frozen.user_attrs or frozen.state is TrialState.COMPLETE
            ]
            for study in kept.kept.get_all_studies()
        }
    except Exception as error:  # Optuna replays what a file says without looking at it first
        raise kept.refusal(error) from None


def journalled(journal: Path) -> dict[str, list[Trial]]:
    """The finished trials of each study that a journal holds, by the study's name.

    Raises:
        CacheError: the journal cannot be read.
    """
    return studies(storage.unchanged(journal))


def dated(journal: Path) -> dict[str, list[tuple[datetime, Trial]]]:
    """The same, each trial with the moment when it ended.

    Raises:
        CacheError: the journal cannot be read.
    """
    return _dated(storage.unchanged(journal))
