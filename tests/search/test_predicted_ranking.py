"""Who wins without the card: the model, the checks of the numbers, and the template's default."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import samples

from autoattn.codegen import search_space
from autoattn.core.problem import DType
from autoattn.core.trial import Outcome, Trial, Verdict
from autoattn.core.variant import Variant
from autoattn.cost_model import accuracy
from autoattn.search import predicted_ranking
from autoattn.search.predicted_ranking import Ranking
from autoattn.workers.worker_pool import Failure

PROBLEM = samples.problem()
GLUON = search_space.load("gluon/forward").seeds_for(PROBLEM, samples.H200)
TRITON = search_space.load("triton/forward").seeds_for(PROBLEM, samples.H200)
RIGHT = Verdict(ok=True, checks=1, max_error=1e-3, rms_error=1e-4, allowed=4e-3)


def trial(variant: Variant, time_us: float) -> Trial:
    return Trial(variant=variant, outcome=Outcome.OK, digest=variant.digest, prediction=samples.prediction(time_us))


def right(variants: Sequence[Variant]) -> list[Verdict | Failure]:
    return [RIGHT for _ in variants]


def right_but_for(variant: Variant, result: Failure) -> predicted_ranking.Rehearse:
    """Rehearsals that end so for one variant, and well for all others."""
    return lambda variants: [result if each == variant else RIGHT for each in variants]


def ranked(*working: Trial, **changes: Any) -> Ranking:
    facts: dict[str, Any] = {
        "arch": 90, "dtype": PROBLEM.dtype, "default": GLUON[0], "default_is_measured": False, "elsewhere": set(),
        "verified": {}, "rehearse": right,
    }  # fmt: skip
    ranking = predicted_ranking.rank(working, **{**facts, **changes})
    assert isinstance(ranking, Ranking)
    return ranking


def test_a_verdict_of_a_card_of_the_architecture_counts_and_is_not_rehearsed_again() -> None:
    fast = trial(GLUON[1], 50.0)
    rehearsed: list[Variant] = []

    def rehearse(variants: Sequence[Variant]) -> list[Verdict | Failure]:
        rehearsed.extend(variants)
        return right(variants)

    ranking = ranked(
        fast, trial(TRITON[0], 100.0), verified={fast.digest: "NVIDIA H200"}, rehearse=rehearse, default=TRITON[0]
    )
    assert ranking.trials[0] is fast
    assert ranking.checks[fast.variant] == "passed the gate on NVIDIA H200"
    assert rehearsed == [TRITON[0]]


@pytest.mark.parametrize(("arch", "dtype"), [*itertools.product((80, 90, 120), (DType.FLOAT16, DType.FLOAT32))])
def test_the_default_stays_within_the_models_error(arch: int, dtype: DType) -> None:
    own, other = (accuracy.error_of(template, arch, dtype) for template in ("gluon/forward", "triton/forward"))
    default, verified = trial(GLUON[0], 100.0), {GLUON[0].digest: "a card", GLUON[1].digest: "a card"}
    for variant, error in ((GLUON[1], own), (TRITON[0], (own**2 + other**2) ** 0.5)):
        near, far = (trial(variant, 100.0 / (1.0 + share)) for share in (error - 0.01, error + 0.01))
        assert ranked(default, near, arch=arch, dtype=dtype, verified=verified).trials[0] is default
        assert ranked(default, far, arch=arch, dtype=dtype, verified=verified).trials[0] is far


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.FLOAT32])
def test_a_portfolios_choice_stays_whatever_is_predicted_unless_its_numbers_are_wrong(dtype: DType) -> None:
    default, fast = trial(TRITON[0], 100.0), trial(TRITON[1], 1.0)
    facts: dict[str, Any] = {"dtype": dtype, "default": TRITON[0]}
    assert ranked(default, fast, default_is_measured=True, **facts).trials == (default, fast)
    assert ranked(default, fast, default_is_measured=False, **facts).trials[0] is fast
    wrong = right_but_for(TRITON[0], Failure(outcome=Outcome.WRONG_RESULT, detail="wrong"))
    assert ranked(default, fast, default_is_measured=True, rehearse=wrong, **facts).trials == (fast,)


def test_a_default_in_gluon_is_rehearsed_and_makes_way_where_it_deadlocks() -> None:
    default, other = trial(GLUON[0], 50.0), trial(TRITON[0], 100.0)
    assert ranked(default, other).checks[GLUON[0]] == predicted_ranking.REHEARSED
    stuck = Failure(outcome=Outcome.WRONG_RESULT, detail="deadlock: produce waits for phase 0 of key_free[0]")
    ranking = ranked(default, other, rehearse=right_but_for(GLUON[0], stuck))
    assert [winner.variant for winner in ranking.trials] == [TRITON[0]]
    assert ranking.rejected[GLUON[0]] == (Outcome.WRONG_RESULT, stuck.detail)


def test_the_best_stays_where_the_default_has_no_prediction() -> None:
    assert ranked(trial(TRITON[0], 100.0), trial(TRITON[1], 99.0)).trials[0].variant == TRITON[1]


def test_a_default_that_nothing_could_rehearse_stays_where_the_others_are_slower() -> None:
    crash = Failure(outcome=Outcome.INTERPRETER_CRASH, detail="no")
    ranking = ranked(
        trial(TRITON[0], 100.0),
        trial(TRITON[1], 120.0),
        default=TRITON[0],
        rehearse=right_but_for(TRITON[0], crash),
    )
    assert ranking.trials[0].variant == TRITON[0]


def test_wrong_numbers_are_said_of_wrong_numbers_alone() -> None:
    wrong = Verdict(ok=False, checks=1, max_error=1.0, rms_error=1.0, allowed=4e-3, reason="by 1")
    crash = Failure(outcome=Outcome.INTERPRETER_CRASH, detail="TypeError: no")
    results: dict[Variant, Verdict | Failure] = {TRITON[0]: wrong, TRITON[1]: crash}
    ranking = ranked(
        trial(TRITON[0], 1.0),
        trial(TRITON[1], 2.0),
        rehearse=lambda variants: [results[variant] for variant in variants],
    )
    assert [winner.variant for winner in ranking.trials] == [TRITON[1]]
    assert ranking.checks[TRITON[1]] == "not rehearsed: TypeError: no"
    assert ranking.rejected[TRITON[0]] == (Outcome.WRONG_RESULT, "by 1")


MANY = list(itertools.islice(search_space.load("triton/forward").feasible(PROBLEM, samples.H200), 9))


def noting(rehearsed: list[Variant], right_ones: Sequence[Variant] = MANY) -> predicted_ranking.Rehearse:
    """Rehearsals that note whom they were asked about."""
    wrong = Verdict(ok=False, checks=1, max_error=1.0, rms_error=1.0, allowed=4e-3, reason="by 1")

    def rehearse(variants: Sequence[Variant]) -> list[Verdict | Failure]:
        rehearsed.extend(variants)
        return [RIGHT if variant in right_ones else wrong for variant in variants]

    return rehearse


def test_runners_up_are_rehearsed_where_their_structures_were_before() -> None:
    default, winner, new, *known = MANY
    trials = [trial(default, 100.0), trial(winner, 105.0), trial(new, 110.0)]
    trials += [trial(variant, 120.0 + place) for place, variant in enumerate(known)]
    rehearsed: list[Variant] = []
    ranking = ranked(*trials, default=default, rehearse=noting(rehearsed), known=lambda variant: variant in known)
    assert rehearsed == [default, winner, *known[:4]]
    assert [each.variant for each in ranking.trials] == rehearsed


def test_no_structure_is_rehearsed_for_a_runner_up_alone() -> None:
    rehearsed: list[Variant] = []
    trials = [trial(variant, 100.0 + place) for place, variant in enumerate(MANY)]
    ranking = ranked(*trials, default=MANY[0], rehearse=noting(rehearsed), known=lambda variant: False)
    assert rehearsed == MANY[:2]
    assert ranking.trials[0] is trials[0]


def test_candidates_are_rehearsed_until_one_may_win() -> None:
    """However new their structures are."""
    trials = [trial(variant, 100.0 + place) for place, variant in enumerate(MANY)]
    ranking = ranked(*trials, rehearse=noting([], MANY[7:8]), known=lambda variant: False)
    assert [each.variant for each in ranking.trials] == [MANY[7]]
