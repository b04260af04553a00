"""The call cache: prepared calls, found by guards first and then by a key.

Guards are those that torch.compile puts in front of its graphs. In C++ they look at the tensors' types, dtypes,
devices, sizes, strides, wanted gradients and views that stand for negatives, and at PyTorch's modes, transforms and
switches. A model calls attention once a layer, each time alike, so that a few guarded kinds of calls answer most. Where
guards find nothing, or PyTorch has none, a key finds a call (autoattn.runtime.call_keys).

An error is never kept.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from autoattn import torch_private
from autoattn.kernels.forward import ALIGNED
from autoattn.runtime.call_keys import Key
from autoattn.runtime.parse import arguments

BOUND = 4096  # calls; a growing key cache asks for something new at every step
MAX_FAMILIES = 256  # of calls that differ in sizes alone
GUARDED_SHAPES = 64  # pairs of shapes with guards
GUARDED_OF_SHAPES = 4  # kinds of calls of one pair, which are compared in turn
GUARDED_FIRST = 8  # kinds that are compared before all others: the layers of a model are of few
Words: TypeAlias = tuple[Any, Any, Any, Any, Any, Any, Any]
_is = operator.is_
_is_compiling = torch.compiler.is_dynamo_compiling
_differentiates = torch.is_grad_enabled
_has_dual_level = torch_private.has_dual_level
_repeats = torch_private.are_gradients_deterministic


class PreparedCall(Protocol):
    """What answers calls like an earlier one; it takes the tensors of the call's key in its order."""

    @property
    def guarded(self) -> Callable[..., Any]:
        """What answers a call that guards know; they do not see whether a CUDA graph is captured."""

    @property
    def sees_switches(self) -> bool:
        """Whether it sees by itself what is switched on, as F.scaled_dot_product_attention does."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /, *others: Tensor) -> Any:
        """The answer to the caller; None where it does not take the call after all.

        Args:
            others: the offsets of packed sequences, then the tensors among the seldom words (call_keys.tensors_among).
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """How full the call cache is."""

    calls: int  # that keys find
    bound: int
    families: int  # of calls that differ in sizes alone, whose plans are kept
    guarded: int  # kinds of calls that guards find
    has_guards: bool  # whether this PyTorch has guards


def find(call_key: Key | None) -> PreparedCall | None:
    """The prepared call of a key; None where there is none."""
    return None if call_key is None else _calls.get(call_key)


def keep(call_key: Key, prepared: PreparedCall) -> None:
    """Keeps the prepared call of a key, in place of the oldest where the cache is full."""
    with _writing:
        while len(_calls) >= BOUND:
            del _calls[next(iter(_calls))]
        _calls[call_key] = prepared


def find_family(family_key: Key) -> Any:
    """What is kept of calls that differ in sizes alone (autoattn.runtime.resized_call); None where nothing is."""
    return _families.get(family_key)


def keep_family(family_key: Key, family: object) -> None:
    """Keeps it, in place of the oldest where there are too many."""
    with _writing:
        while len(_families) >= MAX_FAMILIES:
            del _families[next(iter(_families))]
        _families[family_key] = family


def drop(call_key: Key) -> None:
    """Drops the prepared call of a key, and all guards."""
    with _writing:
        _calls.pop(call_key, None)
        _drop_guards()


def clear() -> None:
    """Drops all prepared calls, and what is kept of families of calls."""
    with _writing:
        _calls.clear()
        _families.clear()
        _drop_guards()


def _drop_guards() -> None:
    global latest, latest_on_caches
    _guarded.clear()
    latest = latest_on_caches = ()


def info() -> CacheInfo:
    """How full the cache is."""
    guarded = sum(map(len, _guarded.values()))
    return CacheInfo(
        calls=len(_calls), bound=BOUND, families=len(_families), guarded=guarded, has_guards=torch_private.TENSOR_GUARDS
    )


def prepared_calls() -> tuple[PreparedCall, ...]:
    """All prepared calls that keys find, the oldest first."""
    return tuple(_calls.values())


