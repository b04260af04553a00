"""The tuner without a GPU: a real small run, and its rules with a workshop that only pretends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import kernels
import pytest
import samples

from autoattn import cache, contest, finals, gpu, plan, raw, render, space, storage, tune
from autoattn.device import Device
from autoattn.entry import KERNEL, Rival, WorstCase
from autoattn.errors import CacheError, UsageError
from autoattn.jobs import Finished, finalist_name
from autoattn.ledger import Ledger, studies
from autoattn.mask import Mask
from autoattn.problem import DType, Layout, Op, Precision, Problem
from autoattn.rounds import Round
from autoattn.study import Study
from autoattn.trial import Energy, Evidence, Outcome, Trial, Verdict
from autoattn.variant import Variant
from autoattn.workers import Failure
from autoattn.workshop import Steps

OTHER_SPACE = {"triton/forward": "0" * 16}
SMALL = Problem(
    dtype=DType.FLOAT16, batch=1, heads_q=2, heads_kv=1, seq_q=64, seq_kv=64, head_dim=16, mask=Mask.parse("causal")
)
GOOD = Verdict(ok=True, checks=10, max_error=1e-3, rms_error=1e-4, allowed=4e-3)


def rounds_of(times: dict[str, float], count: int = 40) -> tuple[Round, ...]:
    """Rounds without any noise."""
    return tuple(Round(times_us=dict(times)) for _ in range(count))


class Pretended:
    """A workshop in which every variant works and the smaller tile is the faster one."""

    fails: frozenset[str] = frozenset()  # problem keys whose variants all fail
    interrupts: frozenset[str] = frozenset()
    many: int = 1  # problems at once
    rivals: tuple[Rival, ...] = ()
    finals: ClassVar[list[list[Variant]]] = []  # the finalists of each problem
    asked: ClassVar[list[dict[str, Any]]] = []  # what else the finals were asked
    outgrown: ClassVar[list[tuple[Variant, int]]] = []  # whose worst case was asked for, with the seed
    tried: ClassVar[list[tuple[str, Variant]]] = []  # problem keys and variants, in order

    def __init__(self, device: Any, *, measured: bool, jobs: int | None = None, cards: Sequence[str] = ()) -> None:
        self.measured = measured
        self.outcomes: dict[Outcome, int] = {}
        self.kernels = self.begun = 0
        self.busy_seconds, self.finals_seconds = (0.0, 0.0), 0.0
        self.idle = True
        self._known: set[str] = set()  # digests

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def at_once(self, problem: Problem) -> int:
        return self.many

    def wait(self) -> None:
        pass

    def search(
        self,
        study: Study,
        *,
        budget: int,
        more: Callable[[int, int], bool],
        late: Callable[[], bool],
        heard: Callable[[Trial], None],
    ) -> Steps[None]:
        if study.problem.key in self.interrupts:
            raise KeyboardInterrupt
        begun = kernels = 0
        while more(begun, kernels) and (variant := study.propose()) is not None:
            self.tried.append((study.problem.key, variant))
            digest = render.render(study.problem, variant).digest
            begun, kernels = begun + 1, kernels + (digest not in self._known)
            self._known.add(digest)
            self.kernels = self.begun = self.kernels + 1
            time_us = self.time_us(variant)
            trial = Trial(
                variant=variant,
                outcome=Outcome.OK,
                digest=digest,
                prediction=samples.prediction(time_us),
                verdict=GOOD if self.measured else None,
                measurement=samples.measurement(study.problem, time_us) if self.measured else None,
            )
            if study.problem.key in self.fails:
                trial = Trial(variant=variant, outcome=Outcome.COMPILE_ERROR, detail="ptxas said no")
            study.record(trial)
            heard(trial)
            yield

    def rehearse(self, problem: Problem, variant: Any) -> Verdict | Failure:
        return GOOD

    def final(self, problem: Problem, variants: list[Any], **budgets: Any) -> Steps[Finished | Failure]:
        yield
        return self.finished(problem, variants, **budgets)

    def finished(self, problem: Problem, variants: list[Any], **budgets: Any) -> Finished | Failure:
        self.finals.append(variants)
        self.asked.append(budgets)
        times = [samples.measurement(problem, self.time_us(one)) for one in variants]
        named = {finalist_name(place): one.median_us for place, one in enumerate(times)}
        named |= {rival.name: rival.measurement.median_us for rival in self.rivals}
        return Finished(
            verdicts=(GOOD,) * len(variants),
            measurements=tuple(times),
            rivals=self.rivals,
            rounds=rounds_of(named),
            energies=tuple(Energy(joules=self.joules(one), watts=500.0) for one in variants),
        )

    def outgrow(self, problem: Problem, variant: Variant, *, seed: int) -> Steps[WorstCase | Failure]:
        yield
        return self.computed_twice(problem, variant, seed=seed)

    def computed_twice(self, problem: Problem, variant: Variant, *, seed: int) -> WorstCase | Failure:
        self.outgrown.append((variant, seed))
        return WorstCase(
            median_us=2.5 * self.time_us(variant), slowdown=2.5, rounds=7, max_error=2e-3, tiles=64, redone=63
        )

    def joules(self, variant: Variant) -> float:
        return self.time_us(variant)

    def time_us(self, variant: Variant) -> float:
        return float(int(variant["BLOCK_M"]) + int(variant["BLOCK_N"]))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> type[Pretended]:
    fresh = type("Fresh", (Pretended,), {"finals": [], "asked": [], "outgrown": [], "tried": []})
    monkeypatch.setattr(tune, "Workshop", fresh)
    return fresh


def run(folder: Path, *problems: Problem, measured: bool = False, **changes: Any) -> plan.Summary:
    options = plan.Options(**{"effort": plan.Effort.QUICK, "trials": 6, "cache": folder, "jobs": 2, **changes})
    device = samples.H200 if measured else samples.A30
    return tune.tune(list(problems) or [SMALL], device, measured=measured, options=options)


def rival(name: str, time_us: float, max_error: float | None = 1e-3) -> Rival:
    return Rival(name=name, measurement=samples.measurement(SMALL, time_us), max_error=max_error)


@pytest.mark.slow
def test_a_real_run_without_the_card_gives_a_predicted_entry_and_resumes(tmp_path: Path) -> None:
    summary = run(tmp_path, trials=3)
    entry = summary.entries[SMALL.key]
    assert (entry.evidence, entry.verdict, entry.measurement) == (Evidence.PREDICTED, None, None)
    assert entry.report is not None
    assert entry.report.registers > 0
    assert summary.kernels == 3
    assert cache.read(summary.path).entries[SMALL.key].params == entry.params
    again = run(tmp_path, trials=3)
    assert (again.kept, again.kernels) == (1, 0)


def test_the_same_seed_gives_the_same_entry(pretended: type[Pretended], tmp_path: Path) -> None:
    one, other = (run(tmp_path / name, trials=30, seed=5).entries[SMALL.key] for name in ("a", "b"))
    assert replace(one, versions={}) == replace(other, versions={})


def test_more_trials_go_on_where_the_last_run_stopped(pretended: type[Pretended], tmp_path: Path) -> None:
    run(tmp_path, trials=6)
    summary = run(tmp_path, trials=10)
    assert summary.kept == 0
    assert summary.entries[SMALL.key].search.trials == 10
    assert summary.kernels == 4


def test_an_entry_of_another_template_text_is_tuned_anew(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    monkeypatch.setattr("autoattn.cache._rendered", lambda problem, variant: "another")
    assert run(tmp_path).kept == 0


def test_an_entry_outlives_a_change_of_the_template_that_leaves_its_own_text_alone(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    monkeypatch.setattr("autoattn.render.template_digest", lambda template: "another")
    assert run(tmp_path).kept == 1


def test_an_entry_of_another_search_space_is_tuned_anew_and_its_variants_are_not_tried(
    pretended: type[Pretended], tmp_path: Path
) -> None:
    entry = run(tmp_path).entries[SMALL.key]
    params = {name: value for name, value in entry.params.items() if name != "HEAD_SPLIT"}
    search = replace(entry.search, spaces=OTHER_SPACE)
    old = replace(entry, params=params, space_digest="0" * 16, search=search)
    cache.merge(tmp_path, samples.A30, Op.FORWARD, [old])
    assert run(tmp_path).kept == 0
    assert run(tmp_path).kept == 1


def test_a_problem_that_the_device_cannot_run_fails_alone_and_says_why(
    pretended: type[Pretended], tmp_path: Path
) -> None:
    eight = replace(SMALL, dtype=DType.FLOAT8, precision=Precision.IEEE)
    summary = run(tmp_path, eight, SMALL)
    assert list(summary.entries) == [SMALL.key]
    assert "float8 products need an NVIDIA GPU of compute capability 8.9" in summary.failed[eight.key]


def test_a_problem_without_a_working_variant_does_not_stop_the_others(
    pretended: type[Pretended], tmp_path: Path
) -> None:
    other = replace(SMALL, seq_q=128, seq_kv=128)
    pretended.fails = frozenset({SMALL.key})
    summary = run(tmp_path, SMALL, other)
    assert list(summary.entries) == [other.key]
    assert "ptxas said no" in summary.failed[SMALL.key]


def test_ctrl_c_keeps_what_was_finished(pretended: type[Pretended], tmp_path: Path) -> None:
    other = replace(SMALL, seq_q=128, seq_kv=128)
    pretended.interrupts = frozenset({other.key})
    summary = run(tmp_path, SMALL, other)
    assert summary.interrupted
    assert list(cache.read(summary.path).entries) == [SMALL.key]


def test_the_fastest_finalist_wins_and_the_kernel_is_the_choice(pretended: type[Pretended], tmp_path: Path) -> None:
    pretended.rivals = (rival("sdpa", 1000.0),)
    entry = run(tmp_path, measured=True).entries[SMALL.key]
    assert entry.evidence is Evidence.MEASURED
    assert entry.choice == KERNEL
    assert all(entry.time_us <= candidate.time_us for candidate in entry.candidates)


@pytest.mark.parametrize(
    ("others", "choice"),
    [
        ((("sdpa", 1.0),), "sdpa"),
        ((("sdpa", 1000.0), ("sdpa-cudnn", 1.0)), "sdpa-cudnn"),
        ((("sdpa", 1.005), ("sdpa-cudnn", 1.0)), "sdpa"),  # PyTorch's own choice wins ties
    ],
)
def test_a_faster_rival_is_chosen(
    pretended: type[Pretended], tmp_path: Path, others: tuple[tuple[str, float], ...], choice: str
) -> None:
    pretended.rivals = tuple(rival(name, time_us) for name, time_us in others)
    assert run(tmp_path, measured=True).entries[SMALL.key].choice == choice


def test_a_rival_faster_by_less_than_the_margin_is_not_chosen(pretended: type[Pretended], tmp_path: Path) -> None:
    best = run(tmp_path / "a", measured=True).entries[SMALL.key].time_us
    pretended.rivals = (rival("sdpa", best * (1.0 - finals.MARGIN / 2)),)
    assert run(tmp_path / "b", measured=True).entries[SMALL.key].choice == KERNEL


def test_a_rival_that_is_wrong_is_no_rival(pretended: type[Pretended], tmp_path: Path) -> None:
    pretended.rivals = (rival("sdpa", 1.0, max_error=1.0),)
    entry = run(tmp_path, measured=True).entries[SMALL.key]
    assert entry.choice == KERNEL
    assert "sdpa" not in {one.name for one in entry.rivals}


def remember(folder: Path, variant: Variant, device: Device = samples.H200, problem: Problem = SMALL) -> None:
    """Writes a measured entry with this winner and no runners-up."""
    entry = replace(samples.measured(problem), params=variant.as_dict(), candidates=(), choice=KERNEL)
    cache.merge(folder, device, Op.FORWARD, [entry])


@pytest.mark.parametrize(("slower", "wins"), [(1.05, True), (1.2, False)])
def test_what_was_measured_elsewhere_is_tried_and_leaned_on(
    pretended: type[Pretended], tmp_path: Path, slower: float, wins: bool
) -> None:
    """It is believed over a prediction that is a little better, and not over one that is much better."""
    unlikely = kernels.variant(BLOCK_M=32, BLOCK_N=64, num_stages=5, mask_loop="branch", softmax="lazy")
    remember(tmp_path, unlikely)
    pretended.time_us = lambda self, variant: 100.0 * (slower if variant == unlikely else 1.0)  # type: ignore[method-assign]
    entry = run(tmp_path).entries[SMALL.key]
    assert (entry.variant == unlikely) is wins
    tried = [entry.params, *(candidate.params for candidate in entry.candidates)]
    assert wins or unlikely.as_dict() in tried or entry.search.trials > len(tried)


@pytest.mark.parametrize(
    "change",
    [{"batch": 7}, {"seq_q": 96, "seq_kv": 96}, {"layout": Layout.BSHD}],
    ids=str,
)
def test_a_winner_of_the_same_kind_elsewhere_is_leaned_on_too(
    pretended: type[Pretended], tmp_path: Path, change: dict[str, Any]
) -> None:
    unlikely = kernels.variant(BLOCK_M=32, BLOCK_N=64, num_stages=5, mask_loop="branch", softmax="lazy")
    remember(tmp_path, unlikely, problem=replace(SMALL, **change))
    pretended.time_us = lambda self, variant: 100.0  # type: ignore[method-assign]
    assert run(tmp_path).entries[SMALL.key].variant == unlikely


def test_a_winner_of_another_kind_elsewhere_is_none_of_this_problems_business(
    pretended: type[Pretended], tmp_path: Path
) -> None:
    unlikely = kernels.variant(BLOCK_M=32, BLOCK_N=64, num_stages=5, mask_loop="branch", softmax="lazy")
    remember(tmp_path, unlikely, problem=replace(SMALL, dtype=DType.BFLOAT16))
    pretended.time_us = lambda self, variant: 1.0 if variant == unlikely else 100.0  # type: ignore[method-assign]
    assert run(tmp_path).entries[SMALL.key].variant != unlikely


def test_entries_that_another_card_measured_are_not_kept(pretended: type[Pretended], tmp_path: Path) -> None:
    run(tmp_path, measured=True)
    sister = replace(samples.H200, sm_count=78)
    options = plan.Options(effort=plan.Effort.QUICK, trials=6, cache=tmp_path)
    with pytest.raises(Exception, match="use another --cache DIR"):
        tune.tune([SMALL], sister, measured=True, options=options)
    assert cache.lookup(tmp_path, samples.H200, Op.FORWARD)


# --- what is kept, and what is tried first ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [("quick", "quick", 1), ("standard", "quick", 1), ("quick", "standard", 0), ("standard", "max", 0)],
)
def test_an_entry_is_kept_unless_more_effort_is_asked_for(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, kept: int
) -> None:
    small = {
        effort: replace(profile, trials=3 + place) for place, (effort, profile) in enumerate(plan.PROFILES.items())
    }
    monkeypatch.setattr(plan, "PROFILES", small)
    run(tmp_path, effort=plan.Effort(before), trials=None)
    assert run(tmp_path, effort=plan.Effort(after), trials=None).kept == kept


@pytest.mark.parametrize("stale", ["search space", "source_digest", "triton"])
def test_an_entry_that_anything_changed_for_is_tuned_anew(
    pretended: type[Pretended], tmp_path: Path, stale: str
) -> None:
    entry = run(tmp_path).entries[SMALL.key]
    changes: dict[str, dict[str, Any]] = {
        "search space": {"search": replace(entry.search, spaces=OTHER_SPACE)},
        "source_digest": {"source_digest": "0" * 16},
        "triton": {"versions": {"triton": "3.5.1"}},
    }
    cache.merge(tmp_path, samples.A30, Op.FORWARD, [replace(entry, **changes[stale])])
    summary = run(tmp_path)
    assert summary.kept == 0
    assert run(tmp_path).kept == 1


def test_a_prediction_is_measured_once_the_card_is_there(pretended: type[Pretended], tmp_path: Path) -> None:
    options = plan.Options(effort=plan.Effort.QUICK, trials=6, cache=tmp_path)
    tune.tune([SMALL], samples.H200, measured=False, options=options)
    assert run(tmp_path, measured=True).kept == 0
    assert cache.lookup(tmp_path, samples.H200, Op.FORWARD)[SMALL.key].evidence is Evidence.MEASURED


def test_a_prediction_never_takes_a_measurements_place(pretended: type[Pretended], tmp_path: Path) -> None:
    measured = run(tmp_path, measured=True).entries[SMALL.key]
    options = plan.Options(effort=plan.Effort.MAX, trials=12, cache=tmp_path)
    tune.tune([SMALL], samples.H200, measured=False, options=options)
    found = cache.lookup(tmp_path, samples.H200, Op.FORWARD)[SMALL.key]
    assert (found.evidence, found.params) == (Evidence.MEASURED, measured.params)


def test_seeds_are_tried_before_anything_else(pretended: type[Pretended], tmp_path: Path) -> None:
    seeds = space.load(kernels.TEMPLATE).seeds_for(SMALL, samples.A30)
    entry = run(tmp_path, trials=len(seeds)).entries[SMALL.key]
    tried = [entry.variant, *(Variant.of(entry.template, one.params) for one in entry.candidates)]
    assert set(tried) <= set(seeds)


def test_what_won_for_a_sister_problem_is_tried_for_the_next(pretended: type[Pretended], tmp_path: Path) -> None:
    sister = replace(SMALL, batch=5)
    points = space.load(kernels.TEMPLATE)

    def time_us(self: Pretended, variant: Variant) -> float:
        fits_both = points.why_infeasible(variant, SMALL, samples.A30) is None
        return 1.0 if fits_both and variant not in points.seeds_for(SMALL, samples.A30) else 100.0

    pretended.time_us = time_us  # type: ignore[method-assign]
    winner = run(tmp_path, sister, trials=40).entries[sister.key].variant
    assert winner not in points.seeds_for(SMALL, samples.A30)
    pretended.time_us = lambda self, variant: 1.0 if variant == winner else 100.0  # type: ignore[method-assign]
    summary = run(tmp_path, sister, SMALL, trials=20)
    assert summary.kept == 1
    assert summary.entries[SMALL.key].variant == winner


def test_ctrl_c_in_a_search_loses_no_trial_that_was_recorded(pretended: type[Pretended], tmp_path: Path) -> None:
    def stop(progress: plan.Progress) -> None:
        if progress.tried == 4:
            raise KeyboardInterrupt

    options = plan.Options(effort=plan.Effort.QUICK, trials=10, cache=tmp_path)
    summary = tune.tune([SMALL], samples.A30, measured=False, options=options, listen=stop)
    assert (summary.interrupted, summary.entries, summary.kernels) == (True, {}, 4)
    assert not summary.path.exists()
    again = tune.tune([SMALL], samples.A30, measured=False, options=options)
    assert not again.interrupted
    assert again.kernels == 6, "the first four are in the journal"
    assert again.entries[SMALL.key].search.trials == 10


def test_trials_of_a_shared_storage_leave_no_journal_and_are_known_to_the_next(
    pretended: type[Pretended], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    first = run(tmp_path / "here", trials=6, storage=url)
    second = run(tmp_path / "there", trials=6, storage=url)
    assert (first.kernels, second.kernels) == (6, 0)
    assert first.entries == second.entries
    assert sorted(tmp_path.rglob("*.journal")) == []


def test_what_another_process_tries_is_waited_for_and_tried_here_when_it_gives_up(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    names = []
    named = tune._Run._study_name
    monkeypatch.setattr(tune._Run, "_study_name", lambda self, one: names.append(named(self, one)) or names[-1])
    run(tmp_path / "none", trials=1, storage=url)
    one = space.load("triton/forward")
    other = Ledger(names[0], storage.server(url), one)
    (known,) = other.news().finished
    flying = [seed for seed in one.seeds_for(SMALL, samples.A30) if seed != known.variant][:2]
    assert all(other.claim(seed) for seed in flying)
    slept: list[float] = []
    really_sleep = tune.time.sleep

    def sleep(seconds: float) -> None:
        if seconds != tune.LISTEN_SECONDS:  # another thread of this process, which waits for something else
            really_sleep(seconds)
            return
        slept.append(seconds)
        if len(slept) == 2:
            other.finish(replace(known, variant=flying[0]), 1.0)
            other.leave()

    monkeypatch.setattr(tune.time, "sleep", sleep)
    entry = run(tmp_path / "here", trials=4, storage=url).entries[SMALL.key]
    assert len(slept) == 2
    assert entry.search.trials == 4
    trials = [trial for found in studies(storage.server(url)).values() for trial in found]
    assert set(flying) <= {trial.variant for trial in trials}
    assert len(trials) == len({trial.variant for trial in trials}) == 4


def test_studies_of_two_cards_never_mix(pretended: type[Pretended], tmp_path: Path) -> None:
    """Neither two models, nor one model of which parts are switched off."""
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    options = plan.Options(effort=plan.Effort.QUICK, trials=4, cache=tmp_path, storage=url)
    cards = (samples.H200, samples.A30, replace(samples.H200, sm_count=66))
    for card in cards:
        assert tune.tune([SMALL], card, measured=True, options=options).kernels == 4
        cache.path_of(tmp_path, card, Op.FORWARD).unlink()
    tune.tune([SMALL], samples.H200, measured=False, options=options)
    names = [name for name, trials in studies(storage.server(url)).items() if trials]
    kinds = {" ".join(name.split()[2:5]).rpartition("/")[0] for name in names}
    assert kinds == {
        "measured NVIDIA H200/sm_90/132sm",
        "measured NVIDIA H200/sm_90/66sm",
        "measured NVIDIA A30/sm_80/56sm",
        "predicted NVIDIA H200/sm_90/132sm",
    }


def test_each_card_that_is_such_a_device_measures_unless_fewer_are_asked_for(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "alike", lambda device: ("0", "3", "5"))
    seen = []
    init = pretended.__init__
    monkeypatch.setattr(
        pretended, "__init__", lambda self, *given, **named: seen.append(named["cards"]) or init(self, *given, **named)
    )
    for number in (None, 1, 3):
        run(tmp_path / str(number), measured=True, workers=number)
    run(tmp_path / "predicted")
    assert seen == [("0", "3", "5"), ("0",), ("0", "3", "5"), ()]
    with pytest.raises(
        UsageError, match=r"--workers must be at most the visible GPUs that are NVIDIA H200 \(3\), got 4"
    ):
        run(tmp_path / "many", measured=True, workers=4)


def test_a_damaged_cache_is_refused_before_anything_is_tried(pretended: type[Pretended], tmp_path: Path) -> None:
    path = cache.path_of(tmp_path, samples.A30, Op.FORWARD)
    path.parent.mkdir(parents=True)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(CacheError, match="damaged"):
        run(tmp_path)
    assert sorted(tmp_path.rglob("*.journal")) == []


def test_the_listener_hears_of_every_problem_from_its_search_to_its_end(
    pretended: type[Pretended], tmp_path: Path
) -> None:
    heard: list[plan.Progress] = []
    other = replace(SMALL, seq_q=128, seq_kv=128)
    pretended.fails = frozenset({other.key})
    options = plan.Options(effort=plan.Effort.QUICK, trials=3, cache=tmp_path)
    tune.tune([SMALL, other], samples.H200, measured=True, options=options, listen=heard.append)
    phases = [(one.index, one.phase) for one in heard]
    assert phases == [(0, "search")] * 3 + [(0, "final"), (0, "done")] + [(1, "search")] * 3 + [(1, "done")]
    assert [one.tried for one in heard[:3]] == [1, 2, 3]
    best = [one.best_us for one in heard[:5]]
    assert best == sorted(best, reverse=True), "it only falls"  # type: ignore[type-var]
    assert "ptxas said no" in heard[-1].detail
    heard.clear()
    tune.tune([SMALL], samples.H200, measured=True, options=options, listen=heard.append)
    assert [one.phase for one in heard] == ["kept"]


LADDER = tuple(replace(SMALL, batch=batch) for batch in (1, 2, 3, 4))  # sister problems


def test_several_problems_are_searched_at_once_and_none_is_lost(pretended: type[Pretended], tmp_path: Path) -> None:
    heard: list[plan.Progress] = []
    options = plan.Options(effort=plan.Effort.QUICK, trials=3, cache=tmp_path)
    pretended.many = 2
    summary = tune.tune(LADDER, samples.H200, measured=True, options=options, listen=heard.append)
    assert list(summary.entries) == [one.key for one in LADDER]
    searched = [one.index for one in heard if one.phase == "search"]
    assert searched[:4] == [0, 1, 0, 1], "two take turns"
    begun = {index: place for place, index in reversed(list(enumerate(one.index for one in heard)))}
    ended = {one.index: place for place, one in enumerate(heard) if one.phase == "done"}
    assert all(begun[index] > ended[index - 2] for index in (2, 3)), "never three"
    assert cache.read(summary.path).entries.keys() == summary.entries.keys()


def test_who_is_learned_from_depends_on_the_order_of_the_problems_alone(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once: the third learns from the first whether or not the second has ended."""
    asked: list[list[str]] = []
    entry = tune._Run.entry
    monkeypatch.setattr(
        tune._Run,
        "entry",
        lambda self, siblings, old: asked.append([one.problem.key for one in siblings]) or entry(self, siblings, old),
    )
    pretended.many = 2
    run(tmp_path, *LADDER, measured=True)
    keys = [one.key for one in LADDER]
    assert asked == [[], [], keys[:1], keys[:2]]


