"""Parses a call on a cache whose sequences share a prefix, as two calls; a caller's mistake is one sentence here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autoattn.errors import TensorError

# Arguments that both calls have as they are
_OF_ALL = "softcap", "scale", "precision", "numerics", "splits", "split_length"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TwoLevels:
    """The tensors and the other arguments of two calls of `cached_attention`."""

    of_prefix: tuple[Tensor, Tensor, Tensor, Tensor]
    prefix_words: dict[str, Any]
    of_rest: tuple[Tensor, Tensor, Tensor, Tensor]
    rest_words: dict[str, Any]


def read(query: Any, key_cache: Any, value_cache: Any, lengths: Any, prefix: Any, given: dict[str, Any]) -> TwoLevels:
    """The call with the prefix, in which all queries are those of one sequence, and the call with what follows it.

    Args:
        prefix: keys that all sequences share.
        given: the other arguments of `cached_attention`.

    Raises:
        TensorError: the prefix does not fit the cache or the other arguments.
    """
    if given["deterministic"]:
        raise TensorError(
            "deterministic gives each sequence bits of its own, got it with shared_prefix, which reads keys for all of "
            "them at once; leave one of them out"
        )
    for name in ("window", "alibi_slopes", "leftpad"):
        if given[name] is not None:
            raise TensorError(
                f"{name} tells queries of a shared prefix apart, got it with shared_prefix; leave one of them out"
            )
    tensors = query, key_cache, value_cache, lengths
    if not all(isinstance(tensor, Tensor) for tensor in tensors) or key_cache.dim() != 4 or not query.dim():
        raise TensorError("query, key_cache, value_cache and lengths must be tensors with axes; correct the arguments")
    table, rows = given["block_table"], given["cache_rows"]
    page = 1 if table is None else key_cache.shape[1]
    capacity = key_cache.shape[1] * (1 if table is None else table.shape[-1])
    whole = isinstance(prefix, int) and not isinstance(prefix, bool)
    if not whole or not 0 < prefix < capacity or prefix % max(page, 1):
        raise TensorError(
            f"shared_prefix must be a whole number of pages of {page} keys, less than the {capacity} keys that the "
            f"cache has of a sequence, got {prefix!r:.60}; give a shorter one"
        )
    rest: dict[str, Any] = {**given, "block_table": None if table is None else table[:, prefix // page :]}
    if given["max_length"] is not None:
        rest["max_length"] = max(given["max_length"] - prefix, 1)
    words = {name: given[name] for name in _OF_ALL} | {"max_length": prefix}
    words |= {name: _of_first(given[name]) for name in ("key_scale", "value_scale")}
    if table is not None:
        words["block_table"] = table[:1, : prefix // page]
        caches = key_cache, value_cache
        others = caches
    else:
        words["cache_rows"] = _first_row(query.device) if rows is None else rows[:1]
        caches = key_cache[:, :prefix], value_cache[:, :prefix]
        others = key_cache[:, prefix:], value_cache[:, prefix:]
    queries = query.reshape(1, -1, *query.shape[-2:])
    return TwoLevels(
        of_prefix=(queries, *caches, _length(prefix, query.device)),
        prefix_words=words,
        of_rest=(query, *others, lengths - prefix),
        rest_words=rest,
    )


def as_queries(output: Tensor, lse: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Output [1, queries, heads, head_dim_v] and LSE [1, heads, queries] of a prefix, as the call's queries lie."""
    if query.dim() == 3:
        return output[0], lse[0]
    batch, seq = query.shape[:2]
    return output[0].unflatten(0, (batch, seq)), lse[0].unflatten(1, (batch, seq)).transpose(0, 1)


def _of_first(scale: Any) -> Any:
    """The scales of the first sequence."""
    return scale[:1] if isinstance(scale, Tensor) and scale.dim() == 2 else scale


@lru_cache(maxsize=64)
def _length(prefix: int, device: torch.device) -> Tensor:
    """[1] int32, which prepared calls and CUDA graphs keep reading."""
    return _kept([prefix], device)


@lru_cache(maxsize=64)
def _first_row(device: torch.device) -> Tensor:
    return _kept([0], device)


def _kept(numbers: list[int], device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise TensorError("a shared prefix in a CUDA graph must have been called before, got a new one; call it once")
    return torch.tensor(numbers, dtype=torch.int32, device=device)
