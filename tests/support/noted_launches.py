"""A fake device for which kernels are rendered, and whose launches only note what they get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_device
import pytest
import samples
import torch
from fake_device import CUDA, Launches
from torch import Tensor

from autoattn import functional
from autoattn.core.device import Device
from autoattn.core.variant import Source
from autoattn.kernels.compiler import Kernel, load_module
from autoattn.kernels.tma_descriptor import Descriptor

HALF = torch.float16


@pytest.fixture
def card(zeros_on_the_host: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Launches]:
    """As if the CPU's tensors were on an A30 for which nothing was tuned; gives the launches."""
    yield from _launches_on(samples.A30, monkeypatch, tmp_path)


@pytest.fixture
def hopper(zeros_on_the_host: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Launches]:
    """The same on an H200, which knows float8."""
    yield from _launches_on(samples.H200, monkeypatch, tmp_path)


def _launches_on(device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Launches]:
    launches = Launches()

    def load(source: Source, device: torch.device) -> Kernel:
        return Kernel(source=source, module=load_module(source), compiled=launches, device=CUDA, sm_count=132)

    fake_device.set_streams(monkeypatch, lambda index: ("stream of", index))
    with fake_device.plan_on(monkeypatch, device, load, tmp_path) as launches.context:
        yield launches


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


def same(ordinary: tuple[Any, ...], by_run: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
    """The two launch alike; a prepared one passes addresses where the ordinary one passes tensors."""
    (grid, given), (facts, arguments_) = ordinary, by_run
    assert facts == (*grid, ("stream of", 0), Launches.function, Launches.packed_metadata, None, None, None)
    assert len(given) == len(arguments_)
    for argument, prepared in zip(given, arguments_, strict=True):
        if isinstance(argument, Descriptor):
            assert replace(argument, address=0) == replace(prepared, address=0)
        else:
            assert isinstance(prepared, int | float)
            assert isinstance(argument, Tensor) or argument == prepared
