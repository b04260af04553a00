"""The kernel that merges two partial outputs, in Triton's interpreter: compared with the formula."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from interpreted import CPU, SECONDS

from autoattn.codegen import render
from autoattn.core.problem import DType
from autoattn.kernels import compiler, merge
from autoattn.reference import merge_formula
from autoattn.tensors.partial_outputs import PartialOutputs
from autoattn.workers.worker_pool import Failure, Pool

pytestmark = pytest.mark.interpreter
BATCH, HEADS, SEQ, HEAD_DIM = 3, 2, 5, 24


def drawn() -> PartialOutputs:
    """Rows without keys on either side and on both, whose outputs are NaN, and views of different strides."""
    first, second = (torch.randn(BATCH, SEQ, HEADS, HEAD_DIM).half().transpose(1, 2) for _ in range(2))
    first_lse, second_lse = 9.0 * torch.randn(BATCH, HEADS, SEQ), 9.0 * torch.randn(HEADS, BATCH, SEQ).transpose(0, 1)
    for blind, output, lse in (((0, 1), first, first_lse), ((1, 2), second, second_lse)):
        for row in blind:
            output[0, :, row], lse[0, :, row] = math.nan, -math.inf
    return PartialOutputs(first=first, second=second, first_lse=first_lse, second_lse=second_lse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """One merge by the kernel, and by the formula in float32, in the child."""

    def run(self, memory: dict[Hashable, Any]) -> tuple[torch.Tensor, ...]:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        parts = drawn()
        kernel = compiler.load(render.merge_source(DType.FLOAT16, HEAD_DIM), CPU)
        return (*merge.launch(kernel, parts), *merge_formula.merge(parts))


def test_the_kernel_merges_as_the_formula_does(child: Pool) -> None:
    outcome = child.result(Merging(), SECONDS)
    assert not isinstance(outcome, Failure), f"{outcome.outcome.value}: {outcome.detail}"
    output, lse, expected, expected_lse = outcome
    torch.testing.assert_close(output, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert bool((output[0, :, 1] == 0.0).all())
    assert bool((lse[0, :, 1] == -math.inf).all())


@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernel_compiles(arch: int) -> None:
    assert compiler.build(render.merge_source(DType.BFLOAT16, 80), arch).asm["cubin"]
