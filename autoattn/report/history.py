"""Reads a search's journals: its trials in order, their outcomes, and which parameters mattered."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autoattn.core.cache_entry import CacheEntry
from autoattn.core.trial import Evidence, Outcome, Trial
from autoattn.errors import CacheError
from autoattn.search import importance, shared_trials

MOST_REASONS = 12  # that a report lists


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The trials of one problem's search."""

    trials: tuple[Trial, ...] = ()  # in the order in which they were recorded, of all templates
    missing: str = ""  # why there are none, in words

    @property
    def improvements(self) -> list[tuple[int, Trial]]:
        """Each trial that was faster than all before it, with its number from 1 on."""
        improved: list[tuple[int, Trial]] = []
        for number, trial in enumerate(self.trials, start=1):
            best = improved[-1][1].time_us if improved else None
            if trial.time_us is not None and (best is None or trial.time_us < best):
                improved.append((number, trial))
        return improved


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why trials of one outcome ended so."""

    outcome: str
    count: int
    detail: str  # of the first of them
    example: str  # its parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """How much each parameter of a template told, over all problems of a section."""

    template: str
    shares: dict[str, float]  # parameter -> share of 1, largest first; empty when there were too few trials
    trials: int


def path_of(folder: Path, device: str, entry: CacheEntry) -> Path:
    """Where `autoattn tune` keeps the journal of an entry's search."""
    return folder / device / "studies" / f"{entry.problem.key}.journal"


def read(folder: Path | None, device: str, entry: CacheEntry) -> History:
    """The search that gave an entry; where its journal is missing, the reason why."""
    if folder is None:
        return History(missing="the report was made from entries alone")
    path = path_of(folder, device, entry)
    if not path.is_file():
        return History(
            missing=f"there is no journal studies/{path.name} beside the cache file: it stays on the machine that tuned"
        )
    try:
        studies = shared_trials.dated(path)
    except CacheError as error:
        return History(missing=str(error).replace(str(path), f"studies/{path.name}"))
    wanted = [trials for name, trials in studies.items() if belongs(name, entry)]
    if not any(trial.digest == entry.source_digest for trials in wanted for _, trial in trials):
        return History(missing="the journal holds another search than the one that gave this entry")
    dated = sorted((pair for trials in wanted for pair in trials), key=lambda pair: pair[0].timestamp())
    return History(trials=tuple(trial for _, trial in dated))


def belongs(name: str, entry: CacheEntry) -> bool:
    """Whether a study, by its name, searched for this entry: template, evidence and search space agree."""
    words = name.split(" ")
    template, kind = words[0], Evidence.MEASURED if "measured" in words else Evidence.PREDICTED
    digest = entry.search.spaces.get(template, entry.space_digest if template == entry.template else "")
    return kind is entry.evidence and bool(digest) and digest in words


def reasons(histories: Iterable[History]) -> list[Reason]:
    """Why trials failed, the most frequent first; details that differ only in their numbers count as one."""
    counted: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], Trial] = {}
    for history in histories:
        for trial in history.trials:
            if trial.outcome is not Outcome.OK:
                kind = trial.outcome.value, re.sub(r"\d[\d,.]*", "#", trial.detail)
                counted[kind] += 1
                first.setdefault(kind, trial)
    return [
        Reason(outcome=kind[0], count=count, detail=first[kind].detail, example=str(first[kind].variant))
        for kind, count in counted.most_common(MOST_REASONS)
    ]


def importances(histories: Iterable[History]) -> list[Importance]:
    """Of each template, over all histories."""
    by_template: dict[str, list[list[Trial]]] = {}
    for history in histories:
        for template in {trial.variant.template: None for trial in history.trials}:
            trials = [trial for trial in history.trials if trial.variant.template == template]
            by_template.setdefault(template, []).append(trials)
    rankings = []
    for template, studies in sorted(by_template.items()):
        shares, count = importance.of(studies)
        rankings.append(Importance(template=template, shares=shares, trials=count))
    return rankings
