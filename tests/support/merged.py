"""Kernels that merge their output into one of other keys: compared with a merge in float64 of the separate outputs."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autoattn.core.problem import Problem
from autoattn.core.variant import Source, Traits
from autoattn.kernels import forward
from autoattn.kernels.compiler import Kernel, load
from autoattn.reference import merge_formula
from autoattn.reference.inputs import Scores
from autoattn.tensors.partial_outputs import PartialOutputs
from autoattn.validation import output_check
from autoattn.validation.output_check import Case

GUARD_ROWS = 3  # of NaN behind the output and the LSE of each head
CPU = torch.device("cpu")


def traits_for(traits: Traits, problem: Problem, running: torch.dtype) -> Traits:
    """The traits of a kernel that merges into an output of `running` numbers, as `room_for` lays it out."""
    return forward.merging(traits, room_for(problem, 1, 1, 8, running, CPU)[0], problem.dtype.bytes)


def room_for(problem: Problem, batch: int, heads: int, rows: int, running: torch.dtype, device: torch.device) -> Any:
    """Output [batch, heads, rows, head_dim_v] and LSE [batch, heads, rows], views into NaN."""
    room = torch.full((batch, rows + GUARD_ROWS, heads, problem.head_dim_v), math.nan, dtype=running, device=device)
    sums = torch.full((batch, heads, rows + GUARD_ROWS), math.nan, device=device)
    return room[:, :rows].transpose(1, 2), sums[:, :, :rows]


def fault(kernel: Kernel, case: Case, running: torch.dtype) -> str:
    """What is wrong with a merge, in words; empty where it is right.

    A third of the rows have seen no key before, and their output is NaN: kernels must not read it.
    """
    problem, expected_lse = case.problem, case.expected_lse.float()
    batch, heads, rows = expected_lse.shape
    device = case.expected.device
    generator = torch.Generator().manual_seed(1)
    output, lse = room_for(problem, batch, heads, rows, running, device)
    output.copy_(torch.randn(output.shape, generator=generator))
    near = torch.where(expected_lse.isfinite(), expected_lse, 0.0)
    lse.copy_(near + 3.0 * torch.randn(lse.shape, generator=generator).to(device))
    unseen = (torch.rand(lse.shape, generator=generator) < 0.3).to(device)
    lse[unseen] = -math.inf
    output[unseen] = math.nan
    before, before_lse = output.clone(), lse.clone()
    parts = PartialOutputs(
        first=before.double(), second=case.expected, first_lse=before_lse.double(), second_lse=case.expected_lse
    )
    expected, total_lse = merge_formula.merge(parts)
    forward.launch(kernel, problem, case.operands, output, lse)
    blind = case.expected_lse == -math.inf
    if not torch.equal(_bits(output[blind]), _bits(before[blind])) or not torch.equal(lse[blind], before_lse[blind]):
        return "a row that sees no key is not as it was"
    if not _is_nan_behind(output) or not bool(lse._base[:, :, rows:].isnan().all()):  # type: ignore[index]
        return "it wrote behind the output"
    return _difference(case, (output, lse), (expected, total_lse), ~blind)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(nan=12345.0)


def _is_nan_behind(output: Tensor) -> bool:
    room = output._base
    assert room is not None
    return bool(room[:, output.shape[2] :].isnan().all())


def _difference(case: Case, actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], seen: Tensor) -> str:
    """Where rows that see a key differ from what they must be."""
    if not torch.equal(actual[0].isnan() & seen[..., None], expected[0].isnan() & seen[..., None]):
        return "its NaN do not stand where the reference has them"
    rounding = 2.0 * torch.finfo(actual[0].dtype).eps * float(expected[0][seen].nan_to_num(0.0, 0.0, 0.0).abs().max())
    error = (actual[0].double() - expected[0])[seen].abs().nan_to_num(nan=0.0).max()
    if float(error) > case.allowed + rounding:
        return f"error {float(error):.3g} where {case.allowed + rounding:.3g} is allowed"
    error = (actual[1].double() - expected[1])[seen].abs().nan_to_num(nan=0.0).max()
    return f"LSE error {float(error):.3g}" if float(error) > output_check.LSE_ERROR else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """A kernel and a case, for a child in which Triton's interpreter runs."""

    source: Source
    problem: Problem
    running: torch.dtype
    lengths: tuple[int, int]
    scores: Scores = Scores.PLAIN
    sm_count: int = 1

    def run(self, memory: dict[Hashable, Any]) -> str:
        """What is wrong with it, in words."""
        torch.set_num_threads(1)
        kernel = replace(load(self.source, CPU), sm_count=self.sm_count)
        generator = torch.Generator().manual_seed(0)
        case = output_check.make_small_case(self.problem, *self.lengths, 1, CPU, generator, scores=self.scores)
        return fault(kernel, case, self.running)
