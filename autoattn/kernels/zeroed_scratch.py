"""Zeroed scratch for each stream: kernels find it zero and leave it zero, so that no launch pays for a memset."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from autoattn import torch_private

LEAST = 4096  # numbers of a stream's buffer
MOST = 256  # streams with a buffer
CAPTURED = 1 << 18  # numbers of a slab, from which launches that graphs hold are given theirs
MOST_SLABS = 64  # of a device: 64 MiB
STEP = 32  # numbers that lie in one line of the L2, which no two launches should share
_DEFAULT = 0  # the stream that no graph can capture (cudaErrorStreamCaptureUnsupported)
_OF_EACH_THREAD = 2  # cudaStreamPerThread, one handle for the streams of all threads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Buffer:
    """int32 numbers, of which one launch at a time may have the use."""

    tensor: Tensor
    size: int  # numbers
    address: int  # in bytes

    @classmethod
    def of(cls, tensor: Tensor) -> Buffer:
        """A tensor's whole memory."""
        return cls(tensor=tensor, size=len(tensor), address=tensor.data_ptr())


class ScratchPool:
    """A buffer for each device and stream, shared by the launches that leave the same of its numbers at zero.

    Launches that leave other numbers at zero must have another pool.
    """

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, int], Buffer] = {}  # (device, handle of the stream) -> buffer, the oldest first
        self.short: set[tuple[int, int]] = set()  # (thread, device): captured launches left few zeros for others

    def here(self, device: torch.device, size: int) -> Tensor:
        """The numbers of at least `size` for one launch on the current stream of a CUDA device."""
        with torch.cuda.device(device):
            return self.buffer(device.index, torch_private.current_stream(device.index), size).tensor

    def buffer(self, index: int, stream: int, size: int) -> Buffer:
        """The buffer of a launch on this stream of the current device, of at least `size` numbers.

        A stream runs one launch after the other, so that all of its launches share a buffer, from whichever threads
        they come. One that is outgrown or dropped goes back to PyTorch's allocator, which hands it out again in the
        order of the stream, as it does with every tensor: what PyTorch takes for one stream because its handle is
        the same is one stream here too. A handle that stands for many streams has new zeros for each launch. A
        graph that is being captured may be replayed while other launches run: each of its launches gets zeros that
        nobody else is given in this process. Launches outside of graphs make these zeros: a device's first one, and
        that after a capture which left less than half of them, in the same thread, since a capture may forbid the
        others to ask for memory. Where none are left, the graph sets some to zero at each replay, which takes 1.2 us.
        """
        if stream != _DEFAULT:
            if torch.cuda.is_current_stream_capturing():
                return self._of_graph(index, size)
            if stream == _OF_EACH_THREAD:
                return Buffer.of(new_zeros(size, index))
        buffer = self.buffers.get((index, stream))
        if buffer is None or buffer.size < size:
            buffer = self._grown(index, stream, size)
        if self.short:
            self._replenish(index, stream)
        return buffer

    def _grown(self, index: int, stream: int, size: int) -> Buffer:
        buffer = Buffer.of(_zeros_to_keep(max(LEAST, 1 << (size - 1).bit_length()), index, stream))
        with _writing:
            if index not in slabs:
                slabs[index] = [_slab(index, stream)]
            while len(self.buffers) >= MOST:
                del self.buffers[next(iter(self.buffers))]
            self.buffers[index, stream] = buffer
        return buffer

    def _replenish(self, index: int, stream: int) -> None:
        captured = threading.get_ident(), index
        if captured not in self.short:
            return
        self.short.discard(captured)
        with _writing:
            if _is_low(slabs[index]):
                slabs[index].append(_slab(index, stream))

    def _of_graph(self, index: int, size: int) -> Buffer:
        numbers = None
        with _writing:
            if of_device := slabs.get(index):
                left = of_device[-1]
                if len(left) >= size:
                    numbers, of_device[-1] = left[:size], left[-(-size // STEP) * STEP :]
                if _is_low(of_device):
                    self.short.add((threading.get_ident(), index))
        return Buffer.of(new_zeros(size, index) if numbers is None else numbers)


def _is_low(of_device: list[Tensor]) -> bool:
    """Whether a device should have another slab."""
    return len(of_device[-1]) < CAPTURED // 2 and len(of_device) < MOST_SLABS


def _slab(index: int, stream: int) -> Tensor:
    zeros = _zeros_to_keep(CAPTURED, index, stream)
    settle(index)
    return zeros


def _zeros_to_keep(size: int, index: int, stream: int) -> Tensor:
    """Zeros that outlive the call, in PyTorch's ordinary memory.

    A thread may be allocating from a pool (`torch.cuda.use_mem_pool`; torch.compile's CUDA graphs while they warm up)
    whose owner counts on getting everything back. Pools are a thread's own, so another one asks.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(new_zeros_on, size, index, stream).result()


def new_zeros_on(size: int, index: int, stream: int) -> Tensor:
    """Zeros that PyTorch's allocator counts as of a stream."""
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=index)):
        return new_zeros(size, index)


def new_zeros(size: int, index: int) -> Tensor:
    """[size] int32 zeros on a device, set on its current stream."""
    return torch.zeros(size, dtype=torch.int32, device=torch.device("cuda", index))


def settle(index: int) -> None:
    """Waits for the zeros that graphs will be given, since those may be replayed on other streams."""
    torch.cuda.current_stream(index).synchronize()


# What a kernel calls the numbers -> the pool that they are taken from. Of a scratch, only what counts is left at zero.
POOLS = {"scratch_ptr": ScratchPool(), "arrivals_ptr": ScratchPool()}
# Device -> what no graph was given yet of each slab. Graphs take from the last; the others keep what graphs have there.
slabs: dict[int, list[Tensor]] = {}
_writing = threading.Lock()
