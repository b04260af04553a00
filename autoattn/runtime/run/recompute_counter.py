"""Counts tiles that were computed again: launches are kept while somebody counts, and read on request."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Redone:
    """What the launches of a `counting_redone` block say of their tiles: BLOCK_M query rows of a head and sequence."""

    def __init__(self) -> None:
        self._flags: list[Tensor] = []  # of each launch: [tiles] int32, 1 where a tile was computed again

    @property
    def tiles(self) -> int:
        """Tiles of the launches that can say it; 0 where no such kernel ran."""
        return sum(map(len, self._flags))

    @property
    def redone(self) -> int:
        """Those that were computed again. Waits for the GPU."""
        devices = {flags.device for flags in self._flags}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the launches may have been on any stream
        return sum(
            int(torch.cat([flags for flags in self._flags if flags.device == device]).sum()) for device in devices
        )

    @property
    def rate(self) -> float:
        """The share of the tiles that was computed again, from 0 to 1; NaN without tiles. Waits for the GPU."""
        return self.redone / self.tiles if self.tiles else math.nan

    def __repr__(self) -> str:
        return f"Redone({self.redone} of {self.tiles} tiles)"


@contextmanager
def counting_redone() -> Iterator[Redone]:
    """Counts, for the calls that this thread makes inside, the tiles that kernels computed twice.

    A tile is computed again where a kept maximum (`softmax: first_max`) was outgrown, or where a NaN or infinity may
    have reached rows that do not see it. Kernels of the Gluon template for Hopper say so; those of the plain Triton
    template do it inside the tile's own program and cannot be counted, nor is PyTorch's attention: they add no tiles.
    What a CUDA graph captures is not counted. Each launch keeps up to 12 bytes a tile until the count is dropped.
    """
    count, thread = Redone(), threading.get_ident()
    counting[thread] = (*counting.get(thread, ()), count)
    try:
        yield count
    finally:
        left = tuple(redone for redone in counting[thread] if redone is not count)
        if left:
            counting[thread] = left
        else:
            del counting[thread]


def note(flags: Tensor) -> None:
    """Remembers a launch of this thread; to be called only while `counting` holds something.

    Args:
        flags: [tiles] int32 that belong to this launch alone, which writes 1 where it computes a tile again, and else 0
    """
    if torch.cuda.is_current_stream_capturing():
        return
    for count in counting.get(threading.get_ident(), ()):
        count._flags.append(flags)


counting: dict[int, tuple[Redone, ...]] = {}  # thread -> who counts there; empty most of the time, so asking is free
