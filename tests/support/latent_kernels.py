"""Problems and variants of the template for latent caches on Hopper, whose kernels run in the interpreter of Gluon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cached
import torch
from torch import Tensor

from autoattn.codegen import render, search_space
from autoattn.core.key_cache import KeyCache
from autoattn.core.problem import DType, Problem
from autoattn.core.variant import Source, Value, Variant
from autoattn.kernels import forward
from autoattn.kernels.compiler import Kernel, load
from autoattn.reference import attention_formula
from autoattn.tensors.operands import Operands

TEMPLATE = "latent/forward"
CPU = torch.device("cpu")
BASE: dict[str, Value] = {
    "BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 2, "byte_stages": 1, "SPLITS": 1, "PART_BLOCKS": 1, "PERSISTENT": 0,
}  # fmt: skip
DIMS: dict[str, Any] = {
    "head_dim": 96,
    "head_dim_v": 64,
    "heads_q": 8,
    "heads_kv": 1,
}  # the smallest that both consumers share
MLA: dict[str, Any] = {"head_dim": 576, "head_dim_v": 512, "heads_q": 16, "heads_kv": 1}


def problem(text: str, lengths: Sequence[int] = cached.LENGTHS, **changes: Any) -> Problem:
    """A small problem on a latent cache, of one key head."""
    facts: dict[str, Any] = {"dtype": DType.BFLOAT16, "seq_q": 1, "seq_kv": cached.CAPACITY, **DIMS}
    return cached.problem(KeyCache.parse(text), lengths, **facts | changes)


def variant(**changes: Value) -> Variant:
    """The smallest variant, changed."""
    return search_space.load(TEMPLATE).variant(BASE | changes)


def source(problem: Problem, **changes: Value) -> Source:
    """The rendered kernel of the smallest variant, changed, which also gives the LSE."""
    return render.render(problem, variant(**changes), render.natural_traits(problem, lse=True))


def run(problem: Problem, kernel: Kernel, given: Operands) -> tuple[Tensor, Tensor]:
    """Output and LSE, [batch, heads_q, seq_q, ...], of a kernel in the interpreter."""
    output = forward.empty_output(problem, given.query).fill_(math.nan)
    lse = torch.full(output.shape[:3], math.nan)
    forward.launch(kernel, problem, given, output, lse)
    return output, lse


def check(problem: Problem, lengths: Sequence[int] = cached.LENGTHS, *, programs: int = 1, **changes: Value) -> None:
    """Compares a kernel with the reference in float64; `programs` is how many persistent ones there are."""
    given = cached.operands(problem, lengths)
    output, lse = run(problem, replace(load(source(problem, **changes), CPU), sm_count=programs), given)
    expected, expected_lse = attention_formula.attention(problem, given)
    # What weights and outputs of bfloat16 are rounded by; float8 latents are multiplied in float16.
    error = 2e-3 if problem.dtype is DType.FLOAT16 else 1e-2
    torch.testing.assert_close(output.double(), expected, rtol=2 * error, atol=error)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)
