"""Barriers: mbarriers in shared memory, with phases, arrivals and bytes, and the named ones of the hardware."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autoattn.errors import SynchronizationError
from autoattn.kernels.gluon_interpreter import scheduler
from autoattn.kernels.gluon_interpreter.access_order import Knowledge
from autoattn.kernels.gluon_interpreter.shared_memory import name_of_assigned

NAMED = 16  # barriers of the hardware for a program; PTX ISA, bar
TRITONS = 6  # of them, the first ones


@dataclass(slots=True, eq=False, kw_only=True)
class Mbarrier:
    """One mbarrier; PTX ISA, parallel synchronization instructions: mbarrier."""

    name: str
    count: int = 0  # arrivals that end a phase; 0 before init and after invalidate
    phase: int = 0  # phases that have ended
    pending: int = 0  # arrivals that this one lacks
    nbytes: int = 0  # that it awaits beyond those that came
    copies: int = 0  # under way to it
    ended: Knowledge = field(default_factory=Knowledge)  # passed on by phases that have ended
    arriving: Knowledge = field(default_factory=Knowledge)  # by this one, to those who wait for its end

    def check_made(self, action: str) -> None:
        """Refuses an operation on a barrier that is not there."""
        if not self.count:
            raise SynchronizationError(f"{scheduler.here()} {action} {self.name}, which is not initialised")

    def arrive(self, count: int, knows: Knowledge) -> None:
        """Counts arrivals of the current partition."""
        scheduler.current().check_doubt()
        self.arriving.learn(knows)
        self.pending -= count
        if self.pending < 0:
            raise SynchronizationError(
                f"{scheduler.here()} arrives {count} times at {self.name}, where {self.pending + count} are awaited"
            )
        self.end_phase()

    def complete(self, nbytes: int, event: int) -> None:
        """Counts bytes that a copy has brought."""
        self.copies -= 1
        self.nbytes -= nbytes
        self.arriving.seen |= event
        self.end_phase()

    def end_phase(self) -> None:
        """Ends the phase if nothing is pending."""
        if self.pending == 0 and self.nbytes == 0:
            self.ended.learn(self.arriving)
            self.arriving = Knowledge()
            self.phase += 1
            self.pending = self.count

    def awaited(self, parity: int) -> str:
        """What a wait for a phase's end lacks, in words."""
        lacks = f"{self.pending} of {self.count} arrivals" if self.pending else f"{self.nbytes} bytes"
        return f"phase {parity} of {self.name}, which has ended {self.phase} and lacks {lacks}"


class Mbarriers:
    """An allocation of mbarriers."""

    def __init__(self, name: str, count: int) -> None:
        names = [name] if count == 1 else [f"{name}[{place}]" for place in range(count)]
        self.items = [Mbarrier(name=name) for name in names]

    def index(self, place: Any) -> Mbarriers:
        """One of them."""
        slot = int(place)
        if not 0 <= slot < len(self.items):
            raise SynchronizationError(f"{scheduler.here()} takes barrier {slot} of {len(self.items)}")
        barrier = Mbarriers("", 0)
        barrier.items = [self.items[slot]]
        return barrier

    @property
    def only(self) -> Mbarrier:
        """The one that this is."""
        (barrier,) = self.items
        return barrier


def allocate(shape: Sequence[int]) -> Mbarriers:
    """Room for barriers, none of which is initialised."""
    return Mbarriers(name_of_assigned(sys._getframe(1)), int(shape[0]))


def init(barrier: Mbarriers, count: Any) -> None:
    """mbarrier.init"""
    mbarrier = barrier.only
    if mbarrier.count:
        raise SynchronizationError(
            f"{scheduler.here()} initialises {mbarrier.name} a second time without invalidating it"
        )
    mbarrier.count = mbarrier.pending = int(count)
    mbarrier.phase = mbarrier.nbytes = 0


