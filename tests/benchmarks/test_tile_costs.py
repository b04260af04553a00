"""What measured times say of a tile and of each of its blocks of keys."""

from __future__ import annotations

import pytest
import samples
import tile_costs
from portfolio_examples import Example

from autoattn.codegen import search_space
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Problem
from autoattn.core.variant import Variant

SPACE = search_space.load("gluon/forward")
BEGIN_US, BLOCK_US = 8.0, 0.5


def problem_of(length: int) -> Problem:
    """Half as many tiles of 64 rows as an H200 has SMs, whatever the length."""
    return samples.problem(
        batch=1, heads_q=66 * 64 // length, heads_kv=1, seq_q=length, seq_kv=length, head_dim=128,
        dtype=DType.BFLOAT16, mask=Mask.parse("causal"),
    )  # fmt: skip


def tile(schedule: str = "one_tile") -> Variant:
    seed = SPACE.seeds_for(problem_of(704), samples.H200)[0].as_dict()
    return SPACE.variant({**seed, "BLOCK_M": 64, "BLOCK_N": 64, "CTAS": 1, "HEAD_SPLIT": 0, "schedule": schedule})


def example(length: int, variant: Variant) -> Example:
    time_us = BEGIN_US + BLOCK_US * -(-length // 64)
    return Example(problem=problem_of(length), device=samples.H200, times_us={variant: time_us}, rivals_us={})


LENGTHS = 384, 704, 768, 1056, 1408, 2112, 4224


def test_times_are_taken_apart_into_what_a_tile_and_what_each_of_its_blocks_takes() -> None:
    rows = tile_costs.table([example(length, tile()) for length in LENGTHS])[2:]
    assert rows == [f"| 128 | 64 x 64 | 1 | causal | {len(LENGTHS)} | {BEGIN_US} | {BLOCK_US:.2f} |"]
    assert tile_costs.costs([5.0, 10.0, 40.0], [12.0, 14.0, 26.0]) == pytest.approx((10.0, 0.4))


def test_programs_that_take_several_tiles_and_tiles_that_do_not_run_at_once_say_nothing() -> None:
    assert not list(tile_costs.longest(example(4224, tile("persistent"))))
    many = samples.problem(batch=8, heads_q=8, heads_kv=8, seq_q=4096, seq_kv=4096, head_dim=128, dtype=DType.BFLOAT16)
    long = Example(problem=many, device=samples.H200, times_us={tile(): 100.0}, rivals_us={})
    assert not list(tile_costs.longest(long))
