"""Studies: which variant comes next, and what is remembered when the tuner is killed."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import pytest
from samples import A30, prediction, problem
from study_trials import SPACE, failed, trial, variant

from autoattn.codegen import search_space
from autoattn.codegen.search_space import Requirement
from autoattn.codegen.space_rules import Rule
from autoattn.core.trial import Outcome, StaticReport, Trial
from autoattn.core.variant import Variant
from autoattn.errors import CacheError
from autoattn.search import storage, study
from autoattn.search.shared_trials import Ledger
from autoattn.search.study import BAD, STARTUP, Arithmetic, Study

TEMPLATE = "triton/forward"
# 6 x 5 x 4 = 120 points, 60 of which are feasible.
FEASIBLE = set(SPACE.feasible(problem(), A30))


@pytest.fixture
def open_study(tmp_path: Path) -> Callable[..., Study]:
    def opened(**changes: Any) -> Study:
        facts: dict[str, Any] = {"space": SPACE, "problem": problem(), "device": A30, "seed": 0, "budget": 24}
        facts |= changes
        journal = facts.pop("journal", tmp_path / "studies" / "forward.journal")
        return Study(Ledger(facts.pop("name", "one"), storage.journal(journal), facts["space"]), **facts)

    return opened


def arithmetic(
    least_us: Callable[[Variant], float], expected_us: Callable[[Variant], float] | None = None
) -> Arithmetic:
    """What the study is told of times; it expects the least where nothing else is said."""
    return Arithmetic(least_us=least_us, expected_us=expected_us or least_us)


def search(searched_study: Study, count: int, outcome: Callable[[Variant], Trial] = trial) -> list[Variant]:
    """Proposes and records, one after the other."""
    proposals = []
    for _ in range(count):
        proposed = searched_study.propose()
        if proposed is None:
            break
        proposals.append(proposed)
        searched_study.record(outcome(proposed))
    return proposals


# What comes next


def test_the_space_of_these_tests_is_what_they_believe() -> None:
    assert len(FEASIBLE) == 60


@pytest.mark.parametrize("sampled", [10, 40])
def test_a_seed_gives_the_same_proposals(open_study: Callable[..., Study], tmp_path: Path, sampled: int) -> None:
    runs = [
        search(open_study(journal=tmp_path / f"{place}.journal", seed=seed), STARTUP + sampled)
        for place, seed in enumerate((7, 7, 8))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_the_queue_comes_first_in_its_order(open_study: Callable[..., Study]) -> None:
    new_study = open_study()
    queue = [variant(4, 4), variant(2, 2), variant(3, 1, "z")]
    new_study.enqueue(queue)
    assert search(new_study, 3) == queue


def test_the_queue_takes_each_variant_once_and_none_that_is_known_or_infeasible(
    open_study: Callable[..., Study],
) -> None:
    new_study = open_study()
    new_study.enqueue([variant(2, 2)])
    assert search(new_study, 1) == [variant(2, 2)]
    new_study.enqueue([variant(2, 2), variant(1, 2), variant(4, 4), variant(4, 4), variant(2, 4)])
    assert search(new_study, 2) == [variant(4, 4), variant(2, 4)]
    proposed = new_study.propose()
    assert proposed is not None
    new_study.enqueue([proposed])
    assert new_study.propose() != proposed


def test_what_arithmetic_bounds_above_the_best_time_is_left_out_and_counted(open_study: Callable[..., Study]) -> None:
    """Before there is a time nothing is; what another problem's search tried all the same is no longer left out."""
    new_study = open_study(arithmetic=arithmetic(lambda of: 10.0 * int(of["a"])))
    slow, also, best, fast = variant(6, 4), variant(5, 3), variant(2, 2), variant(1, 1)
    new_study.enqueue([slow, best, also, fast])
    assert search(new_study, 3) == [slow, best, fast]
    assert [*new_study.too_slow] == [also]
    assert new_study.too_slow[also].outcome is Outcome.TOO_SLOW
    assert also not in new_study.trials
    assert new_study.taken == 3, "arithmetic costs no trial"
    new_study.record(trial(also))
    assert not new_study.too_slow
    assert also in new_study.trials


def test_what_cannot_be_the_fastest_is_left_out_whatever_its_bound(open_study: Callable[..., Study]) -> None:
    new_study = open_study(arithmetic=arithmetic(lambda of: 0.0, lambda of: math.inf if int(of["a"]) > 2 else 1.0))
    new_study.enqueue([variant(2, 2), variant(6, 4), variant(1, 1)])
    assert search(new_study, 2) == [variant(2, 2), variant(1, 1)]
    assert [*new_study.too_slow] == [variant(6, 4)]


