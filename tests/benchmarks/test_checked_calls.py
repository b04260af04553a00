"""Launches of kernels that are right."""

from __future__ import annotations

from dataclasses import replace

import checked_calls
import pytest
import samples
import shared_lines
import torch

from autoattn.core.mask import Mask
from autoattn.core.problem import DType

CPU = torch.device("cpu")
PROBLEM = samples.problem(
    dtype=DType.BFLOAT16, batch=1, heads_q=1, heads_kv=1, seq_q=1, seq_kv=70, head_dim=72, mask=Mask()
)  # fmt: skip


def test_a_kernel_that_is_right_has_a_launch() -> None:
    calls = checked_calls.of(PROBLEM, {"one": shared_lines.source(PROBLEM, 1)}, CPU)
    assert list(calls) == ["one"]
    calls["one"]()


def test_a_kernel_that_is_wrong_ends_the_program() -> None:
    right = shared_lines.source(PROBLEM, 1)
    hidden = "scores * scale_log2"
    assert hidden in right.text
    wrong = replace(right, text=right.text.replace(hidden, "scores * 2.0 * scale_log2"))
    with pytest.raises(AssertionError, match="doubled: bf16 "):
        checked_calls.of(PROBLEM, {"doubled": wrong}, CPU)
