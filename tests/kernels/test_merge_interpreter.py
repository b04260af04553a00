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
from autoattn.core.kernel_kind import MergeKind
from autoattn.core.problem import DType
from autoattn.kernels import compiler, merge
from autoattn.reference import merge_formula
from autoattn.tensors.partial_outputs import PartialOutputs
from autoattn.workers.worker_pool import Failure, Pool

pytestmark = pytest.mark.interpreter
BATCH, HEADS, SEQ = 3, 2, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """One merge by the kernel, and by the formula in float32, in the child."""

    first: torch.dtype
    head_dim: int
    dense: bool
    in_place: bool = False

    def drawn(self) -> PartialOutputs:
        """Rows without keys on either side and on both, whose outputs are NaN, and views of different strides."""
        shape = BATCH, SEQ, HEADS, self.head_dim
        first, second = torch.randn(shape).to(self.first).transpose(1, 2), torch.randn(shape).half().transpose(1, 2)
        first_lse, second_lse = (
            9.0 * torch.randn(BATCH, HEADS, SEQ),
            9.0 * torch.randn(HEADS, BATCH, SEQ).transpose(0, 1),
        )
        for blind, output, lse in (((0, 1), first, first_lse), ((1, 2), second, second_lse)):
            for row in blind:
                output[0, :, row], lse[0, :, row] = math.nan, -math.inf
        return PartialOutputs(first=first, second=second, first_lse=first_lse, second_lse=second_lse)

    def run(self, memory: dict[Hashable, Any]) -> tuple[torch.Tensor, ...]:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        parts = self.drawn()
        expected = merge_formula.merge(parts)
        kind = merge.kind_of(parts)
        assert kind.dense is self.dense
        kernel = compiler.load(render.merge_source(kind), CPU)
        if self.in_place:
            merge.launch_in_place(kernel, parts)
            return (parts.first, parts.first_lse, *expected)
        return (*merge.launch(kernel, parts), *expected)


@pytest.mark.parametrize(
    "merging",
    [
        Merging(first=torch.float16, head_dim=24, dense=False),
        Merging(first=torch.float16, head_dim=32, dense=True),
        Merging(first=torch.float32, head_dim=16, dense=True, in_place=True),
    ],
    ids=str,
)
def test_the_kernel_merges_as_the_formula_does(child: Pool, merging: Merging) -> None:
    outcome = child.result(merging, SECONDS)
    assert not isinstance(outcome, Failure), f"{outcome.outcome.value}: {outcome.detail}"
    output, lse, expected, expected_lse = outcome
    torch.testing.assert_close(output, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert bool((output[0, :, 1] == 0.0).all())
    assert bool((lse[0, :, 1] == -math.inf).all())


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dense", [False, True])
def test_the_kernel_compiles(arch: int, dense: bool) -> None:
    kind = MergeKind(first=DType.FLOAT32, second=DType.BFLOAT16, head_dim=80, dense=dense)
    compiled = compiler.build(render.merge_source(kind), arch)
    assert compiled.asm["cubin"]
    assert ("ld.global.v4.b32" in compiled.asm["ptx"]) is dense, "rows are read 16 bytes at a time"
