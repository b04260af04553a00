"""Sparse masks against PyTorch's own dense masks, and tables written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from autoattn import masks
from autoattn.errors import ProblemError, TensorError
from autoattn.masks import BlockSparse

CPU = torch.device("cpu")


def dense(mod: Callable[..., Tensor], seq_q: int, seq_kv: int, batch: int = 1, heads: int = 1) -> Tensor:
    return create_mask(mod, batch, heads, seq_q, seq_kv, device="cpu")


def listed(counts: Tensor, blocks: Tensor) -> list[list[int]]:
    """The lists of the first sequence and head."""
    return [row[:count].tolist() for count, row in zip(counts[0, 0].tolist(), blocks[0, 0], strict=True)]


def lists(sparse: BlockSparse) -> tuple[list[list[int]], list[list[int]]]:
    table = sparse.table
    return listed(table.full_counts, table.full_blocks), listed(table.partial_counts, table.partial_blocks)


# --- tables -----------------------------------------------------------------------------------------------------------


def test_a_table_of_booleans_keeps_whole_blocks_and_cuts_the_last_one() -> None:
    kept = torch.tensor([[True, False, True], [False, True, False]])
    sparse = masks.from_table(kept, block_size=16, seq_q=30, seq_kv=40)
    assert lists(sparse) == ([[0], [1]], [[2], []])
    assert sparse.mask.density == 0.5
    expected = kept.repeat_interleave(16, 0).repeat_interleave(16, 1)[:30, :40]
    assert torch.equal(masks.to_dense(sparse), expected[None, None])


def test_lists_of_blocks_are_the_same_table() -> None:
    kept = torch.tensor([[True, False, True], [False, True, False]])
    sizes: dict[str, Any] = {"block_size": (16, 32), "seq_q": 32, "seq_kv": 96}
    by_table, by_indices = masks.from_table(kept, **sizes), masks.from_table([[2, 0], [1]], **sizes)
    assert lists(by_table) == lists(by_indices) == ([[0, 2], [1]], [[], []])


def test_tables_of_each_head_stay_apart() -> None:
    kept = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    sparse = masks.from_table(kept, block_size=16, seq_q=64, seq_kv=80)
    assert torch.equal(masks.to_dense(sparse), kept.repeat_interleave(16, 2).repeat_interleave(16, 3))


@pytest.mark.parametrize(
    ("kept", "facts", "words"),
    [
        (torch.ones(2, 2, dtype=torch.bool), {"seq_q": 64}, r"\[4, 2\]"),
        (torch.ones(2, 2), {}, "bool"),
        ([[0], [2]], {}, "0 to 1"),
        ([[0], [-1]], {}, "0 to 1"),
        ([[0]], {}, "each of the 2 blocks"),
        (torch.ones(2, 2, dtype=torch.bool), {"block_size": 24}, "powers of two"),
        (torch.ones(2, 2, dtype=torch.bool), {"block_size": (16, 16, 16)}, "one or two"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(kept: Any, facts: dict[str, Any], words: str) -> None:
    sizes: dict[str, Any] = {"block_size": 16, "seq_q": 32, "seq_kv": 32}
    with pytest.raises((TensorError, ProblemError), match=words):
        masks.from_table(kept, **(sizes | facts))


# --- PyTorch's block masks --------------------------------------------------------------------------------------------


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def test_a_block_mask_keeps_its_full_and_partial_lists() -> None:
    sparse = masks.from_block_mask(create_block_mask(causal, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16))
    assert lists(sparse) == ([[], [0], [0, 1], [0, 1, 2]], [[0], [1], [2], [3]])
    assert torch.equal(masks.to_dense(sparse), dense(causal, 64, 64))


def test_a_block_mask_is_converted_once() -> None:
    block_mask = create_block_mask(causal, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    assert masks.from_block_mask(block_mask) is masks.from_block_mask(block_mask)


def by_lists(blocks: list[int], *, full: list[int] | None = None, seq_kv: int = 40) -> BlockMask:
    """One block of queries."""

    def tensors(row: list[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor([[[len(row)]]], dtype=torch.int32), torch.tensor([[[[*row, 0, 0][:3]]]], dtype=torch.int32)

    return BlockMask.from_kv_blocks(
        *tensors(blocks), *(tensors(full) if full is not None else ()), BLOCK_SIZE=(16, 16), seq_lengths=(16, seq_kv)
    )


def test_a_full_block_that_hangs_over_the_end_becomes_partial() -> None:
    assert lists(masks.from_block_mask(by_lists([0], full=[1, 2]))) == ([[1]], [[0, 2]])


@pytest.mark.parametrize(("blocks", "full"), [([1, 1], None), ([1], [1])])
def test_a_block_that_is_listed_twice_is_refused(blocks: list[int], full: list[int] | None) -> None:
    with pytest.raises(TensorError, match="each block once"):
        masks.from_block_mask(by_lists(blocks, full=full))


def test_a_block_outside_is_refused() -> None:
    with pytest.raises(TensorError, match="0 to 2"):
        masks.from_block_mask(by_lists([3]))


# --- masks by function ------------------------------------------------------------------------------------------------

IDS = torch.tensor([[0] * 20 + [1] * 5 + [2] * 45, [7] * 3 + [4] * 67])
PREFIX = torch.tensor([3, 40])
NAMED: dict[str, tuple[BlockSparse, Callable[..., Tensor], int]] = {
    "documents": (masks.document(IDS, block_size=16), lambda b, h, q, k: IDS[b, q] == IDS[b, k], 2),
    "causal documents": (
        masks.document(IDS, causal=True, block_size=(16, 32)),
        lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & (q >= k),
        2,
    ),
    "documents of one": (masks.document(IDS[0], block_size=16), lambda b, h, q, k: IDS[0, q] == IDS[0, k], 1),
    "prefix": (masks.prefix_lm(10, 33, 70, block_size=16), lambda b, h, q, k: (k < 10) | (q >= k), 1),
    "prefixes": (masks.prefix_lm(PREFIX, 33, 70, block_size=16), lambda b, h, q, k: (k < PREFIX[b]) | (q >= k), 2),
    "dilated": (
        masks.dilated_window(20, 10, 3, seq_q=70, seq_kv=50, block_size=16),
        lambda b, h, q, k: (q - k <= 20) & (k - q <= 10) & ((q - k) % 3 == 0),
        1,
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_named_mask_keeps_the_pairs_of_its_definition(name: str) -> None:
    sparse, mod, batch = NAMED[name]
    assert torch.equal(masks.to_dense(sparse), dense(mod, sparse.seq_q, sparse.seq_kv, batch))


@settings(max_examples=12)
@given(st.integers(0, 80), st.integers(0, 80), st.integers(1, 9), st.integers(1, 70), st.integers(1, 70))
def test_any_dilated_window_keeps_the_pairs_of_its_definition(
    left: int, right: int, rate: int, seq_q: int, seq_kv: int
) -> None:
    sparse = masks.dilated_window(left, right, rate, seq_q=seq_q, seq_kv=seq_kv, block_size=16)
    rows, keys = torch.arange(seq_q)[:, None], torch.arange(seq_kv)
    distance = rows - keys
    expected = (distance <= left) & (distance >= -right) & (distance % rate == 0)
    assert torch.equal(masks.to_dense(sparse)[0, 0], expected)


def test_ids_that_are_written_later_count_in_partial_blocks() -> None:
    ids = torch.tensor([0] * 10 + [1] * 22)
    sparse = masks.document(ids, block_size=16)
    ids[10:12] = 0
    assert masks.to_dense(sparse)[0, 0, 0].sum() == 12


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.document(torch.zeros(5)),
        lambda: masks.prefix_lm(torch.zeros(2, 2, dtype=torch.int64), 4, 4),
        lambda: masks.dilated_window(-1, 0, 1, seq_q=4, seq_kv=4),
        lambda: masks.dilated_window(1, 1, 0, seq_q=4, seq_kv=4),
        lambda: masks.from_mod(lambda b, h, q, k: torch.erf(q + k) > 0, seq_q=16, seq_kv=16),
    ],
)
def test_what_is_no_mask_is_refused(make: Callable[[], BlockSparse]) -> None:
    with pytest.raises((TensorError, ProblemError), match="must be"):
        make()


# --- whether a mask is one for a call ---------------------------------------------------------------------------------


def test_a_mask_is_checked_against_the_sizes_of_a_call() -> None:
    documents, alike = NAMED["documents"][0], NAMED["prefix"][0]
    masks.check(documents, batch=2, heads=8, seq_q=70, seq_kv=70, device=CPU)
    masks.check(alike, batch=5, heads=3, seq_q=33, seq_kv=70, device=CPU)
    for batch, lengths in ((3, (70, 70)), (1, (70, 70)), (2, (64, 70))):
        with pytest.raises(TensorError, match="sparse mask must be"):
            masks.check(documents, batch=batch, heads=8, seq_q=lengths[0], seq_kv=lengths[1], device=CPU)


def test_a_mask_that_asks_the_head_must_be_built_for_all_heads() -> None:
    sparse = masks.from_mod(lambda b, h, q, k: q - k <= h, seq_q=32, seq_kv=32, block_size=16)
    masks.check(sparse, batch=1, heads=1, seq_q=32, seq_kv=32, device=CPU)
    with pytest.raises(TensorError, match="values of h"):
        masks.check(sparse, batch=1, heads=4, seq_q=32, seq_kv=32, device=CPU)


# --- through attention ------------------------------------------------------------------------------------------------


def formula(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    scores = (query.double() @ key.double().transpose(2, 3) * query.shape[3] ** -0.5).masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, 3).nan_to_num(0.0) @ value.double()


@pytest.mark.parametrize("name", NAMED)
def test_attention_takes_a_sparse_mask(name: str) -> None:
    from autoattn import attention

    sparse, mod, _ = NAMED[name]
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, seq, 8, generator=rng) for seq in (sparse.seq_q, *[sparse.seq_kv] * 2))
    expected = formula(query, key, value, dense(mod, sparse.seq_q, sparse.seq_kv, 2))
    torch.testing.assert_close(attention(query, key, value, mask=sparse).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_documents_run_a_kernel_and_agree_with_the_formula(causal: bool) -> None:
    from autoattn import attention, explain

    ids = torch.randint(0, 5, (2, 1000), generator=torch.Generator().manual_seed(0)).sort(1).values.cuda()
    sparse = masks.document(ids, causal=causal)
    query, key, value = (torch.randn(2, 4, 1000, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    seen = (ids[:, :, None] == ids[:, None])[:, None]
    if causal:
        seen = seen & torch.ones(1000, 1000, dtype=torch.bool, device="cuda").tril()
    assert explain(query, key, value, mask=sparse).variant is not None
    expected = formula(query, key, value, seen)
    torch.testing.assert_close(attention(query, key, value, mask=sparse).double(), expected, rtol=1e-2, atol=5e-3)
