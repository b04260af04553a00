"""Forward kernels that merge their output into one of other keys, on a card: both families, and what calls prepare."""

from __future__ import annotations

from typing import Any

import kernels
import merged
import pytest
import torch
from torch import Tensor

import autoattn
from autoattn.codegen import render, search_space
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Layout, Problem
from autoattn.hardware import nvidia
from autoattn.kernels import compiler
from autoattn.reference.inputs import Scores
from autoattn.runtime import merging_call
from autoattn.runtime.torch_op import attention_schema
from autoattn.validation import output_check

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
KINDS: dict[str, dict[str, Any]] = {
    "full": {"mask": "full"},
    "causal": {"mask": "causal"},
    "window": {"mask": "window:128,0", "head_dim": 64},
    "packed": {"mask": "causal", "layout": Layout.PACKED},
    "sinks": {"mask": "full", "modifiers": Modifiers(sinks=True), "head_dim": 80},
    "wide heads": {"mask": "causal", "head_dim": 192, "head_dim_v": 128},
}
CASES = ((257, 640, Scores.PLAIN), (203, 113, Scores.PLAIN), (257, 256, Scores.STEEP), (203, 211, Scores.WILD))


def sized(**changes: Any) -> Problem:
    facts: dict[str, Any] = {"dtype": DType.BFLOAT16, "seq_q": 1024, "seq_kv": 1024, "head_dim": 128, **changes}
    if facts.get("layout") is Layout.PACKED:
        facts |= {"tokens_q": 2048, "tokens_kv": 2048}
    return kernels.problem(**facts)


@pytest.mark.parametrize("template", ["triton/forward", "gluon/forward"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_merge_as_the_formula_does(kind: str, template: str) -> None:
    problem, device, points = sized(**KINDS[kind]), nvidia.present(), search_space.load(template)
    assert device is not None
    variants = points.seeds_for(problem, device)[:1]
    if not variants:
        pytest.skip(f"{template} has no kernel for {device.name}")
    running = (torch.float32, torch.bfloat16)[[*KINDS].index(kind) % 2]
    traits = merged.traits_for(render.natural_traits(problem), problem, running)
    kernel = compiler.load(render.render(problem, variants[0], traits), CUDA)
    for number, (seq_q, seq_kv, scores) in enumerate(CASES):
        generator = torch.Generator().manual_seed(number)
        case = output_check.make_small_case(problem, seq_q, seq_kv, number, CUDA, generator, scores=scores)
        for _ in range(3):  # races show in some runs
            assert merged.fault(kernel, case, running) == "", case.name


@pytest.mark.parametrize("running", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_calls_on_parts_of_the_keys_leave_the_output_of_all_keys(running: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2048, heads, 128, device=CUDA, dtype=torch.bfloat16) for heads in (32, 8, 8))
    words: dict[str, Any] = {"mask": str(Mask.window(-1, -1)), "keep_lse": True, "layout": "bshd"}
    none = (None,) * len(attention_schema.LEARNING[3:])
    expected, lse = autoattn.attention(query, key, value, layout="bshd", return_lse=True)
    for _ in range(3):  # the first prepares for the others
        total = torch.zeros(query.shape, device=CUDA, dtype=running)
        sums = torch.full((1, 32, 2048), -torch.inf, device=CUDA)
        for part in range(4):
            own = (tensor[:, 512 * part : 512 * (part + 1)].contiguous() for tensor in (key, value))
            if not merging_call.attend([query, *own, *none], words, total, sums):
                pytest.skip("no kernel answers this call on this card")
        assert _error(total, expected) < 2e-3
        torch.testing.assert_close(sums, lse, rtol=1e-3, atol=1e-3)


def _error(output: Tensor, expected: Tensor) -> float:
    return float((output.float() - expected.float()).abs().max())
