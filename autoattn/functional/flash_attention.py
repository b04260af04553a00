"""FlashAttention's functions on tensors, with their exact signatures; those on caches are in autoattn.decoding."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from autoattn import decoding
from autoattn.errors import TensorError
from autoattn.functional.attention_functions import attention, packed_attention


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
