"""Dilated attention: segments of a sequence, each thinned out, in several patterns at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autoattn import functional
from autoattn.errors import TensorError
from autoattn.kernels.forward import lse_dtype


def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bshd",
) -> Tensor:
    """LongNet's dilated attention (Ding et al. 2023, arXiv:2307.02486, section 2).

    A pattern (w, r) cuts the sequence into segments of w tokens. In each of them, key head j and the query heads that
    share it see every r-th token, from the segment's token j % r on; attention is among those tokens alone. What the
    patterns give for a token and head is averaged with their softmax denominators as weights, as if one softmax went
    over all of them. A token that no pattern picks for a head gives 0; a pattern with rate 1 picks every token.

    Args:
        query: [batch, seq, heads_q, head_dim] (with layout="bhsd", axes 1 and 2 swapped).
        key, value: the same with heads_kv, which divides heads_q; value may have a head dim of its own.
        segment_lengths: w of each pattern, in tokens; the last segment may be shorter.
        dilation_rates: r of each pattern.
        causal: hide later tokens.
        scale: what scores are multiplied by; 1 / sqrt(head_dim) when None.
        layout: "bshd" or "bhsd", of all tensors.

    Returns:
        The output, like the query with the value's head dim.

    Raises:
        TensorError: the patterns are no pairs of positive whole numbers, or the tensors are no self-attention.
    """
    patterns = _patterns(segment_lengths, dilation_rates)
    _check(query, key, value, layout)
    tensors = (query, key, value)
    if layout == "bhsd":
        tensors = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    merged: tuple[Tensor, Tensor] | None = None
    for length, rate in patterns:
        part = _pattern(tensors, length, rate, causal, scale)
        merged = part if merged is None else _merged(merged, part)
    assert merged is not None
    output = merged[0].to(query.dtype)
    return output.transpose(1, 2) if layout == "bhsd" else output


def _pattern(
    tensors: tuple[Tensor, Tensor, Tensor], length: int, rate: int, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output [batch, seq, heads_q, head_dim_v] and LSE [batch, seq, heads_q, 1] of one pattern; 0 and -inf where it
    picks nothing."""
    query, key, value = tensors
    shape = (*query.shape[:3], value.shape[3])
    output = query.new_zeros(shape)
    lse = torch.full((*shape[:3], 1), -math.inf, dtype=lse_dtype(query.dtype), device=query.device)
    group = query.shape[2] // key.shape[2]
    for begin, segments, size in _spans(query.shape[1], length):
        for offset in range(min(rate, key.shape[2], size)):
            span = begin, segments, size, offset, rate
            parts = (_picked(query, *span, group), _picked(key, *span, 1), _picked(value, *span, 1))
            # Segments are sequences of their own.
            batched = [part.flatten(3, 4).flatten(0, 1) for part in parts]
            answer: Any = functional.attention(*batched, causal=causal, scale=scale, layout="bshd", return_lse=True)
            for whole, part in ((output, answer[0]), (lse, answer[1].transpose(1, 2))):
                place = _picked(whole, *span, group)
                place.copy_(part.reshape(place.shape))
    return output, lse


def _spans(seq: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(first token, segments, tokens of each): the whole segments, and what is left."""
    whole = seq // length
    if whole:
        yield 0, whole, length
    if seq % length:
        yield whole * length, 1, seq % length


def _picked(tensor: Tensor, begin: int, segments: int, size: int, offset: int, rate: int, group: int) -> Tensor:
    """A view [batch, segments, tokens, key heads, group, head_dim] of [batch, seq, heads, head_dim].

    It holds every rate-th token of a segment and every rate-th key head, from `offset` on.
    """
    tokens = tensor[:, begin : begin + segments * size].unflatten(1, (segments, size))[:, :, offset::rate]
    return tokens.unflatten(3, (tensor.shape[2] // group, group))[:, :, :, offset::rate]


def _merged(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two outputs [batch, seq, heads, head_dim_v] and LSEs [batch, seq, heads, 1] as of one softmax, in float32."""
    highest = torch.maximum(left[1], right[1]).detach()
    highest = highest.masked_fill(highest == -math.inf, 0.0)
    weights, weights_other = torch.exp(left[1] - highest), torch.exp(right[1] - highest)
    total = weights + weights_other
    blind = total == 0.0  # neither sees a key
    total = total.masked_fill(blind, 1.0)
    output = (left[0] * weights + right[0] * weights_other) / total
    return output, (highest + torch.log(total)).masked_fill(blind, -math.inf)


def _patterns(segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> list[tuple[int, int]]:
    lengths, rates = list(segment_lengths), list(dilation_rates)
    numbers = [*lengths, *rates]
    if not lengths or len(lengths) != len(rates) or any(type(number) is not int or number < 1 for number in numbers):
        raise TensorError(
            "segment_lengths and dilation_rates must be equally many whole numbers from 1, got "
            f"{lengths} and {rates}; give a rate for each length"
        )
    return list(zip(lengths, rates, strict=True))


def _check(query: Tensor, key: Tensor, value: Tensor, layout: str) -> None:
    """Refuses what would fail before attention itself checks."""
    if layout not in ("bshd", "bhsd"):
        raise TensorError(f"layout must be bshd or bhsd, got {layout!r}; correct it")
    heads, seq = (2, 1) if layout == "bshd" else (1, 2)
    shapes = [tuple(tensor.shape) if isinstance(tensor, Tensor) else () for tensor in (query, key, value)]
    fit = all(len(shape) == 4 and 0 not in shape for shape in shapes)
    fit = fit and len({shape[seq] for shape in shapes}) == 1 and shapes[1][heads] == shapes[2][heads]
    if not fit or shapes[0][heads] % shapes[1][heads]:
        raise TensorError(
            "dilated attention must have query, key and value of one length, and query heads that are a multiple of "
            f"key heads, got shapes {shapes}; check the axes and the layout"
        )
