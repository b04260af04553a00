"""The oracle: eager PyTorch, independent of every kernel here."""

from __future__ import annotations

import torch
from torch import Tensor

from autoattn.problem import DType, Mask, Precision

TORCH_DTYPE = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16, DType.FLOAT32: torch.float32}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask,
    scale: float,
    dtype: torch.dtype = torch.float64,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp, every step in `dtype`.

    Args:
        query: [batch, heads_q, seq_q, head_dim]
        key, value: [batch, heads_kv, seq_kv, head_dim]; heads_kv divides heads_q
        rows: [rows] query positions to compute; all when None

    Returns:
        output [batch, heads_q, rows, head_dim] and LSE [batch, heads_q, rows] in natural logarithms; a row that sees
        no key has output 0 and LSE -inf.
    """
    seq_q, seq_kv = query.shape[2], key.shape[2]
    group = query.shape[1] // key.shape[1]
    positions = torch.arange(seq_q, device=query.device) if rows is None else rows
    query = query[:, :, positions].to(dtype)
    key = key.to(dtype).repeat_interleave(group, dim=1)
    value = value.to(dtype).repeat_interleave(group, dim=1)
    scores = (query * scale) @ key.transpose(2, 3)
    hidden = ~visible(positions, seq_q, seq_kv, mask)
    scores = scores.masked_fill(hidden, float("-inf"))
    blind = hidden.all(dim=1)  # rows that see nothing
    weights = torch.softmax(scores, dim=-1).masked_fill(blind[:, None], 0.0)
    lse = torch.logsumexp(scores, dim=-1)
    return weights.to(dtype) @ value, lse


def visible(positions: Tensor, seq_q: int, seq_kv: int, mask: Mask) -> Tensor:
    """[rows, seq_kv] booleans: which keys the query at each position sees."""
    keys = torch.arange(seq_kv, device=positions.device)
    if not mask.causal:
        return torch.ones(len(positions), seq_kv, dtype=torch.bool, device=positions.device)
    shift = seq_kv - seq_q if mask.alignment.value == "bottom-right" else 0
    return keys[None, :] <= positions[:, None] + shift


def low_precision(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask,
    scale: float,
    precision: Precision,
    rows: Tensor | None = None,
) -> Tensor:
    """The same maths as `attention` with PyTorch in the tensors' own precision: the yardstick for an honest error."""
    if precision is Precision.TF32:
        query, key, value = (cut_to_tf32(tensor) for tensor in (query * scale, key, value))
        scale = 1.0
    output, _ = attention(query, key, value, mask=mask, scale=scale, dtype=query.dtype, rows=rows)
    return output


def cut_to_tf32(tensor: Tensor) -> Tensor:
    """float32 without the low 13 bits: what a tensor core sees of a float32 operand (PTX ISA, mma with .tf32)."""
    return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
