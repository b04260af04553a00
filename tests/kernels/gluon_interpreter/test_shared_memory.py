"""Shared memory of the Gluon interpreter: views of it, and what threads leave there."""

from __future__ import annotations

import pytest
import torch
from gluon_texts import launch

from autoattn.errors import SynchronizationError

KERNEL = """
    @gluon.jit
    def kernel(numbers_ptr):
        room = gl.allocate_shared_memory(gl.int32, [2, 4, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        places = gl.arange(0, 32).reshape([4, 8])
        room.index(0).store(places)
        room.index(1).store(places + 100)
        {body}
        gl.store(numbers_ptr + gl.arange(0, {count}), gl.reshape(result, [{count}]))
"""


def result(body: str, count: int) -> list[int]:
    numbers = torch.zeros(64, dtype=torch.int32)
    launch(KERNEL.format(body=body, count=count), numbers_ptr=numbers)
    return numbers[:count].tolist()


def test_views_are_of_the_same_bytes() -> None:
    assert result("result = room.index(gl.to_tensor(1)).load()", 32) == list(range(100, 132))
    assert result("result = room.index(0).permute((1, 0)).slice(2, 2).load()", 8) == [2, 10, 18, 26, 3, 11, 19, 27]
    assert result("result = room.index(0).slice(4, 2, dim=1).load()", 8) == [4, 5, 12, 13, 20, 21, 28, 29]
    assert result("result = room.index(0).reshape([32]).slice(30, 2).load()", 2) == [30, 31]
    halves = "result = room.index(0)._reinterpret(gl.int16, [64], None).slice(62, 2).load().to(gl.int32)"
    assert result(halves, 2) == [31, 0]


def test_a_slot_that_is_not_there_is_a_fault() -> None:
    with pytest.raises(SynchronizationError, match="takes slot 2 of room, which has 2"):
        result("result = room.index(2).load()", 32)


def test_what_nobody_has_written_is_not_read() -> None:
    fresh = "more = gl.allocate_shared_memory(gl.int32, [32], None)\n        result = more.load()"
    with pytest.raises(SynchronizationError, match=r"kernel, which loads in line \d+, reads more, which nobody"):
        result(fresh, 32)


RACE = """
    @gluon.jit
    def clear(c: gl.constexpr, room):
        numbers = room.load()
        room.store({stored})

    @gluon.jit
    def kernel(numbers_ptr):
        room = gl.allocate_shared_memory(gl.int32, [32], None)
        room.store(gl.arange(0, 32))
        gl.warp_specialize([(clear, (0, room)), (clear, (1, room))], [4], [24])
        gl.store(numbers_ptr + gl.arange(0, 32), room.load())
"""


def test_partitions_may_write_the_same_bits_alike_and_no_others() -> None:
    numbers = torch.zeros(32, dtype=torch.int32)
    launch(RACE.format(stored="gl.where(numbers < 8, numbers, 0)"), numbers_ptr=numbers)
    assert numbers.tolist() == [*range(8), *[0] * 24]
    with pytest.raises(SynchronizationError, match=r"missed barrier at room: clear\(1\), which loads"):
        launch(RACE.format(stored="numbers + 1"), numbers_ptr=numbers)
