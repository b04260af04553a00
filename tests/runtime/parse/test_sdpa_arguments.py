"""F.scaled_dot_product_attention's arguments: what PyTorch takes is taken, what it refuses is refused, on the CPU."""

from __future__ import annotations

import io
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import sdpa_calls
import torch
from hypothesis import given as drawing
from hypothesis import settings
from hypothesis import strategies as st
from sdpa_calls import SdpaCall
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import autoattn
from autoattn import functional, torch_private
from autoattn.errors import SdpaError, SdpaIndexError, SdpaTypeError, TensorError
from autoattn.runtime.parse import sdpa_arguments

ours: Callable[..., Tensor] = functional.scaled_dot_product_attention
theirs: Callable[..., Tensor] = sdpa_calls.by_pytorch
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
KINDS = (TypeError, IndexError, RuntimeError)  # of PyTorch's errors


@pytest.fixture(autouse=True)
def nothing_planned() -> Iterator[None]:
    functional.forget()
    yield
    functional.forget()


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, learns: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(learns)


def three(*shape: int, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
    return noise(*shape, seed=1, **given), noise(*shape, seed=2, **given), noise(*shape, seed=3, **given)


def close(actual: Tensor, wanted: Tensor, times: float = 1.0) -> None:
    assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
    tolerance = times * TOLERANCE.get(actual.dtype, 0.0)
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=tolerance)


# --- drawn calls ------------------------------------------------------------------------------------------------------


def run(function: Callable[..., Tensor], call: SdpaCall) -> Tensor | Exception:
    """The output, or what was raised."""
    try:
        return function(call.query, call.key, call.value, **call.given)
    except Exception as error:
        return error


def gradients(output: Tensor, call: SdpaCall) -> tuple[Tensor | None, ...]:
    push = noise(*output.shape, dtype=output.dtype, seed=4)
    return torch.autograd.grad(output, call.learners, push, allow_unused=True)


def compare(call: SdpaCall) -> None:
    """Ours does what PyTorch's does: the same kind of error, or the same output and gradients."""
    output, wanted = run(ours, call), run(theirs, call)
    if isinstance(wanted, Exception) or isinstance(output, Exception):
        assert isinstance(output, Exception)
        assert isinstance(wanted, Exception)
        assert isinstance(output, next(kind for kind in KINDS if isinstance(wanted, kind)))
        return
    assert output.requires_grad is wanted.requires_grad
    if call.given.get("dropout_p"):  # which draws other numbers
        assert (output.shape, output.dtype) == (wanted.shape, wanted.dtype)
        return
    if wanted.isnan().any() and "attn_mask" in call.given and call.given.get("is_causal"):
        assert torch.equal(output.isnan(), wanted.isnan()), (
            "only the fused backend takes both, and ours hands over to it"
        )
        return
    # With a scale that is not positive PyTorch's fused backend gives NaN under a causal mask; the formula does not.
    with sdpa_kernel(SDPBackend.MATH) if wanted.isnan().any() else nullcontext():
        wanted = theirs(call.query, call.key, call.value, **call.given)
        close(output, wanted)
        if output.requires_grad:
            for mine, other in zip(gradients(output, call), gradients(wanted, call), strict=True):
                assert (mine is None) is (other is None)
                if mine is not None and other is not None:
                    close(mine, other, 4.0)


@settings(max_examples=250)
@drawing(st.randoms(use_true_random=False))
def test_what_pytorch_takes_is_taken_and_means_the_same(rng: random.Random) -> None:
    call = sdpa_calls.drawn(rng)
    compare(call)
    explanation = functional.explain_sdpa(call.query, call.key, call.value, **call.given)
    assert explanation.route in ("sdpa", "eager")
    assert explanation.reason != ""


@settings(max_examples=250)
@drawing(st.randoms(use_true_random=False))
def test_what_pytorch_refuses_is_an_error_of_its_class(rng: random.Random) -> None:
    call = sdpa_calls.drawn(rng, spoilt=True)
    if call.wrong == "value tokens" and not call.is_empty:  # PyTorch would read what is no tensor's
        with pytest.raises(SdpaError, match=r"value must have the key's \d+ tokens, got"):
            ours(call.query, call.key, call.value, **call.given)
    else:
        compare(call)


# --- what goes to PyTorch as it is ------------------------------------------------------------------------------------

