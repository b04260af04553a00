"""A bench without a card: a stopwatch that makes up its times, and peers that compute as they are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kernels
import pytest
import torch
from torch import Tensor

from autoattn.baselines import pytorch_sdpa
from autoattn.baselines.external import Peer
from autoattn.bench import kernel_bench
from autoattn.bench.kernel_results import Contestant, Options, Row
from autoattn.core.paired_stats import Pulse
from autoattn.core.problem import Problem
from autoattn.hardware.timer import HIDDEN_US, Rounds
from autoattn.tensors.operands import Operands

CPU = torch.device("cpu")


class Stopwatch:
    """Runs what it is to time, and makes up the times."""

    def __init__(self, device: torch.device) -> None:
        self.guess = 1000.0
        self.breaks = False
        self.hidden_us = HIDDEN_US

    def wound(self, device: torch.device, *, spins: int = 1) -> Stopwatch:
        self.hidden_us = spins * HIDDEN_US
        return self

    def warm(self) -> None:
        pass

    def samples(self, call: Callable[[], object], count: int) -> list[float]:
        for _ in range(count):
            call()
        return [self.guess] * count

    def graph(self, call: Callable[[], object], count: int) -> Callable[[], object]:
        if self.breaks:
            raise RuntimeError("operation not permitted when stream is capturing")
        call()
        return lambda: None

    def rounds(
        self, calls: Mapping[str, Callable[[], object]], *, seconds: float, seed: int, count: int | None = None
    ) -> Rounds:
        self.seconds = seconds
        for call in calls.values():
            call()
        times = {name: [100.0 * place] * (count or 3) for place, name in enumerate(calls, start=1)}
        return Rounds(times_us=times, pulses=[Pulse(clock_mhz=1700, slowed=False)] * 3)


def install(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """A bench on the CPU."""
    found = Stopwatch(CPU)
    monkeypatch.setattr(kernel_bench, "Stopwatch", found.wound)
    monkeypatch.setattr(kernel_bench, "current_device", lambda: CPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(kernel_bench, "compile_ahead", lambda kernels, arch: None)
    return found


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
    return next(one for one in row.contestants if one.name == name)
