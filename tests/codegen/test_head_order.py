"""In which order tiles start where rows differ in length: how many heads stand side by side."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import samples

from autoattn.codegen import head_order, portfolio, search_space
from autoattn.codegen.head_order import ALL, GROUP, HeadOrders
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Layout, Op, Problem
from autoattn.core.variant import Variant

H200, A30 = samples.H200, samples.A30
CAUSAL = samples.problem(batch=3, heads_q=2, heads_kv=2, seq_q=16384, seq_kv=16384, head_dim=40)
ALONE, PACKED = (
    next(
        seed
        for seed in search_space.load("gluon/forward").seeds_for(samples.problem(seq_q=64), H200)
        if seed.as_dict().get("PACK_GQA") == packed
    )
    for packed in (None, 4)
)


def side_by_side(problem: Problem, heads_of_tile: int = 1) -> int:
    return head_order.heads_side_by_side(problem, H200, heads_of_tile)


def bytes_together(problem: Problem, group: int) -> int:
    """Keys and values of so many heads next to one another."""
    heads = group or problem.batch * problem.heads_q
    return problem.bytes_of_keys * -(-heads // problem.group_size) // (problem.batch * problem.heads_kv)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, ALL),
        ({"batch": 64}, 4),
        ({"seq_q": 131072, "seq_kv": 131072}, 1),
        ({"heads_q": 64, "heads_kv": 64, "seq_q": 8192, "seq_kv": 8192}, 16),
        ({"heads_q": 64, "heads_kv": 64, "seq_q": 8192, "seq_kv": 8192, "dtype": DType.FLOAT32}, 4),
        ({"batch": 1, "heads_q": 1, "heads_kv": 1}, 1),
    ],
)
def test_as_many_heads_stand_side_by_side_as_half_of_the_l2_holds(facts: dict[str, Any], expected: int) -> None:
    problem = replace(CAUSAL, **facts)
    assert side_by_side(problem) == expected
    limit = head_order.L2_SHARE * H200.l2_bytes
    larger = [group for group in (ALL, 16, 4) if (group or 1 << 30) > (expected or 1 << 30)]
    assert expected == 1 or bytes_together(problem, expected) <= limit
    heads = problem.batch * problem.heads_q
    assert all(heads == 1 or group >= heads or bytes_together(problem, group) > limit for group in larger)


def test_heads_that_share_keys_count_once_and_heads_of_a_tile_are_a_team() -> None:
    apart = replace(CAUSAL, batch=4, heads_q=32, heads_kv=32)
    shared = replace(apart, heads_kv=2)
    assert (side_by_side(apart), side_by_side(shared)) == (4, ALL)
    # 16 teams of 4 heads each read the keys of 16 heads, and 16 heads those of 4
    few = replace(apart, batch=32, heads_kv=8, seq_q=2048, seq_kv=2048, head_dim=256, head_dim_v=256)
    assert (side_by_side(few, 1), side_by_side(few, 4)) == (16, 4)


def test_rows_that_are_equally_long_keep_the_order_that_was_measured() -> None:
    for mask in ("full", "window:127,0", "causal:bottom-right"):
        problem = replace(CAUSAL, mask=Mask.parse(mask), seq_q=256)
        assert not head_order.is_uneven(problem)
        assert HeadOrders([ALONE]).at([0], problem, H200) == (ALONE,)
    assert head_order.is_uneven(replace(CAUSAL, mask=Mask.parse("causal:bottom-right"), seq_q=8192))
    packed = replace(CAUSAL, layout=Layout.PACKED, tokens_q=16384, tokens_kv=16384)
    assert not head_order.is_uneven(packed), "its tiles lie in an order of their own"


def test_variants_that_differ_in_their_order_alone_become_one_and_keep_the_better_place() -> None:
    four = head_order.in_order(ALONE, 4)
    orders = HeadOrders([PACKED, four, ALONE])
    assert orders.at([1, 0, 2], replace(CAUSAL, mask=Mask()), H200) == (four, PACKED, ALONE)
    assert orders.at([1, 0, 2], CAUSAL, H200) == (head_order.in_order(ALONE, ALL), head_order.in_order(PACKED, ALL))


def test_a_template_without_the_parameter_keeps_its_order() -> None:
    variant = Variant.of("latent/forward", {"BLOCK_M": 64})
    assert head_order.in_order(variant, 4) == variant


def makespan(heads: int, group: int) -> int:
    """Blocks of 128 keys until the last tile of 192 causal rows of CAUSAL is done, on all SMs."""
    rows = range(-(-CAUSAL.seq_q // 192), 0, -1)
    order = [
        -(-min(CAUSAL.seq_kv, 192 * row) // 128)
        for first in range(0, heads, group)
        for row in rows
        for _ in range(first, min(first + group, heads))
    ]
    ready = [0] * H200.sm_count
    for blocks in order:
        heapq.heapreplace(ready, ready[0] + blocks)
    return max(ready)


def test_long_tiles_of_all_heads_first_are_done_sooner_than_one_head_after_another() -> None:
    heads = CAUSAL.batch * CAUSAL.heads_q
    assert makespan(heads, heads) < 0.85 * makespan(heads, 1)


def drawn() -> Iterator[Problem]:
    for heads_q, heads_kv in ((1, 1), (5, 1), (16, 16), (64, 8)):
        for seq in (300, 1000, 3000):
            for dtype in (DType.BFLOAT16, DType.FLOAT32):
                yield samples.problem(
                    batch=2, heads_q=heads_q, heads_kv=heads_kv, seq_q=seq, seq_kv=seq, head_dim=64, dtype=dtype
                )


@pytest.mark.parametrize("device", [H200, A30], ids=lambda device: device.name)
def test_the_order_takes_no_variant_from_a_problem_that_could_run_it(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = portfolio.load(Op.FORWARD)
    for problem in drawn():
        to_run = shipped.ranked(problem, device)
        with monkeypatch.context() as patch:
            patch.setattr(head_order, "is_uneven", lambda problem: False)
            raw = shipped.ranked(problem, device)
        measured = dict.fromkeys(head_order.in_order(each, 1) for each in raw)
        able = [each for each in measured if portfolio.is_feasible(each, problem, device)]
        running = [each for each in to_run if portfolio.is_feasible(each, problem, device)]
        assert [head_order.in_order(each, 1) for each in running] == able


def test_calls_begin_with_the_order_that_suits_them() -> None:
    default = portfolio.default(CAUSAL, H200)
    assert default[GROUP] == ALL
    assert default in portfolio.starters_for(CAUSAL, H200)
    assert all(each[GROUP] == ALL for each in portfolio.variants_for(CAUSAL, H200))
