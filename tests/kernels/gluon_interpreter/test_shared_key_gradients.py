"""Gradients of keys that heads share, to which each head's programs of Hopper add, in the Gluon interpreter."""

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

CHOSEN: dict[str, Any] = {"order": "any", "schedule": "one_tile", "query_walk": "one_head"}
WALK: dict[str, Any] = {"mask_loop": "split"}
# Facts, what else is chosen, and lengths: blocks that end behind the last query or key.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "causal": ({"heads_q": 6, "heads_kv": 2}, {**WALK, "BLOCK_M": 64}, (330, 330)),
    "blocks of 128 queries": ({}, {**WALK, "BLOCK_M": 128, "next_scores": "after_value_grad"}, (600, 520)),
    "queries before all keys": ({}, {**WALK, "BLOCK_M": 64}, (400, 150)),
    "aligned top-left": ({"mask": "causal:top-left"}, {**WALK, "BLOCK_M": 64}, (300, 150)),
    "no mask": ({"mask": "full"}, {"mask_loop": "branch"}, (200, 300)),
    "window": ({"mask": "window:40,9"}, WALK, (200, 300)),
    "softcap": ({"modifiers": Modifiers(softcap=True)}, {**WALK, "BLOCK_M": 64}, (200, 300)),
    "ALiBi": ({"modifiers": Modifiers(alibi=True)}, {**WALK, "BLOCK_M": 64}, (200, 300)),
    "added by threads": ({"head_dim": 128}, {**WALK, "BLOCK_M": 64, "summing": "threads"}, (200, 300)),
    "between powers of two": ({"head_dim": 96, "head_dim_v": 72}, {**WALK, "BLOCK_M": 64}, (200, 300)),
}  # fmt: skip


def problem(lengths: tuple[int, int], **facts: Any) -> Problem:
    sizes = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": lengths[0], "seq_kv": lengths[1], "head_dim": 64}
    return hopper_gradients.problem(**{**sizes, "mask": "causal", **facts})


def rendered(one: Problem, **chosen: Any) -> Source:
    """The template's default for a large problem of this kind, changed."""
    many = replace(one, batch=4, heads_q=64, heads_kv=8, seq_q=8192, seq_kv=8192)
    return render.render(one, hopper_gradients.variant(many, **{"key_stages": 1, **CHOSEN, **chosen}))


def judged(text: Source, one: Problem) -> str:
    """What the gate says of the kernels, or the fault that ends them; empty where they are right."""
    kernel = compiler.load(text, CPU)
    case = gradient_check.make_case(one, CPU, torch.Generator().manual_seed(0), guard=3, lse=False)
    try:
        return gradient_check.judge(kernel, [case]).reason
    except AutoattnError as error:
        return str(error)


@pytest.mark.parametrize("kind", rarely(CASES, lambda kind: kind in ("causal", "window", "between powers of two")))
def test_gradients_of_shared_keys_are_sums_over_the_heads_of_queries(kind: str) -> None:
    facts, chosen, lengths = CASES[kind]
    one = problem(lengths, **facts)
    assert judged(rendered(one, **chosen), one) == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("for part in range(tl.program_id(0), parts,", "for part in range(tl.program_id(0) + 1, parts,"),
        ("(place + ROWS * WIDTH).to(gl.uint64, bitcast=True)", "place.to(gl.uint64, bitcast=True)"),
        ("i_kv = i_h // (heads_q // heads_kv)", "i_kv = i_h % heads_kv"),
        ("start_n = program // 2 % parts * 64", "start_n = program // 2 % parts * 32"),
    ],
    ids=["no zeros before", "values are added to keys", "keys of another head", "rounded to other rows"],
)
def test_sums_that_go_elsewhere_are_wrong(right: str, wrong: str) -> None:
    one = problem((330, 330))
    text = rendered(one, **WALK, BLOCK_M=64)
    assert judged(planted(text, right, wrong), one) != ""
