"""Attention as a module, for models."""

from __future__ import annotations

import torch
from torch import Tensor

from autoattn import functional
from autoattn.dispatch import Explanation


class Attention(torch.nn.Module):
    """The attention between projections: it has no weights and takes query, key and value.

    Args:
        causal: False, True ("bottom-right") or "top-left"; see `autoattn.attention`.
        scale: what scores are multiplied by; 1 / sqrt(head_dim) when None.
        layout: "bhsd" ([batch, heads, seq, head_dim]) or "bshd" ([batch, seq, heads, head_dim]).

    The number of key heads may divide the number of query heads (grouped-query attention).
    """

    def __init__(self, *, causal: bool | str = False, scale: float | None = None, layout: str = "bhsd") -> None:
        super().__init__()
        self.causal, self.scale, self.layout = causal, scale, layout

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[batch, heads_q, seq_q, head_dim] (or BSHD) -> the same shape."""
        return functional.attention(query, key, value, causal=self.causal, scale=self.scale, layout=self.layout)

    def explain(self, query: Tensor, key: Tensor, value: Tensor) -> Explanation:
        """What `forward` does with these tensors, and why."""
        return functional.explain(query, key, value, causal=self.causal, scale=self.scale, layout=self.layout)

    def extra_repr(self) -> str:
        """The arguments, as they were given."""
        return f"causal={self.causal!r}, scale={self.scale!r}, layout={self.layout!r}"
