"""A bench without a card: the fake device's timer, and peers that compute as they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernels
import pytest
import torch
from fake_device import Timer
from torch import Tensor

from autoattn.baselines import pytorch_sdpa
from autoattn.baselines.external import Peer
from autoattn.bench import kernel_bench
from autoattn.bench.kernel_results import Contestant, Options, Row
from autoattn.core.problem import Problem
from autoattn.tensors.operands import Operands

CPU = torch.device("cpu")


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    """A bench on the CPU; gives its timer."""
    fake = Timer()
    monkeypatch.setattr(kernel_bench, "Stopwatch", fake.wound)
    # What the host takes decides how a row is timed, and a busy machine's host takes any time.
    monkeypatch.setattr(kernel_bench, "time", fake.host)
    monkeypatch.setattr(kernel_bench, "current_device", lambda: CPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(kernel_bench, "compile_ahead", lambda kernels, arch: None)
    return fake


def planted(name: str, call: Callable[[Problem, Operands], Tensor], **changes: Any) -> Peer:
    """A peer that computes as it is told."""
    facts: dict[str, Any] = {
        "name": name,
        "about": name,
        "package": name,
        "load": lambda: None,
        "refuses": lambda problem: None,
        "prepare": lambda problem, operands: lambda: call(problem, operands),
    }
    return Peer(**facts | changes)


def raising(error: Exception, after: int = 0) -> Callable[[Problem, Operands], Tensor]:
    """Right `after` times, then raises."""
    left = [after]

    def call(problem: Problem, operands: Operands) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return pytorch_sdpa.sdpa(problem, operands)

    return call


def benched(*others: Peer, problem: Problem | None = None, **options: Any) -> Row:
    return next(kernel_bench.rows([problem or kernels.problem()], list(others), Options(**options)))


def named(row: Row, name: str) -> Contestant:
    return next(contestant for contestant in row.contestants if contestant.name == name)
