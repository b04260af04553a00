"""Statistics of interleaved rounds: who is faster, by how much, how sure that is, and when to stop.

Each round runs every contestant once, in random order, so that what drifts from round to round (clocks, temperature)
meets all of them alike. Two contestants are compared round by round: the ratio of their times is free of the drift.

The interval of a ratio is that of the median by order statistics, which the sign test gives (Conover, "Practical
Nonparametric Statistics", 3.4): it asks of the rounds to be independent and nothing of how times are distributed, so
outliers and coarse clocks spoil no level. Looking at the rounds more than once and stopping when they please would: so
looks are planned ahead, and each is given an equal share of the error that is allowed (alpha spending after Lan and
DeMets, Biometrika 70, 1983, by the union bound, which holds however the looks depend on one another).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

ALPHA = 0.05  # of all looks at one pair together: intervals hold with 95%
# Good rounds at which the contest may stop; one more look is at its end. 16 bear one outlier.
LOOKS = (16, 32, 64, 128, 256, 512)
SLOW_CLOCK = 0.9  # of the median SM clock of all rounds; a slower round is discarded
# What holds a clock down in an unfair way. The power cap is no such thing: at full load it is the normal state.
UNFAIR = ("thermal limit", "hardware slowdown", "hardware thermal slowdown", "power brake")
INDIFFERENT = 0.005  # who is slower by less than this is as good: two tunes differ by as much on one card
NEAR = 0.01  # among those that cannot be told apart, only who seems at most this much slower may win
PRECISE = 0.01  # an interval that reaches at most so far to either side is narrow enough to be shown
MIN_ROUNDS = 3  # whatever the budget
PATIENCE = 4.0  # budgets that a contest may take to come to its first look


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What the card did at one moment."""

    clock_mhz: int  # SM clock
    slowed: bool  # the driver reports a hardware or thermal slowdown
    temperature_c: int | None = None
    reasons: tuple[str, ...] = ()  # what holds the clock down, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One sample of each contestant, raw."""

    times_us: dict[str, float]  # in the order in which they ran
    pulse: Pulse | None = None  # of the card, right after the round; None without NVML


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A ratio of two contestants' times with its confidence interval."""

    ratio: float  # median over the rounds
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0.0 < self.low <= self.ratio <= self.high < math.inf:
            raise ValueError("an interval must hold its ratio, and both ends must be above 0 and finite")


def hold(
    names: Sequence[str],
    sample: Callable[[str], float],
    pulse: Callable[[], Pulse | None],
    *,
    seed: int,
    enough: Callable[[list[Round]], bool],
) -> list[Round]:
    """Rounds until it is `enough`, each with one sample of every contestant in an order of its own."""
    rng = random.Random(seed)
    order = list(names)
    done: list[Round] = []
    while not enough(done):
        rng.shuffle(order)
        done.append(Round(times_us={name: sample(name) for name in order}, pulse=pulse()))
    return done


def faults(rounds: Sequence[Round]) -> list[str]:
    """Why each round is discarded, in words; "" for a good one.

    The rule sees the card's clock and the driver's reasons, never the times: it cannot favour anybody. Where it would
    discard half of the rounds or more, the card is like that, and all of them count.
    """
    clocks = [round_.pulse.clock_mhz for round_ in rounds if round_.pulse is not None]
    usual = statistics.median(clocks) if clocks else 0
    reasons = [_fault(round_.pulse, usual) for round_ in rounds]
    return reasons if 2 * sum(map(bool, reasons)) < len(reasons) else [""] * len(reasons)


def _fault(pulse: Pulse | None, usual: float) -> str:
    if pulse is None:
        return ""
    unfair = [reason for reason in pulse.reasons if reason in UNFAIR]
    if unfair or pulse.slowed:
        return ", ".join(unfair) or "hardware slowdown"
    return f"{pulse.clock_mhz} MHz, usually {usual:.0f}" if pulse.clock_mhz < SLOW_CLOCK * usual else ""


def good(rounds: Sequence[Round]) -> list[Round]:
    """The rounds that count."""
    return [round_ for round_, fault in zip(rounds, faults(rounds), strict=True) if not fault]


def interval(rounds: Sequence[Round], name: str, over: str, *, finalists: int) -> Interval | None:
    """The ratio of two contestants' times, `name` over `over`, in rounds that all count.

    Args:
        finalists: among how many `over` was chosen by these same rounds; the interval holds whichever it was.

    Returns:
        None where there are too few rounds to say anything with that confidence.
    """
    ratios = sorted(round_.times_us[name] / round_.times_us[over] for round_ in rounds)
    rank = median_rank(len(ratios), ALPHA / (len(LOOKS) + 1) / max(1, finalists))
    if rank == 0:
        return None
    return Interval(ratio=statistics.median(ratios), low=ratios[rank - 1], high=ratios[-rank])


