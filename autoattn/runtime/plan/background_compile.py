"""Compiles kernels in other processes while calls go on, where AUTOATTN_COLD=background asks for it.

The default is to wait, because an answer's last bits should not change in the middle of a run. A process of its own
compiles, not a thread of the caller's: Triton's compiler holds Python's lock for long, and what it prints is swallowed.
The kernel is then loaded from Triton's cache.
"""

from __future__ import annotations

import os
import threading

from autoattn.core.variant import Source
from autoattn.errors import UsageError
from autoattn.workers.compile_job import Inspect
from autoattn.workers.worker_pool import Pool, cores

COLD = "AUTOATTN_COLD"  # the environment's variable
WAIT, BACKGROUND = "wait", "background"
COMPILE_SECONDS = 600.0  # nobody waits for it
REASON = f"its kernel is compiled in the background, as {COLD}={BACKGROUND} asks; calls take it once it is there"


def is_asked() -> bool:
    """Whether calls go on while their kernels are compiled.

    Raises:
        UsageError: the variable asks for something else.
    """
    choice = os.environ.get(COLD) or WAIT
    if choice not in (WAIT, BACKGROUND):
        raise UsageError(f"{COLD} must be {WAIT} or {BACKGROUND}, got {choice!r:.60}; correct or unset it")
    return choice == BACKGROUND


def is_done(source: Source, arch: int) -> bool:
    """Whether a kernel was compiled, or refused, as loading it will tell; begins with it at the first question."""
    key = source, arch
    with _asking:
        thread = _threads.get(key)
        if thread is None:
            # A daemon, so that a program need not wait for it at its end; the compiler ends with its parent.
            thread = _threads[key] = threading.Thread(target=_compile, args=key, daemon=True)
            thread.start()
    return not thread.is_alive()


def wait() -> None:
    """Waits until all that was begun is done."""
    for thread in list(_threads.values()):
        thread.join()


def _compile(source: Source, arch: int) -> None:
    with _free, Pool(size=1) as pool:
        pool.result(Inspect(source=source, arch=arch), COMPILE_SECONDS)


_threads: dict[tuple[Source, int], threading.Thread] = {}
_asking = threading.Lock()
_free = threading.BoundedSemaphore(cores())  # compilers at once
