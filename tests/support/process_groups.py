"""Ranks of gloo groups on the CPU: one set of processes that serves all tests of a session.

The processes are forked from a server that has loaded PyTorch and autoattn once.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SECONDS = 30  # of a group's operation


class Ranks:
    """Processes, and groups of the first one, two, ... of them."""

    def __init__(self, folder: Path, count: int = 4) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "autoattn.distributed", "context_calls"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, count, str(folder / "store")), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function of a module in tests/support returns on each rank of the group of a size.

        It is called with the group before the arguments. An error on a rank is raised here; a rank that ends gives
        None.
        """
        for pipe in self._pipes[:size]:
            pipe.send((size, function, arguments))
        answers = [self._answer(rank) for rank in range(size)]
        errors = [answer for failed, answer in answers if failed]
        assert not errors, "\n".join(errors)
        return [answer for _, answer in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        assert self._pipes[rank].poll(2 * SECONDS), f"rank {rank} does not answer"
        try:
            answer: tuple[bool, Any] = self._pipes[rank].recv()
        except EOFError:  # the process has ended
            return False, None
        return answer

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, rank: int, count: int, path: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store, limit = dist.FileStore(path, count), timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=limit)
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in range(1, count + 1)}
    while True:
        try:
            size, function, arguments = pipe.recv()
        except EOFError:  # the test session is over
            return
        try:
            pipe.send((False, function(groups[size], *arguments)))
        except Exception:
            pipe.send((True, traceback.format_exc()))
