"""The kernels that benchmarks/shared_lines.py profiles."""

from __future__ import annotations

import pytest
import samples
import shared_lines

from autoattn.codegen import portfolio
from autoattn.hardware import nvidia


@pytest.mark.parametrize("programs", shared_lines.PROGRAMS)
def test_all_calls_can_run_by_one_and_by_two_programs_an_sm(programs: int) -> None:
    for problem in shared_lines.problems():
        variant = shared_lines.source(problem, programs).variant
        assert portfolio.is_feasible(variant, problem, samples.H200), problem


def test_profiling_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "present", lambda: None)
    with pytest.raises(SystemExit, match="on an NVIDIA GPU in this machine, and found none"):
        shared_lines.main()