# --- Guards -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _GuardedCall:
    words: tuple[Any, ...]
    is_alike: Callable[..., bool]
    differentiates: bool  # whether autograd is on
    repeats: bool  # whether gradients must
    exact: bool  # whether what follows must be the same too
    is_unchanged: Callable[[], bool]
    alignment: int
    numerics: str  # that the environment asks for
    answer: Callable[..., Any]

    def has_words(self, words: tuple[Any, ...]) -> bool:
        """Whether words that are other objects say the same; 1, 1.0 and True are equal, and do not."""
        return words == self.words and all(map(_is, map(type, words), map(type, self.words)))

    def matches(self, query: Tensor, key: Tensor, value: Tensor, *offsets: Tensor) -> bool:
        """Whether a call with these words is of this kind."""
        return (
            self.is_alike(query, key, value, *offsets)
            and self.differentiates is _differentiates()
            and self.repeats is _repeats()
            and (not self.exact or self.is_state_unchanged(query, key, value))
        )

    def is_state_unchanged(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether all beside the arguments is as it was."""
        return (
            self.is_unchanged()
            and (query.data_ptr() | key.data_ptr() | value.data_ptr()) & ALIGNED == self.alignment
            and arguments.asked_numerics() == self.numerics
        )


def find_guarded(query: Any, key: Any, value: Any, words: Words) -> Callable[..., Any] | None:
    """What answers a call of a guarded kind; None where none is like it.

    Words are compared one by one: between the layers of a model, where the CPU's caches hold other things, what makes
    tuples of them and their types takes 3 us more (benchmarks/results/2026-11-22_h200_overhead.md, at its end).

    Args:
        words: as of `guard`.
    """
    if _is_compiling() or _has_dual_level():
        return None
    causal, softcap, dropout, scale, layout, deterministic, return_lse = words
    try:
        if query.is_nested or key.is_nested or value.is_nested:  # the guards end the process over them
            return None
        for guarded in latest:
            a, b, c, d, e, f, g = guarded.words
            if (
                causal is a and layout is e and deterministic is f and return_lse is g
                and (softcap is b or (softcap == b and type(softcap) is type(b)))
                and (dropout is c or (dropout == c and type(dropout) is type(c)))
                and (scale is d or (scale == d and type(scale) is type(d)))
                and guarded.is_alike(query, key, value)  # and what `matches` asks, without a call
                and guarded.differentiates is _differentiates()
                and guarded.repeats is _repeats()
                and (not guarded.exact or guarded.is_state_unchanged(query, key, value))
            ):  # fmt: skip
                return guarded.answer
        shapes = query.shape, key.shape
        for guarded in _guarded.get(shapes, ()):
            if guarded.has_words(words) and guarded.matches(query, key, value):
                put_first(guarded, shapes, words)
                return guarded.answer
    except (AttributeError, TypeError, ValueError, RuntimeError):  # no tensors, or words that nobody can compare:
        pass  # the ordinary way says so
    return None


def guard(query: Tensor, key: Tensor, value: Tensor, words: Words, prepared: PreparedCall) -> None:
    """Puts guards in front of a prepared call, in place of the oldest of its shapes, or of the oldest shapes.

    Args:
        words: the usual arguments of the table in autoattn.core.call_arguments, in its order.
    """
    exact = not prepared.sees_switches
    if not torch_private.TENSOR_GUARDS:
        return
    if exact and query.dtype is torch.float32:  # how its products are formed is no switch that the guards know
        return
    kind = _guarded_kind((query, key, value), words, prepared, exact=exact)
    shapes = query.shape, key.shape
    with _writing:
        older = _guarded.pop(shapes, ())
        while len(_guarded) >= GUARDED_SHAPES:
            del _guarded[next(iter(_guarded))]  # the oldest
        _guarded[shapes] = (kind, *older[: GUARDED_OF_SHAPES - 1])
    put_first(kind, shapes, words)


def _guarded_kind(
    tensors: tuple[Tensor, ...], words: tuple[Any, ...], prepared: PreparedCall, *, exact: bool
) -> _GuardedCall:
    query, key, value = tensors[:3]
    return _GuardedCall(
        words=words,
        is_alike=torch_private.guard_tensors(tensors),
        differentiates=_differentiates(),
        repeats=_repeats(),
        exact=exact,
        is_unchanged=torch_private.guard_global_state(),
        alignment=(query.data_ptr() | key.data_ptr() | value.data_ptr()) & ALIGNED,
        numerics=arguments.asked_numerics(),
        answer=prepared.guarded,
    )


def find_guarded_on_cache(tensors: tuple[Any, ...], words: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What answers a call on a cache of a guarded kind; None where none is like it.

    Args:
        tensors: query, the cache's key and value, and what says where the keys of each sequence lie.
    """
    if _is_compiling() or _has_dual_level():
        return None
    try:
        for tensor in tensors:
            if tensor.is_nested:  # the guards end the process over them
                return None
        for guarded in latest_on_caches:
            if guarded.has_words(words) and guarded.matches(*tensors):
                return guarded.answer
    except (AttributeError, TypeError, ValueError, RuntimeError):  # the ordinary way says what is wrong
        pass
    return None


def guard_on_cache(tensors: tuple[Tensor, ...], words: tuple[Any, ...], prepared: PreparedCall) -> None:
    """Puts guards in front of a prepared call on a cache, and it before those that have guards already."""
    global latest_on_caches
    if not torch_private.TENSOR_GUARDS or tensors[0].dtype is torch.float32:  # see `guard`
        return
    kind = _guarded_kind(tensors, words, prepared, exact=True)
    with _writing:
        latest_on_caches = (kind, *latest_on_caches[: GUARDED_FIRST - 1])


def put_first(kind: _GuardedCall, shapes: tuple[Any, Any], words: Words) -> None:
    """Asks a kind before all others from now on, unless it was forgotten meanwhile."""
    global latest
    with _writing:
        if kind in _guarded.get(shapes, ()):
            latest = (replace(kind, words=words), *latest[: GUARDED_FIRST - 1])


_calls: dict[Key, PreparedCall] = {}
_families: dict[Key, Any] = {}
_guarded: dict[tuple[Any, Any], tuple[_GuardedCall, ...]] = {}
latest: tuple[_GuardedCall, ...] = ()  # whose words are the very objects of the last calls
latest_on_caches: tuple[_GuardedCall, ...] = ()
_writing = threading.Lock()
