"""Attention on latent caches, whose values are a view of the keys, on a card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autoattn
from autoattn import functional
from autoattn.codegen import search_space
from autoattn.core.problem import Op

pytestmark = pytest.mark.gpu
HEAD_DIM, HEAD_DIM_V, CAPACITY = 576, 512, 384
LENGTHS = [0, 1, 17, 200, CAPACITY]
GARBAGE = 2**30  # a page that nobody may read
FLOAT8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True, params=["triton/forward", "latent/forward"])
def template(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The template whose defaults go first; the other one takes what it does not."""
    if request.param == "latent/forward" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup products are those of Hopper, compute capability 9.0")
    ordered = tuple(sorted(search_space.of(Op.FORWARD), key=lambda space: space.template != request.param))
    monkeypatch.setattr(search_space, "of", lambda op: ordered)  # calls on caches have no gradients
    functional.forget()
    yield request.param
    functional.forget()


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def cache_of(page: int, dtype: torch.dtype, lengths: list[int], capacity: int = CAPACITY) -> tuple[Tensor, Tensor]:
    """Pages in a drawn order, NaN behind each length, and the table, in which pages behind a length are garbage."""
    columns = -(-capacity // page)
    table = torch.randperm(len(lengths) * columns, device="cuda").int().view(len(lengths), columns)
    cache = numbers(table.numel(), page, 1, HEAD_DIM, dtype=dtype)
    for row, length in enumerate(lengths):
        whole = cache[table[row].long()].flatten(0, 1).float()
        whole[length:] = torch.nan
        cache[table[row].long()] = whole.unflatten(0, (columns, page)).to(dtype)
        table[row, -(-length // page) :] = GARBAGE
    return cache, table


def expected(query: Tensor, cache: Tensor, table: Tensor, lengths: list[int]) -> Tensor:
    """The output in float64: the last query of a sequence stands at its last key."""
    outputs, page = [], cache.shape[1]
    for row, length in enumerate(lengths):
        keys = cache[table[row, : -(-length // page)].long()].flatten(0, 1)[:length, 0].double()
        scores = query[row].double().transpose(0, 1) @ keys.mT * HEAD_DIM**-0.5
        seen = torch.ones(scores.shape[1:], device="cuda").tril(length - query.shape[1]) > 0
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        outputs.append((weights @ keys[:, :HEAD_DIM_V]).transpose(0, 1))
    return torch.stack(outputs)


def check(template: str, page: int, dtype: torch.dtype, *, queries: int = 1, heads: int = 16, **words: Any) -> None:
    """Compares two calls, of which the second is prepared, with the formula."""
    kind = torch.bfloat16 if dtype is FLOAT8 else dtype
    lengths = [LENGTHS[0], *(max(length, queries) for length in LENGTHS[1:])]
    cache, table = cache_of(page, dtype, lengths)
    query, held = (
        numbers(len(lengths), queries, heads, HEAD_DIM, dtype=kind),
        torch.tensor(lengths, device="cuda").int(),
    )
    words |= {"block_table": table, "causal": True}
    right = expected(query, cache, table, lengths)
    values = cache[..., :HEAD_DIM_V]
    explanation = autoattn.explain_cached(query, cache, values, held, **words)
    assert explanation.route == "kernel"
    if page == 64:  # latent/forward takes no page that is shorter than a step
        assert explanation.variant is not None
        assert explanation.variant.template == template
    for _ in range(2):
        output = autoattn.cached_attention(query, cache, values, held, **words)
        torch.testing.assert_close(output.double(), right, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("page", [1, 64])
def test_pages_in_any_order_are_read_up_to_each_length(template: str, page: int) -> None:
    check(template, page, torch.bfloat16)


@pytest.mark.parametrize(("queries", "heads"), [(2, 16), (4, 16), (3, 5)])
def test_rows_of_all_numbers_match_the_formula(template: str, queries: int, heads: int) -> None:
    check(template, 64, torch.bfloat16, queries=queries, heads=heads)


@pytest.mark.parametrize("queries", [1, 2])
def test_a_float8_latent_matches_the_formula_on_its_numbers(template: str, queries: int) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    check(template, 64, FLOAT8, queries=queries)


@pytest.mark.parametrize("heads", [16, 64])
def test_parts_of_long_sequences_add_up_to_the_same_bits_each_time(heads: int) -> None:
    lengths = [20000, 3000, 50]
    cache, table = cache_of(64, torch.bfloat16, lengths, 20032)
    query, held = numbers(3, 1, heads, HEAD_DIM, dtype=torch.bfloat16), torch.tensor(lengths, device="cuda").int()
    three = query, cache, cache[..., :HEAD_DIM_V], held
    first = autoattn.cached_attention(*three, block_table=table)
    right = expected(query, cache, table, lengths)
    torch.testing.assert_close(first.double(), right, rtol=2e-2, atol=2e-3)
    for _ in range(20):
        assert torch.equal(autoattn.cached_attention(*three, block_table=table), first)


def test_a_contiguous_cache_gives_what_pages_give() -> None:
    cache, table = cache_of(64, torch.float16, [CAPACITY] * 3)
    rows = cache[table.long()].flatten(1, 2)
    query, held = numbers(3, 1, 16, HEAD_DIM, dtype=torch.float16), torch.tensor([384, 70, 9], device="cuda").int()
    by_pages = autoattn.cached_attention(query, cache, cache[..., :HEAD_DIM_V], held, block_table=table)
    by_rows = autoattn.cached_attention(query, rows, rows[..., :HEAD_DIM_V], held)
    torch.testing.assert_close(by_rows, by_pages, rtol=1e-2, atol=1e-2)


def test_what_shares_a_batch_changes_no_bit_where_that_is_asked() -> None:
    lengths = [384, 3, 77, 300, 1, 64]
    cache, table = cache_of(64, torch.bfloat16, lengths)
    query, held = numbers(6, 1, 16, HEAD_DIM, dtype=torch.bfloat16), torch.tensor(lengths, device="cuda").int()
    three = query, cache, cache[..., :HEAD_DIM_V]
    whole = autoattn.cached_attention(*three, held, block_table=table, deterministic=True)
    for row in range(6):
        alone = slice(row, row + 1)
        output = autoattn.cached_attention(
            query[alone], *three[1:], held[alone], block_table=table[alone], deterministic=True
        )
        assert torch.equal(output, whole[alone])


def test_a_captured_step_replays_with_other_lengths_and_pages() -> None:
    cache, table = cache_of(64, torch.bfloat16, [CAPACITY] * 3)
    query, held = numbers(3, 1, 16, HEAD_DIM, dtype=torch.bfloat16), torch.tensor([5, 6, 7], device="cuda").int()
    three = query, cache, cache[..., :HEAD_DIM_V], held
    autoattn.cached_attention(*three, block_table=table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = autoattn.cached_attention(*three, block_table=table)
    for lengths in ([1, 150, 16], [0, 384, 33]):
        held.copy_(torch.tensor(lengths).int())
        table.copy_(torch.randperm(table.numel(), device="cuda").view_as(table))
        graph.replay()
        right = expected(query, cache, table, lengths)
        torch.testing.assert_close(output.double(), right, rtol=2e-2, atol=1e-2)


def test_a_latent_that_is_no_number_reaches_only_the_queries_that_see_it() -> None:
    cache, table = cache_of(64, torch.bfloat16, [200])
    cache[table[0, 3].long(), 199 % 64, 0, ::3] = torch.nan  # the last key
    query, held = numbers(1, 4, 16, HEAD_DIM, dtype=torch.bfloat16), torch.tensor([200], device="cuda").int()
    output = autoattn.cached_attention(query, cache, cache[..., :HEAD_DIM_V], held, block_table=table, causal=True)
    assert bool(output[:, -1].isnan().all())
    assert bool(output[:, :-1].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT8], ids=str)
def test_new_latents_are_written_and_attended_to(dtype: torch.dtype) -> None:
    lengths, page = [0, 1, 17, 200], 64
    cache, table = cache_of(page, dtype, [length + 1 for length in lengths])
    query = numbers(len(lengths), 1, 16, HEAD_DIM, dtype=torch.bfloat16)
    before = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    for _ in range(2):  # the second call is prepared
        new = numbers(len(lengths), 1, 1, HEAD_DIM, dtype=torch.bfloat16)
        values = cache[..., :HEAD_DIM_V], new, new[..., :HEAD_DIM_V]
        output = functional.flash_attn_with_kvcache(query, cache, *values, cache_seqlens=before, block_table=table)
        for row, length in enumerate(lengths):
            assert torch.equal(cache[table[row, length // page], length % page].float(), new[row, 0].to(dtype).float())
        right = expected(query, cache, table, [length + 1 for length in lengths])
        torch.testing.assert_close(output.double(), right, rtol=2e-2, atol=2e-2)
