"""Compiled calls on a real GPU: kernels answer them, in CUDA graphs too, and gradients are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functional_calls_gpu import TOLERANCE, largest_error, launched, no_shipped_cache, normal  # noqa: F401 - fixtures
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from tuned_gradients import tuned  # noqa: F401 - a fixture

import autoattn

pytestmark = pytest.mark.gpu
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window, softcap": {"window": (100, 0), "softcap": 20.0},
    "score_mod": {"score_mod": "score + 0.01 * (q_idx - kv_idx)"},
    "bshd": {"layout": "bshd", "causal": True},
}


@pytest.fixture(autouse=True)
def nothing_traced() -> None:
    torch._dynamo.reset()
    counters.clear()


def whole(function: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, **given)
    return compiled


def tensors(seq: int = 512, heads_kv: int = 2, layout: str = "bhsd") -> list[Tensor]:
    three = [normal(2, heads, seq, 64) for heads in (4, heads_kv, heads_kv)]
    return [tensor.transpose(1, 2).contiguous() for tensor in three] if layout == "bshd" else three


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_runs_the_kernel_of_an_eager_one(name: str, backend: str, launched: list[Any]) -> None:
    given = CALLS[name]
    three = tensors(layout=given.get("layout", "bhsd"))
    traced = whole(lambda *all_three: autoattn.attention(*all_three, **given), backend=backend)
    expected = autoattn.attention(*three, **given)
    traced(*three)
    launched.clear()
    output = traced(*three)
    assert launched
    assert torch.equal(output, expected)
    assert autoattn.explain(*three, **given).route == "kernel"


def test_a_compiled_packed_call_runs_the_kernel_of_an_eager_one(launched: list[Any]) -> None:
    tokens = [normal(700, heads, 64) for heads in (4, 2, 2)]
    offsets = torch.tensor([0, 100, 100, 650], dtype=torch.int32, device="cuda")

    def function(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        output_and_lse: Any = autoattn.packed_attention(
            query, key, value, offsets, offsets, 550, 550, causal=True, return_lse=True
        )
        return output_and_lse

    expected = function(*tokens, offsets)  # type: ignore[call-arg]
    traced = whole(function)
    traced(*tokens, offsets)
    launched.clear()
    for mine, other in zip(traced(*tokens, offsets), expected, strict=True):
        assert torch.equal(mine, other)
    assert launched


@pytest.mark.parametrize("name", ["causal", "window, softcap"])
def test_cuda_graphs_of_torch_compile_replay_the_kernel(name: str, launched: list[Any]) -> None:
    given = CALLS[name]

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first_output = autoattn.attention(query.sin(), key, value, **given)
        assert isinstance(first_output, Tensor)
        return 2.0 * autoattn.attention(first_output, key, value, **given)

    traced, plain = whole(function, mode="reduce-overhead"), whole(function)  # Inductor rounds sin() in its own way
    with torch.no_grad():
        for _ in range(6):
            three = tensors()
            torch.compiler.cudagraph_mark_step_begin()
            launched.clear()
            output = traced(*three).clone()
            assert torch.equal(output, plain(*three))
        torch.compiler.cudagraph_mark_step_begin()
        launched.clear()
        traced(*three)
    assert launched == []  # a replay launches the graph
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_another_length_is_not_compiled_again() -> None:
    counter = CompileCounterWithBackend("inductor")
    traced = whole(lambda *three: autoattn.attention(*three, causal=True), backend=counter)
    for seq in (256, 300, 512, 77, 1024):
        three = tensors(seq)
        assert torch.equal(traced(*three), autoattn.attention(*three, causal=True))
    assert counter.frame_count == 2


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("given", [{"window": (100, 0)}, {"softcap": 20.0, "causal": True}], ids=str)
def test_a_compiled_training_step_runs_the_kernel_and_its_gradients_are_right(
    given: dict[str, Any], checkpointed: bool, launched: list[Any]
) -> None:
    def block(*three: Tensor) -> Tensor:
        output = autoattn.attention(*three, **given)
        assert isinstance(output, Tensor)
        return output

    def function(*three: Tensor) -> Tensor:
        return checkpoint(block, *three, use_reentrant=False) if checkpointed else block(*three)

    ours = [tensor.requires_grad_() for tensor in tensors(300)]
    theirs = [tensor.detach().float().requires_grad_() for tensor in ours]
    push = normal(2, 4, 300, 64)
    whole(function)(*ours).backward(push)
    assert launched
    block(*theirs).backward(push.float())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert float((mine.grad.float() - other.grad).abs().max()) <= 0.03 * max(1.0, float(other.grad.abs().max()))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("given", [{"causal": True}, {"window": (100, 0), "layout": "bshd"}], ids=str)
def test_a_compiled_step_runs_the_kernels_of_an_eager_one(
    tuned: Any,
    given: dict[str, Any],
    mode: str,
    launched: list[Any],
) -> None:
    """Both passes once: nothing is computed again where gradients were tuned."""
    three = [tensor.requires_grad_() for tensor in tensors(layout=given.get("layout", "bhsd"))]
    tuned(*three, **given)
    push = torch.randn_like(three[0])

    def step(function: Callable[..., Tensor]) -> list[Tensor]:
        output = function(*three)
        return [output.detach().clone(), *(grad.clone() for grad in torch.autograd.grad(output, three, push))]

    def attend(*all_three: Tensor) -> Tensor:
        output = autoattn.attention(*all_three, **given)
        assert isinstance(output, Tensor)
        return output

    step(attend)
    launched.clear()
    expected = step(attend)
    kernels = len(launched)
    traced = whole(attend, mode=mode)
    for _ in range(4):
        launched.clear()
        answers = step(traced)
        assert all(torch.equal(mine, other) for mine, other in zip(answers, expected, strict=True))
    assert len(launched) == (0 if mode == "reduce-overhead" else kernels)


def test_a_training_step_saves_nothing_that_grows_with_the_square_of_the_length() -> None:
    three = [normal(1, 2, 8192, 64).requires_grad_() for _ in range(3)]
    traced = whole(lambda *all_three: autoattn.attention(*all_three, causal=True))
    traced(*three).sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    traced(*three).sum().backward()
    matrix = 2 * 8192 * 8192 * 2
    assert torch.cuda.max_memory_allocated() - before < matrix / 4


def test_autocast_gives_the_kernel_of_the_low_precision(launched: list[Any]) -> None:
    three = [tensor.float() for tensor in tensors()]
    traced = whole(lambda *all_three: autoattn.attention(*all_three, causal=True))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = traced(*three)
        expected = autoattn.attention(*three, causal=True)
    assert output.dtype is torch.bfloat16
    assert torch.equal(output, expected)
    assert launched
    low = [tensor.bfloat16() for tensor in three]
    assert largest_error(output, *low, causal=True) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("learns", [False, True])
def test_pytorchs_own_checks_pass(learns: bool) -> None:
    three = [tensor.requires_grad_(learns) for tensor in tensors(128)]
    opcheck(torch.ops.autoattn.attention.default, tuple(three), {"mask": "causal", "return_lse": True})


def test_vmap_runs_the_kernel_for_each(launched: list[Any]) -> None:
    query, key, value = tensors()
    queries = torch.stack((query, -query))
    output = torch.vmap(lambda sample: autoattn.attention(sample, key, value))(queries)
    assert len(launched) >= 2
    for answer, expected in zip(output, queries, strict=True):
        assert torch.equal(answer, autoattn.attention(expected, key, value))
