"""Ampere's kernels on a newer card: the driver makes its machine code of their PTX, and the gate judges the numbers."""

from __future__ import annotations

import kernels
import pytest
import torch

from autoattn.codegen import render, search_space
from autoattn.core import device_profiles
from autoattn.core.problem import DType, Precision, Problem
from autoattn.hardware import nvidia
from autoattn.kernels import compiler
from autoattn.validation.output_check import Gate

pytestmark = pytest.mark.gpu

AMPERE = device_profiles.named("a100")


@pytest.mark.parametrize(
    "problem",
    [
        kernels.problem(dtype=DType.BFLOAT16, seq_q=512, seq_kv=512, head_dim=64, mask="causal"),
        kernels.problem(dtype=DType.FLOAT16, seq_q=512, seq_kv=512, head_dim=80),
        kernels.problem(dtype=DType.BFLOAT16, seq_q=512, seq_kv=512, head_dim=128, mask="window:64,0"),
        kernels.problem(dtype=DType.FLOAT32, precision=Precision.TF32, seq_q=512, seq_kv=512, head_dim=64),
    ],
    ids=str,
)
def test_the_seeds_of_an_older_architecture_are_right_when_the_driver_translates_them(problem: Problem) -> None:
    card, device = torch.device("cuda"), nvidia.present()
    assert device is not None
    if device.arch <= AMPERE.arch:
        pytest.skip("needs a card newer than sm_80")
    gate = Gate(problem, card)
    for variant in search_space.load(kernels.TEMPLATE).seeds_for(problem, AMPERE):
        kernel = compiler.load(render.render(problem, variant), card, ptx_arch=AMPERE.arch)
        assert ".target sm_80" in kernel.compiled.asm["ptx"]
        verdict = gate.judge(kernel)
        assert verdict.ok, f"{variant}: {verdict.reason}"
