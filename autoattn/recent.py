"""The kinds of calls that a process made last, told from others by PyTorch's own guards.

A model calls attention once a layer, each time alike. What `prepared.key` reads in Python, guards that torch.compile
puts before its graphs see in C++: the tensors' types, dtypes, devices, sizes, strides, wanted gradients and views that
stand for negatives, and which mode, transform or switch of PyTorch's is on.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards

from autoattn import arguments
from autoattn.ops.forward import ALIGNED

MOST = 64  # kinds of calls, one of each pair of shapes and causal mask
_tensor_guards: Any = TensorGuards  # whose annotations leave out the tensors
_is = operator.is_
_is_compiling = torch.compiler.is_compiling
_repeats = torch._C._get_deterministic_algorithms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kind:
    words: tuple[Any, ...]  # the arguments that are no tensors, as they came: 1, 1.0 and True are equal
    is_alike: Callable[[Any, Any, Any], bool]
    exact: bool  # whether what follows must be the same too, or these alone: is autograd on, must gradients repeat
    wanted: tuple[bool, bool]
    is_unchanged: Callable[[], bool]
    alignment: int
    numerics: str  # that the environment asks for
    known: Callable[..., Any]

    def holds(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether all beside the arguments is as it was."""
        return (
            self.is_unchanged()
            and (query.data_ptr() | key.data_ptr() | value.data_ptr()) & ALIGNED == self.alignment
            and arguments.asked_numerics() == self.numerics
        )


_kinds: dict[tuple[Any, Any, Any], _Kind] = {}


def find(query: Any, key: Any, value: Any, words: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What answers a call of a kind that was kept; None where none is like it."""
    if _is_compiling():
        return None
    try:
        one = _kinds.get((query.shape, key.shape, words[0]))
    except (AttributeError, TypeError, RuntimeError):  # no tensor, no word, no sizes: the ordinary way says so
        return None
    if (
        one is not None
        and all(map(_is, words, one.words))
        and one.is_alike(query, key, value)
        and (one.holds(query, key, value) if one.exact else one.wanted == _wanted())
    ):
        return one.known
    return None


def keep(
    query: Tensor, key: Tensor, value: Tensor, words: tuple[Any, ...], known: Callable[..., Any], *, exact: bool
) -> None:
    """Keeps the kind of a call that was just answered, in place of one of the same shapes or the oldest.

    Args:
        words: the same arguments, in the same order, in each call; the first is causal.
        known: what answers such calls, from the tensors.
        exact: whether it serves these alone; PyTorch's own attention sees by itself what is switched on.
    """
    if exact and query.dtype is torch.float32:  # how its products are formed is no switch that the guards know
        return
    three = query, key, value
    sizes, strides = [list(one.shape) for one in three], [list(one.stride()) for one in three]
    tensors = _tensor_guards(*three, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    kind = _Kind(
        words=words,
        is_alike=tensors.check,
        exact=exact,
        wanted=_wanted(),
        is_unchanged=GlobalStateGuard().check,
        alignment=(query.data_ptr() | key.data_ptr() | value.data_ptr()) & ALIGNED,
        numerics=arguments.asked_numerics(),
        known=known,
    )
    with _writing:
        while len(_kinds) >= MOST:
            del _kinds[next(iter(_kinds))]  # the oldest
        _kinds[query.shape, key.shape, words[0]] = kind


_writing = threading.Lock()


def _wanted() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), _repeats()


def forget() -> None:
    """Drops all of them."""
    with _writing:
        _kinds.clear()
