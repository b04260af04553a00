"""The report's first screen, and what a reader does with its tables: each claim on the page that is written."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import samples
from report_pages import Page, file_of, sections_of

from autoattn import report
from autoattn.cache import store
from autoattn.codegen import search_space
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Numerics, Op, Precision
from autoattn.report import baseline, charts, contents, groups, overview, strips


def entry_of(ratio: float, **changes: object) -> CacheEntry:
    """A measured entry whose only rival takes `ratio` times as long."""
    problem = samples.problem(**changes)
    return samples.beside(samples.measured(problem, choice="kernel"), {"sdpa-cudnn": ratio})


TF32 = {"dtype": DType.FLOAT32, "precision": Precision.TF32}
MIXED = (
    entry_of(1.1),
    entry_of(1.21, batch=8),
    entry_of(9.0, **TF32),
    entry_of(4.0, deterministic=True, op=Op.BACKWARD),
    entry_of(5.0, batch=1, heads_q=1, heads_kv=1, seq_q=128, seq_kv=128),
)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "dense"),
        ({"seq_q": 64, "seq_kv": 64}, "small"),
        ({"seq_q": 1, "seq_kv": 65536, "batch": 64}, "decode"),
        ({"mask": Mask.parse("window:128,0")}, "masks"),
        ({"numerics": Numerics.ONLINE}, "online"),
        ({"op": Op.BACKWARD, "deterministic": True}, "deterministic"),
    ],
)
def test_each_problem_has_the_kind_that_sets_it_apart(changes: dict[str, object], kind: str) -> None:
    assert groups.kind_of(samples.problem(**changes)) == kind
    assert kind in groups.KINDS


def test_no_mean_is_over_tf32_deterministic_and_small_problems_together() -> None:
    means = {(group.kind, group.dtype): group.mean for group in groups.of("h200", MIXED)}
    assert means.pop(("dense", "bfloat16")) == pytest.approx((1.1 * 1.21) ** 0.5)
    assert means == {
        ("dense", "float32 tf32"): pytest.approx(9.0),
        ("small", "bfloat16"): pytest.approx(5.0),
        ("deterministic", "bfloat16"): pytest.approx(4.0),
    }
    page = Page(report.html_text(sections_of(*MIXED[:3], MIXED[4])))
    assert "1.15x" in page.panels["fastest"]
    assert [row[3] for row in page.rows if row[:2] == ["sdpa-cudnn", "dense, bfloat16"]] == ["1.15x"]


def test_behind_or_even_comes_first_and_the_most_behind_leads_it() -> None:
    even = replace(entry_of(1.0), absent={})
    even = replace(even, rivals=(replace(even.rivals[0], lead=samples.interval(1.0, 0.99, 1.01)),))
    slow = entry_of(0.8, batch=2)
    small = entry_of(0.5, batch=1, heads_q=1, heads_kv=1, seq_q=128, seq_kv=128)
    page = Page(report.html_text(sections_of(even, slow, small, entry_of(2.0, batch=8))))
    assert next(iter(page.panels)) == "behind"
    assert "3 of 4" in page.panels["behind"]
    places = [page.panels["behind"].index(str(entry.problem)) for entry in (slow, even, small)]
    assert places == sorted(places)
    assert f"beginning with {slow.problem}" in page.panels["next"]
    assert "--effort max" in page.panels["next"]


def test_the_first_screen_names_the_strongest_rival_and_who_was_absent() -> None:
    entry = replace(entry_of(1.3), absent={"fa4": "not installed (no module flash_attn)"})
    (group,) = groups.of("h200", [entry])
    assert (group.strongest, group.absent) == ("sdpa-cudnn (1 of 1)", "fa4")
    page = Page(report.html_text(sections_of(entry)))
    assert "sdpa-cudnn (1 of 1)" in page.panels["fastest"]
    assert "FlashAttention-4 (fa4) in 1" in page.panels["trust"]
    assert "Install FlashAttention-4 (fa4)" in page.panels["next"]
    assert "not recorded" in Page(report.html_text(sections_of(entry_of(1.3)))).panels["fastest"]


def test_predictions_are_counted_and_never_averaged() -> None:
    first = overview.of(sections_of(samples.predicted()))
    assert (first.measured, first.predicted, first.groups, first.behind) == (0, 1, (), ())
    assert any("predicted" in line for line in first.trust)


def test_forward_stands_before_backward_and_the_largest_problem_first() -> None:
    large, problem = entry_of(1.1, batch=8), samples.problem(op=Op.BACKWARD)
    variant = search_space.load("triton/backward").default(problem, samples.H200)
    gradient = samples.tuned(problem, variant)
    forward = [entry_of(1.1, batch=2), large, entry_of(1.1, batch=4)]
    text = report.html_text(contents.gather([replace(file_of(gradient), op=Op.BACKWARD), file_of(*forward)]))
    page = Page(text)
    assert re.findall(r'<h2 class="device">NVIDIA H200, (\w+)</h2>', text) == ["forward", "backward"]
    rows = [row[0] for row in page.rows if len(row) > 6 and row[0].startswith("bf16")]
    assert rows == [str(samples.problem(batch=batch)) for batch in (8, 4, 2)]


def test_the_roofline_holds_every_mark_and_its_legend_is_as_drawn() -> None:
    entries = [entry_of(50.0), entry_of(0.5, batch=1), entry_of(2.0, **TF32)]
    plot = charts.roofline(entries, samples.H200, measured=True)
    assert plot is not None
    assert all(0.0 < mark.x < 100.0 and 0.0 < mark.y < 100.0 for mark in plot.marks)
    assert len({line.style for line in plot.lines}) == 2
    assert {line.style for line in plot.lines} <= {key.style for key in plot.legend}


def test_strips_show_what_is_between_1_0_and_1_3_whatever_the_slowest_rival_takes() -> None:
    drawn = strips.strips([entry_of(1.0), entry_of(1.3, batch=2), entry_of(18.0, batch=1)])
    assert drawn is not None
    at = {tick.label: tick.at for tick in drawn.ticks}
    assert at["1.3"] - at["1.0"] > 25.0
    shapes = [strip.marks[0].shape for strip in drawn.of.values()]
    assert shapes.count(strips.BEYOND) == 1
    assert any(key.shape == strips.BEYOND for key in drawn.legend)


def test_markers_are_explained_above_the_table() -> None:
    text = report.html_text(sections_of(*MIXED[:2]))
    assert text.index("Marks are the rivals") < text.index('class="stack summary measured"')


def test_the_policy_allows_the_one_script_by_its_digest_and_nothing_else() -> None:
    page = Page(report.html_text(sections_of(samples.measured())))
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert page.policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_columns_without_a_value_are_left_out() -> None:
    heads = {cell for row in Page(report.html_text(sections_of(samples.beside(samples.measured(), {})))).rows
             for cell in row}  # fmt: skip
    assert {"Best rival", "Energy", "Even"}.isdisjoint(heads)
    assert "Median us" in heads


def test_a_baseline_shows_what_is_slower_new_gone_and_the_same(tmp_path: Path) -> None:
    same, slower, gone, new = (samples.measured(samples.problem(batch=batch)) for batch in (1, 2, 3, 4))
    store.merge(tmp_path / "old", samples.H200, Op.FORWARD, [same, slower, gone])
    later = replace(slower, measurement=samples.measurement(slower.problem, 440.0))
    store.merge(tmp_path / "new", samples.H200, Op.FORWARD, [same, later, new])
    page, summary = report.build(tmp_path / "new", tmp_path / "out", tmp_path / "old")
    panel = Page(page.read_text()).panels["changes"]
    assert "1 slower, 1 new, 1 gone, 1 the same" in " ".join(panel.split())
    assert "1.10x" in panel
    assert "1.10x" in summary.read_text()
    assert "--against" in summary.read_text()


def test_times_of_two_days_are_as_fast() -> None:
    first = samples.measured()
    second = replace(first, measurement=samples.measurement(first.problem, 408.0))
    (change,) = baseline.compare("old", [file_of(first)], [file_of(second)]).changes
    assert (change.kind, change.ratio) == ("as fast", pytest.approx(1.02))


def test_the_summary_stays_below_its_bytes_says_what_is_left_out_and_links_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sections = sections_of(*(entry_of(1.1, batch=batch) for batch in range(1, 21)))
    whole = report.markdown_text(sections)
    assert report.MARKDOWN_BYTES == 100_000
    assert "more problems are in report.html" not in whole
    assert "](" not in whole
    monkeypatch.setattr(report, "MARKDOWN_BYTES", len(whole.encode()) - 1)
    text = report.markdown_text(sections)
    assert len(text.encode()) < len(whole.encode())
    assert "more problems are in report.html" in text
