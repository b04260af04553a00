"""What of Hopper's backward template is plain Triton, in the interpreter: what goes before and behind the sums."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import hopper_gradients
import interpreted
import pytest
import torch
from torch import Tensor

from autoattn.core.problem import DType
from autoattn.core.variant import Source, Traits
from autoattn.kernels.compiler import load_module
from autoattn.workers.worker_pool import Failure, Pool

pytestmark = pytest.mark.interpreter

BATCH, HEADS, SEQ = 2, 3, 150  # no multiple of a block of queries
ROWS = 256  # stride_r


def launch(module: Any, name: str, **arguments: Any) -> None:
    kernel = getattr(module, name)
    for barrier in ("let_next_begin", "wait_for_kernel_before"):  # PTX, between kernels that here follow one another
        setattr(module, barrier, lambda: None)
    sizes = {"batch": BATCH, "heads_q": HEADS, "heads_kv": HEADS, "seq_q": SEQ, "seq_kv": SEQ, "stride_r": ROWS}
    kernel[module.grids(BATCH, HEADS, HEADS, SEQ, SEQ)[name]](
        *({**sizes, **arguments}[each] for each in kernel.arg_names)
    )


def strides(name: str, tensor: Tensor) -> dict[str, int]:
    return {f"stride_{name}{axis}": step for axis, step in zip("bhs", tensor.stride(), strict=False)}


def padded(*shape: int) -> Tensor:
    """float16 inside NaN."""
    room = torch.full((*shape[:-2], shape[-2] + 3, shape[-1] + 8), math.nan, dtype=torch.float16)
    return room[..., : shape[-2], : shape[-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What backward_rows leaves for a random output, its gradient and an LSE, and what it should."""

    source: Source
    head_dim: int
    lse: bool
    columns: int  # of 64 queries, to which consumers add; none where the first of those that take turns writes

    def run(self, memory: dict[Hashable, Any]) -> dict[str, tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        module = load_module(self.source)
        output, output_grad = (padded(BATCH, HEADS, SEQ, self.head_dim) for _ in range(2))
        output.copy_(torch.randn(output.shape, generator=generator))
        output_grad.copy_(torch.randn(output.shape, generator=generator))
        lse, lse_grad = (torch.randn(BATCH, HEADS, SEQ, generator=generator) for _ in range(2))
        lse[:, :, 7] = -math.inf
        rows = {name: torch.full((BATCH, HEADS, ROWS), math.nan) for name in ("row_lse", "delta")}
        sums = torch.full((module.sums(BATCH, HEADS, SEQ),), math.nan)
        counters = module.turns(BATCH, HEADS, SEQ) if hasattr(module, "turns") else 0
        turns = torch.full((counters,), 7, dtype=torch.int32)
        launch(
            module, "backward_rows", output_ptr=output, output_grad_ptr=output_grad, lse_ptr=lse, lse_grad_ptr=lse_grad,
            row_lse_ptr=rows["row_lse"], delta_ptr=rows["delta"], query_sums_ptr=sums, turns_ptr=turns,
            **strides("o", output), **strides("do", output_grad),
        )  # fmt: skip
        row_lse = torch.full((BATCH, HEADS, ROWS), math.inf)
        row_lse[:, :, :SEQ] = (lse * math.log2(math.e)).masked_fill(lse == -math.inf, math.inf)
        delta = torch.zeros(BATCH, HEADS, ROWS)
        delta[:, :, :SEQ] = (output.float() * output_grad.float()).sum(-1) - self.lse * lse_grad
        cleared = torch.full_like(sums, math.nan)
        cleared.view(-1, 64 * width_of(self.head_dim))[:, : 64 * self.columns] = 0.0
        return {
            "row_lse": (rows["row_lse"], row_lse),
            "delta": (rows["delta"], delta),
            "sums": (sums, cleared),
            "turns": (turns, torch.zeros_like(turns)),
        }


@pytest.mark.parametrize("schedule", ["one_tile", "dynamic"])
@pytest.mark.parametrize(
    ("head_dim", "lse", "order", "columns"),
    [(128, False, "any", 128), (64, True, "ascending", 0), (40, False, "ascending", 0), (200, True, "any", 256),
     (80, False, "any", 64 + 16)],
)  # fmt: skip
def test_delta_and_lse_stand_for_every_row_and_sums_turns_and_tiles_begin_at_0(
    child: Pool, head_dim: int, lse: bool, order: str, columns: int, schedule: str
) -> None:
    problem = hopper_gradients.problem(head_dim=head_dim, dtype=DType.FLOAT16)
    rendered = hopper_gradients.source(problem, Traits(lse=lse), order=order, schedule=schedule)
    job = Swept(source=rendered, head_dim=head_dim, lse=lse, columns=columns)
    pairs = child.result(job, interpreted.SECONDS)
    assert not isinstance(pairs, Failure), pairs.detail
    assert (pairs["turns"][0].numel() > 0) is (order != "any" or schedule == "dynamic")
    for name, (ours, theirs) in pairs.items():
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4, equal_nan=True, msg=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """What backward_queries makes of sums that lie as threads of a warpgroup hold them, and what it should."""

    source: Source
    head_dim: int
    block: int
    held: int  # columns that the second consumer has of 64 queries; a part of its room
    ordered: bool

    def run(self, memory: dict[Hashable, Any]) -> tuple[Tensor, Tensor]:
        module = load_module(self.source)
        blocks, width = -(-SEQ // self.block), width_of(self.head_dim)
        exact = torch.randn(BATCH * HEADS, blocks * self.block, width, generator=torch.Generator().manual_seed(0))
        tiles = exact.view(BATCH * HEADS, blocks, self.block, width)
        halves = tiles.chunk(2, dim=3 if self.block == 64 else 2)  # of the two consumers
        sums = torch.stack([half[(..., *in_registers(half.shape[-1]))] for half in halves], 2)
        if self.block == 64:
            sums[:, :, 1, 64 * self.held :] = math.nan  # nobody adds there
        turns = torch.ones(sums.shape[:3], dtype=torch.int32)
        if self.ordered:  # a block to which nobody came
            sums[1, 1] = math.nan
            turns[1, 1] = 0
            exact[1, self.block : 2 * self.block] = 0.0
        query_grad = padded(BATCH, HEADS, SEQ, self.head_dim)
        launch(
            module, "backward_queries", query_grad_ptr=query_grad, query_sums_ptr=sums.contiguous().view(-1), scale=0.5,
            turns_ptr=turns, **strides("dq", query_grad),
        )  # fmt: skip
        assert query_grad._base is not None
        assert int(query_grad._base.isnan().sum()) == query_grad._base.numel() - query_grad.numel(), "it wrote outside"
        return query_grad, (0.5 * exact.view(BATCH, HEADS, -1, width)[:, :, :SEQ, : self.head_dim]).half()


def width_of(head_dim: int) -> int:
    """Columns of a tile."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def in_registers(columns: int) -> tuple[Tensor, Tensor]:
    """Row and column of each number of a [64, columns] product, four of a thread at a time, all threads side by side.

    A thread of warp w and lane 4 * r + q holds the rows 16 * w + r and 8 more, and the columns 2 * q and 1 more of each
    eight (PTX ISA, wgmma, accumulator D).
    """
    thread, register = torch.arange(128)[None, :, None], torch.arange(4)[None, None, :]
    eight = torch.arange(columns // 8)[:, None, None]
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2) + 0 * eight
    column = 8 * eight + 2 * (thread % 4) + register % 2
    return row.flatten(), column.flatten()


@pytest.mark.parametrize("order", ["any", "ascending"])
@pytest.mark.parametrize(
    ("head_dim", "block", "held"),
    [(128, 64, 64), (64, 128, 64), (64, 64, 32), (40, 128, 64), (40, 64, 16), (72, 64, 16), (96, 64, 32),
     (200, 64, 128)],
)  # fmt: skip
def test_sums_are_rounded_from_where_threads_left_them(
    child: Pool, head_dim: int, block: int, held: int, order: str
) -> None:
    problem = hopper_gradients.problem(head_dim=head_dim, dtype=DType.FLOAT16)
    rendered = hopper_gradients.source(problem, BLOCK_M=block, num_stages=2, order=order)
    job = Rounded(source=rendered, head_dim=head_dim, block=block, held=held, ordered=order != "any")
    pair = child.result(job, interpreted.SECONDS)
    assert not isinstance(pair, Failure), pair.detail
    torch.testing.assert_close(*pair, rtol=0.0, atol=1e-3)
