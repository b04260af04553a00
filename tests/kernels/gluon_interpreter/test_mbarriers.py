"""Barriers of the Gluon interpreter: phases, counts and bytes, and the named ones of the hardware."""

from __future__ import annotations

import pytest
import torch
from gluon_texts import launch

from autoattn.errors import SynchronizationError

PAIR = """
    @gluon.jit
    def first(number, numbers_ptr, ready, done):
        {first}

    @gluon.jit
    def second(number, numbers_ptr, ready, done):
        {second}

    @gluon.jit
    def kernel(numbers_ptr):
        ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
        done = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        number = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        for place in gl.static_range(2):
            mbarrier.init(ready.index(place), count=1)
        mbarrier.init(done, count=1)
        gl.warp_specialize(
            [(first, (number, numbers_ptr, ready, done)), (second, (number, numbers_ptr, ready, done))], [1], [24]
        )
"""
STORE = "number.store(gl.full([1], 7, gl.int32))"
LOAD = "gl.store(numbers_ptr, gl.max(number.load(), 0))"


def pair(*first: str, second: tuple[str, ...]) -> torch.Tensor:
    """What two partitions leave in memory."""
    numbers = torch.zeros(4, dtype=torch.int32)
    indent = "\n        "
    launch(PAIR.format(first=indent.join(first), second=indent.join(second)), numbers_ptr=numbers)
    return numbers


def test_a_wait_passes_on_what_was_written_before_the_arrival() -> None:
    arrives = (STORE, "mbarrier.arrive(ready.index(0), count=1)")
    assert pair("mbarrier.wait(ready.index(0), 0)", LOAD, second=arrives)[0] == 7


def test_what_is_written_behind_the_arrival_is_not_passed_on() -> None:
    early = ("mbarrier.arrive(ready.index(0), count=1)", STORE)
    with pytest.raises(SynchronizationError, match="number"):
        pair("mbarrier.wait(ready.index(0), 0)", LOAD, second=early)


def test_the_phase_before_the_first_has_ended_and_passes_nothing_on() -> None:
    with pytest.raises(SynchronizationError, match=r"missed barrier at number: second, which loads in line \d+, does"):
        pair(STORE, "mbarrier.arrive(ready.index(0), count=1)", second=("mbarrier.wait(ready.index(1), 1)", LOAD))


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        ("mbarrier.wait(ready.index(0), 0)", "deadlock: first waits for phase 0 of ready.0., which has ended 0"),
        ("mbarrier.arrive(ready.index(0), count=2)", "arrives 2 times at ready.0., where 1 are awaited"),
        ("mbarrier.invalidate(done); mbarrier.arrive(done, count=1)", "arrives at done, which is not initialised"),
        ("mbarrier.init(done, count=1)", "initialises done a second time"),
        ("mbarrier.wait(done, 2)", "a phase is 0 or 1"),
        ("mbarrier.arrive(ready.index(2), count=1)", "takes barrier 2 of 2"),
        ("mbarrier.expect(done, 64); mbarrier.wait(done, 0)", "lacks 64 bytes"),
    ],
)  # fmt: skip
def test_a_misused_barrier_is_a_fault(first: str, sentence: str) -> None:
    with pytest.raises(SynchronizationError, match=sentence):
        pair(first, second=("pass",))


def named(instruction: str, number: int, threads: int) -> str:
    return (
        f'gl.inline_asm_elementwise("bar.{instruction} $1, {threads}; mov.u32 $0, $1;", "=r,r", '
        f"[gl.to_tensor({number})], dtype=gl.int32, is_pure=False, pack=1)"
    )


def test_a_named_barrier_passes_on_what_those_who_arrive_have_written() -> None:
    assert pair(named("sync", 6, 160), LOAD, second=(STORE, named("arrive", 6, 160)))[0] == 7


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (named("sync", 6, 160), "pass", "deadlock: first waits for the named barrier 6, to which 128 of 160 threads"),
        (named("arrive", 6, 160), "pass", "first came to the named barrier 6, which does not open any more"),
        (named("arrive", 5, 160), "pass", "uses the named barrier 5; those from 6 to 15 are free"),
        (named("arrive", 6, 288), named("arrive", 6, 160), "others with"),
        (f"{named('arrive', 6, 288)}; {named('arrive', 6, 288)}", "pass", "named barrier 6 twice before it opens"),
        (named("arrive", 6, 144), named("arrive", 6, 144), "160 threads come to the named barrier 6"),
    ],
)
def test_a_misused_named_barrier_is_a_fault(first: str, second: str, sentence: str) -> None:
    with pytest.raises(SynchronizationError, match=sentence):
        pair(first, second=(second,))
