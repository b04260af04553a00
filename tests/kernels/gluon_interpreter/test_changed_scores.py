"""Hopper's outputs beside softcap, ALiBi and sinks, in the interpreter: the gate's numbers, and planted faults."""

from __future__ import annotations

from typing import Any

import gluon_kernels
import pytest
from gluon_texts import planted, said, source
from rarely import rarely

from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import Layout, Problem
from autoattn.reference.inputs import Scores

pytestmark = pytest.mark.interpreter

ALL = Modifiers(softcap=True, alibi=True, sinks=True)
BASE: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 32, "num_stages": 2}
ONLINE: dict[str, Any] = {"softmax": "online", "overlap": 0, "row_sum": "each", "mask_loop": "branch_own"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softcap": ({"mask": "causal", "modifiers": Modifiers(softcap=True)}, {"softmax": "first_max", "overlap": 1}),
    "slopes": ({"mask": "full", "modifiers": Modifiers(alibi=True)}, {"softmax": "vote", "overlap": 1}),
    "sinks": ({"mask": "window:40,9", "modifiers": Modifiers(sinks=True)}, ONLINE),
    "window": ({"mask": "window:40,9", "modifiers": ALL}, ONLINE),
    "packed": ({"mask": "causal", "modifiers": ALL, "layout": Layout.PACKED}, {"softmax": "lazy"}),
    "two tiles of a head": ({"mask": "causal", "modifiers": ALL, "head_dim": 192}, {"HEAD_SPLIT": 1}),
}


def make_problem(**facts: Any) -> Problem:
    return gluon_kernels.problem(**{"head_dim": 64, **facts})


@pytest.mark.parametrize(
    ("name", "scores"),
    rarely(
        [(name, scores) for name in CASES for scores in (Scores.PLAIN, Scores.STEEP)],
        lambda case: (case[1] is Scores.PLAIN and case[0] != "window") or case[0] == "sinks",
    ),
)
def test_changed_scores_have_the_outputs_of_the_reference(name: str, scores: Scores) -> None:
    facts, chosen = CASES[name]
    problem = make_problem(**facts)
    assert said(source(problem, lse=True, **{**BASE, **chosen}), problem, scores=scores) == ""


FAULTS = {  # of a case: (in the text, in its place)
    "softcap": ("tanh(scores * bend)", "tanh(scores * bend * 1.1)"),
    "slopes": ("start_n - start_m - shift", "start_n - start_m"),
    "sinks": ("row_sum += gl.where(sink > LOWEST, 1.0", "row_sum += gl.where(sink > LOWEST, 2.0"),
    "packed": ("gl.where(sequence < batch, ", "gl.where(sequence <= batch, "),
}


@pytest.mark.parametrize("name", rarely(FAULTS, lambda name: name == "sinks"))
def test_a_planted_fault_is_found(name: str) -> None:
    facts, chosen = CASES[name]
    problem = make_problem(**facts)
    assert said(planted(source(problem, lse=True, **{**BASE, **chosen}), *FAULTS[name]), problem) != ""
