"""Lists of blocks from tables of booleans."""

from __future__ import annotations

import torch

from autoattn.tensors import block_table


def test_lists_are_ascending_and_counted() -> None:
    kept = torch.tensor([[[[False, True, True], [False, False, False]]]])
    table = block_table.table_of(kept, block_q=16, block_kv=16, seq_kv=48)
    assert table.full_counts.tolist() == [[[2, 0]]]
    assert table.full_blocks[0, 0, 0, :2].tolist() == [1, 2]
    assert table.partial_counts.tolist() == [[[0, 0]]]


def test_blocks_that_the_mask_cuts_are_partial_where_they_are_kept() -> None:
    kept = torch.tensor([[[[True, True, False]]]])
    partial = torch.tensor([[[[False, True, True]]]])
    table = block_table.table_of(kept, block_q=16, block_kv=16, seq_kv=48, partial=partial)
    assert (table.full_counts.item(), table.full_blocks[..., 0].item()) == (1, 0)
    assert (table.partial_counts.item(), table.partial_blocks[..., 0].item()) == (1, 1)


def test_a_last_block_that_the_keys_do_not_fill_is_partial() -> None:
    kept = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    table = block_table.table_of(kept, block_q=16, block_kv=16, seq_kv=40)
    assert (table.full_counts.item(), table.partial_counts.item(), table.partial_blocks[..., 0].item()) == (2, 1, 2)


def test_a_table_of_the_caller_is_left_as_it_is() -> None:
    kept = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    partial = torch.zeros_like(kept)
    block_table.table_of(kept, block_q=16, block_kv=16, seq_kv=40, partial=partial)
    assert not partial.any()


def test_lists_are_contiguous_int32() -> None:
    table = block_table.table_of(torch.ones(2, 3, 4, 5, dtype=torch.bool), block_q=16, block_kv=16, seq_kv=70)
    for tensor in (table.full_counts, table.full_blocks, table.partial_counts, table.partial_blocks):
        assert tensor.dtype is torch.int32
        assert tensor.is_contiguous()


def test_the_lists_give_their_table_back() -> None:
    kept, cut = (torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed)) < 0.5 for seed in (0, 1))
    table = block_table.table_of(kept, block_q=16, block_kv=16, seq_kv=80, partial=cut)
    full = block_table.grid_of(table.full_counts, table.full_blocks, 5)
    partial = block_table.grid_of(table.partial_counts, table.partial_blocks, 5)
    assert torch.equal(full > 0, kept & ~cut)
    assert torch.equal(partial > 0, kept & cut)
    assert torch.equal((full + partial) <= 1, torch.ones_like(kept))


def test_a_turned_table_names_the_queries_of_each_block_of_keys() -> None:
    kept, cut = (torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed)) < 0.5 for seed in (0, 1))
    cut[..., -1] = True
    turned = block_table.turned(block_table.table_of(kept, block_q=16, block_kv=32, seq_kv=150, partial=cut), 150)
    assert (turned.block_q, turned.block_kv) == (16, 32)
    pairs = ((turned.full_counts, turned.full_blocks), (turned.partial_counts, turned.partial_blocks))
    for (counts, listed), expected in zip(pairs, (kept & ~cut, kept & cut), strict=True):
        assert torch.equal(block_table.grid_of(counts, listed, 4) > 0, expected.transpose(2, 3))
        assert counts.dtype is listed.dtype is torch.int32
        assert counts.is_contiguous()
        assert listed.is_contiguous()
        assert listed.shape == (2, 3, 5, 4)


def test_what_stands_behind_the_counted_numbers_is_not_listed_and_twice_is_counted_twice() -> None:
    counts, listed = torch.tensor([[[2, 0]]]), torch.tensor([[[[1, 1, 2], [-7, 9, 0]]]])
    assert block_table.grid_of(counts, listed, 3).tolist() == [[[[0, 2, 0], [0, 0, 0]]]]
