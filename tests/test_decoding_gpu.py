"""Attention on caches of keys and values, on a card."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import autoattn
from autoattn import functional

pytestmark = pytest.mark.gpu
PAGE, PAGES, HEADS, HEADS_KV, DIM = 16, 12, 8, 2, 64


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def paged(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Key and value pages, and a table of pages in a drawn order."""
    table = torch.randperm(batch * PAGES, device="cuda").int().view(batch, PAGES)
    key, value = (numbers(batch * PAGES, PAGE, HEADS_KV, DIM) for _ in range(2))
    return key, value, table


def expected(query: Tensor, key: Tensor, value: Tensor, table: Tensor, lengths: list[int]) -> Tensor:
    """The output in float32: the last query of a sequence stands at its last key."""
    outputs = []
    for row, length in enumerate(lengths):
        keys, values = (tensor[table[row].long()].flatten(0, 1)[:length].float() for tensor in (key, value))
        keys, values = (tensor.transpose(0, 1).repeat_interleave(HEADS // HEADS_KV, 0) for tensor in (keys, values))
        scores = query[row].float().transpose(0, 1) @ keys.mT * DIM**-0.5
        seen = torch.ones(query.shape[1], length, device="cuda").tril(length - query.shape[1]) > 0
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        outputs.append((weights @ values).transpose(0, 1))
    return torch.stack(outputs)


@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("splits", [0, 4])
def test_pages_in_any_order_are_read_up_to_each_length(queries: int, splits: int) -> None:
    key, value, table = paged(5)
    lengths = [0, 1, 17, 100, PAGE * PAGES]
    query, held = numbers(5, queries, HEADS, DIM), torch.tensor(lengths, device="cuda").int()
    output = autoattn.cached_attention(query, key, value, held, block_table=table, causal=True, splits=splits)
    torch.testing.assert_close(output.float(), expected(query, key, value, table, lengths), rtol=2e-2, atol=2e-2)


def test_pages_behind_a_length_are_never_read() -> None:
    key, value, table = paged(2)
    query, held = numbers(2, 1, HEADS, DIM), torch.tensor([20, 33], device="cuda").int()
    before = autoattn.cached_attention(query, key, value, held, block_table=table)
    for row, length in enumerate((20, 33)):
        table[row, -(-length // PAGE) :] = 2**30
    assert torch.equal(autoattn.cached_attention(query, key, value, held, block_table=table), before)


def test_a_captured_step_replays_with_other_lengths_and_pages() -> None:
    key, value, table = paged(3)
    query, held = numbers(3, 1, HEADS, DIM), torch.tensor([5, 6, 7], device="cuda").int()
    autoattn.cached_attention(query, key, value, held, block_table=table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = autoattn.cached_attention(query, key, value, held, block_table=table)
    for lengths in ([1, 150, 16], [0, 192, 33]):
        held.copy_(torch.tensor(lengths).int())
        table.copy_(torch.randperm(3 * PAGES, device="cuda").view(3, PAGES))
        graph.replay()
        torch.testing.assert_close(output.float(), expected(query, key, value, table, lengths), rtol=2e-2, atol=2e-2)


def test_what_shares_a_batch_changes_no_bit_where_splits_are_named() -> None:
    key, value, table = paged(6)
    query, held = numbers(6, 1, HEADS, DIM), torch.tensor([192, 3, 77, 150, 1, 64], device="cuda").int()
    whole = autoattn.cached_attention(query, key, value, held, block_table=table, splits=4)
    for row in range(6):
        alone = slice(row, row + 1)
        one = autoattn.cached_attention(query[alone], key, value, held[alone], block_table=table[alone], splits=4)
        assert torch.equal(one, whole[alone])


def test_an_append_writes_in_place_what_the_attention_then_reads() -> None:
    key, value, table = paged(2)
    lengths, new_key, new_value = [15, 31], numbers(2, 3, HEADS_KV, DIM), numbers(2, 3, HEADS_KV, DIM)
    query, held = numbers(2, 3, HEADS, DIM), torch.tensor(lengths, device="cuda").int()
    output = functional.flash_attn_with_kvcache(
        query, key, value, new_key, new_value, cache_seqlens=held, block_table=table, causal=True
    )
    for row, length in enumerate(lengths):
        whole = key[table[row].long()].flatten(0, 1)
        assert torch.equal(whole[length : length + 3], new_key[row])
    longer = [length + 3 for length in lengths]
    torch.testing.assert_close(output.float(), expected(query, key, value, table, longer), rtol=2e-2, atol=2e-2)
    assert held.tolist() == lengths, "the caller's own"