def test_without_the_card_siblings_kernels_come_first_and_few_new_ones_are_compiled(
    pretended: type[Pretended], tmp_path: Path
) -> None:
    wider = replace(SMALL, seq_q=256, seq_kv=256)  # other seeds, the same kernels
    summary = run(tmp_path, SMALL, wider, trials=None)
    first = summary.entries[SMALL.key]
    theirs = [variant for key, variant in pretended.tried if key == wider.key]
    known = {variant for key, variant in pretended.tried if key == SMALL.key}
    assert theirs[0] == first.variant
    assert sum(variant not in known for variant in theirs) == plan.PROFILES[plan.Effort.QUICK].sibling_trials


def test_ctrl_c_among_several_searches_gives_up_what_all_of_them_claimed(
    pretended: type[Pretended], tmp_path: Path
) -> None:
    pretended.many = 2
    pretended.interrupts = frozenset({LADDER[1].key})
    summary = run(tmp_path, *LADDER, measured=True)
    assert summary.interrupted
    pretended.interrupts = frozenset()
    again = run(tmp_path, *LADDER, measured=True)
    assert not again.interrupted
    assert len(again.entries) == 4


def test_without_trials_it_says_so(pretended: type[Pretended], tmp_path: Path) -> None:
    summary = run(tmp_path, trials=0)
    assert summary.failed == {
        SMALL.key: "the search was given no time or no trials; allow more with --trials or --timeout"
    }
    assert not summary.path.exists()


