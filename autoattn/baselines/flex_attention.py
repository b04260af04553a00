"""FlexAttention, compiled for one problem with its sizes as constants (torch.nn.attention.flex_attention)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoattn.core.mask import Alignment
from autoattn.core.problem import DType, Problem
from autoattn.expressions import language
from autoattn.expressions.language import SCORE_NAMES
from autoattn.reference import attention_formula
from autoattn.tensors import block_table
from autoattn.tensors.operands import Operands

FLEX_BLOCK = 128  # queries and keys of a block of FlexAttention's tables, as its own create_block_mask has them


def load() -> Callable[..., Any]:
    """The function that is compiled and called.

    Raises:
        ImportError: this PyTorch does not have it.
    """
    from torch.nn.attention.flex_attention import flex_attention

    function: Callable[..., Any] = flex_attention
    return function


def why_not(problem: Problem) -> str | None:
    """Why it does not do a problem, in words; None when nothing is known against it."""
    modifiers = problem.modifiers
    if problem.packed:
        return "packed sequences are not written as a mask_mod here"
    if problem.dtype is DType.FLOAT8 or problem.precision.value == "tf32x3":
        return f"it has no {problem.precision.value if problem.dtype is DType.FLOAT32 else problem.dtype.value}"
    for name in ("learned_slopes", "sinks", "dropout"):
        if getattr(modifiers, name):
            return f"{name} is not written for it here"
    if modifiers.bias.value != "none" or problem.mask.mod:
        return "biases and mask expressions are not written for it here"
    return None


def prepare(problem: Problem, operands: Operands) -> Callable[[], Tensor]:
    """The call that is timed, on contiguous tensors; it compiles when it is first run."""
    # Dynamo compiles one function for eight shapes and then falls back to plain PyTorch, so it starts anew each time.
    torch.compiler.reset()
    compiled = torch.compile(load(), dynamic=False)
    query, key, value = (tensor.contiguous() for tensor in (operands.query, operands.key, operands.value))
    return partial(
        compiled,
        query,
        key,
        value,
        score_mod=_score_mod(problem, operands),
        block_mask=block_mask(problem, operands),
        scale=operands.scale,
        enable_gqa=problem.group_size > 1,
    )


def block_mask(problem: Problem, operands: Operands) -> Any:
    """The problem's mask as FlexAttention's BlockMask; None for a full one. The lists of blocks are computed, not tried
    out pair by pair.
    """
    from torch.nn.attention.flex_attention import BlockMask

    table, mask_mod = operands.table, None
    sizes = (problem.seq_q, problem.seq_kv)
    first, last = problem.band(*sizes)
    if table is None and first is None and last is None:
        return None
    if table is None:
        low, high = (-problem.seq_q if first is None else first), (problem.seq_kv if last is None else last)
        table = _band_table(problem, low, high, operands.query.device)

        def in_band(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k >= q + low) & (k <= q + high)

        # One comparison where one is enough, as its users write it.
        mask_mod = in_band if first is not None and last is not None else _one_sided(first, last)
    return BlockMask.from_kv_blocks(
        table.partial_counts,
        table.partial_blocks,
        table.full_counts,
        table.full_blocks,
        BLOCK_SIZE=(table.block_q, table.block_kv),
        mask_mod=mask_mod,
        seq_lengths=sizes,
    )


def _one_sided(first: int | None, last: int | None) -> Callable[..., Tensor]:
    if last == 0:
        return lambda b, h, q, k: q >= k
    if last is not None:
        return lambda b, h, q, k: k <= q + last
    return lambda b, h, q, k: k >= q + first


def _band_table(problem: Problem, low: int, high: int, device: torch.device) -> Any:
    """Blocks of a band: query q sees the keys q + low to q + high."""
    begin_q = torch.arange(0, problem.seq_q, FLEX_BLOCK)[:, None]
    begin_k = torch.arange(0, problem.seq_kv, FLEX_BLOCK)[None, :]
    end_q = (begin_q + FLEX_BLOCK).clamp(max=problem.seq_q) - 1
    end_k = (begin_k + FLEX_BLOCK).clamp(max=problem.seq_kv) - 1
    least, most = begin_k - end_q, end_k - begin_q  # of key minus query, which takes every value between them
    kept = (most >= low) & (least <= high)
    whole = (least >= low) & (most <= high)
    return block_table.table_of(
        kept[None, None].to(device),
        block_q=FLEX_BLOCK,
        block_kv=FLEX_BLOCK,
        seq_kv=problem.seq_kv,
        partial=~whole[None, None].to(device),
    )


def _score_mod(problem: Problem, operands: Operands) -> Callable[..., Tensor] | None:
    """The caller's, then softcap, then ALiBi."""
    modifiers, cap, slopes = problem.modifiers, operands.softcap, operands.slopes
    if not modifiers.on_scores:
        return None
    expression = language.parse_optional(modifiers.score_mod, SCORE_NAMES)
    captures = {f"captured{place}": tensor for place, tensor in enumerate(operands.score_captures)}
    shift = problem.seq_kv - problem.seq_q if problem.mask.alignment is Alignment.BOTTOM_RIGHT else 0

    def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if expression is not None:
            names = {"score": score, "b": b, "h": h, "q_idx": q, "kv_idx": k, **captures}
            score = expression.evaluate(names, attention_formula.FUNCTIONS).to(score.dtype)
        if modifiers.softcap:
            score = cap * torch.tanh(score / cap)
        return score - slopes[b, h] * (q + shift - k).abs() if slopes is not None else score

    return changed