Q, K, V = three(2, 4, 5, 8)
SEEN = torch.ones(5, 5, dtype=torch.bool).tril()
HANDED: dict[str, tuple[tuple[Tensor, ...], dict[str, Any], str]] = {
    "float64": (three(2, 4, 5, 8, dtype=torch.float64), {}, "the tensors are float64, and the kernels take float16, "),
    "float64 and a mask": ((Q.double(), K.double(), V.double()), {"attn_mask": SEEN}, "the tensors are float64, and"),
    "head dim": (
        three(1, 2, 3, 257),
        {"is_causal": True},
        "the head dim of query is 257, and the kernels take at most",
    ),
    "values": ((Q, K, noise(2, 4, 5, 513)), {}, "the head dim of value is 513, and the kernels take at most 512"),
    "no weights": ((Q, K, V), {"dropout_p": 1.0}, "dropout_p is 1, which leaves no weight"),
    "no batch": (three(0, 4, 5, 8), {}, "query has an axis without elements, got shape (0, 4, 5, 8)"),
    "no heads": (three(2, 0, 5, 8), {}, "query has an axis without elements, got shape (2, 0, 5, 8)"),
    "no queries": ((Q[:, :, :0], K, V), {"is_causal": True}, "query has an axis without elements, got shape (2, 4, 0"),
    "no keys": ((Q, K[:, :, :0], V[:, :, :0]), {}, "key has an axis without elements, got shape (2, 4, 0, 8)"),
    "no head dim": ((Q[..., :0], K[..., :0], V), {}, "query has an axis without elements, got shape (2, 4, 5, 0)"),
    "three axes": (three(4, 5, 8), {"is_causal": True}, "the tensors are on the cpu, and the kernels run on NVIDIA"),
}


@pytest.mark.parametrize("name", HANDED)
def test_explain_says_why_pytorch_answers(name: str) -> None:
    tensors, given, reason = HANDED[name]
    close(ours(*tensors, **given), theirs(*tensors, **given))
    explanation = autoattn.explain_sdpa(*tensors, **given)
    assert explanation.route == "sdpa"
    assert explanation.reason.startswith(reason)


def test_a_mask_together_with_is_causal_is_pytorchs_to_take_or_refuse() -> None:
    """torch 2.13 takes both with the fused backend of the CPU alone, torch 2.15 never."""
    both = {"attn_mask": SEEN, "is_causal": True}
    for query, key, value in (three(2, 4, 5, 8), three(4, 5, 8)):
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            call = SdpaCall(query=query, key=key, value=value, given=both, wrong="")
            with sdpa_kernel(backend):
                compare(call)
    assert autoattn.explain_sdpa(Q, K, V, SEEN, is_causal=True).reason.startswith("attn_mask comes together with")


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_answered_by_pytorch(layout: torch.layout) -> None:
    query, key, value = (nested(layout, seed) for seed in range(3))
    for _ in range(3):
        ours(Q, K, V)  # guards of calls that were answered must not meet strided nested tensors
    for given in ({}, {"scale": 0.3}):
        for mine, other in zip(
            ours(query, query, query, **given).unbind(), theirs(query, query, query, **given).unbind(), strict=True
        ):
            close(mine, other)
    for door in (autoattn.explain, autoattn.explain_sdpa):
        assert "nested tensor" in door(query, query, query).reason
    swapped = query.transpose(1, 2)
    output = autoattn.attention(swapped, swapped, swapped, layout="bshd")
    for mine, other in zip(output.unbind(), theirs(query, query, query).unbind(), strict=True):
        close(mine, other.transpose(0, 1))
    with pytest.raises(TensorError, match=r"which has no softcap, got 2\.0; leave it out or call packed_attention"):
        autoattn.attention(query, query, query, softcap=2.0)
    with pytest.raises(
        TensorError, match="aligns a causal mask top-left, got causal=True and sequences that may differ"
    ):
        autoattn.attention(query, key, value, causal=True)


def test_nested_tensors_get_their_gradients() -> None:
    mine, other = nested(torch.jagged, 0, learns=True), nested(torch.jagged, 0, learns=True)
    ours(mine, mine, mine).values().square().sum().backward()
    theirs(other, other, other).values().square().sum().backward()
    close(mine.grad.values(), other.grad.values())  # type: ignore[union-attr]


