"""The attention function that Transformers calls for `attn_implementation="autoattn"`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoattn import functional
from autoattn.errors import UsageError
from autoattn.integrations.huggingface.structured_mask import StructuredMask
from autoattn.integrations.once import warn_once
from autoattn.runtime.parse import arguments
from autoattn.runtime.plan import planner

# What changes scores and no call of autoattn has: sinks of each query, and blocks of keys that each query selects.
UNKNOWN = ("sinks", "block_indices")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Modifiers:
    """What a layer changes its scores with, in the words of `autoattn.attention`."""

    dropout: float
    scale: float | None
    softcap: float
    sinks: Tensor | None

    def words(self) -> dict[str, Any]:
        return {"dropout": self.dropout, "scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | StructuredMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer.

    Args:
        module: the layer; `is_causal` of it counts where neither a mask nor the argument says otherwise.
        query: [batch, heads_q, seq_q, head_dim]
        key, value: [batch, heads_kv, seq_kv, head_dim], not repeated
        attention_mask: what `mask_function.create_mask` returned, or a tensor [batch, 1 or heads_q, seq_q, seq_kv]
            of a caller's own; bool (True attends) or numbers to add.
        dropout: share of the weights that is dropped; models give 0 in evaluation.
        scaling: 1 / sqrt(head_dim) when None.
        sliding_window: keys that a query sees, itself among them. The mask says the same; this counts only for packed
            sequences without a mask.
        softcap: scores become softcap * tanh(score / softcap).
        s_aux: [heads_q], a score of each head that takes part in the softmax and has no value (attention sinks).
        position_bias: [1 or batch, heads_q, seq_q, seq_kv], added to the scores.
        cu_seq_lens_q, cu_seq_lens_k: [sequences + 1] int32, offsets of packed sequences in [batch * seq] tokens.
        max_length_q, max_length_k: tokens of the longest of them.
        indices: [batch, seq_q, count], the only keys that a query sees of those that the mask keeps (sparse attention).
        others: what other attention functions read.

    Returns:
        (output [batch, seq_q, heads_q, head_dim of the values] contiguous, None): kernels have no weights.

    Raises:
        UsageError: the layer changes its scores by an argument of UNKNOWN, or has other keys than its mask.
    """
    _refuse(module, key, attention_mask, others)
    _warn_of(module, query, value, others)
    if query.shape[0] == 1 != key.shape[0]:  # learnt queries, which SDPA broadcasts
        query = query.expand(key.shape[0], -1, -1, -1)
    modifiers = _Modifiers(dropout=dropout, scale=scaling, softcap=softcap or 0.0, sinks=s_aux)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if indices is not None:
        attention_mask = _selected(indices, attention_mask, key.shape[2], causal)
    by_caller = cu_seq_lens_q is not None and cu_seq_lens_k is not None and position_bias is None
    if by_caller and _may_be_packed(attention_mask):
        offsets, longest = (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k)
        bounds = _bounds(attention_mask, sliding_window, key.shape[2], causal)
        return _packed(query, key, value, offsets, longest, *bounds, modifiers), None
    return _by_mask(query, key, value, attention_mask, causal, position_bias, modifiers), None


def _by_mask(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | StructuredMask | None, causal: bool, bias: Tensor | None,
    modifiers: _Modifiers,
) -> Tensor:  # fmt: skip
    """[batch, seq_q, heads_q, head_dim] of keys that a mask of any form keeps, or the layer itself."""
    if isinstance(mask, StructuredMask):
        return _by_structure(query, key, value, mask, bias, modifiers)
    if mask is None:
        return _without_mask(query, key, value, causal, bias, modifiers)
    mask = mask if bias is None else _biased(mask, bias)
    return _turned(functional.attention(query, key, value, mask=mask, **modifiers.words()))


def _refuse(module: torch.nn.Module, key: Tensor, mask: Tensor | StructuredMask | None, others: dict[str, Any]) -> None:
    """Raises an error for a layer whose numbers would be others than those of eager attention."""
    for name in UNKNOWN:
        if others.get(name) is not None:
            raise UsageError(
                f"attn_implementation='autoattn' takes layers without {name!r}, got a {type(module).__name__} with it; "
                "set attn_implementation='eager'"
            )
    if isinstance(mask, StructuredMask) and mask.shape[3] != key.shape[2]:
        raise UsageError(
            f"attn_implementation='autoattn' takes layers whose keys are those of the mask, {mask.shape[3]} of them, "
            f"got a {type(module).__name__} with {key.shape[2]}; set attn_implementation='eager'"
        )


