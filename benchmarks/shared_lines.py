"""Runs calls of one query by one and by two programs an SM, in both layouts, for a profiler. Needs a Hopper card.

ncu --profile-from-start off --clock-control none --cache-control none \
    --metrics gpu__time_duration.sum,dram__bytes_read.sum python benchmarks/shared_lines.py

Each kernel passes the gate. Then its call is named, with the gigabytes of its operands, and profiled once. Two heads of
a token share a line of memory in bshd where rows do not begin with lines, which is read again where programs drift
apart (docs/decisions/head-dims.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import checked_calls
import torch
from variant_pool import GLUON, GLUON_BASE

from autoattn.codegen import render, search_space
from autoattn.core.problem import DType, Layout, Problem
from autoattn.core.tile_widths import pieces
from autoattn.core.variant import Source, Value
from autoattn.hardware import nvidia

DEVICE = torch.device("cuda")
WARM = 3  # calls before the profiled one
PROGRAMS = 1, 2  # an SM
# Sequences, heads, keys, head dim
CALLS = (
    (32, 8, 4097, 72), (64, 12, 7166, 112), (32, 8, 4097, 128), (16, 16, 16384, 96), (64, 12, 512, 72),
)  # fmt: skip
BASE: dict[str, Value] = {
    **GLUON_BASE,
    **{"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 3, "PACK_GQA": 1},
    **{"softmax": "first_max", "schedule": "one_tile", "output_buffer": "shared"},
}


def problems() -> Iterator[Problem]:
    """The calls, in both layouts."""
    for batch, heads, keys, head_dim in CALLS:
        for layout in (Layout.BSHD, Layout.BHSD):
            yield Problem(
                dtype=DType.BFLOAT16, batch=batch, heads_q=heads, heads_kv=heads, seq_q=1, seq_kv=keys,
                head_dim=head_dim, layout=layout,
            )  # fmt: skip


def source(problem: Problem, programs: int) -> Source:
    """The kernel of so many programs an SM; heads lie in two pieces where these take less memory."""
    split = int(len(pieces(problem.head_dim)) == 2)
    variant = search_space.load(GLUON).variant({**BASE, "CTAS": programs, "HEAD_SPLIT": split})
    return render.render(problem, variant)


def main() -> None:
    """Profile the calls, and name each."""
    if nvidia.present() is None:
        sys.exit("benchmarks/shared_lines.py measures on an NVIDIA GPU in this machine, and found none")
    for problem in problems():
        sources = {programs: source(problem, programs) for programs in PROGRAMS}
        for programs, call in checked_calls.of(problem, sources, DEVICE).items():
            for _ in range(WARM):
                call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            print(f"{problem}, programs an SM: {programs}, {problem.bytes() / 1e9:.3f} GB", flush=True)


if __name__ == "__main__":
    main()
