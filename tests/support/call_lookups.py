"""What the call cache is asked for by calls of `attention`, and tensors that lie elsewhere in memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from autoattn import functional
from autoattn.runtime import call_cache


def shifted(tensor: Tensor, by: int) -> Tensor:
    """The same numbers, `by` elements behind an address that 64 divides."""
    room = torch.empty(tensor.numel() + 64, dtype=tensor.dtype)
    start = -room.data_ptr() % 64 // room.element_size() + by
    return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def strided(tensor: Tensor, pad: int) -> Tensor:
    """The same numbers in wider rows."""
    room = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + pad, dtype=tensor.dtype)
    room[..., : tensor.shape[-1]] = tensor
    return room[..., : tensor.shape[-1]]


def key_of(*tensors: Any, **options: Any) -> Any:
    """The key that `attention` asks for."""
    call_cache.clear()
    with mock.patch.object(call_cache, "find") as find, mock.patch.object(call_cache, "guard"):
        functional.attention(*tensors, **options)
    find.assert_called_once()
    return find.call_args.args[0]


def found_among_recent(*tensors: Any, **options: Any) -> bool:
    """Whether a call is like the last one that was prepared; if not, it becomes that."""

    def keep(*given: Any) -> None:
        if find.call_args.args[0] is not None:
            kept(*given)

    kept = call_cache.guard
    with mock.patch.object(call_cache, "find") as find, mock.patch.object(call_cache, "guard", keep):
        find.return_value.sees_switches = False
        functional.attention(*tensors, **options)
    return not find.called
