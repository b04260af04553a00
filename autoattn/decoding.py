"""Attention on caches of keys and values, as functions: autoattn's own, and FlashAttention's with its arguments."""

from __future__ import annotations

from torch import Tensor

from autoattn.runtime import call, call_cache
from autoattn.runtime.parse import cache_arguments
from autoattn.runtime.parse.cache_arguments import CacheTensors
from autoattn.runtime.plan import planner
from autoattn.runtime.plan.explanations import Explanation
from autoattn.runtime.prepared_call import Answer


def cached_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    cache_rows: Tensor | None = None,
    leftpad: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_length: int | None = None,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    splits: int = 0,
    precision: str | None = None,
    numerics: str | None = None,
    return_lse: bool = False,
) -> Answer:
    """Attention of a few new queries with keys and values in a cache, whose lengths lie on the device.

    Neither lengths nor pages are read on the host, so that a cache that grows is the same call at each step, and a CUDA
    graph replays with other lengths. There are no gradients.

    Args:
        query: [batch, seq_q, heads_q, head_dim], or [tokens_q, heads_q, head_dim] with cu_seqlens_q; float16, bfloat16
            or float32.
        key_cache: [rows, capacity, heads_kv, head_dim], or [pages, page, heads_kv, head_dim] with block_table; a page
            has any size from 1. Any strides: a cache with heads before keys is given as a transposed view, and key and
            value may be views of one tensor.
        value_cache: the same, with a head dim of its own if need be.
        lengths: [batch] int32: keys of each sequence, the new queries' own included; 0 gives 0. Kernels take more than
            the cache holds as what it holds.
        block_table: [batch, pages of a sequence] int32: page i has the keys from i * page on. Entries behind the
            length may be anything, and are not read; those before must be pages of the cache.
        cache_rows: [batch] int32: which row of a contiguous cache a sequence has; its own number when None.
        leftpad: [batch] int32: where the keys begin in the row of a contiguous cache; lengths count from the row's
            begin all the same.
        cu_seqlens_q: [batch + 1] int32: where the queries of each sequence begin, and where the last ones end.
        max_seqlen_q: a bound of their lengths; all tokens when None.
        max_length: a bound of the lengths for the choice of a kernel; what the cache holds when None.
        causal, window: as in `attention`: the last query of a sequence stands at its last key.
        softcap, alibi_slopes, sinks, scale, precision, numerics: as in `attention`.
        splits: programs that may share the keys of a sequence; 0 is as many as are fastest, and 1 gives a sequence the
            same bits in every batch of a size.
        return_lse: whether the log-sum-exp is returned too.

    Returns:
        The output, like the query with the value's head dim. With return_lse, (output, lse): lse is [batch, heads_q,
        seq_q] or [heads_q, tokens_q] float32, in natural logarithms, and -inf for a query that sees no key.

    Raises:
        TensorError: the arguments do not make one call.
        ProblemError: a size is not supported.
        CacheError: a cache file is damaged or newer.
    """
    cache = CacheTensors(
        key=key_cache, value=value_cache, lengths=lengths, block_table=block_table, rows=cache_rows, leftpad=leftpad
    )
    seldom = None
    if not (window is alibi_slopes is sinks is precision is numerics is None):
        seldom = window, alibi_slopes, sinks, precision, numerics
    bound = None if max_length is None else cache_arguments.bound_of(max_length)
    offsets = cache.offsets if cu_seqlens_q is None else (cu_seqlens_q, *cache.offsets)
    words = cache.words, cu_seqlens_q is None, causal, softcap, scale, splits, return_lse, max_seqlen_q, bound
    call_key = call_cache.key(query, key_cache, value_cache, offsets, words, seldom)
    if (prepared := call_cache.find(call_key)) is not None:
        output = prepared(query, key_cache, value_cache, *offsets)
        if output is not None:
            answer: Answer = output
            return answer
    return call.new_cached_attention(
        call_key, query, cache, cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_length=max_length, causal=causal,
        window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, scale=scale, splits=splits,
        precision=precision, numerics=numerics, return_lse=return_lse,
    )  # fmt: skip
