"""What a report tells of searches, and what it says where it cannot: journals, importance, charts, differences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import samples
import searched

from autoattn import report
from autoattn.cache import file_format, store
from autoattn.codegen import search_space
from autoattn.core import triton_release
from autoattn.core.cache_entry import CacheEntry, Rival
from autoattn.core.paired_stats import Interval
from autoattn.core.problem import Op
from autoattn.core.trial import Energy, Outcome, Trial
from autoattn.core.variant import Variant
from autoattn.report import charts, contents, figures, history, listing
from autoattn.report.charts import Detail
from autoattn.report.history import History
from autoattn.report.plot import Scale, label, staircase
from autoattn.search import importance, problem_run

H200 = samples.H200
BASE = search_space.load("triton/forward").default(samples.problem(), H200).as_dict()


@pytest.fixture
def entry() -> CacheEntry:
    return searched.entry_of(samples.problem())


@pytest.fixture
def folder(tmp_path: Path, entry: CacheEntry) -> Path:
    return searched.folder_of(tmp_path / "cache", [entry], trials=24)


def sections(folder: Path) -> list[contents.Section]:
    files = store.read_folder(folder)
    return contents.gather(files, {(file.device, key): folder for file in files for key in file.entries})


def ranking(folder: Path) -> contents.Ranking:
    section = sections(folder)[0]
    assert section.measured is not None
    return section.measured


def trial(time_us: float | None, *, template: str = "triton/forward", **params: Any) -> Trial:
    variant = Variant.of(template, {**BASE, **params})
    if time_us is None:
        return Trial(variant=variant, outcome=Outcome.WRONG_RESULT, detail="it differs")
    return Trial(variant=variant, outcome=Outcome.OK, prediction=samples.prediction(time_us))


# --- journals ---------------------------------------------------------------------------------------------------------


def test_the_trials_of_a_search_come_in_the_order_in_which_they_ended(folder: Path, entry: CacheEntry) -> None:
    trial_history = history.read(folder, "h200", entry)
    assert len(trial_history.trials) == 24
    assert trial_history.trials[-1].digest == entry.source_digest
    assert trial_history.missing == ""
    numbers = [number for number, _ in trial_history.improvements]
    times = [best.time_us or 0.0 for _, best in trial_history.improvements]
    assert numbers == sorted(numbers)
    assert times == sorted(times, reverse=True)
    assert trial_history.improvements[-1] == (24, trial_history.trials[-1])


def test_a_report_without_journals_says_so(tmp_path: Path, entry: CacheEntry) -> None:
    folder = searched.folder_of(tmp_path / "cache", [entry])
    for text in (report.html_text(sections(folder)), report.markdown_text(sections(folder))):
        assert "No search history of 1 of 1 problems" in text
        assert "it stays on the machine that tuned" in text


def test_the_journal_of_another_search_is_not_taken_for_this_one(folder: Path, entry: CacheEntry) -> None:
    other = replace(entry, source_digest="f" * 16)
    assert "another search" in history.read(folder, "h200", other).missing
    predicted = searched.entry_of(entry.problem, measured=False)
    assert "another search" in history.read(folder, "h200", predicted).missing


@pytest.mark.parametrize("measured", [True, False])
def test_the_names_that_tune_gives_its_studies_are_understood(measured: bool) -> None:
    entry = searched.entry_of(samples.problem(), measured=measured)
    for kind in (True, False):
        name = problem_run.study_name(search_space.load(entry.template), entry.problem, H200, measured=kind)
        assert history.belongs(name, entry) == (kind is measured)


def test_a_damaged_journal_is_a_sentence_in_the_report(folder: Path, entry: CacheEntry) -> None:
    path = history.path_of(folder, "h200", entry)
    path.write_text("{}\n")
    missing = history.read(folder, "h200", entry).missing
    assert "is damaged" in missing
    assert str(folder) not in missing  # a report is sent around
    assert "is damaged" in report.html_text(sections(folder))


def test_reasons_that_differ_in_numbers_alone_are_one() -> None:
    failed = [replace(trial(None, num_stages=stages), detail=f"needs {stages:,} bytes") for stages in (1, 2, 3)]
    other = replace(trial(None, num_stages=4), detail="too slow")
    reasons = history.reasons([History(trials=(*failed, other, trial(5.0)))])
    assert [(reason.outcome, reason.count, reason.detail) for reason in reasons] == [
        ("wrong result", 3, "needs 1 bytes"),
        ("wrong result", 1, "too slow"),
    ]


# --- importance -------------------------------------------------------------------------------------------------------


def test_the_parameter_that_decides_is_the_most_important() -> None:
    trials = [
        trial(10.0 * (1 + (block != 64)) + 0.01 * warps, BLOCK_N=block, num_warps=warps, num_stages=stages)
        for block in (16, 32, 64)
        for warps in (1, 2, 4, 8)
        for stages in (1, 2, 3, 4, 5)
    ]
    shares, count = importance.of([trials])
    assert count == 60
    assert next(iter(shares)) == "BLOCK_N"
    assert sum(shares.values()) == pytest.approx(1.0)
    assert set(shares) == {"BLOCK_N", "num_warps", "num_stages"}  # what varied


def test_few_trials_tell_nothing() -> None:
    assert importance.of([[trial(1.0), trial(2.0, num_warps=2), trial(None)]]) == ({}, 2)


def test_problems_are_compared_by_time_over_their_own_best() -> None:
    fast = [trial(1.0 + (warps == 8), num_warps=warps) for warps in (4, 8)] * 8
    slow = [trial(1000.0 * (1 + (warps == 8)), num_warps=warps) for warps in (4, 8)] * 8
    assert importance.of([fast, slow])[0] == pytest.approx({"num_warps": 1.0})


# --- charts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "log"),
    [((1.0, 1.04), True), ((0.3, 40.0), True), ((1e-2, 1e6), True), ((0.0, 7.0), False), ((5.0,), True)],
)
def test_scales_hold_their_values_and_have_a_few_round_ticks(values: tuple[float, ...], log: bool) -> None:
    scale = Scale.over(values, log=log)
    assert all(0.0 < scale.at(value) < 100.0 for value in values)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 10
    assert [tick.at for tick in ticks] == sorted({tick.at for tick in ticks})
    assert len({tick.label for tick in ticks}) == len(ticks)


@pytest.mark.parametrize(("value", "text"), [(0.5, "0.5"), (1.0, "1"), (1500.0, "1,500"), (99.4, "99.4")])
def test_ticks_have_few_digits(value: float, text: str) -> None:
    assert label(value) == text


def test_the_best_so_far_is_a_staircase() -> None:
    assert staircase([(0.0, 10.0), (50.0, 60.0)], 100.0) == "M0 100H500V600H1000"


def test_a_history_draws_every_trial_and_failed_ones_apart() -> None:
    trial_history = History(
        trials=(trial(9.0), trial(None, num_warps=2), trial(5.0, num_warps=4), trial(7.0, num_stages=2))
    )
    plot = charts.progress(trial_history, Detail.among(1), measured=False)
    assert plot is not None
    assert len(plot.marks) == 4
    assert [mark.y for mark in plot.marks if mark.shape == charts.FAILED[Outcome.WRONG_RESULT][1]] == [2.0]
    assert [key.words for key in plot.legend] == ["triton/forward", "best so far", "wrong result"]
    best = plot.marks[2]
    assert best.y == max(mark.y for mark in plot.marks)  # fastest lies lowest
    assert charts.progress(History(trials=(trial(None),)), Detail.among(1), measured=False) is None


def test_long_searches_are_thinned_but_keep_every_improvement() -> None:
    trials = tuple(trial(1000.0 - number * (number % 100 == 0), num_warps=4) for number in range(1000))
    trial_history = History(trials=trials)
    plot = charts.progress(trial_history, Detail(marks=60, lines=30), measured=True)
    assert plot is not None
    assert len(plot.marks) <= 61
    drawn = {int(mark.title.partition(":")[0]) for mark in plot.marks}
    assert {number for number, _ in trial_history.improvements} <= drawn
    assert "of 1000 trials are drawn" in plot.note


def test_parallel_coordinates_have_an_axis_for_each_parameter_that_varied() -> None:
    trials = [trial(10.0 + warps + stages, num_warps=warps, num_stages=stages) for warps in (2, 4) for stages in (1, 2)]
    plot = charts.parallel(History(trials=(*trials, trial(None, num_warps=8))), "triton/forward", 100)
    assert plot is not None
    assert [axis.name for axis in plot.axes] == ["num_stages", "num_warps", "us"]
    assert len(plot.lines) == 4
    assert plot.lines[-1].style == "q0"  # the fastest is drawn last, on top
    assert "1 that failed" in plot.note
    assert charts.parallel(History(trials=tuple(trials[:2])), "triton/forward", 100) is None


def test_the_roofline_knows_the_peak_of_each_type() -> None:
    device = charts.device_of("h200")
    entries = [samples.measured(), samples.measured(samples.problem(batch=1))]
    plot = charts.roofline(entries, device, measured=True)
    assert plot is not None
    assert sum(mark.style == charts.OURS for mark in plot.marks) == 2
    assert len(plot.lines) == 1
    assert "bfloat16: 989 TFLOP/s" in plot.legend[-1].words
    assert charts.roofline(entries, None, measured=True) is None
    assert charts.device_of("no such card") is None


def test_a_predicted_ranking_draws_no_rivals() -> None:
    plot = charts.roofline([samples.predicted()], charts.device_of("h200"), measured=False)
    assert plot is not None
    assert {mark.style for mark in plot.marks} == {charts.OURS}


# --- what newer entries hold ------------------------------------------------------------------------------------------


def with_lead(rival: Rival, ratio: float, low: float, high: float) -> Rival:
    """A rival as an entry with intervals holds it."""
    return replace(rival, lead=Interval(ratio=ratio, low=low, high=high), energy=Energy(joules=0.25, watts=610.0))


def test_intervals_and_energy_are_shown_where_the_entry_has_them() -> None:
    plain = samples.measured()
    rivals = tuple(with_lead(rival, 1.2, 0.99, 1.4) for rival in plain.rivals)
    gathered = sections_of(replace(plain, rivals=rivals))
    for text in (report.html_text(gathered), report.markdown_text(gathered).replace("\\", "")):
        assert "1.20x (0.99-1.40)" in text
    assert "250 mJ" in report.html_text(gathered)
    assert "610" in report.html_text(gathered)
    assert gathered[0].measured is not None
    assert (gathered[0].measured.faster, gathered[0].measured.even) == (0, 1)  # the interval holds 1: nobody is faster
    assert gathered[0].standings[0].even == 1


def test_older_entries_show_ratios_alone() -> None:
    gathered = sections_of(samples.measured())
    text = report.html_text(gathered)
    assert "1.42x" in text
    assert "(" not in figures.against(figures.lead_over(samples.measured(), samples.measured().rivals[0]))
    assert "Watts" not in text
    assert gathered[0].standings[0].even is None


def sections_of(entry: CacheEntry) -> list[contents.Section]:
    file = file_format.CacheFile(
        schema=1,
        op=Op.FORWARD,
        device="h200",
        triton=triton_release.installed_release(),
        fingerprint=H200.fingerprint,
        entries={entry.problem.key: entry},
    )
    return contents.gather([file])


# --- texts ------------------------------------------------------------------------------------------------------------


def test_the_winner_differs_from_the_runner_up_in_lines_and_parameters(entry: CacheEntry) -> None:
    difference = listing.Shelf().difference(entry, "here")
    assert difference is not None
    kinds = {kind for kind, _ in difference.lines}
    assert {"in", "out", "at"} <= kinds
    other = [choice for choice in listing.choices(entry) if choice.other]
    assert other
    own, theirs = (importance.params_of(variant) for variant in (entry.variant, entry.candidates[0].variant))
    assert {choice.name for choice in other} == {name for name, value in own.items() if theirs[name] != value}
    assert all(choice.about for choice in other)


def test_texts_beyond_the_room_give_way_to_a_sentence(entry: CacheEntry) -> None:
    shelf = listing.Shelf(room=1000)
    assert "left out to keep this file small" in shelf.listing(entry, "here").note
    difference = shelf.difference(entry, "here")
    assert difference is not None
    assert difference.lines == ()
    assert "left out" in difference.note


def test_a_runner_up_of_another_template_is_named(entry: CacheEntry) -> None:
    other = replace(entry.candidates[0], template="gluon/forward")
    difference = listing.Shelf().difference(replace(entry, candidates=(other,)), "here")
    assert difference is not None
    assert "another template, gluon/forward" in difference.note


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_report_of_a_hundred_problems_stays_below_5_mb(tmp_path: Path) -> None:
    entries = [searched.entry_of(problem, number) for number, problem in enumerate(searched.problems(100))]
    folder = tmp_path / "cache"
    store.merge(folder, H200, Op.FORWARD, entries)
    searched.search(folder, H200, entries[0], 200, seed=0)
    page, _ = report.build(folder, tmp_path / "out")
    with_history = [card for card in ranking(folder).cards if card.history.trials]
    assert len(with_history) == 1
    # What a search of 200 trials added, a hundred times: writing all their journals would take a minute.
    added = sum(len(report.environment(autoescape=True).from_string(DRAWN).render(card=card)) for card in with_history)
    assert page.stat().st_size + added * 99 < 5_000_000


DRAWN = """{% import "charts.html.j2" as draw with context %}{{ draw.plot(card.progress) }}
{% for template, chart in card.parallel %}{{ draw.parallel(template, chart) }}{% endfor %}"""
