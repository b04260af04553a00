"""Classes of sizes: fine, the same for all of them, and of one kind of kernel."""

from __future__ import annotations

import math
from dataclasses import replace

import samples
import strategies
from hypothesis import given
from hypothesis import strategies as st

from autoattn.core import kernel_kind, size_class
from autoattn.core.mask import Mask
from autoattn.core.problem import SIZES, Problem

SM_COUNT = 132  # of a Hopper card


@given(st.integers(1, 2**31))
def test_a_rounded_size_is_at_most_an_eighth_smaller_or_a_third_where_it_is_large_and_rounds_to_itself(
    size: int,
) -> None:
    rounded = size_class.rounded(size)
    least = 8 / 9 if size < size_class.LARGE else 4 / 5 if size < size_class.LARGEST else 2 / 3
    assert size * least < rounded <= size
    assert size_class.rounded(rounded) == rounded
    assert rounded.bit_length() == size.bit_length(), "no power of two lies between them"


def test_sizes_keep_their_order_and_each_octave_has_eight_classes_twice_or_fewer_where_they_are_large() -> None:
    rounded = [size_class.rounded(size) for size in range(1, 70000)]
    assert rounded == sorted(rounded)
    for begin, count in ((1024, 8), (2048, 8), (4096, 4), (8192, 4), (16384, 2), (32768, 2)):
        classes = {size for size in rounded if begin <= size < 2 * begin}
        starts = {begin + place * begin // count for place in range(count)}
        assert classes == starts | {start + 1 for start in starts}
    assert rounded[:32] == list(range(1, 33))


def test_the_first_size_behind_a_full_tile_does_not_share_its_class() -> None:
    for full in (32, 64, 128, 1024, 1152):
        assert size_class.rounded(full) == full
        assert size_class.rounded(full + 1) == full + 1
    assert size_class.rounded(35) == size_class.rounded(34) == 33


@given(strategies.problems(tiny=False))
def test_a_representative_is_of_the_same_kind_and_speaks_for_itself(problem: Problem) -> None:
    problem = problem.simplified()
    smallest = size_class.representative(problem, SM_COUNT)
    assert kernel_kind.shares_kernels(smallest, problem)
    assert size_class.representative(smallest, SM_COUNT) == smallest
    assert smallest == replace(smallest).simplified(), "it is valid, and under its simplest name"
    assert all(getattr(smallest, name) <= getattr(problem, name) for name in SIZES)
    assert replace(smallest, **{name: getattr(problem, name) for name in SIZES}) == problem


def test_what_smaller_sizes_would_make_another_problem_speaks_for_itself() -> None:
    top_left = samples.problem(mask=Mask.parse("causal:top-left"), seq_q=1000, seq_kv=1010)
    assert size_class.representative(top_left, SM_COUNT) is top_left
    assert size_class.representative(replace(top_left, seq_kv=1025), SM_COUNT) == replace(
        top_left, seq_q=961, seq_kv=1025
    )
    window = samples.problem(mask=Mask.window(1000, 0), seq_kv=1010)
    assert size_class.representative(window, SM_COUNT) is window, "at 961 keys it would have no bound"
    assert size_class.representative(replace(window, seq_kv=1100), SM_COUNT) == replace(window, seq_kv=1025)


def test_a_class_ends_where_its_tiles_need_another_turn_of_the_card() -> None:
    def first(queries: int, keys: int = 9000, heads: int = 4) -> tuple[int, int]:
        _, seq_q, seq_kv, *_ = size_class.smallest((1, queries, keys, 0, 0), heads, SM_COUNT)
        return seq_q, seq_kv

    assert first(4224)[0] == 4097, "33 tiles of 128 rows of 4 heads, of 132 multiprocessors"
    assert first(4225)[0] == first(4600)[0] == 4225
    assert first(4225, keys=4225) == first(4600, keys=4600) == (4225, 4225), "lengths that agree still do"
    assert first(4225, keys=3000) == (4225, size_class.rounded(3000))
    assert first(4225, heads=64)[0] == 4097, "seventeen turns, of which the last matters little"


@given(st.integers(1, 20_000), st.integers(1, 64))
def test_tiles_of_a_class_take_few_turns_alike(queries: int, heads: int) -> None:
    _, smallest, *_ = size_class.smallest((1, queries, 20_000, 0, 0), heads, SM_COUNT)
    for rows in size_class.TILE_ROWS:
        turns, of_class = (math.ceil(heads * math.ceil(length / rows) / SM_COUNT) for length in (queries, smallest))
        assert of_class == turns or turns > size_class.MOST_TURNS
