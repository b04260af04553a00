"""Zeroed scratch for each stream: kernels find it zero and leave it zero, so that no launch pays for a memset."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime import driver

LEAST = 4096  # numbers of a stream's room
MOST = 256  # streams with a room
CAPTURED = 1 << 18  # numbers of a device for launches that graphs hold
STEP = 32  # numbers that lie in one line of the L2, which no two launches should share
_DEFAULT = 0  # the stream that no graph can capture (cudaErrorStreamCaptureUnsupported)
_OF_EACH_THREAD = 2  # cudaStreamPerThread, one handle for the streams of all threads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Room:
    """int32 numbers, of which one launch at a time may have the use."""

    tensor: Tensor
    size: int  # numbers
    address: int  # in bytes

    @classmethod
    def of(cls, tensor: Tensor) -> Room:
        """A tensor's whole memory."""
        return cls(tensor=tensor, size=len(tensor), address=tensor.data_ptr())


class Rooms:
    """A room for each device and stream, for all launches that find the same of its numbers at zero, and leave them so.

    Launches that agree on other numbers must have other rooms: what one leaves behind is no zero to the other.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], Room] = {}  # (device, handle of the stream) -> room, the oldest first

    def here(self, device: torch.device, size: int) -> Tensor:
        """The numbers of at least `size` for one launch on the current stream of a CUDA device."""
        with torch.cuda.device(device):
            return self.room(device.index, driver.active.get_current_stream(device.index), size).tensor

    def room(self, index: int, stream: int, size: int) -> Room:
        """The room of a launch on this stream of the current device, of at least `size` numbers.

        A stream runs one launch after the other, so that all of its launches share a room, whichever threads they come
        from. One that is outgrown or dropped goes back to PyTorch's allocator, which hands it out again in the order of
        the stream, as it does with every tensor: what PyTorch takes for one stream because its handle is the same is
        one stream here too. A handle that stands for many streams has new zeros for each launch. A graph that is being
        captured may be replayed while other launches run: each of its launches gets zeros that nobody else is given in
        this process. Where none are left, the graph sets some to zero at each replay.
        """
        if stream != _DEFAULT:
            if torch.cuda.is_current_stream_capturing():
                return _of_graph(index, size)
            if stream == _OF_EACH_THREAD:
                return Room.of(_zeros(size, index))
        room = self._found.get((index, stream))
        if room is None or room.size < size:
            room = self._grown(index, stream, size)
        return room

    def _grown(self, index: int, stream: int, size: int) -> Room:
        room = Room.of(_zeros_to_keep(max(LEAST, 1 << (size - 1).bit_length()), index, stream))
        with _writing:
            if index not in _slabs:
                _slabs[index] = _zeros_to_keep(CAPTURED, index, stream)
                _settle(index)
            while len(self._found) >= MOST:
                del self._found[next(iter(self._found))]
            self._found[index, stream] = room
        return room


def _of_graph(index: int, size: int) -> Room:
    with _writing:
        left = _slabs.get(index)
        if left is not None and len(left) >= size:
            _slabs[index] = left[-(-size // STEP) * STEP :]
            return Room.of(left[:size])
    return Room.of(_zeros(size, index))


def _zeros_to_keep(size: int, index: int, stream: int) -> Tensor:
    """Zeros that outlive the call, in PyTorch's ordinary memory.

    A thread may be allocating from a pool (`torch.cuda.use_mem_pool`; torch.compile's CUDA graphs while they warm up)
    whose owner counts on getting everything back. Pools are a thread's own, so another one asks.
    """
    with ThreadPoolExecutor(1) as other:
        return other.submit(_zeros_on, size, index, stream).result()


def _zeros_on(size: int, index: int, stream: int) -> Tensor:
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=index)):
        return _zeros(size, index)


def _zeros(size: int, index: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=torch.device("cuda", index))


def _settle(index: int) -> None:
    """Waits for the zeros that graphs will be given, since those may be replayed on other streams."""
    torch.cuda.current_stream(index).synchronize()


# What a kernel calls the numbers -> the rooms that they are taken from. Of a scratch, only what counts is left at zero.
ROOMS = {"scratch_ptr": Rooms(), "arrivals_ptr": Rooms()}
_slabs: dict[int, Tensor] = {}  # device -> zeros that no graph was given yet
_writing = threading.Lock()
