"""Attention as functions: autoattn's own, and those of PyTorch and FlashAttention with their exact signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import Tensor

from autoattn import decoding
from autoattn.decoding import cached_attention as cached_attention
from autoattn.decoding import explain_cached as explain_cached
from autoattn.decoding import flash_attn_with_kvcache as flash_attn_with_kvcache
from autoattn.decoding import merge_states as merge_states
from autoattn.errors import SdpaError, SdpaIndexError, SdpaTypeError, TensorError, UsageError
from autoattn.runtime import call, call_cache, call_keys
from autoattn.runtime.parse import arguments, sdpa_arguments
from autoattn.runtime.plan import explanations, planner
from autoattn.runtime.plan.explanations import Explanation
from autoattn.runtime.torch_op import (
    attention_op_backward as attention_op_backward,  # registers the backward pass of the operator
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from typing_extensions import Unpack

    from autoattn.core.mask import Mask
    from autoattn.expressions.captures import Traced
    from autoattn.masks import BlockSparse
    from autoattn.runtime.parse.signatures import Arguments, PackedArguments

SDPA_MISTAKES = (SdpaError, SdpaTypeError, SdpaIndexError)


def forget() -> None:
    """Drops what this process decided and prepared, so that a cache written since is read anew."""
    planner.forget()
    call_cache.clear()


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = False, **given: Unpack[Arguments]
) -> Tensor: ...


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **given: Unpack[Arguments]
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **given: Unpack[Arguments]
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: str | Mask | Tensor | BlockSparse | BlockMask | None = None,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: str | Callable[..., Tensor] | Traced | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    precision: str | None = None,
    numerics: str | None = None,
    deterministic: bool = False,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query @ key^T, modified and masked) @ value.

    Scores are changed in this order: scale, score_mod, softcap, ALiBi, bias, mask, softmax with sinks, dropout.
    docs/functions.md has an example of each argument.

    Args:
        query: [batch, heads_q, seq_q, head_dim], or [batch, seq_q, heads_q, head_dim] with layout="bshd"; float16,
            bfloat16, float32 or float8_e4m3fn.
        key: the same with heads_kv, which divides heads_q, and seq_kv.
        value: the key's, with a head dim of its own if need be.
        mask: words as of `Mask.parse` ("causal", "causal:top-left", "window:128,0"), a Mask, a tensor that can be
            broadcast to [batch, heads_q, seq_q, seq_kv] (bool: True attends; float32 or the output's dtype: added), a
            BlockSparse or FlexAttention's BlockMask.
        causal: True or "bottom-right": query i sees the keys up to i + seq_kv - seq_q, as in FlashAttention;
            "top-left": up to i, as in F.scaled_dot_product_attention. They differ only when the lengths do.
        window: (left, right), whole numbers: query i, which stands at key p = i + seq_kv - seq_q, sees the keys
            p - left to p + right; -1 is no bound on that side. causal=True makes right 0.
        bias: a tensor like a tensor mask; together with causal and window it hides what either hides.
        softcap: scores become softcap * tanh(score / softcap); 0 leaves them.
        alibi_slopes: [heads_q] or [batch, heads_q] float32; scores lose slope * |p - key|, where p = i if causal is
            "top-left".
        sinks: [heads_q]; a score for each head that takes its share of the softmax and gives nothing.
        score_mod: text of `autoattn.expressions.language`, a function (score, b, h, q_idx, kv_idx) -> score, or what
            `autoattn.masks.score` made of one.
        dropout: share of the weights that is dropped, from 0 and below 1; the others grow by 1 / (1 - dropout).
        seed: of dropout, from 0 to 2**63 - 1; when None, one is drawn from PyTorch's generator of the CPU.
        scale: what products of query and key are multiplied by; 1 / sqrt(head_dim) when None.
        layout: "bhsd" or "bshd", of query, key, value and output.
        precision: of float32 products, "ieee", "tf32" or "tf32x3"; torch.get_float32_matmul_precision() when None.
        numerics: "any", or "online" for a kernel whose time no growth of the scores changes; the environment's
            AUTOATTN_NUMERICS, or else "any", when None. The answer is right with both.
        deterministic: whether two calls on the same inputs must have gradients that agree to the bit;
            torch.use_deterministic_algorithms(True) says so for all calls. Outputs always agree.
        query_scale, key_scale, value_scale: [batch, heads_kv] float32, what float8 numbers stand for; 1 when None.
        return_lse: whether the log-sum-exp is returned too.

    Returns:
        The output, like the query with the value's head dim; bfloat16 for float8. A query that sees no key gives 0.
        With return_lse, (output, lse): lse is [batch, heads_q, seq_q] float32, in natural logarithms, and -inf for such
        a query unless it has a sink.

    Raises:
        TensorError: the arguments do not make one attention call.
        ProblemError: a size is not supported, or the mask is unknown.
        CacheError: a cache file is damaged or newer.
    """
    seldom = None
    if not (
        window is mask is bias is alibi_slopes is sinks is score_mod is precision is numerics is None
        and query_scale is key_scale is value_scale is None
    ):
        seldom = (
            window, mask, bias, alibi_slopes, sinks, score_mod, precision, numerics,
            query_scale, key_scale, value_scale,
        )  # fmt: skip
    words = causal, softcap, dropout, scale, layout, deterministic, return_lse
    prepared = call_cache.find_guarded(query, key, value, words) if seldom is None else None
    if prepared is not None and (output := prepared(query, key, value)) is not None:
        return output
    call_key = call_keys.of(query, key, value, (), words, seldom)
    if (prepared := call_cache.find(call_key)) is not None:
        extras = () if seldom is None else call_keys.tensors_among(seldom)
        if (output := prepared(query, key, value, *extras)) is not None:
            if seldom is None:
                call_cache.guard(query, key, value, words, prepared)
            return output
    given: dict[str, Any] = {
        "mask": mask, "causal": causal, "window": window, "bias": bias, "softcap": softcap,
        "alibi_slopes": alibi_slopes, "sinks": sinks, "score_mod": score_mod, "dropout": dropout, "seed": seed,
        "scale": scale, "layout": layout, "precision": precision, "numerics": numerics,
        "deterministic": deterministic, "query_scale": query_scale, "key_scale": key_scale,
        "value_scale": value_scale, "return_lse": return_lse,
    }  # fmt: skip
    if call_key is None and sdpa_arguments.is_recorded_by_fx(query, key, value):
        return sdpa_arguments.record(attention, (query, key, value), given)
    return call.new_attention(call_key, query, key, value, **given)


