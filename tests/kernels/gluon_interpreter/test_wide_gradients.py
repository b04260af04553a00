"""Gradients of wide heads in Hopper's template, in the Gluon interpreter: consumers overwrite no tile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hopper_gradients
import pytest
import torch
from gluon_texts import CPU, planted
from rarely import diagonal, rarely

from autoattn.codegen import render
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import Problem
from autoattn.core.variant import Source
from autoattn.errors import AutoattnError
from autoattn.kernels import compiler
from autoattn.validation import gradient_check

pytestmark = pytest.mark.interpreter

HEAD_DIMS = ((256, 256), (192, 192), (192, 128), (160, 80), (136, 136), (64, 200))
MASKS = ("causal", "full", "window:90,30", "window:40,-1", "causal:top-left")
ORDERS: tuple[dict[str, Any], ...] = (
    {"next_scores": "after_query_grad", "value_grad": "late"},
    {"next_scores": "after_query_grad", "value_grad": "early", "mask_loop": "split"},
    {"next_scores": "own_step", "value_grad": "late", "fences": "none"},
    {"next_scores": "own_step", "value_grad": "early", "mask_loop": "split"},
    {"next_scores": "at_once", "value_grad": "late", "slot_release": "mbarrier"},
    {"next_scores": "at_once", "value_grad": "early", "mask_loop": "branch"},
)
TURNS: dict[str, Any] = {"slot_release": "mbarrier", "next_scores": "after_query_grad", "value_grad": "late"}


def make_problem(**facts: Any) -> Problem:
    sizes = {"batch": 1, "heads_q": 2, "heads_kv": 1, "seq_q": 330, "seq_kv": 150, "mask": "causal"}
    return hopper_gradients.problem(**{**sizes, **facts})


def rendered(problem: Problem, **chosen: Any) -> Source:
    """The template's default for a large problem of this kind, changed."""
    many = replace(problem, batch=4, heads_q=32, heads_kv=16, seq_q=4096, seq_kv=4096)
    return render.render(problem, hopper_gradients.variant(many, **chosen))


def judged(text: Source, problem: Problem) -> str:
    """What the gate says of the kernels, or the fault that ends them; empty where they are right."""
    case = gradient_check.make_case(problem, CPU, torch.Generator().manual_seed(0), guard=3, lse=False)
    try:
        return gradient_check.judge(compiler.load(text, CPU), [case]).reason
    except AutoattnError as error:
        return str(error)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("order", "head_dims", "mask"), diagonal(ORDERS, HEAD_DIMS, MASKS), ids=str)
def test_whatever_is_begun_first_the_gradients_are_right(
    order: dict[str, Any], head_dims: tuple[int, int], mask: str
) -> None:
    problem = make_problem(head_dim=head_dims[0], head_dim_v=head_dims[1], mask=mask)
    assert judged(rendered(problem, **order), problem) == ""


# Queries and keys: fewer than a block, no step for some keys, and blocks that end behind the last query
@pytest.mark.parametrize("lengths", [(70, 140), (1, 300), (300, 70), (64, 64)], ids=str)
def test_programs_of_no_step_or_of_one_leave_no_barrier_behind(lengths: tuple[int, int]) -> None:
    problem = make_problem(seq_q=lengths[0], seq_kv=lengths[1], head_dim=192, mask="causal:top-left")
    assert judged(rendered(problem), problem) == ""


@pytest.mark.parametrize(
    ("mask", "order"), rarely((("full", "ascending"), ("causal", "descending"), ("window:90,30", "descending")),
        lambda case: case[0] == "full")
)  # fmt: skip
def test_consumers_add_in_turn_to_the_row_of_the_step_before(mask: str, order: str) -> None:
    problem = make_problem(head_dim=192, mask=mask, deterministic=True)
    assert judged(rendered(problem, order=order, **TURNS), problem) == ""


@pytest.mark.parametrize(
    "changed", [Modifiers(softcap=True), Modifiers(score_mod="20.0 * tanh(score / 20.0)")], ids=str
)
def test_a_factor_of_scores_gradients_lies_where_they_were_read(changed: Modifiers) -> None:
    problem = make_problem(head_dim=192, head_dim_v=128, modifiers=changed)
    for next_scores in ("after_query_grad", "at_once"):
        assert judged(rendered(problem, next_scores=next_scores, mask_loop="split"), problem) == ""


BEGUN: dict[str, Any] = {"next_scores": "at_once", "value_grad": "late", "mask_loop": "branch"}
FAULTS: dict[str, tuple[tuple[str, str], ...]] = {
    "one tile of weights": (("weight_tiles.index(grad_slot)", "weight_tiles.index(0)"),),
    "one tile of scores' gradients": (
        ("score_grads.index(grad_slot)\n    #", "score_grads.index(0)\n    #"),
        ("(c, score_grads, grad_slot, keys, nought)", "(c, score_grads, 0, keys, nought)"),
        ("(c, score_grads, grad_slot ^ 1, keys, nought)", "(c, score_grads, 0, keys, nought)"),
        ("(c, score_grads, grad_slot ^ 1, keys, 0)", "(c, score_grads, 0, keys, 0)"),
    ),
    "weights that nobody waits for": (("        hear(WEIGHTS_FULL + grad_slot)\n        # [ROWS", "        # [ROWS"),),
    "scores' gradients that nobody waits for": (
        ("        hear(GRADS_FULL + (grad_slot ^ 1))\n        query_token", "        query_token"),
    ),
    "gradients of keys that are stored where the others are read": (
        ("hear(WEIGHTS_FULL + grad_slot)  # the other", "pass  # the other"),
    ),
    "weights that are told before they are there": (
        ("        fence_async_shared()\n        say(WEIGHTS_FULL + grad_slot)\n", "        fence_async_shared()\n"),
        ("        weight_tile.store(", "        say(WEIGHTS_FULL + grad_slot)\n        weight_tile.store("),
    ),
    "weights without their fence": (
        ("        fence_async_shared()\n        say(WEIGHTS_FULL", "        say(WEIGHTS_FULL"),
    ),
    "scores' gradients without their fence": (
        ("        fence_async_shared()\n        say(GRADS_FULL", "        say(GRADS_FULL"),
    ),
    "a slot of queries that is told free too early": (
        ("        free_query(query_free, slot)\n        pairs", "        pairs"),
        ("        query_token = multiply_keys(c, score_grads, grad_slot, keys, nought)\n",
            "        free_query(query_free, slot)\n"
            "        query_token = multiply_keys(c, score_grads, grad_slot, keys, nought)\n"),
    ),
    "the row of this step": (("row_before.to(gl.int64) * 32).to(gl.uint64, bitcast=True)\n            gl",
        "sums_row.to(gl.int64) * 32).to(gl.uint64, bitcast=True)\n            gl"),),
}  # fmt: skip


@pytest.mark.parametrize("name", rarely(FAULTS, lambda name: name.startswith("one tile")))
def test_a_planted_fault_is_found(name: str) -> None:
    problem = make_problem(head_dim=192, mask="full")
    text = rendered(problem, **BEGUN)
    assert judged(text, problem) == ""
    for right, wrong in FAULTS[name]:
        text = planted(text, right, wrong)
    assert judged(text, problem) != ""
