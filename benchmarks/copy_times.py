"""Measures how long the TMA unit takes to copy rows of a head to shared memory, by head dim. Needs a Hopper card.

python benchmarks/copy_times.py

Two programs on each SM copy blocks of 64 keys of one head, three of which are under way, from rows that lie one behind
another, all in the L2. They compute nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autoattn.core.tile_widths import padded
from autoattn.hardware.timer import Stopwatch

HEAD_DIMS = (32, 40, 48, 56, 64, 72, 80, 96, 104, 112, 120, 128, 160, 192, 256)
ROWS, KEYS, BLOCKS = 64, 4096, 512  # of a block, of the head, and of a program
STAGES, PROGRAMS_AN_SM = 3, 2
SAMPLES = 9


@gluon.jit
def copy_blocks(box, blocks, blocks_of_head, STAGES: gl.constexpr):
    """Copies blocks of a head to shared memory, STAGES of which are under way."""
    ROWS: gl.constexpr = box.block_type.shape[0]
    WIDTH: gl.constexpr = box.block_type.shape[1]
    memory = gl.allocate_shared_memory(box.dtype, [STAGES, ROWS, WIDTH], box.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    for block in range(blocks + STAGES - 1):
        if block < blocks:
            slot = block % STAGES
            mbarrier.expect(full.index(slot), box.block_type.nbytes)
            # [ROWS, WIDTH]
            tma.async_copy_global_to_shared(
                box, [block % blocks_of_head * ROWS, 0], full.index(slot), memory.index(slot)
            )
        arriving = block - (STAGES - 1)
        if arriving >= 0:
            mbarrier.wait(full.index(arriving % STAGES), arriving // STAGES & 1)
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(stage))


def block_ns(head_dim: int, stopwatch: Stopwatch) -> float:
    """What an SM takes for a block of keys of bfloat16, in the median of SAMPLES calls."""
    device = stopwatch.device
    keys = torch.zeros(KEYS, head_dim, dtype=torch.bfloat16, device=device)
    block = [ROWS, padded(head_dim)]
    box = TensorDescriptor.from_tensor(keys, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))
    grid = (PROGRAMS_AN_SM * torch.cuda.get_device_properties(device).multi_processor_count,)
    kernel: Any = copy_blocks

    def copy() -> None:
        kernel[grid](box, BLOCKS, KEYS // ROWS, STAGES, num_warps=1)

    copy()
    stopwatch.warm()
    return 1e3 * statistics.median(stopwatch.samples(copy, SAMPLES)) / (BLOCKS * PROGRAMS_AN_SM)


def table(times_ns: Mapping[int, float]) -> list[str]:
    """A row for each head dim."""
    lines = ["| head dim | bytes of a row | ns a block | over head dim 128 |", "|--:|--:|--:|--:|"]
    for head_dim, time_ns in times_ns.items():
        row_bytes = head_dim * torch.bfloat16.itemsize
        lines.append(f"| {head_dim} | {row_bytes} | {time_ns:.0f} | {time_ns / times_ns[128]:.2f} |")
    return lines


if __name__ == "__main__":
    watch = Stopwatch(torch.device("cuda"))
    print("\n".join(table({head_dim: block_ns(head_dim, watch) for head_dim in HEAD_DIMS})))
