"""Who was in the finals and who was not, in the report's words: no claim goes beyond whom a kernel met."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import samples
from report_pages import HOSTILE, Page, sections_of

from autoattn import report
from autoattn.core.cache_entry import CacheEntry
from autoattn.report import attendance, contents

MISSING = "not installed (no module flash_attn)"


def entry_of(factors: dict[str, float], absent: dict[str, str] | None, **changes: Any) -> CacheEntry:
    """A measured entry whose rivals took so many times as long as its kernel."""
    return replace(
        samples.beside(samples.measured(samples.problem(**changes), choice="kernel"), factors), absent=absent
    )


SLOWER = {"sdpa": 1.5, "sdpa-cudnn": 1.2}
NEW = entry_of({**SLOWER, "fa4": 0.8}, {"fa2": MISSING, "flex": "too slow"}, batch=1)
OTHER = entry_of({**SLOWER}, {"fa2": MISSING, "fa4": "its head dim is at most 256", "flex": "too slow"}, batch=2)
OLD = entry_of({**SLOWER, "template default": 1.0}, None, batch=3)
NOBODY = entry_of({}, None, batch=4)


def texts(*entries: CacheEntry) -> list[str]:
    """What both forms of the report say, in lines of single spaces."""
    sections = sections_of(*entries)
    page, twin = Page(report.html_text(sections)).text, re.sub(r"\\(.)", r"\1", report.markdown_text(sections))
    return [" ".join(text.split()) for text in (page, twin)]


def ranking(*entries: CacheEntry) -> contents.Ranking:
    measured = sections_of(*entries)[0].measured
    assert measured is not None
    return measured


def test_our_kernel_is_not_the_fastest_where_a_peer_is() -> None:
    ranked = ranking(NEW, OTHER)
    assert (ranked.faster, ranked.with_rivals) == (1, 2)
    assert [card.best for card in ranked.cards] == [("sdpa-cudnn", 1.2), ("fa4", 0.8)]  # the larger problem first
    for text in texts(NEW, OTHER):
        assert "is the fastest of all that it met" in text
        assert "0.80x fa4" in text
        assert "sdpa, sdpa-cudnn, FlashAttention-4 (fa4) in 1" in text


def test_the_report_says_who_took_part_and_why_others_did_not() -> None:
    assert attendance.sentences([NEW, OTHER]) == [
        f"FlashAttention-2 (fa2) took part in 0 of 2 problems; absent: {MISSING} (2)",
        "FlashAttention-4 (fa4) took part in 1 of 2 problems; absent: its head dim is at most 256 (1)",
        "FlexAttention (flex) took part in 0 of 2 problems; absent: too slow (2)",
    ]
    for text in texts(NEW, OTHER):
        assert all(sentence in text for sentence in attendance.sentences([NEW, OTHER]))
    assert attendance.sentence(NEW) in texts(NEW, OTHER)[0]  # of each problem the page tells, and not the summary


def test_an_old_entry_claims_pytorchs_backends_alone() -> None:
    assert attendance.sentences([OLD]) == [
        "1 of 1 problem met PyTorch's backends alone: who else was installed is not recorded"
    ]
    assert attendance.sentence(OLD) == (
        "met PyTorch's backends alone (sdpa, sdpa-cudnn); who else was installed is not recorded"
    )
    assert attendance.sentence(OLD) in texts(OLD)[0]
    lines = attendance.sentences([NEW, OLD, OTHER])
    assert lines[-1].startswith("1 of 3 problems met PyTorch's backends alone")
    assert lines[1].startswith("FlashAttention-4 (fa4) took part in 1 of 3 problems; absent: its head dim")


def test_an_entry_that_met_nobody_says_so() -> None:
    assert attendance.sentences([NOBODY, NEW])[-1] == "1 of 2 problems met nobody"
    assert attendance.sentence(NOBODY) == "met nobody; who else was installed is not recorded"
    assert attendance.sentence(replace(NOBODY, absent={})) == "met nobody; nobody was absent"


def test_a_prediction_says_nothing_of_finals() -> None:
    assert attendance.sentences([samples.predicted()]) == []


def test_of_many_reasons_the_commonest_are_shown() -> None:
    entries = [entry_of(SLOWER, {"fa4": f"reason {max(0, number - 3)}"}, batch=1 + number) for number in range(12)]
    (line,) = attendance.sentences(entries)
    assert line.startswith("FlashAttention-4 (fa4) took part in 0 of 12 problems; absent: reason 0 (4); reason 1 (1)")
    assert line.endswith(f"; other reasons ({9 - attendance.REASONS})")


@pytest.mark.parametrize("absent", [{HOSTILE: "gone"}, {"fa4": HOSTILE}])
def test_text_of_an_absence_cannot_act_in_the_page(absent: dict[str, str]) -> None:
    sections = sections_of(entry_of(SLOWER, absent))
    page = report.html_text(sections)
    assert Page(page).scripts == [report.SCRIPT]
    assert (page + report.markdown_text(sections)).count("<script") == 1
