"""Verification on a real card: an entry of today holds, and one that claims or computes something else does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernels
import pytest
import samples
from planted_kernels import FAULTS

from autoattn.codegen import render
from autoattn.core.cache_entry import KERNEL, CacheEntry, Candidate, Finding
from autoattn.core.device import Device
from autoattn.core.problem import DType
from autoattn.hardware import nvidia
from autoattn.search import search_options, tuner
from autoattn.tools import verify

pytestmark = pytest.mark.gpu

PROBLEM = kernels.problem(
    dtype=DType.BFLOAT16, batch=4, heads_q=16, heads_kv=16, seq_q=2048, seq_kv=2048, head_dim=64, mask="causal"
)
SLOW = kernels.variant(BLOCK_M=16, BLOCK_N=16, num_warps=1, num_stages=1)


@pytest.fixture(scope="module")
def card() -> Device:
    device = nvidia.present()
    assert device is not None
    return device


@pytest.fixture(scope="module")
def entry(card: Device, tmp_path_factory: pytest.TempPathFactory) -> CacheEntry:
    options = search_options.Options(
        effort=search_options.Effort.QUICK, trials=6, cache=tmp_path_factory.mktemp("cache")
    )
    return tuner.tune([PROBLEM], card, measured=True, options=options).entries[PROBLEM.key]


def verified(entry: CacheEntry, card: Device) -> verify.Verification:
    (verification,) = verify.verify([entry], card)
    return verification


def with_kernel(entry: CacheEntry, **changes: Any) -> CacheEntry:
    """The entry with another kernel, whose text is today's."""
    entry = replace(entry, template=kernels.TEMPLATE, params=SLOW.as_dict(), choice=KERNEL, finals=None, **changes)
    return samples.current(entry)


def test_an_entry_of_today_holds(entry: CacheEntry, card: Device) -> None:
    verification = verified(entry, card)
    assert verification.ok, verification
    assert verification.mark is None
    assert "right and the fastest" in verification.detail or verification.finding is Finding.FASTER


def test_an_entry_that_claims_half_its_time_is_slower(entry: CacheEntry, card: Device) -> None:
    assert entry.measurement is not None
    half = replace(entry.measurement, median_us=entry.measurement.median_us / 2)
    rivals = tuple(
        replace(rival, measurement=replace(rival.measurement, median_us=rival.measurement.median_us / 2))
        for rival in entry.rivals
    )
    verification = verified(replace(entry, measurement=half, rivals=rivals), card)
    assert verification.finding is Finding.SLOWER, verification
    assert verification.mark is not None


def test_a_slow_winner_is_overtaken_by_its_runner_up_or_a_rival(entry: CacheEntry, card: Device) -> None:
    runner_up = Candidate(
        template=entry.template, params=entry.params, source_digest=entry.source_digest, time_us=entry.time_us
    )
    verification = verified(with_kernel(entry, candidates=(runner_up,)), card)
    assert verification.finding is Finding.OVERTAKEN, verification
    assert "is faster by" in verification.detail


def test_a_kernel_that_computes_something_else_is_wrong(
    entry: CacheEntry, card: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS["sees one key too many at the diagonal"]
    monkeypatch.setattr(render, "render", fault.renderer(lambda variant: variant == SLOW))
    verification = verified(with_kernel(entry, candidates=()), card)
    assert verification.finding is Finding.WRONG, verification
    assert verification.mark is not None
    assert verification.mark.holds_back
