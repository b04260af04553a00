"""The report: what it says, that it needs nothing else, and that no text of a cache can act in it."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import samples
from cache_files import FORWARD_FILE
from report_pages import HOSTILE, Page, sections_of

from autoattn import report
from autoattn.cache import store
from autoattn.codegen import render
from autoattn.core import device_profiles
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import Layout, Numerics, Op
from autoattn.core.trial import Evidence
from autoattn.cost_model import accuracy
from autoattn.errors import CacheError, StateError
from autoattn.report import commands, contents, figures, files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with measured and predicted entries of one card, and predicted ones of another."""
    causal, full = samples.problem(), samples.problem(mask=Mask())
    store.merge(tmp_path / "cache", samples.H200, Op.FORWARD, [samples.measured(causal), samples.predicted(full)])
    store.merge(tmp_path / "cache", samples.A30, Op.FORWARD, [samples.predicted(causal), samples.predicted(full)])
    return tmp_path / "cache"


def markdown_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[re.sub(r"\\(.)", r"\1", cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def cards(sections: list[contents.Section]) -> tuple[contents.Card, ...]:
    """The measured problems of the first section."""
    assert sections[0].measured is not None
    return sections[0].measured.cards


def test_both_files_are_written_and_named(folder: Path, tmp_path: Path) -> None:
    page, twin = report.build(folder, tmp_path / "new" / "out")
    assert (page, twin) == (tmp_path / "new" / "out" / "report.html", tmp_path / "new" / "out" / "report.md")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert twin.read_text(encoding="utf-8").startswith("# autoattn report")
    assert sorted(os.listdir(page.parent)) == ["report.html", "report.md"]


def test_the_page_is_well_formed_and_loads_nothing(folder: Path, tmp_path: Path) -> None:
    text = report.build(folder, tmp_path)[0].read_text(encoding="utf-8")
    page = Page(text)
    assert page.loads == []
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert "url(" not in text
    assert "@import" not in text


def test_every_link_has_one_target(folder: Path, tmp_path: Path) -> None:
    page = Page(report.build(folder, tmp_path)[0].read_text(encoding="utf-8"))
    assert len(page.ids) == len(set(page.ids))
    assert page.targets
    assert set(page.targets) <= set(page.ids)


def test_every_fact_of_a_measured_entry_stands_in_the_page_and_the_summary_has_the_first_of_them() -> None:
    entry = samples.measured()
    sections = sections_of(entry)
    page, summary = Page(report.html_text(sections)).text, re.sub(r"\\(.)", r"\1", report.markdown_text(sections))
    for fact in (str(entry.problem), "sdpa-flash", "0.91x sdpa-cudnn", "template default", "400.0", "71 ok"):
        assert fact in page, fact
        assert fact in summary, fact
    for fact in (
        str(entry.problem), "measured", "sdpa-flash", "1.42x", "0.91x", "sdpa-cudnn", "template default",
        "400.0", "396.0 to 408.0", "2.9e-03", "7.8e-03", "2.1e-04", "255", "1755 MHz", "bound by tensor", "7.76",
        "71 ok", "seed 0", "torch 2.13.0", f"triton {entry.versions['triton']}",
        entry.source_digest, entry.space_digest,
        str(entry.variant), "tune --device h200 --dtype bfloat16 --batch 4 --heads 32",
        "--effort standard --seed 0", "64 HMMA", "@triton.jit",
    ):  # fmt: skip
        assert fact in page, fact


def test_the_twin_has_the_same_summary_rows(folder: Path, tmp_path: Path) -> None:
    page, twin = (path.read_text(encoding="utf-8") for path in report.build(folder, tmp_path))
    flat = [[" ".join(cell.split()) for cell in row] for row in Page(page).rows]
    flat += [row[:-1] for row in flat if len(row) == 8]  # the page draws in a last column what the summary cannot
    rows = markdown_rows(twin)
    for row in rows:
        if row[0].startswith("bf16") or row[0] in ("Problem", "Rival", "sdpa-flash", "template default"):
            assert row in flat, row
    assert sum(row[0].startswith("bf16") for row in rows) == 5  # and one of them is behind a rival


def test_measured_and_predicted_stand_apart_and_predicted_carries_a_banner() -> None:
    measured, predicted = samples.measured(), samples.predicted(samples.problem(mask=Mask()))
    sections = sections_of(measured, predicted)
    for text in (Page(report.html_text(sections)).text, re.sub(r"\\(.)", r"\1", report.markdown_text(sections))):
        above, banner, below = text.partition("Nothing here was measured.")
        assert banner
        assert str(measured.problem) in above
        assert str(measured.problem) not in below
        assert str(predicted.problem) in below
        assert str(predicted.problem) not in above
    assert "Nothing here was measured" not in report.html_text(sections_of(measured))


def test_predictions_stand_beside_published_times_and_what_is_known_of_their_rank() -> None:
    problem = samples.problem(
        batch=1, heads_q=128, heads_kv=128, seq_q=65536, seq_kv=65536, head_dim=56, head_dim_v=56, mask=Mask(),
        layout=Layout.BSHD,
    )  # fmt: skip
    entry = samples.predicted(problem)
    assert entry.prediction is not None
    entry = replace(entry, prediction=replace(entry.prediction, time_us=1.3845e6))  # 0.70 of what was published
    for beside, texts in ((True, texts_of(samples.A30, entry)), (False, texts_of(samples.H200, entry))):
        for text in texts:
            assert ("0.70" in text) == beside
            assert ("1,977,925" in text) == beside
            assert (report.PROVES in text) == beside
    for device, text in ((samples.A30, accuracy.known(80)), (samples.H200, accuracy.known(90))):
        assert all(text in page_text for page_text in texts_of(device, entry))


def texts_of(device: Device, entry: CacheEntry) -> list[str]:
    """What both forms of a report of one predicted entry say."""
    sections = sections_of(entry, card=device)
    return [Page(report.html_text(sections)).text, re.sub(r"\\(.)", r"\1", report.markdown_text(sections))]


def test_text_of_a_cache_cannot_act_in_the_page() -> None:
    entry = samples.measured()
    rival = replace(entry.rivals[0], name=HOSTILE)
    hostile = samples.measured(choice=HOSTILE, rivals=(rival,), versions={HOSTILE: HOSTILE}, source_digest=HOSTILE)
    text = report.html_text(sections_of(hostile))
    page = Page(text)
    assert page.scripts == [report.SCRIPT]
    assert text.count("<script") == 1
    assert "alert('1')" in page.text


def test_text_of_a_cache_cannot_act_in_the_twin() -> None:
    entry = samples.measured()
    rival = replace(entry.rivals[0], name=HOSTILE)
    text = report.markdown_text(sections_of(samples.measured(choice=HOSTILE, rivals=(rival,))))
    assert "<script" not in text
    assert not re.search(r"(?<!\\)\]\(", re.sub(r"(?s)```.*?```", "", text))
    assert "\x1b" not in text
    assert "\n# head" not in text
    rows = [row for row in markdown_rows(text) if "alert" in row[0]]
    assert [len(row) for row in rows] == [7]  # among the rivals: a text with "|" makes no cells


def test_a_fence_is_longer_than_any_in_the_source() -> None:
    assert report.fenced("a\n`````\nb", "python").splitlines()[0] == "``````python"
    assert report.fenced("plain").splitlines() == ["```", "plain", "```"]


def test_hostile_source_stays_inside_its_element(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = render.render(samples.problem(), samples.measured().variant)
    hostile = replace(whole, text="</pre></details><img src=x>\n```\n# out")
    monkeypatch.setattr(store, "source_of", lambda _: hostile)
    page = Page(report.html_text(sections_of(samples.measured())))
    assert "img" not in page.tags
    assert "<img" not in report.markdown_text(sections_of(samples.measured()))


def test_a_kernel_that_problems_share_is_shown_once() -> None:
    problem, batched = samples.problem(), samples.problem(batch=8)
    params = samples.measured(problem).params
    sections = sections_of(samples.measured(problem, params=params), samples.measured(batched, params=params))
    first, second = cards(sections)
    assert first.source.text
    assert (second.source.text, second.source.same_as) == ("", first.anchor)
    assert Page(report.html_text(sections)).text.count("@triton.jit\ndef forward") == 1


def test_a_source_that_is_not_the_one_that_was_timed_says_so() -> None:
    changed = cards(sections_of(samples.measured(source_digest="f" * 16)))[0]
    assert "template has changed" in changed.source.note
    entry = samples.measured()
    same = replace(entry, source_digest=render.render(entry.problem, entry.variant).digest)
    assert cards(sections_of(same))[0].source.note == ""


def test_sections_with_measurements_come_first(folder: Path) -> None:
    sections = contents.gather(store.read_folder(folder))
    assert [section.device for section in sections] == ["h200", "a30"]
    assert sections[0].full_name == device_profiles.named("h200").full_name


def test_an_empty_cache_is_one_sentence_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"needs cache entries, found none .*; run autoattn tune"):
        report.build(tmp_path, tmp_path / "out")
    with pytest.raises(CacheError, match="must be a folder that is there"):
        report.build(tmp_path / "nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_cache_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache" / "h200").mkdir(parents=True)
    (tmp_path / "cache" / "h200" / FORWARD_FILE).write_text("{")
    with pytest.raises(CacheError, match="damaged"):
        report.build(tmp_path / "cache", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"No space left on device.*report\.html"):
        files.write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.parametrize(
    ("time_us", "text"),
    [(0.4567, "0.46"), (9.994, "9.99"), (12.34, "12.3"), (999.94, "999.9"), (1234.5, "1,234"), (float("nan"), "-")],
)
def test_times_have_the_digits_that_mean_something(time_us: float, text: str) -> None:
    assert figures.microseconds(time_us) == text


def test_the_best_rival_is_the_fastest_from_elsewhere() -> None:
    name, ratio, _ = figures.best_rival(samples.measured()) or ("", 0.0, "")
    assert name == "sdpa-cudnn"
    assert ratio == pytest.approx(0.91)
    assert figures.best_rival(samples.predicted()) is None
    ours = [rival for rival in samples.measured().rivals if rival.name in figures.OURS]
    assert ours
    assert figures.best_rival(samples.measured(rivals=tuple(ours))) is None


def test_the_geometric_mean_of_a_ratio_and_its_inverse_is_one() -> None:
    assert figures.geometric_mean([2.0, 0.5]) == pytest.approx(1.0)


def test_the_commands_name_every_part_of_the_problem() -> None:
    card = cards(sections_of(samples.measured()))[0]
    assert card.entry.evidence is Evidence.MEASURED
    assert card.render == (
        "autoattn render --device h200 --dtype bfloat16 --batch 4 --heads 32 --heads-kv 8 --seq-q 1024 --seq-kv 4096 "
        "--head-dim 128 --mask causal:bottom-right --layout bhsd --out kernel.py"
    )


def test_the_commands_of_gradients_name_the_operation() -> None:
    strict = samples.problem(op=Op.BACKWARD, deterministic=True)
    assert commands.arguments(strict).endswith("--layout bhsd --operation backward --deterministic")
    sloped = samples.problem(op=Op.BACKWARD, modifiers=Modifiers(alibi=True, learned_slopes=True))
    assert commands.arguments(sloped).endswith("--operation backward --modifier alibi --modifier learned_slopes")
    assert "operation" not in commands.arguments(samples.problem())


def test_the_commands_and_names_of_online_numerics_say_so() -> None:
    online = samples.problem(numerics=Numerics.ONLINE)
    sections = sections_of(samples.measured(online))
    card = cards(sections)[0]
    assert "--layout bhsd --numerics online" in card.render
    assert "--layout bhsd --numerics online" in card.reproduce
    for text in (report.html_text(sections), report.markdown_text(sections)):
        assert str(online) in Page(text).text
