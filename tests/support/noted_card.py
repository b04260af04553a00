"""A card that is not there: kernels are rendered for it, and launched at one that only notes what it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import samples
import torch
from torch import Tensor

from autoattn import functional, torch_private
from autoattn.core.variant import Source
from autoattn.hardware import nvidia
from autoattn.kernels import bound_launch, zeroed_scratch
from autoattn.kernels.compiler import Kernel, load_module
from autoattn.runtime.plan import planner

HALF = torch.float16
CUDA = torch.device("cuda", 0)


class Noted:
    """In place of Triton's CompiledKernel: notes its launches. The ordinary way launches by [], a prepared one by run.

    A launch is (what the launcher gets before the kernel's arguments, the kernel's arguments).
    """

    function, packed_metadata = "the function", "its metadata"

    def __init__(self) -> None:
        self.ordinary: list[tuple[Any, ...]] = []
        self.prepared: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given: self.ordinary.append((grid, given))

    def run(self, *given: Any) -> None:
        self.prepared.append((given[:9], given[9:]))

    def launch_metadata(self, grid: tuple[int, ...], stream: int, *given: Any) -> Any:
        return ("launch", grid, stream)


class Current:
    """In place of torch.cuda.device, and of which device is current."""

    index = 0

    def __init__(self, device: torch.device | int) -> None:
        self.wanted = device if isinstance(device, int) else device.index

    def __enter__(self) -> None:
        self.before, Current.index = Current.index, self.wanted

    def __exit__(self, *error: object) -> None:
        Current.index = self.before


@pytest.fixture
def card(zeros_on_the_host: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Noted]:
    """As if the CPU's tensors were on an A30 for which nothing was tuned."""
    noted = Noted()

    def load(source: Source, device: torch.device) -> Kernel:
        return Kernel(source=source, module=load_module(source), compiled=noted, device=CUDA, sm_count=132)

    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: ("stream of", index)))
    monkeypatch.setattr("autoattn.codegen.resources.shipped_cache", lambda: tmp_path)
    monkeypatch.setattr(planner, "why_not_on", lambda device: None)
    monkeypatch.setattr(planner.compiler, "load", load)
    for module in (bound_launch, zeroed_scratch):
        monkeypatch.setattr(module, "driver", driver)
    monkeypatch.setattr(nvidia, "present", lambda index: samples.A30)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: Current.index)
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch_private, "current_device", lambda: Current.index)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    Current.index = 0
    planner.load_once.cache_clear()
    functional.forget()
    yield noted
    planner.load_once.cache_clear()
    functional.forget()


@pytest.fixture(autouse=True)
def nothing_prepared() -> Iterator[None]:
    functional.forget()
    yield
    functional.forget()


def three(batch: int = 2, heads: int = 4, seq: int = 48, head_dim: int = 16, dtype: torch.dtype = HALF) -> list[Tensor]:
    return [torch.randn(batch, heads, seq, head_dim).to(dtype) for _ in range(3)]


def packed() -> list[Any]:
    tokens = [torch.randn(40, 4, 16).to(HALF) for _ in range(3)]
    offsets = torch.tensor([0, 10, 40], dtype=torch.int32)
    return [*tokens, offsets, offsets.clone(), 30, 30]