def test_after_what_was_enqueued_comes_what_is_expected_to_be_fastest_of_the_offered_and_of_random_ones(
    open_study: Callable[..., Study],
) -> None:
    new_study = open_study(arithmetic=arithmetic(lambda of: 0.0, lambda of: float(int(of["b"]) != 4)))
    new_study.enqueue([variant(2, 2), variant(6, 2)])
    new_study.offer([variant(4, 2), variant(6, 4)])
    proposals = search(new_study, 4)
    assert proposals[:3] == [variant(2, 2), variant(6, 2), variant(6, 4)]
    assert proposals[3]["b"] == 4, "drawn at random, of those that are expected to be as fast"
    assert variant(4, 2) not in proposals


def test_what_was_offered_goes_before_random_ones_that_are_expected_to_be_as_fast(
    open_study: Callable[..., Study],
) -> None:
    new_study = open_study(arithmetic=arithmetic(lambda of: 1.0))
    new_study.offer([variant(6, 4), variant(4, 4)])
    assert search(new_study, 2) == [variant(6, 4), variant(4, 4)]


def test_a_study_promises_what_arithmetic_leaves_to_gain(open_study: Callable[..., Study]) -> None:
    new_study = open_study(arithmetic=arithmetic(lambda of: 1.0 + int(of["b"])))
    new_study.enqueue([variant(4, 4)])
    search(new_study, 1)
    assert new_study.promise == 44.0, "the best takes 44 us, and the least that another one may take is 1"
    assert open_study(name="other").promise == 0.0, "nothing bounds it"
    free = open_study(name="free", arithmetic=arithmetic(lambda of: 0.0))
    assert free.promise == 0.0


