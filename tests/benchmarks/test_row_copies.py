"""Where rows of a head begin: what the model of times and the network of a portfolio know of it."""

from __future__ import annotations

import portfolio_model
import portfolio_network
import pytest
import samples
from box_costs import CUT_SECTORS
from portfolio_model import Kernels

from autoattn.codegen import search_space
from autoattn.core.problem import DType, Problem
from autoattn.core.variant import Variant


def problem_of(head_dim: int) -> Problem:
    return samples.problem(dtype=DType.BFLOAT16, seq_q=4096, seq_kv=4096, head_dim=head_dim)


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
