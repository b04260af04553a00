"""The script that runs FlashAttention's own tests: what it puts in their place, draws, leaves out and reports."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import flash_attention_tests as examination
import pytest
import torch
from checkout_paths import CHECKOUT

SCRIPT = CHECKOUT / "benchmarks" / "flash_attention_tests.py"
FILE = """
import time
import pytest, torch
from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM
from flash_attn.layers.rotary import apply_rotary_emb

assert torch.cuda.get_device_capability("cuda")[0] >= 7

def convert_flash_attn_S_to_softmax(matrix):
    return matrix.shape

@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
@pytest.mark.parametrize("d", list(range(9)))
def test_probabilities(d, dropout_p):
    if dropout_p:
        convert_flash_attn_S_to_softmax(None)

@pytest.mark.parametrize("seqlen_q,seqlen_k", [(3, 5), (5, 5), (7, 9)])
@pytest.mark.parametrize("d", [16, 32])
def test_window(seqlen_q, seqlen_k, d):
    q, k = torch.randn(2, seqlen_q, 2, d), torch.randn(2, seqlen_k, 2, d)
    out, lse, _ = flash_attn_func(q, k, k, 0.0, window_size=torch.tensor([2, 1]), return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (2, 2, seqlen_q)

def test_wrong():
    assert flash_attn_qkvpacked_func(torch.ones(1, 4, 3, 2, 16)).sum() == 0

@pytest.mark.parametrize("d", [16, 32])
def test_cache(d):
    with pytest.raises(RuntimeError):
        flash_attn_with_kvcache(None, None, None)

def test_pages():
    cache = torch.zeros(3, 4, 2, 16)
    table, offsets = torch.zeros(1, 3, dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    q = torch.zeros(2, 2, 16, requires_grad=True)
    assert flash_attn_varlen_func(q, cache, cache, offsets, offsets, 2, 2, block_table=table).shape == q.shape
    rotated = apply_rotary_emb(cache, torch.ones(9, 4), torch.zeros(9, 4), seqlen_offsets=torch.tensor([1, 0, 5]))
    q, window = q.detach()[None], torch.tensor([2, 1])
    out = flash_attn_with_kvcache(q, rotated[:1], cache[:1], cache_seqlens=2, window_size=window)
    assert out.shape == (1, 2, 2, 16)

def test_slow():
    time.sleep(60)
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "test_flash_attn.py"
    file.write_text(FILE)
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), str(file), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)


@pytest.mark.exhaustive
def test_the_tables_say_what_passed_failed_was_left_out_and_took_too_long(tmp_path: Path) -> None:
    ended = run(tmp_path, "--cases", "4", "--limit", "1", "--workers", "1")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    for line in (
        "| test_probabilities | 4 | 0 | 0 | 0 |",  # as many as were to be drawn, none of those that are left out
        "| test_window | 4 | 0 | 0 | 0 |",
        "| test_pages | 1 | 0 | 0 | 0 |",
        "| test_slow | 0 | 0 | 1 | 0 |",
        "| all | 9 | 1 | 1 | 0 |",
        "- failed: `test_wrong`: assert tensor",
        "- failed: `test_slow`: took longer than 1 s",
        f"| test_probabilities | 9 | 4 | 9 | {examination.NO_PROBABILITIES} |",
        f"| test_cache | 0 | 0 | 2 | {examination.NO_LENGTHS} |",
    ):
        assert line in ended.stdout, ended.stdout
    slowest = [line for line in ended.stdout.splitlines() if line.startswith("- among the slowest: ")]
    assert len(slowest) == examination.SLOWEST
    assert slowest[0].endswith(" s, `test_slow`")


def test_cases_are_counted_and_none_is_run_for_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert examine(tmp_path, monkeypatch, "--list", "--only", "window", "--cases", "2") == 0
    assert capsys.readouterr().out.splitlines()[2:] == ["| test_window | 6 | 2 | 0 |  |"]


def test_the_tables_are_kept_under_the_name_of_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, str] = {}
    monkeypatch.setattr(examination, "keep", lambda name, text: kept.setdefault(name, text))
    monkeypatch.setattr(examination.pytest, "main", lambda arguments, plugins: 0)
    monkeypatch.setattr(examination.nvidia, "present", lambda: SimpleNamespace(name="h100"))
    assert examine(tmp_path, monkeypatch, "--write", "--cases", "7") == 0
    ((name, text),) = kept.items()
    assert name == "h100_flash_attention_tests"
    assert "--write --cases 7`" in text
    assert "| all | 0 | 0 | 0 | 0 | 0.0 |" in text


def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, text: str = FILE) -> int:
    """Runs the script in this process, which gets its modules and torch's functions back after the test."""
    file = tmp_path / "test_flash_attn.py"
    file.write_text(text)
    for name in examination.CONTENTS:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(sys, "argv", ["flash_attention_tests.py", str(file), *arguments])
    return examination.main()


def test_a_file_that_cannot_be_imported_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert examine(tmp_path, monkeypatch, text="import no_such_package_anywhere") == 2
    assert "must be importable, got: No module named 'no_such_package_anywhere'" in capsys.readouterr().err


def test_workers_without_xdist_are_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examination.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        examine(tmp_path, monkeypatch, "--workers", "2")
    assert "--workers 2 needs pytest-xdist, which is not installed" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flash_attention_tests.py", str(tmp_path / "nothing.py")])
    with pytest.raises(SystemExit):
        examination.main()
    assert "must be a copy of tests/test_flash_attn.py" in capsys.readouterr().err


def test_cases_are_drawn_alike_by_a_seed_and_none_twice() -> None:
    axes = ((1,), (2,), (3,)), ((4, 5), (6, 7)), tuple((value,) for value in range(10))
    rows, again = (examination.drawn(axes, 20, random.Random(7)) for _ in range(2))
    assert rows == again
    assert len(set(rows)) == 20
    assert all(len(row) == 4 and row[:1] <= (3,) and row[1:3] in ((4, 5), (6, 7)) for row in rows)
    assert sorted(examination.drawn(axes, 99, random.Random(7))) == sorted(
        first + pair + last for first in axes[0] for pair in axes[1] for last in axes[2]
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
    assert torch.equal(examination.index_first_axis(padded.flatten(0, 1), places), tokens)
