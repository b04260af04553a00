"""Where rows of a head begin: what the model of times and the network of a portfolio know of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import portfolio_model
import portfolio_network
import pytest
import samples
from box_costs import CUT_SECTORS
from portfolio_model import Kernels

from autoattn.codegen import search_space
from autoattn.core.problem import DType, Layout, Problem
from autoattn.core.variant import Variant


def problem_of(head_dim: int, **facts: Any) -> Problem:
    return samples.problem(dtype=DType.BFLOAT16, seq_q=4096, seq_kv=4096, head_dim=head_dim, **facts)


def seed(template: str) -> Variant:
    return search_space.load(template).seeds_for(problem_of(128), samples.H200)[0]


@pytest.mark.parametrize(
    ("template", "times"),
    [
        pytest.param("gluon/forward", CUT_SECTORS, id="copies-boxes"),
        pytest.param("triton/forward", 1.0, id="loads-rows"),
    ],
)
def test_the_model_knows_that_boxes_of_rows_within_sectors_take_longer(template: str, times: float) -> None:
    kernels = Kernels([seed(template)])
    cut, whole = (portfolio_model.work_of(problem_of(head_dim), kernels, samples.H200) for head_dim in (120, 128))
    assert cut.boxes == times * whole.boxes


def test_the_model_expects_copies_to_take_longer() -> None:
    cut, whole = (
        portfolio_model.features(problem_of(head_dim), [seed("gluon/forward")], samples.H200) for head_dim in (120, 128)
    )
    assert cut["boxes_us"] > whole["boxes_us"]
    assert cut["box_cost"] > whole["box_cost"]


@pytest.mark.parametrize(("head_dim", "part"), [(256, 128), (96, 64), (112, 32), (120, 16), (40, 16)])
def test_the_network_knows_which_part_of_a_line_rows_begin_with(head_dim: int, part: int) -> None:
    facts = portfolio_network.facts_of_inputs(problem_of(head_dim), samples.H200)
    assert facts[portfolio_network.INPUTS.index("line_part")] == part


@pytest.mark.parametrize(
    ("head_dim", "facts", "expected"),
    [
        pytest.param(72, {"layout": Layout.BSHD}, (144 + 112) / 144, id="rows-begin-within-sectors"),
        pytest.param(96, {"layout": Layout.BSHD}, (192 + 64) / 192, id="rows-begin-with-half-lines"),
        pytest.param(128, {"layout": Layout.BSHD}, 1.0, id="rows-begin-with-lines"),
        pytest.param(72, {"layout": Layout.BHSD}, 1.0, id="heads-apart"),
        pytest.param(72, {"layout": Layout.BSHD, "heads_kv": 1}, 1.0, id="one-head"),
    ],
)
def test_model_and_network_know_how_much_of_the_lines_belongs_to_other_heads(
    head_dim: int, facts: dict[str, Any], expected: float
) -> None:
    problem = problem_of(head_dim, **facts)
    inputs = portfolio_network.facts_of_inputs(problem, samples.H200)
    assert inputs[portfolio_network.INPUTS.index("lines_over_row")] == pytest.approx(expected)
    features = portfolio_model.features(problem, [seed("gluon/forward")], samples.H200)
    assert (np.max(features["lines_read_again"]) > 0.0) == (expected > 1.0)


def test_the_model_expects_more_lines_to_be_read_again_by_more_programs_an_sm_that_walk_further() -> None:
    def lines(programs: int, keys: int) -> float:
        problem = samples.problem(dtype=DType.BFLOAT16, batch=64, seq_q=1, seq_kv=keys, head_dim=72, layout=Layout.BSHD)
        variant = search_space.load("gluon/forward").variant({**seed("gluon/forward").as_dict(), "CTAS": programs})
        return float(np.max(portfolio_model.features(problem, [variant], samples.H200)["lines_read_again"]))

    assert lines(1, 4096) < lines(2, 4096) < lines(2, 8192)
