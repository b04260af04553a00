"""Attention on caches of keys and values, as functions: autoattn's own, and FlashAttention's with its arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autoattn.core.problem import Layout
from autoattn.errors import TensorError
from autoattn.runtime import call, call_cache, call_keys, merge
from autoattn.runtime.parse import append_arguments, cache_arguments, merge_arguments, prefix_arguments
from autoattn.runtime.parse.cache_arguments import CacheTensors
from autoattn.runtime.plan import planner
from autoattn.runtime.plan.explanations import Explanation
from autoattn.runtime.prepared_call import Answer
from autoattn.tensors import cu_seqlens, operands

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from autoattn.runtime.parse.signatures import CacheArguments

# Arguments of an attention behind an append, as the key of the append has them
_SELDOM = "window", "alibi_slopes", "sinks", "precision", "numerics"
_WORDS = "causal", "softcap", "scale", "splits", "split_length", "deterministic", "max_seqlen_q", "max_length"


def cached_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    cache_rows: Tensor | None = None,
    leftpad: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_length: int | None = None,
    shared_prefix: int = 0,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    splits: int = 0,
    split_length: int = 0,
    deterministic: bool = False,
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
            has any size from 1. In the query's dtype, or float8_e4m3fn under queries of 16 bits. Any strides: a cache
            with heads before keys is given as a transposed view, and key and value may be views of one tensor.
        value_cache: the same, with a head dim of its own if need be. Where it is a view of the keys' first elements, as
            key_cache[..., :512] of a latent with 576, each key is read once for both.
        lengths: [batch] int32: keys of each sequence, the new queries' own included; 0 gives 0. Kernels take more than
            the cache holds as what it holds.
        block_table: [batch, pages of a sequence] int32: page i has the keys from i * page on. Entries behind the
            length may be anything, and are not read; those before must be pages of the cache.
        cache_rows: [batch] int32: which row of a contiguous cache a sequence has; its own number when None.
        leftpad: [batch] int32: where the keys begin in the row of a contiguous cache; lengths count from the row's
            begin all the same.
        key_scale, value_scale: float32 that expands to [batch, heads_kv]: what the numbers of a float8 cache are
            multiplied by; 1 when None, and the key_scale for values that are a view of the keys.
        cu_seqlens_q: [batch + 1] int32: where the queries of each sequence begin, and where the last ones end.
        max_seqlen_q: a bound of their lengths; all tokens when None.
        max_length: a bound of the lengths for the choice of a kernel; what the cache holds when None.
        shared_prefix: keys at the begin of each sequence that are the same for all of them: whole pages, if there are
            any. They are read once, where the first sequence has them, and no length may be below. It changes no result
            but for rounding; without a window and slopes.
        causal, window: as in `attention`: the last query of a sequence stands at its last key.
        softcap, alibi_slopes, sinks, scale, precision, numerics: as in `attention`.
        splits: programs that may share the keys of a sequence; 0 is as many as are fastest.
        split_length: keys that each of them has but the last, a power of two from 64 to 16,384; 0 is as many as are
            fastest.
        deterministic: whether a sequence has the same bits in every batch; splits and split_length ask for that too.
            What else a batch holds, and how many sequences, then changes nothing; max_length and max_seqlen_q, or what
            the cache holds where there is no bound, choose the kernel.
        return_lse: whether the log-sum-exp is returned too.

    Returns:
        The output, like the query with the value's head dim. With return_lse, (output, lse): lse is [batch, heads_q,
        seq_q] or [heads_q, tokens_q] float32, in natural logarithms, and -inf for a query that sees no key.

    Raises:
        TensorError: the arguments do not make one call.
        ProblemError: a size is not supported.
        CacheError: a cache file is damaged or newer.
    """
    if shared_prefix:
        return _with_prefix(
            query, key_cache, value_cache, lengths, shared_prefix, sinks, return_lse=return_lse,
            block_table=block_table, cache_rows=cache_rows, leftpad=leftpad, key_scale=key_scale,
            value_scale=value_scale, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_length=max_length,
            causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes, scale=scale, splits=splits,
            split_length=split_length, deterministic=deterministic, precision=precision, numerics=numerics,
        )  # fmt: skip
    seldom = None
    if not (window is alibi_slopes is sinks is precision is numerics is None):
        seldom = window, alibi_slopes, sinks, precision, numerics
    bound = None if max_length is None else cache_arguments.bound_of(max_length)
    key_scale, value_scale = cache_arguments.with_scales(key_cache, value_cache, key_scale, value_scale)
    given_offsets = cu_seqlens_q, lengths, block_table, cache_rows, leftpad, key_scale, value_scale
    offsets = tuple(tensor for tensor in given_offsets if tensor is not None)
    words = (
        "cache", cu_seqlens_q is None, block_table is None, cache_rows is None, leftpad is None, key_scale is None,
        causal, softcap, scale, splits, split_length, deterministic, return_lse, max_seqlen_q, bound,
        cache_arguments.begin_together(key_cache, value_cache),
    )  # fmt: skip
    tensors = query, key_cache, value_cache, *offsets
    answer: Answer | None
    guarded = call_cache.find_guarded_on_cache(tensors, words) if seldom is None else None
    if guarded is not None and (answer := guarded(*tensors)) is not None:
        return answer
    call_key = call_keys.of(query, key_cache, value_cache, offsets, words, seldom)
    if (prepared := call_cache.find(call_key)) is not None:
        extras = () if seldom is None else call_keys.tensors_among(seldom)
        answer = prepared(*tensors, *extras)
        if answer is not None:
            if seldom is None:
                call_cache.guard_on_cache(tensors, words, prepared)
            return answer
    cache = CacheTensors(
        key=key_cache, value=value_cache, lengths=lengths, block_table=block_table, rows=cache_rows, leftpad=leftpad,
        key_scale=key_scale, value_scale=value_scale,
    )  # fmt: skip
    return call.new_cached_attention(
        call_key, query, cache, cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_length=max_length, causal=causal,
        window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, scale=scale, splits=splits,
        split_length=split_length, deterministic=deterministic, precision=precision, numerics=numerics,
        return_lse=return_lse,
    )  # fmt: skip


