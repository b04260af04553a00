"""Measures what the host does for a call over ranks, with GPUs or without one.

python benchmarks/ring_host_time.py [--ranks 2] [--rows causal,packed,window] [--profile FILE]

Where there are as many GPUs as ranks, each rank runs on one, and times are those in which its host issues a call of
8,192 tokens a rank. Else one process is the first rank of a group whose messages nobody takes: as in host_time.py,
calls are planned, bound and launched as on an H200, on tensors of the CPU, and C functions that do nothing stand in
place of the driver. Tokens and heads are few there, so that PyTorch's own operations on keys take little. Times without
NCCL, the driver and copies of keys are then the least of rounds' means, since other processes only add to them. FILE
gets what cProfile finds of both passes of each row; autograd runs in the calling thread for that.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import context_rows
import torch
import torch.distributed as dist
from context_rows import OURS, Row
from host_time import fake_card
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoattn.distributed.communication import ranks_of
from autoattn.search import rank_processes
from autoattn.search.rank_processes import RankTimer

CARD_TOKENS, TOKENS = 8192, 1024  # of a rank, on GPUs and without one
SIZES = {"heads": 2, "heads_kv": 1, "head_dim": 64}  # without a GPU
CALLS, ROUNDS = 20, 15
PROFILED = 100  # calls
LINES = 70  # of a profile


def issue_seconds(timer: RankTimer, call: Callable[[], object]) -> float:
    """Of the host for a call."""
    if timer.device.type == "cuda":
        return timer.time(call).issue_seconds
    for _ in range(5):
        call()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS)
    return min(times)


def profile(call: Callable[[], object]) -> str:
    """Where the host's time goes, the functions that take the most by themselves first, then with all they call."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profiler.enable()
        for _ in range(PROFILED):
            call()
        profiler.disable()
    file = io.StringIO()
    for order in ("tottime", "cumtime"):
        pstats.Stats(profiler, stream=file).sort_stats(order).print_stats(LINES)
    return file.getvalue()


def lines(timer: RankTimer, rows: list[str], *, profiled: bool) -> list[tuple[str, str]]:
    """Of each row, a line of Markdown and the profile of both passes."""
    lines_and_profiles = []
    tokens, sizes = (CARD_TOKENS, {}) if timer.device.type == "cuda" else (TOKENS, SIZES)
    for name in rows:
        for learns in (False, True):
            row = Row(name=name, tokens=tokens, learns=learns)
            call = context_rows.over_ranks(timer, row, OURS[row.own_method][0], **sizes)
            line = f"| {name} | {row.passes} | {issue_seconds(timer, call) * 1e6:.0f} |"
            lines_and_profiles.append((line, f"{line}\n{profile(call)}" if profiled and learns else ""))
    return lines_and_profiles


def main() -> None:
    """Prints a table, and writes the profile where it was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the group")
    parser.add_argument("--rows", default="causal,packed,window", help="kinds of attention")
    parser.add_argument("--profile", type=Path, help="file for the functions that take the most")
    given = parser.parse_args()
    job = partial(lines, rows=given.rows.split(","), profiled=given.profile is not None)
    if torch.cuda.device_count() >= given.ranks:
        lines_and_profiles = rank_processes.run(job, given.ranks, "nccl", list[tuple[str, str]], seconds=60.0)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=given.ranks)
        with fake_card():
            lines_and_profiles = job(RankTimer(ranks=ranks_of(dist.group.WORLD), device=torch.device("cpu")))
    print("| row | passes | host us a call |\n|---|---|--:|")
    print("\n".join(line for line, _ in lines_and_profiles))
    if given.profile:
        given.profile.write_text("".join(text for _, text in lines_and_profiles), encoding="utf-8")


if __name__ == "__main__":
    main()
