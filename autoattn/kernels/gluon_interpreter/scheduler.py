"""Partitions of a warp-specialised program as threads of which one runs at a time, in an order that a seed decides.

A partition runs until it waits for a barrier. What the TMA unit does happens between: with seed 0 as late as possible,
with other seeds at random, as does the choice of who runs next. The same seed repeats a run. Where nobody can run and
no copy is under way, the program is in a deadlock.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoattn.errors import InterpretationError, SynchronizationError
from autoattn.kernels.gluon_interpreter.access_order import Footprint, Knowledge
from autoattn.kernels.gluon_interpreter.global_memory import GlobalMemory
from autoattn.kernels.gluon_interpreter.tensors import Product

RENDERED = "autoattn_rendered"  # how the name of a rendered kernel's file begins
NO_DOUBT = "", Footprint(0, ())
_current = threading.local()


def _held() -> threading.Lock:
    """A lock that is taken already."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Aborted(BaseException):
    """Ends the other partitions once one has failed."""


@dataclass(slots=True, eq=False, kw_only=True)
class Copy:
    """A copy of the TMA unit, from when it was asked for to when its data arrive."""

    words: str
    deliver: Callable[[], None]
    owner: Partition
    delivered: bool = False
    target: object = None  # of one that writes global memory: what it overwrites
    event: int = 0  # of its read of shared memory, one bit


@dataclass(slots=True, eq=False, kw_only=True)
class Partition:
    """The warps of one role, which run the same text."""

    name: str
    warps: int
    program: Program
    knowledge: Knowledge = field(default_factory=Knowledge)
    products: list[Product] = field(default_factory=list)  # under way, oldest first
    stores: list[Copy] = field(default_factory=list)  # whose read of shared memory nobody waited for, oldest first
    written: list[Copy] = field(default_factory=list)  # whose writes of global memory nobody waited for
    doubt: tuple[str, Footprint] = NO_DOUBT  # what is wrong with the last load, and of which place that was
    is_ready: Callable[[], bool] = lambda: True
    reason: Callable[[], str] = lambda: "nothing"
    baton: threading.Lock = field(default_factory=_held)  # of whoever runs; to release it wakes the partition

    def check_doubt(self) -> None:
        """Refuses to go on where something is wrong with the last load."""
        if self.doubt[0]:
            raise SynchronizationError(self.doubt[0])


@dataclass(slots=True, eq=False, kw_only=True)
class Program:
    """One program of a launch: its place in the grid, its partitions and its copies."""

    number: int
    count: int
    memory: GlobalMemory
    seed: int
    events: int = 0
    named_barriers: dict[int, Any] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)  # under way
    running: list[Partition] = field(default_factory=list)
    fault: BaseException | None = None
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed * 1_000_003 + self.number)

    def new_event(self) -> int:
        """One bit that stands for what happens now."""
        self.events += 1
        return 1 << self.events

    def run(self, roles: Sequence[tuple[Partition, Callable[[], None]]]) -> None:
        """Runs partitions to their ends; raises the first fault of any."""
        self.running = [partition for partition, _ in roles]
        threads = [threading.Thread(target=self._body, args=role, daemon=True) for role in roles]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        if self.fault is not None:
            raise self.fault

    def _body(self, partition: Partition, work: Callable[[], None]) -> None:
        partition.baton.acquire()
        try:
            with acting_as(partition):
                if self.fault is None:
                    work()
                    partition.check_doubt()
        except _Aborted:
            pass
        except BaseException as error:
            self.fault = self.fault or error
        self.running.remove(partition)
        self._pass_on()

    def wait(self, partition: Partition, is_ready: Callable[[], bool], reason: Callable[[], str]) -> None:
        """Lets others run until a condition holds.

        Args:
            reason: what it waits for, as `keys[1] ...`, for the sentence on a deadlock.
        """
        partition.check_doubt()
        if is_ready() and (self.seed == 0 or self.random.random() < 0.5):
            return
        if partition not in self.running:  # outside of warp_specialize nobody else can run
            while not is_ready():
                if not self.copies:
                    raise SynchronizationError(f"deadlock: {partition.name} waits for {reason()}")
                self.deliver(self.copies[0])
            return
        partition.is_ready, partition.reason = is_ready, reason
        self._pass_on()
        partition.baton.acquire()
        partition.is_ready = lambda: True
        if self.fault is not None:
            raise _Aborted

    def check_idle(self) -> None:
        """Refuses arrivals at named barriers that open for nobody: who uses them next would count them."""
        for number, barrier in self.named_barriers.items():
            if barrier.came:
                names = ", ".join(partition.name for partition in barrier.came)
                raise SynchronizationError(f"{names} came to the named barrier {number}, which does not open any more")

    def end(self, whole: Partition) -> None:
        """Has all data arrive that are under way when a program ends."""
        whole.check_doubt()
        if whole.stores:
            raise SynchronizationError(f"the program ends while {whole.stores[0].words} may read its shared memory")
        while self.copies:
            self.deliver(self.copies[0])

    def deliver(self, copy: Copy) -> None:
        """Has a copy's data arrive."""
        if not copy.delivered:
            copy.delivered = True
            self.copies.remove(copy)
            copy.deliver()

    def _pass_on(self) -> None:
        """Wakes the next partition; it ends the others where one has failed or none can run."""
        while self.running:
            if self.fault is not None:
                self.running[0].baton.release()
                return
            able = [partition for partition in self.running if partition.is_ready()]
            if self.seed and self.copies and (not able or self.random.random() < 0.5):
                self.deliver(self.random.choice(self.copies))
            elif able:
                (self.random.choice(able) if self.seed else able[0]).baton.release()
                return
            elif self.copies:
                self.deliver(self.copies[0])
            else:
                waits = "; ".join(f"{partition.name} waits for {partition.reason()}" for partition in self.running)
                self.fault = SynchronizationError(f"deadlock: {waits}")


@contextlib.contextmanager
def acting_as(partition: Partition) -> Iterator[None]:
    """Makes a partition the one that this thread runs."""
    before = getattr(_current, "partition", None)
    _current.partition = partition
    try:
        yield
    finally:
        _current.partition = before


def current() -> Partition:
    """The partition that runs on this thread."""
    partition: Partition | None = getattr(_current, "partition", None)
    if partition is None:
        raise InterpretationError("a Gluon function must be called from a kernel that was launched; launch one")
    return partition


def here() -> str:
    """The partition and the line of the rendered text that run now, as `consume(0) in line 120`."""
    return f"{current().name} in line {line()}"


def line() -> int:
    """The line of the rendered text that runs now."""
    frame = sys._getframe(1)
    while not frame.f_code.co_filename.startswith(RENDERED) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_lineno
