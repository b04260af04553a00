"""The tuner without a GPU: a real small run, and what is chosen with a fake workshop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import kernels
import pytest
import samples
from fake_workshop import GOOD, SMALL, FakeWorkshop, remember, rival, run, workshop  # noqa: F401 - a fixture

from autoattn.cache import store
from autoattn.codegen import portfolio, render, search_space
from autoattn.core.cache_entry import KERNEL
from autoattn.core.problem import DType, Layout, Op, Precision
from autoattn.core.trial import Evidence
from autoattn.core.variant import Variant
from autoattn.search import finals, search_options, tuner

pytestmark = pytest.mark.usefixtures("no_portfolio")  # what is tried first are the templates' seeds


@pytest.mark.slow
def test_a_real_run_without_the_card_gives_a_predicted_entry_and_resumes(tmp_path: Path) -> None:
    summary = run(tmp_path, trials=3)
    entry = summary.entries[SMALL.key]
    assert (entry.evidence, entry.verdict, entry.measurement) == (Evidence.PREDICTED, None, None)
    assert entry.report is not None
    assert entry.report.registers > 0
    assert summary.kernels == 3
    assert store.read(summary.written[0]).entries[SMALL.key].params == entry.params
    again = run(tmp_path, trials=3)
    assert (again.kept, again.kernels) == (1, 0)


def test_the_same_seed_gives_the_same_entry(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    first, second = (run(tmp_path / name, trials=30, seed=5).entries[SMALL.key] for name in ("a", "b"))
    assert replace(first, versions={}) == replace(second, versions={})


@pytest.mark.parametrize("measured", [False, True])
def test_effort_instant_tries_seeds_alone_and_has_finals(
    workshop: type[FakeWorkshop], tmp_path: Path, measured: bool
) -> None:
    device = samples.H200 if measured else samples.A30
    seeds = {seed for space in search_space.of(Op.FORWARD) for seed in space.seeds_for(SMALL, device)}
    summary = run(tmp_path, measured=measured, effort=search_options.Effort.INSTANT, trials=None)
    tried = {variant for _, variant in workshop.tried}
    assert tried <= seeds
    assert len(tried) == min(len(seeds), 8)
    assert [len(finalists) <= 4 for finalists in workshop.finals] == [True] * measured
    assert summary.entries[SMALL.key].search.effort == "instant"


def test_without_the_card_no_search_ends_before_it_knows_what_calls_run_by_themselves(
    workshop: type[FakeWorkshop], tmp_path: Path
) -> None:
    """Compilers that are busy with something else must not leave the default out, and another variant win."""
    hurry: dict[str, Any] = {"effort": search_options.Effort.INSTANT, "trials": None, "timeout_s": 1e-9}
    seeds = portfolio.starters_for(SMALL, samples.A30)
    workshop.refused = frozenset(seeds[:2])  # a call runs the third one
    entry = run(tmp_path, **hurry).entries[SMALL.key]
    assert [variant for _, variant in workshop.tried] == seeds[:3]
    assert entry.variant == seeds[2]
    workshop.tried.clear()
    run(tmp_path / "card", measured=True, **hurry)
    assert len(workshop.tried) == 1, "finals on a card end in time"


def test_more_trials_go_on_where_the_last_run_stopped(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    run(tmp_path, trials=6)
    summary = run(tmp_path, trials=10)
    assert summary.kept == 0
    assert summary.entries[SMALL.key].search.trials == 10
    assert summary.kernels == 4


def test_an_entry_of_another_template_text_is_tuned_anew(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    monkeypatch.setattr(render, "digest_of_source", lambda *facts: "another")
    assert run(tmp_path).kept == 0


def test_an_entry_outlives_a_change_of_the_template_that_leaves_its_own_text_alone(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    monkeypatch.setattr("autoattn.codegen.render.template_digest", lambda template: "another")
    assert run(tmp_path).kept == 1


def test_an_entry_of_another_search_space_is_tuned_anew_and_its_variants_are_not_tried(
    workshop: type[FakeWorkshop], tmp_path: Path
) -> None:
    entry = run(tmp_path).entries[SMALL.key]
    params = {name: value for name, value in entry.params.items() if name != "HEAD_SPLIT"}
    search = replace(entry.search, spaces={"triton/forward": "0" * 16})
    old = replace(entry, params=params, space_digest="0" * 16, search=search)
    store.merge(tmp_path, samples.A30, Op.FORWARD, [old])
    assert run(tmp_path).kept == 0
    assert run(tmp_path).kept == 1


def test_a_problem_that_the_device_cannot_run_fails_alone_and_says_why(
    workshop: type[FakeWorkshop], tmp_path: Path
) -> None:
    eight = replace(SMALL, dtype=DType.FLOAT8, precision=Precision.IEEE)
    summary = run(tmp_path, eight, SMALL)
    assert list(summary.entries) == [SMALL.key]
    assert "float8 products need an NVIDIA GPU of compute capability 8.9" in summary.failed[eight.key]


def test_a_problem_without_a_working_variant_does_not_stop_the_others(
    workshop: type[FakeWorkshop], tmp_path: Path
) -> None:
    other = replace(SMALL, seq_q=128, seq_kv=128)
    workshop.fails = frozenset({SMALL.key})
    summary = run(tmp_path, SMALL, other)
    assert list(summary.entries) == [other.key]
    assert "ptxas said no" in summary.failed[SMALL.key]


def test_ctrl_c_keeps_what_was_finished(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    other = replace(SMALL, head_dim=32, head_dim_v=32)  # of another kind, which is searched by itself
    workshop.interrupts = frozenset({other.key})
    summary = run(tmp_path, SMALL, other)
    assert summary.interrupted
    assert list(store.read(summary.written[0]).entries) == [SMALL.key]


def test_the_fastest_finalist_wins_and_the_kernel_is_the_choice(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    workshop.rivals = (rival("sdpa", 1000.0),)
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
    workshop: type[FakeWorkshop], tmp_path: Path, others: tuple[tuple[str, float], ...], choice: str
) -> None:
    workshop.rivals = tuple(rival(name, time_us) for name, time_us in others)
    assert run(tmp_path, measured=True).entries[SMALL.key].choice == choice


def test_a_rival_faster_by_less_than_the_margin_is_not_chosen(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    best = run(tmp_path / "a", measured=True).entries[SMALL.key].time_us
    workshop.rivals = (rival("sdpa", best * (1.0 - finals.MARGIN / 2)),)
    assert run(tmp_path / "b", measured=True).entries[SMALL.key].choice == KERNEL


def test_a_rival_that_is_wrong_is_no_rival(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    workshop.rivals = (rival("sdpa", 1.0, max_error=1.0),)
    entry = run(tmp_path, measured=True).entries[SMALL.key]
    assert entry.choice == KERNEL
    assert "sdpa" not in {rival.name for rival in entry.rivals}


def slow_default(variant: Variant, time_us: float) -> float:
    """A time at which the template's default is no rival of what a test speaks of."""
    default = search_space.load("triton/forward").default(SMALL, samples.A30)
    return 2.0 * time_us if variant == default else time_us


