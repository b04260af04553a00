"""Gradients that must repeat to the bit, on a card: PyTorch's, which do not by themselves, and our kernels'."""

from __future__ import annotations

from typing import Any

import gradient_kernels
import hopper_gradients
import pytest
import torch
from torch import Tensor
from tuned_gradients import tuned  # noqa: F401 - a fixture

import autoattn
from autoattn import functional

pytestmark = pytest.mark.gpu

RUNS = 8
NEGATIVE = -0.125  # a scale that no kernel of ours takes


def inputs(seq: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(2, 8, seq, 64, generator=generator, device="cuda", dtype=dtype) for _ in range(3)]


def gradients(tensors: list[Tensor], **given: Any) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = autoattn.attention(*leaves, causal=True, **given)
    assert isinstance(output, Tensor)
    return list(torch.autograd.grad(output.float().square().sum(), leaves))


@pytest.fixture
def untuned(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("AUTOATTN_CACHE", str(tmp_path))
    monkeypatch.setattr("autoattn.codegen.resources.shipped_cache", lambda: tmp_path / "shipped")
    functional.forget()
    yield
    functional.forget()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pytorch_s_gradients_repeat_where_that_is_asked(untuned: None, dtype: torch.dtype) -> None:
    tensors = inputs(4096, dtype)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    explanation = autoattn.explain(*leaves, causal=True, scale=NEGATIVE, deterministic=True)
    assert explanation.route == "sdpa"
    first = gradients(tensors, scale=NEGATIVE, deterministic=True)
    for _ in range(RUNS):
        again = gradients(tensors, scale=NEGATIVE, deterministic=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, again, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("template", [gradient_kernels.TEMPLATE, hopper_gradients.TEMPLATE])
def test_a_kernel_of_ours_serves_a_deterministic_call_and_those_after_it(
    tuned: Any,
    template: str,
) -> None:
    if template == hopper_gradients.TEMPLATE and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the template is for Hopper")
    tensors = [tensor.requires_grad_() for tensor in inputs(2048)]
    tuned(*tensors, causal=True, deterministic=True, template=template)
    explanation = autoattn.explain(*tensors, causal=True, deterministic=True)
    assert explanation.route == "kernel", explanation
    first = gradients(tensors, deterministic=True)
    for _ in range(RUNS):
        again = gradients(tensors, deterministic=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, again, strict=True))
