"""Attention as a function and as a module, on the CPU: right numbers, gradients, and one sentence for each mistake."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import kernels
import pytest
import torch
from functional_calls import (
    CAUSAL,
    Inputs,
    close,
    expected,
    inputs,
    nothing_planned,  # noqa: F401 - a fixture
)
from torch import Tensor

import autoattn
from autoattn import functional
from autoattn.core.problem import Problem
from autoattn.errors import AutoattnError, ProblemError, TensorError
from autoattn.runtime.parse import arguments
from autoattn.runtime.plan import planner
from autoattn.runtime.plan.explanations import Level
from autoattn.tensors.operands import Operands

# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 7), (7, 5), (6, 6), (1, 9), (9, 1)])
def test_it_equals_the_formula(causal: bool | str, seq_q: int, seq_kv: int, layout: str) -> None:
    tensors = inputs(seq_q, seq_kv, layout=layout)
    output = autoattn.attention(*tensors, causal=causal, layout=layout)
    assert output.shape == tensors[0].shape
    close(output, expected(tensors, causal, layout))


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (3, 3), (4, 1), (6, 2), (8, 8)])
def test_key_heads_may_be_fewer_than_query_heads(heads_q: int, heads_kv: int) -> None:
    tensors = inputs(heads_q=heads_q, heads_kv=heads_kv)
    for causal in CAUSAL:
        close(autoattn.attention(*tensors, causal=causal), expected(tensors, causal))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_output_has_the_inputs_dtype(dtype: torch.dtype) -> None:
    tensors = inputs(dtype=dtype)
    output = autoattn.attention(*tensors, causal=True)
    assert output.dtype is dtype
    close(output, expected(tensors, True))


@pytest.mark.parametrize("scale", [0.01, 1.0, 3, -0.5, 0.0, 1e-50, -1e-50])
def test_the_scale_is_the_callers(scale: float) -> None:
    for seq_q in (5, 7, 9):
        tensors = inputs(seq_q=seq_q)
        for causal in CAUSAL:
            output = autoattn.attention(*tensors, causal=causal, scale=scale)
            close(output, expected(tensors, causal, scale=scale))


def test_the_default_scale_is_that_of_the_head_dim() -> None:
    tensors = inputs(head_dim=57)
    close(autoattn.attention(*tensors), autoattn.attention(*tensors, scale=1 / math.sqrt(57)))


def test_true_means_bottom_right_and_differs_from_top_left() -> None:
    tensors = inputs()
    right, true, left = (autoattn.attention(*tensors, causal=causal) for causal in ("bottom-right", True, "top-left"))
    assert torch.equal(right, true)
    assert not torch.allclose(right, left)


def test_a_query_that_sees_no_key_gives_zero() -> None:
    output = autoattn.attention(*inputs(seq_q=7, seq_kv=3), causal=True)
    assert (output[:, :, :4] == 0.0).all()
    assert (output[:, :, 4:] != 0.0).any(dim=-1).all()


def test_strided_inputs_are_taken_as_they_are() -> None:
    query, key, value = inputs()
    far = torch.full((2, 4, 10, 35), math.nan)[:, :, ::2, 3::2]
    far.copy_(query)
    wide = key.transpose(2, 3).contiguous().transpose(2, 3)
    expanded = value[:, :1].expand_as(value)
    close(autoattn.attention(far, wide, expanded), expected((query, key, expanded), False))


@pytest.mark.usefixtures("poisoned_memory")
def test_no_number_comes_from_memory_that_nobody_wrote() -> None:
    for seq_q, seq_kv in ((5, 7), (7, 5)):
        for causal in CAUSAL:
            assert autoattn.attention(*inputs(seq_q, seq_kv), causal=causal).isfinite().all()


def test_a_module_does_what_the_function_does() -> None:
    tensors = inputs(layout="bshd")
    given: dict[str, Any] = {"causal": True, "window": (3, 0), "softcap": 2.0, "scale": 0.2, "layout": "bshd"}
    module, extra = autoattn.Attention(**given), {"sinks": torch.ones(4), "bias": torch.zeros(5, 7)}
    assert torch.equal(module(*tensors, **extra), autoattn.attention(*tensors, **given, **extra))
    assert module.explain(*tensors, **extra) == autoattn.explain(*tensors, **given, **extra)
    assert list(module.parameters()) == []
    assert repr(module) == "Attention(causal=True, window=(3, 0), softcap=2.0, scale=0.2, layout='bshd')"


def test_numerics_of_a_module_are_those_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    numerics: list[str] = []

    def read(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> arguments.Call:
        call = whole(query, key, value, **given)
        numerics.append(call.problem.numerics.value)
        return call

    whole = arguments.read
    monkeypatch.setattr(arguments, "read", read)
    query, key, value = inputs()
    tokens = torch.zeros(1, 3, 8)
    module, multihead = autoattn.Attention(numerics="online"), autoattn.MultiheadAttention(8, 2, numerics="online")
    module(query, key, value)
    multihead(tokens, need_weights=False)
    assert numerics == ["online"] * 2
    assert repr(module) == "Attention(numerics='online')"
    assert "numerics='online'" in repr(multihead)
    monkeypatch.setenv("AUTOATTN_NUMERICS", "online")
    functional.scaled_dot_product_attention(query, query, query)
    functional.flash_attn_func(query, query, query)
    autoattn.Attention()(query, key, value)
    autoattn.MultiheadAttention(8, 2)(tokens, need_weights=False)
    autoattn.Attention(numerics="any")(query, key, value)
    assert numerics[2:] == ["online"] * 4 + ["any"]


def test_a_module_drops_only_while_it_trains() -> None:
    tensors = inputs()
    module = autoattn.Attention(dropout=0.5)
    assert module.explain(*tensors).problem.modifiers.dropout  # type: ignore[union-attr]
    assert not torch.equal(module(*tensors), module(*tensors))
    assert torch.equal(module.eval()(*tensors), autoattn.attention(*tensors))


def test_a_modules_mask_is_replaced_by_a_calls_and_a_tensor_moves_with_it() -> None:
    tensors = inputs()
    module = autoattn.Attention(mask="causal")
    assert torch.equal(module(*tensors, mask="full"), autoattn.attention(*tensors))
    module = autoattn.Attention(mask=torch.ones(5, 7, dtype=torch.bool).tril())
    assert module.to("meta").mask.device.type == "meta"
    assert module.state_dict() == {}
    assert repr(module) == "Attention(mask=Tensor)"


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(3, 5), (5, 3), (4, 4)])
def test_gradients_are_those_of_the_formula(causal: bool | str, seq_q: int, seq_kv: int, layout: str) -> None:
    tensors = inputs(seq_q, seq_kv, layout=layout)
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    theirs = [tensor.double().requires_grad_() for tensor in tensors]
    output = autoattn.attention(*ours, causal=causal, layout=layout)
    push = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(push)
    expected((theirs[0], theirs[1], theirs[2]), causal, layout).backward(push.double())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        close(mine.grad, other.grad)


def test_one_input_that_needs_a_gradient_is_enough() -> None:
    for place in range(3):
        tensors = list(inputs())
        tensors[place].requires_grad_()
        autoattn.attention(*tensors, causal=True).sum().backward()
        assert tensors[place].grad is not None
        assert tensors[place].grad.abs().max() > 0.0


# --- autocast, meta ---------------------------------------------------------------------------------------------------


def test_autocast_counts_in_the_low_precision_as_pytorch_does() -> None:
    tensors = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = autoattn.attention(*tensors)
        theirs = torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True)
    assert output.dtype is theirs.dtype is torch.bfloat16
    close(output, expected(tensors, False))


def test_autocast_turns_nothing_else_into_attention() -> None:
    query, key, value = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for wrong in (value.double(), value.int(), None):
            with pytest.raises(TensorError, match=r"value must (be|have)"):
                autoattn.attention(query, key, wrong)  # type: ignore[arg-type]


def test_meta_tensors_get_the_shape_of_the_answer() -> None:
    tensors = tuple(tensor.to("meta") for tensor in inputs(layout="bshd"))
    output = autoattn.attention(*tensors, causal=True, layout="bshd")
    assert (output.device.type, output.shape) == ("meta", (2, 5, 4, 16))
    assert autoattn.explain(*tensors, layout="bshd").reason.startswith("the tensors are on the meta")
    output, lse = autoattn.attention(*tensors, softcap=3.0, layout="bshd", return_lse=True)
    assert (lse.device.type, output.shape, lse.shape, lse.dtype) == ("meta", (2, 5, 4, 16), (2, 4, 5), torch.float32)


# --- mistakes ---------------------------------------------------------------------------------------------------------

Q, K, V = inputs()
MISTAKES: dict[str, tuple[Inputs, dict[str, Any], type[AutoattnError], str]] = {
    "integers": (
        (Q.int(), K.int(), V.int()),
        {},
        TensorError,
        "query must be float16, bfloat16, float32, float64 or float8_e4m3fn",
    ),
    "two dtypes": ((Q, K.half(), V), {}, TensorError, "key must have the query's dtype torch.float32"),
    "two devices": ((Q, K, V.to("meta")), {}, TensorError, "value must be on the query's device cpu, got meta"),
    "two shapes": ((Q, K, V[:, :, :3]), {}, TensorError, "with the key's batch, heads, seq, got shape (2, 2, 3, 16)"),
    "other layout": ((Q, K, V), {"layout": "bshd"}, TensorError, "check the layout"),
    "three axes": ((Q[0], K[0], V[0]), {}, TensorError, "query must be [batch, heads, seq, head_dim]"),
    "heads": ((Q[:, :3], K, V), {}, TensorError, "query heads must be a multiple of key heads, got 3 and 2"),
    "layout": ((Q, K, V), {"layout": "sbhd"}, TensorError, "layout must be bhsd or bshd, got 'sbhd'; correct it"),
    "mask": ((Q, K, V), {"causal": "left"}, TensorError, "top-left, got 'left'"),
    "mask kind": ((Q, K, V), {"causal": None}, TensorError, "causal must be True, False, bottom-right or"),
    "scale": ((Q, K, V), {"scale": "large"}, TensorError, "scale must be a number or None, got 'large'; correct it"),
    "window": ((Q, K, V), {"window": (1, 2, 3)}, TensorError, "window must be two whole numbers (left, right)"),
    "words": ((Q, K, V), {"mask": "diagonal"}, ProblemError, "diagonal"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_for_every_door(name: str) -> None:
    tensors, facts, kind, words = MISTAKES[name]
    for door in (autoattn.attention, autoattn.explain, autoattn.Attention(**facts)):
        with pytest.raises(kind) as caught:
            door(*tensors, **({} if isinstance(door, torch.nn.Module) else facts))
        sentence = str(caught.value)
        assert words in sentence
        assert "\n" not in sentence
        assert isinstance(caught.value, ValueError)


# --- explanations -----------------------------------------------------------------------------------------------------


def test_on_the_cpu_it_says_that_pytorch_answers() -> None:
    explanation = autoattn.explain(*inputs(), causal="top-left")
    assert (explanation.route, explanation.level) == ("sdpa", Level.SDPA)
    assert explanation.reason == "the tensors are on the cpu, and the kernels run on NVIDIA GPUs"
    assert explanation.problem is not None
    assert str(explanation.problem.mask) == "causal:top-left"


@pytest.mark.parametrize(
    ("words", "scale", "batch"),
    [
        ("the kernels need a positive scale that float32 can hold, got -1.0", -1.0, 2),
        ("the kernels need a positive scale that float32 can hold, got 0.0", 0.0, 2),
        ("the kernels need a positive scale that float32 can hold, got nan", math.nan, 2),
        ("the kernels need a positive scale that float32 can hold, got 1e-50", 1e-50, 2),
        ("the launch would need more than 2**31 - 1 programs", 1.0, 2**31 - 1),
        (None, 1.0, 2),
    ],
)
def test_on_a_card_it_says_why_no_kernel_may_run(
    words: str | None, scale: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnCard:
        """All that is asked of a tensor before anything is decided."""

        device = SimpleNamespace(type="cuda", index=0)

    def why(problem: Problem, scale: float) -> str | None:
        tensor: Any = OnCard()
        return planner.why_no_kernel(problem, Operands(query=tensor, key=tensor, value=tensor, scale=scale))

    assert why(kernels.problem(), 1.0) in ("a tensor subclass has rules of its own", words)
    monkeypatch.setattr(planner, "Tensor", OnCard)
    assert why(kernels.problem(batch=batch), scale) == words
    assert why(kernels.problem(), 1.0) is None