def _selected(indices: Tensor, mask: Tensor | StructuredMask | None, keys: int, causal: bool) -> Tensor:
    """[batch, 1, seq_q, keys] of a mask, and of the keys that each query selects."""
    batch, queries, _ = indices.shape
    selected = indices.new_zeros((batch, queries, keys), dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
    if isinstance(mask, StructuredMask):
        mask = mask.pairs()
    if mask is None:
        return selected.tril(keys - queries) if causal else selected
    return mask & selected if mask.dtype is torch.bool else mask.masked_fill(~selected, -torch.inf)


def _bounds(
    mask: Tensor | StructuredMask | None, sliding_window: int | None, keys: int, causal: bool
) -> tuple[bool, tuple[int, int] | None]:
    """Whether packed sequences are causal, and their window (left, right); None where it hides no key."""
    if isinstance(mask, StructuredMask):
        return mask.causal, mask.window
    if sliding_window is None or keys <= sliding_window:
        return causal, None
    return causal, (sliding_window - 1, 0 if causal else sliding_window - 1)


def _without_mask(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Tensor | None, modifiers: _Modifiers
) -> Tensor:
    """[batch, seq_q, heads_q, head_dim] where the layer says it all: one query sees every key, several up to theirs."""
    queries = query.shape[2]
    causal = causal and bool(queries > 1)
    if causal and key.shape[2] > queries:  # as SDPA aligns its mask: a model without masks fills a static cache
        key, value = key[:, :, :queries], value[:, :, :queries]
        bias = None if bias is None else bias[..., :queries]
    words = {} if bias is None else {"bias": bias}
    return _turned(functional.attention(query, key, value, causal=causal, **words, **modifiers.words()))


def _may_be_packed(mask: Tensor | StructuredMask | None) -> bool:
    """Whether offsets of a caller may say the sequences: a mask has none of its own, and no padding."""
    return mask is None or (isinstance(mask, StructuredMask) and mask.packing is None and mask.padding is None)


def _by_structure(
    query: Tensor, key: Tensor, value: Tensor, mask: StructuredMask, bias: Tensor | None, modifiers: _Modifiers
) -> Tensor:
    """[batch, seq_q, heads_q, head_dim] of a call whose mask is no tensor."""
    if mask.packed and (mask.packing is None or bias is not None):  # traced, or with a bias, which nothing packed takes
        pairs = mask.pairs() if bias is None else _biased(mask.pairs(), bias)
        return _turned(functional.attention(query, key, value, mask=pairs, **modifiers.words()))
    if key.shape[2] > mask.keys:  # unfilled slots of a static cache
        key, value = key[:, :, : mask.keys], value[:, :, : mask.keys]
        bias = None if bias is None else bias[..., : mask.keys]
    if mask.packing is not None:
        offsets, longest = mask.packing.offsets, mask.packing.longest
        return _packed(query, key, value, (offsets, offsets), (longest, longest), mask.causal, mask.window, modifiers)
    words: dict[str, Any] = {}
    if bias is not None:
        words["bias"] = bias if mask.padding is None else _biased(mask.padding, bias)
    elif mask.padding is not None:
        words["mask"] = mask.padding
    output = functional.attention(
        query, key, value, causal=mask.causal, window=mask.window, **words, **modifiers.words()
    )
    return _turned(output)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, offsets: Any, longest: Any, causal: bool,
    window: tuple[int, int] | None, modifiers: _Modifiers,
) -> Tensor:  # fmt: skip
    """[batch, seq_q, heads_q, head_dim] of sequences that lie one behind the other in the rows.

    Args:
        offsets: those of queries and of keys, [sequences + 1] int32 in [batch * seq] tokens.
        longest: tokens of the longest sequence of queries and of keys; None where nobody says.
    """
    batch, seq = query.shape[0], query.shape[2]
    tokens = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [batch * seq, heads, head_dim]
    bounds = (
        batch * tensor.shape[2] if bound is None else int(bound)
        for bound, tensor in zip(longest, (query, key), strict=True)
    )
    offsets = (lengths.to(torch.int32) for lengths in offsets)
    output = functional.packed_attention(*tokens, *offsets, *bounds, causal=causal, window=window, **modifiers.words())
    return output.unflatten(0, (batch, seq))


def _biased(mask: Tensor, bias: Tensor) -> Tensor:
    """A bias that hides what a mask hides; numbers of a mask are added."""
    return torch.where(mask, bias, -torch.inf) if mask.dtype is torch.bool else mask + bias


def _turned(output: Tensor) -> Tensor:
    """[batch, heads, seq, head_dim] as Transformers wants it: [batch, seq, heads, head_dim] contiguous."""
    return output.transpose(1, 2).contiguous()


def _warn_of(module: torch.nn.Module, query: Tensor, value: Tensor, others: dict[str, Any]) -> None:
    """Says once what a caller asks for in vain, and why a model runs no kernel."""
    if torch.compiler.is_compiling():
        return
    if others.get("output_attentions"):
        warn_once(
            f"{type(module).__name__} is asked for attention weights, which autoattn's kernels do not have, so that it "
            "returns None for them; set attn_implementation='eager' to get them"
        )
    if reason := arguments.why_no_kernel(query, value) or planner.why_not_on(query.device):
        warn_once(f"PyTorch's attention computes {type(module).__name__} and no kernel of autoattn does: {reason}")
