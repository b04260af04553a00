"""Attention as a function and as a module, on the CPU: right numbers, gradients, and one sentence for each mistake."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import formula
import kernels
import pytest
import samples
import torch
from torch import Tensor

import autoattn
from autoattn import answer, dispatch, functional, gpu, rivals, space
from autoattn.compile import Kernel
from autoattn.dispatch import Level
from autoattn.errors import AutoattnError, CompileError, ProblemError, TensorError
from autoattn.operands import Operands
from autoattn.ops import forward
from autoattn.problem import DType, Layout, Problem
from autoattn.variant import Source, Traits

CAUSAL = (False, True, "bottom-right", "top-left")
Inputs = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def nothing_planned() -> None:
    functional.forget()


def inputs(
    seq_q: int = 5, seq_kv: int = 7, heads_q: int = 4, heads_kv: int = 2, head_dim: int = 16,
    dtype: torch.dtype = torch.float32, layout: str = "bhsd",
) -> Inputs:  # fmt: skip
    rng = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, seq, head_dim, generator=rng).to(dtype)
        for heads, seq in ((heads_q, seq_q), (heads_kv, seq_kv), (heads_kv, seq_kv))
    )
    if layout == "bshd":
        query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in (query, key, value))
    return query, key, value


def seen(causal: bool | str, seq_q: int, seq_kv: int) -> Tensor:
    return formula.band(seq_q, seq_kv, right=0 if causal else -1, top_left=causal == "top-left")


def expected(tensors: Inputs, causal: bool | str, layout: str = "bhsd", scale: float | None = None) -> Tensor:
    query, key, value = (tensor if layout == "bhsd" else tensor.transpose(1, 2) for tensor in tensors)
    keep = seen(causal, query.shape[2], key.shape[2])
    output, _ = formula.attention(query, key, value, keep=keep, scale=scale)
    return output if layout == "bhsd" else output.transpose(1, 2)


def close(actual: Tensor, wanted: Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[actual.dtype]
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=tolerance)


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
    one = value[:, :1].expand_as(value)
    close(autoattn.attention(far, wide, one), expected((query, key, one), False))


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


# --- autocast, meta, torch.compile ------------------------------------------------------------------------------------


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
            with pytest.raises(TensorError, match="value must be"):
                autoattn.attention(query, key, wrong)  # type: ignore[arg-type]


def test_meta_tensors_get_the_shape_of_the_answer() -> None:
    tensors = tuple(tensor.to("meta") for tensor in inputs(layout="bshd"))
    output = autoattn.attention(*tensors, causal=True, layout="bshd")
    assert (output.device.type, output.shape) == ("meta", (2, 5, 4, 16))
    assert autoattn.explain(*tensors, layout="bshd").reason.startswith("the tensors are on the meta")
    output, lse = autoattn.attention(*tensors, softcap=3.0, layout="bshd", return_lse=True)
    assert (lse.device.type, output.shape, lse.shape, lse.dtype) == ("meta", (2, 5, 4, 16), (2, 4, 5), torch.float32)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("causal", [False, True, "top-left"])
def test_torch_compile_traces_it_whole(causal: bool | str, dynamic: bool) -> None:
    torch._dynamo.reset()

    def twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return 2.0 * autoattn.attention(query, key, value, causal=causal)

    traced = torch.compile(twice, backend="eager", fullgraph=True, dynamic=dynamic)
    for sizes in ((5, 7, 4, 2), (7, 5, 4, 2), (6, 6, 4, 4)):
        tensors = inputs(*sizes)
        close(traced(*tensors), 2.0 * expected(tensors, causal))


@pytest.mark.parametrize("name", ["window", "padding, causal", "bias", "softcap", "all"])
def test_torch_compile_gives_the_same_for_what_else_is_asked(name: str) -> None:
    """What PyTorch's own attention can say is traced whole; the plain formula breaks the graph."""
    torch._dynamo.reset()
    given, meant = ASKED[name]
    whole = "softcap" not in given
    traced = torch.compile(lambda *tensors: autoattn.attention(*tensors, **given), backend="eager", fullgraph=whole)
    close(traced(*inputs()), formula.attention(*inputs(), **meant)[0])


# --- mistakes ---------------------------------------------------------------------------------------------------------

