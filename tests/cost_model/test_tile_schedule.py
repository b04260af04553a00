"""How a problem's work falls into tiles, and when the last program ends."""

from dataclasses import replace

import numpy as np
import pytest
from modelled import problem

from autoattn.core.key_cache import KeyCache
from autoattn.core.problem import Layout
from autoattn.core.sequence_lengths import KeyLengths
from autoattn.cost_model import tile_schedule

MASKS = ["full", "causal", "causal:top-left", "window:40,-1", "window:-1,20", "window:70,0", "window:3,100"]


def walked(of, seq_q, seq_kv, block_m, block_n):
    """(blocks that all rows of a tile see whole, blocks between the first and the last key of some row) by tile."""
    first, last = of.band(seq_q, seq_kv)
    blocks = []
    for start in range(0, seq_q, block_m):
        # A tile's last rows may lie beyond the problem; they see what rows there would.
        rows, keys = np.arange(start, start + block_m)[:, None], np.arange(seq_kv)[None, :]
        kept = np.ones((block_m, seq_kv), bool)
        kept &= (keys <= rows + last) if last is not None else True
        kept &= (keys >= rows + first) if first is not None else True
        columns = [kept[:, n : n + block_n] for n in range(0, seq_kv, block_n)]
        seen = [place for place, column in enumerate(columns) if column.any()]
        whole = sum(column.shape[1] == block_n and column.all() for column in columns)
        blocks.append((whole, seen[-1] + 1 - seen[0] if seen else 0))
    return blocks


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(256, 256), (100, 300), (300, 100), (130, 70)])
@pytest.mark.parametrize(("block_m", "block_n"), [(64, 32), (32, 64), (16, 16)])
def test_blocks_of_keys_are_those_that_a_walk_over_every_score_finds(mask, seq_q, seq_kv, block_m, block_n):
    of = problem(mask, seq_q=seq_q, seq_kv=seq_kv)
    expected = walked(of, seq_q, seq_kv, block_m, block_n)
    plain, masked = tile_schedule.key_blocks(of, block_m, block_n, "split")
    assert plain.tolist() == [whole for whole, _ in expected]
    assert (plain + masked).tolist() == [needed for _, needed in expected]
    every, none = tile_schedule.key_blocks(of, block_m, block_n, "every")
    assert every.tolist() == [needed for _, needed in expected]
    assert not none.any()