def _with_prefix(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, prefix: int, sinks: Tensor | None, *,
    return_lse: bool, **given: Any,
) -> Answer:  # fmt: skip
    """`cached_attention` in two levels: all queries with the prefix, each sequence's with what follows, both merged."""
    two = prefix_arguments.read(query, key_cache, value_cache, lengths, prefix, given)
    output, lse = cached_attention(*two.of_prefix, **two.prefix_words, return_lse=True)
    own_output, own_lse = cached_attention(*two.of_rest, **two.rest_words, sinks=sinks, return_lse=True)
    output, lse = prefix_arguments.as_queries(output, lse, query)
    merged = merge_states(output, lse, own_output, own_lse)
    return merged if return_lse else merged[0]


def merge_states(
    output: Tensor, lse: Tensor, other_output: Tensor, other_lse: Tensor, *, layout: str = "bshd"
) -> tuple[Tensor, Tensor]:
    """One output of two, each of which comes from some of the keys of the same queries.

    The outputs may come from any function here that gives an LSE, FlashAttention's included; FlashInfer's LSE is in
    powers of two, and becomes natural times ln(2). Gradients, where they are needed, are those of plain PyTorch.

    Args:
        output, other_output: [batch, seq, heads, head_dim], with layout "bhsd" [batch, heads, seq, head_dim], or
            packed [tokens, heads, head_dim].
        lse, other_lse: [batch, heads, seq] or [heads, tokens] float32, in natural logarithms; -inf is of no key, and
            what the output holds there is left out.

    Returns:
        (output, lse) of all keys, in the same layout.

    Raises:
        TensorError: the tensors are not two outputs of the same queries.
    """
    call_key = call_keys.of(output, other_output, output, (lse, other_lse), ("merge", layout), None)
    prepared = call_cache.find(call_key)
    order = merge_arguments.layout_of(output, layout)
    if prepared is not None:
        merged, sums = prepared(output, other_output, output, lse, other_lse)
    else:
        parts = merge_arguments.read(output, lse, other_output, other_lse, order)
        merged, sums = merge.merge(call_key, parts)
    return operands.as_given(merged, order), sums[0] if order is Layout.PACKED else sums


