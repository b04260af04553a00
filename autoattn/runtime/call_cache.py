"""The call cache: prepared calls, found by guards first and then by a hash.

Guards are those that torch.compile puts in front of its graphs. In C++ they look at the tensors' types, dtypes,
devices, sizes, strides, wanted gradients and views that stand for negatives, and at PyTorch's modes, transforms and
switches. A model calls attention once a layer, each time alike, so that a few guarded kinds of calls answer most. Where
guards find nothing, or PyTorch has none, a key formed in Python says all that decides how a call is answered.

Of tensors among the other arguments (bias, slopes, sinks) a key holds how they lie in memory, as of query, key and
value, so that a call with other ones is answered alike. What a key cannot hold is never kept: block tables, functions,
a seed, subclasses of tensors with rules of their own, and calls that torch.compile traces. An error is never kept
either.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from autoattn import torch_private
from autoattn.core.mask import Mask
from autoattn.kernels.forward import ALIGNED
from autoattn.runtime.parse import arguments

BOUND = 4096  # calls; a growing key cache asks for something new at every step
MAX_FAMILIES = 256  # of calls that differ in sizes alone
GUARDED_SHAPES = 64  # pairs of shapes with guards
GUARDED_OF_SHAPES = 4  # kinds of calls of one pair, which are compared in turn
GUARDED_FIRST = 8  # kinds that are compared before all others: the layers of a model are of few
Key: TypeAlias = tuple[Hashable, ...]
Words: TypeAlias = tuple[Any, Any, Any, Any, Any, Any, Any]
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_WORDS = frozenset({type(None), bool, int, float, str, Mask})  # types whose values say all about an argument
_FLOAT32, _FLOAT8 = torch.float32, torch.float8_e4m3fn
_is = operator.is_
_is_compiling = torch.compiler.is_dynamo_compiling
_differentiates = torch.is_grad_enabled
_has_dual_level = torch_private.has_dual_level
_watchers = torch_private.count_dispatch_modes  # modes, which would not see a launch
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
            others: the offsets of packed sequences, then those that `tensors_among` the seldom words.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """How full the call cache is."""

    calls: int  # that keys find
    bound: int
    families: int  # of calls that differ in sizes alone, whose plans are kept
    guarded: int  # kinds of calls that guards find
    has_guards: bool  # whether this PyTorch has guards


# --- Keys -------------------------------------------------------------------------------------------------------------


def key(
    query: Any, key: Any, value: Any, offsets: tuple[Any, ...], words: tuple[Any, ...], seldom: tuple[Any, ...] | None
) -> Key | None:
    """All that decides how a call is answered; None when that takes more than a look at its arguments.

    It is written out where a loop would be shorter, since every call pays for it.

    Args:
        offsets: cu_seqlens_q and cu_seqlens_kv of a packed call.
        words: arguments that are mostly given, or have a default other than None.
        seldom: the window and the others, some of which are tensors, but for the seed of a dropout, which is never
            prepared; None where all of them are None.
    """
    if torch.compiler.is_compiling() or _watchers() or _has_dual_level():  # a launch would lose a tangent
        return None
    usual = len(words)
    if seldom is not None:
        window = seldom[0]
        if window is not None and type(window) is not tuple:
            return None
        words += (*seldom[1:], *(window or ()), window is None)
    kinds = tuple(map(type, words))  # 1, 1.0 and True are equal, but not the same argument
    if not (type(query) in _TENSORS and type(key) in _TENSORS and type(value) in _TENSORS):
        return None
    layouts: tuple[Hashable, ...] = ()
    extras: tuple[ExtraFacts, ...] = ()
    try:
        if not _WORDS.issuperset(kinds):
            if not _WORDS.issuperset(kinds[:usual]) or (apart := _apart(words[usual:])) is None:
                return None
            words, extras = words[:usual] + apart[0], apart[1]
        address = query.data_ptr() | key.data_ptr() | value.data_ptr()
        for tensor in offsets:
            if type(tensor) not in _TENSORS:
                return None
            layouts += tensor.shape, tensor.stride(), tensor.dtype, tensor.device
            address |= tensor.data_ptr()
        if query.is_neg() or key.is_neg() or value.is_neg():
            return None  # what lies in memory are other numbers
        dtype, device = query.dtype, query.device
        # A cache of float8 comes with its scales, which tell its calls apart.
        if not (
            (dtype is key.dtype or key.dtype is _FLOAT8)
            and key.dtype is value.dtype
            and device == key.device == value.device
        ):
            return None  # no such call is prepared: it is an error, or autocast gives it other tensors
        kind = "cuda" if query.is_cuda else "cpu"
        return (
            dtype, device, query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(), layouts,
            extras,
            address & ALIGNED,
            (
                query.requires_grad or key.requires_grad or value.requires_grad
                or (extras != () and any(extra.learns for extra in extras))
            ) and torch.is_grad_enabled() and (True, _repeats()),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            dtype is _FLOAT32 and torch.get_float32_matmul_precision(),
            arguments.asked_numerics(),
            kinds,
            words,
        )  # fmt: skip
    except RuntimeError:  # a sparse or nested tensor has no strides, one under torch.func.vmap no address
        return None


class ExtraFacts(NamedTuple):
    """How a tensor beside query, key, value and offsets lies in memory, as a key holds it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    learns: bool  # whether somebody may differentiate by it
    address: int  # modulo 16


def _apart(words: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[ExtraFacts, ...]] | None:
    """Words with None for tensors, and the facts of these; None where a key cannot hold one.

    Raises:
        RuntimeError: a tensor has no strides or no address.
    """
    left, extras, differentiates = [], [], torch.is_grad_enabled()
    for word in words:
        kind = type(word)
        if kind in _WORDS:
            left.append(word)
        elif kind not in _TENSORS or word.is_neg():
            return None
        else:
            left.append(None)
            extras.append(
                ExtraFacts(
                    word.shape, word.stride(), word.dtype, word.device, word.requires_grad and differentiates,
                    word.data_ptr() & ALIGNED,
                )
            )  # fmt: skip
    return tuple(left), tuple(extras)


def tensors_among(words: Iterable[Any]) -> tuple[Tensor, ...]:
    """The tensors among a key's words, in their order."""
    return tuple([word for word in words if isinstance(word, Tensor)])


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
