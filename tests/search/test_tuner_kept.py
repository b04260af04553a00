"""What a tune keeps and what it tries first, one problem at a time and several at once; the workshop is a fake."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernels
import pytest
import samples
from fake_workshop import SMALL, FakeWorkshop, run, workshop  # noqa: F401 - a fixture

from autoattn.cache import store
from autoattn.codegen import portfolio, search_space
from autoattn.core import triton_release
from autoattn.core.problem import Op
from autoattn.core.trial import Evidence
from autoattn.core.variant import Variant
from autoattn.errors import CacheError, UsageError
from autoattn.hardware import nvidia
from autoattn.search import problem_run, search_options, storage, tuner
from autoattn.search.shared_trials import Ledger, studies

pytestmark = pytest.mark.usefixtures("no_portfolio")  # what is tried first are the templates' seeds


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ("instant", "quick", 0),
        ("quick", "instant", 1),
        ("quick", "quick", 1),
        ("standard", "quick", 1),
        ("quick", "standard", 0),
        ("standard", "max", 0),
    ],
)
def test_an_entry_is_kept_unless_more_effort_is_asked_for(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, kept: int
) -> None:
    small = {
        effort: replace(profile, trials=3 + place)
        for place, (effort, profile) in enumerate(search_options.PROFILES.items())
    }
    monkeypatch.setattr(search_options, "PROFILES", small)
    run(tmp_path, effort=search_options.Effort(before), trials=None)
    assert run(tmp_path, effort=search_options.Effort(after), trials=None).kept == kept


@pytest.mark.parametrize("stale", ["search space", "source_digest", "triton"])
def test_an_entry_that_anything_changed_for_is_tuned_anew(
    workshop: type[FakeWorkshop], tmp_path: Path, stale: str
) -> None:
    entry = run(tmp_path).entries[SMALL.key]
    changes: dict[str, dict[str, Any]] = {
        "search space": {"search": replace(entry.search, spaces={"triton/forward": "0" * 16})},
        "source_digest": {"source_digest": "0" * 16},
        "triton": {"versions": {"triton": f"{triton_release.installed_release()}.99"}},
    }
    store.merge(tmp_path, samples.A30, Op.FORWARD, [replace(entry, **changes[stale])])
    summary = run(tmp_path)
    assert summary.kept == 0
    assert run(tmp_path).kept == 1


def test_a_prediction_is_measured_once_the_card_is_there(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    options = search_options.Options(effort=search_options.Effort.QUICK, trials=6, cache=tmp_path)
    tuner.tune([SMALL], samples.H200, measured=False, options=options)
    assert run(tmp_path, measured=True).kept == 0
    assert store.lookup(tmp_path, samples.H200, Op.FORWARD)[SMALL.key].evidence is Evidence.MEASURED


def test_a_prediction_never_takes_a_measurements_place(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    measured = run(tmp_path, measured=True).entries[SMALL.key]
    options = search_options.Options(effort=search_options.Effort.MAX, trials=12, cache=tmp_path)
    tuner.tune([SMALL], samples.H200, measured=False, options=options)
    entry = store.lookup(tmp_path, samples.H200, Op.FORWARD)[SMALL.key]
    assert (entry.evidence, entry.params) == (Evidence.MEASURED, measured.params)


def test_on_the_card_the_portfolio_and_the_seeds_are_tried_before_anything_else(
    workshop: type[FakeWorkshop], tmp_path: Path
) -> None:
    starters = portfolio.starters_for(SMALL, samples.H200)
    run(tmp_path, trials=len(starters), measured=True)
    assert {variant for _, variant in workshop.tried} == set(starters)


def test_without_the_card_the_default_is_tried_first(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    assert run(tmp_path, trials=1).entries[SMALL.key].variant == portfolio.default(SMALL, samples.A30)


def test_what_won_for_a_sister_problem_is_tried_for_the_next(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    sister = replace(SMALL, batch=5)
    points = search_space.load(kernels.TEMPLATE)

    def time_us(self: FakeWorkshop, variant: Variant) -> float:
        fits_both = points.why_infeasible(variant, SMALL, samples.A30) is None
        return 50.0 if fits_both and variant not in points.seeds_for(SMALL, samples.A30) else 500.0

    workshop.time_us = time_us  # type: ignore[method-assign]
    winner = run(tmp_path, sister, trials=40).entries[sister.key].variant
    assert winner not in points.seeds_for(SMALL, samples.A30)
    workshop.time_us = lambda self, variant: 50.0 if variant == winner else 500.0  # type: ignore[method-assign]
    summary = run(tmp_path, sister, SMALL, trials=20)
    assert summary.kept == 1
    assert summary.entries[SMALL.key].variant == winner


def test_ctrl_c_in_a_search_loses_no_trial_that_was_recorded(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    def stop(progress: search_options.Progress) -> None:
        if progress.tried == 4:
            raise KeyboardInterrupt

    options = search_options.Options(effort=search_options.Effort.QUICK, trials=10, cache=tmp_path)
    summary = tuner.tune([SMALL], samples.A30, measured=False, options=options, listen=stop)
    assert (summary.interrupted, summary.entries, summary.kernels) == (True, {}, 4)
    assert summary.written == ()
    assert not list(tmp_path.rglob("forward.json"))
    again = tuner.tune([SMALL], samples.A30, measured=False, options=options)
    assert not again.interrupted
    assert again.kernels == 6, "the first four are in the journal"
    assert again.entries[SMALL.key].search.trials == 10


def test_trials_of_a_shared_storage_leave_no_journal_and_are_known_to_the_next(
    workshop: type[FakeWorkshop], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    first = run(tmp_path / "here", trials=6, storage=url)
    second = run(tmp_path / "there", trials=6, storage=url)
    assert (first.kernels, second.kernels) == (6, 0)
    assert first.entries == second.entries
    assert sorted(tmp_path.rglob("*.journal")) == []


def test_what_another_process_tries_is_waited_for_and_tried_here_when_it_gives_up(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    names = []
    named = problem_run.study_name
    monkeypatch.setattr(
        problem_run, "study_name", lambda *facts, **kind: names.append(named(*facts, **kind)) or names[-1]
    )
    run(tmp_path / "none", trials=1, storage=url)
    points = search_space.load("triton/forward")
    other = Ledger(names[0], storage.server(url), points)
    (known,) = other.news().finished
    flying = [seed for seed in points.seeds_for(SMALL, samples.A30) if seed != known.variant][:2]
    assert all(other.claim(seed) for seed in flying)
    slept: list[float] = []
    really_sleep = tuner.time.sleep

    def sleep(seconds: float) -> None:
        if seconds != tuner.LISTEN_SECONDS:  # another thread of this process, which waits for something else
            really_sleep(seconds)
            return
        slept.append(seconds)
        if len(slept) == 2:
            other.finish(replace(known, variant=flying[0]), 1.0)
            other.leave()

    monkeypatch.setattr(tuner.time, "sleep", sleep)
    entry = run(tmp_path / "here", trials=4, storage=url).entries[SMALL.key]
    assert len(slept) == 2
    assert entry.search.trials == 4
    trials = [trial for study_trials in studies(storage.server(url)).values() for trial in study_trials]
    assert set(flying) <= {trial.variant for trial in trials}
    assert len(trials) == len({trial.variant for trial in trials}) == 4


def test_studies_of_two_cards_never_mix(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    """Neither two models, nor one model of which parts are switched off."""
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    options = search_options.Options(effort=search_options.Effort.QUICK, trials=4, cache=tmp_path, storage=url)
    cards = (samples.H200, samples.A30, replace(samples.H200, sm_count=66))
    for card in cards:
        assert tuner.tune([SMALL], card, measured=True, options=options).kernels == 4
        store.path_of(tmp_path, card, Op.FORWARD).unlink()
    tuner.tune([SMALL], samples.H200, measured=False, options=options)
    names = [name for name, trials in studies(storage.server(url)).items() if trials]
    kinds = {" ".join(name.split()[2:5]).rpartition("/")[0] for name in names}
    assert kinds == {
        "measured NVIDIA H200/sm_90/132sm",
        "measured NVIDIA H200/sm_90/66sm",
        "measured NVIDIA A30/sm_80/56sm",
        "predicted NVIDIA H200/sm_90/132sm",
    }


def test_each_card_that_is_such_a_device_measures_unless_fewer_are_asked_for(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "alike", lambda device: ("0", "3", "5"))
    seen = []
    init = workshop.__init__
    monkeypatch.setattr(
        workshop, "__init__", lambda self, *given, **named: seen.append(named["cards"]) or init(self, *given, **named)
    )
    for number in (None, 1, 3):
        run(tmp_path / str(number), measured=True, workers=number)
    run(tmp_path / "predicted")
    assert seen == [("0", "3", "5"), ("0",), ("0", "3", "5"), ()]
    with pytest.raises(
        UsageError, match=r"--workers must be at most the visible GPUs that are NVIDIA H200 \(3\), got 4"
    ):
        run(tmp_path / "many", measured=True, workers=4)


def test_a_damaged_cache_is_refused_before_anything_is_tried(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    path = store.path_of(tmp_path, samples.A30, Op.FORWARD)
    path.parent.mkdir(parents=True)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(CacheError, match="damaged"):
        run(tmp_path)
    assert sorted(tmp_path.rglob("*.journal")) == []


def test_the_listener_hears_of_every_problem_from_its_search_to_its_end(
    workshop: type[FakeWorkshop], tmp_path: Path
) -> None:
    heard: list[search_options.Progress] = []
    other = replace(SMALL, seq_q=128, seq_kv=128)
    workshop.fails = frozenset({other.key})
    options = search_options.Options(effort=search_options.Effort.QUICK, trials=3, cache=tmp_path)
    tuner.tune([SMALL, other], samples.H200, measured=True, options=options, listen=heard.append)
    phases = [(progress.index, progress.phase) for progress in heard]
    assert phases == [(0, "search")] * 3 + [(0, "final"), (0, "done")] + [(1, "search")] * 3 + [(1, "done")]
    assert [progress.tried for progress in heard[:3]] == [1, 2, 3]
    best = [progress.best_us for progress in heard[:5]]
    assert best == sorted(best, reverse=True), "it only falls"  # type: ignore[type-var]
    assert "ptxas said no" in heard[-1].detail
    heard.clear()
    tuner.tune([SMALL], samples.H200, measured=True, options=options, listen=heard.append)
    assert [progress.phase for progress in heard] == ["kept"]


LADDER = tuple(replace(SMALL, batch=batch) for batch in (1, 2, 3, 4))  # sister problems


def test_several_problems_are_searched_at_once_and_none_is_lost(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    heard: list[search_options.Progress] = []
    options = search_options.Options(effort=search_options.Effort.QUICK, trials=3, cache=tmp_path)
    workshop.many = 2
    summary = tuner.tune(LADDER, samples.H200, measured=True, options=options, listen=heard.append)
    assert list(summary.entries) == [problem.key for problem in LADDER]
    searched = [progress.index for progress in heard if progress.phase == "search"]
    assert searched[:4] == [0, 1, 0, 1], "two take turns"
    begun = {index: place for place, index in reversed(list(enumerate(progress.index for progress in heard)))}
    ended = {progress.index: place for place, progress in enumerate(heard) if progress.phase == "done"}
    assert all(begun[index] > ended[index - 2] for index in (2, 3)), "never three"
    assert store.read(summary.written[0]).entries.keys() == summary.entries.keys()


def test_who_is_learned_from_depends_on_the_order_of_the_problems_alone(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once: the third learns from the first whether or not the second has ended."""
    learned_from: list[list[str]] = []
    contest = problem_run.ProblemRun.contest
    monkeypatch.setattr(
        problem_run.ProblemRun,
        "contest",
        lambda self, relatives: (
            learned_from.append([relative.problem.key for relative in relatives]) or contest(self, relatives)
        ),
    )
    workshop.many = 2
    run(tmp_path, *LADDER, measured=True)
    keys = [problem.key for problem in LADDER]
    assert learned_from == [[], [], keys[:1], keys[:2]]


