"""Counters that a launch finds at zero and leaves at zero, so that none pays for a memset."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

LEAST = 4096  # numbers of a stream's room
MOST = 256  # streams with a room
CAPTURED = 1 << 18  # numbers of a device for launches that graphs hold
STEP = 32  # numbers that lie in one line of the L2, which no two launches should share


def room(device: torch.device, size: int) -> Tensor:
    """At least `size` int32 zeros for one launch on the current stream of a device; it must leave them at zero.

    A stream runs one launch after the other, so that all of its launches share a room. A graph that is being captured
    may be replayed while other launches run: each of its launches gets zeros that nobody else is given in this process.
    Where none are left, the graph sets some to zero at each replay.
    """
    if device.type != "cuda":
        return torch.zeros(size, dtype=torch.int32, device=device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    if _capturing():
        return _of_graph(index, size)
    place = index, _stream(index)
    found = _rooms.get(place)
    if found is None or len(found) < size:
        found = _zeros(max(LEAST, 1 << (size - 1).bit_length()), index)
        with _writing:
            if index not in _slabs:
                _slabs[index] = _zeros(CAPTURED, index)
                _settle(index)
            while len(_rooms) >= MOST:
                del _rooms[next(iter(_rooms))]  # PyTorch's allocator hands it out again in the order of its stream
            _rooms[place] = found
    return found


def _of_graph(index: int, size: int) -> Tensor:
    with _writing:
        left = _slabs.get(index)
        if left is not None and len(left) >= size:
            _slabs[index] = left[-(-size // STEP) * STEP :]
            return left[:size]
    return _zeros(size, index)


def _capturing() -> bool:
    return bool(torch.cuda.is_current_stream_capturing())


def _stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


def _zeros(size: int, index: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=torch.device("cuda", index))


def _settle(index: int) -> None:
    """Waits for the zeros that graphs will be given, since those may be replayed on other streams."""
    torch.cuda.current_stream(index).synchronize()


_rooms: dict[tuple[int, int], Tensor] = {}  # (device, handle of the stream) -> zeros
_slabs: dict[int, Tensor] = {}  # device -> zeros that no graph was given yet
_writing = threading.Lock()
