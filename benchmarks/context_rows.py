"""The rows of benchmarks/context_parallel.py: kinds of attention, and what ranks compute of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from autoattn import distributed
from autoattn.distributed.schedule import Split
from autoattn.distributed.sharding import Sharding
from autoattn.search.rank_processes import Call, RankTimer

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
DOCUMENTS = (0.05, 0.4, 0.02, 0.2, 0.08, 0.25)  # shares of a packed sequence
WINDOW = (4096, 0)
OURS = {  # name -> method, and whether its outputs are merged by a pass of their own
    "ring": ("ring", False),
    "ring, merged apart": ("ring", True),
    "all-gather": ("allgather", False),
    "Ulysses": ("ulysses", False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of attention on so many tokens a rank, forward or both passes."""

    name: str
    tokens: int  # of a rank
    learns: bool  # whether both passes count

    @property
    def packed(self) -> bool:
        """Whether its documents are packed."""
        return self.name == "packed"

    @property
    def passes(self) -> str:
        """In words."""
        return "both" if self.learns else "forward"

    @property
    def own_method(self) -> str:
        """The name, in OURS, of the method that suits the mask."""
        return "all-gather" if self.name == "window" else "ring"

    def split(self, ranks: int) -> Split:
        """How the tokens of so many ranks are divided."""
        return Split(offsets=tuple(self.offsets(ranks)), ranks=ranks, sharding=Sharding.ZIGZAG)

    def ideal(self, seconds: float, ranks: int) -> float:
        """Seconds on so many ranks without a loss, of a call of one rank on its own tokens.

        N ranks have N * N times the pairs of one, but N times those of one where a window has a fixed length.
        """
        return seconds if self.name == "window" else seconds * ranks

    def offsets(self, ranks: int) -> list[int]:
        """Where documents begin and the last ends, among the tokens of all ranks."""
        if not self.packed:
            return [0, self.tokens * ranks]
        lengths = [int(share * self.tokens) * ranks for share in DOCUMENTS[:-1]]
        return list(accumulate([0, *lengths, self.tokens * ranks - sum(lengths)]))

    def words(self, device: torch.device, heads: int = HEADS) -> dict[str, Any]:
        """Arguments of the call."""
        if self.name == "window":
            return {"window": WINDOW, "sinks": torch.zeros(heads, device=device)}
        return {"causal": True}


def tensors(
    timer: RankTimer, tokens: int, *, learns: bool, packed: bool, heads: int = HEADS, heads_kv: int = HEADS_KV,
    head_dim: int = HEAD_DIM,
) -> list[Tensor]:  # fmt: skip
    """Query, key, value and the output's gradient, [batch, seq, heads, head_dim] or [tokens, heads, head_dim]."""
    torch.manual_seed(timer.ranks.rank)
    shapes = [(tokens, count, head_dim) for count in (heads, heads_kv, heads_kv, heads)]
    operands = [torch.randn(shape if packed else (1, *shape), device=timer.device, dtype=DTYPE) for shape in shapes]
    return [*(tensor.requires_grad_(learns) for tensor in operands[:3]), operands[3]]


def stepped(attend: Callable[[], Tensor], learners: Sequence[Tensor], pull: Tensor, *, learns: bool) -> Call:
    """A forward pass, or both passes."""

    def both() -> object:
        return torch.autograd.grad(attend(), learners, pull)

    def forward() -> object:
        with torch.no_grad():
            return attend()

    return both if learns else forward


def over_ranks(timer: RankTimer, row: Row, method: str, **sizes: int) -> Call:
    """The call over all ranks.

    Args:
        sizes: heads, heads_kv and head_dim, where they are others.
    """
    ranks = timer.ranks
    tokens = row.split(ranks.size).lengths[ranks.rank]
    query, key, value, pull = tensors(timer, tokens, learns=row.learns, packed=row.packed, **sizes)
    words = {
        **row.words(timer.device, query.shape[-2]),
        **({"cu_seqlens": row.offsets(ranks.size)} if row.packed else {"layout": "bshd"}),
    }

    def attend() -> Tensor:
        return distributed.context_attention(query, key, value, group=ranks.group, method=method, **words)

    return stepped(attend, (query, key, value), pull, learns=row.learns)
