"""What compilers do around a compile."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import kernels
import pytest
import samples

from autoattn.codegen import render
from autoattn.core.trial import Outcome
from autoattn.core.variant import Source
from autoattn.errors import CompileError
from autoattn.kernels import compiler
from autoattn.search.trial_pipeline import Workshop
from autoattn.workers.compile_job import ALLOCATOR, Inspect
from autoattn.workers.worker_pool import Failure


def test_the_garbage_collector_rests_while_a_kernel_is_compiled_and_works_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []

    def inspect(source: Source, arch: int) -> None:
        seen.append(gc.isenabled())
        raise CompileError("ptxas said no")

    monkeypatch.setattr(compiler, "inspect", inspect)
    failure = Inspect(source=render.render(kernels.problem(), kernels.variant()), arch=90).run({})
    assert failure == Failure(outcome=Outcome.COMPILE_ERROR, detail="ptxas said no")
    assert seen == [False]
    assert gc.isenabled()


def test_what_the_allocator_is_told_reaches_compilers_and_not_their_ptxas(monkeypatch: pytest.MonkeyPatch) -> None:
    with Workshop(samples.A30, measured=False, jobs=1) as shop:
        assert ALLOCATOR.items() <= shop.compilers.environment.items()
    seen: list[set[str]] = []
    for name, value in ALLOCATOR.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(compiler, "inspect", lambda *_: seen.append(set(os.environ)))
    Inspect(source=render.render(kernels.problem(), kernels.variant()), arch=90).run({})
    assert not seen[0] & ALLOCATOR.keys()


def test_a_compilers_heap_lies_in_huge_pages_where_the_system_gives_them() -> None:
    given = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    release = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    if not given.exists() or "[never]" in given.read_text():
        pytest.skip("this system gives no huge pages")
    if not release or tuple(map(int, release.split()[1].split(".")[:2])) < (2, 35):
        pytest.skip("only glibc from 2.35 on asks for huge pages")
    # Objects of 1 KB come from the C library, not from Python's own pools.
    script = "kept = [bytes(1024) for _ in range(2**16)]; print(open('/proc/self/smaps_rollup').read())"
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, env={**os.environ, **ALLOCATOR}, capture_output=True, text=True, check=True).stdout
    assert int(output.partition("AnonHugePages:")[2].split()[0]) >= 2**15  # KB: half of what was asked for at least
