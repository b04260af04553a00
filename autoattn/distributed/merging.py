"""Sums of what partial calls give: outputs by their LSEs, gradients by adding, in float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from autoattn.distributed.rectangles import Span
from autoattn.kernels.forward import lse_dtype
from autoattn.runtime.merge import merge_in_place
from autoattn.tensors.partial_outputs import PartialOutputs


class MergedOutput:
    """The output of queries on the keys of several calls, as of one softmax.

    Parts are kept as they are until two of them have the same query.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, axis: int, *, wide: bool) -> None:
        """Of an output with the queries on an axis.

        Args:
            wide: whether sums are kept in the LSE's dtype; else each query is in two parts at most, whose outputs are
                merged and rounded once.
        """
        self._axis, self._dtype, self._lse_dtype, self._wide = axis, dtype, lse_dtype(dtype), wide
        self._total_dtype = self._lse_dtype if wide else dtype
        self._outputs = Parts(shape, axis)
        self._lses = Parts(torch.Size((*shape[:axis], shape[-2], shape[axis])), -1)

    def add(self, output: Tensor, lse: Tensor, rows: Span) -> None:
        """Merges a call on some of the queries.

        Args:
            output: a new tensor, which may be kept.
            lse: [..., queries], natural logarithms; -inf for a query that sees no key.
        """
        if self._outputs.keep(output, rows) and self._lses.keep(lse, rows):
            return
        merge(*self._of_rows(rows, output.device), output, lse)

    def merge_by(self, attend: Callable[[tuple[Tensor, Tensor]], bool], rows: Span, device: torch.device) -> bool:
        """Has a call on some of the queries merge itself into what is there, where it can.

        Args:
            attend: takes output and LSE of these queries on other keys, and says whether it merged itself into them.

        Returns:
            Whether it did; else `add` is to have what it computes.
        """
        if self._outputs.meets(rows):
            return attend(self._of_rows(rows, device))
        if not self._wide:  # an output of its own takes less memory, and is rounded once more at most
            return False
        output = self._outputs.blank(rows, self._total_dtype, 0.0, device)
        lse = self._lses.blank(rows, self._lse_dtype, -math.inf, device)
        if not attend((output, lse)):
            return False
        self.add(output, lse, rows)
        return True

    def count(self, sinks: Tensor) -> None:
        """Gives each head's sink its share of the softmax."""
        output, before = self._merged(sinks.device)
        lse = torch.logaddexp(before, sinks.to(before.dtype)[:, None])
        output.mul_(torch.exp(before - lse).transpose(-1, -2)[..., None])
        before.copy_(lse)

    def result(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Output and LSE; 0 and -inf for queries of which no call was."""
        output = self._outputs.joined(device, self._dtype, 0.0)
        return output, self._lses.joined(device, self._lse_dtype, -math.inf)

    def _of_rows(self, rows: Span, device: torch.device) -> tuple[Tensor, Tensor]:
        """Output and LSE of some of the queries, to be written over."""
        total, total_lse = self._merged(device)
        length = rows[1] - rows[0]
        return total.narrow(self._axis, rows[0], length), total_lse.narrow(-1, rows[0], length)

    def _merged(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The same, to be written over."""
        output = self._outputs.joined(device, self._total_dtype, 0.0)
        return output, self._lses.joined(device, self._lse_dtype, -math.inf)


class Parts:
    """Parts of a tensor that have no token twice, as they came, until the whole is asked for."""

    def __init__(self, shape: torch.Size, axis: int) -> None:
        """Of a tensor with the tokens on an axis."""
        self._shape, self._axis = shape, axis
        self._parts: list[tuple[Span, Tensor]] = []
        self._whole: Tensor | None = None

    def keep(self, part: Tensor, tokens: Span) -> bool:
        """Keeps a part, unless the whole was asked for or another one has some of its tokens."""
        if self.meets(tokens):
            return False
        self._parts.append((tokens, part))
        return True

    def meets(self, tokens: Span) -> bool:
        """Whether the whole was asked for, or a part has some of the tokens."""
        return self._whole is not None or any(begin < tokens[1] and tokens[0] < end for (begin, end), _ in self._parts)

    def blank(self, tokens: Span, dtype: torch.dtype, fill: float, device: torch.device) -> Tensor:
        """A new part of these tokens, full of a number."""
        shape = list(self._shape)
        shape[self._axis] = tokens[1] - tokens[0]
        return torch.full(shape, fill, dtype=dtype, device=device)

    def joined(self, device: torch.device, dtype: torch.dtype, fill: float) -> Tensor:
        """The whole; `fill` where there is no part."""
        if self._whole is None:
            self._whole = self._join(device, dtype, fill)
            self._parts.clear()
        elif self._whole.dtype is not dtype:
            self._whole = self._whole.to(dtype)
        return self._whole

    def _join(self, device: torch.device, dtype: torch.dtype, fill: float) -> Tensor:
        parts = sorted(self._parts, key=lambda each: each[0])
        begins, ends = [begin for (begin, _), _ in parts], [end for (_, end), _ in parts]
        if parts and [0, *ends] == [*begins, self._shape[self._axis]]:
            tensors = [part for _, part in parts]
            return (tensors[0] if len(parts) == 1 else torch.cat(tensors, self._axis)).to(dtype)
        whole = torch.full(self._shape, fill, dtype=dtype, device=device)
        for (begin, end), part in parts:
            whole.narrow(self._axis, begin, end - begin).copy_(part)
        return whole


def merge(total: Tensor, total_lse: Tensor, output: Tensor, lse: Tensor) -> None:
    """Writes output and LSE of all keys of two calls over those of the first.

    Args:
        total, output: [..., seq, heads, head_dim]
        total_lse, lse: [..., heads, seq]; 0 and -inf where a query sees no key of either.
    """
    if 0 in total.shape:
        return
    outputs = (each if each.dim() == 4 else each[None] for each in (total, output))
    first, second = (each.transpose(1, 2) for each in outputs)
    first_lse, second_lse = (each if each.dim() == 3 else each[None] for each in (total_lse, lse))
    merge_in_place(PartialOutputs(first=first, second=second, first_lse=first_lse, second_lse=second_lse))


class Sum:
    """A sum of gradients of some tokens each, in the order of its additions.

    It is kept in float32 (float64 for float64) if it is wide; else each token has two summands at most, whose sum is
    rounded once.
    """

    def __init__(self, shape: torch.Size, axis: int, *, wide: bool) -> None:
        """Of a tensor with the tokens on an axis."""
        self._axis, self._wide = axis, wide
        self._parts = Parts(shape, axis)

    def add(self, summand: Tensor, tokens: Span) -> None:
        """Adds the gradient of some of the tokens; a new tensor, which may be kept."""
        if not self._parts.keep(summand, tokens):
            self._total(summand).narrow(self._axis, tokens[0], tokens[1] - tokens[0]).add_(summand)

    def add_at(self, summand: Tensor, index: Tensor) -> None:
        """The same for tokens of any places."""
        total = self._total(summand)
        total.index_add_(self._axis, index, summand.to(total.dtype))

    def result(self, like: Tensor) -> Tensor:
        """The sum in the dtype of `like`; 0 without summands."""
        return self._parts.joined(like.device, like.dtype, 0.0)

    def _total(self, summand: Tensor) -> Tensor:
        """The sum so far, to be added to."""
        kind = torch.promote_types(summand.dtype, torch.float32) if self._wide else summand.dtype
        return self._parts.joined(summand.device, kind, 0.0)
