"""Trials and cache entries: what they rest on, and the time that speaks for them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import pytest
from samples import certified, measured, measurement, predicted, prediction, problem, worst

from autoattn.core.cache_entry import KERNEL, CacheEntry, Finalist
from autoattn.core.trial import Energy, Evidence, Measurement, Outcome, Trial, Verdict
from autoattn.core.variant import Variant

VARIANT = Variant.of("triton/forward", {"BLOCK_M": 64})
RIGHT = Verdict(ok=True, checks=3, max_error=1e-3, rms_error=1e-4, allowed=2e-3)
WRONG = dataclasses.replace(RIGHT, ok=False, reason="error 1 where 0.002 is allowed")


def test_outcomes_of_a_variant_and_of_the_machine_are_words_of_their_own() -> None:
    assert [outcome.value for outcome in Outcome if not outcome.of_environment] == [
        "ok", "infeasible", "compile error", "launch error", "wrong result", "timeout", "crash", "too slow",
        "interpreter crash",
    ]  # fmt: skip
    assert [outcome.value for outcome in Outcome if outcome.of_environment] == [
        "read-only", "disk full", "missing program", "out of memory", "host error",
    ]  # fmt: skip


# Trials


def test_a_measured_time_speaks_before_a_predicted_one() -> None:
    both = Trial(
        variant=VARIANT, outcome=Outcome.OK, prediction=prediction(500.0), measurement=measurement(problem(), 400.0)
    )
    assert both.time_us == 400.0
    assert dataclasses.replace(both, measurement=None).time_us == 500.0
    assert dataclasses.replace(both, measurement=None, prediction=None).time_us is None


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.OK])
def test_a_trial_that_failed_has_no_time(outcome: Outcome) -> None:
    failed = Trial(
        variant=VARIANT, outcome=outcome, prediction=prediction(500.0), measurement=measurement(problem(), 400.0)
    )
    assert failed.time_us is None


def test_a_trial_survives_the_journals_format() -> None:
    entry = measured()
    trial = Trial(
        variant=entry.variant,
        outcome=Outcome.OK,
        digest="0" * 16,
        report=entry.report,
        prediction=entry.prediction,
        verdict=entry.verdict,
        measurement=entry.measurement,
    )
    for original in (trial, Trial(variant=VARIANT, outcome=Outcome.WRONG_RESULT, detail="error 1", verdict=WRONG)):
        assert msgspec.json.decode(msgspec.json.encode(original), type=Trial) == original


# Entries


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": None},
        {"verdict": WRONG},
        {"measurement": None},
        {"verdict": None, "measurement": None},
        {"verdict": None, "measurement": None, "prediction": None},
    ],
)
def test_a_measured_entry_needs_a_passing_verdict_and_a_measurement(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a measured entry must rest on a passing verdict and a measurement"):
        measured(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"prediction": None},
        {"verdict": RIGHT},
        {"measurement": measurement(problem(), 1.0)},
        {"verdict": RIGHT, "measurement": measurement(problem(), 1.0)},
    ],
)
def test_a_predicted_entry_needs_a_prediction_alone(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a predicted entry must rest on a prediction alone"):
        predicted(**changes)


def test_a_measured_entry_may_do_without_a_prediction() -> None:
    assert measured(prediction=None).evidence is Evidence.MEASURED


def test_an_entrys_time_is_its_kernels_measured_else_predicted() -> None:
    assert measured(time_us=400.0, prediction=prediction(1.0)).time_us == 400.0
    assert predicted(time_us=500.0).time_us == 500.0
    assert measured(time_us=400.0, choice="sdpa-cudnn").time_us == 400.0  # the kernel's, whoever was chosen


def test_an_entrys_rate_counts_kept_pairs_alone() -> None:
    causal, full = problem(seq_q=1024, seq_kv=1024), problem(seq_q=1024, seq_kv=1024, mask=problem().mask.parse("full"))
    assert measured(full, time_us=100.0).tflops == pytest.approx(full.flops() / 100e-6 / 1e12)
    ratio = measured(causal, time_us=100.0).tflops / measured(full, time_us=100.0).tflops
    assert ratio == pytest.approx(1025 / 2048)


def test_an_entrys_variant_is_its_template_with_its_parameters() -> None:
    entry = measured()
    assert entry.variant == Variant.of(entry.template, entry.params)


def test_an_entry_runs_its_own_kernel_unless_it_says_otherwise() -> None:
    entry = predicted()
    assert entry.choice == KERNEL == "kernel"


ENTRIES = {
    "measured": measured(),
    "certified": certified(),
    "worst": certified(worst=worst()),
    "predicted": predicted(),
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))
def test_an_entry_survives_json(entry: CacheEntry) -> None:
    assert msgspec.json.decode(msgspec.json.encode(entry), type=CacheEntry) == entry


@pytest.mark.parametrize(
    "changes",
    [{"median_us": 0.0}, {"slowdown": math.nan}, {"slowdown": math.inf}, {"max_error": -1.0}, {"rounds": 0},
     {"redone": 2049}, {"redone": -1}, {"tiles": 0}],
)  # fmt: skip
def test_a_worst_case_that_nobody_can_have_measured_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a worst case must have"):
        worst(**changes)


def test_entries_and_trials_are_frozen() -> None:
    frozen: list[tuple[Any, str]] = [
        (measured(), "choice"),
        (Trial(variant=VARIANT, outcome=Outcome.OK), "outcome"),
        (Measurement(median_us=1.0, p20_us=1.0, p80_us=1.0, samples=1, tflops=1.0), "median_us"),
    ]
    for value, name in frozen:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"median_us": 0.0},
        {"median_us": math.inf},
        {"rms_error": -1.0},
        {"max_error": math.nan},
        {"registers": -1},
        {"num_warps": 0},
    ],
)
def test_a_finalist_with_an_impossible_fact_is_none(changes: dict[str, Any]) -> None:
    facts = {"median_us": 1.0, "max_error": 0.0, "rms_error": 0.0, **changes}
    with pytest.raises(ValueError, match="finalist"):
        Finalist(source_digest="aa", **facts)


def test_the_tied_are_those_as_good_as_the_winner_without_it() -> None:
    finals = certified().finals
    assert finals is not None
    assert [finalist.source_digest for finalist in finals.tied] == ["aa" * 8]


@pytest.mark.parametrize("facts", [{"joules": 0.0}, {"watts": -1.0}, {"joules": math.inf}])
def test_energy_is_above_zero(facts: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Energy(**{"joules": 1.0, "watts": 1.0, **facts})
