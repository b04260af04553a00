"""PyTorch's function, torch.nn.functional.scaled_dot_product_attention, with its exact signature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoattn.errors import SdpaError, SdpaIndexError, SdpaTypeError, UsageError
from autoattn.functional.attention_functions import attention, explain
from autoattn.runtime import call, call_cache, call_keys
from autoattn.runtime.parse import arguments, sdpa_arguments
from autoattn.runtime.plan import explanations
from autoattn.runtime.plan.explanations import Explanation

SDPA_MISTAKES = (SdpaError, SdpaTypeError, SdpaIndexError)


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
