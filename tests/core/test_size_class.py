"""Classes of sizes: fine, the same for all of them, and of one kind of kernel."""

from __future__ import annotations

from dataclasses import replace

import samples
import strategies
from hypothesis import given
from hypothesis import strategies as st

from autoattn.core import kernel_kind, size_class
from autoattn.core.mask import Mask
from autoattn.core.problem import SIZES, Problem


@given(st.integers(1, 2**31))
def test_a_rounded_size_is_at_most_an_eighth_smaller_or_a_third_where_it_is_large_and_rounds_to_itself(
    size: int,
) -> None:
    rounded = size_class.rounded(size)
    least = 8 / 9 if size < size_class.LARGE else 4 / 5 if size < size_class.LARGEST else 2 / 3
    assert size * least < rounded <= size
    assert size_class.rounded(rounded) == rounded
    assert rounded.bit_length() == size.bit_length(), "no power of two lies between them"


def test_sizes_keep_their_order_and_there_are_eight_an_octave_or_fewer_where_they_are_large() -> None:
    rounded = [size_class.rounded(size) for size in range(1, 70000)]
    assert rounded == sorted(rounded)
    for begin, count in ((1024, 8), (2048, 8), (4096, 4), (8192, 4), (16384, 2), (32768, 2)):
        assert len({size for size in rounded if begin <= size < 2 * begin}) == count
    assert rounded[:32] == list(range(1, 33))


@given(strategies.problems(tiny=False))
def test_a_representative_is_of_the_same_kind_and_speaks_for_itself(problem: Problem) -> None:
    problem = problem.simplified()
    smallest = size_class.representative(problem)
    assert kernel_kind.shares_kernels(smallest, problem)
    assert size_class.representative(smallest) == smallest
    assert smallest == replace(smallest).simplified(), "it is valid, and under its simplest name"
    assert all(getattr(smallest, name) <= getattr(problem, name) for name in SIZES)
    assert replace(smallest, **{name: getattr(problem, name) for name in SIZES}) == problem


def test_what_smaller_sizes_would_make_another_problem_speaks_for_itself() -> None:
    top_left = samples.problem(mask=Mask.parse("causal:top-left"), seq_q=1000, seq_kv=1010)
    assert size_class.representative(top_left) is top_left
    assert size_class.representative(replace(top_left, seq_kv=1025)) == replace(top_left, seq_q=960, seq_kv=1024)
    window = samples.problem(mask=Mask.window(1000, 0), seq_kv=1010)
    assert size_class.representative(window) is window, "at 960 keys it would have no bound"
    assert size_class.representative(replace(window, seq_kv=1100)) == replace(window, seq_kv=1024)
