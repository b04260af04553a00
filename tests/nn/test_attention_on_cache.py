"""The module on a cache: new keys are written into it, and queries attend to all that it has then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autoattn
from autoattn.errors import TensorError

BATCH, HEADS_Q, HEADS_KV, HEAD_DIM, CAPACITY = 2, 4, 2, 16, 24


def empty_cache() -> autoattn.CacheTensors:
    key, value = (torch.zeros(12, 4, HEADS_KV, HEAD_DIM) for _ in range(2))
    table = torch.randperm(12, generator=torch.Generator().manual_seed(0)).int().view(BATCH, 6)
    return autoattn.CacheTensors(key=key, value=value, lengths=torch.zeros(BATCH, dtype=torch.int32), block_table=table)


def tokens(count: int, layout: str = "bshd") -> list[Tensor]:
    """Query, key and value of some tokens."""
    generator = torch.Generator().manual_seed(count)
    three = [torch.randn(BATCH, count, heads, HEAD_DIM, generator=generator) for heads in (HEADS_Q, HEADS_KV, HEADS_KV)]
    return three if layout == "bshd" else [tensor.transpose(1, 2) for tensor in three]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("words", [{}, {"window": (5, 0), "softcap": 2.0}], ids=str)
def test_steps_of_generation_give_what_one_call_on_all_tokens_does(layout: str, words: dict[str, Any]) -> None:
    facts: dict[str, Any] = words if "window" in words else {"causal": True}
    module = autoattn.Attention(layout=layout, **facts)
    cache, three = empty_cache(), tokens(11, layout)
    axis = 1 if layout == "bshd" else 2
    outputs = []
    with torch.no_grad():
        for begin, end in ((0, 7), (7, 8), (8, 11)):
            step = (tensor.narrow(axis, begin, end - begin) for tensor in three)
            outputs.append(module(*step, cache=cache))
            cache.lengths.add_(end - begin)
        expected = module(*three)
    torch.testing.assert_close(torch.cat(outputs, axis), expected)


@pytest.mark.parametrize(
    ("facts", "words", "message"),
    [
        ({"mask": "causal"}, {}, "got mask"),
        ({"score_mod": "score * 2.0"}, {}, "got score_mod"),
        ({"dropout": 0.1}, {}, "got dropout"),
        ({}, {"bias": torch.zeros(3, 3)}, "got bias"),
        ({}, {"sinks": torch.zeros(3)}, "sinks"),
    ],
)
def test_what_caches_do_not_take_is_refused_before_anything_is_written(
    facts: dict[str, Any], words: dict[str, Any], message: str
) -> None:
    module, cache = autoattn.Attention(layout="bshd", **facts), empty_cache()
    with torch.no_grad(), pytest.raises(TensorError, match=message):
        module(*tokens(3), cache=cache, **words)
    assert not cache.key.any()
