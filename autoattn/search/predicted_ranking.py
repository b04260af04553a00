"""Ranks the trials of a search without the card: by the model, among those whose numbers stand on a check.

The check is the gate's verdict on a card of the architecture, where that judged the same text; else a rehearsal in an
interpreter. Where the interpreter itself fails, nobody knows whether the numbers are right, and the entry says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from autoattn.codegen import search_space
from autoattn.core.cache_entry import NOT_REHEARSED
from autoattn.core.problem import DType
from autoattn.core.trial import Outcome, Trial, Verdict
from autoattn.core.variant import Variant
from autoattn.cost_model import accuracy
from autoattn.search.rehearsal import outcome_of, reason_of
from autoattn.workers.worker_pool import Failure

CANDIDATES = 5  # runners-up that an entry keeps
# A variant that did well on another card for the same kind of problem is believed to be this much faster than the model
# says: the model is off by as much for a single variant (docs/model.md), and good tiles travel.
ELSEWHERE = 0.9
REHEARSED = "rehearsed in an interpreter"

Rehearse = Callable[[Sequence[Variant]], Sequence[Verdict | Failure]]
Known = Callable[[Variant], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The trials that may win, best first."""

    trials: tuple[Trial, ...]
    checks: Mapping[Variant, str]  # what the numbers of each stand on, in words
    rejected: Mapping[Variant, tuple[Outcome, str]] = field(default_factory=dict)  # what did not pass one, and why


def rank(
    working: Sequence[Trial],
    *,
    arch: int,
    dtype: DType,
    default: Variant,
    default_is_measured: bool,
    elsewhere: Set[Variant],
    verified: Mapping[str, str],
    rehearse: Rehearse,
    known: Known = lambda _: True,
) -> Ranking | str:
    """The winner and its runners-up, or in words why there is no winner.

    The default stays the winner unless the prediction of another one is better by more than the model may err: what
    nobody measured must not make a call slower. A default that a portfolio chose by measured times stays in any case,
    if it is among the variants whose numbers may be right: the portfolio errs less than this model
    (docs/decisions/predicted-entries.md).

    Args:
        working: trials with a prediction.
        arch: compute capability of the card, as 90.
        dtype: of the problem, on which the model's error depends.
        default: what a call runs without an entry.
        default_is_measured: whether a portfolio chose it, by times of such problems.
        elsewhere: what was measured among the best on other cards.
        verified: digest of a text -> the card of this architecture on which it passed the gate.
        rehearse: what interpreters say of variants.
        known: whether they were asked about a variant's structure before, so that it costs nothing to ask again.
    """
    coming = sorted(working, key=lambda trial: (_believed_us(trial, elsewhere), trial.digest))
    coming.sort(key=lambda trial: trial.variant != default)  # it is checked in any case
    passed: dict[Variant, Trial] = {}
    unknown: dict[Variant, Trial] = {}
    checks: dict[Variant, str] = {}
    rejected: dict[Variant, tuple[Outcome, str]] = {}
    while coming and len(passed) <= CANDIDATES and len(unknown) <= CANDIDATES:
        if set(passed) | set(unknown) <= {default}:  # the default, and who may win
            batch, coming = coming[:2], coming[2:]
        else:
            # A rehearsal takes seconds: runners-up are of structures that were rehearsed before.
            batch = [trial for trial in coming if known(trial.variant)][: 1 + CANDIDATES - len(passed)]
            coming = [trial for trial in coming if trial not in batch]
            if not batch:
                break
        for trial, check in zip(batch, _checks(batch, verified, rehearse), strict=True):
            if check.outcome is not Outcome.OK:
                rejected[trial.variant] = check.outcome, check.words
            if check.outcome in (Outcome.OK, Outcome.INTERPRETER_CRASH):
                (unknown if check.words.startswith(NOT_REHEARSED) else passed)[trial.variant] = trial
                checks[trial.variant] = check.words
    eligible = list((passed or unknown).values())
    if not eligible:
        reasons = Counter(f"{outcome.value}: {reason}" for outcome, reason in rejected.values())
        ((reason, count),) = reasons.most_common(1)
        return f"none of {len(rejected)} variants passed an interpreter; {count} ended with {reason}"
    eligible.sort(key=lambda trial: (_believed_us(trial, elsewhere), trial.digest))
    kept = (passed | unknown).get(default)  # a call without an entry runs it, whether or not it could be rehearsed
    if kept is not None and (default_is_measured or not _beats(eligible[0], kept, arch, dtype)):
        eligible = [kept, *(trial for trial in eligible if trial is not kept)]
    return Ranking(trials=tuple(eligible), checks=checks, rejected=rejected)


def _believed_us(trial: Trial, elsewhere: Set[Variant]) -> float:
    assert trial.prediction is not None
    return trial.prediction.time_us * (ELSEWHERE if trial.variant in elsewhere else 1.0)


def _beats(trial: Trial, default: Trial, arch: int, dtype: DType) -> bool:
    """Whether a prediction is better than the default's by more than the model's error."""
    assert trial.prediction is not None
    assert default.prediction is not None
    templates = {side.variant.template for side in (trial, default)}
    margin = accuracy.error_between(templates, arch, dtype)
    return trial.prediction.time_us * (1.0 + margin) < default.prediction.time_us


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    outcome: Outcome
    words: str  # what the numbers stand on, or how they failed


def _checks(trials: Sequence[Trial], verified: Mapping[str, str], rehearse: Rehearse) -> list[_Check]:
    """What is known of the numbers of each trial."""
    checks: dict[Variant, _Check] = {}
    to_rehearse: list[Variant] = []
    for trial in trials:
        template = trial.variant.template
        if trial.digest in verified:
            checks[trial.variant] = _Check(outcome=Outcome.OK, words=f"passed the gate on {verified[trial.digest]}")
        elif not search_space.load(template).interpreted:
            checks[trial.variant] = _Check(outcome=Outcome.OK, words=f"{NOT_REHEARSED}: no interpreter runs {template}")
        else:
            to_rehearse.append(trial.variant)
    for variant, result in zip(to_rehearse, rehearse(to_rehearse) if to_rehearse else [], strict=True):
        outcome, reason = outcome_of(result), reason_of(result)
        words = {Outcome.OK: REHEARSED, Outcome.INTERPRETER_CRASH: f"{NOT_REHEARSED}: {reason}"}.get(outcome, reason)
        checks[variant] = _Check(outcome=outcome, words=words)
    return [checks[trial.variant] for trial in trials]
