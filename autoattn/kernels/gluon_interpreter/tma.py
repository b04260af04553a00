"""The TMA unit: boxes of tensors that it copies between global and shared memory, later than it is asked to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from autoattn.errors import SynchronizationError
from autoattn.kernels.gluon_interpreter import mbarriers, scheduler
from autoattn.kernels.gluon_interpreter.global_memory import WrappingTensor
from autoattn.kernels.gluon_interpreter.scheduler import Copy
from autoattn.kernels.gluon_interpreter.shared_memory import POISON, SharedMemory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorDescriptor:
    """A tensor in global memory, and the box that one copy has of it."""

    name: str
    tensor: torch.Tensor | WrappingTensor  # a view of the memory
    block: tuple[int, ...]
    layout: object

    @property
    def block_type(self) -> Any:
        """What kernels ask for the bytes of a box."""
        return SimpleNamespace(nbytes=math.prod(self.block) * self.tensor.itemsize, shape=list(self.block))

    @property
    def handle(self) -> TensorDescriptor:
        """What Triton's builder takes."""
        return self

    def _inside(self, begin: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of a box that lies in the tensor: where it lies there, and in the box."""
        outer, inner = [], []
        for first, size, length in zip(begin, self.block, self.tensor.shape, strict=True):
            low, high = max(first, 0), min(first + size, length)
            high = max(low, high)
            outer.append(slice(low, high))
            inner.append(slice(low - first, high - first))
        return tuple(outer), tuple(inner)

    def read(self, begin: Sequence[int]) -> torch.Tensor:
        """A box; zeros beyond the tensor."""
        box = torch.zeros(self.block, dtype=self.tensor.dtype)
        outer, inner = self._inside(begin)
        box[inner] = self.tensor[outer]
        return box

    def write(self, begin: Sequence[int], box: torch.Tensor, *, adds: bool) -> None:
        """Writes, or adds, a box; nothing beyond the tensor."""
        outer, inner = self._inside(begin)
        if adds:
            self.tensor[outer] += box[inner]
        else:
            self.tensor[outer] = box[inner]


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a copy writes global memory."""

    box: TensorDescriptor
    begin: tuple[int, ...]
    adds: bool

    def meets(self, other: _Target) -> bool:
        """Whether the order of both matters: they share memory, and do not only add."""
        if self.box.tensor.data_ptr() != other.box.tensor.data_ptr() or (self.adds and other.adds):
            return False
        pairs = zip(self.begin, other.begin, self.box.block, strict=True)
        return all(abs(mine - theirs) < size for mine, theirs, size in pairs)


def load(box: TensorDescriptor, coord: Sequence[Any], barrier: mbarriers.Mbarriers, result: SharedMemory,
         pred: Any = True) -> None:  # fmt: skip
    """cp.async.bulk.tensor from global to shared memory; its bytes count at the barrier when they have arrived."""
    if not pred:
        return
    partition, mbarrier, begin = scheduler.current(), barrier.only, tuple(map(int, coord))
    mbarrier.check_made("has a copy arrive at")
    _check_size(box, result)
    event = result.writes("loads by TMA")
    result.data.view(torch.uint8).fill_(POISON)
    mbarrier.copies += 1

    def deliver() -> None:
        result.data.copy_(box.read(begin).view(result.data.shape))
        mbarrier.complete(result.nbytes, event)

    words = f"the copy of {box.name} that {scheduler.here()} asked for"
    partition.program.copies.append(Copy(words=words, deliver=deliver, owner=partition))


def store(box: TensorDescriptor, coord: Sequence[Any], source: SharedMemory, *, adds: bool = False) -> None:
    """cp.async.bulk.tensor, or cp.reduce, from shared to global memory, as a group of its own."""
    partition = scheduler.current()
    program, knows = partition.program, partition.knowledge
    _check_size(box, source)
    event = program.new_event()
    if fault := source.reads("stores by TMA", event=event):
        raise SynchronizationError(fault)
    knows.settle()  # Triton has all threads meet before one of them asks
    target = _Target(box, tuple(map(int, coord)), adds)
    words = f"the copy to {box.name} that {scheduler.here()} asked for"
    for earlier in program.copies:
        if isinstance(earlier.target, _Target) and target.meets(earlier.target) and earlier in partition.written:
            raise SynchronizationError(
                f"missed barrier: {scheduler.here()} has {box.name} written again, and nobody waited until "
                f"{earlier.words} lies in memory"
            )
    data = source.data.reshape(box.block).clone()

    def deliver() -> None:
        box.write(target.begin, data, adds=adds)
        program.memory.writes += 1

    copy = Copy(words=words, deliver=deliver, owner=partition, target=target, event=event)
    program.copies.append(copy)
    partition.stores.append(copy)
    partition.written.append(copy)


def store_wait(pendings: int) -> None:
    """cp.async.bulk.wait_group.read: until all but the last so many have read shared memory."""
    partition = scheduler.current()
    read = len(partition.stores) - int(pendings)
    for copy in partition.stores[: max(read, 0)]:
        partition.knowledge.seen |= copy.event
    partition.stores = partition.stores[max(read, 0) :]


def write_wait() -> None:
    """cp.async.bulk.wait_group 0: until all lie in global memory."""
    store_wait(0)
    partition = scheduler.current()
    for copy in partition.written:
        partition.program.deliver(copy)
    partition.written = []


def _check_size(box: TensorDescriptor, memory: SharedMemory) -> None:
    if math.prod(box.block) != memory.data.numel() or box.tensor.dtype is not memory.dtype:
        raise SynchronizationError(
            f"{scheduler.here()} copies boxes of {list(box.block)} {box.tensor.dtype} between {box.name} and "
            f"{memory.history.name}, whose slots are {memory.shape} {memory.dtype}"
        )
