"""Kernels whose products sum over a part of their tiles are right in the interpreter, and less than that is wrong."""

from __future__ import annotations

from typing import Any

import gluon_kernels
import pytest
from gluon_texts import planted, said, source
from rarely import rarely

from autoattn.core.problem import DType, Layout

pytestmark = pytest.mark.interpreter

WHOLE: dict[str, Any] = {"HEAD_SPLIT": 0, "BLOCK_M": 128, "BLOCK_N": 32, "num_stages": 2}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"head_dim": 40, "mask": "causal"}, {"softmax": "first_max", "overlap": 1}),
    ({"head_dim": 112, "dtype": DType.FLOAT16}, {"softmax": "vote", "overlap": 1, "BLOCK_N": 96}),
    ({"head_dim": 72, "layout": Layout.PACKED, "mask": "window:40,0"}, {"softmax": "online", "overlap": 0}),
    ({"head_dim": 96, "dtype": DType.FLOAT8}, {"softmax": "lazy"}),
    ({"head_dim": 160, "mask": "blocks:128x64,0.5"}, {"softmax": "online"}),
    ({"head_dim": 168, "mask": "causal"}, {"softmax": "vote", "HEAD_SPLIT": 1, "BLOCK_M": 64}),
]


@pytest.mark.parametrize(("facts", "chosen"), rarely(CASES, lambda case: CASES.index(case) == 0))
def test_kernels_agree_with_the_reference(facts: dict[str, Any], chosen: dict[str, Any]) -> None:
    problem = gluon_kernels.problem(**facts)
    rendered = source(problem, lse=True, **{**WHOLE, **chosen})
    assert ".slice(" in rendered.text
    assert said(rendered, problem) == ""


def test_a_part_that_is_left_out_is_found() -> None:
    problem = gluon_kernels.problem(head_dim=40)
    rendered = source(problem, **WHOLE)
    assert said(planted(rendered, ".slice(32, 16", ".slice(0, 16", place=0), problem) != ""
