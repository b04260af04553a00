"""Spoilt files and concurrent writers: small versions of `benchmarks/robustness.py`, and what its judges see."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import robustness
import spoilt
from cache_files import FORWARD, FORWARD_FILE
from samples import H200, current, measured, predicted, problem
from spoilt import Kind

from autoattn.cache import file_format, store
from autoattn.codegen import resources
from autoattn.errors import ShapesError

SHAPES = """
version: 1
defaults: {dtype: bf16, batch: 4, heads: 32, head_dim: 128}
groups:
  prefill: {problems: [{seq: [1024, 2048], mask: [causal, "window:128,0"]}]}
  decode: {defaults: {heads_kv: 8}, problems: [{seq_q: 1, seq_kv: 4096, softcap: true}]}
"""


def text_of(kind: Kind, folder: Path) -> str:
    if kind is Kind.SHAPES:
        return SHAPES
    if kind is Kind.SPACE:
        return resources.space_path("triton/forward").read_text(encoding="utf-8")
    if kind is Kind.JOURNAL:
        return spoilt.journal(folder / "whole.journal")
    path = store.merge(folder / "whole", H200, FORWARD, [current(measured()), predicted(problem(batch=1))])
    return path.read_text(encoding="utf-8")


def placed(folder: Path, number: int, data: bytes, kind: Kind = Kind.CACHE) -> Path:
    path = folder / str(number) / "h200" / ("space.yaml" if kind is Kind.SPACE else FORWARD_FILE)
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return path


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "count"), [(Kind.CACHE, 300), (Kind.SHAPES, 200), (Kind.SPACE, 25), (Kind.JOURNAL, 300)]
)
def test_a_spoilt_file_is_refused_in_a_sentence_or_says_what_it_holds(kind: Kind, count: int, tmp_path: Path) -> None:
    text, fates = text_of(kind, tmp_path), []
    for number in range(count):
        data = spoilt.mutant(random.Random(number), kind, text)
        fates.append(spoilt.fate(kind, placed(tmp_path, number, data, kind)))
    assert [(number, fate.fault) for number, fate in enumerate(fates) if fate.fault] == []
    assert any(fate.loaded for fate in fates)
    assert any(fate.refused for fate in fates)


@pytest.mark.parametrize("kind", Kind)
def test_a_whole_file_loads(kind: Kind, tmp_path: Path) -> None:
    path = placed(tmp_path, 0, text_of(kind, tmp_path).encode(), kind)
    assert spoilt.fate(kind, path) == spoilt.Fate(loaded=True)


def test_the_judge_sees_an_entry_under_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = json.loads(text_of(Kind.CACHE, tmp_path))
    tree["entries"] = {f"{key}-other": entry for key, entry in tree["entries"].items()}
    monkeypatch.setattr(file_format, "check", lambda key, entry, release: None)
    fate = spoilt.fate(Kind.CACHE, placed(tmp_path, 0, json.dumps(tree).encode()))
    assert "holds another problem" in fate.fault


def test_the_judge_sees_a_kernel_that_nobody_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "why_stale", lambda entry: None)
    fate = spoilt.fate(Kind.CACHE, placed(tmp_path, 0, text_of(Kind.CACHE, tmp_path).encode()))
    assert "would run another kernel" in fate.fault


def test_the_judge_sees_a_value_that_the_text_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = placed(tmp_path, 0, text_of(Kind.CACHE, tmp_path).encode())
    other = file_format.decode(path.read_bytes().replace(b'"seed": 0', b'"seed": 7'), path)
    monkeypatch.setattr(store, "read", lambda path: other)
    assert "search/seed is not what the text says" in spoilt.fate(Kind.CACHE, path).fault


@pytest.mark.parametrize("error", [KeyError("batch"), ShapesError("one\ntwo"), ShapesError("x" * 5000)])
def test_the_judge_sees_a_traceback_and_a_sentence_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(path: Path) -> None:
        raise error

    monkeypatch.setattr(spoilt.shapes_file, "load", load)
    assert spoilt.fate(Kind.SHAPES, placed(tmp_path, 0, SHAPES.encode())).fault


def test_a_seed_and_a_number_name_a_mutant() -> None:
    assert [robustness.drawn(0, number) for number in range(20)] == [robustness.drawn(0, n) for n in range(20)]
    assert robustness.drawn(0, 3) != robustness.drawn(1, 3)


def test_the_count_of_what_is_lost_sees_each_loss() -> None:
    own, shared = predicted(problem(batch=1), time_us=5.0), measured(problem(batch=2), time_us=6.0)
    written = [robustness.Written(own={own.problem.key: 5.0}, shared={shared.problem.key: {6.0, 7.0}})]
    entries = {entry.problem.key: entry for entry in (own, shared)}
    assert robustness.lost(entries, written) == []
    assert len(robustness.lost({}, written)) == 2
    for entry in (predicted(own.problem, time_us=4.0), predicted(shared.problem), measured(shared.problem)):
        assert len(robustness.lost({**entries, entry.problem.key: entry}, written)) == 1


@pytest.mark.exhaustive
def test_three_processes_that_write_one_cache_lose_nothing() -> None:
    text, faults = robustness.writers(3, 2.0)
    assert faults == 0, text
    (merged,) = [line for line in text.splitlines() if line.startswith("| entries merged")]
    assert int(merged.split("|")[2].replace(",", "")) >= 3