def invalidate(barrier: Mbarriers) -> None:
    """mbarrier.inval"""
    mbarrier = barrier.only
    mbarrier.check_made("invalidates")
    if mbarrier.copies:
        raise SynchronizationError(f"{scheduler.here()} invalidates {mbarrier.name} while copies to it are under way")
    mbarrier.count = 0
    mbarrier.ended, mbarrier.arriving = Knowledge(), Knowledge()


def expect(barrier: Mbarriers, nbytes: Any, pred: Any = True) -> None:
    """mbarrier.arrive.expect_tx: one arrival, and more bytes to come before the phase ends."""
    if pred:
        mbarrier = barrier.only
        mbarrier.check_made("expects bytes at")
        mbarrier.nbytes += int(nbytes)
        mbarrier.arrive(1, scheduler.current().knowledge)


def arrive(barrier: Mbarriers, *, count: Any = 1, pred: Any = True) -> None:
    """mbarrier.arrive, by one thread after all of its partition have met."""
    if pred:
        mbarrier, knows = barrier.only, scheduler.current().knowledge
        mbarrier.check_made("arrives at")
        knows.settle()
        mbarrier.arrive(int(count), knows)


def wait(barrier: Mbarriers, phase: Any, pred: Any = True, deps: Sequence[Any] = ()) -> None:
    """mbarrier.try_wait.parity, until the phase of this parity has ended."""
    if not pred:
        return
    mbarrier, parity, partition = barrier.only, int(phase), scheduler.current()
    mbarrier.check_made("waits for")
    if parity not in (0, 1):
        raise SynchronizationError(f"{scheduler.here()} waits for phase {parity} of {mbarrier.name}; a phase is 0 or 1")
    line = scheduler.line()
    partition.program.wait(
        partition, lambda: mbarrier.phase & 1 != parity, lambda: f"{mbarrier.awaited(parity)} (line {line})"
    )
    mbarrier.check_made("waits for")
    partition.knowledge.learn(mbarrier.ended)


@dataclass(slots=True, eq=False, kw_only=True)
class NamedBarrier:
    """A barrier of the hardware: it opens when so many threads have come, and begins anew."""

    threads: int
    came: list[scheduler.Partition] = field(default_factory=list)
    openings: int = 0
    arriving: Knowledge = field(default_factory=Knowledge)
    passed: Knowledge = field(default_factory=Knowledge)

    @property
    def present(self) -> int:
        """Threads that have come."""
        return sum(32 * partition.warps for partition in self.came)


def meet(number: int, threads: int, *, waits: bool) -> None:
    """bar.sync or, without waiting, bar.arrive, by all threads of the current partition."""
    partition = scheduler.current()
    if not TRITONS <= number < NAMED:
        raise SynchronizationError(
            f"{scheduler.here()} uses the named barrier {number}; those from {TRITONS} to {NAMED - 1} are free"
        )
    partition.check_doubt()
    barriers = partition.program.named_barriers
    barrier: NamedBarrier = barriers.setdefault(number, NamedBarrier(threads=threads))
    if barrier.came and barrier.threads != threads:
        raise SynchronizationError(
            f"{scheduler.here()} comes to the named barrier {number} with {threads} threads, others with "
            f"{barrier.threads}"
        )
    if partition in barrier.came:
        raise SynchronizationError(f"{scheduler.here()} comes to the named barrier {number} twice before it opens")
    barrier.threads = threads
    partition.knowledge.settle()
    barrier.came.append(partition)
    barrier.arriving.learn(partition.knowledge)
    openings, line = barrier.openings, scheduler.line()
    if barrier.present > threads:
        raise SynchronizationError(
            f"{barrier.present} threads come to the named barrier {number}, which opens at {threads} (line {line})"
        )
    if barrier.present == threads:
        barrier.openings += 1
        barrier.passed, barrier.arriving, barrier.came = barrier.arriving, Knowledge(), []
    if waits:
        partition.program.wait(
            partition,
            lambda: barrier.openings > openings,
            lambda: f"the named barrier {number}, to which {barrier.present} of {threads} threads came (line {line})",
        )
        partition.knowledge.learn(barrier.passed)
