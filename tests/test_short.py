"""Training calls so short that a step waits for the CPU: PyTorch answers, or kernels while a CUDA graph is captured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gradient_kernels
import pytest
import samples
import torch
from computed_card import (
    attend,  # noqa: F401 - a fixture
    card,  # noqa: F401 - a fixture
)
from torch import Tensor

import autoattn
from autoattn import cache, dispatch, functional, learning, prepared, short, space, transformer
from autoattn.dispatch import Explanation
from autoattn.mask import Mask
from autoattn.problem import Modifiers, Problem
from autoattn.timetable import Mode, Whose

SHORT = {"heads_kv": 32, "seq_q": 64, "seq_kv": 64, "head_dim": 64}


def found(one: Problem, time_us: float, measured: Problem | None = None) -> Explanation:
    """A pass whose kernel took so long for a problem, SDPA's cuDNN 0.91 of it."""
    entry = samples.measured(measured or one, time_us=time_us)
    return replace(dispatch.sdpa("", one), entry=entry)


def passes(one: Problem, forward: float, backward: float) -> tuple[Explanation, Explanation]:
    return found(one, forward), found(learning.backward_of(one), backward)


def test_where_the_gpu_ends_before_the_cpu_pytorch_answers() -> None:
    one = samples.problem(**SHORT)
    assert short.why(*passes(one, 20.0, 40.0)) == (
        "both passes of kernels take the GPU about 60 us and the CPU 175, so that a step waits for the CPU, which "
        "PyTorch's attention needs for 147"
    )
    assert short.why(*passes(one, 80.0, 100.0)) is None  # then the CPU waits
    slow = [replace(each, entry=replace(each.entry, rivals=each.entry.rivals[:1])) for each in passes(one, 50.0, 80.0)]  # type: ignore[union-attr,type-var]
    assert short.why(*slow) is None  # FlashAttention-2 alone takes 185 us


def test_a_neighbours_times_count_as_its_pairs_do() -> None:
    one = samples.problem(**SHORT)
    far = samples.problem(**SHORT | {"seq_q": 640, "seq_kv": 640})
    several = found(one, 2000.0, far), found(learning.backward_of(one), 4000.0, learning.backward_of(far))
    assert "the GPU about 6" in (short.why(*several) or "")  # a hundredth of the pairs, and the diagonal's


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_kv": 128},
        {"modifiers": Modifiers(softcap=True)},
        {"mask": Mask.parse("window:8,0")},
        {"modifiers": Modifiers(sinks=True)},
    ],
)
def test_calls_that_pytorch_does_not_say_in_full_take_kernels(changes: dict[str, Any]) -> None:
    assert short.why(*passes(samples.problem(**SHORT | changes), 20.0, 40.0)) is None


def test_what_was_not_measured_beside_pytorch_takes_kernels() -> None:
    one = samples.problem(**SHORT)
    forward, backward = passes(one, 20.0, 40.0)
    alone = replace(backward, entry=replace(backward.entry, rivals=()))  # type: ignore[type-var]
    assert short.why(forward, alone) is None
    assert short.why(replace(forward, entry=None), backward) is None


def three(layout: str = "bhsd") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 33, 4, 16) if layout == "bshd" else (2, 4, 33, 16)
    return [torch.randn(shape, generator=generator).half().requires_grad_() for _ in range(3)]


def enter(card: dict[str, Any], tensors: list[Tensor], time_us: float = 20.0, **given: Any) -> None:
    """Entries for both passes of a causal call."""
    with torch.no_grad():
        one = autoattn.explain(*tensors, causal=True, **given).problem
    assert one is not None
    asked = learning.backward_of(one)
    for each, variant in (
        (one, space.load("triton/forward").default(one, samples.H200)),
        (asked, gradient_kernels.variant()),
    ):
        cache.merge(card["cache"], samples.H200, each.op, [samples.tuned(each, variant, time_us=time_us)])
    functional.forget()


