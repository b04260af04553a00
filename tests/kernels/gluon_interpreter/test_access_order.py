"""Which accesses of shared memory the Gluon interpreter takes for ordered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoattn.errors import SynchronizationError
from autoattn.kernels.gluon_interpreter.access_order import Access, History, Knowledge, covers, footprint_of, overlap
from autoattn.kernels.gluon_interpreter.tensors import Product

ROOM = torch.zeros(2, 8, 16, dtype=torch.float16)


def access(event: int, view: torch.Tensor = ROOM[0], *, by_threads: bool = True, **facts: Any) -> Access:
    return Access(event=1 << event, words=f"access {event}", place=footprint_of(view), by_threads=by_threads, **facts)


def history(*writes: Access) -> History:
    return History(name="room", slot_bytes=256, slots=2, writes=list(writes))


def test_views_overlap_where_they_share_a_byte() -> None:
    left, right = (footprint_of(ROOM[0][:, 8 * half : 8 * half + 8]) for half in range(2))
    assert not overlap(left, right)
    assert not overlap(footprint_of(ROOM[0]), footprint_of(ROOM[1]))
    assert overlap(left, footprint_of(ROOM[0][2:3]))
    assert overlap(footprint_of(ROOM[0].permute(1, 0)[3:5]), left)
    assert not overlap(footprint_of(ROOM[0].view(torch.int32)[:, 4:]), left)


def test_a_view_covers_the_same_bytes_in_other_axes() -> None:
    whole = footprint_of(ROOM[0])
    assert footprint_of(ROOM[0].permute(1, 0)) == footprint_of(ROOM[0].reshape(2, 4, 16)) == whole
    assert covers(whole, footprint_of(ROOM[0][:, :8]))
    assert not covers(footprint_of(ROOM[0][:, :8]), whole)
    assert not covers(footprint_of(ROOM[0][:, :8]), footprint_of(ROOM[0][:, 8:]))


def test_a_read_must_know_of_the_write() -> None:
    room = history(access(1))
    assert room.read(access(2), Knowledge(seen=1 << 1)) == ""
    assert room.read(access(3), Knowledge()) == "missed barrier at room[0]: access 3, does not wait for access 1"
    assert "which nobody has written" in room.read(access(4, ROOM[1]), Knowledge())


@pytest.mark.parametrize(
    ("knows", "reads", "words"),
    [
        (Knowledge(seen=2), {}, "missed fence"),
        (Knowledge(seen=2, fenced=2), {}, ""),
        (Knowledge(seen=2, fenced=2), {"product": Product(event=8, words="")}, "do not meet behind their fence"),
        (Knowledge(seen=2, fenced=2, settled=2), {"product": Product(event=8, words="")}, ""),
    ],
)
def test_the_async_proxy_reads_what_was_fenced(knows: Knowledge, reads: dict[str, Any], words: str) -> None:
    fault = history(access(1)).read(access(3, by_threads=False, **reads), knows)
    assert words in fault
    assert bool(words) == bool(fault)


def test_a_write_must_know_of_all_reads_and_writes() -> None:
    room = history(access(1))
    room.read(access(2), Knowledge(seen=1 << 1))
    with pytest.raises(
        SynchronizationError, match=r"missed barrier at room\[0\]: access 3, does not wait for access 2"
    ):
        room.write(access(3, by_threads=False), Knowledge(seen=1 << 1, fenced=1 << 1))
    room.write(access(4), Knowledge(seen=1 << 1 | 1 << 2))
    assert [write.event for write in room.writes] == [1 << 4]
    assert room.reads == []


def test_a_write_over_a_product_that_nobody_uses_spoils_it_alone() -> None:
    room, product = history(access(1, by_threads=False)), Product(event=1 << 2, words="the product")
    room.read(access(2, by_threads=False, product=product), Knowledge(seen=1 << 1))
    room.write(access(3, by_threads=False), Knowledge(seen=1 << 1))
    assert "does not wait for access 2" in product.fault
    used = Product(event=1 << 4, words="the product", used=True)
    room.read(access(4, by_threads=False, product=used), Knowledge(seen=1 << 3))
    with pytest.raises(SynchronizationError, match="does not wait for access 4"):
        room.write(access(5, by_threads=False), Knowledge(seen=1 << 3))


def test_writes_that_leave_the_same_bits_serve_those_who_know_of_either() -> None:
    room = history(access(1))
    assert room.repeat(access(2))
    for event in (1, 2):
        assert room.read(access(3), Knowledge(seen=1 << event)) == ""
    assert "missed barrier" in room.read(access(4), Knowledge(seen=1 << 5))
    with pytest.raises(SynchronizationError, match="missed barrier"):
        room.write(access(6), Knowledge(seen=1 << 1 | 1 << 3 | 1 << 4))
    assert not history().repeat(access(1))
