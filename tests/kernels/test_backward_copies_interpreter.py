"""Factors that are turned once, in memory: numbers of such backward kernels in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gradient_kernels import judged, problem, source
from rarely import diagonal

from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Layout, Precision
from autoattn.workers.worker_pool import Pool

pytestmark = pytest.mark.interpreter
FLOAT32: dict[str, Any] = {"dtype": DType.FLOAT32, "precision": Precision.TF32}
KINDS: dict[str, dict[str, Any]] = {
    "causal, longer than a tile of copies": {"mask": "causal", "seq_q": 150, "seq_kv": 70},
    "two head dims that are padded, keys shared": {
        "head_dim": 20, "head_dim_v": 48, "heads_q": 4, "heads_kv": 2, "seq_q": 33, "seq_kv": 130,
        "layout": Layout.BSHD,
    },
    "a window, strides that nothing divides": {
        "head_dim": 21, "head_dim_v": 21, "mask": "window:20,5", "seq_q": 40, "seq_kv": 50,
    },
    "a softcap, slopes and dropout": {"modifiers": Modifiers(softcap=True, alibi=True, dropout=True)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "loads"),
    diagonal(KINDS, ("pointer", "descriptor")),
)
def test_kernels_that_read_turned_copies_are_right(child: Pool, kind: str, loads: str) -> None:
    tf32_problem = problem(**FLOAT32 | KINDS[kind])
    verdict = judged(child, tf32_problem, copies="turned", queries_loads=loads, keys_loads=loads)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("tl.load(query_copy_ptrs + start_m)", "tl.load(query_copy_ptrs)"),
        ("tl.load(output_grad_copy_ptrs + start_m)", "tl.load(output_grad_copy_ptrs)"),
        ("tl.load(key_copy_ptrs + start_n)", "tl.load(key_copy_ptrs)"),
        ("mask=inside, other=0.0", 'mask=inside, other=float("nan")'),
    ],
)
def test_a_copy_that_is_a_little_wrong_is_seen(child: Pool, right: str, wrong: str) -> None:
    tf32_problem = problem(**FLOAT32, seq_q=50, seq_kv=70)
    rendered = source(tf32_problem, copies="turned")
    assert right in rendered.text
    assert not judged(child, tf32_problem, source_=replace(rendered, text=rendered.text.replace(right, wrong))).ok