@pytest.mark.parametrize("mask", ["full", "causal", "window:40,0"])
def test_tiles_of_packed_sequences_stand_where_the_kernel_looks_for_them(mask):
    facts = {"layout": Layout.PACKED, "batch": 5, "seq_q": 100, "seq_kv": 130, "tokens_q": 260, "tokens_kv": 300}
    of = problem(mask, **facts)
    plain, masked = tile_schedule.key_blocks(of, 32, 16, "split")
    assert len(plain) == 260 // 32 + 5 + 1
    begin, expected = 0, np.zeros((len(plain), 2))
    for place, (seq_q, seq_kv) in enumerate(of.lengths()):
        for tile, counts in enumerate(walked(of, seq_q, seq_kv, 32, 16)):
            expected[begin // 32 + place + tile] = counts
        begin += seq_q
    assert plain.tolist() == expected[:, 0].tolist()
    assert (plain + masked).tolist() == expected[:, 1].tolist()
    assert tile_schedule.heads_of(of) == of.heads_q


def test_tiles_of_a_block_table_walk_the_share_that_it_keeps():
    of = problem("blocks:128x64,0.25", seq_q=1000, seq_kv=4096)
    plain, masked = tile_schedule.key_blocks(of, 64, 32, "split")
    assert plain.tolist() == [0.25 * 64 * 2] * 16
    assert not masked.any()
    cut = replace(of, mask=replace(of.mask, mod="q_idx >= kv_idx"))
    assert [part[0] for part in tile_schedule.key_blocks(cut, 64, 32, "split")] == [16.0, 16.0]


def makespan(costs, heads, slots, *, descending=True, group=1, slowdown=lambda left: 1.0):
    return tile_schedule.makespan(
        np.array(costs, float), heads, group, descending=descending, slots=slots, slowdown=slowdown
    )


def test_equal_tiles_run_in_whole_waves():
    assert makespan([5.0] * 8, 4, 16) == 10.0
    assert makespan([5.0] * 8, 5, 16) == 15.0
    assert makespan([5.0], 1, 16) == 5.0
    assert makespan([5.0] * 8, 5, 16, slowdown=lambda left: 0.5) == 12.5  # the thin last wave runs faster


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("descending", [True, False])
def test_unequal_tiles_end_between_the_bounds_of_list_scheduling(group, descending):
    costs, slots = [float(n) for n in range(1, 33)], 24
    total = sum(costs) * 8 / slots
    assert total <= makespan(costs, 8, slots, descending=descending, group=group) <= total + max(costs)


def test_longest_rows_first_end_no_later():
    costs = [float(n) for n in range(1, 33)]
    assert makespan(costs, 8, 24, group=8) < makespan(costs, 8, 24, group=8, descending=False)


def test_dealt_tiles_take_as_long_as_the_program_with_most_of_them():
    dealt = tile_schedule.dealt_makespan(np.array([3.0, 1.0]), 4, 1, descending=False, programs=3, slots=3)
    assert dealt == 7.0  # 3 1 3 1 3 1 3 1 dealt to three: 3+1+3, 1+3+1, 3+1


def test_the_program_with_most_work_counts_wherever_it_is():
    """Four heads dealt together: of eight programs the second four have the long rows alone."""
    dealt = tile_schedule.dealt_makespan(np.array([1.0, 5.0]), 8, 4, descending=False, programs=8, slots=8)
    assert dealt == 10.0


def test_persistent_programs_that_do_not_fit_at_once_run_one_after_another():
    dealt = tile_schedule.dealt_makespan(np.array([2.0]), 8, 1, descending=False, programs=4, slots=2)
    assert dealt == 8.0  # two tiles each, two programs in turn


# --- shared tiles and packed heads ------------------------------------------------------------------------------------


def test_the_programs_that_share_a_tile_walk_its_blocks_in_equal_parts():
    plain, masked = tile_schedule.shared(np.array([0.0, 3.0, 6.0, 15.0]), np.array([1.0, 1.0, 2.0, 1.0]), 4)
    assert plain.tolist() == [0.0, 3.0, 3.0, 3.0, *[3.75] * 4]
    assert masked.tolist() == [1.0, 1.0, 1.0, 1.0, *[0.25] * 4]


def test_a_tile_is_shared_by_no_more_programs_than_it_has_blocks():
    plain, _ = tile_schedule.shared(np.array([2.0, 2.0, 0.0]), np.zeros(3), 8)
    assert plain.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("mask", MASKS)
def test_a_tile_of_packed_heads_walks_what_its_queries_see(mask):
    of = problem(mask, seq_q=100, seq_kv=300, heads_q=6, heads_kv=2)
    plain, masked = tile_schedule.key_blocks(of, 64, 32, "split", 3)
    assert len(plain) == -(-300 // 64)
    assert tile_schedule.heads_of(of, 3) == of.batch * 2
    for tile, blocks in enumerate((plain + masked).tolist()):
        first, last = tile * 64 // 3, min((tile * 64 + 63) // 3, 99)
        alone = replace(of, seq_q=100)
        each = [sum(part) for part in zip(*tile_schedule.key_blocks(alone, 1, 32, "split"), strict=True)]
        assert max(each[first : last + 1]) <= blocks <= sum(each[first : last + 1])


def test_sequences_of_unequal_lengths_in_a_cache_walk_what_the_mean_of_them_does():
    """A launch shares the keys out by lengths: one sequence of 100,000 keys beside 63 short ones is no 64 of them."""
    lengths = KeyLengths.parse("100000,uniform:100-4000")
    call = problem(batch=64, seq_q=1, seq_kv=100_000, layout=Layout.BSHD, cache=KeyCache(page=16), key_lengths=lengths)
    (blocks,), (masked,) = tile_schedule.key_blocks(call, 16, 64, "split")
    total = 64 * 64 * (blocks + masked)
    assert total == pytest.approx(sum(lengths.drawn(64)), rel=0.03)
