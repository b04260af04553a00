"""Processes that are the ranks of a group on this machine, and how they time a call together."""

from __future__ import annotations

import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
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

ROUNDS = 5
TIMED = 0.15  # seconds of calls in a row, so that the host's time before the first one counts for little
MOST_CALLS = 20
SECONDS = 300.0  # that ranks wait for one another

Call = Callable[[], object]
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTime:
    """How long a call takes, as the median of rounds of the rank where that is the most."""

    seconds: float
    issue_seconds: float  # until the host has issued it; a card may compute on


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimer:
    """This process among the ranks, and its clock: events of a card around calls in a row, or the host's."""

    ranks: Ranks
    device: torch.device

    def times(self, calls: dict[str, Call]) -> dict[str, CallTime]:
        """How long calls take that all ranks make together, of rounds in which each has its turn."""
        counts = {name: _count(self.largest(self._third(call))) for name, call in calls.items()}
        rounds: dict[str, list[CallTime]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                dist.barrier(self.ranks.group)
                rounds[name].append(self._timed(call, counts[name]))
        medians = {name: _median(each) for name, each in rounds.items()}
        return {
            name: CallTime(seconds=self.largest(each.seconds), issue_seconds=self.largest(each.issue_seconds))
            for name, each in medians.items()
        }

    def time(self, call: Call) -> CallTime:
        """How long one call takes."""
        return self.times({"": call})[""]

    def time_alone(self, call: Call) -> CallTime:
        """How long a call takes that no other rank takes part in."""
        count = _count(self._third(call))
        return _median([self._timed(call, count) for _ in range(ROUNDS)])

    def largest(self, number: float) -> float:
        """The largest of the numbers that the ranks have."""
        largest = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.ranks.group)
        return float(largest)

    def _third(self, call: Call) -> float:
        """Seconds of the third call, before which kernels are compiled."""
        for _ in range(2):
            call()
        return self._timed(call, 1).seconds

    def _timed(self, call: Call, count: int) -> CallTime:
        """A call of so many in a row."""
        if self.device.type != "cuda":
            seconds = _issued(call, count)
            return CallTime(seconds=seconds, issue_seconds=seconds)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record()
        issued = _issued(call, count)
        end.record()
        torch.cuda.synchronize(self.device)
        return CallTime(seconds=begin.elapsed_time(end) / 1e3 / count, issue_seconds=issued)


def _issued(call: Call, count: int) -> float:
    """Seconds of the host for a call."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def _count(seconds: float) -> int:
    """How many calls that take so long come in a row."""
    return max(1, min(MOST_CALLS, int(TIMED / seconds)))


def _median(times: Sequence[CallTime]) -> CallTime:
    return CallTime(
        seconds=statistics.median(each.seconds for each in times),
        issue_seconds=statistics.median(each.issue_seconds for each in times),
    )


def run(
    job: Callable[[RankTimer], Answer], ranks: int, backend: str, kind: type[Answer], *, seconds: float = SECONDS
) -> Answer:
    """What the first rank returns of a job that so many new processes do together.

    Args:
        job: a function of a module, or a partial of one.
        backend: nccl for cards, gloo for the CPU.
        kind: of what it returns, which travels as JSON.
        seconds: that ranks wait for one another, before the group fails.

    Raises:
        GroupError: a rank ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.json"
        started = mp.spawn(_rank, args=(ranks, backend, address, seconds, job, path), nprocs=ranks, join=False)
        try:
            while not started.join():
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            lines = str(error).strip().splitlines()
            raise GroupError(
                f"all {ranks} ranks must come to their end, but one did not ({lines[-1]}); correct that and start again"
            ) from None
        finally:
            # After Ctrl-C: a rank whose card waits for another one hears no signal, and Python would wait for it.
            for process in started.processes:
                process.kill()
        return msgspec.json.decode(path.read_bytes(), type=kind)


def _rank(
    rank: int, size: int, backend: str, address: str, seconds: float, job: Callable[[RankTimer], Any], path: Path
) -> None:
    """What each process does."""
    device, card = torch.device("cpu"), None
    if backend == "nccl":
        device = card = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    limit = timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=limit, device_id=card)
    answer = job(RankTimer(ranks=ranks_of(dist.group.WORLD), device=device))
    if rank == 0:
        path.write_text(json.dumps(msgspec.to_builtins(answer)), encoding="utf-8")
    dist.destroy_process_group()  # not after an error: it would wait for what other ranks never send
