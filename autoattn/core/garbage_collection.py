"""Pauses Python's garbage collector where many objects are made at once, none of which is garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collection runs in the block; a program that switched the collector off keeps it off.

    A full collection walks all objects of the process, PyTorch's million among them, which takes about 80 ms.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
