"""Jobs that compile a kernel and read its machine code. They load no torch, which takes as long as a small kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

from autoattn.codegen import precompiled
from autoattn.core import garbage_collection
from autoattn.core.kernel_kind import KernelKind
from autoattn.core.trial import Outcome, StaticReport
from autoattn.core.variant import Source
from autoattn.errors import CompileError
from autoattn.hardware import host_faults
from autoattn.kernels import compiler
from autoattn.workers.worker_pool import Failure

# What the C library is told where a compiler's process starts, the only time that it asks.
ALLOCATOR = {
    # Triton and LLVM give back what a kernel took, and take it again for the next: the C library keeps it in between.
    "MALLOC_TOP_PAD_": str(2**26),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    # In huge pages, where the system gives them to who asks: fewer addresses to look up.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Compiles for an architecture and reads the machine code; needs no GPU."""

    source: Source
    arch: int

    def run(self, memory: dict[Hashable, Any]) -> StaticReport | Failure:
        """The report, or why the compiler refused; a compiler that was killed is given a second chance."""
        return _compiled(lambda: compiler.inspect(self.source, self.arch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Precompile:
    """Compiles for an architecture and packs the machine code; needs no GPU."""

    source: Source
    kind: KernelKind  # of the problem that the source was rendered for
    arch: int

    def run(self, memory: dict[Hashable, Any]) -> bytes | Failure:
        """The file of the precompiled kernel, or why there is none."""
        from autoattn.kernels import precompiler  # which imports torch

        return _compiled(lambda: precompiled.encode(precompiler.precompile(self.source, self.kind, self.arch)))


Result = TypeVar("Result")


def _compiled(compile_kernel: Callable[[], Result]) -> Result | Failure:
    """What a compiler gives, or why it refused; one that was killed is given a second chance."""
    for name in ALLOCATOR:  # ptxas would clear huge pages that it never fills: it ends with its kernel
        os.environ.pop(name, None)
    try:
        with garbage_collection.paused():  # a compile makes so many objects that it would run all the time
            try:
                return compile_kernel()
            except CompileError as error:
                if not compiler.was_killed(error):
                    raise
            return compile_kernel()
    except CompileError as error:
        if compiler.was_killed(error):
            fault = host_faults.killed("the compiler")
            return Failure(outcome=fault.outcome, detail=fault.sentence)
        return Failure.of(error, Outcome.COMPILE_ERROR, str(error))
