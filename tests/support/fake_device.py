"""A fake device: the card that a process believes to have, whatever the machine holds.

Each part can be had alone, and is named as what it stands for: `set_device` for the card's profile, `set_driver` for
what PyTorch tells of it, `set_context` for its CUDA context, `Launches` for a kernel that is there, `Timer` for the
stopwatch. `plan_on` takes all that a call needs until a kernel is launched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import samples
import torch

from autoattn import functional, torch_private
from autoattn.bench.kernel_bench import FLUSHES
from autoattn.codegen import resources
from autoattn.core.device import Device
from autoattn.core.paired_stats import Pulse
from autoattn.core.variant import Source
from autoattn.hardware import nvidia
from autoattn.hardware.timer import HIDDEN_US, Rounds
from autoattn.kernels import compiler
from autoattn.runtime.plan import machine_code, planner

CUDA = torch.device("cuda", 0)
# What PyTorch tells of an H200.
PROPERTIES: dict[str, Any] = {
    "name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132, "L2_cache_size": samples.H200.l2_bytes,
    "total_memory": samples.H200.memory_bytes,
    "shared_memory_per_multiprocessor": 233472, "shared_memory_per_block_optin": 232448,
    "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "uuid": "1234",
}  # fmt: skip


# --- which device -----------------------------------------------------------------------------------------------------


def set_device(monkeypatch: pytest.MonkeyPatch, device: Device | None) -> None:
    """The card that the process believes to have; None for none."""
    monkeypatch.setattr(nvidia, "present", lambda index=None: device)


def set_driver(monkeypatch: pytest.MonkeyPatch, *properties: Mapping[str, Any]) -> None:
    """What PyTorch tells of each card, where it is not that of an H200; without any, there is no card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(properties))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def properties_of(device: int | torch.device) -> SimpleNamespace:
        index = device.index if isinstance(device, torch.device) else device
        return SimpleNamespace(**{**PROPERTIES, **properties[index or 0]})

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of)


class Context:
    """In place of the CUDA context: which card is current, and whether a graph is captured."""

    def __init__(self) -> None:
        self.current: int | None = 0
        self.capturing = False
        self.threads: list[int] = []  # in which the context was made current, by asking for the memory

    @contextmanager
    def device(self, device: torch.device | int) -> Iterator[None]:
        """In place of torch.cuda.device."""
        before, self.current = self.current, device if isinstance(device, int) else device.index
        try:
            yield
        finally:
            self.current = before

    def memory(self, device: torch.device) -> tuple[int, int]:
        """In place of torch.cuda.mem_get_info."""
        self.threads.append(threading.get_ident())
        return 0, 0


def set_context(monkeypatch: pytest.MonkeyPatch) -> Context:
    """A context that no kernel was launched in yet."""
    context = Context()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: context.current)
    monkeypatch.setattr(torch_private, "current_device", lambda: context.current)
    monkeypatch.setattr(torch.cuda, "device", context.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", context.memory)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: context.capturing)
    monkeypatch.setattr(compiler, "current_contexts", threading.local())
    return context


def set_streams(monkeypatch: pytest.MonkeyPatch, stream_of: Callable[[int], Any]) -> None:
    """The handle of each card's current stream."""
    monkeypatch.setattr(torch_private, "current_stream", stream_of)


# --- its kernels and launches -----------------------------------------------------------------------------------------


def forget() -> None:
    """Drops what was planned and loaded."""
    functional.forget()
    planner.load_once.cache_clear()


@contextmanager
def plan_on(
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    load: Callable[[Source, torch.device], Any],
    shipped_cache: Path | None = None,
) -> Iterator[Context]:
    """Plans calls on the CPU's tensors as if these were on a card.

    Args:
        load: in place of `compiler.load`.
        shipped_cache: the folder in its place; None leaves it.
    """
    if shipped_cache is not None:
        monkeypatch.setattr(resources, "shipped_cache", lambda: shipped_cache)
    set_device(monkeypatch, device)
    context = set_context(monkeypatch)
    monkeypatch.setattr(planner, "why_not_on", lambda device: None)
    monkeypatch.setattr(compiler, "load", load)
    monkeypatch.setattr(machine_code, "find", lambda *facts: None)  # what is shipped would be loaded in its place
    forget()
    try:
        yield context
    finally:
        forget()


class Launches:
    """In place of Triton's CompiledKernel: notes its launches. The ordinary way launches by [], a prepared one by run.

    A launch is (what the launcher gets before the kernel's arguments, the kernel's arguments).
    """

    function, packed_metadata = "the function", "its metadata"
    context: Context  # of the card, where a test asks for it

    def __init__(self) -> None:
        self.ordinary: list[tuple[Any, ...]] = []
        self.prepared: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given: self.ordinary.append((grid, given))

    def run(self, *given: Any) -> None:
        self.prepared.append((given[:9], given[9:]))

    def launch_metadata(self, grid: tuple[int, ...], stream: int, *given: Any) -> Any:
        return ("launch", grid, stream)


# --- its timer --------------------------------------------------------------------------------------------------------


class HostClock:
    """In place of the host's clock: a millionth of a second passes between two looks, and what a call waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """In place of time.perf_counter."""
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        """In place of time.sleep."""
        self.now += seconds


class Timer:
    """In place of the stopwatch: runs what it is to time, and makes up the times, the host's too."""

    def __init__(self) -> None:
        self.guess = 1000.0
        self.breaks = False
        self.hidden_us = HIDDEN_US
        self.host = HostClock()
        self.flush_us, self.flushed = 2.0, 0  # of one flush of the L2; how many a graph has

    def wound(self, device: torch.device, *, spins: int = 1) -> Timer:
        """In place of the class."""
        self.hidden_us = spins * HIDDEN_US
        return self

    def warm(self) -> None:
        pass

    def samples(self, call: Callable[[], object], count: int) -> list[float]:
        for _ in range(count):
            call()
        return [self.guess] * count

    def cold_graph(self, call: Callable[[], object], count: int) -> Callable[[], object]:
        if self.breaks:
            raise RuntimeError("operation not permitted when stream is capturing")
        call()
        return lambda: None

    def flushes(self, count: int) -> Callable[[], object]:
        self.flushed = count
        return lambda: None

    def rounds(
        self, calls: Mapping[str, Callable[[], object]], *, seconds: float, seed: int, count: int | None = None
    ) -> Rounds:
        self.seconds = seconds
        for call in calls.values():
            call()
        times = {name: [100.0 * place] * (count or 3) for place, name in enumerate(calls, start=1)}
        if FLUSHES in calls:
            times[FLUSHES] = [self.flush_us * self.flushed] * (count or 3)
        return Rounds(times_us=times, pulses=[Pulse(clock_mhz=1700, slowed=False)] * 3)
