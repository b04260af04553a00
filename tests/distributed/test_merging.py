"""Sums of partial outputs and gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autoattn.distributed.merging import MergedOutput, Sum

CPU = torch.device("cpu")


def attended(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Output [1, seq, 1, head_dim] and LSE [1, 1, seq] of scores [seq, keys]."""
    return (torch.softmax(scores, -1) @ values)[None, :, None], torch.logsumexp(scores, -1)[None, None]


def parts(count: int, keys: int = 5) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Outputs on some of the keys each, and those on all keys."""
    torch.manual_seed(count)
    scores, values = torch.randn(3, count * keys) * 3, torch.randn(count * keys, 4)
    pieces = [slice(place * keys, (place + 1) * keys) for place in range(count)]
    return [attended(scores[:, piece], values[piece]) for piece in pieces], attended(scores, values)


def test_parts_make_the_output_of_all_keys() -> None:
    some, whole = parts(4)
    merged = MergedOutput(whole[0].shape, torch.float32, 1, wide=True)
    for output, lse in some:
        merged.add(output, lse, (0, 3))
    torch.testing.assert_close(merged.result(CPU), whole)


def test_a_part_of_the_queries_changes_no_others() -> None:
    some, whole = parts(2)
    merged = MergedOutput(whole[0].shape, torch.float32, 1, wide=False)
    first = some[0][0].clone()
    merged.add(*some[0], (0, 3))
    merged.add(some[1][0][:, 1:2], some[1][1][..., 1:2], (1, 2))
    output, _ = merged.result(CPU)
    torch.testing.assert_close(output[:, 1], whole[0][:, 1])
    torch.testing.assert_close(output[:, ::2], first[:, ::2])


def test_queries_that_no_part_shows_a_key_are_0_with_an_lse_of_minus_infinity() -> None:
    merged = MergedOutput(torch.Size((1, 3, 1, 4)), torch.float32, 1, wide=True)
    merged.add(torch.zeros(1, 2, 1, 4), torch.full((1, 1, 2), -math.inf), (0, 2))
    merged.add(torch.ones(1, 2, 1, 4), torch.tensor([[[-math.inf, 1.0]]]), (1, 3))
    output, lse = merged.result(CPU)
    assert output[0, :, 0, 0].tolist() == [0.0, 0.0, 1.0]
    assert lse.tolist() == [[[-math.inf, -math.inf, 1.0]]]


def test_many_parts_of_bfloat16_are_summed_in_float32() -> None:
    some, whole = parts(64)
    merged = MergedOutput(whole[0].shape, torch.bfloat16, 1, wide=True)
    for output, lse in some:
        merged.add(output.bfloat16(), lse, (0, 3))
    output, _ = merged.result(CPU)
    assert (output.float() - whole[0]).norm() <= 2.0 * (whole[0].bfloat16().float() - whole[0]).norm()


def test_gradients_of_bfloat16_are_summed_in_float32() -> None:
    total = Sum(torch.Size((1, 4)), 1, wide=True)
    total.add(torch.full((1, 4), 256.0, dtype=torch.bfloat16), (0, 4))
    for _ in range(4):
        total.add(torch.ones(1, 2, dtype=torch.bfloat16), (1, 3))  # 257 is no number of bfloat16
    total.add_at(torch.full((1, 1), 2.0, dtype=torch.bfloat16), torch.tensor([3]))
    assert total.result(torch.empty(0)).tolist() == [[256.0, 260.0, 260.0, 258.0]]
    assert Sum(torch.Size((2,)), 0, wide=True).result(torch.ones(2)).tolist() == [0.0, 0.0]


def test_two_gradients_of_bfloat16_are_summed_in_place() -> None:
    first, second = torch.randn(2, 1, 4).bfloat16()
    expected = first.clone()
    expected[:, 1:3] = (first.float() + second.float()).bfloat16()[:, 1:3]
    total = Sum(torch.Size((1, 4)), 1, wide=False)
    total.add(first, (0, 4))
    total.add(second[:, 1:3], (1, 3))
    assert torch.equal(total.result(first), expected)
