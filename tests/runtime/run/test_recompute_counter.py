"""Counting the tiles that were computed again: of the launches of one thread, while it counts, and of no others.

There is no card here: a planted kernel raises the flags of its scratch as a real one does.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_device import CUDA, Launches
from noted_launches import card, nothing_prepared, three  # noqa: F401 - fixtures

import autoattn
from autoattn.kernels.compiler import Kernel
from autoattn.runtime.plan import planner
from autoattn.runtime.run import recompute_counter


class Tripping(Launches):
    """A kernel whose launches set the flags that are given; it has room for `tiles` of them."""

    def __init__(self, tiles: int) -> None:
        super().__init__()
        self.tiles = tiles
        self.flags: tuple[int, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda scratch: self.trip(scratch.data_ptr())

    def run(self, *given: Any) -> None:
        self.prepared.append((given[:9], given[9:]))
        self.trip(given[9])

    def trip(self, address: int) -> None:
        """[0] and [1] count, and what follows the flags speaks of other things; none of them is a tile."""
        numbers = [77, 78, *self.flags, *[79] * 2 * self.tiles]
        (ctypes.c_int32 * len(numbers)).from_address(address)[:] = numbers  # type: ignore[assignment]


@pytest.fixture
def kernel(card: Launches, monkeypatch: pytest.MonkeyPatch) -> Tripping:
    """What all calls run: four tiles."""
    return planted(monkeypatch, 4)


def planted(monkeypatch: pytest.MonkeyPatch, tiles: int) -> Tripping:
    noted = Tripping(tiles)
    module = SimpleNamespace(
        SIGNATURE={"scratch_ptr": "*i32"},
        grid=lambda batch, heads, seq, sm_count: (1,),
        scratch=lambda batch, heads, seq: 2 + 3 * tiles,
    )
    if tiles:
        module.tiles = lambda batch, heads, seq: tiles
    planted_kernel = Kernel(source=None, module=module, compiled=noted, device=CUDA, sm_count=1)  # type: ignore[arg-type]
    monkeypatch.setattr(planner.compiler, "load", lambda source, device: planted_kernel)
    return noted


def test_tiles_of_ordinary_and_prepared_launches_are_counted(kernel: Tripping) -> None:
    tensors = three()
    with autoattn.counting_redone() as count:
        for kernel.flags in ((0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 0, 0)):
            autoattn.attention(*tensors)
    assert len(kernel.prepared) == 2
    assert (count.tiles, count.redone, count.rate) == (12, 3, 0.25)
    assert repr(count) == "Redone(3 of 12 tiles)"


def test_calls_outside_are_not_counted_and_leave_nothing_behind(kernel: Tripping) -> None:
    tensors, kernel.flags = three(), (1, 1, 1, 1)
    autoattn.attention(*tensors)
    with autoattn.counting_redone() as count:
        autoattn.attention(*tensors)
    autoattn.attention(*tensors)
    assert (count.tiles, count.redone) == (4, 4)
    assert recompute_counter.counting == {}
    with pytest.raises(RuntimeError), autoattn.counting_redone():
        raise RuntimeError
    assert recompute_counter.counting == {}


def test_counts_inside_one_another_all_count(kernel: Tripping) -> None:
    tensors, kernel.flags = three(), (1, 0, 0, 0)
    with autoattn.counting_redone() as outer:
        autoattn.attention(*tensors)
        with autoattn.counting_redone() as inner:
            autoattn.attention(*tensors)
        autoattn.attention(*tensors)
    assert (outer.tiles, outer.redone) == (12, 3)
    assert (inner.tiles, inner.redone) == (4, 1)


def test_other_threads_are_not_counted(kernel: Tripping) -> None:
    tensors, kernel.flags = three(), (1, 1, 0, 0)
    with autoattn.counting_redone() as count:
        other = threading.Thread(target=lambda: autoattn.attention(*tensors))
        other.start()
        other.join()
        assert count.tiles == 0
        autoattn.attention(*tensors)
    assert (count.tiles, count.redone) == (4, 2)


def test_without_kernels_that_can_say_it_there_is_no_rate(card: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = three()
    with autoattn.counting_redone() as count:
        autoattn.attention(*tensors)  # the plain Triton template needs no scratch
        autoattn.attention(*tensors)
        planted(monkeypatch, 0)  # as one that only takes turns: the scratch is a counter alone
        planner.load_once.cache_clear()
        planner.forget()
        autoattn.attention(*tensors)
        autoattn.attention(*tensors)
    assert (count.tiles, count.redone) == (0, 0)
    assert math.isnan(count.rate)


def test_what_a_graph_captures_is_not_counted(card: Launches, kernel: Tripping) -> None:
    tensors, kernel.flags = three(), (1, 0, 0, 0)
    autoattn.attention(*tensors)
    card.context.capturing = True
    with autoattn.counting_redone() as count:
        autoattn.attention(*tensors)
    assert len(kernel.prepared) == 1
    assert count.tiles == 0


def test_launches_are_not_kept_when_nobody_counts(kernel: Tripping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_counter, "note", lambda flags: pytest.fail("a launch was noted"))
    for _ in range(3):
        autoattn.attention(*three())
    assert len(kernel.prepared) == 2
