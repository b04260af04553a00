"""Tensors of all tokens divided among ranks, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoattn.distributed import sharding as shardings
from autoattn.distributed.communication import Ranks, on, ranks_of, reporting
from autoattn.distributed.schedule import Split
from autoattn.errors import UsageError


def shard(
    tensor: Tensor, dim: int, group: Any, sharding: str = "zigzag", *, cu_seqlens: Tensor | Sequence[int] | None = None
) -> Tensor:
    """This rank's tokens of a tensor that each rank has in full; nothing is sent.

    Args:
        tensor: the tokens on axis `dim`, any number of them.
        group: a ProcessGroup or a DeviceMesh with one axis.
        sharding: "zigzag", "contiguous" or "stripe".
        cu_seqlens: where packed documents begin and the last ends: whole numbers, or an int32 tensor, best one of the
            CPU. Each document is divided by itself.

    Returns:
        A new tensor; differentiable. Two ranks have numbers of tokens that differ by at most one.

    Raises:
        UsageError: an argument is none of these.
    """
    ranks = ranks_of(group)
    split = split_of(ranks, sharding, cu_seqlens, tensor.shape[dim])
    return tensor.index_select(dim, _own_tokens(split, ranks.rank, tensor.device))


def unshard(
    tensor: Tensor, dim: int, group: Any, sharding: str = "zigzag", *, cu_seqlens: Tensor | Sequence[int] | None = None
) -> Tensor:
    """The tensor of all tokens, of the ranks' parts of it.

    Args:
        tensor: what `shard` gave with the same other arguments; other sizes are alike on all ranks.

    Returns:
        A new tensor, the same on each rank. Its gradients, summed over the ranks, are the parts' gradients.

    Raises:
        UsageError: an argument is none of these, or the parts do not fit together.
        GroupError: a rank does not answer.
    """
    ranks = ranks_of(group)
    lengths = [0] * ranks.size
    with reporting(ranks):
        dist.all_gather_object(lengths, tensor.shape[dim], group=ranks.group)
    split = split_of(ranks, sharding, cu_seqlens, sum(lengths))
    if tuple(lengths) != split.lengths:
        raise UsageError(
            f"tokens must be divided as {split.sharding.value} divides {sum(lengths)} tokens among {ranks.size} ranks, "
            f"{list(split.lengths)}, got {lengths}; divide them with shard"
        )
    gathered: Tensor = _Unshard.apply(tensor.movedim(dim, 0), split, ranks)
    return gathered.movedim(0, dim)


def position_ids(
    length: int, group: Any, sharding: str = "zigzag", *, cu_seqlens: Tensor | Sequence[int] | None = None
) -> Tensor:
    """[tokens of the rank] int64 on the CPU: the position of each of this rank's tokens in its document.

    Args:
        length: tokens of all ranks together.

    Raises:
        UsageError: an argument is not as in `shard`.
    """
    ranks = ranks_of(group)
    return positions_of(split_of(ranks, sharding, cu_seqlens, length), ranks.rank)


def split_of(ranks: Ranks, sharding: Any, cu_seqlens: Any, length: int) -> Split:
    """How tokens are divided.

    Raises:
        UsageError: the sharding is none, or the offsets are none of so many tokens.
    """
    chosen = shardings.parse(sharding)
    offsets = (0, length) if cu_seqlens is None else offsets_of(cu_seqlens)
    if offsets[-1] != length:
        raise UsageError(
            f"cu_seqlens must end at the {length} tokens of all ranks, got {offsets[-1]}; give the offsets of all "
            "documents, not of the rank's part"
        )
    return Split(offsets=offsets, ranks=ranks.size, sharding=chosen)


def offsets_of(cu_seqlens: Any) -> tuple[int, ...]:
    """The offsets of documents as numbers; those of a GPU are waited for.

    Raises:
        UsageError: they do not begin at 0, or decrease.
    """
    offsets = tuple(cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)
    whole = all(type(offset) is int for offset in offsets)
    if not whole or len(offsets) < 2 or offsets[0] != 0 or any(end < begin for begin, end in pairwise(offsets)):
        raise UsageError(
            "cu_seqlens must be whole numbers that begin at 0, never decrease and are two at least, got "
            f"{list(offsets[:8])}; begin with 0 and add the documents' lengths up"
        )
    return offsets


def tokens_of(split: Split, rank: int) -> Tensor:
    """[tokens of the rank] int64 on the CPU: their places among all tokens."""
    starts = torch.tensor(split.offsets)[[piece.document for piece in split.layout[rank]]]
    return positions_of(split, rank) + starts.repeat_interleave(_lengths(split, rank))


def positions_of(split: Split, rank: int) -> Tensor:
    """[tokens of the rank] int64 on the CPU: their positions in their documents."""
    pieces = split.layout[rank]
    ranges = [torch.arange(piece.start, piece.start + piece.length * piece.step, piece.step) for piece in pieces]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def _lengths(split: Split, rank: int) -> Tensor:
    return torch.tensor([piece.length for piece in split.layout[rank]], dtype=torch.int64)


@lru_cache(maxsize=64)
def _own_tokens(split: Split, rank: int, device: torch.device) -> Tensor:
    return on(tokens_of(split, rank), device)


class _Unshard(torch.autograd.Function):
    """[all tokens, ...] of the rank's [tokens, ...]."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: Split, ranks: Ranks) -> Tensor:
        ctx.given = split, ranks
        most = max(split.lengths)
        room = tensor.new_zeros((most, *tensor.shape[1:]))
        room[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(room) for _ in range(ranks.size)]
        with reporting(ranks):
            dist.all_gather(parts, room, group=ranks.group)
        whole = tensor.new_empty((split.offsets[-1], *tensor.shape[1:]))
        for rank, length in enumerate(split.lengths):
            whole[_own_tokens(split, rank, tensor.device)] = parts[rank][:length]
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, pull: Tensor) -> tuple[Tensor | None, ...]:
        split, ranks = ctx.given
        pull = pull.contiguous().clone()
        with reporting(ranks):
            dist.all_reduce(pull, group=ranks.group)
        return pull.index_select(0, _own_tokens(split, ranks.rank, pull.device)), None, None
