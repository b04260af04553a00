"""autoattn's own functions, on tensors of one length and on packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

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


def _seeded(given: Arguments | PackedArguments) -> dict[str, Any]:
    """To explain must not draw a seed, or the next call would draw another."""
    return {**given, "seed": 0} if given.get("seed") is None else {**given}


def forget() -> None:
    """Drops what this process decided and prepared, so that a cache written since is read anew."""
    planner.forget()
    call_cache.clear()
