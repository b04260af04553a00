"""Partitions of the Gluon interpreter take turns in an order that a seed repeats."""

from __future__ import annotations

import pytest
import torch
from gluon_texts import launch

from autoattn.errors import InterpretationError
from autoattn.kernels.gluon_interpreter import scheduler

ORDER = """
    @gluon.jit
    def say(c: gl.constexpr, numbers_ptr, ready):
        for step in range(0, gl.to_tensor(4)):
            mbarrier.wait(ready.index(c), 1)
            place = gl.atomic_add(numbers_ptr, 1)
            gl.store(numbers_ptr + 1 + place, c)

    @gluon.jit
    def kernel(numbers_ptr):
        ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
        for place in gl.static_range(2):
            mbarrier.init(ready.index(place), count=1)
        gl.warp_specialize([(say, (0, numbers_ptr, ready)), (say, (1, numbers_ptr, ready))], [4], [24])
"""


def order(seed: int) -> list[int]:
    """Which partition was at work, step by step."""
    numbers = torch.zeros(9, dtype=torch.int32)
    launch(ORDER, seed=seed, numbers_ptr=numbers)
    return numbers[1:].tolist()


def test_a_seed_repeats_an_order_and_others_have_others() -> None:
    assert order(0) == [0] * 4 + [1] * 4
    orders = [order(seed) for seed in range(1, 6)]
    assert orders == [order(seed) for seed in range(1, 6)]
    assert len({tuple(each) for each in orders}) > 2


def test_a_fault_of_one_partition_ends_the_others() -> None:
    broken = ORDER.replace("gl.store(numbers_ptr + 1 + place, c)", "gl.nothing(c)")
    with pytest.raises(InterpretationError, match="has no nothing"):
        launch(broken, numbers_ptr=torch.zeros(9, dtype=torch.int32))


def test_outside_of_a_launch_there_is_no_partition() -> None:
    with pytest.raises(InterpretationError, match="must be called from a kernel that was launched"):
        scheduler.current()
