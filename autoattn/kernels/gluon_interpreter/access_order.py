"""Which accesses of shared memory are ordered: what each partition knows to have happened, and who touched what.

Every access is an event, one bit of an integer. A partition knows its own accesses and those that others passed on to
it by barriers. It may read what it knows to be written, and write where it knows all reads and writes to be done;
anything else is a missed barrier, whether or not the numbers happen to be right in this run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch

from autoattn.errors import SynchronizationError
from autoattn.kernels.gluon_interpreter.tensors import Product


@dataclass(slots=True, eq=False)
class Knowledge:
    """Sets of events, as bits: what has happened, and which writes of threads the async proxy sees as well."""

    seen: int = 0
    fenced: int = 0  # threads that wrote have fenced: the TMA unit may read
    settled: int = 0  # and all threads of their partition have met behind the fence: products may read

    def learn(self, other: Knowledge) -> None:
        """Adds what another knows."""
        self.seen |= other.seen
        self.fenced |= other.fenced
        self.settled |= other.settled

    def copy(self) -> Knowledge:
        """The same at this moment."""
        return Knowledge(self.seen, self.fenced, self.settled)

    def settle(self) -> None:
        """All threads of the partition have met."""
        self.settled |= self.fenced


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Access:
    """One read or write of a part of shared memory."""

    event: int
    words: str  # who does what, as `consume(0), which stores in line 120`
    place: Footprint
    by_threads: bool  # rather than by the TMA unit or tensor cores: the generic proxy
    product: Product | None = None  # that reads
    alike: list[int] = field(default_factory=lambda: [0])  # events of all writes that left the same bits here


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of an allocation: where they begin, and the (size, step) of their axes, largest step first."""

    begin: int
    axes: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """Behind the last byte."""
        return self.begin + sum((size - 1) * step for size, step in self.axes) + 1


@lru_cache(maxsize=65536)
def _footprint(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Footprint:
    axes = sorted([(stride * itemsize, size) for size, stride in zip(shape, strides, strict=True) if size > 1])
    merged = [(1, itemsize)]
    for step, size in axes:
        inner_step, inner_size = merged[-1]
        if step == inner_step * inner_size:
            merged[-1] = inner_step, inner_size * size
        else:
            merged.append((step, size))
    return Footprint(offset * itemsize, tuple((size, step) for step, size in reversed(merged)))


def footprint_of(data: torch.Tensor) -> Footprint:
    """The bytes of a view of an allocation."""
    return _footprint(data.storage_offset(), tuple(data.shape), data.stride(), data.itemsize)


def _bytes_of(place: Footprint) -> np.ndarray:
    offsets = np.array([place.begin])
    for size, step in place.axes:
        offsets = (offsets[:, None] + np.arange(size) * step).reshape(-1)
    return offsets


@lru_cache(maxsize=65536)
def overlap(left: Footprint, right: Footprint) -> bool:
    """Whether two places share a byte."""
    if left.end <= right.begin or right.end <= left.begin:
        return False
    if len(left.axes) == len(right.axes) == 1:
        return True
    return bool(np.isin(_bytes_of(left), _bytes_of(right)).any())


@lru_cache(maxsize=65536)
def covers(outer: Footprint, inner: Footprint) -> bool:
    """Whether all bytes of one place lie in another."""
    if outer == inner:
        return True
    if inner.begin < outer.begin or outer.end < inner.end:
        return False
    return len(outer.axes) == 1 or bool(np.isin(_bytes_of(inner), _bytes_of(outer)).all())


@dataclass(slots=True, eq=False, kw_only=True)
class History:
    """The accesses of one allocation that later ones must be ordered behind."""

    name: str  # the variable that the text gives the allocation to
    slot_bytes: int
    slots: int
    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)

    def read(self, access: Access, knows: Knowledge) -> str:
        """Notes a read; gives what is wrong with it, which counts where somebody uses what was read."""
        fault = self._why_unreadable(access, knows)
        self.reads = [
            read
            for read in self.reads
            if not (
                read.event & knows.seen and read.by_threads == access.by_threads and covers(access.place, read.place)
            )
        ]
        self.reads.append(access)
        return fault

    def repeat(self, access: Access) -> bool:
        """Notes that a partition writes the bits that another has written, neither of them waiting for the other.

        So all consumers clear the same rows of a block. Whoever reads them must know of one of these writes.
        """
        same = [write for write in self.writes if write.by_threads and overlap(write.place, access.place)]
        for write in same:
            write.alike[0] |= write.event | access.event
        if same:
            self.writes.append(replace(access, alike=same[0].alike))
        return bool(same)

    def _why_unreadable(self, access: Access, knows: Knowledge) -> str:
        place = self.named(access.place)
        sources = [write for write in self.writes if overlap(write.place, access.place)]
        if not sources:
            return f"{access.words}, reads {place}, which nobody has written"
        for write in sources:
            events = write.event | write.alike[0]
            if not events & knows.seen:
                return f"missed barrier at {place}: {access.words}, does not wait for {write.words}"
            if not write.by_threads or access.by_threads:
                continue
            if not events & knows.fenced:
                return f"missed fence at {place}: no fence_async_shared lies between {write.words}, and {access.words}"
            if access.product is not None and not events & knows.settled:
                return (
                    f"missed barrier at {place}: the threads of {write.words}, do not meet behind their fence before "
                    f"{access.words}"
                )
        return ""

    def write(self, access: Access, knows: Knowledge) -> None:
        """Notes a write.

        Raises:
            SynchronizationError: it overwrites what others may be reading or writing.
        """
        for earlier in (*self.reads, *self.writes):
            if not overlap(earlier.place, access.place):
                continue
            unknown = not earlier.event & knows.seen
            crosses = earlier in self.writes and earlier.by_threads and not access.by_threads
            if not unknown and (not crosses or earlier.event & knows.fenced):
                continue
            place = self.named(access.place)
            fault = f"missed fence at {place}: no fence_async_shared lies between {earlier.words}, and {access.words}"
            if unknown:
                fault = f"missed barrier at {place}: {access.words}, does not wait for {earlier.words}"
            product = earlier.product
            if product is None or product.used:
                raise SynchronizationError(fault)
            product.fault = product.fault or fault
        self.reads = [read for read in self.reads if not covers(access.place, read.place)]
        self.writes = [write for write in self.writes if not covers(access.place, write.place)]
        self.writes.append(access)

    def named(self, place: Footprint) -> str:
        """A place in words, as `keys[1]`."""
        return f"{self.name}[{place.begin // self.slot_bytes}]" if self.slots > 1 else self.name
