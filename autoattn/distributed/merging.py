"""Sums of what partial calls give: outputs by their LSEs, gradients by adding, in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autoattn.codegen import render
from autoattn.distributed.rectangles import Span
from autoattn.kernels import merge as merge_kernel
from autoattn.runtime.plan import planner


class MergedOutput:
    """The output of queries on the keys of several calls, as of one softmax.

    Attributes:
        wide: whether sums are kept in the LSE's dtype; else each query is in two calls at most, whose outputs are
            merged and rounded once.
    """

    def __init__(self, shape: torch.Size, axis: int, *, wide: bool) -> None:
        """Of an output with the queries on an axis."""
        self._shape, self._axis = shape, axis
        self.wide = wide
        self._output: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, output: Tensor, lse: Tensor, rows: Span) -> None:
        """Merges a call on some of the queries.

        Args:
            output: a new tensor, which may be kept.
            lse: [..., queries], natural logarithms; -inf for a query that sees no key.
        """
        if self._output is None and rows == (0, self._shape[self._axis]):
            self._output, self._lse = (output.to(lse.dtype) if self.wide else output), lse
            return
        total, total_lse = self._begun(output, lse)
        length = rows[1] - rows[0]
        merge(total.narrow(self._axis, rows[0], length), total_lse.narrow(-1, rows[0], length), output, lse)

    def count(self, sinks: Tensor) -> None:
        """Gives each head's sink its share of the softmax."""
        output, before = self._begun(sinks, None)
        lse = torch.logaddexp(before, sinks.to(before.dtype)[:, None])
        weight = torch.exp(before - lse).transpose(-1, -2)[..., None]
        self._output, self._lse = (output * weight).to(output.dtype), lse

    def result(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Output in the query's dtype, and LSE; 0 and -inf for queries of which no call was."""
        output, lse = self._begun(like, None)
        return output.to(like.dtype), lse

    def _begun(self, output: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._output is None or self._lse is None:
            kind = lse.dtype if lse is not None else torch.promote_types(output.dtype, torch.float32)
            self._output = output.new_zeros(self._shape, dtype=kind if self.wide else output.dtype)
            heads_first = self._output[..., 0].transpose(-1, -2)
            self._lse = torch.full(heads_first.shape, -math.inf, dtype=kind, device=output.device)
        return self._output, self._lse


def merge(total: Tensor, total_lse: Tensor, output: Tensor, lse: Tensor) -> None:
    """Writes output and LSE of all keys of two calls over those of the first: by a kernel on a GPU.

    Args:
        total, output: [..., seq, heads, head_dim]
        total_lse, lse: [..., heads, seq]; where both are -inf, the total stays.
    """
    if 0 in total.shape:
        return
    kind = merge_kernel.kind_of(total, output)
    if total.device.type == "cuda" and kind is not None and planner.why_not_on(total.device) is None:
        kernel = planner.load_once(render.merge_source(kind), total.device.index)
        tensors = (total, total_lse, output, lse)
        merge_kernel.launch(kernel, *(tensor if total.dim() == 4 else tensor[None] for tensor in tensors))
    else:
        merge_by_formula(total, total_lse, output, lse)


def merge_by_formula(total: Tensor, total_lse: Tensor, output: Tensor, lse: Tensor) -> None:
    """The same in plain PyTorch."""
    both = torch.logaddexp(total_lse, lse)
    weight = torch.exp(lse - both).nan_to_num(nan=0.0).transpose(-1, -2)[..., None]
    total.copy_(torch.lerp(total.to(lse.dtype), output.to(lse.dtype), weight))
    total_lse.copy_(both)


class Sum:
    """A sum of gradients of some tokens each, in the order of its additions.

    It is kept in float32 (float64 for float64) if it is wide; else each token has two summands at most, whose sum is
    rounded once.
    """

    def __init__(self, shape: torch.Size, axis: int, *, wide: bool) -> None:
        """Of a tensor with the tokens on an axis."""
        self._shape, self._axis, self._wide = shape, axis, wide
        self._whole: Tensor | None = None  # the only summand as it came, as long as there is no other
        self._total: Tensor | None = None

    def add(self, summand: Tensor, tokens: Span) -> None:
        """Adds the gradient of some of the tokens."""
        if self._whole is None and self._total is None and tokens == (0, self._shape[self._axis]):
            self._whole = summand
            return
        length = tokens[1] - tokens[0]
        self._started(summand).narrow(self._axis, tokens[0], length).add_(summand)

    def add_at(self, summand: Tensor, index: Tensor) -> None:
        """The same for tokens of any places."""
        total = self._started(summand)
        total.index_add_(self._axis, index, summand.to(total.dtype))

    def result(self, like: Tensor) -> Tensor:
        """The sum in the dtype of `like`; 0 without summands."""
        if self._whole is not None:
            return self._whole.to(like.dtype)
        return like.new_zeros(self._shape) if self._total is None else self._total.to(like.dtype)

    def _started(self, summand: Tensor) -> Tensor:
        if self._total is None:
            kind = torch.promote_types(summand.dtype, torch.float32) if self._wide else summand.dtype
            if self._whole is None:
                self._total = torch.zeros(self._shape, dtype=kind, device=summand.device)
            else:
                self._total, self._whole = self._whole.to(kind), None
        return self._total
