"""The benchmark of lengths that never repeat: what it draws, and what it calls a new length."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import dynamic
import pytest
import torch


@pytest.mark.parametrize("row", dynamic.ROWS, ids=lambda row: row.name)
def test_no_length_repeats_and_each_run_draws_the_same(row: dynamic.Row) -> None:
    lengths = dynamic.draw_lengths(row, 24 + dynamic.WARM)
    assert len(set(lengths)) == len(lengths) == 24 + dynamic.WARM
    assert all(row.lengths[0] <= length < row.lengths[1] for length in lengths)
    assert dynamic.draw_lengths(row, 24 + dynamic.WARM) == lengths


def test_lengths_grow_by_a_token_of_a_cache_a_chunk_of_a_prompt_or_eight_beside_a_bias() -> None:
    for row in dynamic.ROWS:
        if row.step:
            lengths = dynamic.draw_lengths(row, 20)
            assert {after - before for before, after in itertools.pairwise(lengths)} == {row.step}
    assert {row.step for row in dynamic.ROWS} == {0, 1, 8, 512}


def test_calls_that_warm_up_are_not_counted_and_the_same_lengths_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[int] = []
    clock = iter(range(1000))
    monkeypatch.setattr(dynamic, "timed", lambda call: (call(), (float(next(clock)), 0.0))[1])
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated", "synchronize"):
        monkeypatch.setattr(dynamic.torch.cuda, name, lambda: 0)
    lengths = list(range(1, dynamic.WARM + 6))
    times = dynamic.measure(lambda length: lambda: met.append(length), lengths)
    assert met == [*lengths, *lengths[dynamic.WARM :], lengths[-1]], "the last one is asked for its memory"
    assert times.host == [float(dynamic.WARM + place) for place in range(5)]
    assert times.host_again == [float(dynamic.WARM + 5 + place) for place in range(5)]


@pytest.mark.parametrize("installed", ["flash_attn.cute", "flash_attn", None])
def test_the_newest_flash_attention_that_is_installed_takes_part(
    installed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> Any:
        if name != installed:
            raise ModuleNotFoundError(name)
        return SimpleNamespace(flash_attn_func=lambda *given: (name, None), flash_attn_varlen_func=None)

    monkeypatch.setattr(dynamic.importlib, "import_module", import_module)
    monkeypatch.setattr(dynamic, "DEVICE", torch.device("cpu"))
    names = list(dynamic.decode(1, 2, 2, 16))
    expected = {"flash_attn.cute": ["FlashAttention-4"], "flash_attn": ["FlashAttention"], None: []}[installed]
    assert names == ["autoattn", "torch SDPA", *expected]


def test_contestants_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "DEVICE", torch.device("cpu"))
    ours, theirs = (prepare(33)() for prepare in list(dynamic.decode(2, 4, 2, 16).values())[:2])
    assert isinstance(ours, torch.Tensor)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