Q, K, V = inputs()
MISTAKES: dict[str, tuple[Inputs, dict[str, Any], type[AutoattnError], str]] = {
    "float64": (
        (Q.double(), K.double(), V.double()),
        {},
        TensorError,
        "query must be float16, bfloat16, float32 or float8_e4m3fn",
    ),
    "integers": (
        (Q.int(), K.int(), V.int()),
        {},
        TensorError,
        "query must be float16, bfloat16, float32 or float8_e4m3fn",
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
    "head dim": (inputs(head_dim=257), {}, ProblemError, "head_dim must be at most 256, got 257"),
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
    found = autoattn.explain(*inputs(), causal="top-left")
    assert (found.route, found.level) == ("sdpa", Level.SDPA)
    assert found.reason == "the tensors are on the cpu, and the kernels run on NVIDIA GPUs"
    assert found.problem is not None
    assert str(found.problem.mask) == "causal:top-left"


@pytest.mark.parametrize(
    ("words", "needs", "scale", "batch"),
    [
        ("an input needs a gradient, and there is no backward kernel yet", True, 1.0, 2),
        ("the kernels need a positive scale that float32 can hold, got -1.0", False, -1.0, 2),
        ("the kernels need a positive scale that float32 can hold, got 0.0", False, 0.0, 2),
        ("the kernels need a positive scale that float32 can hold, got nan", False, math.nan, 2),
        ("the kernels need a positive scale that float32 can hold, got 1e-50", False, 1e-50, 2),
        ("the launch would need more than 2**31 - 1 programs", False, 1.0, 2**31 - 1),
        (None, False, 1.0, 2),
    ],
)
def test_on_a_card_it_says_why_no_kernel_may_run(
    words: str | None, needs: bool, scale: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnCard:
        """All that is asked of a tensor before anything is decided."""

        device = SimpleNamespace(type="cuda", index=0)
        requires_grad = needs

    def why(one: Problem, scale: float) -> str | None:
        tensor: Any = OnCard()
        return answer._why_no_kernel(one, Operands(query=tensor, key=tensor, value=tensor, scale=scale))

    assert why(kernels.problem(), 1.0) in ("a tensor subclass has rules of its own", words)
    monkeypatch.setattr(answer, "Tensor", OnCard)
    assert why(kernels.problem(batch=batch), scale) == words
    with torch.no_grad():
        assert why(kernels.problem(), 1.0) is None


# --- what else a call may ask for -------------------------------------------------------------------------------------


def noise(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SINKS, SLOPES = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([0.5, 0.25, 0.125, 0.0625])
PADDING = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])[:, None, None, :]
PAIRS = noise(1, 4, 5, 7) > -0.5
ADDED = torch.where(noise(2, 1, 5, 7, seed=8) > -1.0, noise(5, 7, seed=9), -math.inf)
FAR = formula.distance(5, 7)
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # arguments of the call, and the same of the formula
    "window": ({"window": (2, 1)}, {"keep": formula.band(5, 7, 2, 1)}),
    "window, no left bound": ({"window": (-1, 1)}, {"keep": formula.band(5, 7, -1, 1)}),
    "window, no right bound": ({"window": (2, -1)}, {"keep": formula.band(5, 7, 2, -1)}),
    "causal window": ({"window": (2, 3), "causal": True}, {"keep": formula.band(5, 7, 2, 0)}),
    "words": ({"mask": "window:2,1"}, {"keep": formula.band(5, 7, 2, 1)}),
    "Mask": ({"mask": autoattn.Mask.parse("causal:top-left")}, {"keep": formula.band(5, 7, -1, 0, top_left=True)}),
    "padding": ({"mask": PADDING}, {"keep": PADDING}),
    "padding, causal": ({"mask": PADDING, "causal": True}, {"keep": PADDING & formula.band(5, 7, -1, 0)}),
    "pairs": ({"mask": PAIRS}, {"keep": PAIRS}),
    "pairs, window": ({"bias": PAIRS, "window": (3, 1)}, {"keep": PAIRS & formula.band(5, 7, 3, 1)}),
    "bias": ({"bias": ADDED}, {"add": ADDED}),
    "bias, causal": ({"mask": ADDED, "causal": True}, {"add": ADDED, "keep": formula.band(5, 7, -1, 0)}),
    "softcap": ({"softcap": 1.5}, {"change": lambda scores: 1.5 * torch.tanh(scores / 1.5)}),
    "alibi": ({"alibi_slopes": SLOPES}, {"add": -SLOPES[:, None, None] * FAR}),
    "alibi, each sequence": (
        {"alibi_slopes": torch.stack((SLOPES, 2 * SLOPES)), "causal": True},
        {"add": -torch.stack((SLOPES, 2 * SLOPES))[..., None, None] * FAR, "keep": formula.band(5, 7, -1, 0)},
    ),
    "alibi, top-left": (
        {"alibi_slopes": SLOPES, "causal": "top-left"},
        {
            "add": -SLOPES[:, None, None] * formula.distance(5, 7, top_left=True),
            "keep": formula.band(5, 7, -1, 0, top_left=True),
        },
    ),
    "sinks": ({"sinks": SINKS.half(), "causal": True}, {"sinks": SINKS, "keep": formula.band(5, 7, -1, 0)}),
    "score_mod": ({"score_mod": "score + 0.1 * (q_idx - kv_idx)"}, {"add": 0.1 * (
        torch.arange(5.0)[:, None] - torch.arange(7.0))}),
    "all": (
        {"window": (3, 1), "softcap": 2.0, "bias": ADDED, "sinks": SINKS, "alibi_slopes": SLOPES, "scale": 0.5},
        {
            "keep": formula.band(5, 7, 3, 1),
            "change": lambda scores: 2.0 * torch.tanh(scores / 2.0) - SLOPES[:, None, None] * FAR,
            "add": ADDED,
            "sinks": SINKS,
            "scale": 0.5,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_what_a_call_asks_for_is_what_the_formula_gives(name: str, layout: str) -> None:
    given, meant = ASKED[name]
    tensors = inputs()
    placed = tensors if layout == "bhsd" else tuple(tensor.transpose(1, 2) for tensor in tensors)
    wanted, sums = formula.attention(*tensors, **meant)
    output = autoattn.attention(*placed, layout=layout, **given)
    both, lse = autoattn.attention(*placed, layout=layout, return_lse=True, **given)
    for found in (output, both):
        close(found if layout == "bhsd" else found.transpose(1, 2), wanted)
    assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)
    close(lse, sums)


@pytest.mark.parametrize("name", ASKED)
def test_gradients_follow_what_a_call_asks_for(name: str) -> None:
    given, meant = ASKED[name]
    ours = [tensor.requires_grad_() for tensor in inputs()]
    theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    push = noise(2, 4, 5, 16)
    autoattn.attention(*ours, **given).backward(push)
    formula.attention(*theirs, **meant)[0].backward(push.double())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        close(mine.grad, other.grad)


def test_a_learned_bias_and_learned_sinks_get_their_gradients() -> None:
    learned = [noise(4, 5, 7).requires_grad_(), SINKS.clone().requires_grad_()]
    exact = [tensor.detach().double().requires_grad_() for tensor in learned]
    tensors, push = inputs(), noise(2, 4, 5, 16)
    autoattn.attention(*tensors, bias=learned[0], sinks=learned[1]).backward(push)
    formula.attention(*tensors, add=exact[0], sinks=exact[1])[0].backward(push.double())
    for mine, other in zip(learned, exact, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        close(mine.grad, other.grad)


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_row_that_a_tensor_hides_whole_gives_zero_and_gradients_of_zero(return_lse: bool) -> None:
    for hidden in (torch.tensor(False), torch.tensor(-math.inf)):
        tensors = [tensor.requires_grad_() for tensor in inputs()]
        mask = torch.ones(5, 7, dtype=torch.bool) if hidden.dtype is torch.bool else torch.zeros(5, 7)
        mask[2] = hidden
        found = autoattn.attention(*tensors, mask=mask, return_lse=return_lse)
        output = found[0] if return_lse else found
        assert (output[:, :, 2] == 0.0).all()
        if return_lse:
            assert (found[1][:, :, 2] == -math.inf).all()
        output.sum().backward()
        for tensor in tensors:
            assert tensor.grad is not None
            assert tensor.grad.isfinite().all()
        assert (tensors[0].grad[:, :, 2] == 0.0).all()  # type: ignore[index]


def test_values_may_have_a_head_dim_of_their_own() -> None:
    query, key, _ = inputs()
    for head_dim_v in (8, 40):
        value = noise(2, 2, 7, head_dim_v)
        output = autoattn.attention(query, key, value, window=(2, 1))
        close(output, formula.attention(query, key, value, keep=formula.band(5, 7, 2, 1))[0])


def test_float8_numbers_are_multiplied_by_their_scales() -> None:
    tensors = tuple(tensor.to(torch.float8_e4m3fn) for tensor in inputs())
    scales = [noise(2, 2, seed=place).abs() + 0.5 for place in range(3)]
    names = ("query_scale", "key_scale", "value_scale")
    output, _ = autoattn.attention(*tensors, causal=True, return_lse=True, **dict(zip(names, scales, strict=True)))
    query, key, value = (tensor.double() * scale.repeat_interleave(tensor.shape[1] // 2, 1)[..., None, None]
                         for tensor, scale in zip(tensors, scales, strict=True))  # fmt: skip
    assert output.dtype is torch.bfloat16
    close(output, formula.attention(query, key, value, keep=formula.band(5, 7, -1, 0))[0])
    plain = autoattn.attention(*tensors)
    close(plain, formula.attention(*(tensor.double() for tensor in tensors))[0])


def test_windows_that_bind_nobody_are_the_plain_problem() -> None:
    tensors = inputs()
    for window, mask in (((6, 4), "full"), ((-1, 0), "causal:bottom-right"), ((5, 4), "window:5,-1")):
        found = autoattn.explain(*tensors, window=window)
        assert found.problem is not None
        assert str(found.problem.mask) == mask


def test_the_route_without_a_kernel_is_pytorchs_attention_or_the_plain_formula() -> None:
    tensors = inputs()
    assert autoattn.explain(*tensors, window=(2, 1)).route == "sdpa"
    assert autoattn.explain(*tensors, mask=PAIRS, causal=True).route == "sdpa"
    for given in ({"softcap": 2.0}, {"return_lse": True}, {"sinks": SINKS}, {"precision": "tf32x3"}):
        found = autoattn.explain(*tensors, **given)
        assert (found.route, found.level) == ("eager", Level.SDPA)
        assert found.steps[-1].startswith("sdpa: it ")


def test_the_plain_formula_counts_in_float32_under_autocast() -> None:
    tensors = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, lse = autoattn.attention(*tensors, softcap=2.0, return_lse=True)
    low = tuple(tensor.bfloat16() for tensor in tensors)
    wanted, sums = formula.attention(*low, change=lambda scores: 2.0 * torch.tanh(scores / 2.0))
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(output.double(), wanted, rtol=8e-3, atol=8e-3)
    close(lse, sums)


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_drops_weights_and_the_others_grow() -> None:
    query, key, value = noise(1, 2, 64, 16), noise(1, 2, 64, 16), torch.eye(64).expand(1, 2, 64, 64)
    whole = autoattn.attention(query, key, value)
    output = autoattn.attention(query, key, value, dropout=0.25, seed=3)
    kept = output != 0.0
    assert abs(float(kept.double().mean()) - 0.75) < 0.02
    close(output[kept], whole[kept] / 0.75)
    assert not torch.equal(kept[0, 0], kept[0, 1])


def test_a_seed_decides_what_is_dropped() -> None:
    tensors = inputs()
    first, again, other = (autoattn.attention(*tensors, dropout=0.5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_without_a_seed_pytorchs_generator_decides_and_explaining_does_not_draw() -> None:
    tensors = inputs()
    torch.manual_seed(5)
    first, second = (autoattn.attention(*tensors, dropout=0.5) for _ in range(2))
    torch.manual_seed(5)
    autoattn.explain(*tensors, dropout=0.5)
    assert torch.equal(autoattn.attention(*tensors, dropout=0.5), first)
    assert not torch.equal(first, second)


# --- nothing to compute -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_call_without_queries_or_keys_gives_zeros_and_an_lse_of_minus_infinity(
    sizes: tuple[int, int, int], layout: str
) -> None:
    batch, seq_q, seq_kv = sizes
    shapes = ((batch, 4, seq_q, 16), (batch, 2, seq_kv, 16), (batch, 2, seq_kv, 24))
    tensors = [torch.full(shape, math.nan) for shape in shapes]
    if layout == "bshd":
        tensors = [tensor.transpose(1, 2) for tensor in tensors]
    for given in ({}, {"causal": True}, {"window": (2, 1), "softcap": 2.0}, {"mask": torch.ones(seq_q, seq_kv) > 0}):
        output, lse = autoattn.attention(*tensors, layout=layout, return_lse=True, **given)
        assert output.shape == (*tensors[0].shape[:3], 24)
        assert (output == 0.0).all()
        assert lse.shape == (batch, 4, seq_q)
        assert (lse == -math.inf).all()
        assert autoattn.explain(*tensors, layout=layout, **given).reason.startswith("there is no query or no key")


def test_a_call_without_keys_leaves_a_sink_in_the_lse_and_gives_gradients_of_zero() -> None:
    tensors = [noise(2, 4, 5, 16), noise(2, 2, 0, 16), noise(2, 2, 0, 16)]
    for tensor in tensors:
        tensor.requires_grad_()
    output, lse = autoattn.attention(*tensors, sinks=SINKS, return_lse=True)
    assert torch.equal(lse, SINKS[None, :, None].expand(2, 4, 5))
    output.sum().backward()
    assert (tensors[0].grad == 0.0).all()


def test_a_call_without_keys_is_checked_all_the_same() -> None:
    query, key = noise(2, 4, 5, 16), noise(2, 2, 0, 16)
    with pytest.raises(TensorError, match="softcap must be"):
        autoattn.attention(query, key, key, softcap=-1.0)
    with pytest.raises(ProblemError, match="head_dim must be at most 256"):
        autoattn.attention(noise(1, 1, 0, 300), noise(1, 1, 0, 300), noise(1, 1, 0, 300))


# --- packed sequences -------------------------------------------------------------------------------------------------

QUERIES, KEYS = (3, 0, 5, 2, 4), (4, 6, 2, 0, 4)  # tokens of each sequence


def packed(queries: tuple[int, ...] = QUERIES, keys: tuple[int, ...] = KEYS, tail: int = 3) -> tuple[Any, ...]:
    """The arguments of a packed call with `tail` tokens behind the last sequence."""
    tokens_q, tokens_kv = sum(queries) + tail, sum(keys) + tail
    offsets = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (queries, keys)]
    tensors = noise(tokens_q, 4, 16, seed=1), noise(tokens_kv, 2, 16, seed=2), noise(tokens_kv, 2, 24, seed=3)
    return (*tensors, *offsets, max(queries, default=0), max(keys, default=0))


@pytest.mark.parametrize("given", [
    {}, {"causal": True}, {"window": (2, 1)}, {"window": (1, 3), "causal": True}, {"softcap": 2.0, "sinks": SINKS},
    {"alibi_slopes": SLOPES}, {"alibi_slopes": noise(5, 4).abs(), "causal": True}, {"score_mod": "score * (1.0 + b)"},
    {"dropout": 0.5, "seed": 3, "scale": 0.3},
], ids=str)  # fmt: skip
def test_packed_sequences_are_as_many_calls(given: dict[str, Any]) -> None:
    query, key, value, *lengths = packed()
    output, lse = autoattn.packed_attention(query, key, value, *lengths, return_lse=True, **given)
    assert (output.shape, lse.shape, lse.dtype) == ((17, 4, 24), (4, 17), torch.float32)
    assert torch.equal(autoattn.packed_attention(query, key, value, *lengths, **given), output)
    for place, (first, end, first_kv, end_kv) in enumerate(
        zip(lengths[0][:-1], lengths[0][1:], lengths[1][:-1], lengths[1][1:], strict=True)
    ):
        alone = dict(given)
        if alone.get("alibi_slopes", SLOPES).dim() == 2:
            alone["alibi_slopes"] = alone["alibi_slopes"][place]
        if "score_mod" in alone:
            alone["score_mod"] = f"score * (1.0 + {place})"
        tensors = (query[None, first:end], key[None, first_kv:end_kv], value[None, first_kv:end_kv])
        if "dropout" in alone and place > 0:
            continue  # each sequence drops others than a call of its own would
        wanted, sums = autoattn.attention(*tensors, layout="bshd", return_lse=True, **alone)
        close(output[first:end], wanted[0])
        close(lse[:, first:end], sums[0])
    assert (output[14:] == 0.0).all()
    assert (lse[:, 14:] == -math.inf).all()


def test_packed_gradients_are_those_of_each_sequence_and_zero_behind_the_last() -> None:
    query, key, value, *lengths = packed((3, 4), (5, 2))
    ours = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    push = noise(10, 4, 24)
    autoattn.packed_attention(*ours, *lengths, causal=True).backward(push)
    theirs = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    for rows, columns in ((slice(0, 3), slice(0, 5)), (slice(3, 7), slice(5, 7))):
        parts = [
            tensor[part][None].transpose(1, 2) for tensor, part in zip(theirs, (rows, columns, columns), strict=True)
        ]
        keep = formula.band(parts[0].shape[2], parts[1].shape[2], -1, 0)
        formula.attention(*parts, keep=keep)[0].backward(push[rows][None].transpose(1, 2).double())
    for mine, other in zip(ours, theirs, strict=True):
        close(mine.grad, other.grad)


@pytest.mark.parametrize(("queries", "keys"), [((), ()), ((0, 0), (3, 2)), ((3, 2), (0, 0)), ((0,), (0,))])
@pytest.mark.parametrize("tail", [0, 3])
def test_packed_sequences_without_tokens_give_zeros(queries: tuple[int, ...], keys: tuple[int, ...], tail: int) -> None:
    arguments = packed(queries, keys, tail)
    output, lse = autoattn.packed_attention(*arguments, sinks=SINKS, return_lse=True)
    assert output.shape == (sum(queries) + tail, 4, 24)
    assert (output == 0.0).all()
    assert torch.equal(lse[:, : sum(queries)], SINKS[:, None].expand(4, sum(queries)))
    assert (lse[:, sum(queries) :] == -math.inf).all()
    assert autoattn.explain_packed(*arguments).route == "eager"


def test_a_packed_call_poses_a_packed_problem() -> None:
    found = autoattn.explain_packed(*packed(), window=(2, -1))
    assert found.route == "eager"
    assert found.problem == Problem(
        dtype=DType.FLOAT32, batch=5, heads_q=4, heads_kv=2, seq_q=5, seq_kv=6, head_dim=16, head_dim_v=24,
        mask=autoattn.Mask.window(2, -1), layout=Layout.PACKED, tokens_q=17, tokens_kv=19,
    )  # fmt: skip


def test_the_longest_sequence_may_be_a_bound_that_is_too_high() -> None:
    *tensors, _, _ = packed()
    exact = autoattn.packed_attention(*packed(), causal=True)
    assert torch.equal(autoattn.packed_attention(*tensors, 2**20, 2**20, causal=True), exact)


# --- plans, with a card that is not there -----------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Plans as if the CPU's tensors were on an H200 for which nothing was tuned; kernels are computed by PyTorch."""
    monkeypatch.setattr("autoattn.resources.shipped_cache", lambda: tmp_path)
    seen: dict[str, Any] = {"loaded": [], "capturing": False, "launched": 0}

    def load(source: Source, device: torch.device) -> Kernel:
        seen["loaded"].append(source)
        return Kernel(source=source, module=None, compiled=None, device=device, sm_count=132)  # type: ignore[arg-type]

    def launch(kernel: Kernel, one: Problem, operands: Operands, output: Tensor, lse: Tensor | None) -> None:
        seen["launched"] += 1
        seen["problem"] = one
        seen["traits"] = forward.traits_of(operands.query, operands.key, operands.value, output)
        found, sums = rivals.eager(one, operands)
        output.copy_(found)
        if lse is not None:
            lse.copy_(sums)

    answer._loaded.cache_clear()
    monkeypatch.setattr(answer, "_why_no_kernel", lambda problem, operands: None)
    monkeypatch.setattr(answer.compile, "load", load)
    monkeypatch.setattr(forward, "launch", launch)
    monkeypatch.setattr(gpu, "present", lambda index: samples.H200)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: seen["capturing"])
    return seen


def test_a_kernel_is_planned_once_and_launched_each_time(card: dict[str, Any]) -> None:
    tensors = inputs(dtype=torch.float16)
    for _ in range(3):
        close(autoattn.attention(*tensors), expected(tensors, False))
    assert (len(card["loaded"]), card["launched"]) == (1, 3)
    assert autoattn.explain(*tensors).level is Level.DEFAULT


def test_problems_that_differ_only_in_sizes_share_a_kernel(card: dict[str, Any]) -> None:
    for length in range(300, 316):
        autoattn.attention(*inputs(seq_q=256, seq_kv=length, dtype=torch.float16))
    assert len(card["loaded"]) == 1


@pytest.mark.parametrize(("head_dim", "alignment"), [(16, 8), (20, 4), (57, 1)])
def test_a_kernel_suits_the_memory_of_the_output_too(card: dict[str, Any], head_dim: int, alignment: int) -> None:
    """Slices of wider rows are aligned where the contiguous output is not."""
    room = [torch.zeros(2, 3, 40, 64, dtype=torch.float16) for _ in range(3)]
    autoattn.attention(*(tensor[..., :head_dim] for tensor in room))
    (source,) = card["loaded"]
    assert source.traits == Traits(alignment=alignment) == card["traits"]


def test_other_strides_get_another_kernel(card: dict[str, Any]) -> None:
    query, key, value = inputs(dtype=torch.float16)
    autoattn.attention(query, key, value)
    autoattn.attention(query.mT.contiguous().mT, key, value)
    assert [source.traits.alignment for source in card["loaded"]] == [8, 1]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_output_stands_in_memory_as_the_layout_says(card: dict[str, Any], layout: str) -> None:
    tensors = inputs(dtype=torch.float16, layout=layout)
    output = autoattn.attention(*tensors, layout=layout)
    assert output.is_contiguous()
    close(output, expected(tensors, False, layout))


def test_what_a_compiler_refuses_goes_to_pytorch_and_is_said(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Source, device: torch.device) -> Kernel:
        raise CompileError("this variant does not fit")

    monkeypatch.setattr(answer.compile, "load", refuse)
    tensors = inputs(dtype=torch.float16)
    close(autoattn.attention(*tensors), expected(tensors, False))
    assert str(autoattn.explain(*tensors)) == "sdpa (sdpa): this variant does not fit"


def test_a_default_that_does_not_fit_makes_way_for_the_next_seed(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, refused = answer.compile.load, []

    def picky(source: Source, device: torch.device) -> Kernel:
        if len(refused) < 2:
            refused.append(source.variant)
            raise CompileError("this variant does not fit")
        return load(source, device)

    monkeypatch.setattr(answer.compile, "load", picky)
    tensors = inputs(seq_q=300, seq_kv=300, dtype=torch.float16)
    close(autoattn.attention(*tensors), expected(tensors, False))
    found = autoattn.explain(*tensors)
    assert found.problem is not None
    seeds = space.load("triton/forward").seeds_for(found.problem, samples.H200)
    assert (found.route, found.level, found.variant) == ("kernel", Level.DEFAULT, seeds[2])
    assert refused == seeds[:2]


def test_nothing_is_compiled_while_a_graph_is_captured(card: dict[str, Any]) -> None:
    tensors = inputs(dtype=torch.float16)
    card["capturing"] = True
    close(autoattn.attention(*tensors), expected(tensors, False))
    assert "call once before capturing" in autoattn.explain(*tensors).reason
    assert card["loaded"] == []
    card["capturing"] = False
    autoattn.attention(*tensors)
    card["capturing"] = True
    autoattn.attention(*tensors)
    assert card["launched"] == 2, "what was loaded before runs in the graph too"


def test_forgetting_reads_the_cache_anew(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    explain = dispatch.explain
    monkeypatch.setattr(dispatch, "explain", lambda *facts: asked.append(facts) or explain(*facts))
    tensors = inputs(dtype=torch.float16)
    for _ in range(2):
        autoattn.attention(*tensors)
    assert len(asked) == 1
    functional.forget()
    autoattn.attention(*tensors)
    assert len(asked) == 2


def test_a_backend_that_refuses_the_tensors_gives_way_and_is_not_asked_again(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    sdpa = rivals.sdpa

    def refusing(one: Problem, operands: Operands, *, backend: str = "sdpa") -> Tensor:
        calls.append(backend)
        if backend == "sdpa-cudnn":
            raise RuntimeError("No available kernel. Aborting execution.")
        return sdpa(one, operands, backend=backend)

    chosen = dispatch.Explanation(problem=None, route="sdpa-cudnn", level=Level.EXACT, reason="it was the fastest")
    monkeypatch.setattr(rivals, "sdpa", refusing)
    monkeypatch.setattr(dispatch, "explain", lambda problem, device: chosen)
    tensors = inputs(dtype=torch.float16)
    for _ in range(2):
        close(autoattn.attention(*tensors), expected(tensors, False))
    assert calls == ["sdpa-cudnn", "sdpa", "sdpa"]
    assert autoattn.explain(*tensors).reason == "sdpa-cudnn was the fastest, but does not take these tensors"


def test_running_out_of_memory_is_not_hidden(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*operands: Any, **facts: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    chosen = dispatch.Explanation(problem=None, route="sdpa-flash", level=Level.EXACT, reason="it was the fastest")
    monkeypatch.setattr(dispatch, "explain", lambda problem, device: chosen)
    monkeypatch.setattr(rivals, "sdpa", full)
    with pytest.raises(torch.OutOfMemoryError):
        autoattn.attention(*inputs(dtype=torch.float16))
    assert autoattn.explain(*inputs(dtype=torch.float16)) is chosen, "the next call may find room"


def test_float32_follows_pytorchs_own_setting(card: dict[str, Any]) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for setting, precision in (("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")):
            torch.set_float32_matmul_precision(setting)
            found = autoattn.explain(*inputs())
            assert found.problem is not None
            assert found.problem.precision.value == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_precision_overrules_pytorchs_own_setting(card: dict[str, Any]) -> None:
    for precision in ("ieee", "tf32", "tf32x3"):
        autoattn.attention(*inputs(), precision=precision)
        assert card["problem"].precision.value == precision


def test_wanting_the_lse_asks_for_another_kernel_and_gets_it(card: dict[str, Any]) -> None:
    tensors = inputs(dtype=torch.float16)
    output, lse = autoattn.attention(*tensors, return_lse=True)
    close(output, expected(tensors, False))
    close(lse, formula.attention(*tensors)[1])
    autoattn.attention(*tensors)
    assert [source.traits.lse for source in card["loaded"]] == [True, False]


@pytest.mark.parametrize("name", ASKED)
def test_a_card_has_a_kernel_for_whatever_is_asked(name: str, card: dict[str, Any]) -> None:
    given, meant = ASKED[name]
    tensors = inputs(dtype=torch.float16)
    assert autoattn.explain(*tensors, **given).route == "kernel"
    close(autoattn.attention(*tensors, **given), formula.attention(*tensors, **meant)[0])
    assert card["launched"] == 1


def test_packed_calls_get_a_kernel_and_a_packed_output(card: dict[str, Any]) -> None:
    query, key, value, *lengths = packed()
    exact, sums = formula.attention(
        query[None, :3].transpose(1, 2), key[None, :4].transpose(1, 2), value[None, :4].transpose(1, 2)
    )
    output, lse = autoattn.packed_attention(query, key, value, *lengths, return_lse=True)
    assert card["launched"] == 1
    assert output.is_contiguous()
    close(output[:3], exact[0].transpose(0, 1))
    close(lse[:, :3], sums[0])
    assert autoattn.explain_packed(query, key, value, *lengths).route == "kernel"


def test_a_rival_that_was_faster_makes_way_where_the_lse_is_wanted(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = space.load("triton/forward").default(kernels.problem(), samples.H200)
    chosen = dispatch.Explanation(
        problem=None, route="sdpa-cudnn", level=Level.EXACT, reason="it was the fastest", variant=variant
    )
    monkeypatch.setattr(dispatch, "explain", lambda problem, device: chosen)
    found = autoattn.explain(*inputs(dtype=torch.float16), return_lse=True)
    assert (found.route, found.variant) == ("kernel", variant)
    assert found.reason == "it was the fastest; but it gives no LSE, so the kernel runs"
    assert autoattn.explain(*inputs(dtype=torch.float16)).route == "sdpa-cudnn"


def test_an_old_card_has_no_float8(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "present", lambda index: samples.A30)
    tensors = tuple(tensor.to(torch.float8_e4m3fn) for tensor in inputs())
    found = autoattn.explain(*tensors)
    assert (found.route, card["launched"]) == ("eager", 0)
    assert "float8 kernels need sm_89 or newer" in found.reason


def test_a_card_that_is_too_old_for_kernels_takes_the_plain_formula_where_pytorch_has_none(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = dispatch.sdpa("it is too old")
    monkeypatch.setattr(dispatch, "explain", lambda problem, device: old)
    tensors = inputs(dtype=torch.float16)
    assert autoattn.explain(*tensors).route == "sdpa"
    assert autoattn.explain(*tensors, softcap=2.0).route == "eager"
    assert autoattn.explain(*tensors, return_lse=True).route == "eager"


def test_plans_are_bounded(card: dict[str, Any]) -> None:
    assert answer._prepare.cache_info().maxsize == 4096
