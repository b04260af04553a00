"""Counters that launches share, without a GPU: streams and captures are planted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from autoattn import arrivals

CARD = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(stream=7, capturing=False, made=[], settled=0)

    def zeros(size: int, index: int) -> Tensor:
        state.made.append((size, index))
        return torch.zeros(size, dtype=torch.int32)

    def settle(index: int) -> None:
        state.settled += 1

    monkeypatch.setattr(arrivals, "_capturing", lambda: state.capturing)
    monkeypatch.setattr(arrivals, "_stream", lambda index: state.stream)
    monkeypatch.setattr(arrivals, "_zeros", zeros)
    monkeypatch.setattr(arrivals, "_settle", settle)
    monkeypatch.setattr(arrivals, "_rooms", {})
    monkeypatch.setattr(arrivals, "_slabs", {})
    return state


def overlap(one: Tensor, other: Tensor) -> bool:
    begin, end = one.data_ptr(), one.data_ptr() + 4 * len(one)
    return begin < other.data_ptr() + 4 * len(other) and other.data_ptr() < end


def test_launches_on_a_stream_share_a_room_and_others_have_their_own(card: SimpleNamespace) -> None:
    first = arrivals.room(CARD, 10)
    assert arrivals.room(CARD, 4000) is first
    card.stream = 8
    assert not overlap(arrivals.room(CARD, 10), first)
    assert not overlap(arrivals.room(torch.device("cuda", 1), 10), first)
    card.stream = 7
    assert arrivals.room(CARD, 10) is first


def test_a_room_that_is_outgrown_gives_way_to_a_larger_one(card: SimpleNamespace) -> None:
    arrivals.room(CARD, 10)
    larger = arrivals.room(CARD, 5000)
    assert len(larger) >= 5000
    assert arrivals.room(CARD, 10) is larger


def test_each_captured_launch_has_zeros_of_its_own_that_were_made_before(card: SimpleNamespace) -> None:
    shared = arrivals.room(CARD, 10)
    made = list(card.made)
    assert card.settled == 1
    card.capturing = True
    rooms = [arrivals.room(CARD, size) for size in (10, 10, 100)]
    assert card.made == made, "a graph holds no memset"
    assert [len(one) for one in rooms] == [10, 10, 100]
    assert all(one.data_ptr() % (4 * arrivals.STEP) == rooms[0].data_ptr() % (4 * arrivals.STEP) for one in rooms)
    for place, one in enumerate(rooms):
        assert not overlap(one, shared)
        assert not any(overlap(one, other) for other in rooms[:place])


def test_a_graph_sets_its_own_zeros_where_none_are_left(card: SimpleNamespace) -> None:
    card.capturing = True
    arrivals.room(CARD, 10)
    assert card.made == [(10, 0)], "nothing was launched before the capture"
    card.capturing = False
    arrivals.room(CARD, 10)
    card.capturing = True
    arrivals.room(CARD, arrivals.CAPTURED - 5)
    arrivals.room(CARD, 10)
    assert card.made[-1] == (10, 0)


def test_streams_that_come_and_go_do_not_fill_the_memory(card: SimpleNamespace) -> None:
    for stream in range(2 * arrivals.MOST):
        card.stream = stream
        arrivals.room(CARD, 10)
    assert len(arrivals._rooms) == arrivals.MOST


def test_the_interpreter_has_zeros_for_each_launch() -> None:
    cpu = torch.device("cpu")
    assert not overlap(arrivals.room(cpu, 3), arrivals.room(cpu, 3))
