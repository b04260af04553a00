"""The kind of kernel that a problem needs: sizes are no part of it, and all that a text depends on is."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import drawn
import kernels
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from autoattn.codegen import render
from autoattn.core import kernel_kind
from autoattn.core.mask import Alignment, Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Numerics, Op, Problem


@given(strategies.problems(tiny=False), st.integers())
def test_a_problem_of_other_sizes_is_of_the_same_kind(problem: Problem, seed: int) -> None:
    resized = drawn.resized(random.Random(seed), problem, drawn.LARGE).problem
    assert kernel_kind.of(resized) == kernel_kind.of(problem)
    assert hash(kernel_kind.of(resized)) == hash(kernel_kind.of(problem))


@pytest.mark.parametrize(
    ("problem", "other"),
    [
        (kernels.problem(mask=Mask.window(100, 30)), kernels.problem(mask=Mask.window(64, 1))),
        (kernels.problem(mask=Mask.blocks(64, 32, 0.5)), kernels.problem(mask=Mask.blocks(64, 32, 0.25))),
        (kernels.problem(), kernels.problem(numerics=Numerics.ONLINE)),
        (kernels.problem(), kernels.problem(layout=Layout.BSHD)),
    ],
    ids=["width", "density", "numerics", "layout"],
)
def test_numbers_of_a_launch_and_choices_among_kernels_are_no_part_of_it(problem: Problem, other: Problem) -> None:
    assert problem != other
    assert kernel_kind.of(problem) == kernel_kind.of(other)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": DType.BFLOAT16},
        {"head_dim": 80},
        {"head_dim_v": 32},
        {"mask": Mask.parse("causal")},
        {"mask": Mask.window(100, 0)},
        {"mask": Mask.window(100, 30)},
        {"mask": Mask.window(100, -1)},
        {"mask": Mask.blocks(64, 64, 0.5)},
        {"modifiers": Modifiers(softcap=True)},
        {"modifiers": Modifiers(bias=Bias.KEYS)},
        {"op": Op.BACKWARD},
        {"layout": Layout.PACKED, "tokens_q": 1024, "tokens_kv": 1024},
    ],
    ids=str,
)
def test_what_changes_a_text_changes_the_kind(change: dict[str, Any]) -> None:
    problem = kernels.problem(seq_q=64, seq_kv=128, mask=Mask())
    other = replace(problem, **{"head_dim_v": 0, **change} if "head_dim" in change else change)
    assert kernel_kind.of(problem) != kernel_kind.of(other)


def test_the_alignments_of_a_causal_mask_are_two_kinds_where_the_lengths_differ() -> None:
    top_left = kernels.problem(seq_q=64, seq_kv=128, mask=Mask.parse(f"causal:{Alignment.TOP_LEFT.value}"))
    bottom_right = replace(top_left, mask=Mask.parse("causal"))
    assert kernel_kind.of(top_left) != kernel_kind.of(bottom_right)


@given(strategies.problems(tiny=False), st.integers())
def test_problems_of_one_kind_are_rendered_once(problem: Problem, seed: int) -> None:
    resized = drawn.resized(random.Random(seed), problem, drawn.LARGE).problem
    traits = render.natural_traits(problem)
    variant = kernels.variant(**drawn.params_of(random.Random(seed), problem))
    assert render.render(resized, variant, traits) is render.render(problem, variant, traits)
