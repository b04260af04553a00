"""Kernels run in Triton's interpreter, in a child process: there Triton is imported with TRITON_INTERPRET=1, here not.

A job travels as a recipe and comes back as numbers, so that no tensor crosses between the processes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kernels
import torch
from checkout_paths import CHECKOUT, python_path
from torch import Tensor

from autoattn.core.problem import Layout, Problem
from autoattn.core.variant import Source, Traits
from autoattn.kernels import forward
from autoattn.kernels.compiler import load
from autoattn.reference import attention_formula, inputs
from autoattn.tensors import block_table
from autoattn.tensors.operands import Operands
from autoattn.validation import output_check
from autoattn.workers.worker_pool import Failure, Pool

SECONDS = 120.0
CPU = torch.device("cpu")
GUARD_ROWS = 3  # of NaN behind each sequence


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
    """A kernel, and operands to compare it with the reference on."""

    source: Source
    problem: Problem
    make: Callable[[Problem], Operands]  # a function of a module, so that its name can be sent
    scale: float | None = None
    sm_count: int = 1
    leave_out: int | None = None  # a query row that is not compared

    def run(self, memory: dict[Hashable, Any]) -> Result:
        """Runs in the child."""
        torch.set_num_threads(1)
        operands = self.make(self.problem)
        if self.scale is not None:
            operands = replace(operands, scale=self.scale)
        kernel = replace(load(self.source, CPU), sm_count=self.sm_count)
        output = output_check.empty_output(self.problem, GUARD_ROWS, CPU)
        lse = torch.full(output.shape[:3], math.nan) if self.source.traits.lse else None
        forward.launch(kernel, self.problem, operands, output, lse)
        rows = torch.tensor([row for row in range(output.shape[2]) if row != self.leave_out])
        return compared(self.problem, operands, output, lse, rows)


def compared(problem: Problem, operands: Operands, output: Tensor, lse: Tensor | None, rows: Tensor) -> Result:
    """Some rows of the output, a view into NaN, and of the LSE against the reference; NaN and inf must match too."""
    expected, expected_lse = attention_formula.attention(problem, operands, rows=rows)
    finite = replace(operands, value=operands.value.nan_to_num(0.0, 0.0, 0.0))
    exact, _ = attention_formula.attention(problem, finite, rows=rows)
    rough = attention_formula.low_precision(problem, finite, rows=rows).double()
    coarse = exact.to(output.dtype)
    absolute = 2.0 * float((coarse + 0.3 - 0.3 - coarse).abs().max())
    if output.dtype is torch.float32:
        ulps = output_check.FLOAT32_ULPS[problem.precision]
        absolute += ulps * torch.finfo(torch.float32).eps * float(finite.value.abs().max())
    actual = output[:, :, rows].double()
    error = torch.where(alike(actual, expected), 0.0, (actual - expected).abs()).nan_to_num(nan=math.inf)
    blind = expected_lse == -math.inf
    room = output._base if output._base is not None else output
    result = Result(
        max_error=float(error.max()),
        allowed=output_check.ERROR_RATIO * float((rough - exact).abs().max()) + absolute,
        blind_zero=bool((actual[blind] == 0.0).all()),
        untouched=int(room.isnan().sum()) - int(output.isnan().sum()) == room.numel() - output.numel(),
    )
    if lse is None:
        return result
    seen = (lse[:, :, rows].double() - expected_lse)[~blind].abs().nan_to_num(nan=math.inf)
    return replace(
        result,
        lse_error=float(seen.max()) if seen.numel() else 0.0,
        lse_blind=torch.equal(lse[:, :, rows] == -math.inf, blind),
    )


def alike(actual: Tensor, expected: Tensor) -> Tensor:
    """Where both are NaN or the same infinity."""
    return (actual.isnan() & expected.isnan()) | (actual == expected)


def pool() -> Pool:
    """One child; it finds the helpers, and the test modules whose jobs it runs."""
    folders = [folder for folder in sys.path if Path(folder).is_relative_to(CHECKOUT / "tests")]
    return Pool(
        size=1,
        environment={
            "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path(*folders),
            "OMP_NUM_THREADS": "1",
        },
    )  # fmt: skip


def result(child: Pool, run: Run) -> Result:
    """What became of a run; a failure of the child fails the test in words."""
    outcome = child.result(run, SECONDS)
    assert not isinstance(outcome, Failure), f"{outcome.outcome.value}: {outcome.detail}"
    assert isinstance(outcome, Result)
    return outcome


def inside_nan(problem: Problem) -> Operands:
    """Normal numbers in the problem's layout; behind every sequence stand rows of NaN."""
    return inputs.make(problem, CPU, generator(), guard=GUARD_ROWS)


