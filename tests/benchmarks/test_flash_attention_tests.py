"""The script that runs FlashAttention's own tests: what it puts in their place, draws, leaves out and reports."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import flash_attention_tests as examination
import pytest
import torch
from checkout_paths import CHECKOUT

SCRIPT = CHECKOUT / "benchmarks" / "flash_attention_tests.py"
FILE = """
import time
import pytest, torch
from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.layers.rotary import apply_rotary_emb

@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
def test_probabilities(dropout_p):
    pass

@pytest.mark.parametrize("seqlen_q,seqlen_k", [(3, 5), (5, 5), (7, 9)])
@pytest.mark.parametrize("d", [16, 32])
def test_window(seqlen_q, seqlen_k, d):
    q, k = torch.randn(2, seqlen_q, 2, d), torch.randn(2, seqlen_k, 2, d)
    out, lse, _ = flash_attn_func(q, k, k, 0.0, window_size=torch.tensor([2, 1]), return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (2, 2, seqlen_q)

def test_wrong():
    assert flash_attn_qkvpacked_func(torch.ones(1, 4, 3, 2, 16)).sum() == 0

def test_cache():
    flash_attn_with_kvcache(None, None, None)

def test_pages():
    flash_attn_varlen_func(None, None, None, None, None, 1, 1, block_table=1)

def test_slow():
    time.sleep(60)
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "test_flash_attn.py"
    file.write_text(FILE)
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), str(file), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)


def test_the_table_says_what_passed_failed_was_left_out_and_took_too_long(tmp_path: Path) -> None:
    ended = run(tmp_path, "--cases", "4", "--limit", "1")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    for line in (
        "| passed | 5 |",
        "| failed | 1 |",
        "| longer than the limit | 1 |",
        f"| left out: {examination.NO_CACHE} | 2 |",
        f"| left out: {examination.NO_PROBABILITIES} | 1 |",
        "- failed: test_wrong",
        "- failed: test_slow",
    ):
        assert line in ended.stdout


def test_a_file_that_is_not_there_is_said_in_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "nothing.py")]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "must be a copy of tests/test_flash_attn.py" in ended.stderr


def test_cases_are_drawn_alike_by_a_seed_and_none_twice() -> None:
    axes: list[list[Any]] = [[1, 2, 3], [(4, 5), (6, 7)], list(range(10))]
    first, second = (examination.drawn(axes, 20, random.Random(7)) for _ in range(2))
    assert first == second
    assert len(set(first)) == 20
    assert all(len(row) == 4 and row[:1] <= (3,) and row[1:3] in ((4, 5), (6, 7)) for row in first)
    assert sorted(examination.drawn(axes, 99, random.Random(7))) == sorted(
        (one, *pair, last) for one in axes[0] for pair in axes[1] for last in axes[2]
    )


def test_packed_tensors_are_taken_apart() -> None:
    three = torch.randn(12, 3, 2, 16)
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    query, key, value = three.unbind(1)
    expected = examination.varlen(query, key, value, offsets, offsets, 7, 7, causal=True)
    assert torch.equal(examination.varlen_of_three(three, offsets, 7, causal=True), expected)
    dense = three[None].expand(2, -1, -1, -1, -1)
    pair = examination.dense_of_pair(dense[:, :, 0], dense[:, :, 1:])
    assert torch.equal(pair, examination.dense_of_three(dense))


@pytest.mark.parametrize("with_unused", [False, True])
def test_padding_is_taken_out_and_put_back(with_unused: bool) -> None:
    padded = torch.randn(2, 4, 3)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    unused = torch.tensor([[0, 0, 0, 1], [0, 1, 0, 0]], dtype=torch.bool) if with_unused else None
    tokens, places, offsets, longest, lengths = examination.unpad_input(padded, mask, unused)
    assert offsets.tolist() == ([0, 4, 6] if with_unused else [0, 3, 4])
    assert (longest, lengths.tolist()) == (4 if with_unused else 3, [3, 1])
    kept = mask if unused is None else mask | unused
    assert torch.equal(examination.pad_input(tokens, places, 2, 4), padded * kept[..., None])
