"""The finals of a tune, and the rehearsals that stand in for them without a card; the workshop is a fake."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernels
import pytest
import samples
from fake_workshop import GOOD, SMALL, FakeWorkshop, remember, rival, run, workshop  # noqa: F401 - a fixture

from autoattn.baselines import external
from autoattn.cache import finals_samples, store
from autoattn.core.cache_entry import KERNEL, WorstCase
from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome, Verdict
from autoattn.core.variant import Variant
from autoattn.errors import UsageError
from autoattn.search import finals, multi_template, peer_calls, search_options
from autoattn.search.gpu_jobs import Finished
from autoattn.workers.worker_pool import Failure

pytestmark = pytest.mark.usefixtures("no_portfolio")  # what is tried first are the templates' seeds


def first_default() -> Variant:
    """What a call takes for which nothing was tuned."""
    return multi_template.spaces(SMALL, samples.H200, True)[0].default(SMALL, samples.H200)


def test_the_default_and_the_previous_winner_are_always_in_the_finals(
    workshop: type[FakeWorkshop], tmp_path: Path
) -> None:
    default = first_default()
    old = kernels.variant(BLOCK_M=64, BLOCK_N=64, num_stages=2)
    remember(tmp_path, old)
    slow = (default, old)
    workshop.time_us = lambda self, variant: 1000.0 if variant in slow else 100.0  # type: ignore[method-assign]
    run(tmp_path, measured=True, trials=30)
    (finalists,) = workshop.finals
    assert {default, old} <= set(finalists)
    assert len(finalists) == len(set(finalists)) == search_options.PROFILES[search_options.Effort.QUICK].finalists + 2


def test_the_templates_default_is_a_rival_in_the_record_and_never_the_choice(
    workshop: type[FakeWorkshop], tmp_path: Path
) -> None:
    default = first_default()
    workshop.time_us = lambda self, variant: 200.0 if variant == default else 100.0  # type: ignore[method-assign]
    entry = run(tmp_path, measured=True, trials=30).entries[SMALL.key]
    times = {rival.name: rival.measurement.median_us for rival in entry.rivals}
    assert times == {finals.TEMPLATE_DEFAULT: 200.0}
    assert entry.choice == KERNEL


def test_an_entry_has_a_faster_peer_beside_its_kernel_and_says_who_was_absent(
    workshop: type[FakeWorkshop], tmp_path: Path
) -> None:
    workshop.rivals = (rival("fa3", 1.0),)
    workshop.absent = {"fa2": "not installed (no module flash_attn)"}
    summary = run(tmp_path, measured=True, trials=30)
    entry = summary.entries[SMALL.key]
    assert entry.choice == KERNEL
    assert "fa3" in [rival.name for rival in entry.rivals]
    assert entry.absent is not None
    assert entry.absent["fa2"] == "not installed (no module flash_attn)"
    read = store.read(summary.written[0]).entries[SMALL.key]
    assert (read.absent, [rival.name for rival in read.rivals]) == (
        entry.absent,
        [rival.name for rival in entry.rivals],
    )


def test_a_quick_tune_leaves_out_peers_that_compile_and_says_so(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    compiling = {name for name in external.FINALS_PEERS if external.PEERS[name].compiles}
    assert "flex" in compiling
    quick = run(tmp_path, measured=True).entries[SMALL.key]
    standard = run(tmp_path / "standard", measured=True, effort=search_options.Effort.STANDARD).entries[SMALL.key]
    assert [set(budget["peers"]) for budget in workshop.budgets] == [
        set(external.FINALS_PEERS) - compiling,
        set(external.FINALS_PEERS),
    ]
    assert workshop.budgets[0]["best_us"] == quick.time_us
    assert quick.absent is not None
    assert quick.absent["flex"] == peer_calls.why_no_time(external.PEERS["flex"], search_options.Effort.QUICK)
    assert set(quick.absent) == compiling
    assert standard.absent == {}


def test_a_prediction_met_nobody(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    assert run(tmp_path).entries[SMALL.key].absent is None


def test_a_finalist_that_is_wrong_at_full_size_does_not_win(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finished(self: FakeWorkshop, problem: Problem, variants: list[Variant], **facts: Any) -> Finished:
        verdicts = (replace(GOOD, ok=False, reason="error 1"), *(GOOD,) * (len(variants) - 1))
        times = [samples.measurement(problem, 10.0 + place) for place in range(len(variants))]
        self.finals.append(variants)
        return Finished(verdicts=verdicts, measurements=tuple(times), rivals=())

    monkeypatch.setattr(workshop, "finished", finished)
    entry = run(tmp_path, measured=True, trials=30).entries[SMALL.key]
    (finalists,) = workshop.finals
    assert entry.variant == finalists[1]
    assert finalists[0].as_dict() not in [candidate.params for candidate in entry.candidates]


def test_finals_without_a_right_finalist_leave_no_entry(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = replace(GOOD, ok=False, reason="error 1 where 0.1 is allowed")

    def finished(self: FakeWorkshop, problem: Problem, variants: list[Variant], **facts: Any) -> Finished:
        return Finished(verdicts=(bad,) * len(variants), measurements=(None,) * len(variants), rivals=())

    monkeypatch.setattr(workshop, "finished", finished)
    summary = run(tmp_path, measured=True)
    assert summary.failed == {SMALL.key: "no finalist was right at full size: error 1 where 0.1 is allowed"}
    assert summary.written == ()
    assert not list(tmp_path.rglob("forward.json"))


def test_finals_that_are_lost_leave_no_entry_and_the_next_problem_goes_on(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, other = workshop.finished, replace(SMALL, batch=2)

    def finished(self: FakeWorkshop, problem: Problem, variants: list[Variant], **facts: Any) -> Finished | Failure:
        if problem == SMALL:
            return Failure(outcome=Outcome.CRASH, detail="the process died (SIGSEGV)")
        return right(self, problem, variants, **facts)

    monkeypatch.setattr(workshop, "finished", finished)
    summary = run(tmp_path, SMALL, other, measured=True)
    assert summary.failed == {SMALL.key: "the finals ended with a crash: the process died (SIGSEGV)"}
    assert list(summary.entries) == [other.key]


FIRST_MAX = replace(SMALL, seq_q=512, seq_kv=512)  # long enough for a maximum that is kept


def only(softmax: str, monkeypatch: pytest.MonkeyPatch, workshop: type[FakeWorkshop]) -> None:
    """Has the variants with this softmax be the fastest by far."""
    monkeypatch.setattr(
        workshop, "time_us", lambda self, variant: 100.0 + len(str(variant)) - 50.0 * (variant["softmax"] == softmax)
    )


def test_a_winner_that_keeps_its_first_maximum_has_its_worst_case_told(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("first_max", monkeypatch, workshop)
    summary = run(tmp_path, FIRST_MAX, measured=True, trials=30, seed=3)
    entry = summary.entries[FIRST_MAX.key]
    assert entry.variant["softmax"] == "first_max"
    assert workshop.outgrown == [(entry.variant, 3)], "the winner alone, once"
    assert entry.worst is not None
    assert (entry.worst.slowdown, entry.worst.redone, entry.worst.tiles) == (2.5, 63, 64)
    assert store.read(summary.written[0]).entries[FIRST_MAX.key].worst == entry.worst


def test_another_winner_has_no_worst_case(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("online", monkeypatch, workshop)
    entry = run(tmp_path, FIRST_MAX, measured=True, trials=30).entries[FIRST_MAX.key]
    assert entry.variant["softmax"] == "online"
    assert (workshop.outgrown, entry.worst) == ([], None)


WRONG = Failure(outcome=Outcome.WRONG_RESULT, detail="two runs on the same inputs differ")


def test_a_winner_that_is_wrong_in_its_worst_case_gives_way_to_the_best_of_the_others(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = workshop.computed_twice, []

    def computed_twice(self: FakeWorkshop, problem: Problem, variant: Variant, *, seed: int) -> WorstCase | Failure:
        if len(wrong) == 2:
            return right(self, problem, variant, seed=seed)
        wrong.append(variant)
        return WRONG

    only("first_max", monkeypatch, workshop)
    monkeypatch.setattr(workshop, "computed_twice", computed_twice)
    entry = run(tmp_path, FIRST_MAX, measured=True, trials=30).entries[FIRST_MAX.key]
    (finalists,) = workshop.finals
    assert entry.variant not in wrong
    times = [workshop.time_us(workshop, variant) for variant in finalists if variant not in wrong]  # type: ignore[arg-type]
    assert workshop.time_us(workshop, entry.variant) <= 1.01 * min(times)  # type: ignore[arg-type]
    assert not [candidate for candidate in entry.candidates if candidate.variant in wrong]
    assert entry.search.outcomes[Outcome.WRONG_RESULT.value] == 2
    assert (workshop.outgrown, entry.worst is not None) == ([(entry.variant, 0)], True)


def test_finalists_that_are_all_wrong_in_their_worst_cases_leave_no_entry(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workshop, "_is_refused", lambda self, problem, variant: variant["softmax"] != "first_max")
    monkeypatch.setattr(workshop, "computed_twice", lambda self, problem, variant, seed: WRONG)
    summary = run(tmp_path, FIRST_MAX, measured=True, trials=30)
    assert summary.failed == {
        FIRST_MAX.key: "no finalist was right at full size: its worst case ended with a wrong result: two runs on the "
        "same inputs differ"
    }
    assert summary.written == ()
    assert not list(tmp_path.rglob("forward.json"))


def test_the_verdict_of_an_entry_covers_the_gate_and_the_full_size(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closer = Verdict(ok=True, checks=1, max_error=3e-3, rms_error=5e-5, allowed=4e-3)

    def finished(self: FakeWorkshop, problem: Problem, variants: list[Variant], **facts: Any) -> Finished:
        times = tuple(samples.measurement(problem, 10.0 + place) for place in range(len(variants)))
        return Finished(verdicts=(closer,) * len(variants), measurements=times, rivals=())

    monkeypatch.setattr(workshop, "finished", finished)
    verdict = run(tmp_path, measured=True).entries[SMALL.key].verdict
    assert verdict == Verdict(ok=True, checks=11, max_error=3e-3, rms_error=1e-4, allowed=4e-3)


def test_a_prediction_rests_on_the_first_variant_that_rehearses_right(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: list[Variant] = []

    def rehearse(self: FakeWorkshop, problem: Problem, *variants: Variant) -> list[Verdict | Failure]:
        if wrong:
            return [GOOD for _ in variants]
        wrong.extend(variants[:2])
        died = Failure(outcome=Outcome.CRASH, detail="died")
        return [replace(GOOD, ok=False), died, *(GOOD for _ in variants[2:])]

    monkeypatch.setattr(workshop, "rehearse", rehearse)
    entry = run(tmp_path, trials=30).entries[SMALL.key]
    assert entry.variant not in wrong
    assert len(entry.candidates) == 5, "others take the places of those two"
    assert not [candidate for candidate in entry.candidates if Variant.of(entry.template, candidate.params) in wrong]


def test_an_entry_says_what_the_interpreter_made_of_variants_and_is_searched_anew_where_it_crashed(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash, wrong = Failure(outcome=Outcome.INTERPRETER_CRASH, detail="no"), replace(GOOD, ok=False, reason="by 1")

    answers = itertools.chain([crash, wrong], itertools.repeat(GOOD))

    def rehearse(self: FakeWorkshop, problem: Problem, *variants: Variant) -> list[Verdict | Failure]:
        return [next(answers) for _ in variants]

    with monkeypatch.context() as broken:
        broken.setattr(workshop, "rehearse", rehearse)
        first = run(tmp_path).entries[SMALL.key]
    assert first.search.outcomes == {"interpreter crash": 1, "ok": 4, "wrong result": 1}
    again = run(tmp_path)
    assert again.kept == 0
    assert again.entries[SMALL.key].search.outcomes == {"ok": 6}
    assert (len(first.candidates), len(again.entries[SMALL.key].candidates)) == (3, 5)
    assert run(tmp_path).kept == 1


def test_a_prediction_without_right_numbers_is_none(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        workshop,
        "rehearse",
        lambda self, problem, *variants: [replace(GOOD, ok=False, reason="by 1") for _ in variants],
    )
    assert run(tmp_path).failed == {
        SMALL.key: "none of 6 variants passed an interpreter; 6 ended with wrong result: by 1"
    }


def test_where_the_interpreter_itself_fails_the_prediction_stands_and_says_not_rehearsed(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash = Failure(outcome=Outcome.INTERPRETER_CRASH, detail="TypeError: only 0-dimensional arrays")
    monkeypatch.setattr(workshop, "rehearse", lambda self, problem, *variants: [crash for _ in variants])
    summary = run(tmp_path)
    assert summary.failed == {}
    entry = summary.entries[SMALL.key]
    assert entry.checked == "not rehearsed: TypeError: only 0-dimensional arrays"
    assert entry.search.outcomes == {"interpreter crash": 6}


def test_what_rehearsed_right_goes_before_what_the_interpreter_failed_on(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash = Failure(outcome=Outcome.INTERPRETER_CRASH, detail="no")
    right: list[Variant] = []

    def rehearse(self: FakeWorkshop, problem: Problem, *variants: Variant) -> list[Verdict | Failure]:
        right.append(max(variants, key=self.time_us))
        return [GOOD if variant in right else crash for variant in variants]

    monkeypatch.setattr(workshop, "rehearse", rehearse)
    entry = run(tmp_path).entries[SMALL.key]
    assert entry.variant in right
    assert entry.checked == "rehearsed in an interpreter"


def test_an_entry_keeps_five_runners_up_in_order(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    for measured in (False, True):
        entry = run(tmp_path / str(measured), measured=measured, trials=30, effort=search_options.Effort.MAX).entries[
            SMALL.key
        ]
        times = [entry.time_us, *(candidate.time_us for candidate in entry.candidates)]
        assert len(times) == 6
        assert times == sorted(times)
        assert len({entry.source_digest, *(candidate.source_digest for candidate in entry.candidates)}) == 6


def test_the_previous_winner_stays_among_equals(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    for tile in ((64, 64), (32, 64)):
        old = kernels.variant(BLOCK_M=tile[0], BLOCK_N=tile[1], num_stages=2)
        folder = tmp_path / str(tile[0])
        remember(folder, old)
        workshop.time_us = lambda self, variant: 100.0  # type: ignore[method-assign]
        entry = run(folder, measured=True, trials=30).entries[SMALL.key]
        assert entry.variant == old
        assert entry.finals is not None
        assert len(entry.finals.tied) == len(entry.finals.finalists) - 1


def test_without_a_previous_winner_two_tunes_agree_among_equals(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    winners = set()
    for number in range(6):
        noise = random.Random(number)
        monkeypatch.setattr(workshop, "time_us", lambda self, variant, noise=noise: 100.0 + noise.uniform(0.0, 0.2))
        winners.add(run(tmp_path / str(number), measured=True, trials=3).entries[SMALL.key].source_digest)
    assert len(winners) == 1


def test_the_raw_samples_are_kept_beside_the_journal(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    workshop.rivals = (rival("sdpa", 500.0),)
    entry = run(tmp_path, measured=True, trials=30).entries[SMALL.key]
    record = finals_samples.read(finals_samples.path_of(tmp_path, "h200", SMALL.key))
    assert record is not None
    assert (record.winner, record.fingerprint, record.problem) == (
        entry.source_digest, samples.H200.fingerprint, SMALL
    )  # fmt: skip
    assert len(record.rounds) == 40
    assert entry.finals is not None
    assert set(record.kernels.values()) == {finalist.source_digest for finalist in entry.finals.finalists}
    assert record.rounds[0].times_us["sdpa"] == 500.0
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_tune_for_energy_takes_what_costs_least_and_asks_for_it_long_enough(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workshop, "joules", lambda self, variant: 1000.0 - self.time_us(variant))
    options: dict[str, Any] = {"measured": True, "trials": 30}
    fast = run(tmp_path, **options).entries[SMALL.key]
    cool = run(tmp_path, objective=search_options.Objective.ENERGY, **options).entries[SMALL.key]
    assert cool.time_us > fast.time_us
    assert cool.search.objective == "energy"
    assert [budget["energy_seconds"] for budget in workshop.budgets] == [0.0, search_options.ENERGY_SECONDS]
    assert cool.finals is not None
    assert {finalist.energy is not None for finalist in cool.finals.finalists} == {True}


def test_an_entry_for_another_objective_is_not_up_to_date(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    options: dict[str, Any] = {"measured": True, "trials": 6}
    assert run(tmp_path, **options).kept == 0
    assert run(tmp_path, objective=search_options.Objective.ERROR, **options).kept == 0
    assert run(tmp_path, objective=search_options.Objective.ERROR, **options).kept == 1
    assert run(tmp_path, **options).kept == 0


@pytest.mark.parametrize("objective", [search_options.Objective.ENERGY, search_options.Objective.ERROR])
def test_energy_and_error_cannot_be_predicted(
    workshop: type[FakeWorkshop], tmp_path: Path, objective: search_options.Objective
) -> None:
    with pytest.raises(UsageError, match="must be measured"):
        run(tmp_path, objective=objective)
