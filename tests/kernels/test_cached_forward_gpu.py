"""Parts that begin with a block ahead, on a card: what lies behind a length is asked for, and leads nowhere."""

from __future__ import annotations

from typing import Any

import kernels
import pytest
import torch
from torch import Tensor

from autoattn.core.key_cache import KeyCache
from autoattn.core.problem import DType, Layout, Problem
from autoattn.kernels import compiler, forward
from autoattn.tensors.operands import CachedKeys, Operands

pytestmark = pytest.mark.gpu

CAPACITY, HEADS, HEADS_KV, DIM, LAUNCHES = 1024, 16, 4, 128, 20
LENGTHS = [0, 1, 63, 65, 128, 129, 1000, CAPACITY]
AHEAD: dict[str, Any] = {"first_block": "ahead", "parts_read": "at_once", "mask_loop": "every", "num_stages": 2}
TILES: list[dict[str, Any]] = [
    {"BLOCK_N": 64, "SPLITS": 16},
    {"BLOCK_N": 128, "SPLITS": 8},
    {"BLOCK_N": 128, "SPLITS": 2},  # of which each walks on
    {"BLOCK_N": 64, "SPLITS": 16, "parts_read": "by_rows"},
    {"BLOCK_N": 32, "SPLITS": 32, "parts_read": "by_groups"},
]


def make_problem(cache: str) -> Problem:
    sizes = {"batch": len(LENGTHS), "heads_q": HEADS, "heads_kv": HEADS_KV, "seq_q": 1, "seq_kv": CAPACITY}
    return kernels.problem(
        **sizes, head_dim=DIM, dtype=DType.BFLOAT16, mask="full", layout=Layout.BSHD, cache=KeyCache.parse(cache)
    )


def operands(problem: Problem) -> tuple[Operands, Tensor]:
    """A cache whose keys behind the lengths are NaN and whose pages there do not exist; and the output in float32."""
    assert problem.cache is not None
    page = problem.cache.page or CAPACITY
    columns = CAPACITY // page
    key, value = (
        torch.randn(problem.batch, CAPACITY, HEADS_KV, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    query = torch.randn(problem.batch, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
    expected = torch.zeros(problem.batch, HEADS, 1, DIM, device="cuda")
    for row, length in enumerate(LENGTHS):
        keys, values = (
            tensor[row, :length].float().transpose(0, 1).repeat_interleave(HEADS // HEADS_KV, 0)
            for tensor in (key, value)
        )
        if length:
            expected[row] = (query[row].float() @ keys.mT * DIM**-0.5).softmax(-1) @ values
        key[row, length:] = value[row, length:] = torch.nan
    table = None
    if problem.cache.page:
        table = torch.randperm(problem.batch * columns, device="cuda").int().view(problem.batch, columns)
        key, value = (
            torch.empty_like(tensor)
            .view(-1, page, HEADS_KV, DIM)
            .index_copy_(0, table.flatten().long(), tensor.view(-1, page, HEADS_KV, DIM))
            for tensor in (key, value)
        )
        for row, length in enumerate(LENGTHS):
            table[row, -(-length // page) :] = 2**30
    cache = CachedKeys(lengths=torch.tensor(LENGTHS, device="cuda", dtype=torch.int32), capacity=CAPACITY, pages=table)
    given = Operands(query=query, key=key.transpose(1, 2), value=value.transpose(1, 2), scale=DIM**-0.5, cache=cache)
    return given, expected


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("cache", ["contiguous", "paged:16", "paged:64"])
def test_a_first_block_ahead_gives_the_output_of_the_keys_that_are_there_and_the_same_bits_each_time(
    cache: str, tile: dict[str, Any]
) -> None:
    problem = make_problem(cache)
    source = kernels.source(problem, num_warps=4, PACK_GQA=1, **{**AHEAD, **tile})
    kernel = compiler.load(source, torch.device("cuda", 0))
    given, expected = operands(problem)
    outputs = []
    for _ in range(LAUNCHES):
        outputs.append(forward.empty_output(problem, given.query))
        forward.launch(kernel, problem, given, outputs[-1], None)
    torch.testing.assert_close(outputs[0].float(), expected, atol=0.01, rtol=0.01)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
