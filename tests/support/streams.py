"""Calls that several streams of a card run at once, one by one or as graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

STREAMS = 4
CAPTURED = 3  # runs of its call that a graph holds

Call = Callable[[], Tensor]


def at_once(calls: Sequence[Call], times: int) -> list[list[Tensor]]:
    """What each call gave, of those that four new streams share out in turn, all of them so many times."""
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    outputs: list[list[Tensor]] = [[] for _ in calls]
    for _ in range(times):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outputs[number % len(calls)].append(calls[number % len(calls)]())
    torch.cuda.synchronize()
    return outputs


def replayed(calls: Sequence[Call], times: int, *, beside: Callable[[], None]) -> list[list[Tensor]]:
    """What the graph of each call left, after streams of their own replayed them all while `beside` ran."""
    graphs: list[torch.cuda.CUDAGraph] = []
    outputs: list[list[Tensor]] = []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append([call() for _ in range(CAPTURED)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(times):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        beside()
    torch.cuda.synchronize()
    return outputs
