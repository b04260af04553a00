"""Times tiles of 128 rows by two consumers of four warps, and by one of eight. Needs a Hopper card.

python benchmarks/warpgroups.py

Each kernel passes the gate. Those of a call meet in rounds, with a cold L2. "in step" is the consumer of eight warps
whose waits for keys and values are inlined, so that Triton has its warps wait for one another before each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import checked_calls
import torch
from variant_pool import GLUON, GLUON_BASE

from autoattn.codegen import render, search_space
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Problem
from autoattn.core.variant import Source, Value
from autoattn.hardware import nvidia
from autoattn.hardware.timer import Stopwatch

DEVICE = torch.device("cuda")
SECONDS = 0.3  # of a contest
CAUSAL, WINDOW, FULL = "causal", "window:1023,0", "full"
# Sequences, heads, heads of keys, queries and keys
SIZES = (
    (1, 2, 1, 6520, 6520), (1, 8, 2, 1500, 1500), (1, 32, 8, 1407, 1407), (2, 16, 4, 1024, 3000),
    (4, 16, 16, 4096, 4096),
)  # fmt: skip
KINDS = (
    (40, CAUSAL, 128), (64, CAUSAL, 128), (120, CAUSAL, 128), (120, WINDOW, 128), (128, CAUSAL, 64), (128, CAUSAL, 128),
    (128, WINDOW, 128), (128, FULL, 128), (256, CAUSAL, 64),
)  # fmt: skip
BASE: dict[str, Value] = {
    **GLUON_BASE,
    **{"BLOCK_M": 128, "num_stages": 2, "CTAS": 1, "PACK_GQA": 1, "HEAD_SPLIT": 0, "HEAD_GROUP": 0},
    **{"softmax": "first_max", "schedule": "one_tile", "output_buffer": "shared"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The times of one call's kernels."""

    problem: Problem
    keys: int  # of a block
    times_us: Mapping[str, float]


def sources(problem: Problem, keys: int) -> dict[str, Source]:
    """The kernels that meet, by name."""
    space = search_space.load(GLUON)
    rendered = {
        name: render.render(problem, space.variant({**BASE, "BLOCK_N": keys, **params}))
        for name, params in (
            ("two of four", {}),
            ("one of eight", {"WARPGROUPS": 2}),
            ("values early", {"WARPGROUPS": 2, "v_wait": "early"}),
        )
    }
    calling = rendered["one of eight"]
    inlined = replace(calling, text=calling.text.replace("@gluon.jit(noinline=True)", "@gluon.jit"))
    return rendered | {"in step": inlined}


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    """Times in the median of rounds; a kernel that is wrong ends the program."""
    for head_dim, mask, keys in KINDS:
        for batch, heads_q, heads_kv, seq_q, seq_kv in SIZES:
            problem = Problem(
                dtype=DType.BFLOAT16, batch=batch, heads_q=heads_q, heads_kv=heads_kv, seq_q=seq_q, seq_kv=seq_kv,
                head_dim=head_dim, mask=Mask.parse(mask),
            )  # fmt: skip
            calls = checked_calls.of(problem, sources(problem, keys), DEVICE)
            times = stopwatch.contest(calls, problem.flops(), seconds=SECONDS, seed=0)
            yield Row(problem=problem, keys=keys, times_us={name: time.median_us for name, time in times.items()})


def line(row: Row) -> str:
    """A row of the table; times beside those of two consumers."""
    two = row.times_us["two of four"]
    shares = " | ".join(f"{time_us / two:.2f}" for name, time_us in row.times_us.items() if name != "two of four")
    return f"| {row.problem} | 128 x {row.keys} | {two:.1f} | {shares} |"


def main() -> None:
    """Print the table."""
    if nvidia.present() is None:
        sys.exit("benchmarks/warpgroups.py measures on an NVIDIA GPU in this machine, and found none")
    print("| call | tile | us by two of four warps | one of eight, over that | values early | in step |")
    print("|---|---|--:|--:|--:|--:|")
    for each in rows(Stopwatch(DEVICE)):
        print(line(each), flush=True)


if __name__ == "__main__":
    main()