def test_without_the_card_a_kernel_is_a_trial_of_every_problem_of_its_kind_and_few_are_compiled(
    workshop: type[FakeWorkshop], tmp_path: Path
) -> None:
    workshop.time_us = lambda self, variant: 100.0  # type: ignore[method-assign]
    wider = replace(SMALL, seq_q=256, seq_kv=256)  # other seeds, the same kernels
    summary = run(tmp_path, SMALL, wider, trials=None)
    profile = search_options.PROFILES[search_options.Effort.QUICK]
    assert summary.kernels == len(workshop.tried) == profile.kernels + math.ceil(profile.sibling_kernels)
    assert {key for key, _ in workshop.tried} == {SMALL.key, wider.key}, "both propose"
    points = search_space.load(kernels.TEMPLATE)
    for problem in (SMALL, wider):
        fitting = [
            variant for _, variant in workshop.tried if points.why_infeasible(variant, problem, samples.A30) is None
        ]
        assert summary.entries[problem.key].search.trials == len(fitting) >= profile.kernels / 2


@pytest.mark.parametrize(("step", "more"), [(0.98, 1.0), (0.9, 1.5)])
def test_a_search_without_the_card_goes_on_while_what_it_draws_pays(
    workshop: type[FakeWorkshop], tmp_path: Path, step: float, more: float
) -> None:
    """Half as long again, at most."""
    times: dict[Variant, float] = {}
    workshop.time_us = lambda self, variant: times.setdefault(variant, 1e5 * step ** len(times))  # type: ignore[method-assign]
    profile = search_options.PROFILES[search_options.Effort.QUICK]
    assert run(tmp_path, trials=None).kernels == math.ceil(more * profile.kernels)


