"""Parses the arguments of an append to a cache of keys and values; a caller's mistake is one sentence here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoattn.errors import TensorError
from autoattn.kernels.forward import DTYPE
from autoattn.runtime.parse import cache_arguments
from autoattn.runtime.parse.cache_arguments import FLOAT8, CacheTensors
from autoattn.runtime.parse.modifier_arguments import check_tensor
from autoattn.tensors.appended import Append, Rotation
from autoattn.tensors.operands import CachedKeys

_AXES = "[batch, seq_new, heads_kv, head_dim]"


def read(
    query: Tensor, cache: CacheTensors, key: Any, value: Any, cos: Any, sin: Any, *, interleaved: bool, moving: bool,
    packed: bool,
) -> Append:  # fmt: skip
    """The append that the arguments of `flash_attn_with_kvcache` pose, with a cache that was checked.

    Args:
        query: [batch, seq_q, heads_q, head_dim], which is rotated with the tables.
        key, value: [batch, seq_new, heads_kv, head_dim]
        cos, sin: [positions, rotary_dim / 2], or None
        moving: whether query i is rotated as at i behind the first new key; else all are rotated as at that one.
        packed: whether queries lie one behind the other.

    Raises:
        TensorError: a tensor does not fit the cache; nothing was written.
    """
    # A cache without keys has no address.
    latent = cache.key.numel() > 0 and cache_arguments.begin_together(cache.key, cache.value)
    batch = cache.lengths.shape[0]
    dtype = query.dtype if cache.key.dtype is FLOAT8 else cache.key.dtype
    _check_new("k", key, cache.key, batch, dtype)
    _check_new("v", value, cache.value, batch, dtype)
    if key.shape[1] != value.shape[1]:
        raise TensorError(
            f"k and v must have as many new tokens, got {key.shape[1]} and {value.shape[1]}; correct one of them"
        )
    if latent:
        _check_latent(cache, key, value, rotates=cos is not None or sin is not None)
    _check_room(cache, key.shape[1])
    capacity = cache.capacity
    return Append(
        new_key=key.transpose(1, 2),
        new_value=value.transpose(1, 2),
        key=cache.key.transpose(1, 2),
        value=cache.value.transpose(1, 2),
        latent=latent,
        cache=CachedKeys(lengths=cache.lengths, capacity=capacity, pages=cache.block_table, rows=cache.rows),
        **cache_arguments.scales_of(cache, batch),
        rotation=_rotation(query, cos, sin, capacity, interleaved=interleaved, moving=moving, packed=packed),
    )


def _check_new(name: str, new: Any, cache: Tensor, batch: int, dtype: torch.dtype) -> None:
    """Refuses new keys or values that do not fit the cache, or are not of the dtype; a float8 cache quantises them."""
    check_tensor(name, new, cache.device)
    wanted = (batch, *cache.shape[2:])
    if new.dim() != 4 or (new.shape[0], *new.shape[2:]) != wanted:
        raise TensorError(
            f"{name} must be {_AXES} with batch, heads and head_dim {wanted} of the cache, got shape "
            f"{tuple(new.shape)}; check the axes"
        )
    if new.dtype != dtype:
        whose = "query's" if cache.dtype is FLOAT8 else "cache's"
        raise TensorError(f"{name} must have the {whose} dtype {dtype}, got {new.dtype}; cast it")
    if new.requires_grad and torch.is_grad_enabled():
        raise TensorError(f"an append gives no gradients, got a {name} that needs one; call it under torch.no_grad()")


def _check_latent(cache: CacheTensors, key: Tensor, value: Tensor, *, rotates: bool) -> None:
    """Refuses new tokens of a cache whose values are the first elements of its keys, unless theirs are so too."""
    alike = key.stride() == value.stride() and cache.key.stride() == cache.value.stride()
    if not (alike and cache_arguments.begin_together(key, value)):
        raise TensorError(
            f"v must be a view of k's first elements where value_cache is one of key_cache's, got a tensor of its own; "
            f"give k[..., :{value.shape[3]}]"
        )
    if rotates:
        raise TensorError(
            "rotary tables must be left out where value_cache is a view of key_cache, got some: they turn the first "
            "elements of a key, which are its value; rotate the last ones before the call"
        )


def _check_room(cache: CacheTensors, new: int) -> None:
    """Refuses what the cache has no room for, as far as that is known without waiting for the GPU."""
    longest = new
    if cache.lengths.device.type == "cpu" and cache.lengths.numel():
        longest += int(cache.lengths.max())
        rows = cache.rows
        if rows is not None and rows.unique().numel() < rows.numel():
            raise TensorError(
                f"cache_batch_idx must name a row once where keys are appended, got {rows.tolist()!s:.100}; append "
                "to one row at a time"
            )
    if longest > cache.capacity:
        raise TensorError(
            f"the cache must have room for the appended keys of each sequence, got {longest} keys for a capacity of "
            f"{cache.capacity}; give it more room"
        )


def _rotation(
    query: Tensor, cos: Any, sin: Any, capacity: int, *, interleaved: bool, moving: bool, packed: bool
) -> Rotation | None:
    """The rotary embedding of an append; None without tables."""
    if cos is None and sin is None:
        return None
    if packed:
        raise TensorError("rotary tables take padded queries, got cu_seqlens_q; rotate the queries before the call")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_tensor(name, table, query.device)
        if table.dtype not in (query.dtype, torch.float32) or table.dtype not in DTYPE:
            raise TensorError(
                f"{name} must have the query's dtype {query.dtype} or float32, got {table.dtype}; cast it"
            )
        if table.dim() != 2 or table.shape != cos.shape or not 1 <= 2 * table.shape[1] <= query.shape[-1]:
            raise TensorError(
                f"{name} must be [positions, rotary_dim / 2] with a rotary_dim of at most {query.shape[-1]}, alike for "
                f"cosines and sines, got shape {tuple(table.shape)}; correct the tables"
            )
    if cos.dtype != sin.dtype:
        raise TensorError(f"rotary_cos and rotary_sin must have one dtype, got {cos.dtype} and {sin.dtype}; cast one")
    if cos.shape[0] < capacity:
        raise TensorError(
            f"rotary tables must reach to the {capacity} keys of the cache, got {cos.shape[0]} positions; make longer "
            "tables"
        )
    if cos.stride() != sin.stride() or cos.stride(1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return Rotation(query=query.transpose(1, 2), cos=cos, sin=sin, interleaved=interleaved, moving=moving)


def lengths_of(
    given: Any, query: Tensor, key_cache: Tensor, block_table: Tensor | None, cu_seqlens_q: Tensor | None, *,
    appends: bool,
) -> Tensor:  # fmt: skip
    """FlashAttention's cache_seqlens as [batch] int32: a number for all, or all of the cache when None.

    A tensor is left as it is, to be checked with the others.

    Raises:
        TensorError: it is neither, or an append does not say where it begins.
    """
    if given is None and appends:
        raise TensorError("k and v must come with cache_seqlens, behind which they are appended, got None; give it")
    if isinstance(given, Tensor):
        return given
    if not (isinstance(query, Tensor) and isinstance(key_cache, Tensor) and query.dim() and key_cache.dim() == 4):
        raise TensorError("q and k_cache must be tensors with axes as the documentation says, got others; correct them")
    batch = query.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    capacity = key_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    given = capacity if given is None else given
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= capacity:
        raise TensorError(
            f"cache_seqlens must be int32 [batch] or a whole number from 0 to the cache's {capacity} keys, got "
            f"{given!r:.60}; correct it"
        )
    return torch.full((batch,), given, dtype=torch.int32, device=query.device)