@pytest.mark.parametrize(("slower", "wins"), [(1.05, True), (1.2, False)])
def test_what_was_measured_elsewhere_is_tried_and_leaned_on(
    workshop: type[FakeWorkshop], tmp_path: Path, slower: float, wins: bool
) -> None:
    """It is believed over a prediction that is a little better, and not over one that is much better."""
    unlikely = kernels.variant(BLOCK_M=32, BLOCK_N=64, num_stages=5, mask_loop="branch", softmax="lazy")
    remember(tmp_path, unlikely)
    workshop.time_us = lambda self, variant: slow_default(variant, 100.0 * (slower if variant == unlikely else 1.0))  # type: ignore[method-assign]
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
    workshop: type[FakeWorkshop], tmp_path: Path, change: dict[str, Any]
) -> None:
    unlikely = kernels.variant(BLOCK_M=32, BLOCK_N=64, num_stages=5, mask_loop="branch", softmax="lazy")
    remember(tmp_path, unlikely, problem=replace(SMALL, **change))
    workshop.time_us = lambda self, variant: slow_default(variant, 100.0)  # type: ignore[method-assign]
    assert run(tmp_path).entries[SMALL.key].variant == unlikely


def test_a_winner_of_another_kind_elsewhere_is_none_of_this_problems_business(
    workshop: type[FakeWorkshop], tmp_path: Path
) -> None:
    unlikely = kernels.variant(BLOCK_M=32, BLOCK_N=64, num_stages=5, mask_loop="branch", softmax="lazy")
    remember(tmp_path, unlikely, problem=replace(SMALL, dtype=DType.BFLOAT16))
    workshop.time_us = lambda self, variant: 1.0 if variant == unlikely else 100.0  # type: ignore[method-assign]
    assert run(tmp_path).entries[SMALL.key].variant != unlikely


@pytest.mark.parametrize(
    ("lead", "is_measured", "wins"),
    [(1.14, False, False), (1.17, False, True), (1.17, True, False), (3.0, True, False)],
)
def test_a_prediction_takes_the_defaults_place_where_it_is_better_by_more_than_the_model_errs(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lead: float, is_measured: bool,
    wins: bool,
) -> None:  # fmt: skip
    """On sm_80, where predictions err by 15%; what a measured portfolio chose stays."""
    monkeypatch.setattr(portfolio, "was_measured_for", lambda problem, device: is_measured)
    default = search_space.load("triton/forward").default(SMALL, samples.A30)
    workshop.time_us = lambda self, variant: 100.0 * lead if variant == default else 100.0  # type: ignore[method-assign]
    entry = run(tmp_path).entries[SMALL.key]
    assert (entry.variant != default) is wins
    assert wins or entry.candidates[0].time_us < entry.time_us


def test_a_default_that_is_wrong_in_the_interpreter_gives_way(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = search_space.load("triton/forward").default(SMALL, samples.A30)
    wrong = replace(GOOD, ok=False, reason="by 1")
    monkeypatch.setattr(
        workshop,
        "rehearse",
        lambda self, problem, *variants: [wrong if variant == default else GOOD for variant in variants],
    )
    assert run(tmp_path).entries[SMALL.key].variant != default


def test_where_a_portfolios_choice_does_not_compile_its_next_one_is_predicted(
    workshop: type[FakeWorkshop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call runs it too; the predictions of others do not count, as no prediction beats a portfolio's choice."""
    monkeypatch.setattr(portfolio, "was_measured_for", lambda problem, device: True)
    first, second, *_ = portfolio.starters_for(SMALL, samples.A30)
    workshop.refused = frozenset([first])
    workshop.time_us = lambda self, variant: 300.0 if variant == second else 100.0  # type: ignore[method-assign]
    assert run(tmp_path).entries[SMALL.key].variant == second


def test_entries_that_another_card_measured_are_not_kept(workshop: type[FakeWorkshop], tmp_path: Path) -> None:
    run(tmp_path, measured=True)
    sister = replace(samples.H200, sm_count=78)
    options = search_options.Options(effort=search_options.Effort.QUICK, trials=6, cache=tmp_path)
    with pytest.raises(Exception, match="use another --cache DIR"):
        tuner.tune([SMALL], sister, measured=True, options=options)
    assert store.lookup(tmp_path, samples.H200, Op.FORWARD)
