"""Programs of Hopper's gradients that walk some of the query heads that share keys, in the Gluon interpreter."""

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
from autoattn.core.problem import Layout, Problem
from autoattn.core.variant import Source
from autoattn.errors import AutoattnError
from autoattn.kernels import backward, compiler
from autoattn.validation import gradient_check

pytestmark = pytest.mark.interpreter

WALK: dict[str, Any] = {"schedule": "dynamic", "order": "any"}
ONE_TILE: dict[str, Any] = {"schedule": "one_tile", "order": "any"}
TURNS: dict[str, Any] = {"schedule": "dynamic", "order": "descending"}
# Facts of the problem, and what is chosen. The last of 150 keys has no full tile.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one head each": ({}, {**WALK, "WALKED_HEADS": 1}),
    "two heads each": ({}, {**WALK, "WALKED_HEADS": 2}),
    "two heads each, and one": ({"heads_q": 6}, {**WALK, "WALKED_HEADS": 2}),
    "of 128 columns": ({"head_dim": 128}, {**WALK, "WALKED_HEADS": 1}),
    "of 96 columns, values of 72": ({"head_dim": 96, "head_dim_v": 72}, {**WALK, "WALKED_HEADS": 2}),
    "a program a tile": ({"mask": "full"}, {**ONE_TILE, "WALKED_HEADS": 1}),
    "in turns": ({"head_dim": 128}, {**TURNS, "WALKED_HEADS": 2}),
    "in turns, where gradients have room": ({}, {**TURNS, "WALKED_HEADS": 2, "BLOCK_M": 128}),
    "two tiles of keys": ({}, {**WALK, "WALKED_HEADS": 1, "key_stages": 2, "BLOCK_M": 64}),
    "wide heads": ({"head_dim": 192}, {"WALKED_HEADS": 1}),
    "wide heads beside values of 128": ({"head_dim": 192, "head_dim_v": 128}, {"WALKED_HEADS": 2}),
    "wide heads, none ahead": ({"head_dim": 256, "mask": "full"}, {"WALKED_HEADS": 1, "next_scores": "own_step"}),
    "softcap": ({"modifiers": Modifiers(softcap=True)}, {**WALK, "WALKED_HEADS": 1, "BLOCK_M": 64}),
    "slopes and sinks": (
        {"modifiers": Modifiers(alibi=True, sinks=True)}, {**WALK, "WALKED_HEADS": 2, "BLOCK_M": 64, "num_stages": 2},
    ),
    "window": ({"mask": "window:40,9"}, {**WALK, "WALKED_HEADS": 2, "slot_release": "mbarrier"}),
    "a block table": ({"mask": "blocks:64x128,0.5"}, {**ONE_TILE, "WALKED_HEADS": 2, "BLOCK_M": 64}),
}  # fmt: skip
# (queries, keys) of packed sequences: none, less than a tile, more than one, and either one alone
LENGTHS = ((0, 9), (70, 150), (5, 0), (130, 70), (1, 1))


def make_problem(**facts: Any) -> Problem:
    sizes = {"batch": 2, "heads_q": 8, "heads_kv": 2, "seq_q": 200, "seq_kv": 150, "head_dim": 64, "mask": "causal"}
    return hopper_gradients.problem(**{**sizes, **facts})


def packed(**facts: Any) -> Problem:
    queries, keys = zip(*LENGTHS, strict=True)
    tokens = {"tokens_q": sum(queries) + 3, "tokens_kv": sum(keys) + 3, "seq_q": max(queries), "seq_kv": max(keys)}
    return make_problem(layout=Layout.PACKED, batch=len(LENGTHS), **tokens, **facts)


def rendered(problem: Problem, **chosen: Any) -> Source:
    """The template's default for a larger problem of this kind, changed."""
    tokens = 16384 if problem.packed else 0
    many = replace(problem, batch=2, seq_q=8192, seq_kv=8192, tokens_q=tokens, tokens_kv=tokens)
    return render.render(problem, hopper_gradients.feasible(many, **chosen))


def judged(text: Source, problem: Problem, programs: int = 2) -> str:
    """What the gate says of the kernels, or the fault that ends them; empty where they are right."""
    kernel = replace(compiler.load(text, CPU), sm_count=programs)
    lengths = LENGTHS if problem.packed else None
    case = gradient_check.make_case(problem, CPU, torch.Generator().manual_seed(0), guard=3, lengths=lengths)
    try:
        return gradient_check.judge(kernel, [case]).reason
    except AutoattnError as error:
        return str(error)


OFTEN = "two heads each, and one", "in turns", "wide heads"


@pytest.mark.parametrize("kind", rarely(CASES, lambda kind: kind in OFTEN))
def test_gradients_of_shared_keys_are_the_sums_of_what_each_programs_heads_give(kind: str) -> None:
    facts, chosen = CASES[kind]
    problem = make_problem(**facts)
    # The interpreter runs programs one after the other, so that none can wait for the turn of a later one.
    assert judged(rendered(problem, **chosen), problem, programs=1 if "turns" in kind else 3) == ""


@pytest.mark.parametrize(
    ("head_dim", "chosen"),
    rarely(
        [(64, {**WALK, "WALKED_HEADS": 2}), (128, {**ONE_TILE, "WALKED_HEADS": 1}), (256, {"WALKED_HEADS": 1})],
        lambda case: case[0] == 64,
    ),
)
def test_keys_of_packed_sequences_have_gradients_of_their_own_heads(head_dim: int, chosen: dict[str, Any]) -> None:
    problem = packed(head_dim=head_dim)
    assert judged(rendered(problem, **chosen), problem) == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("parts = tl.cdiv(heads_q // heads_kv, WALKED_HEADS)", "parts = heads_q // heads_kv // WALKED_HEADS"),
        ("walked = gl.minimum(WALKED_HEADS, (i_kv + 1) * group_size - begin_h)", "walked = WALKED_HEADS"),
        ("i_h = begin_h + member", "i_h = begin_h // WALKED_HEADS + member"),
        ("mask=(o_n < held)[:, None]", "mask=(o_n < held + 1)[:, None]"),
    ],
    ids=["a part is left out", "a head of other keys is walked", "heads are walked twice", "a row too many is written"],
)
def test_a_kernel_that_adds_up_other_parts_is_wrong(right: str, wrong: str) -> None:
    problem = make_problem(heads_q=6)
    assert judged(planted(rendered(problem, **WALK, WALKED_HEADS=2), right, wrong), problem) != ""


def test_gradients_repeat_to_the_bit_where_programs_take_turns() -> None:
    problem = make_problem(head_dim=128)
    kernel = replace(compiler.load(rendered(problem, **TURNS, WALKED_HEADS=1), CPU), sm_count=1)
    case = gradient_check.make_case(problem, CPU, torch.Generator().manual_seed(0))
    first, second = gradient_check.room_of(case), gradient_check.room_of(case)
    backward.launch(kernel, problem, case.operands, case.saved, first)
    backward.launch(kernel, problem, case.operands, case.saved, second)
    assert gradient_check.unlike(first, second) == ""
