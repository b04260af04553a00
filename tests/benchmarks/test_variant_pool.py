"""Variants worth a measurement pack as many heads into a tile as have room for all their queries."""

from __future__ import annotations

import pytest
import variant_pool

from autoattn.codegen import search_space
from autoattn.core import device_profiles
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Problem

H200 = device_profiles.named("h200")


def problem_of(heads_q: int, seq_q: int) -> Problem:
    return Problem(
        dtype=DType.BFLOAT16, batch=64, heads_q=heads_q, heads_kv=8, seq_q=seq_q, seq_kv=4096,
        head_dim=128, head_dim_v=128, mask=Mask.parse("causal"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("group_size", "seq_q", "packs"),
    [
        pytest.param(1, 64, set(), id="heads-share-no-keys"),
        pytest.param(5, 64, {2}, id="a-tile-of-128-rows-holds-two-heads"),
        pytest.param(8, 33, {2, 4}, id="a-tile-of-192-rows-holds-four-heads"),
        pytest.param(5, 50, {4, 8}, id="four-small-tiles-hold-all-heads"),
        pytest.param(5, 100, set(), id="no-tile-holds-two-heads"),
    ],
)
def test_the_pool_packs_heads_whose_queries_fit_a_tile(group_size: int, seq_q: int, packs: set[int]) -> None:
    problem = problem_of(8 * group_size, seq_q)
    seeds = search_space.load(variant_pool.GLUON).seeds_for(problem, H200)
    pool = [each for each in variant_pool.pool(problem, H200) if each.template == variant_pool.GLUON]
    assert {each.as_dict().get("PACK_GQA", 1) for each in pool if each not in seeds} - {1} == packs
