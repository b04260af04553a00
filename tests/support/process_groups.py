"""Ranks of gloo groups on the CPU: one set of processes that serves all tests of a session.

The processes are forked from a server that has loaded PyTorch and autoattn once.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SIZES = (2, 3, 4)
SECONDS = 30  # of a group's operation


class Ranks:
    """Four processes, and groups of the first two, three and four of them."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "autoattn.distributed", "context_calls"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(max(SIZES)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, str(folder / "store")), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function of a module in tests/support returns on each rank of the group of a size.

        It is called with the group before the arguments. An error on a rank is raised here.
        """
        self.begin(size, function, *arguments)
        answers = [self._answer(rank) for rank in range(size)]
        for failed, answer in answers:
            assert not failed, answer
        return [answer for _, answer in answers]

    def begin(self, size: int, function: Callable[..., Any], *arguments: Any) -> None:
        """The same without waiting."""
        for pipe in self._pipes[:size]:
            pipe.send((size, function, arguments))

    def _answer(self, rank: int) -> tuple[bool, Any]:
        assert self._pipes[rank].poll(2 * SECONDS), f"rank {rank} does not answer"
        answer: tuple[bool, Any] = self._pipes[rank].recv()
        return answer

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, max(SIZES)), rank=rank, world_size=max(SIZES),
        timeout=timedelta(seconds=SECONDS),
    )  # fmt: skip
    groups = {size: dist.new_group(list(range(size)), timeout=timedelta(seconds=SECONDS)) for size in SIZES}
    while True:
        try:
            size, function, arguments = pipe.recv()
        except EOFError:  # the test session is over
            return
        try:
            pipe.send((False, function(groups[size], *arguments)))
        except Exception:
            pipe.send((True, traceback.format_exc()))


def shares(total: int, parts: Sequence[int]) -> bool:
    """Whether numbers sum to a total and differ by at most one."""
    return sum(parts) == total and max(parts) - min(parts) <= 1