# --- finals and rehearsals --------------------------------------------------------------------------------------------


def first_default() -> Variant:
    """What a call takes for which nothing was tuned."""
    return contest.spaces(SMALL, samples.H200, True)[0].default(SMALL, samples.H200)


def test_the_default_and_the_previous_winner_are_always_in_the_finals(
    pretended: type[Pretended], tmp_path: Path
) -> None:
    default = first_default()
    old = kernels.variant(BLOCK_M=64, BLOCK_N=64, num_stages=2)
    remember(tmp_path, old)
    slow = (default, old)
    pretended.time_us = lambda self, variant: 1000.0 if variant in slow else 100.0  # type: ignore[method-assign]
    run(tmp_path, measured=True, trials=30)
    (finalists,) = pretended.finals
    assert {default, old} <= set(finalists)
    assert len(finalists) == len(set(finalists)) == plan.PROFILES[plan.Effort.QUICK].finalists + 2


def test_the_templates_default_is_a_rival_in_the_record_and_never_the_choice(
    pretended: type[Pretended], tmp_path: Path
) -> None:
    default = first_default()
    pretended.time_us = lambda self, variant: 200.0 if variant == default else 100.0  # type: ignore[method-assign]
    entry = run(tmp_path, measured=True, trials=30).entries[SMALL.key]
    times = {one.name: one.measurement.median_us for one in entry.rivals}
    assert times == {finals.TEMPLATE_DEFAULT: 200.0}
    assert entry.choice == KERNEL


