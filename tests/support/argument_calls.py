"""Calls of `arguments.read` and `arguments.read_packed`, and tensors for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoattn.runtime.parse import arguments
from autoattn.runtime.parse.arguments import Call

HALF = torch.float16


def zeros(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


QUERY, KEY = zeros(2, 6, 5, 8), zeros(2, 3, 7, 8)
TOKENS = zeros(10, 6, 8), zeros(12, 3, 8), zeros(12, 3, 8)


def read(**given: Any) -> Call:
    return arguments.read(QUERY, KEY, KEY, **given)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


OFFSETS = torch.tensor([0, 4, 4, 9], dtype=torch.int32), torch.tensor([0, 5, 7, 12], dtype=torch.int32)


def read_packed(*lengths: Any, tensors: tuple[Any, ...] = TOKENS, **given: Any) -> Call:
    rest = (*OFFSETS, 5, 5)[len(lengths) :]
    return arguments.read_packed(*tensors, *lengths, *rest, **given)
