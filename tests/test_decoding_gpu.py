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
        output = autoattn.cached_attention(query[alone], key, value, held[alone], block_table=table[alone], splits=4)
        assert torch.equal(output, whole[alone])


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


def test_a_float8_cache_gives_what_its_numbers_times_their_scales_do() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    key, value, table = paged(3)
    lengths, scales = [0, 33, 190], (torch.tensor([0.5, 2.0], device="cuda"), torch.rand(3, HEADS_KV, device="cuda"))
    query, held = numbers(3, 2, HEADS, DIM), torch.tensor(lengths, device="cuda").int()
    key8, value8 = key.to(torch.float8_e4m3fn), value.to(torch.float8_e4m3fn)
    words = {"block_table": table, "causal": True, "key_scale": scales[0], "value_scale": scales[1]}
    output = autoattn.cached_attention(query, key8, value8, held, **words)
    assert autoattn.explain_cached(query, key8, value8, held, **words).route == "kernel"
    right = expected(query, key8.float() * scales[0][:, None], value8, table, lengths)
    right *= scales[1].repeat_interleave(HEADS // HEADS_KV, 1)[:, None, :, None]
    torch.testing.assert_close(output.float(), right, rtol=3e-2, atol=2e-2)
    new = numbers(3, 1, HEADS_KV, DIM)
    functional.flash_attn_with_kvcache(
        query[:, :1], key8, value8, new, new, cache_seqlens=held, block_table=table, k_descale=scales[0].expand(3, 2)
    )
    stored = key8[table[1].long()].flatten(0, 1)[33]
    assert torch.equal(stored.float(), (new[1, 0].float() / scales[0][:, None]).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("queries", [1, 3])
def test_a_shared_prefix_changes_no_result(queries: int) -> None:
    key, value, table = paged(9)
    table[:, :7] = table[0, :7]
    query, lengths = numbers(9, queries, HEADS, DIM), [192, *range(120, 128)]
    held = torch.tensor(lengths, device="cuda").int()
    words = {"block_table": table, "causal": True, "return_lse": True}
    output, lse = autoattn.cached_attention(query, key, value, held, **words)
    for _ in range(2):  # the second call is prepared
        shared, shared_lse = autoattn.cached_attention(query, key, value, held, shared_prefix=7 * PAGE, **words)
        torch.testing.assert_close(shared, output, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(shared_lse, lse, rtol=1e-3, atol=1e-3)


def test_batches_of_all_sizes_give_a_sequence_the_same_bits_where_that_is_asked() -> None:
    key, value, table = paged(40)
    query = numbers(40, 1, HEADS, DIM)
    held = torch.randint(0, PAGE * PAGES, (40,), device="cuda").int()
    for words in ({"deterministic": True}, {"splits": 1}, {"split_length": 64}):
        whole = autoattn.cached_attention(query, key, value, held, block_table=table, **words)
        for first, last in ((0, 1), (3, 8), (7, 40)):
            some = slice(first, last)
            part = autoattn.cached_attention(query[some], key, value, held[some], block_table=table[some], **words)
            assert torch.equal(part, whole[some]), words


def test_lengths_that_lie_stop_at_the_end_of_the_cache() -> None:
    key, value, table = paged(2)
    query, new = numbers(2, 1, HEADS, DIM), numbers(2, 3, HEADS_KV, DIM)
    whole = torch.tensor([PAGE * PAGES, 0], device="cuda").int()
    honest = autoattn.cached_attention(query, key, value, whole, block_table=table)
    held = torch.tensor([2**31 - 1, -5], device="cuda").int()
    assert torch.equal(autoattn.cached_attention(query, key, value, held, block_table=table), honest)
    before = key.clone()
    functional.flash_attn_with_kvcache(
        query, key, value, new, new, cache_seqlens=held[:1].expand(2).contiguous(), block_table=table
    )
    assert torch.equal(key, before)
