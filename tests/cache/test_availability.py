"""Tuned kernels that the installed Triton cannot compile: users hear of them, and calls take what was beside them."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import samples

from autoattn.cache import availability, store
from autoattn.codegen import render, resources, search_space
from autoattn.core import device_profiles, triton_release
from autoattn.core.cache_entry import CacheEntry, Candidate, Finding, Mark
from autoattn.core.problem import Op, Problem
from autoattn.runtime.plan import cache_lookup
from autoattn.runtime.plan.explanations import Explanation, Level

H200 = device_profiles.named("h200")
GLUON, PLAIN = "gluon/forward", "triton/forward"
TUNED = samples.problem()
NEAR = samples.problem(seq_q=1100)
FUTURE = "3.12.0"


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resources, "shipped_cache", lambda: tmp_path / "shipped")


@pytest.fixture
def nobody_warned() -> None:
    availability.warned.clear()


def tuned(problem: Problem = TUNED, **changes: Any) -> CacheEntry:
    """An entry whose kernel is Hopper's and whose fastest rival is sdpa-cudnn."""
    default = search_space.load(GLUON).default(problem, H200)
    entry = replace(samples.measured(problem), template=GLUON, params=default.as_dict(), choice="kernel", candidates=())
    rival = replace(entry.rivals[0], name="sdpa-cudnn")
    versions = {"triton": f"{triton_release.installed_release()}.0"}
    return samples.current(replace(entry, **{"rivals": (rival,), "versions": versions, **changes}))


def explained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, entry: CacheEntry, problem: Problem, installed: str = FUTURE
) -> Explanation:
    """What a call gets once another Triton is installed."""
    store.merge(folder, H200, Op.FORWARD, [entry])
    monkeypatch.setattr(triton_release, "installed", lambda: installed)
    return cache_lookup.explain(problem, H200, folder)


@pytest.mark.parametrize(("problem", "level"), [(TUNED, Level.EXACT), (NEAR, Level.NEAREST)])
def test_a_call_takes_the_fastest_rival_where_its_tuned_kernel_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Problem, level: Level
) -> None:
    answer = explained(tmp_path, monkeypatch, tuned(), problem)
    assert (answer.route, answer.level) == ("sdpa-cudnn", level)
    assert "its kernel cannot run here; sdpa-cudnn was the fastest beside it" in answer.reason
    assert f"this is {FUTURE}" in answer.unavailable
    assert 'pip install "torch==2.15.*", which brings Triton 3.9' in answer.unavailable


def test_a_runner_up_that_can_run_and_is_faster_than_all_rivals_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = search_space.load(PLAIN).default(TUNED, H200)
    digest = render.render(TUNED, plain).digest
    runner_up = Candidate(template=PLAIN, params=plain.as_dict(), source_digest=digest, time_us=1.0)
    answer = explained(tmp_path, monkeypatch, tuned(candidates=(runner_up,)), NEAR)
    assert (answer.route, answer.variant) == ("kernel", plain)


def test_a_kernel_that_a_verification_found_wrong_gives_way_to_the_fastest_rival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = Mark(finding=Finding.WRONG, detail="seen")
    for problem in (TUNED, NEAR):
        answer = explained(tmp_path, monkeypatch, tuned(mark=mark), problem, triton_release.installed())
        assert answer.route == "sdpa-cudnn"
        assert answer.unavailable == ""


def test_nothing_is_said_where_the_tuned_kernel_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = explained(tmp_path, monkeypatch, tuned(), NEAR, triton_release.installed())
    assert (answer.route, answer.unavailable) == ("kernel", "")
    assert availability.sentences([tuned()]) == []


def test_sentences_group_problems_by_reason_and_give_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = triton_release.installed_release()
    entries = [tuned(), tuned(NEAR), samples.measured(choice="kernel"), tuned(choice="sdpa-cudnn")]
    monkeypatch.setattr(triton_release, "installed", lambda: FUTURE)
    first, *others = availability.sentences(entries)
    assert first.startswith(f"2 problems cannot run the tuned kernel here: {GLUON} is written for Triton")
    assert 'pip install "torch==2.15.*"' in first
    assert [sentence.split(",")[0] for sentence in others] == [f"2 problems tuned with Triton {tuning}"]


def test_a_process_is_warned_once_by_warnings_and_by_logging(
    nobody_warned: None, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(record=True) as said, caplog.at_level(logging.WARNING, "autoattn"):
        warnings.simplefilter("always")
        availability.warn_once("the reason; the way out")
        availability.warn_once("another reason")
    assert [str(warning.message) for warning in said] == [caplog.records[0].message]
    assert "the reason; the way out" in str(said[0].message)
    assert len(caplog.records) == 1


def test_every_supported_release_has_a_torch_that_brings_it() -> None:
    assert set(triton_release.TORCH) == set(triton_release.SUPPORTED)
