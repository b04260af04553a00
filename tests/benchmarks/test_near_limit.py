"""The limit of neighbours: which pairs count, and what saves most."""

from __future__ import annotations

import math
from dataclasses import replace

import near_limit
import pytest
import samples
from near_limit import Pair
from portfolio_examples import Example

from autoattn.codegen import search_space
from autoattn.core.problem import Problem
from autoattn.core.variant import Variant

H200 = samples.H200
FAST, SLOW = search_space.load("triton/forward").seeds_for(samples.problem(), H200)[:2]


def example(seq_kv: int, times_us: dict[Variant, float]) -> Example:
    return Example(problem=samples.problem(seq_kv=seq_kv), device=H200, times_us=times_us, rivals_us={})


def pair(octaves: float, neighbour: float, portfolio: float) -> Pair:
    return Pair(octaves=octaves, neighbour=math.log(neighbour), portfolio=math.log(portfolio))


def test_the_limit_is_where_neighbours_begin_to_lose_to_the_portfolio() -> None:
    pairs = [pair(0.2, 1.0, 1.1), pair(1.2, 1.0, 1.2), pair(1.7, 1.3, 1.1), pair(4.0, 2.0, 1.1)]
    assert near_limit.limit(pairs) == (1.25, pytest.approx(math.log(1.1) + math.log(1.2)))


def test_where_neighbours_never_win_no_limit_does() -> None:
    assert near_limit.limit([pair(0.2, 1.2, 1.1)]) == (0.0, 0.0)


def test_a_pair_is_a_problem_beside_the_winner_of_another() -> None:
    examples = [example(4096, {FAST: 10.0, SLOW: 20.0}), example(2048, {FAST: 12.0, SLOW: 10.0})]
    chosen: dict[Problem, Variant | None] = {each.problem: FAST for each in examples}
    first, second = near_limit.pairs(examples, chosen, [FAST, SLOW])
    assert first.octaves == second.octaves == 1.0
    assert (math.exp(first.neighbour), math.exp(first.portfolio)) == (pytest.approx(2.0), 1.0)
    assert (math.exp(second.neighbour), math.exp(second.portfolio)) == (pytest.approx(1.2), pytest.approx(1.2))


def test_a_winner_that_was_not_tried_says_nothing() -> None:
    each = example(4096, {FAST: 10.0})
    assert near_limit.loss(each, SLOW, [FAST, SLOW]) == pytest.approx(math.log(1.1))
    assert near_limit.loss(replace(each, met_cover=False), SLOW, [FAST, SLOW]) is None
    assert near_limit.loss(each, SLOW, [FAST]) is None