def test_startup_is_random_and_then_the_sampler_takes_over(
    open_study: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_study = open_study()
    counts = []
    ask = new_study.optuna_study.ask
    monkeypatch.setattr(
        new_study.optuna_study, "ask", lambda *facts: counts.append(len(new_study.trials)) or ask(*facts)
    )
    new_study.enqueue([variant(4, 4), variant(2, 2)])
    search(new_study, STARTUP + 5)
    assert [*dict.fromkeys(counts)] == [STARTUP, STARTUP + 1, STARTUP + 2, STARTUP + 3, STARTUP + 4]


def test_the_sampler_learns_what_is_fast(open_study: Callable[..., Study], tmp_path: Path) -> None:
    """What it proposes is faster than what chance proposes, on average over studies."""

    def mean(variants: list[Variant]) -> float:
        times = [trial(point).time_us for point in variants]
        return sum(time_us for time_us in times if time_us is not None) / len(times)

    chance = mean(list(FEASIBLE))
    runs = [search(open_study(journal=tmp_path / f"{seed}", seed=seed), STARTUP + 12) for seed in range(4)]
    assert mean([point for run in runs for point in run[STARTUP:]]) < 0.9 * chance


@pytest.mark.parametrize("outcome", [trial, failed])
def test_nothing_infeasible_and_nothing_twice_is_proposed(
    open_study: Callable[..., Study], outcome: Callable[[Variant], Trial]
) -> None:
    new_study = open_study()
    proposals = search(new_study, 100, outcome)
    assert set(proposals) == FEASIBLE
    assert len(proposals) == len(FEASIBLE)


def test_every_feasible_variant_is_found_before_there_is_none(
    open_study: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "ATTEMPTS", 1)  # luck finds few, the walk all
    new_study = open_study()
    assert set(search(new_study, 100)) == FEASIBLE
    assert new_study.propose() is None


def test_what_is_in_flight_is_not_proposed_again(open_study: Callable[..., Study]) -> None:
    new_study = open_study()
    search(new_study, STARTUP)
    flying = [new_study.propose() for _ in range(20)]
    assert len(set(flying)) == 20
    for proposed in flying:
        assert proposed is not None
        new_study.record(trial(proposed))
    assert len(new_study.trials) == STARTUP + 20


def test_a_small_space_is_searched_whole_in_the_files_order(open_study: Callable[..., Study]) -> None:
    new_study = open_study(budget=60)
    new_study.enqueue([variant(6, 4)])
    proposals = search(new_study, 100)
    assert proposals[0] == variant(6, 4)
    assert proposals[1:] == [point for point in SPACE.feasible(problem(), A30) if point != variant(6, 4)]
    assert new_study.propose() is None


def test_a_space_without_feasible_variants_proposes_nothing(open_study: Callable[..., Study]) -> None:
    never = Requirement(rule=Rule("1 == 2"), because="never")
    empty = replace(SPACE, require=(never,))
    new_study = open_study(space=empty)
    new_study.enqueue([variant(2, 2)])
    assert new_study.propose() is None


def test_refused_proposals_are_counted_by_their_reason(open_study: Callable[..., Study]) -> None:
    new_study = open_study()
    search(new_study, 50)
    assert set(new_study.refused) == {"the sum of a and b must be even (needs sum % 2 == 0)"}
    assert new_study.refused.popitem()[1] > 0


def test_a_failure_is_told_as_bad(open_study: Callable[..., Study]) -> None:
    new_study = open_study()
    assert study.value_of(failed(variant(2, 2))) == BAD
    assert study.value_of(trial(variant(2, 2), math.nan)) == BAD
    assert study.value_of(trial(variant(2, 2), 5.0)) == 5.0
    new_study.record(trial(variant(2, 2), math.nan))
    new_study.record(trial(variant(4, 4), math.inf))
    search(new_study, 15, failed)
    assert len(open_study().trials) == 17


def test_a_variant_that_nobody_proposed_is_remembered(open_study: Callable[..., Study]) -> None:
    new_study = open_study()
    new_study.record(trial(variant(2, 2)))
    assert variant(2, 2) not in search(new_study, 100)


def test_the_shipped_space_can_be_studied(open_study: Callable[..., Study]) -> None:
    shipped = search_space.load(TEMPLATE)
    new_study = open_study(space=shipped)
    seeds = shipped.seeds_for(problem(), A30)
    new_study.enqueue(seeds)

    def outcome(proposed: Variant) -> Trial:
        return trial_of_shipped(proposed)

    proposals = search(new_study, len(seeds) + STARTUP + 6, outcome)
    assert proposals[: len(seeds)] == seeds
    assert all(shipped.why_infeasible(proposed, problem(), A30) is None for proposed in proposals)
    assert list(open_study(space=shipped).trials) == proposals


def trial_of_shipped(proposed: Variant) -> Trial:
    report = StaticReport(
        digest="0" * 16,
        arch=80,
        registers=128,
        spilled_bytes=0,
        shared_bytes=0,
        num_warps=4,
        code_bytes=1,
        loop={"A": 1},
    )
    return Trial(variant=proposed, outcome=Outcome.OK, digest="0" * 16, report=report, prediction=prediction())


# What is remembered


def test_a_study_on_the_same_journal_goes_on(open_study: Callable[..., Study]) -> None:
    first = open_study()
    proposals = search(first, 20, lambda proposed: failed(proposed) if int(proposed["b"]) == 2 else trial(proposed))
    again = open_study()
    assert again.trials == first.trials
    assert list(again.trials) == proposals
    assert any(trial.outcome is Outcome.CRASH for trial in again.trials.values())
    more = search(again, 100)
    assert not set(more) & set(proposals)
    assert set(more) | set(proposals) == FEASIBLE
    assert open_study().trials == again.trials
    assert open_study().propose() is None


def test_a_resumed_exhaustive_search_tries_only_the_rest(open_study: Callable[..., Study]) -> None:
    proposals = search(open_study(budget=60), 25)
    rest = search(open_study(budget=60), 100)
    assert proposals + rest == list(SPACE.feasible(problem(), A30))


def test_what_was_proposed_but_not_recorded_is_proposed_again(open_study: Callable[..., Study]) -> None:
    first = open_study()
    first.enqueue([variant(2, 2)])
    assert first.propose() == variant(2, 2)
    first.close()
    again = open_study()
    assert again.trials == {}
    again.enqueue([variant(2, 2)])
    assert again.propose() == variant(2, 2)


def test_studies_share_a_journal_and_know_nothing_of_each_other(open_study: Callable[..., Study]) -> None:
    first, second = open_study(name="one"), open_study(name="other")
    for _ in range(5):
        search(first, 1)
        search(second, 1, failed)
    assert len(open_study(name="one").trials) == len(open_study(name="other").trials) == 5
    assert {trial.outcome for trial in open_study(name="other").trials.values()} == {Outcome.CRASH}


def test_a_relative_journal_stays_where_it_was_named_when_the_program_changes_its_folder(
    open_study: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    study = open_study(journal=Path("here") / "j.journal")
    search(study, 3)
    monkeypatch.chdir(elsewhere)
    search(study, 2)
    assert len(open_study(journal=tmp_path / "here" / "j.journal").trials) == 5
    assert list(elsewhere.iterdir()) == []


def test_a_lock_file_that_a_killed_tuner_left_stops_nobody(open_study: Callable[..., Study], tmp_path: Path) -> None:
    search(open_study(), 1)
    (tmp_path / "studies" / "forward.journal.lock").write_text("")
    assert search(open_study(), 3)
    assert len(open_study().trials) == 4


# A journal that a power cut or a person damaged


@pytest.fixture
def journal(open_study: Callable[..., Study], tmp_path: Path) -> Path:
    """A journal of one study with 6 trials."""
    search(open_study(), 6)
    return tmp_path / "studies" / "forward.journal"


@pytest.mark.parametrize(("lost", "left"), [(1, 6), (2, 6), (30, 6), (400, 5)])
def test_a_cut_off_journal_loses_one_trial_at_most(
    open_study: Callable[..., Study], journal: Path, lost: int, left: int
) -> None:
    journal.write_bytes(journal.read_bytes()[:-lost])
    assert len(open_study().trials) == left
    search(open_study(), 3)
    again = open_study()
    assert len(again.trials) == left + 3
    assert all(json.loads(line) for line in journal.read_bytes().splitlines())


@pytest.mark.parametrize("tail", [b"\0" * 100, b"\0\n", b"{", b'{"op_code":4', b"\xff\xfe", b"\xff\xfe\n", b"{\n"])
def test_a_torn_tail_loses_no_trial(open_study: Callable[..., Study], journal: Path, tail: bytes) -> None:
    whole = journal.read_bytes()
    journal.write_bytes(whole + tail)
    assert len(open_study().trials) == 6
    assert journal.read_bytes().startswith(whole)
    search(open_study(), 2)
    assert len(open_study().trials) == 8


def test_a_journal_cut_off_anywhere_opens(open_study: Callable[..., Study], journal: Path) -> None:
    whole = journal.read_bytes()
    for end in range(0, len(whole), 197):
        journal.write_bytes(whole[:end])
        outcomes = sum(line.endswith(b"}\n") and b'"user_attr"' in line for line in whole[:end].splitlines(True))
        assert len(open_study().trials) == outcomes
        search(open_study(), 1)
        assert len(open_study().trials) == outcomes + 1


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(CacheError) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0], lines[1], b"garbage\n", *lines[2:]],
        lambda lines: [lines[0], b"\xff\xfe\n", *lines[1:]],
        lambda lines: [lines[0], lines[1][:40] + b"\n", *lines[2:]],
        lambda lines: [lines[0], b"[]\n", *lines[1:]],
        lambda lines: [lines[0], b'{"op_code":99}\n', *lines[1:]],
        lambda lines: [lines[0], b'{"op_code":4}\n', *lines[1:]],
        lambda lines: [b"words of somebody else\n", b"and no journal"],
        lambda lines: [b"words"],
        lambda lines: [b"\0" * 100],
        lambda lines: [*lines, b"[" * 100_000 + b"\n"],
        lambda lines: [line.replace(b'"variant"', b'"weird"') for line in lines],
        lambda lines: [line.replace(b'"trial"', b'"weird"') for line in lines],
        lambda lines: [line.replace(b'"outcome":"ok"', b'"outcome":"fine"') for line in lines],
        lambda lines: [line.replace(b'["c","', b'["d","') for line in lines],
        lambda lines: [line.replace(b'["b",', b'["b",9') for line in lines],
    ],
)
def test_a_damaged_journal_is_named_and_left_alone(
    open_study: Callable[..., Study], journal: Path, damage: Callable[[list[bytes]], list[bytes]]
) -> None:
    before = b"".join(damage(journal.read_bytes().splitlines(keepends=True)))
    assert before != journal.read_bytes()
    journal.write_bytes(before)
    message = refusal(open_study)
    assert f"{journal} is damaged" in message
    assert "remove it to start anew" in message
    assert journal.read_bytes().startswith(before)  # Optuna may have noted that it opened a study
    journal.unlink()
    assert open_study().trials == {}