def test_a_finalist_that_is_wrong_at_full_size_does_not_win(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finished(self: Pretended, problem: Problem, variants: list[Variant], **facts: Any) -> Finished:
        verdicts = (replace(GOOD, ok=False, reason="error 1"), *(GOOD,) * (len(variants) - 1))
        times = [samples.measurement(problem, 10.0 + place) for place in range(len(variants))]
        self.finals.append(variants)
        return Finished(verdicts=verdicts, measurements=tuple(times), rivals=())

    monkeypatch.setattr(pretended, "finished", finished)
    entry = run(tmp_path, measured=True, trials=30).entries[SMALL.key]
    (finalists,) = pretended.finals
    assert entry.variant == finalists[1]
    assert finalists[0].as_dict() not in [candidate.params for candidate in entry.candidates]


def test_finals_without_a_right_finalist_leave_no_entry(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = replace(GOOD, ok=False, reason="error 1 where 0.1 is allowed")

    def finished(self: Pretended, problem: Problem, variants: list[Variant], **facts: Any) -> Finished:
        return Finished(verdicts=(bad,) * len(variants), measurements=(None,) * len(variants), rivals=())

    monkeypatch.setattr(pretended, "finished", finished)
    summary = run(tmp_path, measured=True)
    assert summary.failed == {SMALL.key: "no finalist was right at full size: error 1 where 0.1 is allowed"}
    assert not summary.path.exists()


def test_finals_that_are_lost_leave_no_entry_and_the_next_problem_goes_on(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, other = pretended.finished, replace(SMALL, batch=2)

    def finished(self: Pretended, problem: Problem, variants: list[Variant], **facts: Any) -> Finished | Failure:
        if problem == SMALL:
            return Failure(outcome=Outcome.CRASH, detail="the process died (SIGSEGV)")
        return right(self, problem, variants, **facts)

    monkeypatch.setattr(pretended, "finished", finished)
    summary = run(tmp_path, SMALL, other, measured=True)
    assert summary.failed == {SMALL.key: "the finals ended with a crash: the process died (SIGSEGV)"}
    assert list(summary.entries) == [other.key]


FIRST_MAX = replace(SMALL, seq_q=512, seq_kv=512)  # long enough for a maximum that is kept


def only(softmax: str, monkeypatch: pytest.MonkeyPatch, pretended: type[Pretended]) -> None:
    """Has the variants with this softmax be the fastest by far."""
    monkeypatch.setattr(
        pretended, "time_us", lambda self, variant: 100.0 + len(str(variant)) - 50.0 * (variant["softmax"] == softmax)
    )


def test_a_winner_that_keeps_its_first_maximum_has_its_worst_case_told(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("first_max", monkeypatch, pretended)
    summary = run(tmp_path, FIRST_MAX, measured=True, trials=30, seed=3)
    entry = summary.entries[FIRST_MAX.key]
    assert entry.variant["softmax"] == "first_max"
    assert pretended.outgrown == [(entry.variant, 3)], "the winner alone, once"
    assert entry.worst is not None
    assert (entry.worst.slowdown, entry.worst.redone, entry.worst.tiles) == (2.5, 63, 64)
    assert cache.read(summary.path).entries[FIRST_MAX.key].worst == entry.worst


def test_another_winner_has_no_worst_case(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("online", monkeypatch, pretended)
    entry = run(tmp_path, FIRST_MAX, measured=True, trials=30).entries[FIRST_MAX.key]
    assert entry.variant["softmax"] == "online"
    assert (pretended.outgrown, entry.worst) == ([], None)


def test_a_winner_that_is_wrong_in_its_worst_case_leaves_no_entry(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Failure(outcome=Outcome.WRONG_RESULT, detail="two runs on the same inputs differ")
    only("first_max", monkeypatch, pretended)
    monkeypatch.setattr(pretended, "computed_twice", lambda self, problem, variant, seed: wrong)
    summary = run(tmp_path, FIRST_MAX, measured=True, trials=30)
    assert summary.failed == {
        FIRST_MAX.key: "the winner's worst case ended with a wrong result: two runs on the same inputs differ"
    }
    assert not summary.path.exists()


def test_the_verdict_of_an_entry_covers_the_gate_and_the_full_size(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closer = Verdict(ok=True, checks=1, max_error=3e-3, rms_error=5e-5, allowed=4e-3)

    def finished(self: Pretended, problem: Problem, variants: list[Variant], **facts: Any) -> Finished:
        times = tuple(samples.measurement(problem, 10.0 + place) for place in range(len(variants)))
        return Finished(verdicts=(closer,) * len(variants), measurements=times, rivals=())

    monkeypatch.setattr(pretended, "finished", finished)
    verdict = run(tmp_path, measured=True).entries[SMALL.key].verdict
    assert verdict == Verdict(ok=True, checks=11, max_error=3e-3, rms_error=1e-4, allowed=4e-3)


def test_a_prediction_rests_on_the_first_variant_that_rehearses_right(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: list[Variant] = []

    def rehearse(self: Pretended, problem: Problem, variant: Variant) -> Verdict | Failure:
        if len(wrong) < 2:
            wrong.append(variant)
            return replace(GOOD, ok=False) if len(wrong) == 1 else Failure(outcome=Outcome.CRASH, detail="died")
        return GOOD

    monkeypatch.setattr(pretended, "rehearse", rehearse)
    entry = run(tmp_path).entries[SMALL.key]
    assert entry.variant not in wrong
    assert not [one for one in entry.candidates if Variant.of(entry.template, one.params) in wrong]


def test_a_prediction_without_right_numbers_is_none(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretended, "rehearse", lambda self, problem, variant: replace(GOOD, ok=False))
    assert run(tmp_path).failed == {SMALL.key: "no variant gave right numbers in the interpreter"}


def test_an_entry_keeps_five_runners_up_in_order(pretended: type[Pretended], tmp_path: Path) -> None:
    for measured in (False, True):
        entry = run(tmp_path / str(measured), measured=measured, trials=30, effort=plan.Effort.MAX).entries[SMALL.key]
        times = [entry.time_us, *(candidate.time_us for candidate in entry.candidates)]
        assert len(times) == 6
        assert times == sorted(times)
        assert len({entry.source_digest, *(one.source_digest for one in entry.candidates)}) == 6


def test_the_previous_winner_stays_among_equals(pretended: type[Pretended], tmp_path: Path) -> None:
    for tile in ((64, 64), (32, 64)):
        old = kernels.variant(BLOCK_M=tile[0], BLOCK_N=tile[1], num_stages=2)
        folder = tmp_path / str(tile[0])
        remember(folder, old)
        pretended.time_us = lambda self, variant: 100.0  # type: ignore[method-assign]
        entry = run(folder, measured=True, trials=30).entries[SMALL.key]
        assert entry.variant == old
        assert entry.finals is not None
        assert len(entry.finals.tied) == len(entry.finals.finalists) - 1


def test_without_a_previous_winner_two_tunes_agree_among_equals(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    winners = set()
    for number in range(6):
        noise = random.Random(number)
        monkeypatch.setattr(pretended, "time_us", lambda self, variant, noise=noise: 100.0 + noise.uniform(0.0, 0.2))
        winners.add(run(tmp_path / str(number), measured=True, trials=3).entries[SMALL.key].source_digest)
    assert len(winners) == 1


def test_the_raw_samples_are_kept_beside_the_journal(pretended: type[Pretended], tmp_path: Path) -> None:
    pretended.rivals = (rival("sdpa", 500.0),)
    entry = run(tmp_path, measured=True, trials=30).entries[SMALL.key]
    found = raw.read(raw.path_of(tmp_path, "h200", SMALL.key))
    assert found is not None
    assert (found.winner, found.fingerprint, found.problem) == (
        entry.source_digest, samples.H200.fingerprint, SMALL
    )  # fmt: skip
    assert len(found.rounds) == 40
    assert entry.finals is not None
    assert set(found.kernels.values()) == {one.source_digest for one in entry.finals.finalists}
    assert found.rounds[0].times_us["sdpa"] == 500.0
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_tune_for_energy_takes_what_costs_least_and_asks_for_it_long_enough(
    pretended: type[Pretended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretended, "joules", lambda self, variant: 1000.0 - self.time_us(variant))
    options = {"measured": True, "trials": 30}
    fast = run(tmp_path, **options).entries[SMALL.key]
    cool = run(tmp_path, objective=plan.Objective.ENERGY, **options).entries[SMALL.key]
    assert cool.time_us > fast.time_us
    assert cool.search.objective == "energy"
    assert [one["energy_seconds"] for one in pretended.asked] == [0.0, plan.ENERGY_SECONDS]
    assert cool.finals is not None
    assert {one.energy is not None for one in cool.finals.finalists} == {True}


def test_an_entry_for_another_objective_is_not_up_to_date(pretended: type[Pretended], tmp_path: Path) -> None:
    options = {"measured": True, "trials": 6}
    assert run(tmp_path, **options).kept == 0
    assert run(tmp_path, objective=plan.Objective.ERROR, **options).kept == 0
    assert run(tmp_path, objective=plan.Objective.ERROR, **options).kept == 1
    assert run(tmp_path, **options).kept == 0


@pytest.mark.parametrize("objective", [plan.Objective.ENERGY, plan.Objective.ERROR])
def test_energy_and_error_cannot_be_predicted(
    pretended: type[Pretended], tmp_path: Path, objective: plan.Objective
) -> None:
    with pytest.raises(UsageError, match="must be measured"):
        run(tmp_path, objective=objective)
