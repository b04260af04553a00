"""What compilers do around a compile."""

from __future__ import annotations

import gc

import kernels
import pytest

from autoattn import compile, render
from autoattn.errors import CompileError
from autoattn.inspecting import Inspect
from autoattn.trial import Outcome
from autoattn.variant import Source
from autoattn.workers import Failure


def test_the_garbage_collector_rests_while_a_kernel_is_compiled_and_works_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []

    def inspect(source: Source, arch: int) -> None:
        seen.append(gc.isenabled())
        raise CompileError("ptxas said no")

    monkeypatch.setattr(compile, "inspect", inspect)
    found = Inspect(source=render.render(kernels.problem(), kernels.variant()), arch=90).run({})
    assert found == Failure(outcome=Outcome.COMPILE_ERROR, detail="ptxas said no")
    assert seen == [False]
    assert gc.isenabled()
