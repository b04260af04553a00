"""The calls of the benchmark of generation on caches: rows, their bytes, and that contestants compute the same."""

from __future__ import annotations

from dataclasses import replace

import cache_calls
import pytest
import torch
from torch.nn.attention import SDPBackend

SMALL = cache_calls.Row(batch=2, heads=(4, 2), keys=40, goal="none")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_calls, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(cache_calls, "HEAD_DIM", 16)


def test_each_row_has_a_name_of_its_own() -> None:
    assert len({str(row) for row in cache_calls.ROWS}) == len(cache_calls.ROWS)


def test_a_row_counts_the_keys_that_must_be_read() -> None:
    queries = 2 * 2 * 4 * 16 * 2
    assert SMALL.bytes() == 2 * 2 * 40 * 2 * 16 * 2 + queries
    assert replace(SMALL, float8=True).bytes() == 2 * 2 * 40 * 2 * 16 + queries
    assert replace(SMALL, prefix=32).bytes() == 2 * (2 * 40 - 32) * 2 * 16 * 2 + queries
    latent = replace(SMALL, heads=(4, 1), latent=True)
    assert latent.bytes() == 2 * 40 * 576 * 2 + 2 * 4 * (576 + 512) * 2
    assert replace(SMALL, lengths="7,uniform:3-3").bytes() == 2 * 10 * 2 * 16 * 2 + queries


def test_a_shared_prefix_meets_the_same_call_without_it() -> None:
    row = replace(SMALL, page=8, prefix=16)
    tensors = cache_calls.Tensors.of(row)
    assert tensors.table is not None
    assert torch.equal(tensors.table[0, :2], tensors.table[1, :2])
    calls = {name: make(tensors) for name, make in cache_calls.contestants(row).items()}
    assert list(calls) == [cache_calls.OWN, cache_calls.ONE_LEVEL]
    torch.testing.assert_close(*(call() for call in calls.values()), rtol=2e-2, atol=2e-2)


def test_peers_of_pytorch_compute_the_same_on_contiguous_caches_of_one_length() -> None:
    tensors = cache_calls.Tensors.of(SMALL)
    expected = cache_calls.own(SMALL, tensors)()
    output = cache_calls.by_sdpa(SDPBackend.MATH, tensors)()
    assert cache_calls.error_of(output, expected.float()) < cache_calls.ALLOWED
    assert "SDPA, flash" in cache_calls.contestants(SMALL)
    assert "SDPA, flash" not in cache_calls.contestants(replace(SMALL, page=8))
    assert "SDPA, flash" not in cache_calls.contestants(replace(SMALL, queries=2))


def test_sequences_of_unequal_lengths_have_the_pages_that_they_need() -> None:
    row = replace(SMALL, page=16, lengths="40,uniform:3-3")
    tensors = cache_calls.Tensors.of(row)
    assert tensors.key.shape[:2] == (3 + 1, 16)
    assert tensors.lengths.tolist() == [40, 3]
    output = cache_calls.own(row, tensors)()
    assert output.isfinite().all()


@pytest.mark.parametrize(
    "row",
    [
        SMALL,
        replace(SMALL, page=16, queries=4),
        replace(SMALL, page=16, float8=True, lengths="40,uniform:3-3"),
        replace(SMALL, page=8, prefix=16),
        replace(SMALL, heads=(4, 1), page=16, latent=True, float8=True, queries=2),
    ],
    ids=str,
)
def test_a_right_answer_is_near_float32_and_one_without_a_sequence_s_last_page_is_not(row: cache_calls.Row) -> None:
    tensors = cache_calls.Tensors.of(row)
    right = cache_calls.expected(row, tensors)
    assert right.shape == (2, row.queries, 4, row.head_dim_v)
    assert cache_calls.error_of(cache_calls.own(row, tensors)(), right) < cache_calls.ALLOWED / 2
    tensors.lengths[0] -= row.page or 16
    assert cache_calls.error_of(cache_calls.own(row, tensors)(), right) > 10 * cache_calls.ALLOWED


def test_an_answer_that_is_not_finite_is_wrong() -> None:
    right = torch.ones(2, 1, 4, 16)
    output = right.clone()
    output[1, 0, 3, 5] = torch.nan
    assert cache_calls.error_of(output, right) == float("inf")


def test_peers_may_leave_out_the_axis_of_one_query_or_have_it_elsewhere() -> None:
    right = torch.rand(2, 1, 4, 16)
    assert cache_calls.error_of(right[:, 0], right) == cache_calls.error_of(right.transpose(1, 2), right) == 0.0


def test_a_latent_row_gives_views_of_its_keys_as_values() -> None:
    row = replace(SMALL, heads=(4, 1), page=16, latent=True)
    tensors = cache_calls.Tensors.of(row)
    assert tensors.value.data_ptr() == tensors.key.data_ptr()
    assert cache_calls.own(row, tensors)().shape == (2, 1, 4, 512)
