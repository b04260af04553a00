"""Programs of Hopper's gradients that join the walk of others, in the Gluon interpreter: each block is taken once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hopper_gradients
import pytest
import torch
from gluon_texts import CPU, planted
from rarely import rarely

from autoattn.codegen import render
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import Problem
from autoattn.core.variant import Source
from autoattn.errors import AutoattnError
from autoattn.kernels import compiler
from autoattn.validation import gradient_check

pytestmark = pytest.mark.interpreter

CHOSEN: dict[str, Any] = {"schedule": "dynamic", "order": "any", "mask_loop": "split", "query_walk": "joined"}
# Facts, what else is chosen, and lengths: more tiles than programs, blocks that end behind the last query or key.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "causal": ({"heads_q": 6, "heads_kv": 2}, {"BLOCK_M": 64}, (330, 330)),
    "blocks of 128 queries": ({}, {"BLOCK_M": 128, "next_scores": "after_value_grad"}, (600, 520)),
    "queries before all keys": ({"mask": "causal"}, {"BLOCK_M": 64}, (400, 150)),
    "aligned top-left": ({"mask": "causal:top-left"}, {"BLOCK_M": 64}, (300, 150)),
    "softcap": ({"modifiers": Modifiers(softcap=True)}, {"BLOCK_M": 64}, (200, 300)),
    "of 128 columns": ({"head_dim": 128}, {"BLOCK_M": 64}, (200, 300)),
}


def make_problem(lengths: tuple[int, int], **facts: Any) -> Problem:
    sizes = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": lengths[0], "seq_kv": lengths[1], "head_dim": 64}
    return hopper_gradients.problem(**{**sizes, "mask": "causal", **facts})


def rendered(problem: Problem, **chosen: Any) -> Source:
    """The template's default for a large problem of this kind, changed."""
    many = replace(problem, batch=4, heads_q=64, heads_kv=8, seq_q=8192, seq_kv=8192)
    return render.render(problem, hopper_gradients.feasible(many, **CHOSEN, **chosen))


def judged(text: Source, problem: Problem, programs: int = 2) -> str:
    """What the gate says of the kernels, or the fault that ends them; empty where they are right."""
    kernel = replace(compiler.load(text, CPU), sm_count=programs)
    case = gradient_check.make_case(problem, CPU, torch.Generator().manual_seed(0), guard=3, lse=False)
    try:
        return gradient_check.judge(kernel, [case]).reason
    except AutoattnError as error:
        return str(error)


def joining_at(text: Source, block: int) -> Source:
    """The same kernels, whose programs find others at this block of queries."""
    return planted(text, "entry = gl.atomic_add(", f"entry = {block} + 0 * gl.atomic_add(")


@pytest.mark.parametrize("kind", rarely(CASES, lambda kind: kind in ("causal", "blocks of 128 queries")))
def test_gradients_are_right_where_programs_find_others(kind: str) -> None:
    facts, chosen, lengths = CASES[kind]
    problem = make_problem(lengths, **facts)
    assert judged(rendered(problem, **chosen), problem) == ""


@pytest.mark.parametrize("block", rarely([0, 4, 1000], lambda block: block == 4))
def test_gradients_are_right_at_whatever_block_programs_join(block: int) -> None:
    problem = make_problem((450, 450))
    assert judged(joining_at(rendered(problem, BLOCK_M=64), block), problem) == ""


@pytest.mark.parametrize(
    ("right", "wrong", "block"),
    [
        ("gl.where(block < inner_begin, inner_end - inner_begin, 0)", "gl.where(block < inner_begin, 1, 0)", 4),
        ("gl.minimum(entry, inner_end - 1)", "entry", 1000),
    ],
    ids=["blocks behind the entry are left out", "the entry lies behind all blocks"],
)
def test_a_walk_that_takes_other_blocks_is_wrong(right: str, wrong: str, block: int) -> None:
    problem = make_problem((450, 450))
    assert judged(planted(joining_at(rendered(problem, BLOCK_M=64), block), right, wrong), problem) != ""