def explain_cached(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    *,
    return_lse: bool = False,
    **given: Unpack[CacheArguments],
) -> Explanation:
    """What `cached_attention` does with the same arguments, and why; it compiles the kernel and runs nothing."""
    others: dict[str, Any] = {**given}
    if prefix := others.pop("shared_prefix", 0):
        words = cache_arguments.complete_places(others)
        two = prefix_arguments.read(query, key_cache, value_cache, lengths, prefix, words)
        of_prefix = explain_cached(*two.of_prefix, **two.prefix_words, return_lse=True)
        of_rest = explain_cached(*two.of_rest, **two.rest_words, return_lse=True)
        return replace(of_rest, reasons=of_rest.reasons.after(lambda: f"shared prefix: {of_prefix.reason}"))
    places = {field: others.pop(name, None) for name, field in cache_arguments.PLACES.items()}
    cache = CacheTensors(key=key_cache, value=value_cache, lengths=lengths, **places)
    call = cache_arguments.read(query, cache, **cache_arguments.complete(others))
    return planner.plan(call, lse=return_lse, learns=False).explanation


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    qv: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
) -> Answer:
    """flash_attn.flash_attn_with_kvcache's arguments and meaning, with FlashAttention-3's behind them.

    New keys and values are written behind cache_seqlens, in place, before the attention. Nothing is read on the host:
    what does not fit the cache is left out, and lengths stop at the cache's end. On the GPU a length below 0 leaves out
    as many new keys, so that a length of -1 with one new key writes nothing, as in FlashAttention.

    Args:
        q: [batch, seq_q, heads_q, head_dim], or [tokens_q, heads_q, head_dim] with cu_seqlens_q
        k_cache, v_cache: [rows, capacity, heads_kv, head_dim], or [pages, page, heads_kv, head_dim] with block_table
            (page_table in FlashAttention-3); pages have any size
        k, v: [batch, seq_new, heads_kv, head_dim]; where v_cache is a view of k_cache, v is one of k: k[..., :512]
        rotary_cos, rotary_sin: [positions, rotary_dim / 2], in the query's dtype or float32; positions must reach to
            the cache's capacity. They rotate k, and q: as at cache_seqlens + i with causal or a window, else as at
            cache_seqlens. Products are formed in float32.
        cache_seqlens: [batch] int32 or a number: keys before the append; all of the cache when None
        cache_batch_idx, cache_leftpad: [batch] int32, of contiguous caches; rows must differ where keys are appended
        num_splits: programs that may share the keys of a sequence; 0 is as many as are fastest
        k_descale, v_descale: float32 [batch, heads_kv] of a float8 cache: what its numbers are multiplied by; new keys
            and values are divided by them
        s_aux: [heads_q], the `sinks` of `attention`, under the name of vLLM's FlashAttention-3
        qv, cu_seqlens_k_new, rotary_seqlens, q_descale: None
        attention_chunk: 0
        scheduler_metadata, pack_gqa, sm_margin: change no result, and are not used

    Returns:
        The output, or (output, softmax_lse) with return_softmax_lse: [batch, heads_q, seq_q] float32. The LSE of a
        query that sees no key is -inf.

    Raises:
        TensorError: the arguments do not make one call; nothing was written then.
        ProblemError: a size is not supported; nothing was written then.
    """
    for name, there in (
        ("qv", qv), ("cu_seqlens_k_new", cu_seqlens_k_new), ("rotary_seqlens", rotary_seqlens),
        ("q_descale", q_descale), ("attention_chunk", attention_chunk or None),
    ):  # fmt: skip
        if there is not None:
            raise TensorError(f"{name} must be left out, got one; queries are of 16 or 32 bits, and new keys padded")
    if page_table is not None:
        if block_table is not None:
            raise TensorError("block_table and page_table are one argument, got both; leave one of them out")
        block_table = page_table
    window = None if tuple(window_size) == (-1, -1) else tuple(window_size)
    key_scale, value_scale = cache_arguments.with_scales(k_cache, v_cache, k_descale, v_descale)
    lengths = append_arguments.lengths_of(cache_seqlens, q, k_cache, block_table, cu_seqlens_q, appends=k is not None)
    attend: dict[str, Any] = {
        "block_table": block_table, "cache_rows": cache_batch_idx, "leftpad": cache_leftpad,
        "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "causal": causal, "window": window,
        "softcap": softcap, "alibi_slopes": alibi_slopes, "scale": softmax_scale, "splits": num_splits,
        "key_scale": key_scale, "value_scale": value_scale, "sinks": s_aux,
    }  # fmt: skip
    if k is not None or v is not None:
        moving = causal or window is not None
        rotary = rotary_cos, rotary_sin, rotary_interleaved, moving
        q, lengths = _appended(q, k_cache, v_cache, lengths, k, v, rotary, attend)
    elif rotary_cos is not None or rotary_sin is not None:
        raise TensorError("rotary tables must come with k and v, got none; rotate the queries before the call")
    return cached_attention(q, k_cache, v_cache, lengths, return_lse=return_softmax_lse, **attend)


