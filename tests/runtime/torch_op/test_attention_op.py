"""torch.ops.autoattn.attention on the CPU: PyTorch's own checks, the function's numbers, and its derivatives."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from checkout_paths import CHECKOUT
from functional_calls import (
    ADDED,
    PAIRS,
    SINKS,
    SLOPES,
    inputs,
    noise,
    nothing_planned,  # noqa: F401 - a fixture
    packed,
)
from torch import Tensor
from torch.library import opcheck

import autoattn
from autoattn import masks
from autoattn.errors import TensorError
from autoattn.runtime.torch_op import attention_op_backward, attention_schema, compile_frontend

pytestmark = pytest.mark.sampled

ATTENTION, BACKWARD = torch.ops.autoattn.attention, torch.ops.autoattn.attention_backward
STRENGTH = noise(4, seed=11)
LOCAL = masks.from_mod(lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < 3, seq_q=5, seq_kv=7)
TOKENS = packed()
PACKED = {
    "cu_seqlens_q": TOKENS[3], "cu_seqlens_kv": TOKENS[4], "max_seqlen_q": TOKENS[5], "max_seqlen_kv": TOKENS[6],
    "layout": "packed",
}  # fmt: skip
Given = dict[str, Any]
# Arguments of the operator beside query, key and value, and the same of the function.
SAID: dict[str, tuple[Given, Given]] = {
    "plain": ({}, {}),
    "causal": ({"mask": "causal:bottom-right"}, {"causal": True}),
    "top-left, lse": ({"mask": "causal:top-left", "return_lse": True}, {"causal": "top-left", "return_lse": True}),
    "window": ({"mask": "window:2,1", "scale": 0.3}, {"window": (2, 1), "scale": 0.3}),
    "pairs": ({"bias": PAIRS}, {"mask": PAIRS}),
    "all": (
        {"bias": ADDED, "alibi_slopes": SLOPES, "sinks": SINKS, "softcap": 2.0, "return_lse": True},
        {"bias": ADDED, "alibi_slopes": SLOPES, "sinks": SINKS, "softcap": 2.0, "return_lse": True},
    ),
    "score_mod": ({"score_mod": "score + h"}, {"score_mod": "score + h"}),
    "score_mod of tensors": (
        {"score_mod": "captured0: float32[1]\nscore * captured0[h]", "score_captures": [STRENGTH]},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score * STRENGTH[h]},
    ),
    "blocks": (compile_frontend.table_arguments(LOCAL), {"mask": LOCAL}),
    "dropout": ({"dropout": 0.5, "seed": 3}, {"dropout": 0.5, "seed": 3}),
    "drawn": ({"dropout": 0.5, "drawn_seed": torch.tensor([3])}, {"dropout": 0.5, "seed": 3}),
    "numbers": (
        {"precision": "tf32", "numerics": "online", "deterministic": True},
        {"precision": "tf32", "numerics": "online", "deterministic": True},
    ),
}


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def answers(answer: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return (answer,) if isinstance(answer, Tensor) else answer


# --- what it answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAID)
def test_it_answers_what_the_function_answers(name: str) -> None:
    said, given = SAID[name]
    output, lse = ATTENTION(*inputs(), **said)
    expected = answers(autoattn.attention(*inputs(), **given))
    assert torch.equal(output, expected[0])
    assert torch.equal(lse, expected[1]) if len(expected) == 2 else lse.shape == (0,)


def test_it_takes_the_other_layouts() -> None:
    swapped = inputs(layout="bshd")
    output, lse = ATTENTION(*swapped, layout="bshd", return_lse=True)
    for mine, other in zip((output, lse), autoattn.attention(*swapped, layout="bshd", return_lse=True), strict=True):
        assert torch.equal(mine, other)
    for mask, arguments in (("full", {}), ("causal", {"causal": True}), ("window:2,-1", {"window": (2, -1)})):
        output, lse = ATTENTION(*TOKENS[:3], mask=mask, return_lse=True, **PACKED)
        for mine, other in zip(
            (output, lse), autoattn.packed_attention(*TOKENS, **arguments, return_lse=True), strict=True
        ):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("name", ["causal", "top-left, lse", "all", "score_mod of tensors", "blocks", "drawn"])
@pytest.mark.parametrize("learns", [False, True])
def test_pytorchs_own_checks_pass(name: str, learns: bool) -> None:
    """Schema, autograd, fake tensors with the strides of real ones, and AOTAutograd with lengths that change."""
    tensors = leaves(*inputs()) if learns else inputs()
    opcheck(ATTENTION.default, tuple(tensors), SAID[name][0])


def test_pytorchs_own_checks_pass_in_other_layouts_and_for_learned_biases() -> None:
    opcheck(ATTENTION.default, tuple(leaves(*inputs(layout="bshd"))), {"layout": "bshd", "return_lse": True})
    opcheck(ATTENTION.default, tuple(leaves(*TOKENS[:3])), {**PACKED, "return_lse": True})
    query, key, value = leaves(*inputs())
    opcheck(ATTENTION.default, (query, key, value, *leaves(noise(5, 7), SLOPES, SINKS)), {"mask": "causal"})


def test_pytorchs_own_checks_pass_for_the_backward_pass() -> None:
    output, lse = ATTENTION(*inputs(), return_lse=True)
    learns = [True, False, True] + [False] * 6
    opcheck(BACKWARD.default, (output, None, output, lse, *inputs()), {"learns": learns})


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("turned", [False, True])
def test_outputs_and_gradients_lie_as_their_tensors_do_whoever_answers(layout: str, turned: bool) -> None:
    given = [tensor.transpose(1, 2).contiguous() if layout == "bshd" else tensor for tensor in inputs()]
    given = [tensor.transpose(1, 2).contiguous().transpose(1, 2) if turned else tensor for tensor in given]
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    output, _ = ATTENTION(*leaves, mask="causal:top-left", layout=layout)
    assert output.stride() == given[0].stride()
    for push in (torch.ones_like(output), torch.ones(()).expand_as(output)):
        grads = torch.autograd.grad(output, leaves, push, retain_graph=True)
        assert [grad.stride() for grad in grads] == [tensor.stride() for tensor in given]


# --- autocast ---------------------------------------------------------------------------------------------------------


def test_autocast_casts_query_key_and_value_alone() -> None:
    seen: dict[str, torch.dtype] = {}

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is ATTENTION.default:
                seen.update(
                    zip(attention_schema.TENSORS, (tensor.dtype for tensor in args if tensor is not None), strict=False)
                )
            return func(*args, **(kwargs or {}))

    given = (*inputs(), noise(5, 7), SLOPES, SINKS)
    with torch.autocast("cpu", dtype=torch.bfloat16), Watching():
        output, _ = ATTENTION(*given, precision="ieee", softcap=1.5)
    assert output.dtype is torch.bfloat16
    assert list(seen.values()) == [torch.bfloat16] * 3 + [torch.float32] * 3
    low = [tensor.bfloat16() for tensor in given[:3]]
    assert torch.equal(output, ATTENTION(*low, *given[3:], softcap=1.5)[0])


def test_gradients_come_through_autocast_in_the_inputs_dtype() -> None:
    tensors = leaves(*inputs())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ATTENTION(*tensors)[0].sum().backward()
    assert [tensor.grad.dtype for tensor in tensors if tensor.grad is not None] == [torch.float32] * 3


# --- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "window", "pairs", "score_mod", "blocks", "dropout"])
def test_gradients_are_those_of_the_function(name: str) -> None:
    said, given = SAID[name]
    ours, theirs = leaves(*inputs()), leaves(*inputs())
    push = noise(2, 4, 5, 16, seed=12)
    ATTENTION(*ours, **said)[0].backward(push)
    answers(autoattn.attention(*theirs, **given))[0].backward(push)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_biases_slopes_sinks_and_the_lse_have_gradients_too() -> None:
    ours, theirs = (leaves(*inputs(), noise(5, 7), SLOPES, SINKS) for _ in range(2))
    pushes = noise(2, 4, 5, 16, seed=12), noise(2, 4, 5, seed=13)
    torch.autograd.backward(ATTENTION(*ours, softcap=2.0, return_lse=True), pushes)
    bias, slopes, sinks = theirs[3:]
    arguments = {"bias": bias, "alibi_slopes": slopes, "sinks": sinks, "softcap": 2.0, "return_lse": True}
    torch.autograd.backward(autoattn.attention(*theirs[:3], **arguments), pushes)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("learner", [0, 1, 2, 5])
def test_only_who_needs_a_gradient_is_differentiated(learner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    learned_names: list[list[str]] = []
    attention = attention_op_backward.attention

    def watched(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        if torch.is_grad_enabled():
            named = {"query": query, "key": key, "value": value, **given}
            learned_names.append(
                [name for name, tensor in named.items() if isinstance(tensor, Tensor) and tensor.requires_grad]
            )
        return attention(query, key, value, **given)

    monkeypatch.setattr(attention_op_backward, "attention", watched)
    tensors = [*inputs(), None, None, SINKS.clone()]
    tensors[learner].requires_grad_()  # type: ignore[union-attr]
    ATTENTION(*tensors, mask="causal")[0].sum().backward()
    assert learned_names == [[attention_schema.LEARNING[learner]]]
    assert tensors[learner].grad.abs().max() > 0.0  # type: ignore[union-attr]


@pytest.fixture
def asked_again(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each backward pass asked for the LSE when it computed the call once more."""
    lse_requests: list[bool] = []
    attention = attention_op_backward.attention

    def watched(query: Tensor, *tensors: Tensor, **given: Any) -> Any:
        if torch.is_grad_enabled() and query.requires_grad:
            lse_requests.append(given["return_lse"])
        return attention(query, *tensors, **given)

    monkeypatch.setattr(attention_op_backward, "attention", watched)
    return lse_requests


