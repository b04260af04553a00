"""Random caches: they hold the keys of each sequence, and NaN beside."""

from __future__ import annotations

import kernels
import pytest
import torch

from autoattn.core.key_cache import KeyCache
from autoattn.core.problem import Layout, Problem
from autoattn.reference import attention_formula, cache_inputs, inputs
from autoattn.tensors.operands import Operands

CPU = torch.device("cpu")
LENGTHS = ((3, 21), (3, 0), (3, 50))


def operands_of(problem: Problem) -> Operands:
    return inputs.make(problem, CPU, torch.Generator().manual_seed(0), lengths=LENGTHS)


@pytest.mark.parametrize(
    "text", ["contiguous", "contiguous,rows", "contiguous,rows,leftpad", "paged:1", "paged:16", "paged:16,float8_e4m3"]
)
def test_a_cache_says_the_same_as_tensors_of_their_own(text: str) -> None:
    problem = kernels.problem(batch=3, seq_q=3, mask="causal", cache=KeyCache.parse(text), layout=Layout.BSHD)
    operands = operands_of(problem)
    assert problem.cache is not None
    assert operands.cache is not None
    assert bool(operands.key.isnan().any())
    output, lse = attention_formula.attention(problem, operands)
    held = cache_inputs.held_apart(problem)
    plain = inputs.make(held, CPU, torch.Generator().manual_seed(0))
    assert torch.equal(plain.query, operands.query)
    for sequence, (_, keys) in enumerate(LENGTHS):
        alone = kernels.problem(batch=1, seq_q=3, seq_kv=max(keys, 1), mask="causal")
        part = Operands(
            query=plain.query[sequence : sequence + 1],
            key=plain.key[sequence : sequence + 1, :, :keys].to(operands.key.dtype),
            value=plain.value[sequence : sequence + 1, :, :keys].to(operands.key.dtype),
            scale=plain.scale,
            key_scale=None if operands.key_scale is None else operands.key_scale[sequence : sequence + 1],
            value_scale=None if operands.value_scale is None else operands.value_scale[sequence : sequence + 1],
        )
        expected, expected_lse = attention_formula.attention(alone, part)
        assert torch.equal(output[sequence], expected[0])
        assert torch.equal(lse[sequence], expected_lse[0])
