"""Shared memory: allocations, views of them, and what threads load and store there."""

from __future__ import annotations

import linecache
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch

from autoattn.errors import SynchronizationError
from autoattn.kernels.gluon_interpreter import scheduler
from autoattn.kernels.gluon_interpreter.access_order import Access, History, Knowledge, footprint_of
from autoattn.kernels.gluon_interpreter.tensors import Product, Tensor, converted

POISON = 0xFF  # of what was not written: NaN in all floating-point types


class SharedMemory:
    """A view of an allocation."""

    def __init__(self, data: torch.Tensor, history: History) -> None:
        self.data = data
        self.history = history

    @property
    def shape(self) -> list[int]:
        """Sizes of the axes."""
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type of an element."""
        return self.data.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        count: int = self.data.numel() * self.data.itemsize
        return count

    @property
    def handle(self) -> SharedMemory:
        """What Triton's builder takes."""
        return self

    def index(self, place: Any) -> SharedMemory:
        """One slot of the first axis."""
        slot = int(place)
        if not 0 <= slot < self.data.shape[0]:
            raise SynchronizationError(
                f"{scheduler.here()} takes slot {slot} of {self.history.name}, which has {self.data.shape[0]}"
            )
        return SharedMemory(self.data[slot], self.history)

    def reshape(self, shape: Sequence[int]) -> SharedMemory:
        """The same elements in other axes."""
        return SharedMemory(self.data.view([int(size) for size in shape]), self.history)

    def permute(self, axes: Sequence[int]) -> SharedMemory:
        """The axes in another order."""
        return SharedMemory(self.data.permute(*axes), self.history)

    def slice(self, start: Any, length: Any, dim: int = 0) -> SharedMemory:
        """A part of one axis."""
        return SharedMemory(self.data.narrow(dim, int(start), int(length)), self.history)

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> SharedMemory:
        """The same bytes as another type and shape."""
        return SharedMemory(self.data.reshape(-1).view(dtype).view([int(size) for size in shape]), self.history)

    _reinterpret = reinterpret  # until Triton 3.8

    def load(self, layout: object = None) -> Tensor:
        """All elements, into registers."""
        partition = scheduler.current()
        fault = self.reads("loads", by_threads=True)
        partition.doubt = fault, footprint_of(self.data)
        return Tensor(self.data.clone())

    def store(self, value: Tensor) -> None:
        """All elements, from registers."""
        numbers = converted(value.data, self.dtype).expand(self.data.shape).contiguous()
        partition = scheduler.current()
        (fault, place), partition.doubt = partition.doubt, scheduler.NO_DOUBT
        if fault:  # what was read while others wrote it does no harm if it is left as they leave it
            access = self._access("stores", by_threads=True)
            same = torch.equal(numbers.view(torch.uint8), self.data.contiguous().view(torch.uint8))
            if place != access.place or not same or not self.history.repeat(access):
                raise SynchronizationError(fault)
            partition.knowledge.seen |= access.event
            return
        self.writes("stores", by_threads=True)
        self.data.copy_(numbers)

    def reads(self, verb: str, *, by_threads: bool = False, product: Product | None = None, event: int = 0) -> str:
        """Notes that the current partition reads this, or has it read; gives what is wrong with that.

        What threads do themselves has happened; of other things the partition must wait for the end.
        """
        access = self._access(verb, by_threads=by_threads, product=product, event=event)
        return self.history.read(access, self._knowing(access))

    def writes(self, verb: str, *, by_threads: bool = False) -> int:
        """The same of a write; gives its event."""
        access = self._access(verb, by_threads=by_threads)
        self.history.write(access, self._knowing(access))
        return access.event

    def _knowing(self, access: Access) -> Knowledge:
        knows = scheduler.current().knowledge
        if access.by_threads:
            knows.seen |= access.event
        return knows

    def _access(self, verb: str, *, by_threads: bool, product: Product | None = None, event: int = 0) -> Access:
        partition = scheduler.current()
        partition.check_doubt()
        return Access(
            event=event or partition.program.new_event(),
            words=f"{partition.name}, which {verb} in line {scheduler.line()}",
            place=footprint_of(self.data),
            by_threads=by_threads,
            product=product,
        )


def allocate(dtype: torch.dtype, shape: Sequence[int], layout: object = None) -> SharedMemory:
    """New shared memory, full of NaN."""
    sizes = [int(size) for size in shape]
    data = torch.full((math.prod(sizes) * dtype.itemsize,), POISON, dtype=torch.uint8).view(dtype).view(sizes)
    slots = sizes[0] if len(sizes) > 1 else 1
    name = name_of_assigned(sys._getframe(1))
    return SharedMemory(data, History(name=name, slots=slots, slot_bytes=data.numel() * data.itemsize // slots))


def name_of_assigned(frame: Any) -> str:
    """The variable that the rendered text assigns in the line that runs, or in those of a tuple above it."""
    while not frame.f_code.co_filename.startswith(scheduler.RENDERED) and frame.f_back is not None:
        frame = frame.f_back
    for number in range(frame.f_lineno, max(frame.f_lineno - 8, 0), -1):
        if match := re.match(r"\s*(\w+) = ", linecache.getline(frame.f_code.co_filename, number)):
            return match[1]
    return "shared memory"
