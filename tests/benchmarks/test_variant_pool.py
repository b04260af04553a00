"""The pool of variants that are worth a measurement on a problem."""

from __future__ import annotations

from dataclasses import replace

import drawn_calls
import portfolios
import pytest
import samples
import variant_pool

from autoattn.codegen import head_order, search_space
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Op, Precision, Problem

H200 = samples.H200


def test_the_pool_is_feasible_and_begins_with_seeds_of_the_problem() -> None:
    for problem in drawn_calls.draw(portfolios.RESERVED, 6):
        pool = variant_pool.pool(problem, H200)
        spaces = {space.template: space for space in search_space.of(Op.FORWARD)}
        seeds = [seed for space in spaces.values() for seed in space.seeds_for(problem, H200)]
        assert pool[0] in [head_order.suiting(seed, problem, H200) for seed in seeds]
        assert len(set(pool)) == len(pool) >= 12
        assert all(spaces[each.template].why_infeasible(each, problem, H200) is None for each in pool)


def test_few_queries_have_variants_that_share_the_keys_of_a_head() -> None:
    pool = variant_pool.pool(samples.problem(seq_q=1, seq_kv=60_000), H200)
    assert {each.as_dict().get("SPLITS", 1) for each in pool if each.template == "triton/forward"} >= {1, 4, 16, 64}


def test_few_tiles_have_variants_whose_parts_are_added_up_at_once() -> None:
    decode = samples.problem(batch=1, heads_q=4, heads_kv=1, seq_q=1, seq_kv=60_000)
    params = [variant.as_dict() for variant in variant_pool.pool(decode, H200)]
    ways = {(each.get("parts_read"), each["SPLITS"]) for each in params if each.get("SPLITS", 1) > 1}
    assert {("by_rows", 64), ("by_rows", 128), ("by_groups", 64)} <= ways
    many = samples.problem(batch=64, heads_q=32, heads_kv=32, seq_q=1, seq_kv=60_000)
    assert not any(variant.as_dict().get("parts_read") for variant in variant_pool.pool(many, H200))


def test_few_tiles_of_many_rows_have_variants_that_fill_the_sms_and_many_tiles_have_none() -> None:
    few = samples.problem(
        batch=1, heads_q=2, heads_kv=1, seq_q=100, seq_kv=60_000, head_dim=112, mask=Mask.parse("causal")
    )
    params = [variant.as_dict() for variant in variant_pool.pool(few, H200)]
    ways = {(each["BLOCK_M"], each.get("SPLITS", 1), each.get("parts_read")) for each in params}
    assert {(64, 4, None), (64, 32, "by_groups"), (64, 64, "by_groups")} <= ways
    many = samples.problem(batch=8, heads_q=32, heads_kv=32, seq_q=4096, seq_kv=4096)
    alone = [each.as_dict() for each in variant_pool.pool(many, H200) if each.template == "triton/forward"]
    assert {each.get("SPLITS", 1) for each in alone} == {1}


def test_the_pool_has_the_order_of_heads_that_suits_a_mask() -> None:
    def ways(mask: str) -> set[tuple[object, ...]]:
        prompt = samples.problem(heads_q=32, heads_kv=32, seq_q=4096, seq_kv=4096, mask=Mask.parse(mask))
        pool = variant_pool.pool(prompt, H200)
        params = [each.as_dict() for each in pool if each.template == "gluon/forward"]
        names = ("schedule", "query_stages", "HEAD_GROUP", "softmax")
        return {tuple(each[name] for name in names) for each in params}

    assert {("dynamic", 2, 4, "vote"), ("dynamic", 2, 4, "first_max")} <= ways("causal")
    assert ("dynamic", 2, 1, "vote") in ways("full") - ways("causal")


def test_programs_that_take_several_tiles_have_consumers_that_take_turns() -> None:
    """Of 60 variants for 64 queries of 10/2 heads on 2,582 keys such ones were the fastest: 95 us, 107 without."""
    full = samples.problem(heads_q=64, heads_kv=64, seq_q=4096, seq_kv=4096)
    params = [each.as_dict() for each in variant_pool.pool(full, H200) if each.template == "gluon/forward"]
    ways = {(each["schedule"], each["softmax"]) for each in params if each["ping_pong"] == "named"}
    assert {(schedule, softmax) for schedule in ("persistent", "dynamic") for softmax in ("vote", "first_max")} <= ways


def test_tiles_of_128_rows_have_one_consumer_of_eight_warps_beside_two_of_four() -> None:
    prompt = samples.problem(heads_q=32, heads_kv=32, seq_q=4096, seq_kv=4096, mask=Mask.parse("causal"))
    params = [each.as_dict() for each in variant_pool.pool(prompt, H200) if each.template == "gluon/forward"]
    paired = [each for each in params if each.get("WARPGROUPS") == 2]
    assert {each["BLOCK_M"] for each in paired} == {128}
    assert {(each["BLOCK_N"], each["v_wait"]) for each in paired} >= {(64, "early"), (64, "late"), (128, "late")}
    apart = [{name: value for name, value in each.items() if name != "WARPGROUPS"} for each in paired]
    assert all(each in params for each in apart if each["v_wait"] == "late")


