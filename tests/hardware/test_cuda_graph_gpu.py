"""CUDA graphs of calls on a real GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from autoattn.hardware import cuda_graph

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
NUMBERS = 2**20


def test_replays_read_what_only_the_call_holds_and_follow_it() -> None:
    def addition() -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        read, own = torch.zeros(NUMBERS, device=CUDA), torch.full((NUMBERS,), 2.0, device=CUDA)
        return read, lambda: read + own

    read, call = addition()
    captured = cuda_graph.run_and_capture(call, CUDA, runs=2)
    del call
    torch.cuda.empty_cache()
    others = [torch.full((NUMBERS,), 9.0, device=CUDA) for _ in range(8)]
    read.fill_(3.0)
    captured.replay()
    assert bool((captured.output == 5.0).all())
    assert all(bool((other == 9.0).all()) for other in others)


def test_another_thread_may_use_the_card_during_a_capture() -> None:
    numbers, before, answers = torch.ones(NUMBERS, device=CUDA), torch.cuda.Event(), []
    before.record()
    torch.cuda.synchronize()

    def asked_meanwhile() -> torch.Tensor:
        output = numbers + 1
        asking = threading.Thread(target=lambda: answers.append(before.query()))  # as NCCL's watchdog does
        asking.start()
        asking.join()
        return output

    captured = cuda_graph.capture(asked_meanwhile, CUDA)
    captured.replay()
    torch.cuda.synchronize()
    assert answers == [True]
    assert bool((captured.output == 2.0).all())


def test_a_capture_that_waits_for_the_card_is_an_error_and_the_next_one_works() -> None:
    numbers = torch.ones(4, device=CUDA)
    with pytest.raises(RuntimeError):
        cuda_graph.capture(lambda: numbers.sum().item(), CUDA)
    torch.cuda.synchronize()
    captured = cuda_graph.run_and_capture(lambda: numbers.sum(), CUDA, runs=1)
    captured.replay()
    assert captured.output.item() == 4.0
