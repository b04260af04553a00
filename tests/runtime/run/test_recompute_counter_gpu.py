"""Tiles that Hopper's kernels compute again on a real card: none of normal inputs, and counted where there are some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functional_calls_gpu import TOLERANCE, largest_error, no_shipped_cache, normal  # noqa: F401 - a fixture
from torch import Tensor

import autoattn
from autoattn.hardware import nvidia

pytestmark = pytest.mark.gpu

KINDS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}}
HEADS, SEQ = 8, 4096


@pytest.fixture(autouse=True)
def hopper(no_shipped_cache: None) -> None:
    card = nvidia.present()
    if card is None or card.arch != 90:
        pytest.skip("needs a Hopper card: only its kernels count")


def three(dtype: torch.dtype, head_dim: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (normal(2, HEADS, SEQ, head_dim, dtype=dtype) for _ in range(3))
    return query, key, value


def check_kept(tensors: tuple[Tensor, ...], **arguments: Any) -> None:
    """What runs is a kernel that keeps the first maximum and counts."""
    variant = autoattn.explain(*tensors, **arguments).variant
    assert variant is not None
    assert (variant.template, variant["softmax"]) == ("gluon/forward", "first_max")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_tile_of_normal_inputs_is_computed_again(kind: str, head_dim: int, dtype: torch.dtype) -> None:
    tensors = three(dtype, head_dim)
    check_kept(tensors, **KINDS[kind])
    with autoattn.counting_redone() as count:
        for _ in range(3):  # the first is the ordinary way, the others are prepared
            autoattn.attention(*tensors, **KINDS[kind])
    assert count.tiles >= 3 * 2 * HEADS * SEQ // 256
    assert (count.redone, count.rate) == (0, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_whose_later_keys_are_far_larger_are_counted_and_right(kind: str, dtype: torch.dtype) -> None:
    """These kernels walk from the last key to the first, so that the first ones are met later."""
    query, key, value = three(dtype)
    key[:, :, : SEQ // 4] *= 20.0  # scores of 2^90 times the weights that the maximum was kept for
    check_kept((query, key, value), **KINDS[kind])
    for turn in range(2):
        with autoattn.counting_redone() as count:
            output = autoattn.attention(query, key, value, **KINDS[kind])
        assert 0.5 < count.rate <= 1.0, turn
        assert largest_error(output, query, key, value, **KINDS[kind]) <= TOLERANCE[dtype]


def test_float8_computes_no_tile_again_and_is_right_whatever_the_keys() -> None:
    """float8 ends at 448, so near the weight of a kept maximum that keeping one does not pay."""
    query, key, value = three(torch.float32)
    for factor in (1.0, 8.0):
        key[:, :, : SEQ // 4] *= factor
        small = tuple(tensor.to(torch.float8_e4m3fn) for tensor in (query, key, value))
        with autoattn.counting_redone() as count:
            output = autoattn.attention(*small)
        assert count.redone == 0
        exact = tuple(tensor.to(torch.float32) for tensor in small)
        assert largest_error(output, *exact) <= 0.3  # a weight of nearly 1 is off by up to 1/16


def test_a_stream_of_ones_own_is_counted_and_single_tiles_are_told_apart() -> None:
    query, key, value = three(torch.bfloat16)
    key[1, 3, : SEQ // 4] *= 20.0  # one head of the sixteen
    torch.cuda.synchronize()
    with autoattn.counting_redone() as count, torch.cuda.stream(torch.cuda.Stream()):
        output = autoattn.attention(query, key, value)
    assert 0 < count.redone <= count.tiles // 16
    part = slice(1, 2), slice(3, 4)
    assert largest_error(output[part], query[part], key[part], value[part]) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("kind", KINDS)
def test_online_numerics_compute_no_tile_again_whatever_the_keys(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = three(torch.bfloat16)
    key[:, :, : SEQ // 4] *= 20.0
    with autoattn.counting_redone() as count:
        output = autoattn.attention(query, key, value, numerics="online", **KINDS[kind])
        monkeypatch.setenv("AUTOATTN_NUMERICS", "online")
        again = autoattn.attention(query, key, value, **KINDS[kind])
    assert count.redone == 0
    assert torch.equal(output, again)
    assert largest_error(output, query, key, value, **KINDS[kind]) <= TOLERANCE[torch.bfloat16]
