"""CUDA graphs of calls: what they hold, and in which order streams are used; a fake stands for the card."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from autoattn.hardware import cuda_graph

CPU = torch.device("cpu")


class Card:
    """In place of PyTorch's streams and graphs: notes what becomes of them in turn."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.current = "usual"

    def note(self, event: str) -> None:
        self.events.append(f"{self.current}: {event}")

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    @contextmanager
    def capturing(self, graph: Graph, *, stream: Stream | None, capture_error_mode: str) -> Iterator[None]:
        with self.on(stream or Stream(self, "PyTorch's own")):
            self.note(f"begin, {capture_error_mode}")
            yield
            self.note("end")


class Stream:
    def __init__(self, card: Card, name: str) -> None:
        self.card, self.name = card, name

    def wait_stream(self, other: Stream) -> None:
        self.card.note(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.card.note(f"host waits for {self.name}")


class Graph:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", card.capturing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(card, "side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(card, card.current))
    monkeypatch.setattr(torch.cuda, "stream", card.on)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return card


def test_a_call_runs_behind_the_current_stream_and_is_captured_on_the_stream_that_it_ran_on(card: Card) -> None:
    cuda_graph.run_and_capture(lambda: card.note("call"), CPU, runs=2)
    assert card.events == [
        "usual: side waits for usual", "side: call", "side: call", "usual: host waits for side",
        "side: begin, thread_local", "side: call", "side: end",
    ]  # fmt: skip


def test_a_capture_alone_runs_nothing_before(card: Card) -> None:
    cuda_graph.capture(lambda: card.note("call"), CPU)
    own = "PyTorch's own"
    assert card.events == [f"{own}: begin, thread_local", f"{own}: call", f"{own}: end"]


def addition() -> tuple[Callable[[], Tensor], weakref.ref[Tensor]]:
    """A call whose input nothing else holds, and what tells whether that is still there."""
    read = torch.ones(3)
    return lambda: read + 1, weakref.ref(read)


@pytest.mark.usefixtures("card")
def test_a_replay_alone_holds_what_the_graph_reads_and_what_it_writes() -> None:
    call, read = addition()
    captured = cuda_graph.capture(call, CPU)
    written, replay, graph = weakref.ref(captured.output), captured.replay, captured.graph
    del call, captured
    gc.collect()
    assert read() is not None
    assert written() is not None
    replay()
    assert graph.replays == 1
    del replay
    gc.collect()
    assert read() is None


@pytest.mark.usefixtures("card")
def test_the_output_is_that_of_the_captured_call() -> None:
    outputs = iter("abc")
    captured = cuda_graph.run_and_capture(lambda: next(outputs), CPU, runs=2)
    assert captured.output == "c"


@pytest.mark.usefixtures("card")
def test_what_a_graph_cannot_hold_is_an_error() -> None:
    def refused() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        cuda_graph.capture(refused, CPU)
