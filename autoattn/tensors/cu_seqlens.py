"""Checks of cu_seqlens: where packed sequences begin and end."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from autoattn.errors import TensorError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """What was found in one state of a tensor."""

    tensor: weakref.ref[Tensor]
    version: int  # PyTorch's count of writes to the tensor; an inference tensor has none, and is taken as never written
    address: int
    first: int
    last: int
    shortest: int  # of the sequences, below 0 where the numbers decrease
    longest: int


# id of a tensor -> what it holds. PyTorch's WeakIdKeyDictionary compares keys in Python, which takes ten times as long.
known_contents: dict[int, _Contents] = {}


def of_numbers(offsets: Sequence[int], device: torch.device) -> Tensor:
    """[len(offsets)] int32 on a device, whose check reads nothing back; the copy to a GPU waits for nothing.

    Args:
        offsets: from 0 on, and never decreasing.
    """
    host = torch.tensor(offsets, dtype=torch.int32, pin_memory=device.type == "cuda")
    tensor = host.to(device, non_blocking=True)
    _keep(tensor, offsets)
    return tensor


def check_pair(cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor) -> None:
    """Refuses offsets of queries and of keys that describe different numbers of sequences."""
    if cu_seqlens_q.shape != cu_seqlens_kv.shape:
        raise TensorError(
            "cu_seqlens_q and cu_seqlens_kv must describe as many sequences, got "
            f"{cu_seqlens_q.shape[0] - 1} and {cu_seqlens_kv.shape[0] - 1}; give a sequence without keys a length of 0"
        )


def check(name: str, cu_seqlens: Tensor, tokens: int, longest: int, device: torch.device) -> None:
    """Refuses offsets that describe no sequences of at most `longest` tokens inside a tensor of `tokens`.

    The contents are read once for each state of the tensor, which waits for the GPU. They are not read while a CUDA
    graph is captured, where nothing can be waited for: kernels clamp what they read, so that wrong offsets then give
    wrong rows but never touch foreign memory.

    Raises:
        TensorError: the offsets are no contiguous int32 [sequences + 1] on `device`, or contradict themselves.
    """
    check_form(name, cu_seqlens, device)
    if device.type == "meta" or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    _check_contents(name, _contents(cu_seqlens), tokens, longest)


def check_form(name: str, cu_seqlens: Tensor, device: torch.device) -> None:
    """The same of what can be known without reading the offsets."""
    if not isinstance(cu_seqlens, Tensor):
        raise TensorError(f"{name} must be a torch.Tensor, got {type(cu_seqlens).__name__}; convert it first")
    if cu_seqlens.dtype is not torch.int32:
        raise TensorError(f"{name} must be int32, got {cu_seqlens.dtype}; cast it with .int()")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0 or not cu_seqlens.is_contiguous():
        raise TensorError(
            f"{name} must be [sequences + 1] and contiguous, got shape {tuple(cu_seqlens.shape)} with strides "
            f"{cu_seqlens.stride()}; begin with 0 and add the lengths up"
        )
    if cu_seqlens.device != device:
        raise TensorError(f"{name} must be on the query's device {device}, got {cu_seqlens.device}; move it")


def _check_contents(name: str, contents: _Contents, tokens: int, longest: int) -> None:
    if contents.first != 0:
        raise TensorError(f"{name} must start at 0, got {contents.first}; put a 0 in front")
    if contents.shortest < 0:
        raise TensorError(f"{name} must never decrease, got a step of {contents.shortest}; add up the lengths in order")
    if contents.last > tokens:
        raise TensorError(f"{name} must end within the {tokens} tokens, got {contents.last}; correct the lengths")
    if contents.longest > longest:
        raise TensorError(
            f"{name} must hold no sequence above the given maximum of {longest} tokens, got {contents.longest}; "
            "raise it"
        )


def _contents(cu_seqlens: Tensor) -> _Contents:
    version = 0 if cu_seqlens.is_inference() else cu_seqlens._version
    place = id(cu_seqlens)
    known = known_contents.get(place)
    if (
        known is not None
        and (known.version, known.address) == (version, cu_seqlens.data_ptr())
        and known.tensor() is cu_seqlens
    ):
        return known
    return _keep(cu_seqlens, cu_seqlens.tolist())


def _keep(cu_seqlens: Tensor, offsets: Sequence[int]) -> _Contents:
    """Keeps what a tensor holds."""
    steps = [after - before for before, after in itertools.pairwise(offsets)]
    place = id(cu_seqlens)
    contents = known_contents[place] = _Contents(
        tensor=weakref.ref(cu_seqlens, partial(_drop, place)),
        version=0 if cu_seqlens.is_inference() else cu_seqlens._version,
        address=cu_seqlens.data_ptr(),
        first=offsets[0],
        last=offsets[-1],
        shortest=min(steps, default=0),
        longest=max(steps, default=0),
    )
    return contents


def _drop(place: int, tensor: weakref.ref[Tensor]) -> None:
    """Forgets a tensor that is gone, unless another one has its id by now."""
    known = known_contents.get(place)
    if known is not None and known.tensor is tensor:
        del known_contents[place]
