"""Zeros that launches share, without a GPU: captures are planted."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import fake_device
import pytest
import torch

from autoattn.kernels import zeroed_scratch
from autoattn.kernels.zeroed_scratch import Buffer, ScratchPool


@pytest.fixture
def card(zeros_on_the_host: None, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(context=fake_device.set_context(monkeypatch), allocations=[], settled=[])
    on_the_host = zeroed_scratch.new_zeros
    monkeypatch.setattr(
        zeroed_scratch,
        "new_zeros",
        lambda size, index: (state.allocations.append((size, index)), on_the_host(size, index))[1],
    )
    monkeypatch.setattr(zeroed_scratch, "settle", state.settled.append)
    return state


def overlap(left: Buffer, right: Buffer) -> bool:
    return left.address < right.address + 4 * right.size and right.address < left.address + 4 * left.size


def test_launches_on_a_stream_share_a_room_and_others_have_their_own(card: SimpleNamespace) -> None:
    pool = ScratchPool()
    first = pool.buffer(0, 7, 10)
    assert pool.buffer(0, 7, 4000) is first
    assert not overlap(pool.buffer(0, 8, 10), first)
    assert not overlap(pool.buffer(1, 7, 10), first)
    assert pool.buffer(0, 7, 10) is first
    buffers: list[Buffer] = []
    thread = threading.Thread(target=lambda: buffers.append(pool.buffer(0, 7, 10)))
    thread.start()
    thread.join()
    assert buffers == [first], "a stream runs one launch after the other, whichever threads they come from"


def test_what_one_kind_of_launches_leaves_behind_is_no_zero_of_another(card: SimpleNamespace) -> None:
    scratch, arrivals = (zeroed_scratch.POOLS[name].buffer(0, 7, 10) for name in ("scratch_ptr", "arrivals_ptr"))
    assert not overlap(scratch, arrivals)


def test_a_room_that_is_outgrown_gives_way_to_a_larger_one_and_is_zeroed_only_when_it_is_new(
    card: SimpleNamespace,
) -> None:
    pool = ScratchPool()
    for size in (300, 4096, 4097, 300, 8192):
        buffer = pool.buffer(0, 7, size)
        assert buffer.size == buffer.tensor.numel() >= size
        assert buffer.address == buffer.tensor.data_ptr()
    assert [size for size, _ in card.allocations if size != zeroed_scratch.CAPTURED] == [4096, 8192]


def test_what_is_kept_is_not_taken_from_a_pool_of_the_thread_that_launches(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking: list[int] = []
    plain = zeroed_scratch.new_zeros_on
    monkeypatch.setattr(
        zeroed_scratch, "new_zeros_on", lambda *arguments: (asking.append(threading.get_ident()), plain(*arguments))[1]
    )
    ScratchPool().buffer(0, 7, 10)
    assert len(asking) == 2, "the buffer, and zeros for graphs"
    assert threading.get_ident() not in asking


def test_each_captured_launch_has_zeros_of_its_own_that_were_made_before(card: SimpleNamespace) -> None:
    pool, others = ScratchPool(), ScratchPool()
    shared = [pool.buffer(0, 7, 10), others.buffer(0, 7, 10)]
    allocations_before = list(card.allocations)
    assert card.settled == [0], "once for a device, whoever asks"
    card.context.capturing = True
    captured = [scratch.buffer(0, 7, size) for scratch, size in ((pool, 10), (pool, 10), (others, 100), (pool, 10))]
    assert card.allocations == allocations_before, "a graph holds no memset"
    assert [buffer.size for buffer in captured] == [10, 10, 100, 10]
    assert not any(buffer.tensor.any() for buffer in captured)
    assert all(
        buffer.address % (4 * zeroed_scratch.STEP) == captured[0].address % (4 * zeroed_scratch.STEP)
        for buffer in captured
    )
    for place, room in enumerate(captured):
        assert not any(overlap(room, other) for other in (*shared, *captured[:place]))


def test_a_graph_sets_its_own_zeros_where_none_are_left(card: SimpleNamespace) -> None:
    pool = ScratchPool()
    card.context.capturing = True
    pool.buffer(0, 7, 10)
    assert card.allocations == [(10, 0)], "nothing was launched before the capture"
    card.context.capturing = False
    pool.buffer(0, 7, 10)
    card.context.capturing = True
    pool.buffer(0, 7, zeroed_scratch.CAPTURED - 5)
    pool.buffer(0, 7, 10)
    assert card.allocations[-1] == (10, 0)


def slabs_made(card: SimpleNamespace) -> int:
    return sum(size == zeroed_scratch.CAPTURED for size, _ in card.allocations)


def test_the_next_launch_outside_of_graphs_makes_more_zeros_once_half_are_given_away(card: SimpleNamespace) -> None:
    pool = ScratchPool()
    shared = pool.buffer(0, 7, 10)
    card.context.capturing = True
    captured = [pool.buffer(0, 7, zeroed_scratch.CAPTURED // 2)]
    card.context.capturing = False
    assert pool.buffer(0, 7, 10) is shared
    assert slabs_made(card) == 1, "half are left"
    card.context.capturing = True
    captured.append(pool.buffer(0, 7, 10))
    assert slabs_made(card) == 1, "a capture allocates nothing"
    card.context.capturing = False
    other = threading.Thread(target=lambda: pool.buffer(0, 9, 10))
    other.start()
    other.join()
    assert slabs_made(card) == 1, "while one thread captures, another may not ask for memory"
    pool.buffer(0, 8, 10)
    assert slabs_made(card) == 2
    assert card.settled == [0, 0]
    card.context.capturing = True
    captured.append(pool.buffer(0, 7, zeroed_scratch.CAPTURED))
    assert card.allocations[-1][0] == zeroed_scratch.CAPTURED, "no graph sets zeros"
    assert not any(overlap(left, right) for place, left in enumerate(captured) for right in captured[:place])
    kept = {slab.untyped_storage().data_ptr() for slab in zeroed_scratch.slabs[0]}
    assert {buffer.tensor.untyped_storage().data_ptr() for buffer in captured} == kept, "graphs hold no tensor"


def test_graphs_that_come_and_go_do_not_fill_the_memory(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeroed_scratch, "MOST_SLABS", 3)
    pool = ScratchPool()
    for _ in range(5):
        card.context.capturing = False
        pool.buffer(0, 7, 10)
        card.context.capturing = True
        pool.buffer(0, 7, zeroed_scratch.CAPTURED)
    assert slabs_made(card) == 3 + 2, "two graphs set their own"
    card.context.capturing = False
    assert pool.buffer(0, 7, 10) is pool.buffer(0, 7, 10)


def test_a_handle_that_stands_for_the_streams_of_all_threads_shares_nothing(card: SimpleNamespace) -> None:
    pool = ScratchPool()
    first, second = (pool.buffer(0, 2, 300) for _ in range(2))
    assert not overlap(first, second)
    assert not first.tensor.any()
    assert pool.buffers == {}


def test_the_default_stream_which_no_graph_captures_is_not_asked(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked"))
    pool = ScratchPool()
    assert pool.buffer(0, 0, 300) is pool.buffer(0, 0, 300)


def test_streams_that_come_and_go_do_not_fill_the_memory(card: SimpleNamespace) -> None:
    pool = ScratchPool()
    for stream in range(10, 10 + 2 * zeroed_scratch.MOST):
        pool.buffer(0, stream, 10)
    assert [*pool.buffers] == [(0, 10 + zeroed_scratch.MOST + number) for number in range(zeroed_scratch.MOST)], (
        "the latest"
    )
