"""The kernels that benchmarks/warpgroups.py times."""

from __future__ import annotations

import pytest
import samples
import warpgroups

from autoattn.codegen import portfolio
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Problem
from autoattn.hardware import nvidia


@pytest.mark.parametrize(("head_dim", "mask", "keys"), warpgroups.KINDS)
def test_all_contestants_can_run_and_one_keeps_its_warps_in_step(head_dim: int, mask: str, keys: int) -> None:
    problem = samples.problem(
        dtype=DType.BFLOAT16, batch=1, heads_q=8, heads_kv=2, seq_q=1500, seq_kv=1500, head_dim=head_dim,
        mask=Mask.parse(mask),
    )  # fmt: skip
    assert isinstance(problem, Problem)
    sources = warpgroups.sources(problem, keys)
    for source in sources.values():
        assert portfolio.is_feasible(source.variant, problem, samples.H200)
    called = {name for name, source in sources.items() if "noinline=True" in source.text}
    assert called == {"one of eight", "values early"}


def test_timing_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "present", lambda: None)
    with pytest.raises(SystemExit, match="on an NVIDIA GPU in this machine, and found none"):
        warpgroups.main()
