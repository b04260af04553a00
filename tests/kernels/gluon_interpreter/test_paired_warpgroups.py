"""Consumers of two warpgroups agree with the reference in the interpreter."""

from __future__ import annotations

from typing import Any

import gluon_kernels
import pytest
from gluon_texts import said, source
from rarely import rarely

from autoattn.core.problem import DType, Layout

pytestmark = pytest.mark.interpreter

PAIRED: dict[str, Any] = {
    "WARPGROUPS": 2,
    "ping_pong": "none",
    "HEAD_SPLIT": 0,
    "BLOCK_M": 128,
    "BLOCK_N": 32,
    "num_stages": 2,
}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"head_dim": 64, "mask": "causal"}, {"softmax": "first_max", "overlap": 1, "schedule": "dynamic"}),
    ({"head_dim": 128, "dtype": DType.FLOAT16}, {"softmax": "vote", "overlap": 1, "BLOCK_N": 96, "v_wait": "early"}),
    ({"head_dim": 72, "layout": Layout.PACKED, "mask": "window:40,0"}, {"softmax": "online", "overlap": 0}),
    ({"head_dim": 64, "mask": "causal"}, {"softmax": "vote", "overlap": 0, "v_wait": "early"}),
    ({"head_dim": 64, "mask": "causal", "heads_q": 4, "heads_kv": 1}, {"softmax": "online", "PACK_GQA": 2}),
    ({"head_dim": 160, "mask": "blocks:128x64,0.5"}, {"softmax": "online"}),
]


@pytest.mark.parametrize(("facts", "chosen"), rarely(CASES, lambda case: CASES.index(case) == 0))
def test_kernels_agree_with_the_reference(facts: dict[str, Any], chosen: dict[str, Any]) -> None:
    problem = gluon_kernels.problem(**facts)
    rendered = source(problem, lse=True, **{**PAIRED, **chosen})
    assert "warps_per_cta=[8, 1]" in rendered.text
    assert said(rendered, problem) == ""
