"""Simulated searches: a recording answers in place of compilers and a GPU, and shows whether a search is any good."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout_paths import BENCHMARKS
from rarely import rarely
from samples import A30, measurement, prediction, problem

from autoattn.cache import search_recording
from autoattn.cache.search_recording import NOT_RECORDED, Recording
from autoattn.codegen import search_space
from autoattn.core.trial import Evidence, Outcome, StaticReport, Trial
from autoattn.core.variant import Variant
from autoattn.errors import CacheError, UsageError
from autoattn.search import replay, storage
from autoattn.search.replay import Run
from autoattn.search.shared_trials import Ledger, journalled
from autoattn.search.study import DEFAULT, Sampler, Study

pytestmark = pytest.mark.sampled

RECORDINGS = BENCHMARKS / "data" / "recordings"
PATHS = sorted(RECORDINGS.rglob("*.jsonl"))
MEASURED = sorted((RECORDINGS / "measured").glob("*.jsonl"))
TEMPLATE = "triton/forward"


def variant(a: int, b: int) -> Variant:
    return Variant.of(TEMPLATE, {"a": a, "b": b})


def tried(variant: Variant) -> Trial:
    """A trial of the made-up grid: the time grows with a and b, and the corner is a crash."""
    a, b = int(variant["a"]), int(variant["b"])
    if (a, b) == (9, 9):
        return Trial(variant=variant, outcome=Outcome.CRASH, detail="the process died")
    return Trial(variant=variant, outcome=Outcome.OK, measurement=measurement(problem(), 100.0 + 10 * a + b))


def grid() -> Recording:
    trials = [tried(variant(a, b)) for a in range(10) for b in range(10)]
    return recorded(trials)


def recorded(trials: list[Trial], evidence: Evidence = Evidence.MEASURED) -> Recording:
    return search_recording.of_trials(
        trials, problem=problem(), device="a30", evidence=evidence, versions={"triton": "3.6.0"}, source="made up"
    )


class Worst:
    """A search that is broken on purpose: it proposes the slowest variant first."""

    def __init__(self, recording: Recording) -> None:
        slowest = sorted(recording.trials.values(), key=lambda trial: -(trial.time_us or math.inf))
        self._left: Iterator[Variant] = iter([trial.variant for trial in slowest])

    def propose(self) -> Variant | None:
        return next(self._left, None)

    def record(self, trial: Trial) -> None:
        pass


def runs(recording: Recording, sampler: Sampler, *, count: int, trials: int) -> list[Run]:
    return [
        replay.run(recording, replay.search_of(recording, sampler, seed=seed), trials=trials, window=8)
        for seed in range(count)
    ]


def reached(runs: list[Run], share: float) -> float:
    """The share of the runs that came so close to the best."""
    return statistics.fmean(run.trials_to(share) is not None for run in runs)


# A search


@pytest.mark.parametrize("sampler", list(Sampler))
def test_a_seed_gives_the_same_simulation(sampler: Sampler) -> None:
    recording = grid()
    first, again = (runs(recording, sampler, count=2, trials=30) for _ in range(2))
    assert first == again
    if sampler is not Sampler.ORDER:
        assert first[0] != first[1]


@pytest.mark.parametrize("sampler", list(Sampler))
def test_every_sampler_tries_every_recorded_variant_once_and_then_stops(sampler: Sampler) -> None:
    recording = recorded([tried(variant(a, b)) for a in range(5) for b in range(5) if a != b])
    run = replay.run(recording, replay.search_of(recording, sampler, seed=0), trials=100, window=4)
    assert sorted(run.times_us) == sorted(
        trial.time_us for trial in recording.trials.values() if trial.time_us is not None
    )


def test_a_search_is_told_what_was_recorded_failures_too() -> None:
    recording = grid()
    search = replay.search_of(recording, Sampler.ORDER, seed=0)
    run = replay.run(recording, search, trials=100)
    assert search.trials == recording.trials
    assert search.trials[variant(9, 9)].outcome is Outcome.CRASH
    assert run.times_us[-1] == math.inf
    assert run.times_us[:3] == (100.0, 101.0, 102.0)


def test_what_was_not_recorded_is_infeasible() -> None:
    recording = grid()
    outside = Variant.of(TEMPLATE, {"a": 1, "b": 10})
    assert recording.space.why_infeasible(outside, recording.header.problem, A30) == NOT_RECORDED
    search = replay.search_of(recording, Sampler.ORDER, seed=0, seeds=[outside, variant(4, 4)])
    assert search.propose() == variant(4, 4)


def test_results_come_late_when_proposals_fly() -> None:
    recording = grid()
    counts: list[int] = []

    class Counting:
        """Proposes in order and notes how many it was told of at each proposal."""

        heard = 0
        left = iter(recording.trials)

        def propose(self) -> Variant | None:
            counts.append(self.heard)
            return next(self.left)

        def record(self, trial: Trial) -> None:
            self.heard += 1

    replay.run(recording, Counting(), trials=6, window=3)
    assert counts == [0, 0, 0, 1, 2, 3]


def test_a_run_says_how_many_trials_it_needed_and_what_it_missed() -> None:
    run = Run(best_us=100.0, times_us=(math.inf, 150.0, 104.0, 101.0))
    assert run.trials_to(0.05) == 3
    assert run.trials_to(0.02) == 4
    assert run.trials_to(0.001) is None
    assert run.regret(1) == math.inf
    assert run.regret(2) == pytest.approx(0.5)
    assert run.regret(64) == pytest.approx(0.01)


# The search that autoattn tune runs, on what was recorded


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem.split("_")[3])
def test_a_search_that_proposes_the_worst_is_seen(path: Path) -> None:
    recording = search_recording.read(path)
    broken = replay.run(recording, Worst(recording), trials=64, window=8)
    assert broken.trials_to(0.05) is None
    assert broken.regret(64) > max(run.regret(64) for run in runs(recording, DEFAULT, count=5, trials=64))


def test_there_are_recordings_of_both_kinds_apart() -> None:
    assert {path.parent.name for path in PATHS} == {evidence.value for evidence in Evidence}
    for path in PATHS:
        assert search_recording.read(path).header.evidence.value == path.parent.name


@pytest.mark.parametrize("count", rarely([10, 20], lambda count: count == 10))
@pytest.mark.parametrize(
    "path",
    rarely(PATHS, lambda path: path.parent.name == Evidence.MEASURED.value),
    ids=lambda path: f"{path.parent.name}-{'-'.join(path.stem.split('_')[3:6])}",
)
def test_the_default_search_comes_within_five_percent_of_the_recorded_best(path: Path, count: int) -> None:
    """Without seeds, as for a card that nobody tuned on; the numbers of trials are those of the efforts."""
    simulations = runs(search_recording.read(path), DEFAULT, count=count, trials=64)
    assert reached(simulations, 0.05) >= 0.9


# Recordings as files


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    recording = grid()
    search_recording.write(recording, tmp_path / "folder" / "one.jsonl")
    assert search_recording.read(tmp_path / "folder" / "one.jsonl") == recording
    assert len((tmp_path / "folder" / "one.jsonl").read_text().splitlines()) == 101


def test_a_journal_becomes_a_recording_that_replays_to_the_same_times(tmp_path: Path) -> None:
    shipped = search_space.load(TEMPLATE)
    journal = tmp_path / "one.journal"
    study = Study(Ledger("a study", storage.journal(journal), shipped), shipped, problem(), A30, seed=3, budget=0)
    order = []
    for number in range(25):
        proposed = study.propose()
        assert proposed is not None
        order.append(proposed)
        outcome = Outcome.TIMEOUT if number % 7 == 3 else Outcome.OK
        time_us = measurement(problem(), 300.0 + 17.5 * (number * 11 % 25)) if outcome is Outcome.OK else None
        study.record(Trial(variant=proposed, outcome=outcome, measurement=time_us, prediction=prediction(7.0)))
    assert list(journalled(journal)) == ["a study"]
    recording = replay.of_journal(journal, "a study", problem=problem(), device="a30", versions={"triton": "3.6.0"})
    assert recording.header.evidence is Evidence.MEASURED
    search_recording.write(recording, tmp_path / "made.jsonl")
    read = search_recording.read(tmp_path / "made.jsonl")
    search = replay.search_of(read, Sampler.TPE, seed=0, seeds=order)
    run = replay.run(read, search, trials=100)
    times = [trial.time_us for trial in study.trials.values()]
    assert run.times_us == tuple(math.inf if time_us is None else time_us for time_us in times)
    assert [trial.outcome for trial in search.trials.values()] == [trial.outcome for trial in study.trials.values()]


def test_a_journal_without_the_study_names_those_it_has(tmp_path: Path) -> None:
    journal = tmp_path / "one.journal"
    Ledger("there", storage.journal(journal), grid().space)
    with pytest.raises(UsageError, match="'missing', got there"):
        replay.of_journal(journal, "missing", problem=problem(), device="a30", versions={})
    with pytest.raises(CacheError, match="must be a file"):
        replay.of_journal(tmp_path / "none.journal", "there", problem=problem(), device="a30", versions={})
    assert not (tmp_path / "none.journal").exists()


def test_measured_and_predicted_times_are_not_mixed() -> None:
    guess = Trial(variant=variant(1, 1), outcome=Outcome.OK, prediction=prediction(5.0))
    with pytest.raises(UsageError, match="keep the two apart"):
        recorded([tried(variant(2, 2)), guess])
    with pytest.raises(UsageError, match="keep the two apart"):
        recorded([tried(variant(2, 2)), guess], Evidence.PREDICTED)


def test_a_recording_of_nothing_or_of_two_templates_is_refused() -> None:
    with pytest.raises(UsageError, match="a variant that worked"):
        recorded([tried(variant(9, 9))])
    other = Variant.of("gluon/forward", {"a": 1, "b": 1})
    with pytest.raises(UsageError, match="one template"):
        recorded([tried(variant(1, 1)), tried(other)])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: [], "line 1"),
        (lambda lines: [lines[0].replace(b'"recording":1', b'"recording":2'), *lines[1:]], "its format is 2"),
        (lambda lines: [*lines[:5], b"{", *lines[5:]], "line 6"),
        (lambda lines: [*lines, lines[-2]], "stands a second time"),
        (lambda lines: [*lines[:-1], lines[-1].replace(b"crash", b"ok")], "the time None"),
        (lambda lines: [*lines[:-1], lines[-1].replace(b"null", b"4.0")], "the time 4.0"),
        (lambda lines: [*lines[:-1], lines[-1].replace(b'"a"', b'"z"')], "other parameters"),
        (lambda lines: [*lines[:-2], lines[-2].replace(b'"ok"', b'"fine"'), lines[-1]], "line 100"),
    ],
)
def test_a_damaged_recording_is_named_with_its_line(tmp_path: Path, damage: object, words: str) -> None:
    path = tmp_path / "one.jsonl"
    search_recording.write(grid(), path)
    path.write_bytes(b"\n".join(damage(path.read_bytes().splitlines())))  # type: ignore[operator]
    with pytest.raises(UsageError) as caught:
        search_recording.read(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl must be a recording"):
        search_recording.read(tmp_path / "none.jsonl")


def test_what_the_machine_code_says_is_kept_only_where_it_is_asked_for(tmp_path):
    report = StaticReport(
        digest="d", arch=90, registers=168, spilled_bytes=8, shared_bytes=1024, num_warps=4, code_bytes=64,
        loop={"HGMMA": 4}, masked_loop={"FSEL": 2},
    )  # fmt: skip
    trials = [Trial(variant=variant(1, 1), outcome=Outcome.OK, report=report, measurement=measurement(problem(), 5.0))]
    facts: dict[str, Any] = {
        "problem": problem(), "device": "a30", "evidence": Evidence.MEASURED, "versions": {}, "source": "made up",
    }  # fmt: skip
    for reports, expected in ((True, report), (False, None)):
        search_recording.write(search_recording.of_trials(trials, **facts, reports=reports), tmp_path / "one.jsonl")
        assert search_recording.read(tmp_path / "one.jsonl").trials[variant(1, 1)].report == expected
    assert "report" not in (tmp_path / "one.jsonl").read_text()
