"""Private names of PyTorch: each does what `torch_private` says with the installed release."""

from __future__ import annotations

import ast
import re
from contextlib import nullcontext

import pytest
import torch
from checkout_paths import CHECKOUT
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from autoattn import functional, torch_private
from autoattn.runtime import call_cache

QUERY = torch.randn(1, 2, 4, 8)


def private_names(source: str) -> set[str]:
    """Dotted names below torch with a part that begins with one underscore."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    below = {name for name in names if re.fullmatch(r"torch(\.\w+)+", name)}
    return {name for name in below if any(part[0] == "_" != part[1] for part in name.split(".") if len(part) > 1)}


def test_no_other_module_uses_a_private_name() -> None:
    paths = [path for path in (CHECKOUT / "autoattn").rglob("*.py") if path.stem != "torch_private"]
    used = {path.stem: names for path in paths if (names := private_names(path.read_text(encoding="utf-8")))}
    assert used == {}


@pytest.mark.parametrize("source", ["torch._C._x()", "from torch._dynamo import utils", "import torch._ops"])
def test_a_private_name_is_seen(source: str) -> None:
    assert private_names(source)


def test_dispatch_modes_are_counted_and_can_be_left() -> None:
    assert torch_private.count_dispatch_modes() == 0
    with FlopCounterMode(display=False):
        assert torch_private.count_dispatch_modes() == 1
        with torch_private.without_dispatch_modes():
            assert torch_private.count_dispatch_modes() == 0


def test_a_level_of_tangents_is_seen() -> None:
    assert not torch_private.has_dual_level()
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.has_dual_level()
    assert not torch_private.has_dual_level()


def test_transforms_are_named() -> None:
    seen = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.append((torch_private.transforms(), torch_private.are_transforms_active()))
        return tensor.sum()

    torch.vmap(note)(QUERY)
    torch.func.grad(note)(QUERY)
    assert seen == [(("Vmap",), True), (("Grad",), True)]
    assert (torch_private.transforms(), torch_private.are_transforms_active()) == ((), False)


def test_the_switch_for_deterministic_algorithms_is_read_and_set() -> None:
    torch_private.set_deterministic_algorithms(True, warn_only=False)
    try:
        assert torch.are_deterministic_algorithms_enabled()
        assert torch_private.are_gradients_deterministic()
    finally:
        torch_private.set_deterministic_algorithms(False, warn_only=False)
    assert not torch_private.are_gradients_deterministic()


def test_a_trace_is_seen_and_can_be_left() -> None:
    states = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        state = torch_private.get_jit_tracing_state()
        torch_private.set_jit_tracing_state(None)
        states.append((state is None, torch_private.get_jit_tracing_state() is None))
        torch_private.set_jit_tracing_state(state)
        return tensor + 1

    torch.jit.trace(note, (QUERY,), check_trace=False)
    assert states == [(False, True)]


@pytest.mark.parametrize("again", [False, True])
def test_a_backward_pass_says_whether_it_keeps_its_graph(again: bool) -> None:
    seen = []
    tensor = QUERY.clone().requires_grad_()
    tensor.register_hook(lambda grad: seen.append(torch_private.keeps_graph()))
    tensor.sum().backward(retain_graph=again)
    assert seen == [again]


def test_guards_tell_tensors_and_switches_apart() -> None:
    assert torch_private.TENSOR_GUARDS
    check, unchanged = torch_private.guard_tensors((QUERY, QUERY.clone())), torch_private.guard_global_state()
    assert check(QUERY.clone(), QUERY.clone())
    assert not check(QUERY.double(), QUERY)
    assert not check(QUERY[:, :1], QUERY)
    assert not check(QUERY.mT.contiguous().mT, QUERY)
    assert not check(QUERY.clone().requires_grad_(), QUERY)
    assert unchanged()
    with torch.no_grad():
        assert not unchanged()


def test_guards_know_an_object_that_stands_in_several_places() -> None:
    check = torch_private.guard_tensors((QUERY, QUERY, QUERY))
    other, another = QUERY.clone(), QUERY.clone()
    assert check(other, other, other)
    assert not check(other, other, another)
    assert not check(other.double(), other.double(), other.double())
    check = torch_private.guard_tensors((QUERY, other, other))
    assert check(other, another, another)
    assert not check(other, another, QUERY)
    assert not check(other, other, other)


def test_without_guards_calls_are_told_apart_by_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "TENSOR_GUARDS", False)
    functional.forget()
    outputs = [functional.attention(QUERY, QUERY, QUERY, causal=causal) for causal in (True, False, True, False)]
    assert call_cache.info().guarded == 0
    assert call_cache.info().calls == 2
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])
    functional.forget()


def test_operators_can_be_run_below_autocast_and_recorded_above_autograd() -> None:
    weight = torch.randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (QUERY @ weight).dtype is torch.bfloat16
        with torch_private.below_autocast():
            assert (QUERY @ weight).dtype is torch.float32
    with torch_private.above_autograd():
        assert (QUERY.clone().requires_grad_() * 2).requires_grad


def test_an_overload_of_an_operator_is_told_from_a_function() -> None:
    assert torch_private.is_operator(torch.ops.aten.add.Tensor)
    assert not torch_private.is_operator(torch.add)


def test_nobody_makes_a_graph_for_cuda_graphs_here() -> None:
    assert not torch_private.is_for_cuda_graphs()


def test_what_benchmarks_ask_of_torch_compile_is_there() -> None:
    with torch_private.without_donated_buffers(), torch_private.without_autograd_cache(), nullcontext():
        assert torch_private.count_fused_attention() >= 0
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch_private.compile_noting(lambda tensor: tensor.sin() + 1, graphs.append)
    torch.testing.assert_close(compiled(QUERY), QUERY.sin() + 1)
    assert any("sin" in str(node.target) for node in graphs[0].graph.nodes)


@pytest.mark.parametrize("name", ["flash_attention", "cudnn_attention", "efficient_attention"])
def test_the_operators_of_pytorchs_attention_give_the_output_first(name: str) -> None:
    learns = {} if name == "flash_attention" else {"learns": False}
    with FakeTensorMode():  # no card is needed to be told the shape
        query = torch.empty(2, 4, 32, 64, device="cuda", dtype=torch.bfloat16)
        output = getattr(torch_private, name)(query, query, query, causal=True, scale=0.125, **learns)
    assert (output.shape, output.dtype) == (query.shape, torch.bfloat16)
