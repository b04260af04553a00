"""Calls on caches of keys and values, with NaN wherever a kernel must not look; kernels run in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import kernels
import torch
from interpreted import CPU, SECONDS
from torch import Tensor

from autoattn.core.key_cache import KeyCache
from autoattn.core.problem import Layout, Problem
from autoattn.core.variant import Variant
from autoattn.kernels import forward
from autoattn.kernels.compiler import load
from autoattn.reference import attention_formula
from autoattn.tensors.operands import CachedKeys, Operands
from autoattn.validation import output_check
from autoattn.workers.worker_pool import Failure, Pool

GARBAGE = 2**30  # a page that nobody may read
CAPACITY = 48
LENGTHS = (0, 5, 37, 48)  # keys of each sequence
QUERIES = (3, 1, 0, 5)  # of each packed sequence


def problem(cache: KeyCache, lengths: Sequence[int] = LENGTHS, *, packed: bool = False, **changes: Any) -> Problem:
    """A small problem on a cache; `mask` may be words."""
    facts: dict[str, Any] = {"batch": len(lengths), "seq_q": 3, "seq_kv": CAPACITY, "layout": Layout.BSHD}
    if packed:
        tokens = {"tokens_q": sum(QUERIES) + 2, "tokens_kv": CAPACITY * len(lengths)}
        facts |= {"layout": Layout.PACKED, "seq_q": max(QUERIES), **tokens}
    return kernels.problem(cache=cache, **facts | changes)


def operands(problem: Problem, lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> Operands:
    """Random operands; what lies behind a sequence's keys is NaN, and pages behind them are garbage.

    Args:
        seed: of which row or page of the cache a key lies in; the numbers are the same for each.
    """
    assert problem.cache is not None
    numbers, places = torch.Generator(), torch.Generator().manual_seed(seed)
    dtype = attention_formula.TORCH_DTYPE[problem.dtype]

    def normal(*shape: int, sequence: int = -1) -> Tensor:
        """Those of a sequence are the same in every batch."""
        numbers.manual_seed(sequence + 7)
        return torch.randn(shape, generator=numbers).to(dtype)

    queries = (
        (1, problem.heads_q, problem.tokens_q) if problem.packed else (problem.batch, problem.heads_q, problem.seq_q)
    )
    query = normal(*queries, problem.head_dim)  # the first rows are the same in every batch
    pads = (
        torch.arange(problem.batch, dtype=torch.int32) * 2
        if problem.cache.leftpad
        else torch.zeros(problem.batch).int()
    )
    counts = [max(0, length - pad) for length, pad in zip(lengths, pads.tolist(), strict=True)]
    keys = [normal(count, problem.heads_kv, problem.head_dim, sequence=place) for place, count in enumerate(counts)]
    values = [
        normal(count, problem.heads_kv, problem.head_dim_v, sequence=place + 99) for place, count in enumerate(counts)
    ]
    page = problem.cache.page or CAPACITY
    columns = -(-CAPACITY // page)
    count = problem.batch * columns + 2
    table = torch.randperm(count, generator=places)[: problem.batch * columns].view(problem.batch, columns).int()
    if not problem.cache.page and not problem.cache.rows:
        count, table = problem.batch, torch.arange(problem.batch).int()[:, None]
    stored = torch.float8_e4m3fn if problem.caches_float8 else dtype
    key = torch.full((count, page, problem.heads_kv, problem.head_dim), math.nan, dtype=stored)
    value = torch.full((count, page, problem.heads_kv, problem.head_dim_v), math.nan, dtype=stored)
    if problem.cache.latent:
        value, values = key[..., : problem.head_dim_v], [tensor[..., : problem.head_dim_v] for tensor in keys]
    for sequence, pad in enumerate(pads.tolist()):
        places_of = torch.arange(len(keys[sequence])) + pad
        rows = table[sequence, places_of // page].long()
        key[rows, places_of % page] = keys[sequence].to(stored)
        value[rows, places_of % page] = values[sequence].to(stored)
        if problem.cache.page:
            table[sequence, -(-lengths[sequence] // page) :] = GARBAGE
    cache = CachedKeys(
        lengths=torch.tensor(lengths, dtype=torch.int32),
        capacity=columns * page,
        pages=table if problem.cache.page else None,
        rows=table[:, 0].contiguous() if problem.cache.rows else None,
        leftpad=pads if problem.cache.leftpad else None,
    )
    modifiers = problem.modifiers
    return Operands(
        query=query,
        key=key.transpose(1, 2),
        value=value.transpose(1, 2),
        scale=problem.head_dim**-0.5,
        key_scale=torch.rand(problem.heads_kv, generator=numbers).add(0.5).expand(problem.batch, -1)
        if problem.caches_float8
        else None,
        value_scale=torch.rand(problem.batch, problem.heads_kv, generator=numbers) + 0.5
        if problem.caches_float8
        else None,
        cu_seqlens_q=torch.tensor([0, *QUERIES]).cumsum(0).int() if problem.packed else None,
        cache=cache,
        softcap=2.0 if modifiers.softcap else 0.0,
        slopes=torch.rand(problem.batch, problem.heads_q, generator=numbers) if modifiers.alibi else None,
        sinks=torch.randn(problem.heads_q, generator=numbers) if modifiers.sinks else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRun:
    """One variant on operands, in the child."""

    problem: Problem
    variant: Variant
    lengths: tuple[int, ...] = LENGTHS
    seed: int = 0
    read_lengths: tuple[int, ...] | None = None  # those that the kernel reads, where they lie

    def run(self, memory: dict[Hashable, Any]) -> tuple[Tensor, Tensor]:
        """Output and LSE."""
        torch.set_num_threads(1)
        from autoattn.codegen import render

        given = operands(self.problem, self.lengths, seed=self.seed)
        if self.read_lengths is not None:
            assert given.cache is not None
            given = replace(
                given, cache=replace(given.cache, lengths=torch.tensor(self.read_lengths, dtype=torch.int32))
            )
        traits = forward.traits_of(given.query, given.key, given.value, lse=True)
        kernel = load(render.render(self.problem, self.variant, traits), CPU)
        output = output_check.empty_output(self.problem, 0, CPU)
        lse = torch.full(output.shape[:3], math.nan)
        forward.launch(kernel, self.problem, given, output, lse)
        return output, lse


def run(child: Pool, problem: Problem, **changes: Any) -> tuple[Tensor, Tensor]:
    """Output and LSE of the smallest variant, changed; `lengths`, `seed` and `told` are those of CachedRun."""
    facts = {name: changes.pop(name) for name in ("lengths", "seed", "read_lengths") if name in changes}
    outcome = child.result(CachedRun(problem=problem, variant=kernels.variant(**changes), **facts), SECONDS)
    assert not isinstance(outcome, Failure), f"{outcome.outcome.value}: {outcome.detail}"
    output, lse = outcome
    return output, lse


def check(child: Pool, problem: Problem, lengths: Sequence[int] = LENGTHS, **changes: Any) -> None:
    """Compares a kernel with the reference in float64."""
    output, lse = run(child, problem, lengths=tuple(lengths), **changes)
    expected, expected_lse = attention_formula.attention(problem, operands(problem, lengths))
    error = 2e-3 if problem.dtype.bytes == 2 else 1e-5
    torch.testing.assert_close(output.double(), expected, rtol=2 * error, atol=error)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)
