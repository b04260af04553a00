"""Calls of attention that tests of its doors share, and how their answers are compared."""

from __future__ import annotations

import math
from typing import Any

import formula
import pytest
import torch
from torch import Tensor

import autoattn
from autoattn import functional

CAUSAL = (False, True, "bottom-right", "top-left")
Inputs = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def nothing_planned() -> None:
    functional.forget()


def inputs(
    seq_q: int = 5, seq_kv: int = 7, heads_q: int = 4, heads_kv: int = 2, head_dim: int = 16,
    dtype: torch.dtype = torch.float32, layout: str = "bhsd",
) -> Inputs:  # fmt: skip
    rng = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, seq, head_dim, generator=rng).to(dtype)
        for heads, seq in ((heads_q, seq_q), (heads_kv, seq_kv), (heads_kv, seq_kv))
    )
    if layout == "bshd":
        query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in (query, key, value))
    return query, key, value


def seen(causal: bool | str, seq_q: int, seq_kv: int) -> Tensor:
    return formula.band(seq_q, seq_kv, right=0 if causal else -1, top_left=causal == "top-left")


def expected(tensors: Inputs, causal: bool | str, layout: str = "bhsd", scale: float | None = None) -> Tensor:
    query, key, value = (tensor if layout == "bhsd" else tensor.transpose(1, 2) for tensor in tensors)
    keep = seen(causal, query.shape[2], key.shape[2])
    output, _ = formula.attention(query, key, value, keep=keep, scale=scale)
    return output if layout == "bhsd" else output.transpose(1, 2)


def close(actual: Tensor, wanted: Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[actual.dtype]
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def noise(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SINKS, SLOPES = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([0.5, 0.25, 0.125, 0.0625])
PADDING = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])[:, None, None, :]
PAIRS = noise(1, 4, 5, 7) > -0.5
ADDED = torch.where(noise(2, 1, 5, 7, seed=8) > -1.0, noise(5, 7, seed=9), -math.inf)
FAR = formula.distance(5, 7)
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # arguments of the call, and the same of the formula
    "window": ({"window": (2, 1)}, {"keep": formula.band(5, 7, 2, 1)}),
    "window, no left bound": ({"window": (-1, 1)}, {"keep": formula.band(5, 7, -1, 1)}),
    "window, no right bound": ({"window": (2, -1)}, {"keep": formula.band(5, 7, 2, -1)}),
    "causal window": ({"window": (2, 3), "causal": True}, {"keep": formula.band(5, 7, 2, 0)}),
    "words": ({"mask": "window:2,1"}, {"keep": formula.band(5, 7, 2, 1)}),
    "Mask": ({"mask": autoattn.Mask.parse("causal:top-left")}, {"keep": formula.band(5, 7, -1, 0, top_left=True)}),
    "padding": ({"mask": PADDING}, {"keep": PADDING}),
    "padding, causal": ({"mask": PADDING, "causal": True}, {"keep": PADDING & formula.band(5, 7, -1, 0)}),
    "pairs": ({"mask": PAIRS}, {"keep": PAIRS}),
    "pairs, window": ({"bias": PAIRS, "window": (3, 1)}, {"keep": PAIRS & formula.band(5, 7, 3, 1)}),
    "bias": ({"bias": ADDED}, {"add": ADDED}),
    "bias, causal": ({"mask": ADDED, "causal": True}, {"add": ADDED, "keep": formula.band(5, 7, -1, 0)}),
    "softcap": ({"softcap": 1.5}, {"change": lambda scores: 1.5 * torch.tanh(scores / 1.5)}),
    "alibi": ({"alibi_slopes": SLOPES}, {"add": -SLOPES[:, None, None] * FAR}),
    "alibi, each sequence": (
        {"alibi_slopes": torch.stack((SLOPES, 2 * SLOPES)), "causal": True},
        {"add": -torch.stack((SLOPES, 2 * SLOPES))[..., None, None] * FAR, "keep": formula.band(5, 7, -1, 0)},
    ),
    "alibi, top-left": (
        {"alibi_slopes": SLOPES, "causal": "top-left"},
        {
            "add": -SLOPES[:, None, None] * formula.distance(5, 7, top_left=True),
            "keep": formula.band(5, 7, -1, 0, top_left=True),
        },
    ),
    "sinks": ({"sinks": SINKS.half(), "causal": True}, {"sinks": SINKS, "keep": formula.band(5, 7, -1, 0)}),
    "score_mod": ({"score_mod": "score + 0.1 * (q_idx - kv_idx)"}, {"add": 0.1 * (
        torch.arange(5.0)[:, None] - torch.arange(7.0))}),
    "all": (
        {"window": (3, 1), "softcap": 2.0, "bias": ADDED, "sinks": SINKS, "alibi_slopes": SLOPES, "scale": 0.5},
        {
            "keep": formula.band(5, 7, 3, 1),
            "change": lambda scores: 2.0 * torch.tanh(scores / 2.0) - SLOPES[:, None, None] * FAR,
            "add": ADDED,
            "sinks": SINKS,
            "scale": 0.5,
        },
    ),
}  # fmt: skip


QUERIES, KEYS = (3, 0, 5, 2, 4), (4, 6, 2, 0, 4)  # tokens of each sequence


def packed(queries: tuple[int, ...] = QUERIES, keys: tuple[int, ...] = KEYS, tail: int = 3) -> tuple[Any, ...]:
    """The arguments of a packed call with `tail` tokens behind the last sequence."""
    tokens_q, tokens_kv = sum(queries) + tail, sum(keys) + tail
    offsets = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (queries, keys)]
    tensors = noise(tokens_q, 4, 16, seed=1), noise(tokens_kv, 2, 16, seed=2), noise(tokens_kv, 2, 24, seed=3)
    return (*tensors, *offsets, max(queries, default=0), max(keys, default=0))