def run(child: Pool, problem: Problem, make: Any = inside_nan, *, lse: bool = True, scale: float | None = None,
        traits: Traits | None = None, sm_count: int = 1, **changes: Any) -> Result:  # fmt: skip
    """What became of the smallest variant, changed, with the traits that these operands ask for."""
    traits = traits if traits is not None else traits_for(problem, make, lse)
    source = kernels.source(problem, traits, **changes)
    return result(child, Run(source=source, problem=problem, make=make, scale=scale, sm_count=sm_count))


def traits_for(problem: Problem, make: Any, lse: bool) -> Traits:
    """What a caller would ask for with these operands."""
    operands = make(problem)
    tensors = (operands.query, operands.key, operands.value, forward.empty_output(problem, operands.query))
    return forward.traits_of(*tensors, lse=lse, bias=operands.bias)


# --- operands ---------------------------------------------------------------------------------------------------------


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(problem: Problem) -> Operands:
    """Normal numbers, contiguous."""
    return inputs.make(problem, CPU, generator())


def moved(operands: Operands, move: Callable[[Tensor], Tensor]) -> Operands:
    """The same with query, key and value as `move` gives them."""
    return replace(operands, query=move(operands.query), key=move(operands.key), value=move(operands.value))


def transposed(problem: Problem) -> Operands:
    """The head dim is not the last axis in memory."""
    return moved(dense(problem), lambda tensor: tensor.transpose(2, 3).contiguous().transpose(2, 3))


def odd_strides(problem: Problem) -> Operands:
    """Every axis is a slice with a step or an offset, and the storage starts at an odd element."""

    def cut(tensor: Tensor) -> Tensor:
        batch, heads, seq, head_dim = tensor.shape
        room = torch.full((batch, 2 * heads + 1, 3 * seq + 2, 2 * head_dim + 3), math.nan, dtype=tensor.dtype)
        view = room[:, 1::2, 2::3, 3::2]
        view.copy_(tensor)
        return view

    return moved(dense(problem), cut)


def expanded(problem: Problem) -> Operands:
    """Strides of 0: one sequence for all of the batch, one key head for all heads, one value for all positions."""
    whole = dense(problem)
    return replace(
        whole,
        query=whole.query[:1].expand_as(whole.query),
        key=whole.key[:, :1].expand_as(whole.key),
        value=whole.value[:, :, :1].expand_as(whole.value),
    )


def biased_by_row(problem: Problem) -> Operands:
    """All queries share the row of a bias of pairs: its step between queries is 0."""
    whole = inside_nan(problem)
    assert whole.bias is not None
    row = whole.bias[:1, :1, :1]
    return replace(whole, bias=row.expand(whole.bias.shape), narrow_bias=row)


def rising(problem: Problem) -> Operands:
    """Each block of keys has far larger scores than the one before: by more than 2**8 from one to the next."""
    whole = dense(problem)
    steps = torch.arange(problem.seq_kv)[:, None] / problem.seq_kv
    key = (whole.key.abs() * 0.1 + 24.0 * steps).to(whole.key.dtype)
    return replace(whole, query=whole.query.abs() + 0.5, key=key)


def falling(problem: Problem) -> Operands:
    """Each block of keys has far smaller scores than the one before."""
    whole = rising(problem)
    return replace(whole, key=whole.key.flip(2))


def overflowing(problem: Problem) -> Operands:
    """Scores that rise so far above the first block's that even float32 weights around its maximum are inf."""
    whole = rising(problem)
    return replace(whole, query=whole.query * 8.0)


def sunken(problem: Problem) -> Operands:
    """All scores lie far below zero."""
    whole = overflowing(problem)
    return replace(whole, key=-whole.key - 10.0)


