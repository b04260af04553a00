"""Consumers of two warpgroups, which run the same code; no GPU is needed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import gluon_kernels
import pytest
from gluon_kernels import H200, TEMPLATE, feasible, variant

from autoattn.codegen import render, search_space
from autoattn.core.problem import DType
from autoattn.core.variant import Source, Value
from autoattn.kernels.compiler import build, load_module

pytestmark = [pytest.mark.usefixtures("nothing_compiled_before"), pytest.mark.sampled]

PAIRED: dict[str, Value] = {
    "WARPGROUPS": 2, "BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 2, "softmax": "first_max", "ping_pong": "none",
    "mask_loop": "split", "CTAS": 1, "schedule": "one_tile", "output_buffer": "shared", "overlap": 1, "query_stages": 1,
}  # fmt: skip
# Triton's barrier for all warps of a consumer, right before its wait for a barrier in shared memory
KEEPS_STEP = re.compile(r"bar\.sync \t0, 256;\n(?:(?!bar\.sync).*\n){0,8}?\s*mbarrier\.try_wait")


def paired(mask: str = "causal", **changes: Value) -> Source:
    problem = gluon_kernels.problem(head_dim=64, mask=mask)
    return render.render(problem, feasible(problem, **{**PAIRED, **changes}))


def waits_in_step(rendered: Source) -> int:
    """Waits before which all warps of the consumer wait for one another."""
    return len(KEEPS_STEP.findall(build(rendered, 90).asm["ptx"]))


def test_a_consumer_has_eight_warps_and_half_of_the_code() -> None:
    rendered, apart = paired(), paired(WARPGROUPS=1)
    assert load_module(rendered).OPTIONS["num_warps"] == 8
    assert "WARPGROUPS" not in apart.text
    assert len(build(rendered, 90).asm["cubin"]) < 0.6 * len(build(apart, 90).asm["cubin"])


@pytest.mark.parametrize("v_wait", ["late", "early"])
def test_its_warpgroups_need_not_keep_step_where_they_wait_for_keys_and_values(v_wait: str) -> None:
    rendered = paired(v_wait=v_wait, softmax="online")
    inlined = replace(rendered, text=rendered.text.replace("@gluon.jit(noinline=True)", "@gluon.jit"))
    # Where a mask hides keys, some tiles are computed again: there Triton 3.6 keeps step at one wait, 3.8 at none.
    assert waits_in_step(rendered) <= 1
    assert waits_in_step(paired("full", v_wait=v_wait, softmax="online")) == 0
    assert waits_in_step(inlined) >= 3, "the test would not see it"


@pytest.mark.parametrize(
    ("facts", "params", "words"),
    [
        ({}, {"BLOCK_M": 64}, "as many warpgroups"),
        ({}, {"BLOCK_M": 256}, "ptxas"),
        ({}, {"slot_release": "mbarrier"}, "each warp of a consumer of eight"),
        ({"dtype": DType.FLOAT8}, {}, "float8"),
    ],
)
def test_what_eight_warps_cannot_do_is_said(facts: dict[str, Any], params: dict[str, Value], words: str) -> None:
    problem = gluon_kernels.problem(head_dim=64, **facts)
    chosen = variant(problem, **{**PAIRED, **params})
    reason = search_space.load(TEMPLATE).why_infeasible(chosen, problem, H200)
    assert reason is not None
    assert words in reason