@overload
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, max_seqlen_q: int,
    max_seqlen_kv: int, *, return_lse: Literal[False] = False, **given: Unpack[PackedArguments],
) -> Tensor: ...  # fmt: skip


@overload
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, max_seqlen_q: int,
    max_seqlen_kv: int, *, return_lse: Literal[True], **given: Unpack[PackedArguments],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, max_seqlen_q: int,
    max_seqlen_kv: int, *, return_lse: bool, **given: Unpack[PackedArguments],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: str | Callable[..., Tensor] | Traced | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    scale: float | None = None,
    precision: str | None = None,
    numerics: str | None = None,
    deterministic: bool = False,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several sequences that lie one behind the other, each of its own length.

    Args:
        query: [tokens_q, heads_q, head_dim]
        key, value: [tokens_kv, heads_kv, head_dim], the value with a head dim of its own if need be
        cu_seqlens_q, cu_seqlens_kv: [sequences + 1] int32 on the query's device: sequence b has the tokens from
            cu_seqlens[b] up to cu_seqlens[b + 1]. They are read once for each state of the tensor, which waits for the
            GPU, and not at all while a CUDA graph is captured.
        max_seqlen_q, max_seqlen_kv: no sequence is longer; a bound is enough.
        causal: False, or True: aligned bottom-right in each sequence.
        alibi_slopes, query_scale, key_scale, value_scale: as in `attention`, where the batch counts sequences.

    The other arguments are those of `attention`; q_idx and kv_idx of a score_mod count from each sequence's begin.

    Returns:
        The output [tokens_q, heads_q, head_dim of value]; tokens behind the last sequence give 0. With return_lse,
        (output, lse): lse is [heads_q, tokens_q] float32, in natural logarithms.

    Raises:
        TensorError: the arguments do not make one attention call.
        ProblemError: a size is not supported, or the mask is aligned top-left.
        CacheError: a cache file is damaged or newer.
    """
    tensors = query, key, value, cu_seqlens_q, cu_seqlens_kv
    seldom = None
    if not (
        window is alibi_slopes is sinks is score_mod is precision is numerics is None
        and query_scale is key_scale is value_scale is None
    ):
        seldom = window, alibi_slopes, sinks, score_mod, precision, numerics, query_scale, key_scale, value_scale
    call_key = call_keys.of(
        query, key, value, (cu_seqlens_q, cu_seqlens_kv),
        (causal, softcap, dropout, scale, deterministic, return_lse, max_seqlen_q, max_seqlen_kv), seldom,
    )  # fmt: skip
    if (prepared := call_cache.find(call_key)) is not None:
        # What the offsets say is no fact of the call; it may have changed since.
        arguments.longest(query, key, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
        extras = () if seldom is None else call_keys.tensors_among(seldom)
        if (output := prepared(*tensors, *extras)) is not None:
            return output
    given: dict[str, Any] = {
        "causal": causal, "window": window, "softcap": softcap, "alibi_slopes": alibi_slopes, "sinks": sinks,
        "score_mod": score_mod, "dropout": dropout, "seed": seed, "scale": scale, "precision": precision,
        "numerics": numerics, "deterministic": deterministic, "query_scale": query_scale, "key_scale": key_scale,
        "value_scale": value_scale, "return_lse": return_lse,
    }  # fmt: skip
    if call_key is None and sdpa_arguments.is_recorded_by_fx(*tensors):
        return sdpa_arguments.record(packed_attention, (*tensors, max_seqlen_q, max_seqlen_kv), given)
    return call.new_packed_attention(call_key, *tensors, max_seqlen_q, max_seqlen_kv, **given)


def explain(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, **given: Unpack[Arguments]
) -> Explanation:
    """What `attention` does with the same arguments, and why; it compiles the kernel to be sure, and runs nothing."""
    if sdpa_arguments.are_nested(query, key, value):
        usual = {"causal": False, "dropout": 0.0, "scale": None, "layout": "bhsd"}
        sdpa_arguments.nested(query, key, value, {**usual, **given, "return_lse": return_lse})
        return explanations.of_sdpa(sdpa_arguments.NESTED)
    with sdpa_arguments.outside_of_jit():
        return planner.plan(arguments.read(query, key, value, **_seeded(given)), lse=return_lse).explanation


def explain_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    return_lse: bool = False,
    **given: Unpack[PackedArguments],
) -> Explanation:
    """What `packed_attention` does with the same arguments, and why."""
    lengths = cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
    packed = arguments.read_packed(query, key, value, *lengths, **_seeded(given))
    return planner.plan(packed, lse=return_lse).explanation


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention's arguments and meaning.

    Causal is aligned top-left, dropout acts whenever it is above 0, and a query that sees no key gives 0. What
    `attention` does not take goes to PyTorch's function as it is; `explain_sdpa` says why.

    Args:
        query: [..., heads_q, seq_q, head_dim]; the axes in front of the last two are broadcast, and may be missing
        key, value: [..., heads_kv, seq_kv, head_dim]; heads_kv divides heads_q with enable_gqa, and is broadcast else
        attn_mask: broadcastable to [..., heads_q, seq_q, seq_kv]; bool (True attends), float32 or the query's dtype

    Raises:
        SdpaError, SdpaTypeError, SdpaIndexError: the arguments do not make one attention call. They are a RuntimeError,
            TypeError or IndexError too, as PyTorch's error for such a call is.
        RuntimeError: PyTorch refuses a call that it was given as it is.
    """
    causal = "top-left" if is_causal is True else False if is_causal is False else None
    if attn_mask is None:
        words = causal, 0.0, dropout_p, scale, "bhsd", False, False  # as `attention` has them
        if (prepared := call_cache.find_guarded(query, key, value, words)) is None:
            prepared = call_cache.find(call_keys.of(query, key, value, (), words, None))
            if prepared is not None:
                call_cache.guard(query, key, value, words, prepared)
        # A prepared call is one of `attention`, whose key heads may be fewer whatever is said.
        if prepared is not None and (enable_gqa is True or (enable_gqa is False and query.shape[1] == key.shape[1])):
            output = prepared(query, key, value)
            if output is not None:
                return output
    elif causal is False and (enable_gqa is True or enable_gqa is False):
        prepared = _prepared_with_mask(query, key, value, attn_mask, dropout_p, scale)
        if prepared is not None and (enable_gqa or query.shape[1] == key.shape[1]):
            output = prepared(query, key, value, attn_mask)
            if output is not None:
                return output
    given: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if sdpa_arguments.why_pytorch(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa) is not None:
        return sdpa_arguments.by_pytorch(query, key, value, attn_mask, **given)
    if torch.compiler.is_compiling():
        return _sdpa_by_attention(query, key, value, attn_mask, **given)
    arguments.numerics_of(None)  # a mistake of the environment is none of the call's
    try:
        return _sdpa_by_attention(query, key, value, attn_mask, **given)
    except SDPA_MISTAKES:
        raise
    except UsageError as mistake:  # PyTorch says whether it is one
        try:
            return sdpa_arguments.by_pytorch(query, key, value, attn_mask, **given)
        except Exception as by_pytorch:
            raise sdpa_arguments.refused(mistake, by_pytorch) from by_pytorch


