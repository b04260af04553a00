"""The finals of one problem: who takes part, who wins, what a call then runs on, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autoattn.baselines.pytorch_sdpa import BACKENDS, SDPA
from autoattn.core import paired_stats
from autoattn.core.cache_entry import KERNEL, Finalist, Finals, Rival
from autoattn.core.paired_stats import Interval, Round
from autoattn.core.trial import Energy, Measurement, Trial, Verdict
from autoattn.core.variant import Variant
from autoattn.search import job_results
from autoattn.search.gpu_jobs import Finished, finalist_name
from autoattn.search.search_options import Objective
from autoattn.workers.worker_pool import Failure

TEMPLATE_DEFAULT = "template default"
RIVAL_ERROR = 4.0  # times what the gate allows a kernel at the same size
MARGIN = 0.01  # a rival must be faster by this share to be chosen over the kernel: less is noise
SAME_ENERGY = 0.03  # readings that differ by less are equal: the counter moves in steps
SAME_ERROR = 0.01  # root mean square errors that differ by less are equal
_SAME = {Objective.TIME: MARGIN, Objective.ENERGY: SAME_ENERGY, Objective.ERROR: SAME_ERROR}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What came of the finals."""

    winner: Trial
    measurement: Measurement
    verdict: Verdict  # at full size
    choice: str  # what a call runs on: the kernel or a rival
    rivals: tuple[Rival, ...]
    absent: dict[str, str]  # who was not in the finals -> why
    others: tuple[tuple[Trial, float], ...]  # the other finalists with their medians in microseconds, fastest first
    finals: Finals


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contender:
    """A finalist whose numbers are right."""

    name: str  # in the rounds
    trial: Trial
    measurement: Measurement
    verdict: Verdict
    energy: Energy | None

    def score(self, objective: Objective) -> float | None:
        """What the objective asks to be small; None where it is not known."""
        return _score(objective, self.measurement, self.energy, self.verdict.rms_error)


def shortlist(working: Iterable[Trial], count: int, objective: Objective) -> list[Trial]:
    """Who enters the finals: the fastest of the search or, where errors decide, those with the smallest."""

    def rank(trial: Trial) -> tuple[float, float, str]:
        error = trial.verdict.rms_error if objective is Objective.ERROR and trial.verdict is not None else 0.0
        # Steps of a hundredth: less is no reason to prefer a slower one.
        step = math.floor(math.log(error) / math.log1p(SAME_ERROR)) if error > 0.0 else -math.inf
        return step, trial.time_us if trial.time_us is not None else math.inf, trial.digest

    return sorted(working, key=rank)[:count]


def decide(
    finalists: Sequence[Trial],
    result: Finished,
    *,
    objective: Objective,
    default: Variant,
    previous: Variant | None,
) -> Decision | str:
    """The winner and its evidence, or in words why there is none.

    The objective leaves those that are as good by it; time decides among them. Of those that cannot be told from the
    fastest, or are as good (rounds.ties), the previous winner stays; else the one that needs the fewest resources
    wins, and between equals the digest decides, so that two tunes agree.
    """
    contenders = _contenders(finalists, result)
    if not contenders:
        return f"no finalist was right at full size: {result.verdicts[0].reason}"
    pool = _as_good(contenders, objective)
    if not pool:
        return "the objective energy needs NVML's counter of energy, which this card does not tell; use another one"
    counted = paired_stats.good(result.rounds)
    winner, tied, decided = _winner(pool, counted, previous)
    error = winner.verdict.allowed * RIVAL_ERROR  # a backend far less accurate than the gate allows is no rival
    rivals = [
        replace(rival, lead=_lead(counted, rival.name, winner, contenders))
        for rival in result.rivals
        if (rival.max_error or 0.0) <= error
    ]
    wrong = {
        rival.name: f"wrong: error {rival.max_error:.3g} where {error:.3g} is allowed"
        for rival in result.rivals
        if (rival.max_error or 0.0) > error
    }
    rivals += [
        _as_rival(contender, _lead(counted, contender.name, winner, contenders))
        for contender in contenders
        if contender.trial.variant == default and contender is not winner
    ]
    runners_up = [contender for contender in contenders if contender is not winner]
    return Decision(
        winner=winner.trial,
        measurement=winner.measurement,
        verdict=winner.verdict,
        choice=_choice(winner, rivals, objective),
        rivals=tuple(rivals),
        absent={**result.absent, **wrong},
        others=tuple((contender.trial, contender.measurement.median_us) for contender in runners_up),
        finals=Finals(
            rounds=len(counted) or winner.measurement.samples,
            discarded=len(result.rounds) - len(counted),
            decided=decided,
            finalists=tuple(
                _finalist(contender, _lead(counted, contender.name, winner, contenders), tied=contender.name in tied)
                for contender in (winner, *runners_up)
            ),
        ),
    )


