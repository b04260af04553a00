"""Parses the arguments of a call on a cache of keys and values; a caller's mistake is one sentence here.

What lies on the GPU is not read: kernels clamp lengths to what the cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autoattn.core.call_arguments import DEFAULTS
from autoattn.core.key_cache import INVARIANT_SPLITS, KeyCache, are_latent_dims
from autoattn.core.mask import Alignment, Mask
from autoattn.core.problem import MAX_HEAD_DIM, MAX_SIZE, Layout
from autoattn.errors import TensorError
from autoattn.kernels.forward import DTYPE
from autoattn.runtime.parse import arguments, mask_arguments, modifier_arguments
from autoattn.runtime.parse.arguments import AXES, Call
from autoattn.runtime.parse.modifier_arguments import check_tensor
from autoattn.tensors import cu_seqlens
from autoattn.tensors.operands import CachedKeys

_CACHE_AXES = ("rows", "capacity", "heads", "head_dim")
_PAGE_AXES = ("pages", "page", "heads", "head_dim")
# Arguments of `cached_attention` that say where keys lie, and the fields of CacheTensors
PLACES = {
    **{"block_table": "block_table", "cache_rows": "rows", "leftpad": "leftpad"},
    **{"key_scale": "key_scale", "value_scale": "value_scale"},
}
FLOAT8 = torch.float8_e4m3fn
_DEFAULTS: dict[str, Any] = {  # of its other arguments
    **dict.fromkeys(("cu_seqlens_q", "max_seqlen_q", "max_length", "window", "alibi_slopes", "sinks", "scale")),
    **dict.fromkeys(("precision", "numerics")),
    "causal": False, "softcap": 0.0, "splits": 0, "split_length": 0, "deterministic": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheTensors:
    """The tensors of a cache of keys and values: those that `cached_attention` takes, for a module.

    Attributes:
        key: [rows, capacity, heads_kv, head_dim], or with block_table [pages, page, heads_kv, head_dim]; any strides.
        value: the same, with a head dim of its own; a view of the key's first elements is read with the key.
        lengths: [batch] int32: the keys of each sequence.
        block_table: [batch, pages of a sequence] int32: which pages have its keys.
        rows: [batch] int32: its row in a contiguous cache; its own number when None.
        leftpad: [batch] int32: where its keys begin in the row.
        key_scale, value_scale: float32 that expands to [batch, heads_kv]: what float8 numbers are multiplied by. Values
            that are a view of the keys have the key_scale when None.
    """

    key: Tensor
    value: Tensor
    lengths: Tensor
    block_table: Tensor | None = None
    rows: Tensor | None = None
    leftpad: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Keys that the cache holds of a sequence at most."""
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return int(pages * self.key.shape[1])

    @property
    def offsets(self) -> tuple[Tensor, ...]:
        """Those that are there, beside key and value, in the order of kernels.forward.CACHE_POINTERS and the scales."""
        given = self.lengths, self.block_table, self.rows, self.leftpad, self.key_scale, self.value_scale
        return tuple(tensor for tensor in given if tensor is not None)


def read(
    query: Tensor, cache: CacheTensors, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None, max_length: int | None,
    splits: int, split_length: int, deterministic: bool, **given: Any,
) -> Call:  # fmt: skip
    """The call that the arguments of `autoattn.cached_attention` pose.

    Raises:
        TensorError: the arguments do not make one call.
        ProblemError: they do, but it is not supported.
    """
    packed, batch = cu_seqlens_q is not None, _batch(query, cu_seqlens_q)
    check(query, cache, batch, packed=packed)
    latent = is_latent(cache.key, cache.value)
    _check_head_dims(cache, latent=latent)
    cache = with_all_scales(cache)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, cache.key, cache.value)):
        raise TensorError(
            "attention on a cache gives no gradients, got a tensor that needs one; call it under torch.no_grad()"
        )
    capacity, page = cache.capacity, cache.key.shape[1] if cache.block_table is not None else 0
    bound = capacity if max_length is None else min(capacity, bound_of(max_length))
    if packed:
        seq_q = _longest(query, cu_seqlens_q, max_seqlen_q)
        view = query.transpose(0, 1)[None]
    else:
        seq_q, view = query.shape[1], query.transpose(1, 2)
    changed = modifier_arguments.read(view, batch, seq_q, capacity, given)
    facts = {
        "layout": Layout.PACKED if packed else Layout.BSHD,
        "mask": mask_of(given["causal"], given["window"], seq_q),
        "modifiers": changed.modifiers,
        "tokens_q": (query.shape[0] or 1) if packed else 0,
        "tokens_kv": min((bound or 1) * (batch or 1), MAX_SIZE) if packed else 0,
        "cache": KeyCache(
            page=page,
            float8=cache.key.dtype is FLOAT8,
            latent=latent,
            rows=cache.rows is not None,
            leftpad=cache.leftpad is not None,
            **_cut(splits, split_length, deterministic, packed=packed and max_seqlen_q is None),
        ),
    }
    cached = CachedKeys(
        lengths=cache.lengths, capacity=capacity, pages=cache.block_table, rows=cache.rows, leftpad=cache.leftpad
    )
    tensors = {"cu_seqlens_q": cu_seqlens_q, "cache": cached, **scales_of(cache, batch), **changed.operands}
    three = view, cache.key.transpose(1, 2), cache.value.transpose(1, 2)
    return arguments.call_of(three, (batch, seq_q, bound), query.dtype, {**DEFAULTS, **given}, facts, tensors)


