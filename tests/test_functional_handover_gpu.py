"""What F.scaled_dot_product_attention takes and no kernel does, on a real GPU: PyTorch answers, kernels do the rest."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import sdpa_calls
import torch
from functional_calls_gpu import no_shipped_cache  # noqa: F401 - a fixture
from sdpa_calls import SdpaCall
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import autoattn
from autoattn import functional
from autoattn.runtime.parse import sdpa_arguments

pytestmark = pytest.mark.gpu

ours = functional.scaled_dot_product_attention
theirs = torch.nn.functional.scaled_dot_product_attention
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.fixture(autouse=True)
def nothing_planned() -> Iterator[None]:
    functional.forget()
    yield
    functional.forget()


def three(*shape: int, dtype: torch.dtype = torch.bfloat16, learns: bool = False) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    tensors = [torch.randn(shape, device="cuda", generator=generator, dtype=torch.float32).to(dtype) for _ in range(3)]
    return [tensor.requires_grad_(learns) for tensor in tensors]


def close(actual: Tensor, wanted: Tensor) -> None:
    assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 320])
@pytest.mark.parametrize("is_causal", [False, True])
def test_float64_and_large_head_dims_are_pytorchs_with_their_gradients(
    dtype: torch.dtype, head_dim: int, is_causal: bool
) -> None:
    if head_dim == 64 and dtype is not torch.float64:
        pytest.skip("kernels take it")
    for _ in range(2):  # new, and answered before
        mine, other = (
            three(2, 4, 96, head_dim, dtype=dtype, learns=True),
            three(2, 4, 96, head_dim, dtype=dtype, learns=True),
        )
        output, wanted = ours(*mine, is_causal=is_causal), theirs(*other, is_causal=is_causal)
        close(output, wanted)
        output.sum().backward()
        wanted.sum().backward()
        for leaf, other_leaf in zip(mine, other, strict=True):
            assert leaf.grad is not None
            assert other_leaf.grad is not None
            close(leaf.grad, other_leaf.grad)
    explanation = autoattn.explain_sdpa(*mine, is_causal=is_causal)
    assert (explanation.route, explanation.problem) == ("sdpa", None)
    assert "and the kernels take" in explanation.reason


def test_gradcheck_in_float64() -> None:
    tensors = three(1, 2, 4, 3, dtype=torch.float64, learns=True)
    for given in ({"causal": True}, {"causal": "top-left"}, {"window": (1, 0), "softcap": 2.0}):
        assert torch.autograd.gradcheck(lambda *three, given=given: autoattn.attention(*three, **given), tensors)
    assert torch.autograd.gradcheck(lambda *three: ours(*three, is_causal=True), tensors)


@pytest.mark.parametrize("backend", [None, SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_a_mask_together_with_is_causal_is_pytorchs_to_take_or_refuse(backend: SDPBackend | None) -> None:
    query, key, value = three(2, 4, 64, 64)
    given: dict[str, Any] = {"attn_mask": torch.ones(64, 64, dtype=torch.bool, device="cuda"), "is_causal": True}
    every = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with warnings.catch_warnings(), sdpa_kernel(every if backend is None else backend):
        warnings.simplefilter("ignore")
        try:
            wanted: Tensor | None = theirs(query, key, value, **given)
        except RuntimeError:
            wanted = None
        if wanted is None:
            with pytest.raises(RuntimeError):
                ours(query, key, value, **given)
        else:
            close(ours(query, key, value, **given), wanted)


def on_the_cpu(*tensors: Tensor, **given: Any) -> Tensor:
    """PyTorch's answer where an axis has no elements, for which a GPU's backends give None (torch 2.11)."""
    moved = {name: argument.cpu() if isinstance(argument, Tensor) else argument for name, argument in given.items()}
    output: Tensor = sdpa_calls.by_pytorch(*(tensor.cpu() for tensor in tensors), **moved)
    return output.cuda()


@pytest.mark.parametrize("axis", range(4))
def test_axes_of_zero_are_pytorchs(axis: int) -> None:
    shape = [2, 4, 32, 64]
    shape[axis] = 0
    for dtype in (torch.bfloat16, torch.float64):
        tensors = three(*shape, dtype=dtype)
        close(ours(*tensors, is_causal=True), on_the_cpu(*tensors, is_causal=True))
    query, _, _ = three(2, 4, 32, 64)
    _, key, value = three(2, 4, 0, 64)
    close(ours(query, key, value), on_the_cpu(query, key, value))


@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_nested_tensors_are_pytorchs_also_after_dense_ones(is_causal: bool) -> None:
    dense = three(2, 4, 64, 64)
    for _ in range(2):
        ours(*dense, is_causal=is_causal)
    rows = [torch.randn(length, 256, device="cuda", dtype=torch.bfloat16) for length in (30, 64, 7)]
    flat = torch.nested.nested_tensor(rows, layout=torch.jagged)
    query = flat.unflatten(-1, [4, 64]).transpose(1, 2)
    output, wanted = (door(query, query, query, is_causal=is_causal) for door in (ours, theirs))
    for mine, other in zip(output.unbind(), wanted.unbind(), strict=True):
        close(mine, other)
    assert autoattn.explain_sdpa(query, query, query, is_causal=is_causal).reason == "query is a nested tensor"


def test_strided_nested_tensors_do_not_meet_the_guards_of_calls_that_were_answered() -> None:
    dense = three(2, 4, 64, 64)
    for _ in range(2):
        ours(*dense)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [torch.randn(4, length, 64, device="cuda", dtype=torch.bfloat16) for length in (30, 64)]
        query = torch.nested.nested_tensor(rows, layout=torch.strided)
        for mine, other in zip(ours(query, query, query).unbind(), theirs(query, query, query).unbind(), strict=True):
            close(mine, other)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("no_shipped_cache")
def test_jit_trace_records_a_call_that_a_kernel_answered_before() -> None:
    tensors = three(1, 2, 128, 64)
    wanted = autoattn.attention(*tensors, causal=True)
    assert autoattn.explain(*tensors, causal=True).route == "kernel"
    others = [2.0 * tensor for tensor in tensors]
    for door, operator in (
        (lambda *three: autoattn.attention(*three, causal=True), "autoattn::attention"),
        (lambda *three: ours(*three, is_causal=True), "aten::scaled_dot_product_attention"),
    ):
        for _ in range(3):
            close(door(*tensors), wanted)
        traced = torch.jit.trace(door, tuple(tensors))
        assert operator in str(traced.graph)
        close(traced(*others), door(*others))


@pytest.mark.usefixtures("no_shipped_cache")
def test_symbolic_trace_keeps_a_kernel_in_attention() -> None:
    tensors = three(1, 2, 128, 64)
    traced = torch.fx.symbolic_trace(autoattn.Attention(causal=True))
    assert torch.equal(traced(*tensors), autoattn.attention(*tensors, causal=True))


def test_dropout_in_a_cuda_graph_is_pytorchs_which_draws_anew_at_each_replay() -> None:
    tensors = three(1, 2, 128, 64)
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        theirs(*tensors, dropout_p=0.5)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ours(*tensors, dropout_p=0.5)
    graph.replay()
    first = output.clone()
    graph.replay()
    assert not torch.equal(first, output)


def test_drawn_calls_that_go_to_pytorch_mean_the_same() -> None:
    """Of those that kernels may take, other tests compile kernels; here each would be another one."""
    compared = 0
    for seed in range(400):
        call = on_card(sdpa_calls.drawn(random.Random(seed)))
        words = {name: call.given.get(name) for name in ("attn_mask", "dropout_p")}
        flags = {name: call.given.get(name, False) for name in ("is_causal", "enable_gqa")}
        reason = sdpa_arguments.why_pytorch(call.query, call.key, call.value, **words, **flags)
        if reason is None and call.query.dtype is not torch.float64:
            continue
        compared += 1
        results = []
        for door in (ours, theirs):
            try:
                taken = on_the_cpu if call.is_empty and door is theirs else door
                results.append(taken(call.query, call.key, call.value, **call.given))
            except RuntimeError as error:
                results.append(error)
        output, wanted = results
        assert isinstance(output, Tensor) is isinstance(wanted, Tensor), f"{call}: {output} beside {wanted}"
        if isinstance(output, Tensor) and not call.given.get("dropout_p") and not wanted.isnan().any():
            close(output, wanted)
    assert compared > 100


def on_card(call: SdpaCall) -> SdpaCall:
    tensors = [tensor.detach().cuda() for tensor in (call.query, call.key, call.value)]
    given = {
        name: argument.detach().cuda() if isinstance(argument, Tensor) else argument
        for name, argument in call.given.items()
    }
    return SdpaCall(query=tensors[0], key=tensors[1], value=tensors[2], given=given, wrong=call.wrong)
