"""Ulysses: every rank has all tokens of some heads while attention is computed (arXiv:2309.14509)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoattn import functional
from autoattn.distributed import shards
from autoattn.distributed.communication import Ranks, on, reporting
from autoattn.distributed.schedule import Split
from autoattn.errors import UsageError
from autoattn.tensors import cu_seqlens


def check_heads(heads_q: int, heads_kv: int, size: int) -> None:
    """Refuses heads that ranks cannot share evenly.

    Raises:
        UsageError: the ranks do not divide the query heads, or neither divide key heads nor are a multiple of them.
    """
    if heads_q % size or (heads_kv % size and size % heads_kv):
        raise UsageError(
            "method ulysses needs query heads that the ranks divide, and key heads that divide the ranks or that the "
            f"ranks divide, got {heads_q} and {heads_kv} heads on {size} ranks; use method ring or allgather"
        )


def attend(
    query: Tensor, key: Tensor, value: Tensor, split: Split, ranks: Ranks, *, sinks: Tensor | None,
    alibi_slopes: Tensor | None, **words: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and LSE of the rank's queries; differentiable.

    Args:
        query, key, value: the rank's [batch, seq, heads, head_dim], or packed [tokens, heads, head_dim].
        sinks, alibi_slopes: of all heads.
        words: the other arguments of `autoattn.attention` that both layouts have.
    """
    packed = query.dim() == 3
    copies = max(ranks.size // key.shape[-2], 1)
    given = [query, *(_repeated(tensor, copies) for tensor in (key, value))]
    whole: list[Any] = [_Exchange.apply(tensor[None] if packed else tensor, split, ranks, True) for tensor in given]
    heads = whole[0].shape[2]
    own = slice(ranks.rank * heads, (ranks.rank + 1) * heads)
    words |= {
        "sinks": None if sinks is None else sinks[own],
        "alibi_slopes": None if alibi_slopes is None else alibi_slopes[..., own],
    }
    if packed:
        offsets = _offsets(split, query.device)
        longest = max((end - begin for begin, end in zip(split.offsets, split.offsets[1:], strict=False)), default=0)
        query, key, value = (each[0] for each in whole)
        packed_answer = functional.packed_attention(
            query, key, value, offsets, offsets, longest, longest, return_lse=True, **words
        )
        output, lse = packed_answer[0][None], packed_answer[1][None]
    else:
        output, lse = functional.attention(*whole, layout="bshd", return_lse=True, **words)
    output = _Exchange.apply(output, split, ranks, False)
    lse = _Exchange.apply(lse.transpose(1, 2)[..., None], split, ranks, False)[..., 0].transpose(1, 2)
    return (output[0], lse[0]) if packed else (output, lse)


def _repeated(tensor: Tensor, copies: int) -> Tensor:
    return tensor if copies == 1 else tensor.repeat_interleave(copies, dim=-2)


@lru_cache(maxsize=64)
def _offsets(split: Split, device: torch.device) -> Tensor:
    return cu_seqlens.of_numbers(split.offsets, device)


@lru_cache(maxsize=64)
def _orders(split: Split, device: torch.device) -> tuple[Tensor, Tensor]:
    """[tokens] int64: where tokens in order stand rank by rank, and the other way round."""
    rank_by_rank = torch.cat([shards.tokens_of(split, rank) for rank in range(split.ranks)])
    return on(torch.argsort(rank_by_rank), device), on(rank_by_rank, device)


def _to_heads(tensor: Tensor, split: Split, ranks: Ranks) -> Tensor:
    """[batch, all tokens, heads / ranks, head_dim] of the rank's [batch, seq, heads, head_dim]."""
    batch, seq, heads, head_dim = tensor.shape
    share = (batch, heads // ranks.size, head_dim)
    # [ranks, seq, batch, heads / ranks, head_dim]
    sent = tensor.unflatten(2, (ranks.size, -1)).permute(2, 1, 0, 3, 4).contiguous()
    received = tensor.new_empty((split.offsets[-1], *share))
    sizes = [length * math.prod(share) for length in split.lengths]
    with reporting(ranks):
        dist.all_to_all_single(
            received.view(-1), sent.view(-1), sizes, [seq * math.prod(share)] * ranks.size, group=ranks.group
        )
    return received.index_select(0, _orders(split, tensor.device)[0]).transpose(0, 1)


def _to_tokens(tensor: Tensor, split: Split, ranks: Ranks) -> Tensor:
    """The other way round."""
    batch, _, share, head_dim = tensor.shape
    seq, row = split.lengths[ranks.rank], batch * share * head_dim
    sent = tensor.transpose(0, 1).index_select(0, _orders(split, tensor.device)[1])
    received = tensor.new_empty((ranks.size, seq, batch, share, head_dim))
    with reporting(ranks):
        dist.all_to_all_single(
            received.view(-1), sent.contiguous().view(-1), [seq * row] * ranks.size,
            [length * row for length in split.lengths], group=ranks.group,
        )  # fmt: skip
    return received.permute(2, 1, 0, 3, 4).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """All tokens of some heads, of some tokens of all heads; or the other way round."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: Split, ranks: Ranks, to_heads: bool) -> Tensor:
        ctx.given = split, ranks, not to_heads
        return (_to_heads if to_heads else _to_tokens)(tensor, split, ranks)

    @staticmethod
    def backward(ctx: Any, pull: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(pull, *ctx.given), None, None, None
