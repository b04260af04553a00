"""Kernels run in Triton's interpreter, in a child process: there Triton is imported with TRITON_INTERPRET=1, here not.

A job travels as a recipe and comes back as numbers, so that no tensor crosses between the processes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoattn import reference, validate
from autoattn.compile import load
from autoattn.ops import forward
from autoattn.problem import Layout, Problem
from autoattn.variant import Source
from autoattn.workers import Failure, Pool

SECONDS = 120.0
CPU = torch.device("cpu")
Inputs = tuple[Tensor, Tensor, Tensor]  # as [batch, heads, seq, head_dim] views


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How far a kernel's answer is from the reference's."""

    max_error: float  # largest absolute error of the output; inf when a number is missing or stands elsewhere
    allowed: float  # the gate's rule for these inputs
    lse_error: float = 0.0  # largest absolute error of the LSE where it is finite
    lse_blind: bool = True  # it is -inf just where a row sees no key
    blind_zero: bool = True  # the output of such rows is 0
    untouched: bool = True  # what lies around the output is as it was

    @property
    def ok(self) -> bool:
        return (
            self.max_error <= self.allowed
            and self.lse_error <= 2e-3
            and self.lse_blind
            and self.blind_zero
            and self.untouched
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A kernel, and inputs to compare it with the reference on."""

    source: Source
    problem: Problem
    make: Callable[[Problem], Inputs]  # a function of a module, so that its name can be sent
    scale: float | None = None
    sm_count: int = 1
    leave_out: int | None = None  # a query row that is not compared; only without a mask

    def run(self, memory: dict[Hashable, Any]) -> Result:
        """Runs in the child."""
        torch.set_num_threads(1)
        query, key, value = self.make(self.problem)
        scale = self.problem.head_dim**-0.5 if self.scale is None else self.scale
        kernel = replace(load(self.source, CPU), sm_count=self.sm_count)
        output = validate.guarded(self.problem, self.problem.heads_q, self.problem.seq_q, 3, CPU, None)
        lse = torch.full(output.shape[:3], math.nan) if self.source.traits.lse else None
        forward.launch(kernel, query, key, value, output, lse, scale)
        if self.leave_out is not None:
            others = torch.arange(self.problem.seq_q) != self.leave_out
            query, output = query[:, :, others], output[:, :, others]
        return compared(self.problem, (query, key, value), output, lse, scale)


def compared(problem: Problem, inputs: Inputs, output: Tensor, lse: Tensor | None, scale: float) -> Result:
    """The output, a view into NaN, and the LSE against the reference."""
    expected, expected_lse = reference.attention(*inputs, mask=problem.mask, scale=scale)
    rough = reference.low_precision(*inputs, mask=problem.mask, scale=scale, precision=problem.precision).double()
    coarse = expected.to(output.dtype)
    absolute = 2.0 * float((coarse + 0.3 - 0.3 - coarse).abs().max())
    if output.dtype is torch.float32:
        absolute += validate.FLOAT32_ULPS * torch.finfo(torch.float32).eps * float(inputs[2].abs().max())
    error = (output.double() - expected).abs().nan_to_num(nan=math.inf)
    blind = expected_lse == -math.inf
    room = output._base if output._base is not None else output
    result = Result(
        max_error=float(error.max()),
        allowed=validate.ERROR_RATIO * float((rough - expected).abs().max()) + absolute,
        blind_zero=bool((output[blind] == 0.0).all()),
        untouched=int(room.isnan().sum()) == room.numel() - output.numel(),
    )
    if lse is None:
        return result
    seen = (lse.double() - expected_lse)[~blind].abs().nan_to_num(nan=math.inf)
    return replace(
        result,
        lse_error=float(seen.max()) if seen.numel() else 0.0,
        lse_blind=torch.equal(lse == -math.inf, blind),
    )


def pool() -> Pool:
    """One child; it finds the modules beside this file."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    return Pool(
        size=1,
        environment={
            "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1",
        },
    )  # fmt: skip


def result(child: Pool, run: Run) -> Result:
    """What became of a run; a failure of the child fails the test in words."""
    outcome = child.result(run, SECONDS)
    assert not isinstance(outcome, Failure), f"{outcome.outcome.value}: {outcome.detail}"
    assert isinstance(outcome, Result)
    return outcome


# --- inputs -----------------------------------------------------------------------------------------------------------


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inside_nan(problem: Problem) -> Inputs:
    """Normal numbers in the problem's layout; behind every sequence stand rows of NaN."""
    sizes = (
        (problem.heads_q, problem.seq_q),
        (problem.heads_kv, problem.seq_kv),
        (problem.heads_kv, problem.seq_kv),
    )
    return tuple(validate.guarded(problem, heads, seq, 3, CPU, generator()) for heads, seq in sizes)  # type: ignore[return-value]


def dense(problem: Problem) -> Inputs:
    """Normal numbers, contiguous."""
    dtype = reference.TORCH_DTYPE[problem.dtype]
    shapes = [
        (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim),
        *[(problem.batch, problem.heads_kv, problem.seq_kv, problem.head_dim)] * 2,
    ]
    rng = generator()
    tensors = [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]
    if problem.layout is Layout.BSHD:
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    return tensors[0], tensors[1], tensors[2]


def transposed(problem: Problem) -> Inputs:
    """The head dim is not the last axis in memory."""
    return tuple(tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in dense(problem))  # type: ignore[return-value]


def odd_strides(problem: Problem) -> Inputs:
    """Every axis is a slice with a step or an offset, and the storage starts at an odd element."""
    cut = []
    for tensor in dense(problem):
        batch, heads, seq, head_dim = tensor.shape
        room = torch.full((batch, 2 * heads + 1, 3 * seq + 2, 2 * head_dim + 3), math.nan, dtype=tensor.dtype)
        view = room[:, 1::2, 2::3, 3::2]
        view.copy_(tensor)
        cut.append(view)
    return cut[0], cut[1], cut[2]


def expanded(problem: Problem) -> Inputs:
    """Strides of 0: one sequence for all of the batch, one key head for all heads, one value for all positions."""
    query, key, value = dense(problem)
    return (
        query[:1].expand_as(query),
        key[:, :1].expand_as(key),
        value[:, :, :1].expand_as(value),
    )


def rising(problem: Problem) -> Inputs:
    """Each block of keys has far larger scores than the one before: by more than 2**8 from one to the next."""
    query, key, value = dense(problem)
    query = query.abs() + 0.5
    steps = torch.arange(problem.seq_kv)[:, None] / problem.seq_kv
    return query, (key.abs() * 0.1 + 24.0 * steps).to(query.dtype), value


def falling(problem: Problem) -> Inputs:
    """Each block of keys has far smaller scores than the one before."""
    query, key, value = rising(problem)
    return query, key.flip(2), value


def overflowing(problem: Problem) -> Inputs:
    """Scores that rise so far above the first block's that even float32 weights around its maximum are inf."""
    query, key, value = rising(problem)
    return query * 8.0, key, value


def sunken(problem: Problem) -> Inputs:
    """All scores lie far below zero."""
    query, key, value = overflowing(problem)
    return query, -key - 10.0, value


def zeros(problem: Problem) -> Inputs:
    """All scores are equal."""
    query, key, value = dense(problem)
    return query * 0.0, key, value


def nan_row(problem: Problem) -> Inputs:
    """Query row 5 is NaN, the others are not."""
    query, key, value = dense(problem)
    query[:, :, 5] = math.nan
    return query, key, value