def _appended(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, key: Tensor | None, value: Tensor | None,
    rotary: tuple[Tensor | None, Tensor | None, bool, bool], attend: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Appends after all arguments were checked; the query to attend with, and the lengths after the append."""
    cos, sin, interleaved, moving = rotary
    scales = attend["key_scale"], attend["value_scale"]
    given_offsets = lengths, attend["block_table"], attend["cache_rows"], key, value, *scales, cos, sin
    offsets = tuple(tensor for tensor in given_offsets if tensor is not None)
    rare = tuple(attend.get(name) for name in _SELDOM)
    seldom = None if all(argument is None for argument in rare) else rare
    together = cache_arguments.begin_together(key_cache, value_cache)
    words = (
        "append", interleaved, moving, *(tensor is None for tensor in given_offsets), attend["leftpad"] is None,
        attend["cu_seqlens_q"] is None, together, together and cache_arguments.begin_together(key, value),
        *(attend.get(name) for name in _WORDS),
    )  # fmt: skip
    call_key = call_keys.of(query, key_cache, value_cache, offsets, words, seldom)
    if (prepared := call_cache.find(call_key)) is not None:
        appended: tuple[Tensor, Tensor] = prepared(query, key_cache, value_cache, *offsets)
        return appended
    rest = dict(attend)
    places = {field: rest.pop(name) for name, field in cache_arguments.PLACES.items()}
    cache = CacheTensors(key=key_cache, value=value_cache, lengths=lengths, **places)
    return call.new_append(  # type: ignore[no-any-return]
        call_key, query, cache, key, value, cos, sin, interleaved, moving, rest
    )


def append_and_attend(
    query: Tensor, key: Tensor | None, value: Tensor | None, cache: CacheTensors, *, return_lse: bool = False,
    **given: Any,
) -> Answer:  # fmt: skip
    """Writes new keys and values behind the lengths of a cache, in place, and attends with them.

    Args:
        query: [batch, seq_q, heads_q, head_dim]
        key, value: [batch, seq_new, heads_kv, head_dim]
        cache: its lengths are those before the append.
        given: the other arguments of `cached_attention`.

    Raises:
        TensorError: the arguments do not make one call; nothing was written then.
        ProblemError: a size is not supported; nothing was written then.
    """
    scales = cache_arguments.with_scales(cache.key, cache.value, cache.key_scale, cache.value_scale)
    attend: dict[str, Any] = {
        "block_table": cache.block_table, "cache_rows": cache.rows, "leftpad": cache.leftpad, "cu_seqlens_q": None,
        "key_scale": scales[0], "value_scale": scales[1], **given,
    }  # fmt: skip
    query, lengths = _appended(
        query, cache.key, cache.value, cache.lengths, key, value, (None, None, False, False), attend
    )
    return cached_attention(query, cache.key, cache.value, lengths, return_lse=return_lse, **attend)


def paged_varlen(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None, block_table: Tensor, dropout: float, *, window: tuple[int, int], **given: Any,
) -> Answer:  # fmt: skip
    """`flash_attn_varlen_func` with a block table."""
    if dropout:
        raise TensorError(f"attention on a cache has no dropout, got dropout_p={dropout!r:.60}; leave it out")
    if seqused_k is None:
        if cu_seqlens_k is None:
            raise TensorError("paged keys must have lengths, got neither seqused_k nor cu_seqlens_k; give one of them")
        cu_seqlens.check_form("cu_seqlens_k", cu_seqlens_k, query.device)
        seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    bounds = None if tuple(window) == (-1, -1) else window
    return cached_attention(
        query, key_cache, value_cache, seqused_k, block_table=block_table, cu_seqlens_q=cu_seqlens_q, window=bounds,
        **given,
    )  # fmt: skip
