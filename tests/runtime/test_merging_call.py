"""Calls that merge into an output of other keys: planned, launched and prepared on a device whose launches PyTorch
computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from computed_launches import card  # noqa: F401 - a fixture
from torch import Tensor

import autoattn
from autoattn.core.mask import Mask
from autoattn.runtime import merging_call
from autoattn.runtime.torch_op import attention_schema
from autoattn.tensors import cu_seqlens

BACKWARD = torch.ops.autoattn.attention_backward.default
WORDS: dict[str, Any] = {"mask": str(Mask.window(-1, -1)), "keep_lse": True, "layout": "bshd"}
NONE = (None,) * len(attention_schema.LEARNING[3:])  # no bias, no slopes, no sinks


def three(dtype: torch.dtype = torch.float16) -> list[Tensor]:
    """Query, key and value, [batch, seq, heads, head_dim]."""
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in ((2, 32, 4, 16), (2, 64, 2, 16), (2, 64, 2, 16))]


def halves(tensors: list[Tensor]) -> list[list[Tensor]]:
    query, *keys = tensors
    return [[query, *(tensor[:, half : half + 32] for tensor in keys)] for half in (0, 32)]


@pytest.mark.parametrize("running", [torch.float32, torch.float16])
@pytest.mark.parametrize("times", [1, 3])
def test_two_calls_leave_the_output_of_all_keys(card: dict[str, Any], running: torch.dtype, times: int) -> None:
    tensors = three()
    expected, lse = autoattn.attention(*tensors, layout="bshd", return_lse=True)
    for _ in range(times):  # the later ones by what the first prepared
        room = torch.full((2, 40, 4, 16), math.nan, dtype=running)
        sums = torch.full((2, 4, 40), -math.inf)
        total, total_lse = room[:, 3:35], sums[..., 3:35]
        for each in halves(tensors):
            assert merging_call.attend([*each, *NONE], WORDS, total, total_lse)
        torch.testing.assert_close(total.float(), expected.float(), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(total_lse, lse, rtol=1e-3, atol=1e-3)
    assert card["merged"] == 2 * times
    assert card["prepared"] == 2 * times - 1


def test_outputs_that_lie_otherwise_are_no_matter_of_what_was_prepared(card: dict[str, Any]) -> None:
    tensors = three()
    expected, lse = autoattn.attention(*tensors, layout="bshd", return_lse=True)
    for rows in (32, 40, 48):
        total, sums = torch.zeros(2, 48, 4, 16)[:, :32], torch.full((2, 4, rows), -math.inf)[..., :32]
        assert merging_call.attend([*tensors, *NONE], WORDS, total, sums)
        torch.testing.assert_close(total, expected.float(), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(sums, lse, rtol=1e-3, atol=1e-3)
    assert card["prepared"] == 0


def test_a_packed_call_merges_too(card: dict[str, Any]) -> None:
    query, key, value = (tensor[0] for tensor in three())
    offsets = cu_seqlens.of_numbers((0, 12, 32), query.device), cu_seqlens.of_numbers((0, 0, 64), query.device)
    words = WORDS | {"layout": "packed", "max_seqlen_q": 20, "max_seqlen_kv": 64}
    total, total_lse = torch.ones(32, 4, 16), torch.zeros(4, 32)
    assert merging_call.attend([query, key, value, *NONE, *offsets], words, total, total_lse)
    assert bool((total[:12] == 1.0).all()), "its sequence has no keys"
    assert bool((total_lse[:, :12] == 0.0).all())
    assert bool((total_lse[:, 12:] > 0.0).all())


def test_where_no_kernel_answers_nothing_is_written() -> None:
    tensors = three()
    total, sums = torch.ones(2, 32, 4, 16), torch.zeros(2, 4, 32)
    assert not merging_call.attend([*tensors, *NONE], WORDS, total, sums)
    assert bool((total == 1.0).all())


def test_gradients_whose_forward_pass_merged_are_prepared_by_the_first_of_them(card: dict[str, Any]) -> None:
    tensors = three()
    total, sums = torch.zeros(2, 32, 4, 16, dtype=torch.float16), torch.full((2, 4, 32), -math.inf)
    assert merging_call.attend([*tensors, *NONE], WORDS, total, sums)
    push, learns = torch.ones_like(total), [True] * 3 + [False] * len(NONE)
    gradients = []
    for prepared in (0, 1, 2):
        gradients.append(BACKWARD(push, None, total, sums, *tensors, *NONE, learns=learns, **WORDS))
        assert card["prepared"] == prepared
    for first, *others in zip(*gradients, strict=True):
        assert bool((first != 0).any())
        assert all(torch.equal(first, other) for other in others)


def test_gradients_of_an_output_with_gaps_are_computed_anew_each_time(card: dict[str, Any]) -> None:
    """A prepared forward pass would leave none, so that the call is another one."""
    tensors = three()
    total, sums = torch.zeros(2, 40, 4, 16, dtype=torch.float16)[:, :32], torch.full((2, 4, 32), -math.inf)
    assert merging_call.attend([*tensors, *NONE], WORDS, total, sums)
    learns = [True] * 3 + [False] * len(NONE)
    for _ in range(2):
        BACKWARD(torch.ones_like(total), None, total, sums, *tensors, *NONE, learns=learns, **WORDS)
    assert card["prepared"] == 0
