"""Block tables: which blocks of keys each block of queries sees, as the lists that kernels walk."""

from __future__ import annotations

import torch
from torch import Tensor

from autoattn.tensors.operands import BlockTable


def table_of(kept: Tensor, *, block_q: int, block_kv: int, seq_kv: int, partial: Tensor | None = None) -> BlockTable:
    """The lists of a table of booleans.

    Args:
        kept: [batch or 1, heads_q or 1, query blocks, key blocks] bool: which blocks are seen at all.
        block_q, block_kv: queries and keys of a block.
        seq_kv: keys; a last block that they do not fill goes to the partial lists.
        partial: shaped like `kept`: of those, which are cut by the mask's expression; none when None.
    """
    partial = torch.zeros_like(kept) if partial is None else partial & kept
    if seq_kv % block_kv:
        partial = partial.clone()
        partial[..., -1] |= kept[..., -1]
    full_counts, full_blocks = _lists(kept & ~partial)
    partial_counts, partial_blocks = _lists(partial)
    return BlockTable(
        block_q=block_q,
        block_kv=block_kv,
        full_counts=full_counts,
        full_blocks=full_blocks,
        partial_counts=partial_counts,
        partial_blocks=partial_blocks,
    )


def grid_of(counts: Tensor, listed: Tensor, columns: int) -> Tensor:
    """Lists turned back into a table: [..., query blocks, columns] int32, how often a list names a block of keys.

    Args:
        counts: [..., query blocks], how many numbers of each list count.
        listed: [..., query blocks, at least 1], numbers below `columns`; anything behind the counted ones.
        columns: blocks of keys.
    """
    there = torch.arange(listed.shape[-1], device=listed.device) < counts[..., None]
    grid = torch.zeros(*counts.shape, columns + 1, dtype=torch.int32, device=counts.device)
    return grid.scatter_add_(-1, torch.where(there, listed.long(), columns), there.to(torch.int32))[..., :columns]


def states_of(table: BlockTable, seq_kv: int) -> Tensor:
    """[batch or 1, heads_q or 1, query blocks, key blocks] int8, contiguous: which lists name each block.

    0 stands for none, 1 for the partial and 2 for the full ones.
    """
    columns = -(-seq_kv // table.block_kv)
    full = grid_of(table.full_counts, table.full_blocks, columns)
    return (2 * full + grid_of(table.partial_counts, table.partial_blocks, columns)).to(torch.int8).contiguous()


def turned(table: BlockTable, seq_kv: int) -> BlockTable:
    """The same table with a row for each block of keys, whose lists name the blocks of queries that see it.

    Waits for nothing, so that a CUDA graph can hold it. Its counts are [batch or 1, heads_q or 1, key blocks] and its
    lists [..., query blocks]; a block of queries that hangs over their end stays on the list that it was on.
    """
    columns = -(-seq_kv // table.block_kv)
    pairs = ((table.full_counts, table.full_blocks), (table.partial_counts, table.partial_blocks))
    kept = torch.stack([grid_of(counts, listed, columns) for counts, listed in pairs]).transpose(-1, -2) > 0
    counts, listed = _lists(kept)
    return BlockTable(
        block_q=table.block_q,
        block_kv=table.block_kv,
        full_counts=counts[0],
        full_blocks=listed[0],
        partial_counts=counts[1],
        partial_blocks=listed[1],
    )


def _lists(kept: Tensor) -> tuple[Tensor, Tensor]:
    """(how many are kept, which: first the kept ones, ascending)."""
    order = torch.argsort((~kept).to(torch.int8), dim=-1, stable=True)
    return kept.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()
