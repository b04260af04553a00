"""What measured times say of the height of tiles."""

from __future__ import annotations

import samples
import tile_heights
from portfolio_examples import Example

from autoattn.codegen import search_space
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Problem
from autoattn.core.variant import Variant

SPACE = search_space.load("gluon/forward")
PROBLEM = samples.problem(dtype=DType.BFLOAT16, seq_q=4096, seq_kv=4096, head_dim=120, mask=Mask.parse("causal"))
SEED = SPACE.seeds_for(PROBLEM, samples.H200)[0].as_dict()


def tile(rows: int, **changed: int) -> Variant:
    return SPACE.variant({**SEED, "BLOCK_M": rows, "BLOCK_N": 64, "HEAD_SPLIT": 0, **changed})


def example(times_us: dict[Variant, float], problem: Problem = PROBLEM) -> Example:
    return Example(problem=problem, device=samples.H200, times_us=times_us, rivals_us={})


def test_the_best_tiles_of_one_head_are_compared() -> None:
    times_us = {tile(64): 15.0, tile(128): 10.0, tile(128, num_stages=3): 11.0, tile(64, PACK_GQA=2): 5.0}
    assert tile_heights.ratio(example(times_us)) == 1.5
    assert tile_heights.ratio(example({tile(64): 15.0})) is None


def test_a_row_has_the_median_of_enough_long_problems() -> None:
    long = [example({tile(64): time_us, tile(128): 10.0}) for time_us in (11.0, 12.0, 15.0, 16.0, 17.0)]
    short = example({tile(64): 99.0, tile(128): 10.0}, samples.problem(dtype=DType.BFLOAT16, seq_q=64, seq_kv=64))
    assert tile_heights.table([*long, short])[2:] == ["| 120 | 2.2 | causal | 5 | 1.50 |"]
    assert tile_heights.table([*long[1:], short])[2:] == []