def test_a_journal_below_a_regular_file_is_refused(open_study: Callable[..., Study], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("words")
    message = refusal(lambda: open_study(journal=tmp_path / "file" / "studies" / "j"))
    assert "must be writable" in message
    assert "--cache DIR" in message


def test_a_folder_in_place_of_the_journal_is_refused(open_study: Callable[..., Study], tmp_path: Path) -> None:
    assert "must be writable" in refusal(lambda: open_study(journal=tmp_path))


def test_a_full_disk_is_named_and_costs_one_trial(
    open_study: Callable[..., Study], journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_study = open_study()
    proposed = new_study.propose()
    assert proposed is not None

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        message = refusal(lambda: new_study.record(trial(proposed)))
    assert "No space left on device" in message
    with journal.open("ab") as file:
        file.write(b'{"op_code":4,"half')
    assert len(open_study().trials) in (6, 7)  # as much of it as came to the disk


def test_a_journal_that_is_held_is_named(
    open_study: Callable[..., Study], journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "LOCK_SECONDS", 0.05)
    with filelock.FileLock(f"{journal}.lock"):
        assert "another process holds it" in refusal(open_study)


def test_any_order_of_outcomes_can_be_recorded(open_study: Callable[..., Study], tmp_path: Path) -> None:
    for number, order in enumerate(itertools.permutations(range(3))):
        new_study = open_study(journal=tmp_path / f"{number}.journal")
        flying = [new_study.propose() for _ in range(3)]
        for place in order:
            proposed = flying[place]
            assert proposed is not None
            new_study.record(trial(proposed))
        assert set(new_study.trials) == set(flying)