def test_keys_of_one_block_have_kernels_of_one_stage_and_more_keys_have_none() -> None:
    """Tuning found them for 33 tokens, where the pool of before had none."""

    def ways(length: int) -> set[tuple[object, ...]]:
        pool = variant_pool.pool(samples.problem(batch=2, heads_q=8, seq_q=length, seq_kv=length, head_dim=128), H200)
        params = [each.as_dict() for each in pool if each.template == "gluon/forward"]
        return {(each["BLOCK_N"], each["queries_in"], each["softmax"]) for each in params if each["num_stages"] == 1}

    assert {(64, "registers", "online"), (64, "registers", "lazy"), (64, "shared", "online")} <= ways(33)
    assert (64, "registers", "online") not in ways(300)


def test_many_tiles_on_keys_of_one_block_have_programs_that_take_several_and_more_keys_have_none() -> None:
    """Tuning found them for 17 to 66 keys, where the pools of before had none."""

    def ways(length: int) -> set[tuple[object, ...]]:
        problem = samples.problem(batch=32, heads_q=32, heads_kv=32, seq_q=length, seq_kv=length, head_dim=128)
        params = [each.as_dict() for each in variant_pool.pool(problem, H200) if each.template == "gluon/forward"]
        names = "BLOCK_N", "num_stages", "softmax", "schedule", "query_stages"
        return {tuple(each[name] for name in names) for each in params}

    several_tiles = {(64, 2, softmax, "persistent", 2) for softmax in ("online", "lazy")}
    assert several_tiles <= ways(33)
    assert not several_tiles & ways(300)


def test_float32_has_kept_maxima_and_where_queries_are_fewer_than_a_tile_has_rows_packed_heads() -> None:
    tf32 = samples.problem(
        dtype=DType.FLOAT32, precision=Precision.TF32, heads_q=32, heads_kv=4, seq_q=64, seq_kv=1919, head_dim=64
    )

    def ways(problem: Problem) -> set[tuple[object, ...]]:
        params = [each.as_dict() for each in variant_pool.pool(problem, H200) if each.template == "triton/forward"]
        return {(each.get("PACK_GQA", 0), each["softmax"]) for each in params}

    assert {(0, "online"), (0, "first_max"), (1, "online"), (1, "first_max")} <= ways(tf32)
    assert {pack for pack, _ in ways(replace(tf32, seq_q=1919))} == {0}


def test_few_rows_have_tiles_of_all_heads_that_share_keys_and_of_half_of_them() -> None:
    """Of 17 queries in groups of four, the fastest kernel of an H100 had two heads in a tile."""
    pool = variant_pool.pool(samples.problem(batch=32, heads_q=32, heads_kv=8, seq_q=17, seq_kv=17, head_dim=192), H200)
    assert {each.as_dict().get("PACK_GQA", 1) for each in pool if each.template == "gluon/forward"} >= {1, 2, 4}


@pytest.mark.parametrize(
    ("group_size", "seq_q", "mask", "packs"),
    [
        pytest.param(1, 64, "causal", set(), id="heads-share-no-keys"),
        pytest.param(5, 64, "causal", {2, 8}, id="a-tile-of-128-rows-holds-two-heads"),
        pytest.param(8, 33, "causal", {2, 4, 8}, id="a-tile-of-192-rows-holds-four-heads"),
        pytest.param(5, 50, "causal", {4, 8}, id="four-small-tiles-hold-all-heads"),
        pytest.param(5, 100, "full", {8}, id="few-queries-share-tiles-with-all-heads"),
        pytest.param(5, 300, "full", set(), id="no-tile-holds-two-heads"),
        pytest.param(8, 2048, "causal", {2, 4}, id="fewer-queries-have-fewer-pairs-hidden"),
        pytest.param(2, 2048, "window:1023,0", {2}, id="fewer-queries-have-a-narrower-window"),
    ],
)
def test_tiles_have_as_many_heads_that_share_keys_as_they_hold(
    group_size: int, seq_q: int, mask: str, packs: set[int]
) -> None:
    problem = samples.problem(
        batch=64, heads_q=8 * group_size, heads_kv=8, seq_q=seq_q, seq_kv=4096, mask=Mask.parse(mask)
    )
    seeds = search_space.load("gluon/forward").seeds_for(problem, H200)
    pool = [each for each in variant_pool.pool(problem, H200) if each.template == "gluon/forward"]
    assert {each.as_dict().get("PACK_GQA", 1) for each in pool if each not in seeds} - {1} == packs
