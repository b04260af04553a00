"""Dilated attention against dense masks and one softmax over all patterns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoattn import dilated_attention
from autoattn.errors import TensorError


def tensors(heads: tuple[int, int], seq: int, head_dim: int = 8, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seq)
    query, key, value = (
        torch.randn(2, seq, count, dim, generator=rng).to(device)
        for count, dim in ((heads[0], head_dim), (heads[1], head_dim), (heads[1], head_dim))
    )
    return query, key, value


def dense(inputs: tuple[Tensor, Tensor, Tensor], lengths: list[int], rates: list[int], causal: bool) -> Tensor:
    """The sum over patterns of exp(scores) @ value under each one's mask, divided by the sum of all denominators."""
    query, key, value = (tensor.double().transpose(1, 2) for tensor in inputs)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
    place = torch.arange(query.shape[2], device=query.device)
    head = torch.arange(query.shape[1], device=query.device)[:, None] // group
    numerator, denominator = torch.zeros_like(value), torch.zeros_like(scores[..., :1])
    for length, rate in zip(lengths, rates, strict=True):
        picked = place % length % rate == head % rate  # [heads, seq]
        seen = picked[:, :, None] & picked[:, None] & (place[:, None] // length == place // length)
        seen &= (place[:, None] >= place) | (not causal)
        weights = torch.exp(scores) * seen
        numerator, denominator = numerator + weights @ value, denominator + weights.sum(3, keepdim=True)
    return (numerator / denominator.masked_fill(denominator == 0, 1.0)).transpose(1, 2)


POINTS: list[tuple[tuple[int, int], int, list[int], list[int]]] = [
    ((4, 4), 64, [16, 32, 64], [1, 2, 4]),  # the paper's figure: lengths and rates that double
    ((6, 2), 50, [16, 64], [1, 3]),  # grouped queries; a shorter last segment, and one longer than the sequence
    ((3, 3), 37, [8], [5]),  # tokens that nothing picks
    ((2, 1), 5, [100, 3], [1, 2]),
    ((5, 5), 33, [8, 8], [2, 3]),  # heads that the rate does not divide; rates that the length does not divide
]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "seq", "lengths", "rates"), POINTS)
def test_it_is_one_softmax_over_all_patterns(
    heads: tuple[int, int], seq: int, lengths: list[int], rates: list[int], causal: bool, layout: str
) -> None:
    inputs = tensors(heads, seq)
    given = inputs if layout == "bshd" else tuple(tensor.transpose(1, 2).contiguous() for tensor in inputs)
    facts: dict[str, Any] = {"segment_lengths": lengths, "dilation_rates": rates, "causal": causal, "layout": layout}
    output = dilated_attention(*given, **facts)
    output = output if layout == "bshd" else output.transpose(1, 2)
    torch.testing.assert_close(output.double(), dense(inputs, lengths, rates, causal), rtol=1e-5, atol=1e-5)


def test_one_segment_with_rate_one_is_attention() -> None:
    inputs = tensors((4, 2), 21)
    output = dilated_attention(*inputs, segment_lengths=[21], dilation_rates=[1])
    swapped = [tensor.transpose(1, 2) for tensor in inputs]
    expected = torch.nn.functional.scaled_dot_product_attention(*swapped, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_tokens_that_nothing_picks_give_zero_and_finite_gradients() -> None:
    inputs = [tensor.requires_grad_() for tensor in tensors((3, 3), 37)]
    output = dilated_attention(*inputs, segment_lengths=[8, 16], dilation_rates=[5, 7])
    place = torch.arange(37)
    unpicked = (place % 8 % 5 != 1) & (place % 16 % 7 != 1)
    assert unpicked.any()
    assert (output[:, unpicked, 1] == 0).all()
    output.square().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in inputs)


def test_gradients_are_those_of_the_dense_formula() -> None:
    inputs = [tensor.requires_grad_() for tensor in tensors((4, 2), 24)]
    lengths, rates = [8, 24], [1, 2]
    output = dilated_attention(*inputs, segment_lengths=lengths, dilation_rates=rates, causal=True)
    expected = dense(tuple(inputs), lengths, rates, True)  # type: ignore[arg-type]
    ours = torch.autograd.grad(output.double().square().sum(), inputs)
    for gradient, expected_gradient in zip(ours, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-4)


def test_scores_that_overflow_an_exponential_are_merged_all_the_same() -> None:
    query, key, value = tensors((2, 2), 32)
    output = dilated_attention(query * 60, key * 60, value, segment_lengths=[8, 32], dilation_rates=[1, 2])
    assert output.isfinite().all()


@pytest.mark.parametrize(
    "facts",
    [
        {"segment_lengths": [], "dilation_rates": []},
        {"segment_lengths": [8, 16], "dilation_rates": [1]},
        {"segment_lengths": [0], "dilation_rates": [1]},
        {"segment_lengths": [8], "dilation_rates": [1.5]},
        {"segment_lengths": [8], "dilation_rates": [1], "layout": "sbhd"},
    ],
)
def test_patterns_that_are_none_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(TensorError, match="must be"):
        dilated_attention(*tensors((2, 2), 16), **facts)


def test_lengths_that_differ_are_refused() -> None:
    query, key, value = tensors((2, 2), 16)
    with pytest.raises(TensorError, match="one length"):
        dilated_attention(query, key[:, :8], value[:, :8], segment_lengths=[8], dilation_rates=[1])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_it_agrees_with_the_dense_formula(causal: bool) -> None:
    query, key, value = (tensor.half() for tensor in tensors((8, 4), 700, 64, "cuda"))
    output = dilated_attention(query, key, value, segment_lengths=[128, 512], dilation_rates=[1, 4], causal=causal)
    expected = dense((query, key, value), [128, 512], [1, 4], causal)
    torch.testing.assert_close(output.double(), expected, rtol=1e-2, atol=5e-3)


def test_gradcheck_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 5, 2, 3, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(
        lambda *three: dilated_attention(*three, segment_lengths=[2, 4], dilation_rates=[1, 2]), tensors
    )
