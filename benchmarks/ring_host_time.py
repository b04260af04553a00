"""Measures what the host does for a call over ranks, without a GPU: all but the driver, NCCL and copies of keys.

python benchmarks/ring_host_time.py [--ranks 2] [--rows causal,packed,window] [--profile FILE]

One process is the first rank of a group whose messages nobody takes. As in host_time.py, calls are planned, bound and
launched as on an H200, on tensors of the CPU, and C functions that do nothing stand in place of the driver. Heads are
few, so that PyTorch's own operations on keys, which a GPU runs beside the host, take little. FILE gets what cProfile
finds of both passes of the last row.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from context_rows import Row
from host_time import fake_card
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoattn import distributed

TOKENS, HEADS, HEADS_KV, HEAD_DIM = 1024, 2, 1, 64  # of a rank
CALLS, ROUNDS = 20, 15


def step(row: Row, ranks: int) -> Callable[[], object]:
    """A call over so many ranks, forward or both passes."""
    tokens = row.split(ranks).lengths[0]
    front = () if row.packed else (1,)
    shapes = [(*front, tokens, heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
    query, key, value, pull = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    three = [tensor.requires_grad_(row.learns) for tensor in (query, key, value)]
    words = row.words(query.device)
    if "sinks" in words:
        words["sinks"] = words["sinks"][:HEADS]
    words |= {"cu_seqlens": row.offsets(ranks)} if row.packed else {"layout": "bshd"}
    method = "allgather" if row.name == "window" else "ring"

    def attend() -> Tensor:
        return distributed.context_attention(*three, group=dist.group.WORLD, method=method, **words)

    def both() -> object:
        return torch.autograd.grad(attend(), three, pull)

    return both if row.learns else attend


def microseconds(call: Callable[[], object]) -> float:
    """Of the host for a call, the least of rounds' means: other processes only add to it."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return min(times)


def main() -> None:
    """Prints a table, and the profile where it was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the group")
    parser.add_argument("--rows", default="causal,packed,window", help="kinds of attention")
    parser.add_argument("--profile", type=Path, help="file for the functions that take the most")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=given.ranks)
    print("| row | passes | host us a call |\n|---|---|--:|")
    with fake_card():
        for name in given.rows.split(","):
            for learns in (False, True):
                row = Row(name=name, tokens=TOKENS, learns=learns)
                call = step(row, given.ranks)
                for _ in range(5):
                    call()
                print(f"| {name} | {row.passes} | {microseconds(call):.0f} |", flush=True)
        if given.profile:
            profile = cProfile.Profile()
            profile.enable()
            for _ in range(CALLS * ROUNDS):
                call()
            profile.disable()
            with given.profile.open("w", encoding="utf-8") as file:
                pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(60)


if __name__ == "__main__":
    main()
