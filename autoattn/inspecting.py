"""What compilers do: compile and read the machine code. They load no torch, which takes as long as a small kernel."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from autoattn import compile
from autoattn.errors import CompileError
from autoattn.trial import Outcome, StaticReport
from autoattn.variant import Source
from autoattn.workers import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Compiles for an architecture and reads the machine code; needs no GPU."""

    source: Source
    arch: int

    def run(self, memory: dict[Hashable, Any]) -> StaticReport | Failure:
        """The report, or why the compiler refused; a compiler that was killed is given a second chance."""
        try:
            with _no_collection():
                try:
                    return compile.inspect(self.source, self.arch)
                except CompileError as error:
                    if not compile.was_killed(error):
                        raise
                return compile.inspect(self.source, self.arch)
        except CompileError as error:
            return Failure(outcome=Outcome.COMPILE_ERROR, detail=str(error))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps Python's garbage collector out of a compile, which makes so many objects that it would run all the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