def _prepared_with_mask(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, dropout_p: float, scale: float | None
) -> call_cache.PreparedCall | None:
    """What answers a call with a mask of two to four axes, where one like it was answered by `attention`."""
    if not isinstance(attn_mask, Tensor) or attn_mask.dim() < 2:
        return None
    words = False, 0.0, dropout_p, scale, "bhsd", False, False
    seldom = tuple(attn_mask if name == "mask" else None for name in call.SELDOM)
    return call_cache.find(call_keys.of(query, key, value, (), words, seldom))


def explain_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Explanation:
    """What `scaled_dot_product_attention` does with the same arguments, and why."""
    reason = sdpa_arguments.why_pytorch(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if reason is not None:
        return explanations.of_sdpa(reason)
    sdpa_arguments.check(query, key, value, attn_mask, is_causal, enable_gqa)
    arguments.numerics_of(None)
    try:
        query, key, value, attn_mask, _ = sdpa_arguments.broadcast(query, key, value, attn_mask, enable_gqa)
        causal = "top-left" if is_causal else False
        return explain(query, key, value, mask=attn_mask, causal=causal, dropout=dropout_p, scale=scale)
    except UsageError as mistake:
        return explanations.of_sdpa(f"PyTorch says whether it takes the call, which attention refuses: {mistake}")


def _sdpa_by_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """A call that is new, by `attention`."""
    sdpa_arguments.check(query, key, value, attn_mask, is_causal, enable_gqa)
    query, key, value, attn_mask, outer = sdpa_arguments.broadcast(query, key, value, attn_mask, enable_gqa)
    output = attention(
        query, key, value, mask=attn_mask, causal="top-left" if is_causal else False, dropout=dropout_p, scale=scale
    )
    assert isinstance(output, Tensor)
    return output if outer is None else output.reshape(*outer, *output.shape[-2:])


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """flash_attn.flash_attn_func's arguments and meaning (FlashAttention 2.8).

    Args:
        q, k, v: [batch, seq, heads, head_dim]
        deterministic: as in `attention`.
        return_attn_probs: returns (output, softmax_lse [batch, heads_q, seq_q], None); the third, FlashAttention's
            matrix for its own tests of dropout, does not exist here. The LSE of a query that sees no key is -inf.
        s_aux: [heads_q], the `sinks` of `attention`, under the name of vLLM's FlashAttention-3
    """
    result = attention(
        q, k, v, causal=causal, window=window_size, softcap=softcap, alibi_slopes=alibi_slopes, dropout=dropout_p,
        sinks=s_aux, scale=softmax_scale, layout="bshd", deterministic=deterministic, return_lse=return_attn_probs,
    )  # fmt: skip
    return (result[0], result[1], None) if return_attn_probs else cast(Tensor, result)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    num_splits: int = 0,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """flash_attn.flash_attn_varlen_func's arguments and meaning (FlashAttention 2.8), and FlashAttention-3's seqused_k.

    Args:
        q: [tokens, heads, head_dim]
        k, v: the same, or [pages, page, heads_kv, head_dim] with block_table; pages have any size
        cu_seqlens_k: [sequences + 1] int32; None with block_table and seqused_k
        deterministic: as in `flash_attn_func`; of paged keys: as in `cached_attention`
        return_attn_probs, s_aux: as in `flash_attn_func`; softmax_lse is [heads_q, tokens_q].
        block_table: [sequences, pages of one] int32; what lies on the GPU is not read on the host, and there are no
            gradients and no dropout
        seqused_k: [sequences] int32: the lengths of paged keys; those of cu_seqlens_k when None
        num_splits: of paged keys: programs that may share the keys of a sequence; 0 is as many as are fastest
        k_descale, v_descale: float32 [sequences, heads_kv] of paged keys in float8: what their numbers stand for
    """
    if block_table is not None:
        result = decoding.paged_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, dropout_p, max_seqlen_q=max_seqlen_q,
            max_length=max_seqlen_k, causal=causal, window=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
            sinks=s_aux, scale=softmax_scale, splits=num_splits, return_lse=return_attn_probs,
            key_scale=k_descale, value_scale=v_descale, deterministic=deterministic,
        )  # fmt: skip
        return (result[0], result[1], None) if return_attn_probs else cast(Tensor, result)
    of_pages = {
        "seqused_k": seqused_k,
        "num_splits": num_splits or None,
        "k_descale": k_descale,
        "v_descale": v_descale,
    }
    if name := next((name for name, given in of_pages.items() if given is not None), ""):
        raise TensorError(f"{name} belongs to paged keys, got no block_table; give cu_seqlens_k the lengths")
    result = packed_attention(
        q, k, v, cu_seqlens_q, cast(Tensor, cu_seqlens_k), max_seqlen_q, max_seqlen_k, causal=causal,
        window=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=s_aux, dropout=dropout_p,
        scale=softmax_scale, deterministic=deterministic, return_lse=return_attn_probs,
    )  # fmt: skip
    return (result[0], result[1], None) if return_attn_probs else cast(Tensor, result)


def _seeded(given: Arguments | PackedArguments) -> dict[str, Any]:
    """To explain must not draw a seed, or the next call would draw another."""
    return {**given, "seed": 0} if given.get("seed") is None else {**given}