def without(result: Finished, place: int, worst: Failure) -> Finished:
    """The same finals, in which the finalist at a place is not right, since its worst case failed."""
    reason = f"its worst case {job_results.words(worst)}"
    verdicts = list(result.verdicts)
    verdicts[place] = replace(verdicts[place], ok=False, reason=reason)
    return replace(result, verdicts=tuple(verdicts))


def _contenders(finalists: Sequence[Trial], result: Finished) -> list[_Contender]:
    """Those that are right at full size, fastest first."""
    energies = result.energies or (None,) * len(finalists)
    contenders = [
        _Contender(name=finalist_name(place), trial=trial, measurement=measurement, verdict=verdict, energy=energy)
        for place, (trial, measurement, verdict, energy) in enumerate(
            zip(finalists, result.measurements, result.verdicts, energies, strict=True)
        )
        if measurement is not None and verdict.ok
    ]
    return sorted(contenders, key=lambda contender: (contender.measurement.median_us, contender.trial.digest))


def _as_good(contenders: Sequence[_Contender], objective: Objective) -> list[_Contender]:
    """Those that are as good as the best by the objective; by time all, since the rounds decide that."""
    if objective is Objective.TIME:
        return list(contenders)
    scores = [(contender.score(objective), contender) for contender in contenders]
    best = min((score for score, _ in scores if score is not None), default=None)
    return [
        contender
        for score, contender in scores
        if best is not None and score is not None and score <= best * _room(objective)
    ]


def _room(objective: Objective) -> float:
    return 1.0 + _SAME[objective]


def _winner(
    pool: Sequence[_Contender], counted: Sequence[Round], previous: Variant | None
) -> tuple[_Contender, tuple[str, ...], bool]:
    """The winner, the names of the class that it is of, and whether more rounds would change that class."""
    if not counted:
        return pool[0], (), False
    standing = paired_stats.ties(counted, [contender.name for contender in pool])
    near = [contender for contender in pool if contender.name in standing.near]
    winner = min(
        near,
        key=lambda contender: (
            contender.trial.variant != previous,
            _resources(contender.trial),
            contender.trial.digest,
        ),
    )
    return winner, standing.members, standing.decided


def _resources(trial: Trial) -> tuple[int, int, int]:
    """What a kernel takes from the card: spills, then shared memory, then registers."""
    report = trial.report
    if report is None:
        return 0, 0, 0
    return report.spilled_bytes, report.shared_bytes, report.registers * report.num_warps


def _lead(counted: Sequence[Round], name: str, winner: _Contender, contenders: Sequence[_Contender]) -> Interval | None:
    """The time of a contestant over the winner's; the winner was found among all contenders."""
    if not counted or name == winner.name:
        return None
    return paired_stats.interval(counted, name, winner.name, finalists=len(contenders))


def _finalist(contender: _Contender, lead: Interval | None, *, tied: bool) -> Finalist:
    report = contender.trial.report
    facts = {} if report is None else {name: getattr(report, name) for name in _RESOURCES}
    return Finalist(
        source_digest=contender.trial.digest,
        median_us=contender.measurement.median_us,
        lead=lead,
        tied=tied,
        max_error=contender.verdict.max_error,
        rms_error=contender.verdict.rms_error,
        energy=contender.energy,
        **facts,
    )


_RESOURCES = ("registers", "spilled_bytes", "shared_bytes", "num_warps")


def _as_rival(contender: _Contender, lead: Interval | None) -> Rival:
    return Rival(
        name=TEMPLATE_DEFAULT,
        measurement=contender.measurement,
        max_error=contender.verdict.max_error,
        rms_error=contender.verdict.rms_error,
        lead=lead,
        energy=contender.energy,
    )


def _score(
    objective: Objective, measurement: Measurement, energy: Energy | None, rms_error: float | None
) -> float | None:
    if objective is Objective.TIME:
        return measurement.median_us
    if objective is Objective.ERROR:
        return rms_error
    return energy.joules if energy is not None else None


def _choice(winner: _Contender, rivals: Sequence[Rival], objective: Objective) -> str:
    """The kernel, unless a rival was better by more than the margin: never worse than what the user had."""
    own = winner.score(objective)
    assert own is not None
    scores = {
        rival.name: score
        for rival in rivals
        if rival.name in (SDPA, *BACKENDS)  # what dispatch can take in a kernel's place
        and (score := _score(objective, rival.measurement, rival.energy, rival.rms_error)) is not None
        # By time, also the rounds must say that it is the faster one.
        and (objective is not Objective.TIME or rival.lead is None or rival.lead.high < 1.0)
    }
    best = min(scores, key=lambda name: scores[name], default=KERNEL)
    margin = 1.0 - _SAME[objective]
    if best == KERNEL or scores[best] >= own * margin:
        return KERNEL
    # PyTorch's own choice costs the host less than naming a backend, so it wins ties.
    return SDPA if scores.get(SDPA, math.inf) * margin <= scores[best] else best
