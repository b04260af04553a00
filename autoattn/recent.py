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

MOST = 64  # pairs of shapes
OF_SHAPES = 4  # kinds of calls of one pair, which are asked one behind the other
_tensor_guards: Any = TensorGuards  # whose annotations leave out the tensors
_is = operator.is_
_is_compiling = torch.compiler.is_compiling
_repeats = torch._C._get_deterministic_algorithms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kind:
    words: tuple[Any, ...]  # the arguments that are no tensors
    types: tuple[type, ...]
    is_alike: Callable[[Any, Any, Any], bool]
    exact: bool  # whether what follows must be the same too, or these alone: is autograd on, must gradients repeat
    wanted: tuple[bool, bool]
    is_unchanged: Callable[[], bool]
    alignment: int
    numerics: str  # that the environment asks for
    known: Callable[..., Any]

    def says(self, words: tuple[Any, ...]) -> bool:
        """Whether the words are these, or others that are made for each call, as a scale is, and say the same."""
        return words == self.words and all(map(_is, map(type, words), self.types))  # 1, 1.0 and True are equal

    def holds(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether all beside the arguments is as it was."""
        return (
            self.is_unchanged()
            and (query.data_ptr() | key.data_ptr() | value.data_ptr()) & ALIGNED == self.alignment
            and arguments.asked_numerics() == self.numerics
        )


_kinds: dict[tuple[Any, Any], tuple[_Kind, ...]] = {}
_writing = threading.Lock()


def find(query: Any, key: Any, value: Any, words: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What answers a call of a kind that was kept; None where none is like it."""
    if _is_compiling():
        return None
    try:
        for one in _kinds.get((query.shape, key.shape), ()):
            if (
                one.says(words)
                and one.is_alike(query, key, value)
                and (one.holds(query, key, value) if one.exact else one.wanted == _wanted())
            ):
                return one.known
    except (AttributeError, TypeError, ValueError, RuntimeError):  # no tensors, or words that nobody can compare:
        pass  # the ordinary way says so
    return None


def keep(
    query: Tensor, key: Tensor, value: Tensor, words: tuple[Any, ...], known: Callable[..., Any], *, exact: bool
) -> None:
    """Keeps the kind of a call that was just answered, in place of the oldest of its shapes, or of the oldest shapes.

    Args:
        words: the same arguments, in the same order, in each call.
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
        types=tuple(map(type, words)),
        is_alike=tensors.check,
        exact=exact,
        wanted=_wanted(),
        is_unchanged=GlobalStateGuard().check,
        alignment=(query.data_ptr() | key.data_ptr() | value.data_ptr()) & ALIGNED,
        numerics=arguments.asked_numerics(),
        known=known,
    )
    with _writing:
        others = _kinds.pop((query.shape, key.shape), ())
        while len(_kinds) >= MOST:
            del _kinds[next(iter(_kinds))]  # the oldest
        _kinds[query.shape, key.shape] = (kind, *others[: OF_SHAPES - 1])


def _wanted() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), _repeats()


def forget() -> None:
    """Drops all of them."""
    with _writing:
        _kinds.clear()