def assert_right(found: tuple[Tensor, ...], tensors: list[Tensor], layout: str = "bhsd") -> None:
    leaves = [tensor.detach().float().requires_grad_() for tensor in tensors]
    swapped = [leaf.transpose(1, 2) if layout == "bshd" else leaf for leaf in leaves]
    output = torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=True)
    output = output.transpose(1, 2) if layout == "bshd" else output
    expected = output, *torch.autograd.grad(output.square().sum(), leaves)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs.detach(), rtol=2e-2, atol=2e-2)


def stepped(function: Callable[..., Any], tensors: list[Tensor], **given: Any) -> tuple[Tensor, ...]:
    output = function(*tensors, causal=True, **given)
    return output, *torch.autograd.grad(output.float().square().sum(), tensors)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_short_training_call_is_pytorchs(card: dict[str, Any], attend: Callable[..., Any], layout: str) -> None:
    tensors = three(layout)
    enter(card, tensors, layout=layout)
    for _ in range(3):
        assert_right(stepped(attend, tensors, layout=layout), tensors, layout)
    assert (card["forward"], card["backward"]) == (0, 0)
    told = autoattn.explain(*tensors, causal=True, layout=layout)
    assert told.route == "sdpa"
    assert told.reason.startswith("both passes of kernels take the GPU about 40 us")


def test_a_longer_training_call_is_the_kernels(card: dict[str, Any], attend: Callable[..., Any]) -> None:
    tensors = three()
    enter(card, tensors, 200.0)
    assert_right(stepped(attend, tensors), tensors)
    assert (card["forward"], card["backward"]) == (1, 1)


def test_a_short_call_that_wants_something_else_is_the_kernels(card: dict[str, Any]) -> None:
    tensors = three()
    enter(card, tensors)
    for _ in range(3):
        autoattn.attention(*tensors, causal=True)
    assert card["forward"] == 0
    with torch.no_grad():
        autoattn.attention(*tensors, causal=True)
    assert card["forward"] == 1
    torch.use_deterministic_algorithms(True)
    try:
        autoattn.attention(*tensors, causal=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert card["forward"] == 2
    autoattn.attention(*tensors, causal=True)
    assert card["forward"] == 2


@pytest.mark.parametrize("warm", [False, True])
def test_kernels_answer_while_a_cuda_graph_is_captured(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    tensors = three()
    enter(card, tensors)
    autoattn.attention(*tensors, causal=True)  # loads the kernels
    if not warm:
        prepared.forget()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for calls in (1, 2):
        assert_right(stepped(autoattn.attention, tensors), tensors)
        assert (card["forward"], card["backward"]) == (calls, calls)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert_right(stepped(autoattn.attention, tensors), tensors)
    assert card["forward"] == 2


def test_a_graph_for_cuda_graphs_keeps_the_kernels(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = three()
    enter(card, tensors)
    config = SimpleNamespace(triton=SimpleNamespace(cudagraphs=True))
    monkeypatch.setitem(sys.modules, "torch._inductor.config", config)
    torch._dynamo.reset()
    assert_right(stepped(torch.compile(autoattn.attention, backend="aot_eager", fullgraph=True), tensors), tensors)
    assert (card["forward"], card["backward"]) == (1, 1)


def test_a_graph_of_any_length_keeps_the_kernels(card: dict[str, Any]) -> None:
    tensors = three()
    enter(card, tensors)
    torch._dynamo.reset()
    compiled = torch.compile(autoattn.attention, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_right(stepped(compiled, tensors), tensors)
    assert (card["forward"], card["backward"]) == (1, 1)


@pytest.mark.parametrize("given", [{"deterministic": True}, {"return_lse": True}])
def test_what_pytorch_does_not_give_kernels_do(card: dict[str, Any], given: dict[str, Any]) -> None:
    tensors = three()
    enter(card, tensors)
    assert autoattn.explain(*tensors, causal=True, **given).route == "kernel"


def test_of_a_models_compiled_row_it_is_told_that_pytorch_was_traced(card: dict[str, Any]) -> None:
    tensors = three()
    enter(card, tensors)
    torch.compiler.reset()
    assert transformer.ran(Whose.OURS, Mode.COMPILED, *tensors).endswith("traced")
    enter(card, tensors, 200.0)
    torch.compiler.reset()
    assert transformer.ran(Whose.OURS, Mode.COMPILED, *tensors).startswith("triton/forward")
