"""Calls as CUDA graphs, each with what holds the memory that its replays read and write.

A graph has addresses, and holds no tensor that a call reads. Where nothing else holds one, PyTorch gives its memory
away, and the graph reads what lies there then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Output = TypeVar("Output")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedCall(Generic[Output]):
    """A call as a CUDA graph."""

    graph: torch.cuda.CUDAGraph
    call: Callable[[], Output]  # with the tensors that the graph reads
    output: Output  # that the call returned while it was captured: each replay writes its tensors anew

    def replay(self) -> None:
        """Launches the graph on the current stream. Whoever holds this method holds the whole call."""
        self.graph.replay()


@contextmanager
def side_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A new stream, current within, behind all that the current one was given; at the end the host waits for it.

    Here runs what must have run on a stream before that stream is captured: what compiles and loads kernels, and the
    forward pass of a backward pass, which autograd runs on the forward pass's stream.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # which may yet write what calls read
    with torch.cuda.stream(stream):
        yield stream
    stream.synchronize()


def capture(
    call: Callable[[], Output], device: torch.device, *, stream: torch.cuda.Stream | None = None
) -> CapturedCall[Output]:
    """Captures a call that ran before.

    Args:
        stream: of the capture; the one that PyTorch keeps for captures when None.

    Raises:
        RuntimeError: the call does something that a graph cannot hold.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads go on meanwhile: NCCL's watchdog asks for events, which the default mode, "global", forbids.
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        output = call()
    return CapturedCall(graph=graph, call=call, output=output)


def run_and_capture(call: Callable[[], Output], device: torch.device, *, runs: int) -> CapturedCall[Output]:
    """Runs a call so many times on a new stream, which compiles and loads its kernels, and captures it there.

    Raises:
        RuntimeError: the call does something that a graph cannot hold.
    """
    with side_stream(device) as stream:
        for _ in range(runs):
            call()
    return capture(call, device, stream=stream)