def zeros(problem: Problem) -> Operands:
    """All scores are equal."""
    whole = dense(problem)
    return replace(whole, query=whole.query * 0.0)


def nan_row(problem: Problem) -> Operands:
    """Query row 5 is NaN, the others are not."""
    whole = dense(problem)
    whole.query[:, :, 5] = math.nan
    return whole


def hidden(problem: Problem, operands: Operands) -> Tensor:
    """[seq_kv] booleans: keys that no query of the only sequence sees."""
    rows = torch.arange(problem.seq_q)
    seen = attention_formula.visible(problem, operands, rows).flatten(0, 1).any(0)
    if operands.bias is not None:
        seen &= (
            (operands.bias[0] if operands.bias.dtype is torch.bool else operands.bias[0] > -math.inf)
            .flatten(0, 1)
            .any(0)
        )
    return ~seen


def nan_in_hidden_keys(problem: Problem) -> Operands:
    """Keys and values that no query sees are NaN; only one sequence."""
    whole = inside_nan(problem)
    lost = hidden(problem, whole)
    whole.key[:, :, lost] = math.nan
    whole.value[:, :, lost] = math.nan
    return whole


def wild_values(problem: Problem) -> Operands:
    """Here and there a value is NaN, inf or -inf, in columns of its own: rows that see it show it, no others do."""
    whole = inside_nan(problem)
    for place, number in enumerate((math.nan, math.inf, -math.inf)):
        whole.value[..., (5 + 9 * place) % whole.value.shape[2], place] = number
    return whole


def steep(problem: Problem) -> Operands:
    """Scores that rise so far that weights around the first keys' maximum overflow even in float32."""
    return inputs.make(problem, CPU, generator(), guard=GUARD_ROWS, scores=inputs.Scores.STEEP)


def loud_block_that_is_not_listed(problem: Problem) -> Operands:
    """A table without the first block of keys, whose scores are far above all others."""
    whole = inside_nan(problem)
    whole.query[..., -1] = 16.0
    whole.key[:, :, : problem.mask.block_kv, -1] = 60.0
    shape = (1, 1, -(-problem.seq_q // problem.mask.block_q), -(-problem.seq_kv // problem.mask.block_kv))
    kept = torch.ones(shape, dtype=torch.bool)
    kept[..., 0] = False
    sizes = {"block_q": problem.mask.block_q, "block_kv": problem.mask.block_kv, "seq_kv": problem.seq_kv}
    return replace(whole, table=block_table.table_of(kept, **sizes))


def tables_of_heads(problem: Problem) -> Operands:
    """Each sequence and head has a table of its own; the first queries see nothing, the last keys are not seen."""
    mask = problem.mask
    shape = (problem.batch, problem.heads_q, -(-problem.seq_q // mask.block_q), -(-problem.seq_kv // mask.block_kv))
    kept, cut = (torch.rand(shape, generator=generator(seed)) < share for seed, share in ((1, 0.6), (2, 0.5)))
    kept[:, :, 0] = False
    kept[..., -1] = False
    sizes = {"block_q": mask.block_q, "block_kv": mask.block_kv, "seq_kv": problem.seq_kv}
    return replace(inside_nan(problem), table=block_table.table_of(kept, **sizes, partial=cut if mask.mod else None))


def ragged(problem: Problem) -> Operands:
    """Packed sequences of all lengths: none, keys alone, queries alone, and a tail of 4 tokens behind the last."""
    return inputs.make(problem, CPU, generator(), guard=GUARD_ROWS, lengths=RAGGED)


RAGGED = ((0, 0), (19, 34), (0, 7), (5, 0), (33, 17), (1, 1), (2, 20))
TAIL = 4


def packed(**changes: Any) -> Problem:
    """The problem of `ragged`."""
    queries, keys = zip(*RAGGED, strict=True)
    lengths = {"batch": len(RAGGED), "seq_q": max(queries), "seq_kv": max(keys)}
    tokens = {"tokens_q": sum(queries) + TAIL, "tokens_kv": sum(keys) + TAIL}
    return kernels.problem(layout=Layout.PACKED, **{**lengths, **tokens, **changes})
