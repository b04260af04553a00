"""Copies of the TMA unit in the Gluon interpreter: boxes, their edges, and when they count as done."""

from __future__ import annotations

import pytest
import torch
from gluon_texts import launch

from autoattn.errors import SynchronizationError

COPY = """
    @gluon.jit
    def kernel(source, target):
        room = gl.allocate_shared_memory(gl.float16, [64, 16], source.layout)
        arrived = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(arrived, count=1)
        mbarrier.expect(arrived, source.block_type.nbytes)
        tma.async_copy_global_to_shared(source, [{row}, 0], arrived, room)
        {wait}
        tma.async_copy_shared_to_global(target, [0, 0], room)
        {store_wait}
"""
WAIT, STORE_WAIT = "mbarrier.wait(arrived, 0)", "tma.store_wait(pendings=0)"


def copied(
    row: int = 0, wait: str = WAIT, store_wait: str = STORE_WAIT, rows: int = 70
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor, and where a box of it went."""
    source = torch.randn(rows, 16, generator=torch.Generator().manual_seed(0)).half()
    room = torch.full((80, 16), 9.0, dtype=torch.float16)
    target = room[:40]
    launch(COPY.format(row=row, wait=wait, store_wait=store_wait), source=source, target=target)
    assert bool((room[40:] == 9.0).all())
    return source, target


@pytest.mark.parametrize("row", [0, 6, 32, 69, 70, -5])
def test_what_lies_beyond_a_tensor_is_read_as_zero_and_never_written(row: int) -> None:
    source, target = copied(row)
    padded = torch.zeros(200, 16, dtype=torch.float16)
    padded[64:134] = source
    assert torch.equal(target, padded[64 + row : 64 + row + 40])


def test_a_box_that_nobody_waited_for_is_a_fault() -> None:
    with pytest.raises(SynchronizationError, match=r"missed barrier at room\[0\]: kernel, which stores by TMA"):
        copied(wait="pass")


def test_a_program_does_not_end_while_its_memory_is_read() -> None:
    with pytest.raises(SynchronizationError, match="the program ends while the copy to target"):
        copied(store_wait="pass")


def test_a_barrier_is_not_dropped_while_copies_to_it_are_under_way() -> None:
    with pytest.raises(SynchronizationError, match="invalidates arrived while copies to it are under way"):
        copied(wait="mbarrier.invalidate(arrived)")


def test_a_second_store_to_a_place_waits_until_the_first_lies_in_memory() -> None:
    again = (
        "tma.store_wait(pendings=0)\n        tma.async_copy_shared_to_global(target, [{row}, 0], room)\n        "
        + STORE_WAIT
    )
    with pytest.raises(SynchronizationError, match="has target written again"):
        copied(store_wait=again.format(row=8))
    copied(store_wait=again.format(row=64))
    written = (
        'gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], '
        "dtype=gl.int32, is_pure=False, pack=1)\n        "
    )
    copied(store_wait=written + again.format(row=8))
