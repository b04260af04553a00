"""The key of a call: all that decides how it is answered, so that the call cache finds the answer to one like it.

Of tensors among the other arguments (bias, slopes, sinks) a key holds how they lie in memory, as of query, key and
value, so that a call with other ones is answered alike. What a key cannot hold is never kept: block tables, functions,
a seed, subclasses of tensors with rules of their own, and calls that torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from autoattn import torch_private
from autoattn.core.mask import Mask
from autoattn.kernels.forward import ALIGNED
from autoattn.runtime.parse import arguments

Key: TypeAlias = tuple[Hashable, ...]
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_WORDS = frozenset({type(None), bool, int, float, str, Mask})  # types whose values say all about an argument
_FLOAT32, _FLOAT8 = torch.float32, torch.float8_e4m3fn
_has_dual_level = torch_private.has_dual_level
_watchers = torch_private.count_dispatch_modes  # modes, which would not see a launch
_repeats = torch_private.are_gradients_deterministic


def of(
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
