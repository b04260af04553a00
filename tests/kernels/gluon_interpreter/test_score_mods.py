"""Hopper's outputs and gradients beside a score_mod, in the interpreter: the gate's numbers, and planted faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gluon_kernels
import hopper_gradients
import pytest
import test_packed_gradients as packed
import torch
from gluon_texts import CPU, planted, said, source
from rarely import rarely

from autoattn.codegen import render
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Layout, Op, Problem
from autoattn.core.variant import Source
from autoattn.errors import AutoattnError
from autoattn.kernels import compiler
from autoattn.reference import inputs
from autoattn.reference.inputs import Scores
from autoattn.tensors.operands import Operands
from autoattn.validation import gradient_check, output_check

pytestmark = pytest.mark.interpreter

POSITIONS = "score + 0.01 * (kv_idx - q_idx)"  # FlexAttention's relative bias; its gradient is that of the score
BENT = "where(q_idx % 3 == b, 0.5 * score, 4 * tanh(score / 4)) + exp(-abs(score)) * sigmoid(score)"
TABLE = "captured0: float32[2]\ncaptured1: bfloat16[1]\nscore * captured1[h] + captured0[b, q_idx - kv_idx]"
PADDED = "captured0: bool[1]\ncaptured1: float16[2]\nwhere(captured0[kv_idx], score + captured1[h, q_idx], -inf)"
ALIKE = "captured0: int32[1]\nwhere(captured0[q_idx] == captured0[kv_idx], score, -inf)"
SLOPES = "captured0: float32[1]\nscore - captured0[h] * abs(q_idx - kv_idx)"
HEADS = (
    "captured0: float32[2]\ncaptured1: float16[1]\nplace = h // 2\nx = score * captured1[place] / 4\n"
    "where(kv_idx % 2 == b, x + captured1[kv_idx] * captured0[b, h], score * captured0[b, h])"
)
WHOLE = "kv_idx % 5 - h"  # no number of the score's, and a whole one
FUNCTIONS = (
    "x = log(abs(score) + 1) + log2(score * score + 1)\n"
    "y = sqrt(abs(score) + 1) * rsqrt(abs(score) + 2) - exp2(-abs(score))\n"
    "minimum(x, maximum(y, score)) + floor(score * 0.1) + (q_idx // 3) % 5 + score % 0.75 + to_int(score)"
)
ALL = Modifiers(softcap=True, alibi=True, sinks=True)


def changed(text: str, others: Modifiers | None = None) -> Modifiers:
    return replace(others or Modifiers(), score_mod=text)


# --- outputs ----------------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 32, "num_stages": 2}
OWN: dict[str, Any] = {"softmax": "online", "overlap": 0, "row_sum": "each", "mask_loop": "branch_own"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "positions": ({"mask": "causal", "modifiers": changed(POSITIONS)}, {"softmax": "first_max", "overlap": 1}),
    "bent": ({"mask": "full", "modifiers": changed(BENT, Modifiers(softcap=True))}, {"softmax": "vote", "overlap": 1}),
    "table": ({"mask": "window:40,9", "modifiers": changed(TABLE, ALL)}, OWN),
    "alike": ({"mask": "causal", "modifiers": changed(ALIKE), "dtype": DType.FLOAT16}, {"softmax": "first_max"}),
    "packed": ({"mask": "causal", "modifiers": changed(PADDED), "layout": Layout.PACKED}, {"softmax": "lazy"}),
    "slopes": ({"mask": "causal", "modifiers": changed(SLOPES)}, {"softmax": "first_max", "overlap": 1}),
    "heads": ({"mask": "window:40,9", "modifiers": changed(HEADS, ALL)}, OWN),
    "packed heads": ({"mask": "causal", "modifiers": changed(HEADS), "layout": Layout.PACKED}, {"softmax": "lazy"}),
    "whole": ({"mask": "causal:top-left", "modifiers": changed(WHOLE)}, {"softmax": "first_max"}),
    "functions": ({"mask": "causal", "modifiers": changed(FUNCTIONS), "head_dim": 192}, {"HEAD_SPLIT": 1}),
}


def rendered_outputs(name: str) -> tuple[Source, Problem]:
    facts, chosen = CASES[name]
    problem = gluon_kernels.problem(**{"head_dim": 64, **facts})
    return source(problem, lse=True, **{**BASE, **chosen}), problem


@pytest.mark.parametrize("name", rarely(CASES, lambda name: name in ("positions", "packed", "packed heads")))
def test_outputs_are_those_of_the_reference(name: str) -> None:
    assert said(*rendered_outputs(name)) == ""


@pytest.mark.parametrize(
    "text", rarely(["2.0 * tanh(minimum(score, 3.0))", "maximum(score, -1.0)"], lambda text: "minimum" in text)
)
def test_what_is_no_number_stays_so_behind_minimum_and_maximum(text: str) -> None:
    problem = gluon_kernels.problem(head_dim=64, mask="causal", modifiers=changed(text))
    rendered = source(problem, lse=True, **{**BASE, **OWN})
    assert said(rendered, problem, scores=Scores.WILD) == ""
    where = f"(left {'<' if 'minimum' in text else '>'} right) | (left != left)"
    assert said(planted(rendered, where, where.partition(" | ")[0]), problem, scores=Scores.WILD) != ""


FAULTS = {  # of a case: (in the text, in its place)
    "positions": ("score_mod(scores * scale,", "score_mod(scores,"),
    "bent": ("bend = 1.0 / softcap", "bend = scale / softcap"),
    "alike": ("scale_log2 = gl.to_tensor(LOG2E)", "scale_log2 = scale_log2"),
    "packed": ("gl.maximum(seq_kv - 1, 0)", "seq_kv - 1"),
    "packed heads": ("read_by_head(b, i_h,", "read_by_head(b, i_h // group_size,"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_of_outputs_is_found(name: str) -> None:
    text, problem = rendered_outputs(name)
    assert said(planted(text, *FAULTS[name]), problem) != ""


# --- gradients --------------------------------------------------------------------------------------------------------

GRADIENTS: dict[str, dict[str, Any]] = {
    "positions": {"mask": "causal", "modifiers": changed(POSITIONS), "head_dim": 64},
    "bent": {"mask": "full", "modifiers": changed(BENT, Modifiers(softcap=True)), "head_dim": 64},
    "table": {"mask": "window:40,9", "modifiers": changed(TABLE, ALL), "head_dim": 64, "head_dim_v": 56},
    "padded": {"mask": "window:40,9", "modifiers": changed(PADDED, ALL), "head_dim": 80, "head_dim_v": 56},
    "alike": {"mask": "causal:top-left", "modifiers": changed(ALIKE), "head_dim": 128, "dtype": DType.FLOAT16},
    "functions": {"mask": "full", "modifiers": changed(FUNCTIONS), "head_dim": 64},
    "slopes": {"mask": "causal", "modifiers": changed(SLOPES), "head_dim": 128},
    "heads": {"mask": "window:40,9", "modifiers": changed(HEADS, ALL), "head_dim": 64},
    "wide heads": {"mask": "causal", "modifiers": changed(BENT), "head_dim": 192, "head_dim_v": 128},
    "wide heads, both": {"mask": "causal", "modifiers": changed(BENT, ALL), "head_dim": 256},
}


def dense(**facts: Any) -> Problem:
    return hopper_gradients.problem(**{"batch": 2, "heads_q": 2, "heads_kv": 1, "seq_q": 70, "seq_kv": 140, **facts})


def rendered_gradients(problem: Problem) -> Source:
    many = hopper_gradients.problem(mask=problem.mask, modifiers=problem.modifiers, head_dim=problem.head_dim)
    return render.render(problem, hopper_gradients.variant(many, order="any"))


def judged(text: Source, problem: Problem) -> str:
    case = gradient_check.make_case(problem, CPU, torch.Generator().manual_seed(0), guard=3)
    return gradient_check.judge(compiler.load(text, CPU), [case]).reason


@pytest.mark.parametrize("name", rarely(GRADIENTS, lambda name: name in ("bent", "heads", "wide heads")))
def test_gradients_are_those_of_the_reference(name: str) -> None:
    problem = dense(**GRADIENTS[name])
    assert judged(rendered_gradients(problem), problem) == ""


# (queries, keys) of each sequence: none of either, one, and blocks that nobody needs before some that somebody does
LENGTHS = ((0, 9), (70, 130), (5, 0), (1, 1), (130, 20))
PACKED = rarely((TABLE, ALIKE, HEADS), lambda text: text is ALIKE)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("text", PACKED, ids=["table", "alike", "heads"])
def test_packed_sequences_count_from_their_own_first_tokens(text: str) -> None:
    problem = packed.make_problem(LENGTHS, mask="causal", modifiers=changed(text))
    rendered = packed.rendered(problem, lse=True, order="any", BLOCK_M=64, schedule="one_tile")
    assert packed.judged(rendered, problem, LENGTHS) == ""


GRADIENT_FAULTS = [  # of a case: (in the text, in its place)
    ("bent", "weights * growth", "weights"),
    ("heads", "read_by_head(b, i_h,", "read_by_head(b, i_kv,"),
    ("bent", "scores *= scale\n", "scores *= 1.0\n"),
    ("bent", "bend = 1.0 / softcap", "bend = scale / softcap"),
    ("wide heads", "grad_tile.load(PAIRS)", "weight_tile.load(PAIRS)"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "right", "wrong"), GRADIENT_FAULTS)
def test_a_planted_fault_of_gradients_is_found(name: str, right: str, wrong: str) -> None:
    problem = dense(**GRADIENTS[name])
    assert judged(planted(rendered_gradients(problem), right, wrong), problem) != ""


# --- what is read of captured tensors ---------------------------------------------------------------------------------

AXES = "captured0: float32[1]\ncaptured1: float32[1]\ncaptured2: float32[2]\n"
OUTSIDE = "memory that no tensor of the launch holds"
AXES += "score + captured0[q_idx] - captured1[kv_idx] + captured2[b, h]"


def narrowed(problem: Problem, operands: Operands) -> Operands:
    """Captured tensors that hold each place of the problem, and not one more."""
    sizes = (problem.seq_q,), (problem.seq_kv,), (problem.batch, problem.heads_q)
    tensors = [
        tensor[tuple(slice(size) for size in shape)].clone()
        for tensor, shape in zip(operands.score_captures, sizes, strict=True)
    ]
    return replace(operands, score_captures=tuple(tensors))


def test_no_place_behind_the_last_is_read_for_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    problem = dense(mask="causal", modifiers=changed(AXES), head_dim=64)
    operands = narrowed(problem, inputs.make(problem, CPU, generator, guard=3))
    case = gradient_check.case_of(problem, operands, generator, guard=3)
    text = rendered_gradients(problem)
    assert gradient_check.judge(compiler.load(text, CPU), [case]).reason == ""
    wrong = compiler.load(planted(text, "PAIR_QUERIES), seq_q - 1)", "PAIR_QUERIES), seq_q)"), CPU)
    with pytest.raises(AutoattnError, match=OUTSIDE):
        gradient_check.judge(wrong, [case])


def test_no_place_behind_the_last_is_read_for_outputs() -> None:
    facts: dict[str, Any] = {"mask": "causal", "modifiers": changed(AXES), "head_dim": 64}
    generator = torch.Generator().manual_seed(0)
    problem = gluon_kernels.problem(**facts, batch=2, heads_q=2, heads_kv=1, seq_q=70, seq_kv=140)
    operands = narrowed(problem, inputs.make(problem, CPU, generator, guard=3))
    text = source(gluon_kernels.problem(**facts), lse=True, **BASE)
    case = output_check.case_of(problem, operands, generator, guard=3)
    assert output_check.judge(compiler.load(text, CPU), [case]).reason == ""
    wrong = compiler.load(planted(text, "gl.minimum(kv_idx, gl.maximum(seq_kv - 1, 0))", "kv_idx"), CPU)
    with pytest.raises(AutoattnError, match=OUTSIDE):
        output_check.judge(wrong, [case])


# --- what is read once a head -----------------------------------------------------------------------------------------

SEQUENCES = "captured0: float32[2]\nscore * captured0[b, h]"
BEHIND = ("b = gl.minimum(sequence, batch - 1)", "b = sequence")


def of_sequences(problem: Problem) -> Operands:
    """Packed operands of LENGTHS, with a captured tensor that holds each sequence, and not one more."""
    operands = inputs.make(problem, CPU, torch.Generator().manual_seed(0), guard=3, lengths=LENGTHS)
    return replace(operands, score_captures=(operands.score_captures[0][: problem.batch, : problem.heads_q].clone(),))


@pytest.mark.usefixtures("poisoned_memory")
def test_no_sequence_behind_the_last_is_read_for_gradients() -> None:
    problem = packed.make_problem(LENGTHS, mask="causal", modifiers=changed(SEQUENCES))
    case = gradient_check.case_of(problem, of_sequences(problem), torch.Generator().manual_seed(0), guard=3)
    text = packed.rendered(problem, order="any", BLOCK_M=64, schedule="one_tile")
    assert gradient_check.judge(compiler.load(text, CPU), [case]).reason == ""
    with pytest.raises(AutoattnError, match=OUTSIDE):
        gradient_check.judge(compiler.load(planted(text, *BEHIND), CPU), [case])


def test_no_sequence_behind_the_last_is_read_for_outputs() -> None:
    facts: dict[str, Any] = {"mask": "causal", "modifiers": changed(SEQUENCES), "head_dim": 64, "layout": Layout.PACKED}
    problem = replace(packed.make_problem(LENGTHS, mask="causal", modifiers=changed(SEQUENCES)), op=Op.FORWARD)
    case = output_check.case_of(problem, of_sequences(problem), torch.Generator().manual_seed(0), guard=3)
    text = source(gluon_kernels.problem(**facts), lse=True, **BASE)
    assert output_check.judge(compiler.load(text, CPU), [case]).reason == ""
    with pytest.raises(AutoattnError, match=OUTSIDE):
        output_check.judge(compiler.load(planted(text, *BEHIND), CPU), [case])
