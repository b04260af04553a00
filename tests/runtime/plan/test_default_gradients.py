"""Training calls whose gradients nobody tuned: a template's default, or PyTorch where that is believed faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_device
import pytest
import samples
import torch
from computed_launches import (
    by_pytorch,
    card,  # noqa: F401 - a fixture
    inputs,
    tune,
)
from torch import Tensor

import autoattn
from autoattn.core import device_profiles, triton_release
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.problem import Op
from autoattn.core.variant import Source
from autoattn.errors import CompileError
from autoattn.runtime.plan import cache_lookup, decision, default_gradients, planner
from autoattn.runtime.plan.explanations import Level

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_gradients_that_nobody_tuned_are_a_defaults(card: dict[str, Any], dynamic: bool | None) -> None:
    """None: eager, else a graph with numbers or symbols for lengths."""
    torch._dynamo.reset()
    tensors = inputs()
    attend: Callable[..., Any] = autoattn.attention
    if dynamic is not None:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    output = attend(*tensors, causal=True)
    push = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).half()
    gradients = torch.autograd.grad(output, tensors, push)
    for ours, theirs in zip((output, *gradients), by_pytorch(tensors, push), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=2e-2, atol=2e-2)
    assert (card["forward"], card["backward"]) == (1, 1)
    assert autoattn.explain(*tensors, causal=True).levels == "forward: default, backward: default"


def square(**changes: Any) -> list[Tensor]:
    """What PyTorch's attention says in full."""
    generator = torch.Generator().manual_seed(0)
    facts = {"dtype": torch.float16, **changes}
    return [torch.randn(1, 2, 32, 16, generator=generator).to(**facts).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize("device", [samples.A30, samples.H200], ids=lambda device: device.name)
def test_plain_calls_that_nobody_tuned_are_pytorchs_where_its_gradients_are_believed_faster(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, device: Device, dynamic: bool | None
) -> None:
    fake_device.set_device(monkeypatch, device)
    torch._dynamo.reset()
    attend: Callable[..., Any] = autoattn.attention
    if dynamic is not None:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    tensors = square()
    attend(*tensors, causal=True).float().square().sum().backward()
    assert all(tensor.grad is not None for tensor in tensors)
    explanation = autoattn.explain(*tensors, causal=True)
    if device is samples.H200:
        assert (card["forward"], card["backward"]) == (1, 1)
        assert explanation.gradients is not None
        assert explanation.gradients.variant is not None
        assert explanation.gradients.variant.template == "gluon/backward"
        return
    assert (card["forward"], card["backward"], card["loaded"]) == (0, 0, []), "nothing is compiled in vain"
    assert explanation.level is Level.SDPA
    assert explanation.reason.startswith("an input needs a gradient, nobody tuned gradients near to these")
    assert explanation.steps[-1].startswith("pytorch_believed_faster: nobody measured triton/backward without")


def test_a_graph_on_a_card_with_other_tuned_gradients_has_pytorchs_attention_too(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator decides it when autograd comes to it; it would compute the call twice."""
    fake_device.set_device(monkeypatch, samples.A30)
    monkeypatch.setattr(cache_lookup, "differentiates", lambda device: True)
    torch._dynamo.reset()
    tensors = square()
    attend = torch.compile(autoattn.attention, backend="aot_eager", fullgraph=True)
    attend(*tensors, causal=True).float().square().sum().backward()
    assert (card["forward"], card["backward"]) == (0, 0)


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({"return_lse": True}, {}),
        ({"deterministic": True}, {}),
        ({"window": (3, 0)}, {}),
        ({"softcap": 2.0}, {}),
        ({"bias": torch.zeros(32, 32)}, {}),
        ({}, {"dtype": torch.float32}),
    ],
    ids=["lse", "deterministic", "window", "softcap", "bias", "float32"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_calls_that_pytorch_answers_by_more_than_a_fused_kernel_are_a_defaults(
    card: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    changes: dict[str, Any],
    compiled: bool,
) -> None:
    fake_device.set_device(monkeypatch, samples.A30)
    torch._dynamo.reset()
    attend: Callable[..., Any] = autoattn.attention
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    answer = attend(*square(**changes), **given)
    (answer[0] if isinstance(answer, tuple) else answer).float().square().sum().backward()
    assert (card["forward"], card["backward"]) == (1, 1)


def test_a_kernel_that_the_compiler_refuses_makes_way_for_the_next(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gradients as of outputs; the walk goes through all templates."""
    tensors, load, variants = square(), planner.load_once, []

    def refusing(source: Source, index: int) -> Any:
        if source.name == "backward":
            variants.append(source.variant)
            if source.variant.template == "gluon/backward":
                raise CompileError("too many registers")
        return load(source, index)

    refusing.cache_clear = load.cache_clear  # type: ignore[attr-defined]
    monkeypatch.setattr(planner, "load_once", refusing)
    autoattn.attention(*tensors, causal=True).float().sum().backward()
    assert (card["forward"], card["backward"]) == (1, 1)
    assert [variant.template for variant in variants[-2:]] == ["gluon/backward", "triton/backward"]
    explanation = autoattn.explain(*tensors, causal=True)
    assert explanation.gradients is not None
    assert explanation.gradients.variant == variants[-1]
    assert "gluon/backward: too many registers" in explanation.gradients.steps


def test_where_the_compiler_refuses_all_pytorch_differentiates_and_says_why(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = planner.load_once

    def refusing(source: Source, index: int) -> Any:
        if source.name == "backward":
            raise CompileError("too many registers")
        return load(source, index)

    refusing.cache_clear = load.cache_clear  # type: ignore[attr-defined]
    monkeypatch.setattr(planner, "load_once", refusing)
    explanation = autoattn.explain(*square(), causal=True)
    assert (explanation.route, explanation.reason) == ("sdpa", "an input needs a gradient, and too many registers")


def test_a_rival_that_cannot_say_the_call_makes_way_for_the_kernel(card: dict[str, Any]) -> None:
    tensors = inputs()
    tune(card, tensors, causal=True, choice="sdpa-cudnn")
    explanation = autoattn.explain(*tensors, causal=True, return_lse=True)
    assert explanation.levels == "forward: default, backward: exact"
    assert explanation.gradients is not None
    assert explanation.gradients.reason.endswith("faster than the kernel; but it gives no LSE, so the kernel runs")


def test_a_mask_of_all_pairs_is_written_out_only_where_that_was_measured(card: dict[str, Any]) -> None:
    tensors = square()
    tune(card, tensors, window=(3, 0), choice="sdpa-cudnn")
    assert autoattn.explain(*tensors, window=(3, 0)).reason.endswith("sdpa-cudnn was the fastest for the gradients")
    longer = [torch.cat([tensor.detach()] * 2, dim=2).requires_grad_() for tensor in tensors]
    explanation = autoattn.explain(*longer, window=(3, 0))
    assert explanation.route == "kernel"
    assert explanation.gradients is not None
    assert "but it takes a mask of all pairs, which was not measured at these sizes" in explanation.gradients.reason


def test_gradients_of_tf32x3_products_are_formed_of_exact_ones(card: dict[str, Any]) -> None:
    tensors = square(dtype=torch.float32)
    autoattn.attention(*tensors, causal=True, precision="tf32x3").square().sum().backward()
    assert (card["forward"], card["backward"]) == (1, 1)


@pytest.mark.parametrize(
    ("device", "gluon", "head_dim", "by_pytorch"),
    [
        ("h200", True, 128, False),
        ("h100", True, 64, False),
        ("h200", False, 128, True),  # by cuDNN
        ("h200", False, 60, False),  # FlashAttention-2 would be padded
        ("a100", True, 128, True),
        ("a30", True, 60, True),
        ("b200", True, 128, True),
    ],
)
def test_who_is_believed_faster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, gluon: bool, head_dim: int, by_pytorch: bool
) -> None:
    if not gluon:
        monkeypatch.setattr(triton_release, "installed_release", lambda: "9.9")
    named = device_profiles.named(device)
    problem = samples.problem(head_dim=head_dim, head_dim_v=head_dim, mask=Mask(), op=Op.BACKWARD)
    explanation = decision.explain(problem, named, tmp_path, training=True)
    assert (explanation.route == "sdpa") is by_pytorch, str(explanation)
    if by_pytorch:
        assert explanation.steps[-1].startswith("pytorch_believed_faster: ")
    if head_dim % 8 == 0:
        assert default_gradients.are_pytorchs(named) is by_pytorch


def test_without_a_card_that_runs_kernels_plain_calls_are_pytorchs() -> None:
    assert default_gradients.are_pytorchs(None)
    assert default_gradients.are_pytorchs(replace(samples.A30, arch=75))
