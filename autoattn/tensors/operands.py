"""The tensors and numbers of one attention call and of its gradients, as views that kernels and reference both take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from autoattn.core.problem import Layout


class View(NamedTuple):
    """How a [batch, heads, seq, head_dim] view lies in memory, wherever that is."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """Of such a view."""
        return cls(tensor.shape, tensor.stride())

    @classmethod
    def of_given(cls, shape: tuple[int, ...], strides: tuple[int, ...], layout: Layout) -> View:
        """The one that `viewed` makes of a tensor of a layout."""
        if layout is Layout.PACKED:
            (tokens, heads, head_dim), (step, head, last) = shape, strides
            return cls((1, heads, tokens, head_dim), (heads * head, head, step, last))
        if layout is Layout.BSHD:
            (batch, seq, heads, head_dim), (sequence, step, head, last) = shape, strides
            return cls((batch, heads, seq, head_dim), (sequence, head, step, last))
        return cls(shape, strides)

    def given(self, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides of the tensor that `as_given` makes of the view."""
        (batch, heads, seq, head_dim), (sequence, head, step, last) = self.shape, self.strides
        if layout is Layout.PACKED:
            return (seq, heads, head_dim), (step, head, last)
        if layout is Layout.BSHD:
            return (batch, seq, heads, head_dim), (sequence, step, head, last)
        return (batch, heads, seq, head_dim), (sequence, head, step, last)

    def without_gaps(self, head_dim: int) -> View:
        """A view like this one, but for gaps and the head dim.

        Heads lie within tokens where they do here, as a projection leaves them, else tokens within heads. So does
        PyTorch's own attention, and what a model does with the result needs no copies.
        """
        batch, heads, seq, _ = self.shape
        if 0 < self.strides[1] < self.strides[2]:
            strides = heads * seq * head_dim, head_dim, heads * head_dim, 1
        else:
            strides = heads * seq * head_dim, seq * head_dim, head_dim, 1
        return View((batch, heads, seq, head_dim), strides)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockTable:
    """Which blocks of keys each block of queries sees; lists as FlexAttention's BlockMask keeps them.

    The first `counts[..., i]` numbers of `blocks[..., i, :]` are the blocks that query block i sees; the rest is
    padding. Blocks on the full lists are seen by all their queries and lie wholly inside the sequence; those on the
    partial lists are cut at the end of the sequence and by the mask's expression.
    """

    block_q: int  # queries of a block
    block_kv: int  # keys of a block
    full_counts: Tensor  # [batch or 1, heads_q or 1, query blocks] int32, contiguous
    full_blocks: Tensor  # [batch or 1, heads_q or 1, query blocks, at least 1] int32, contiguous
    partial_counts: Tensor  # the same
    partial_blocks: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedKeys:
    """Where a cache has the keys and values of each sequence; all tensors are int32 on the query's device."""

    lengths: Tensor  # [batch], contiguous: keys of each sequence, those before its left padding included
    capacity: int  # keys that the cache holds of a sequence at most
    pages: Tensor | None = None  # [batch, pages of a sequence], the last axis contiguous; None: a contiguous cache
    rows: Tensor | None = None  # [batch], contiguous: the row of the cache that each sequence has; None: its own number
    leftpad: Tensor | None = None  # [batch], contiguous: where its keys begin in the row; None: at 0

    def spans(self) -> list[tuple[int, int]]:
        """(first key, keys) of each sequence in its row or its pages; waits for the GPU."""
        ends = self.lengths.clamp(0, self.capacity)
        begins = torch.zeros_like(ends) if self.leftpad is None else self.leftpad.clamp_min(0).minimum(ends)
        return list(zip(begins.tolist(), (ends - begins).tolist(), strict=True))

    def keys_of(self, tensor: Tensor, sequence: int, head: int, keys: slice) -> Tensor:
        """[keys, head_dim]: keys of one head of a sequence, out of the cache's key or value."""
        if self.pages is not None:
            page = tensor.shape[2]
            places = torch.arange(keys.start, keys.stop, device=tensor.device)
            return tensor[self.pages[sequence, places // page].long(), head, places % page]
        row = sequence if self.rows is None else int(self.rows[sequence])
        return tensor[row, head, keys]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operands:
    """What one call computes on. All tensors are on one device; what the problem does not have is None.

    Packed tensors are [1, heads, tokens, head_dim] views. A cache's key and value are [rows of the cache, heads,
    capacity, head_dim] or [pages, heads, keys of a page, head_dim] views.
    """

    query: Tensor  # [batch, heads_q, seq_q, head_dim]
    key: Tensor  # [batch, heads_kv, seq_kv, head_dim]
    value: Tensor  # [batch, heads_kv, seq_kv, head_dim_v]
    scale: float  # what products of query and key are multiplied by
    cu_seqlens_q: Tensor | None = None  # [batch + 1] int32: where each packed sequence begins, and where the last ends
    cu_seqlens_kv: Tensor | None = None
    query_scale: Tensor | None = None  # [batch, heads_kv] float32: what the stored float8 numbers are multiplied by
    key_scale: Tensor | None = None  # those of a cache may be expanded
    value_scale: Tensor | None = None
    bias: Tensor | None = None  # [batch, heads_q, seq_q or 1 for keys alone, seq_kv], expanded; bool, or to be added
    narrow_bias: Tensor | None = None  # one that is added, before it was expanded: an axis that shares it is 1 long
    softcap: float = 0.0
    slopes: Tensor | None = None  # [batch, heads_q] float32, expanded
    sinks: Tensor | None = None  # [heads_q] float32
    dropout: float = 0.0  # share of the weights that is dropped
    seed: int = 0  # of dropout, 64 bits
    table: BlockTable | None = None
    cache: CachedKeys | None = None
    mask_captures: tuple[Tensor, ...] = ()  # what the mask's expression reads, contiguous
    score_captures: tuple[Tensor, ...] = ()  # what the score_mod reads, contiguous

    def spans(self) -> list[tuple[int, int, int, int]]:
        """(first query, queries, first key, keys) of each sequence inside its batch entry; waits for the GPU."""
        if self.cache is not None:
            starts = [place * self.query.shape[2] for place in range(self.query.shape[0] + 1)]
            padded = self.cu_seqlens_q is None
            starts = starts if self.cu_seqlens_q is None else self.cu_seqlens_q.tolist()
            return [
                (0 if padded else begin, end - begin, *keys)
                for begin, end, keys in zip(starts[:-1], starts[1:], self.cache.spans(), strict=True)
            ]
        if self.cu_seqlens_q is None or self.cu_seqlens_kv is None:
            return [(0, self.query.shape[2], 0, self.key.shape[2])] * self.query.shape[0]
        queries, keys = self.cu_seqlens_q.tolist(), self.cu_seqlens_kv.tolist()
        return [
            (queries[place], queries[place + 1] - queries[place], keys[place], keys[place + 1] - keys[place])
            for place in range(len(queries) - 1)
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """What the forward pass leaves, and what comes back from behind it."""

    output: Tensor  # [batch, heads_q, seq_q, head_dim_v] view, as the forward pass rounded it
    lse: Tensor  # [batch, heads_q, seq_q] float32, contiguous, in natural logarithms
    output_grad: Tensor  # [batch, heads_q, seq_q, head_dim_v] view, the output's dtype
    lse_grad: Tensor | None = None  # like the LSE; only for kernels whose traits say so


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradients:
    """Of the tensors of the same names, in their shapes and dtypes."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None  # [heads_q] float32
    bias: Tensor | None = None  # as Operands.narrow_bias; where the problem's bias is learned
    slopes: Tensor | None = None  # [batch, heads_q] float32, contiguous; where the problem's slopes are learned

    def named(self) -> tuple[tuple[str, Tensor], ...]:
        """(name, gradient) of those that every call has."""
        return ("query", self.query), ("key", self.key), ("value", self.value)


def as_they_lie(operands: Operands) -> Operands:
    """The operands, with views that stand for the negatives of what lies in memory copied, since kernels read that.

    PyTorch makes such views of a conjugate's imaginary part (Tensor.is_neg).
    """
    if torch.compiler.is_compiling():  # the dispatcher copies them
        return operands
    given = {name: getattr(operands, name) for name in Operands.__dataclass_fields__ if name != "bias"}
    copied = {
        name: tensor.resolve_neg() for name, tensor in given.items() if isinstance(tensor, Tensor) and tensor.is_neg()
    }
    if "narrow_bias" in copied and operands.bias is not None:
        copied["bias"] = copied["narrow_bias"].expand_as(operands.bias)
    return replace(operands, **copied) if copied else operands


def viewed(tensor: Tensor, layout: Layout) -> Tensor:
    """A tensor of a layout as a [batch, heads, seq, head_dim] view; the batch is 1 when packed."""
    if layout is Layout.PACKED:
        return tensor.transpose(0, 1)[None]
    return tensor.transpose(1, 2) if layout is Layout.BSHD else tensor


def as_given(tensor: Tensor, layout: Layout) -> Tensor:
    """Such a view as a tensor of the layout."""
    if layout is Layout.PACKED:
        return tensor[0].transpose(0, 1)
    return tensor.transpose(1, 2) if layout is Layout.BSHD else tensor


def empty_as(like: Tensor, head_dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """A new tensor like `like`, a [batch, heads, seq, head_dim] view, but for gaps, the head dim and the dtype."""
    return like.new_empty_strided(*View.of(like).without_gaps(head_dim), dtype=dtype or like.dtype)


def lying_as(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor, or a copy that lies in memory as `like` does; both are [batch, heads, seq, head_dim] views."""
    wanted = View.of(like).without_gaps(tensor.shape[3]).strides
    if all(size == 1 or step == at for size, step, at in zip(tensor.shape, tensor.stride(), wanted, strict=True)):
        return tensor
    return empty_as(like, tensor.shape[3], tensor.dtype).copy_(tensor)
