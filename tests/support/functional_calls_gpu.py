"""Calls of attention on a real GPU, and how far their answers are from the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import formula
import pytest
import torch
import triton
from torch import Tensor

import autoattn
from autoattn import functional

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}


@pytest.fixture
def launched() -> Iterator[list[Any]]:
    """Triton's launches."""
    launches: list[Any] = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(launches.append)
    yield launches
    hook.remove(launches.append)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def band(seq_q: int, seq_kv: int, causal: bool | str = False, window: tuple[int, int] = (-1, -1)) -> Tensor:
    """[seq_q, seq_kv] booleans: what the arguments of a call keep."""
    left, right = window
    right = 0 if causal else right
    shift = 0 if causal == "top-left" else seq_kv - seq_q
    place = torch.arange(seq_q, device="cuda")[:, None] + shift
    keys = torch.arange(seq_kv, device="cuda")[None, :]
    return ((keys >= place - left) | (left < 0)) & ((keys <= place + right) | (right < 0))


def largest_error(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bhsd",
) -> float:
    """Against float64, at the first and the last head of the first and the last sequence."""
    if layout == "bshd":
        output, query, key, value = (tensor.transpose(1, 2) for tensor in (output, query, key, value))
    group = query.shape[1] // key.shape[1]
    keep = band(query.shape[2], key.shape[2], causal).to(query.device)
    worst = 0.0
    for batch in {0, query.shape[0] - 1}:
        for head in {0, query.shape[1] - 1}:
            part = slice(batch, batch + 1), slice(head // group, head // group + 1)
            query_head = query[part[0], head : head + 1]
            exact, _ = formula.attention(query_head, key[part], value[part], keep=keep, scale=scale)
            worst = max(worst, float((output[part[0], head : head + 1].double() - exact).abs().max()))
    return worst


def check_kernel(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
    """A kernel of ours runs, and it is right; also where the cache says that a rival is faster."""
    explanation = autoattn.explain(query, key, value, **options)
    assert explanation.level.value != "sdpa", str(explanation)
    output = autoattn.attention(query, key, value, **options)
    assert output.shape == query.shape
    assert largest_error(output, query, key, value, **options) <= TOLERANCE[query.dtype]


@pytest.fixture(autouse=True)
def no_shipped_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Without a cache the template's default runs, so that a rival's choice hides no kernel."""
    monkeypatch.setattr("autoattn.codegen.resources.shipped_cache", lambda: tmp_path)
    functional.forget()
    torch.manual_seed(0)