def is_latent(key_cache: Any, value_cache: Any) -> bool:
    """Whether the values of a cache are a view of its keys' first elements, so that kernels read both at once.

    They do for elements of 16 or 8 bits, and for head dims of which one tile serves both (`are_latent_dims`).
    """
    return (
        begin_together(key_cache, value_cache)
        and key_cache.dim() == value_cache.dim() == len(_CACHE_AXES)
        and key_cache.stride() == value_cache.stride()
        and key_cache.element_size() <= 2
        and are_latent_dims(key_cache.shape[3], value_cache.shape[3])
    )


def begin_together(key_cache: Any, value_cache: Any) -> bool:
    """Whether keys and values begin at one address: what calls of the same shapes and strides differ in.

    What torch.compile traces has no address, and is asked again when it runs.
    """
    if not (isinstance(key_cache, Tensor) and isinstance(value_cache, Tensor)) or torch.compiler.is_compiling():
        return False
    try:
        return bool(key_cache.data_ptr() == value_cache.data_ptr())
    except RuntimeError:  # a sparse or nested tensor has no address, which the checks say
        return False


def with_scales(
    key_cache: Any, value_cache: Any, key_scale: Tensor | None, value_scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The scales of a cache, where it is of float8 those that are missing as 1; values that are keys have the keys'."""
    if not isinstance(key_cache, Tensor) or key_cache.dtype is not FLOAT8 or torch.compiler.is_compiling():
        return key_scale, value_scale
    if key_scale is None:
        key_scale = _unit_scale(key_cache.device)
    if value_scale is None:
        value_scale = key_scale if is_latent(key_cache, value_cache) else _unit_scale(key_cache.device)
    return key_scale, value_scale


def with_all_scales(cache: CacheTensors) -> CacheTensors:
    """The cache with the scales that are missing: torch.compile leaves them to who runs."""
    key_scale, value_scale = with_scales(cache.key, cache.value, cache.key_scale, cache.value_scale)
    return replace(cache, key_scale=key_scale, value_scale=value_scale)


@lru_cache(maxsize=64)
def _unit_scale(device: torch.device) -> Tensor:
    """A scale of 1, which prepared calls and CUDA graphs keep reading.

    Raises:
        TensorError: it would have to be written while a CUDA graph is captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise TensorError("a float8 cache in a CUDA graph must have its scales, got none; give them, or call it before")
    return torch.ones((), device=device)


def scales_of(cache: CacheTensors, batch: int) -> dict[str, Tensor]:
    """The scales of a float8 cache as [batch, heads_kv] views; empty for other caches.

    Raises:
        TensorError: a scale does not fit, or the cache has no use for it.
    """
    shape, scales = (batch, cache.key.shape[2]), {}
    for name in ("key_scale", "value_scale"):
        scale = getattr(cache, name)
        if scale is None:
            continue
        if cache.key.dtype is not FLOAT8:
            raise TensorError(
                f"{name} belongs to caches of float8_e4m3fn, got one of {cache.key.dtype}; multiply by it instead"
            )
        check_tensor(name, scale, cache.key.device)
        fits = scale.dim() <= 2 and all(
            size in (1, whole) for size, whole in zip(reversed(scale.shape), reversed(shape), strict=False)
        )
        if scale.dtype is not torch.float32 or not fits:
            raise TensorError(
                f"{name} must be float32 and expand to [sequences, heads_kv] = {shape}, got {scale.dtype} of shape "
                f"{tuple(scale.shape)}; reshape or cast it"
            )
        scales[name] = scale.expand(shape)
    return scales


def complete(given: dict[str, Any]) -> dict[str, Any]:
    """All arguments of `read` beside the tensors, those that are missing with the defaults of `cached_attention`."""
    return {**_DEFAULTS, **given}


def complete_places(given: dict[str, Any]) -> dict[str, Any]:
    """All keyword arguments of `cached_attention`, those that are missing with their defaults."""
    return {**_DEFAULTS, **dict.fromkeys(PLACES), **given}


def mask_of(causal: Any, window: Any, seq_q: int) -> Mask:
    """The mask of queries behind a cache: a single one sees the last key, so that nothing behind it is hidden."""
    mask = mask_arguments.band(causal, window)
    if seq_q > 1 or mask.alignment is Alignment.TOP_LEFT:
        return mask
    return Mask.window(mask.window_size[0], -1)


def bound_of(max_length: Any) -> int:
    """A bound of lengths, rounded up to a power of two: a cache that grows keeps its kernel for long."""
    length = arguments.length_of("max_length", max_length)
    return 1 << max(length - 1, 0).bit_length()


def splits_of(splits: Any) -> int:
    """How many programs may share the keys of a sequence."""
    if isinstance(splits, bool) or not isinstance(splits, int) or splits < 0:
        raise TensorError(f"splits must be a whole number from 0 (the fastest), got {splits!r:.60}; correct it")
    return splits


def _cut(splits: Any, split_length: Any, deterministic: Any, *, packed: bool) -> dict[str, int]:
    """How a sequence may be cut, as facts of a KeyCache.

    Args:
        packed: whether queries are packed, with no bound of their lengths.
    """
    if not isinstance(deterministic, bool):
        raise TensorError(f"deterministic must be True or False, got {deterministic!r:.60}; correct it")
    if isinstance(split_length, bool) or not isinstance(split_length, int):
        raise TensorError(f"split_length must be a whole number of keys, got {split_length!r:.60}; correct it")
    number = splits_of(splits)
    if deterministic and packed:
        raise TensorError(
            "deterministic must come with max_seqlen_q where queries are packed, got None, which depends on the batch; "
            "give it"
        )
    if deterministic and not number and not split_length:
        number = INVARIANT_SPLITS
    return {"splits": number, "split_length": split_length}


def _check_head_dims(cache: CacheTensors, *, latent: bool) -> None:
    """Refuses keys for which kernels need the values as their first elements, and which are not given so."""
    head_dim, head_dim_v = cache.key.shape[3], cache.value.shape[3]
    fits = head_dim <= MAX_HEAD_DIM or not are_latent_dims(head_dim, head_dim_v)
    if cache.key.is_cuda and not latent and not fits and cache.key.element_size() <= 2:
        raise TensorError(
            f"value_cache must be a view of key_cache where a head dim is more than {MAX_HEAD_DIM}, got a tensor of "
            f"its own beside keys of {head_dim}; give key_cache[..., :{head_dim_v}]"
        )


def check(query: Tensor, cache: CacheTensors, batch: int, *, packed: bool) -> None:
    """Refuses what is no query with a cache of keys and values.

    Args:
        batch: sequences.

    Raises:
        TensorError: the sentence says which tensor, and how to mend it.
    """
    paged = cache.block_table is not None
    _check_dense("query", query, AXES[Layout.PACKED if packed else Layout.BSHD])
    for name, tensor in (("key_cache", cache.key), ("value_cache", cache.value)):
        _check_dense(name, tensor, _PAGE_AXES if paged else _CACHE_AXES)
        check_tensor(name, tensor, query.device)
        if tensor.dtype is FLOAT8 and query.dtype not in (torch.float16, torch.bfloat16, FLOAT8):
            raise TensorError(
                f"{name} of float8_e4m3fn must have queries of float16 or bfloat16, got {query.dtype}; cast the query"
            )
        if tensor.dtype is not query.dtype and tensor.dtype is not FLOAT8:
            raise TensorError(f"{name} must have the query's dtype {query.dtype}, got {tensor.dtype}; cast one of them")
    if cache.value.dtype is not cache.key.dtype:
        raise TensorError(
            f"value_cache must have the key_cache's dtype {cache.key.dtype}, got {cache.value.dtype}; cast one of them"
        )
    if cache.value.shape[:3] != cache.key.shape[:3]:
        raise TensorError(
            f"value_cache must have the key_cache's first axes {tuple(cache.key.shape[:3])}, got shape "
            f"{tuple(cache.value.shape)}; check the axes"
        )
    if cache.key.shape[3] != query.shape[-1] or 0 in (query.shape[-1], cache.value.shape[3]):
        raise TensorError(
            f"key_cache must have the query's head_dim {query.shape[-1]}, at least 1, got shape "
            f"{tuple(cache.key.shape)}; check the axes"
        )
    arguments.check_heads(query.shape[-2], cache.key.shape[2], "axes")
    if paged and cache.key.shape[1] == 0:
        raise TensorError("a page of key_cache must hold at least 1 key, got pages of none; check the axes")
    _check_places(query, cache, batch)


def _check_dense(name: str, tensor: Any, axes: tuple[str, ...]) -> None:
    if not isinstance(tensor, Tensor):
        raise TensorError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it first")
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise TensorError(f"{name} must be dense, got a nested or sparse tensor; pad it or call its to_dense()")
    if tensor.dim() != len(axes):
        raise TensorError(
            f"{name} must be [{', '.join(axes)}], got shape {tuple(tensor.shape)}; add, merge or swap axes"
        )
    if tensor.dtype not in DTYPE and tensor.dtype is not torch.float64:
        raise TensorError(
            f"{name} must be float16, bfloat16, float32, float64 or, as a cache, float8_e4m3fn, got "
            f"{tensor.dtype}; cast it"
        )


def _check_places(query: Tensor, cache: CacheTensors, batch: int) -> None:
    """Where the keys of each sequence lie."""
    device = query.device
    for name, tensor in (("lengths", cache.lengths), ("cache_rows", cache.rows), ("leftpad", cache.leftpad)):
        if tensor is not None:
            check_numbers(name, tensor, batch, device)
    if cache.block_table is None:
        if cache.rows is None and cache.key.shape[0] != batch:
            raise TensorError(
                f"key_cache must have a row for each of the {batch} sequences, got {cache.key.shape[0]} rows; slice "
                "it, or say with cache_rows which row each sequence has"
            )
    else:
        if cache.rows is not None or cache.leftpad is not None:
            name = "cache_rows" if cache.rows is not None else "leftpad"
            raise TensorError(f"{name} belongs to contiguous caches, got it with block_table; leave one of them out")
        table = cache.block_table
        check_tensor("block_table", table, device)
        if table.dtype is not torch.int32 or table.dim() != 2 or table.shape[0] != batch or table.stride(1) != 1:
            raise TensorError(
                f"block_table must be int32 [sequences, pages of one] with {batch} sequences and its last axis "
                f"contiguous, got {table.dtype} of shape {tuple(table.shape)} with strides {table.stride()}; correct it"
            )
        if cache.capacity > MAX_SIZE:
            raise TensorError(
                f"block_table must name at most {MAX_SIZE} keys of a sequence, got {cache.capacity}; slice it"
            )
    if device.type == "cpu" and batch and int(cache.lengths.max()) > cache.capacity:
        what = "cache" if cache.block_table is None else "block table"
        raise TensorError(
            f"lengths must be at most the {cache.capacity} keys that the {what} has of a sequence, got "
            f"{int(cache.lengths.max())}; give more room"
        )


def check_numbers(name: str, tensor: Any, batch: int, device: torch.device) -> None:
    """Refuses what is no int32 number for each sequence on the query's device."""
    check_tensor(name, tensor, device)
    if tensor.dtype is not torch.int32 or tuple(tensor.shape) != (batch,) or not tensor.is_contiguous():
        raise TensorError(
            f"{name} must be int32 [sequences] = ({batch},) and contiguous, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}; cast it with .int()"
        )


def _batch(query: Any, cu_seqlens_q: Tensor | None) -> int:
    """How many sequences there are."""
    if cu_seqlens_q is None:
        return int(query.shape[0]) if isinstance(query, Tensor) and query.dim() else 0
    cu_seqlens.check_form("cu_seqlens_q", cu_seqlens_q, query.device)
    return int(cu_seqlens_q.shape[0]) - 1


def _longest(query: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None) -> int:
    """A bound of the queries of a packed sequence; what the offsets say is left on the GPU."""
    assert cu_seqlens_q is not None
    tokens = int(query.shape[0])
    return tokens if max_seqlen_q is None else min(arguments.length_of("max_seqlen_q", max_seqlen_q), tokens)