@lru_cache(maxsize=4096)
def median_rank(count: int, alpha: float) -> int:
    """The largest k for which the k-th smallest and the k-th largest of `count` samples enclose their distribution's
    median with probability 1 - `alpha`; 0 where there is none."""
    rank, below = 0, 0.0  # the probability that at most `rank` of the samples are below the median
    for number in range(count // 2):
        below += math.exp(
            math.lgamma(count + 1) - math.lgamma(number + 1) - math.lgamma(count - number + 1) - count * math.log(2)
        )
        if 2 * below > alpha:
            break
        rank = number + 1
    return rank


def leader(rounds: Sequence[Round], finalists: Sequence[str]) -> str:
    """The finalist that is fastest in the median, each round measured against its own mean; the first of equals."""
    scores: dict[str, list[float]] = {name: [] for name in finalists}
    for round_ in rounds:
        mean = statistics.fmean(math.log(round_.times_us[name]) for name in finalists)
        for name in finalists:
            scores[name].append(math.log(round_.times_us[name]) - mean)
    return min(finalists, key=lambda name: statistics.median(scores[name]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Class:
    """The finalists that cannot be told from the fastest, or are as good."""

    leader: str
    members: tuple[str, ...]  # with the leader
    near: tuple[str, ...]  # members that also seem as fast: one of them may win
    decided: bool  # more rounds would change nobody's place in it


def ties(rounds: Sequence[Round], finalists: Sequence[str]) -> Class:
    """Who may be the fastest, by rounds that all count.

    The truly fastest finalist is a member with 95%, whoever leads. A member that is not near can only be there for
    want of rounds.
    """
    first = leader(rounds, finalists)
    leads = {name: interval(rounds, name, first, finalists=len(finalists)) for name in finalists if name != first}
    members = [name for name in finalists if name == first or _as_good(leads[name])]
    medians = {
        name: statistics.median(round_.times_us[name] / round_.times_us[first] for round_ in rounds) for name in members
    }
    return Class(
        leader=first,
        members=tuple(members),
        near=tuple(name for name in members if medians[name] <= 1.0 + NEAR),
        decided=all(_placed(lead) for lead in leads.values()),
    )


def _as_good(lead: Interval | None) -> bool:
    return lead is None or lead.low <= 1.0 + INDIFFERENT


def _placed(lead: Interval | None) -> bool:
    return lead is not None and (lead.low > 1.0 + INDIFFERENT or lead.high <= 1.0 + INDIFFERENT)


def settled(rounds: Sequence[Round], finalists: Sequence[str]) -> bool:
    """Whether the rounds so far, good and bad, answer all that is asked. Only to be asked at a look.

    That is the class of the finalists, for every other contestant whether it is faster than their leader, and each
    ratio to PRECISE.
    """
    counted = good(rounds)
    if not counted or not finalists:
        return False
    standing = ties(counted, finalists)
    leads = {
        name: interval(counted, name, standing.leader, finalists=len(finalists))
        for name in counted[0].times_us
        if name != standing.leader
    }
    rival_leads = [lead for name, lead in leads.items() if name not in finalists]
    return (
        standing.decided
        and all(lead is not None and (lead.low > 1.0 - INDIFFERENT or lead.high < 1.0) for lead in rival_leads)
        and all(lead is not None and lead.high - lead.low <= 2 * PRECISE * lead.ratio for lead in leads.values())
    )


def stopper(finalists: Sequence[str], *, seconds: float, now: Callable[[], float]) -> Callable[[list[Round]], bool]:
    """When a contest has enough: at the first look at which it is settled, after the last one, or when `seconds` are
    used; the first look is waited for with PATIENCE.

    Args:
        now: the time in seconds, from any moment on.
    """
    begin, looked = now(), 0

    def enough(rounds: list[Round]) -> bool:
        nonlocal looked
        count = len(rounds)
        if count < MIN_ROUNDS:
            return False
        spent = now() - begin
        if looked < len(LOOKS) and count >= LOOKS[looked]:  # else no look can have been reached since the last one
            counted = len(good(rounds))
            passed = sum(counted >= look for look in LOOKS)
            if passed > looked:
                looked = passed
                if passed == len(LOOKS) or settled(rounds, finalists):
                    return True
        return spent >= (seconds if count >= LOOKS[0] else PATIENCE * seconds)

    return enough