def test_an_lse_that_nobody_differentiates_keeps_pytorchs_attention(asked_again: list[bool]) -> None:
    """With an LSE only the formula answers, so it is asked for no more often than needed."""
    output, _ = ATTENTION(*leaves(*inputs()), return_lse=True)
    output.sum().backward()
    assert asked_again == [False]
    ATTENTION(*leaves(*inputs()), return_lse=True)[1].sum().backward()
    assert asked_again == [False, True]


def test_nothing_is_saved_that_grows_with_queries_times_keys() -> None:
    sizes: list[int] = []
    tensors = leaves(*inputs(seq_q=200, seq_kv=300))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        ATTENTION(*tensors, mask="causal", softcap=2.0, return_lse=True)
    assert len(sizes) == 5
    assert max(sizes) == max(tensor.numel() for tensor in tensors)


def test_a_second_derivative_is_refused_in_one_sentence() -> None:
    query, key, value = leaves(*inputs())
    (first,) = torch.autograd.grad(ATTENTION(query, key, value)[0].sum(), query, create_graph=True)
    with pytest.raises(TensorError, match="must be differentiated once, got a second derivative") as caught:
        first.sum().backward()
    assert "\n" not in str(caught.value)


def test_who_imports_the_functions_has_the_operator_and_its_backward_pass() -> None:
    """As who loads an exported program must."""
    script = (
        "import torch; from autoattn import functional; query = torch.randn(1, 2, 3, 16, requires_grad=True); "
        "print(torch.ops.autoattn.attention(query, query, query)[0].grad_fn)"
    )
    root = CHECKOUT
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root)
    assert "autoattn_attention" in run.stdout, run.stderr


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_what_pytorch_answers_lies_as_the_query_does_when_it_comes_again(layout: str) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return autoattn.attention(query, key, value, bias=bias, layout=layout)

    def flat(*tensors: Tensor) -> Tensor:
        return attend(*tensors).view(2, -1)  # of a tensor without gaps

    compiled = torch.compile(flat, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        tensors = [*(torch.randn(2, 8, 8, 16) for _ in range(3)), torch.randn(8, 8)]
        torch.testing.assert_close(compiled(*tensors), attend(*tensors).flatten(1))
