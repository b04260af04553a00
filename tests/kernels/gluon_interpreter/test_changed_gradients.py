"""Hopper's gradients beside softcap, ALiBi and sinks, in the interpreter: the gate's numbers, and planted faults."""

from __future__ import annotations

from typing import Any

import drawn
import hopper_gradients
import pytest
import test_packed_gradients as packed
import torch
from gluon_texts import CPU, planted
from rarely import rarely

from autoattn.codegen import render
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import Problem
from autoattn.core.variant import Source
from autoattn.kernels import compiler
from autoattn.reference import inputs
from autoattn.validation import gradient_check

pytestmark = pytest.mark.interpreter

ALL = Modifiers(softcap=True, alibi=True, sinks=True)
# (queries, keys) of each sequence: none, one, and blocks that nobody needs in front of those that somebody does
LENGTHS = ((0, 9), (70, 130), (1, 1), (130, 20))
CASES: dict[str, dict[str, Any]] = {
    "softcap": {"mask": "causal", "modifiers": Modifiers(softcap=True), "head_dim": 64},
    "slopes": {"mask": "full", "modifiers": Modifiers(alibi=True), "head_dim": 64},
    "slopes, causal": {"mask": "causal:top-left", "modifiers": Modifiers(alibi=True), "head_dim": 64},
    "window": {"mask": "window:40,9", "modifiers": ALL, "head_dim": 80, "head_dim_v": 56},
    "wide heads": {"mask": "causal", "modifiers": ALL, "head_dim": 192, "head_dim_v": 128},
}


def dense(**facts: Any) -> Problem:
    return hopper_gradients.problem(**{"batch": 2, "heads_q": 2, "heads_kv": 1, "seq_q": 70, "seq_kv": 140, **facts})


def rendered(problem: Problem) -> Source:
    many = hopper_gradients.problem(mask=problem.mask, modifiers=problem.modifiers, head_dim=problem.head_dim)
    return render.render(problem, hopper_gradients.variant(many, order="any"))


def judged(text: Source, problem: Problem) -> str:
    case = gradient_check.make_case(problem, CPU, torch.Generator().manual_seed(0), guard=3)
    return gradient_check.judge(compiler.load(text, CPU), [case]).reason


@pytest.mark.parametrize("name", rarely(CASES, lambda name: name in ("softcap", "slopes")))
def test_changed_scores_have_the_gradients_of_the_reference(name: str) -> None:
    problem = dense(**CASES[name])
    assert judged(rendered(problem), problem) == ""


def judged_apart(text: Source, problem: Problem) -> str:
    """The same of packed sequences, whose slopes differ."""
    generator = torch.Generator().manual_seed(0)
    operands = drawn.spread(problem, inputs.make(problem, CPU, generator, guard=3, lengths=LENGTHS), generator)
    case = gradient_check.case_of(problem, operands, generator, guard=3, lse=text.traits.lse)
    return gradient_check.judge(compiler.load(text, CPU), [case]).reason


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("mask", rarely(("causal", "window:40,9"), lambda mask: mask == "causal"))
def test_packed_sequences_have_slopes_of_their_own_and_share_sinks(mask: str) -> None:
    problem = packed.make_problem(LENGTHS, mask=mask, modifiers=ALL)
    assert judged_apart(packed.rendered(problem, lse=True, order="any"), problem) == ""


FAULTS = [  # (in the text, in its place)
    ("weights *= 1.0 - bent * bent", "weights *= 1.0 - bent"),
    ("row_lse += slope * place_m", "row_lse += slope * (place_m + 1.0)"),
    ("gl.minimum(sequence, batch - 1) * stride_sb", "gl.minimum(sequence + 1, batch - 1) * stride_sb"),
    ("tl.store(delta_ptr + nobody, tl.zeros([SWEPT], tl.float32))", "pass"),
]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("right", "wrong"), FAULTS)
def test_a_planted_fault_is_found(right: str, wrong: str) -> None:
    problem = packed.make_problem(LENGTHS, mask="causal", modifiers=ALL)
    text = packed.rendered(problem, order="any")
    assert judged_apart(text, problem) == ""
    assert judged_apart(planted(text, right, wrong), problem) != ""
