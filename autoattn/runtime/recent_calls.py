"""The kinds of calls that a process made last, told from others by PyTorch's own guards.

A model calls attention once a layer, each time alike. What `prepared.key` reads in Python, guards that torch.compile
puts before its graphs see in C++: the tensors' types, dtypes, devices, sizes, strides, wanted gradients and views that
stand for negatives, and which mode, transform or switch of PyTorch's is on.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autoattn import torch_private
from autoattn.kernels.forward import ALIGNED
from autoattn.runtime.parse import arguments

MOST = 64  # pairs of shapes
OF_SHAPES = 4  # kinds of calls of one pair, which are asked one behind the other
FIRST = 8  # kinds that are asked before all others: the layers of a model are of few
_is = operator.is_
_is_compiling = torch.compiler.is_dynamo_compiling
_differentiates = torch.is_grad_enabled
_repeats = torch_private.are_gradients_deterministic
Words: TypeAlias = tuple[Any, Any, Any, Any, Any, Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kind:
    words: Words
    is_alike: Callable[[Any, Any, Any], bool]
    differentiates: bool  # whether autograd is on
    repeats: bool  # whether gradients must
    exact: bool  # whether what follows must be the same too
    is_unchanged: Callable[[], bool]
    alignment: int
    numerics: str  # that the environment asks for
    known: Callable[..., Any]

    def says(self, words: Words) -> bool:
        """Whether words that are other objects say the same; 1, 1.0 and True are equal, and do not."""
        return words == self.words and all(map(_is, map(type, words), map(type, self.words)))

    def answers(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether a call with these words is of this kind."""
        return (
            self.is_alike(query, key, value)
            and self.differentiates is _differentiates()
            and self.repeats is _repeats()
            and (not self.exact or self.holds(query, key, value))
        )

    def holds(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether all beside the arguments is as it was."""
        return (
            self.is_unchanged()
            and (query.data_ptr() | key.data_ptr() | value.data_ptr()) & ALIGNED == self.alignment
            and arguments.asked_numerics() == self.numerics
        )


_kinds: dict[tuple[Any, Any], tuple[_Kind, ...]] = {}
_first: tuple[_Kind, ...] = ()  # whose words are the very objects of the last calls
_writing = threading.Lock()


def find(query: Any, key: Any, value: Any, words: Words) -> Callable[..., Any] | None:
    """What answers a call of a kind that was kept; None where none is like it.

    Words are compared one by one: between the layers of a model, where the CPU's caches hold other things, what makes
    tuples of them and their types takes 3 us more (benchmarks/results/2026-11-22_h200_overhead.md, at its end).

    Args:
        words: as of `keep`.
    """
    if _is_compiling():
        return None
    causal, softcap, dropout, scale, layout, deterministic, return_lse = words
    try:
        if query.is_nested or key.is_nested or value.is_nested:  # the guards end the process over them
            return None
        for one in _first:
            a, b, c, d, e, f, g = one.words
            if (
                causal is a and layout is e and deterministic is f and return_lse is g
                and (softcap is b or (softcap == b and type(softcap) is type(b)))
                and (dropout is c or (dropout == c and type(dropout) is type(c)))
                and (scale is d or (scale == d and type(scale) is type(d)))
                and one.is_alike(query, key, value)  # and what `answers` asks, without a call
                and one.differentiates is _differentiates()
                and one.repeats is _repeats()
                and (not one.exact or one.holds(query, key, value))
            ):  # fmt: skip
                return one.known
        shapes = query.shape, key.shape
        for one in _kinds.get(shapes, ()):
            if one.says(words) and one.answers(query, key, value):
                _put_first(one, shapes, words)
                return one.known
    except (AttributeError, TypeError, ValueError, RuntimeError):  # no tensors, or words that nobody can compare:
        pass  # the ordinary way says so
    return None


def keep(query: Tensor, key: Tensor, value: Tensor, words: Words, known: Callable[..., Any], *, exact: bool) -> None:
    """Keeps the kind of a call that was just answered, in place of the oldest of its shapes, or of the oldest shapes.

    Args:
        words: the usual arguments of the table in autoattn.core.call_arguments, in its order.
        known: what answers such calls, from the tensors.
        exact: whether it serves these alone; PyTorch's own attention sees by itself what is switched on.
    """
    if not torch_private.TENSOR_GUARDS:
        return
    if exact and query.dtype is torch.float32:  # how its products are formed is no switch that the guards know
        return
    three = query, key, value
    kind = _Kind(
        words=words,
        is_alike=torch_private.guard_tensors(three),
        differentiates=_differentiates(),
        repeats=_repeats(),
        exact=exact,
        is_unchanged=torch_private.guard_global_state(),
        alignment=(query.data_ptr() | key.data_ptr() | value.data_ptr()) & ALIGNED,
        numerics=arguments.asked_numerics(),
        known=known,
    )
    shapes = query.shape, key.shape
    with _writing:
        others = _kinds.pop(shapes, ())
        while len(_kinds) >= MOST:
            del _kinds[next(iter(_kinds))]  # the oldest
        _kinds[shapes] = (kind, *others[: OF_SHAPES - 1])
    _put_first(kind, shapes, words)


def _put_first(kind: _Kind, shapes: tuple[Any, Any], words: Words) -> None:
    """Asks a kind before all others from now on, unless it was forgotten meanwhile."""
    global _first
    with _writing:
        if kind in _kinds.get(shapes, ()):
            _first = (replace(kind, words=words), *_first[: FIRST - 1])


def forget() -> None:
    """Drops all of them."""
    global _first
    with _writing:
        _kinds.clear()
        _first = ()