def nested(layout: torch.layout, seed: int, *, learns: bool = False) -> Tensor:
    """[3, 4, ragged, 8]"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # strided ones are PyTorch's prototype
        tensors = [noise(4, length, 8, seed=seed + length) for length in (3, 5, 2)]
        if layout is torch.strided:
            return torch.nested.nested_tensor(tensors, layout=layout)
        flat = [tensor.transpose(0, 1).flatten(1) for tensor in tensors]
        leaf = torch.nested.nested_tensor(flat, layout=layout, requires_grad=learns)
        if learns:
            leaf.retain_grad()
        heads: Tensor = leaf.unflatten(-1, [4, 8]).transpose(1, 2)
        if learns:
            heads.retain_grad()
        return heads


class Own(Tensor):
    """A tensor class with rules of its own."""


def test_tensor_classes_with_rules_of_their_own_go_to_pytorch() -> None:
    query = Q.as_subclass(Own)
    assert type(ours(query, K, V)) is Own
    assert autoattn.explain_sdpa(query, K, V).reason == "query is a Own, a tensor class with rules of its own"
    longer = noise(2, 4, 7, 8)
    bias = causal_lower_right(5, 7)
    close(ours(Q, longer, longer, bias), theirs(Q, longer, longer, bias))
    assert "attn_mask is a CausalBias" in autoattn.explain_sdpa(Q, longer, longer, bias).reason


def test_meta_and_fake_tensors_get_the_shape_and_dtype_of_the_answer() -> None:
    for dtype in (torch.float32, torch.float64):
        for tensors, given in ((three(2, 4, 5, 8), {}), (three(4, 5, 300), {"is_causal": True})):
            output = ours(*(tensor.to("meta", dtype) for tensor in tensors), **given)
            assert (output.shape, output.dtype) == (tensors[0].shape, dtype)
            with FakeTensorMode():
                output = ours(*(torch.empty(tensor.shape, dtype=dtype) for tensor in tensors), **given)
            assert (output.shape, output.dtype) == (tensors[0].shape, dtype)
    meta = [tensor.to("meta", torch.float64) for tensor in (Q, K, noise(2, 4, 5, 600))]
    output, lse = autoattn.attention(*meta, softcap=2.0, return_lse=True)
    assert (output.shape, output.dtype, lse.dtype) == ((2, 4, 5, 600), torch.float64, torch.float64)


def test_vmap_and_derivatives_of_torch_func_are_pytorchs() -> None:
    tensors = three(3, 2, 4, 5, 8, dtype=torch.float64)
    for given in ({"is_causal": True}, {"attn_mask": SEEN}):
        mapped, wanted = (partial(door, **given) for door in (ours, theirs))
        close(torch.vmap(mapped)(*tensors), wanted(*tensors))
        mine, other = (
            torch.func.grad(lambda query, door=door: door(query, *tensors[1:]).square().sum())(tensors[0])
            for door in (mapped, wanted)
        )
        close(mine, other)


# --- who records a call -----------------------------------------------------------------------------------------------


def test_symbolic_trace_records_pytorchs_function() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        reasons.append(autoattn.explain_sdpa(query, key, value).reason)
        return ours(query, key, value, is_causal=True)

    reasons: list[str] = []
    traced = torch.fx.symbolic_trace(model)
    (node,) = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert node.target is torch.nn.functional.scaled_dot_product_attention
    assert dict(node.kwargs) == {"is_causal": True}
    close(traced(Q, K, V), theirs(Q, K, V, is_causal=True))
    assert reasons == ["query is a Proxy with rules of its own"]


def test_symbolic_trace_records_our_other_functions_as_they_are() -> None:
    module = autoattn.Attention(causal=True, softcap=2.0)
    traced = torch.fx.symbolic_trace(module)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [autoattn.attention]
    close(traced(Q, K, V), module(Q, K, V))
    offsets, tokens = torch.tensor([0, 2, 5], dtype=torch.int32), three(5, 2, 8)
    traced = torch.fx.symbolic_trace(lambda q, k, v, c: autoattn.packed_attention(q, k, v, c, c, 3, 3, causal=True))
    close(traced(*tokens, offsets), autoattn.packed_attention(*tokens, offsets, offsets, 3, 3, causal=True))
    traced = torch.fx.symbolic_trace(lambda q, k, v: functional.flash_attn_func(q, k, v, causal=True))
    close(traced(Q, K, V), functional.flash_attn_func(Q, K, V, causal=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("door", "operator"),
    [
        (lambda *tensors: ours(*tensors, is_causal=True), "aten::scaled_dot_product_attention"),
        (lambda *tensors: ours(*tensors, SEEN), "aten::scaled_dot_product_attention"),
        (lambda *tensors: autoattn.attention(*tensors, causal=True), "autoattn::attention"),
        (autoattn.Attention(window=(2, 0), softcap=2.0, layout="bshd"), "autoattn::attention"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_jit_trace_records_an_operator_also_of_calls_that_were_answered_before(
    door: Callable[..., Tensor], operator: str
) -> None:
    for _ in range(2):
        door(Q, K, V)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(door, (Q, K, V))
    assert operator in str(traced.graph)
    written = io.BytesIO()
    torch.jit.save(traced, written)
    again = torch.jit.load(io.BytesIO(written.getvalue()))
    others = [2.0 * tensor[:1] for tensor in (Q, K, V)]
    close(again(*others), door(*others))
    door(Q, K, V)  # what was kept meanwhile still answers


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_explain_answers_while_jit_traces() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        reasons.append(autoattn.explain_sdpa(query, key, value).reason)
        reasons.append(autoattn.explain(query, key, value).reason)
        return query

    reasons: list[str] = []
    torch.jit.trace(model, (Q, K, V), check_trace=False)
    assert reasons[0] == "torch.jit.trace records PyTorch's operators alone"
    assert reasons[1].startswith("the tensors are on the cpu")


def test_compiled_calls_of_what_no_kernel_knows_are_pytorchs_in_the_graph() -> None:
    compiled = torch.compile(lambda *tensors: ours(*tensors, is_causal=True), backend="aot_eager", fullgraph=True)
    for tensors in (three(2, 4, 5, 8, dtype=torch.float64, learns=True), three(1, 2, 4, 300, learns=True)):
        output, wanted = compiled(*tensors), theirs(*tensors, is_causal=True)
        close(output, wanted)
        for mine, other in zip(
            torch.autograd.grad(output.sum(), tensors), torch.autograd.grad(wanted.sum(), tensors), strict=True
        ):
            close(mine, other, 4.0)


# --- float64 and large head dims of `attention` -----------------------------------------------------------------------

SMALL = (
    noise(1, 2, 4, 3, dtype=torch.float64, learns=True), noise(1, 2, 5, 3, dtype=torch.float64, seed=1, learns=True),
    noise(1, 2, 5, 2, dtype=torch.float64, seed=2, learns=True),
)  # fmt: skip


@pytest.mark.parametrize("given", [
    {}, {"causal": True}, {"causal": "top-left"}, {"window": (1, 1)}, {"softcap": 2.0}, {"scale": -0.3, "causal": True},
    {"window": (2, 0), "softcap": 1.5, "return_lse": True}, {"mask": noise(4, 5) > -0.5}, {"dropout": 0.3, "seed": 3},
    {"causal": True, "deterministic": True}, {"score_mod": "score * 0.5 + to_float(q_idx)"},
], ids=str)  # fmt: skip
def test_gradcheck_in_float64(given: dict[str, Any]) -> None:
    assert torch.autograd.gradcheck(lambda *tensors: autoattn.attention(*tensors, **given), SMALL)


@pytest.mark.parametrize("given", [{}, {"is_causal": True}, {"attn_mask": noise(4, 5) > -0.5}], ids=str)
def test_gradcheck_in_float64_of_pytorchs_function(given: dict[str, Any]) -> None:
    assert torch.autograd.gradcheck(lambda *tensors: ours(*tensors, **given), SMALL)


def test_gradcheck_in_float64_of_slopes_sinks_and_a_bias() -> None:
    learned = [noise(*shape, dtype=torch.float64, seed=9, learns=True) for shape in ((2,), (2,), (4, 5))]

    def call(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, sinks: Tensor, bias: Tensor) -> Any:
        return autoattn.attention(query, key, value, alibi_slopes=slopes, sinks=sinks, bias=bias, causal=True)

    assert torch.autograd.gradcheck(call, (*SMALL, *learned))


def test_gradcheck_in_float64_of_packed_sequences() -> None:
    offsets = torch.tensor([0, 1, 4], dtype=torch.int32)
    tokens = three(4, 2, 3, dtype=torch.float64, learns=True)
    assert torch.autograd.gradcheck(
        lambda *tensors: autoattn.packed_attention(*tensors, offsets, offsets, 3, 3, causal=True), tokens
    )


def test_attention_explains_float64_and_large_head_dims_and_remembers_such_calls() -> None:
    tensors = three(1, 2, 5, 300)
    explanation = autoattn.explain(*tensors, causal=True)
    assert (explanation.route, explanation.problem) == ("sdpa", None)
    assert explanation.reason == "the head dim of query is 300, and the kernels take at most 256"
    explanation = autoattn.explain(*(tensor.double() for tensor in tensors), softcap=2.0)
    assert (explanation.route, explanation.problem) == ("eager", None)
    close(autoattn.attention(*tensors, causal=True), theirs(*tensors, is_causal=True))
    close(autoattn.attention(*tensors, causal=True), theirs(*tensors, is_causal=True))


# --- mistakes, and what calls cost ------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], type[Exception], str]] = {
    "heads": ((Q, K[:, :3], V[:, :3]), {}, SdpaError, RuntimeError, "set enable_gqa if key heads are fewer"),
    "no tensor": ((Q, None, V), {}, SdpaTypeError, TypeError, "key must be a torch.Tensor, got NoneType"),
    "is_causal": ((Q, K, V), {"is_causal": 1}, SdpaTypeError, TypeError, "is_causal must be True or False, got 1"),
    "enable_gqa": ((Q, K, V), {"enable_gqa": None}, SdpaTypeError, TypeError, "enable_gqa must be True or False, got"),
    "two axes": (three(5, 8), {"enable_gqa": True}, SdpaIndexError, IndexError, "with enable_gqa, got shape (5, 8)"),
    "devices": ((Q, K, V), {"attn_mask": SEEN.to("meta")}, SdpaError, RuntimeError, "on one device, got cpu, cpu, cpu"),
    "value tokens": (
        (Q, K, noise(2, 4, 6, 8)),
        {},
        SdpaError,
        RuntimeError,
        "value must have the key's 5 tokens, got 6",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_a_sentence_in_the_class_of_pytorchs_error(name: str) -> None:
    tensors, given, ours_class, theirs_class, words = MISTAKES[name]
    for _ in range(2):
        with pytest.raises(ours_class, match=re.escape(words)) as caught:
            ours(*tensors, **given)
        assert isinstance(caught.value, TensorError)
        assert isinstance(caught.value, theirs_class)
        ours(Q, K, V)  # what was answered before must not answer a wrong call


def test_what_was_answered_with_fewer_key_heads_needs_enable_gqa() -> None:
    key, value = K[:, :2].clone(), V[:, :2].clone()
    for _ in range(3):
        ours(Q, key, value, enable_gqa=True)
        with pytest.raises(SdpaError):
            ours(Q, key, value)


def test_a_mistake_of_the_environment_is_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOATTN_NUMERICS", "fast")
    with pytest.raises(TensorError, match="AUTOATTN_NUMERICS must be any or online"):
        ours(Q, K, V)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_call_that_was_answered_before_is_not_looked_at_again(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [tensor.to(dtype) for tensor in (Q, K, V)]
    wanted = ours(*tensors, is_causal=True)
    for name in ("why_pytorch", "check", "broadcast"):
        monkeypatch.setattr(sdpa_arguments, name, lambda *given, **named: pytest.fail("the arguments were read again"))
    for _ in range(3):
        close(ours(*tensors, is_causal=True), wanted)


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(4, 0), (0, 2), (0, 0)])
def test_no_heads_give_zeros_and_gradients(heads_q: int, heads_kv: int) -> None:
    """torch 2.11 divides by the number of heads, which ends the process; 2.13 gives the same zeros."""
    query, key = noise(2, heads_q, 5, 8, learns=True), noise(2, heads_kv, 3, 8, seed=1, learns=True)
    output = ours(query, key, key, enable_gqa=True)
    assert torch.equal(output, torch.zeros(2, heads_q, 5, 8))
    output.sum().backward()
    for tensor in (query, key):
        assert tensor.grad is not None
        assert not tensor.grad.any()


@pytest.mark.parametrize(("release", "device", "shape", "by_formula"), [
    ("2.11.0", "cpu", (2, 0, 5, 8), True), ("2.13.0", "cpu", (2, 0, 5, 8), False),
    ("2.11.0", "cpu", (2, 4, 0, 8), False), ("2.13.0", "meta", (2, 4, 0, 8), True),
    ("2.13.0", "meta", (2, 0, 5, 8), True), ("2.13.0", "meta", (2, 4, 5, 8), False),
])  # fmt: skip
def test_the_formula_answers_calls_without_elements_that_a_backend_fails_on(
    release: str, device: str, shape: tuple[int, ...], by_formula: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        fused = torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled()
        backends.append("any" if fused else "formula")
        return query

    backends: list[str] = []
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(release))
    monkeypatch.setattr(torch_private, "sdpa", watched)
    tensor = torch.empty(shape, device=device)
    sdpa_arguments.by_pytorch(tensor, tensor, tensor, None)
    assert backends == ["formula" if by_formula else "any"]
