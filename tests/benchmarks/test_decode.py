"""The benchmark of generation on caches: its rows, their bytes, and that contestants compute the same."""

from __future__ import annotations

from dataclasses import replace

import decode
import pytest
import torch
from torch.nn.attention import SDPBackend

SMALL = decode.Row(batch=2, heads=(4, 2), keys=40, goal="none")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(decode, "HEAD_DIM", 16)


def test_each_row_has_a_name_of_its_own() -> None:
    assert len({str(row) for row in decode.ROWS}) == len(decode.ROWS)


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
    tensors = decode.Tensors.of(row)
    assert tensors.table is not None
    assert torch.equal(tensors.table[0, :2], tensors.table[1, :2])
    calls = {name: make(tensors) for name, make in decode.contestants(row).items()}
    assert list(calls) == [decode.OWN, decode.ONE_LEVEL]
    torch.testing.assert_close(*(call() for call in calls.values()), rtol=2e-2, atol=2e-2)


def test_peers_of_pytorch_compute_the_same_on_contiguous_caches_of_one_length() -> None:
    tensors = decode.Tensors.of(SMALL)
    expected = decode.own(SMALL, tensors)()
    output = decode.by_sdpa(SDPBackend.MATH, tensors)()
    torch.testing.assert_close(output.transpose(1, 2), expected, rtol=2e-2, atol=2e-2)
    assert "SDPA, flash" in decode.contestants(SMALL)
    assert "SDPA, flash" not in decode.contestants(replace(SMALL, page=8))
    assert "SDPA, flash" not in decode.contestants(replace(SMALL, queries=2))


def test_sequences_of_unequal_lengths_have_the_pages_that_they_need() -> None:
    row = replace(SMALL, page=16, lengths="40,uniform:3-3")
    tensors = decode.Tensors.of(row)
    assert tensors.key.shape[:2] == (3 + 1, 16)
    assert tensors.lengths.tolist() == [40, 3]
    output = decode.own(row, tensors)()
    assert output.isfinite().all()


def test_a_latent_row_gives_views_of_its_keys_as_values() -> None:
    row = replace(SMALL, heads=(4, 1), page=16, latent=True)
    tensors = decode.Tensors.of(row)
    assert tensors.value.data_ptr() == tensors.key.data_ptr()
    assert decode.own(row, tensors)().shape == (2, 1, 4, 512)


def test_the_summary_names_the_worst_row_and_the_ratio_of_several_queries() -> None:
    one, several = str(decode.ROWS[0]), next(str(row) for row in decode.ROWS if row.queries == 4)
    medians = {one: {decode.OWN: 100.0, "FlashInfer": 110.0}, several: {decode.OWN: 105.0, "FlashInfer": 105.0}}
    lines = list(decode.summary(medians))
    assert "1.049 times as long, at least 1.000" in lines[0]
    assert lines[1] == "4 queries take 1.050 times one query."
