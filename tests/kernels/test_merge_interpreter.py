"""The kernel that merges partial outputs, in Triton's interpreter: compared with the formula."""

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
from autoattn.distributed import merging
from autoattn.kernels import compiler, merge
from autoattn.workers.worker_pool import Failure, Pool

pytestmark = pytest.mark.interpreter


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """One merge by the kernel and by the formula, in the child."""

    total: torch.dtype
    head_dim: int
    heads: int = 3

    def run(self, memory: dict[Hashable, Any]) -> dict[str, float | bool]:
        """Largest differences, and whether queries without keys keep what they had."""
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(5)
        shape = 2, 37, self.heads, self.head_dim
        total, output = torch.randn(2, *shape, generator=generator)
        total_lse, lse = torch.randn(2, 2, self.heads, 37, generator=generator) * 4
        total_lse[:, :, 5:30] = -math.inf
        lse[:, :, 20:] = -math.inf  # queries 20 to 29 saw no key at all
        total = torch.where(total_lse.transpose(1, 2)[..., None] == -math.inf, 0.0, total)
        total, output = total.to(self.total), output.to(torch.bfloat16)
        expected, expected_lse, before = total.clone(), total_lse.clone(), total.clone()
        merging.merge_by_formula(expected, expected_lse, output, lse)
        kind = merge.kind_of(total, output)
        assert kind is not None
        merge.launch(compiler.load(render.merge_source(kind), CPU), total, total_lse, output, lse)
        finite = expected_lse != -math.inf
        return {
            "output": (total.float() - expected.float()).abs().max().item(),
            "lse": (total_lse - expected_lse)[finite].abs().max().item(),
            "blind": bool(torch.equal(total_lse == -math.inf, ~finite)),
            "kept": torch.equal(total[:, 30:], before[:, 30:]),
        }


@pytest.mark.parametrize(
    ("merging", "error"),
    [(Merging(total=torch.float32, head_dim=64), 2e-6), (Merging(total=torch.bfloat16, head_dim=40, heads=1), 0.02)],
    ids=str,
)
def test_the_kernel_merges_as_the_formula_does(child: Pool, merging: Merging, error: float) -> None:
    outcome = child.result(merging, SECONDS)
    assert not isinstance(outcome, Failure), f"{outcome.outcome.value}: {outcome.detail}"
    assert outcome["output"] <= error, outcome
    assert outcome["lse"] <= 2e-6, outcome
    assert outcome["blind"], outcome
    assert outcome["kept"], outcome


def test_the_kernel_compiles_for_hopper() -> None:
    kind = MergeKind(total=DType.FLOAT32, dtype=DType.BFLOAT16, head_dim=128)
    assert compiler.build(render.merge_source(kind), 90).asm["cubin"]
