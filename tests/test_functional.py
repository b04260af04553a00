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
from functional_calls import (
    ASKED,
    CAUSAL,
    Inputs,
    close,
    expected,
    inputs,
    nothing_planned,  # noqa: F401 - a fixture
    packed,
)
from torch import Tensor

import autoattn
from autoattn import answer, arguments, dispatch, functional, gpu, rivals, space
from autoattn.compile import Kernel
from autoattn.dispatch import Level
from autoattn.errors import AutoattnError, CompileError, ProblemError, TensorError
from autoattn.operands import Operands
from autoattn.ops import forward
from autoattn.problem import Problem
from autoattn.variant import Source, Traits

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


def test_numerics_of_a_module_are_those_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def read(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> arguments.Call:
        call = whole(query, key, value, **given)
        asked.append(call.problem.numerics.value)
        return call

    whole = arguments.read
    monkeypatch.setattr(arguments, "read", read)
    query, key, value = inputs()
    tokens = torch.zeros(1, 3, 8)
    module, multihead = autoattn.Attention(numerics="online"), autoattn.MultiheadAttention(8, 2, numerics="online")
    module(query, key, value)
    multihead(tokens)
    assert asked == ["online"] * 2
    assert repr(module) == "Attention(numerics='online')"
    assert "numerics='online'" in repr(multihead)
    monkeypatch.setenv("AUTOATTN_NUMERICS", "online")
    functional.scaled_dot_product_attention(query, query, query)
    functional.flash_attn_func(query, query, query)
    autoattn.Attention()(query, key, value)
    autoattn.MultiheadAttention(8, 2)(tokens)
    autoattn.Attention(numerics="any")(query, key, value)
    assert asked[2:] == ["online"] * 4 + ["any"]


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
            with pytest.raises(TensorError, match="value must be"):
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

    def why(one: Problem, scale: float) -> str | None:
        tensor: Any = OnCard()
        return answer._why_no_kernel(one, Operands(query=tensor, key=tensor, value=tensor, scale=scale))

    assert why(kernels.problem(), 1.0) in ("a tensor subclass has rules of its own", words)
    monkeypatch.setattr(answer, "Tensor", OnCard)
    assert why(kernels.problem(batch=batch), scale) == words
    assert why(kernels.problem(), 1.0) is None


# --- plans, with a card that is not there -----------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Plans as if the CPU's tensors were on an H200 for which nothing was tuned; kernels are computed by PyTorch."""
    monkeypatch.setattr("autoattn.resources.shipped_cache", lambda: tmp_path)
    seen: dict[str, Any] = {"loaded": [], "capturing": False, "launched": 0}

    def load(source: Source, device: torch.device) -> Kernel:
        seen["loaded"].append(source)
        return Kernel(source=source, module=None, compiled=None, device=device, sm_count=132)  # type: ignore[arg-type]

    def launch(
        kernel: Kernel, one: Problem, operands: Operands, output: Tensor, lse: Tensor | None, *, counting: bool
    ) -> None:
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
        if source.variant.template == "gluon/forward":
            refused.append(source.variant)
            raise CompileError("this variant does not fit")
        return load(source, device)

    monkeypatch.setattr(answer.compile, "load", picky)
    tensors = inputs(seq_q=300, seq_kv=300, dtype=torch.float16)
    close(autoattn.attention(*tensors), expected(tensors, False))
    found = autoattn.explain(*tensors)
    assert found.problem is not None
    seeds = [seed for one in space.of(found.problem.op) for seed in one.seeds_for(found.problem, samples.H200)]
    ran = seeds[len(refused)]
    assert (found.route, found.level, found.variant) == ("kernel", Level.DEFAULT, ran)
    assert refused == seeds[: len(refused)]
    assert {variant.template for variant in refused} == {"gluon/forward"}
    assert ran.template == "triton/forward"
    assert ran.template in found.reason
    assert [step for step in found.steps if "this variant does not fit" in step] == [
        "gluon/forward: this variant does not fit" for _ in refused
    ]


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
    assert calls == ["sdpa-cudnn", "sdpa"], "the second call was prepared by the first"
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
