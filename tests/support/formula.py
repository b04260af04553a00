"""Attention written down once more, dense and in float64, for tests that must not trust the package's own reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    keep: Tensor | None = None,
    add: Tensor | None = None,
    scale: float | None = None,
    change: Callable[[Tensor], Tensor] | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of [batch, heads, seq, head_dim] tensors; it can be differentiated.

    Args:
        keep: booleans that broadcast to the scores; False hides.
        add: what is added to the scores, after `change`.
        change: what becomes of the scaled scores.
    """
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    scores = scores if change is None else change(scores)
    scores = scores if add is None else scores + add.double()
    seen = torch.ones_like(scores, dtype=torch.bool) if keep is None else keep.expand(scores.shape)
    seen = seen & (scores > -torch.inf)
    top = scores.masked_fill(~seen, -1e9).amax(3, keepdim=True)
    sink = None if sinks is None else sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
    top = top if sink is None else torch.maximum(top, sink)
    weights = torch.where(seen, torch.exp(scores.masked_fill(~seen, -1e9) - top), 0.0)
    total = weights.sum(3, keepdim=True)
    total = total if sink is None else total + torch.exp(sink - top)
    output = weights / torch.where(total > 0.0, total, 1.0) @ value
    return output, torch.where(total > 0.0, total.log() + top, -torch.inf)[..., 0]


def band(seq_q: int, seq_kv: int, left: int = -1, right: int = -1, *, top_left: bool = False) -> Tensor:
    """[seq_q, seq_kv] booleans: which keys a window keeps, one pair after another."""
    shift = 0 if top_left else seq_kv - seq_q
    rows = []
    for row in range(seq_q):
        place = row + shift
        rows.append([
            (left < 0 or key >= place - left) and (right < 0 or key <= place + right) for key in range(seq_kv)
        ])  # fmt: skip
    return torch.tensor(rows, dtype=torch.bool).reshape(seq_q, seq_kv)


def distance(seq_q: int, seq_kv: int, *, top_left: bool = False) -> Tensor:
    """[seq_q, seq_kv]: how many keys each key is away from where the query stands."""
    shift = 0 if top_left else seq_kv - seq_q
    return (torch.arange(seq_q)[:, None] + shift - torch.arange(seq_kv)[None, :]).abs().double()
