"""Processes that are the ranks of a group on this machine, and how they time a call together."""

from __future__ import annotations

import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autoattn.distributed.communication import Ranks, ranks_of
from autoattn.errors import GroupError

ROUNDS = 7
LONG_S = 0.02  # a call that takes longer is timed by itself, others three at a time
SECONDS = 300  # that ranks wait for one another

Call = Callable[[], object]
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimer:
    """This process among the ranks, and its clock."""

    ranks: Ranks
    device: torch.device

    def rounds(self, calls: dict[str, Call]) -> dict[str, float]:
        """Seconds of each call: of the slowest rank, the median of rounds in which each has its turn."""
        counts = {}
        for name, call in calls.items():
            call()
            counts[name] = 3 if self.largest(self._timed(call, 1)) < LONG_S else 1
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name].append(self.largest(self._timed(call, counts[name])))
        return {name: statistics.median(each) for name, each in times.items()}

    def largest(self, number: float) -> float:
        """The largest of the numbers that the ranks have."""
        largest = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.ranks.group)
        return float(largest)

    def _timed(self, call: Call, count: int) -> float:
        """Seconds of a call that all ranks begin together."""
        dist.barrier(self.ranks.group)
        self._wait()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        self._wait()
        return (time.perf_counter() - begin) / count

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def run(job: Callable[[RankTimer], Answer], ranks: int, backend: str, kind: type[Answer]) -> Answer:
    """What the first rank returns of a job that so many new processes do together.

    Args:
        job: a function of a module, or a partial of one.
        backend: nccl for cards, gloo for the CPU.
        kind: of what it returns, which travels as JSON.

    Raises:
        GroupError: a rank ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.json"
        try:
            mp.spawn(_rank, args=(ranks, backend, address, job, path), nprocs=ranks)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            lines = str(error).strip().splitlines()
            raise GroupError(
                f"all {ranks} ranks must come to their end, but one did not ({lines[-1]}); correct that and start again"
            ) from None
        return msgspec.json.decode(path.read_bytes(), type=kind)


def _rank(rank: int, size: int, backend: str, address: str, job: Callable[[RankTimer], Any], path: Path) -> None:
    """What each process does."""
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=limit)
    try:
        answer = job(RankTimer(ranks=ranks_of(dist.group.WORLD), device=device))
        if rank == 0:
            path.write_text(json.dumps(msgspec.to_builtins(answer)), encoding="utf-8")
    finally:
        dist.destroy_process_group()
