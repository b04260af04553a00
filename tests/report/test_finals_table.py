"""The report's table of the finals: shares, errors, energy, who is tied and who is beaten by nobody."""

from __future__ import annotations

from dataclasses import replace

import pytest
import samples
from report_pages import Page

from autoattn import report
from autoattn.cache.file_format import SCHEMA, CacheFile
from autoattn.cli import show
from autoattn.core import device_profiles, triton_release
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.paired_stats import Interval
from autoattn.core.problem import DType, Op, Precision
from autoattn.report import contents, figures
from autoattn.report.finals_table import HEAD, contestants, front


def test_nobody_on_the_front_is_beaten_and_everybody_off_it_is() -> None:
    points = [(1.0, 5.0, 3.0), (2.0, 4.0, 3.0), (2.0, 5.0, 3.0), (9.0, 9.0, 1.0), (1.0, 5.0, 3.0)]
    assert front(points) == [True, True, False, True, True]
    assert front([]) == []


def test_a_coordinate_that_somebody_does_not_know_counts_for_nobody() -> None:
    assert front([(1.0, 2.0, None), (2.0, 3.0, 1.0)]) == [True, False]
    assert front([(1.0, None), (2.0, None)]) == [True, False]


def test_the_table_has_kernels_and_rivals_with_all_that_is_known() -> None:
    entry = samples.certified()
    rows = {row.name.split()[-1]: row for row in contestants(entry, "h200")}
    winner, tied, slower = (rows[digest[:8]] for digest in (entry.source_digest, "aa" * 4, "bb" * 4))
    assert (winner.winner, winner.lead) == (True, None)
    assert (tied.winner, tied.tied, slower.tied) == (False, True, False)
    assert winner.occupancy == 1
    h200 = device_profiles.named("h200")
    assert winner.tensor_share == pytest.approx(entry.problem.flops() / 400e-6 / h200.peak_flops["bfloat16"])
    assert winner.bandwidth_share == pytest.approx(entry.problem.bytes() / 400e-6 / h200.bandwidth)
    assert winner.error_ratio is None, "PyTorch's own choice of a backend was not among the rivals"
    assert {"sdpa-flash", "sdpa-cudnn"} <= rows.keys()
    assert rows["sdpa-flash"].registers is None
    assert len(rows) == 5, "the template's default is a finalist and stands there once"
    assert [row.median_us for row in contestants(entry, "h200")] == sorted(row.median_us for row in rows.values())
    assert {row.name.split()[-1] for row in rows.values() if row.front} == {"01234567", "aaaaaaaa", "sdpa-cudnn"}


def test_errors_are_told_beside_those_of_sdpa() -> None:
    entry = samples.certified()
    rivals = tuple(replace(rival, name="sdpa") if rival.name == "sdpa-flash" else rival for rival in entry.rivals)
    ratios = {row.name: row.error_ratio for row in contestants(replace(entry, rivals=rivals), "h200")}
    assert ratios["sdpa"] == 1.0
    assert [ratio for name, ratio in ratios.items() if name.endswith("bbbbbbbb")] == [pytest.approx(1.2)]


def test_an_unknown_card_has_no_shares_and_an_old_entry_no_table() -> None:
    assert {(row.tensor_share, row.occupancy) for row in contestants(samples.certified(), "nobody")} == {(None, None)}
    assert contestants(samples.measured(), "h200") == contestants(samples.predicted(), "h200") == ()


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({"dtype": DType.FLOAT8}, 2 * 989.4e12),
        ({"dtype": DType.FLOAT32, "precision": Precision.TF32}, 494.7e12),
        ({"dtype": DType.FLOAT32}, None),
    ],
)
def test_the_peak_is_that_of_the_problems_type(changes: dict[str, object], rate: float | None) -> None:
    problem = samples.problem(**changes)
    row = contestants(samples.certified(problem), "h200")[0]
    expected = None if rate is None else pytest.approx(problem.flops() / row.median_us * 1e6 / rate, rel=0.01)
    assert row.tensor_share == expected


def sections(*entries: CacheEntry) -> list[contents.Section]:
    known = {entry.problem.key: entry for entry in entries}
    fingerprint = samples.H200.fingerprint
    release = triton_release.installed_release()
    file = CacheFile(
        schema=SCHEMA, op=Op.FORWARD, device="h200", triton=release, fingerprint=fingerprint, entries=known
    )
    return contents.gather([file])


def test_the_page_shows_intervals_ties_and_the_table() -> None:
    shown = report.html_text(sections(samples.certified()))
    assert "0.91x (0.90-0.92)" in shown
    assert "1.42x (1.40-1.44)" in shown
    assert "128 rounds, 3 more discarded; 1 as good as the winner" in shown
    assert "1.002x (0.998-1.006)" in shown
    heads = {cell for row in Page(shown).rows for cell in row}
    assert set(HEAD) - heads == {"RMS over SDPA's"}  # no row has it: SDPA was not measured
    plain = report.html_text(sections(samples.measured()))
    assert "as good" not in plain
    assert "RMS over" not in plain


def test_show_has_the_interval_and_who_is_as_good() -> None:
    assert show.comparison(samples.certified()) == "0.91x (0.90-0.92) sdpa-cudnn; 1 as good"
    assert show.comparison(samples.measured()) == "0.91x sdpa-cudnn"


def test_a_narrow_interval_has_a_digit_more() -> None:
    assert figures.within(Interval(ratio=1.07, low=1.05, high=1.09)) == "1.07x (1.05-1.09)"
    assert figures.within(Interval(ratio=1.0712, low=1.0688, high=1.0741)) == "1.071x (1.069-1.074)"


def test_how_the_finals_went_is_told_in_words() -> None:
    entry = samples.certified()
    assert entry.finals is not None
    open_ended = replace(entry, finals=replace(entry.finals, discarded=0, decided=False))
    assert figures.finals(open_ended) == "128 rounds; 1 as good as the winner, not decided for want of rounds"
    alone = replace(entry, finals=replace(entry.finals, finalists=entry.finals.finalists[:1]))
    assert figures.finals(alone) == "128 rounds, 3 more discarded; nobody as good as the winner"
    assert figures.finals(samples.measured()) == ""


def test_the_report_shows_the_worst_case_of_a_kept_maximum() -> None:
    shown = report.html_text(sections(samples.certified(worst=samples.worst())))
    assert "2.32x its usual time, 928.4 us; 1,920 of 2,048 tiles are computed twice" in shown
    assert "11 rounds" in shown
    assert "3.4e-03" in shown
    assert "outgrow" not in report.html_text(sections(samples.certified()))


def test_a_worst_case_without_counted_tiles_says_so() -> None:
    entry = samples.certified(worst=samples.worst(tiles=0, redone=0))
    assert figures.worst(entry) == "2.32x its usual time, 928.4 us; tiles that it does not count are computed twice"
    assert figures.worst(samples.certified()) == ""