def test_a_problem_of_a_kind_that_has_an_entry_already_compiles_few_new_kernels(
    workshop: type[FakeWorkshop], tmp_path: Path
) -> None:
    workshop.time_us = lambda self, variant: 100.0  # type: ignore[method-assign]
    wider = replace(SMALL, seq_q=256, seq_kv=256)
    first = run(tmp_path, SMALL, trials=None)
    second = run(tmp_path, SMALL, wider, trials=None)
    profile = search_options.PROFILES[search_options.Effort.QUICK]
    assert (first.kernels, second.kept, second.kernels) == (profile.kernels, 1, 1 + math.ceil(profile.sibling_kernels))
    assert workshop.tried[profile.kernels][1] == first.entries[SMALL.key].variant, "its kernel comes first"


def test_ctrl_c_among_several_searches_gives_up_what_all_of_them_claimed(
    workshop: type[FakeWorkshop], tmp_path: Path
) -> None:
    workshop.many = 2
    workshop.interrupts = frozenset({LADDER[1].key})
    summary = run(tmp_path, *LADDER, measured=True)
    assert summary.interrupted
    workshop.interrupts = frozenset()
    again = run(tmp_path, *LADDER, measured=True)
    assert not again.interrupted
    assert len(again.entries) == 4


def test_without_trials_it_says_so(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    summary = run(tmp_path, trials=0)
    assert summary.failed == {
        SMALL.key: "the search was given no time or no trials; allow more with --trials or --timeout"
    }
    assert summary.written == ()
    assert not list(tmp_path.rglob("forward.json"))
