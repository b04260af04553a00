"""Short training calls on a real GPU: PyTorch's attention, unless a CUDA graph is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from functional_calls_gpu import launched, normal  # noqa: F401 - a fixture
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

import autoattn
from autoattn import functional, torch_private
from autoattn.baselines import pytorch_sdpa
from autoattn.cache import store
from autoattn.codegen import search_space
from autoattn.hardware import nvidia
from autoattn.runtime.plan import gradient_problem

pytestmark = pytest.mark.gpu


ROUTES = ("sdpa", "sdpa-flash", "sdpa-efficient")


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> str:
    """Who answers in place of the kernels."""
    backend: str = request.param
    return backend


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, route: str) -> Iterator[list[Tensor]]:
    """Query, key and value of a causal call, whose passes are tuned as if each took the GPU 20 us."""
    monkeypatch.setenv("AUTOATTN_CACHE", str(tmp_path))
    functional.forget()
    torch._dynamo.reset()
    tensors, device = [normal(4, 12, 256, 64).requires_grad_() for _ in range(3)], nvidia.present()
    assert device is not None
    with torch.no_grad():
        problem = autoattn.explain(*tensors, causal=True).problem
    assert problem is not None
    for each, family in ((problem, "triton/forward"), (gradient_problem.backward_of(problem), "triton/backward")):
        variant = search_space.load(family).default(each, device)
        entry = samples.beside(samples.tuned(each, variant, time_us=20.0), {"sdpa": 0.9, route: 1.2})
        store.merge(tmp_path, device, each.op, [entry])
    functional.forget()
    with torch_private.without_autograd_cache():  # it would give the graph of the route before
        yield tensors
    functional.forget()


def step(attend: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    output = attend(*tensors, causal=True)
    return [output, *torch.autograd.grad(output, tensors, torch.ones_like(output))]


def expected(tensors: list[Tensor], route: str = pytorch_sdpa.SDPA) -> list[Tensor]:
    with contextlib.nullcontext() if route == pytorch_sdpa.SDPA else sdpa_kernel(pytorch_sdpa.BACKENDS[route]):
        return step(
            lambda *given, causal: torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal), tensors
        )


@pytest.mark.parametrize("compiled", [False, True])
def test_a_short_step_runs_what_pytorch_runs(
    three: list[Tensor], launched: list[Any], compiled: bool, route: str
) -> None:
    attend = torch.compile(autoattn.attention, fullgraph=True) if compiled else autoattn.attention
    for _ in range(3):
        step(attend, three)
    launched.clear()
    for ours, theirs in zip(step(attend, three), expected(three, route), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    assert not [launch for launch in launched if launch.get()["name"].startswith(("forward", "backward"))]
    assert autoattn.explain(*three, causal=True).route == route
    if route != pytorch_sdpa.SDPA:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(attend, three)
        name = f"aten::_scaled_dot_product_{route.removeprefix('sdpa-')}_attention"
        assert name in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", pytorch_sdpa.BACKENDS)
def test_a_backends_operator_gives_what_the_backend_gives(backend: str, causal: bool) -> None:
    """The forward pass to the bit; backward passes add up in any order."""
    tensors = [normal(4, 256, 12, 64).transpose(1, 2).requires_grad_() for _ in range(3)]
    problem = autoattn.explain(*tensors, causal=causal).problem
    assert problem is not None
    bound = pytorch_sdpa.bind(problem, 0.2, backend)
    assert bound is not None

    def named(*given: Tensor) -> Tensor:
        with sdpa_kernel(pytorch_sdpa.BACKENDS[backend]):
            return torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal, scale=0.2)

    (output, *grads), (expected_output, *expected_grads) = (
        step(lambda *given, causal, attend=attend: attend(*given), tensors) for attend in (bound, named)
    )
    assert torch.equal(output, expected_output)
    assert output.stride() == expected_output.stride()
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        alone = pytorch_sdpa.bind(problem, 0.2, backend, learns=False)
        assert alone is not None
        assert torch.equal(alone(*tensors), expected_output)


def test_torch_func_differentiates_a_short_call(three: list[Tensor]) -> None:
    """A transform takes PyTorch's attention as it is, whichever backend was chosen outside."""
    step(autoattn.attention, three)
    step(autoattn.attention, three)
    given = [tensor.detach() for tensor in three]
    ours = torch.func.grad(lambda *three: autoattn.attention(*three, causal=True).sum(), (0, 1, 2))(*given)
    for gradient, theirs in zip(ours, expected(three)[1:], strict=True):
        torch.testing.assert_close(gradient, theirs, rtol=1e-2, atol=1e-2)


def test_checkpoints_of_a_short_call_give_the_same_gradients(three: list[Tensor], route: str) -> None:
    for _ in range(3):
        output = checkpoint(lambda *three: autoattn.attention(*three, causal=True), *three, use_reentrant=False)
        gradients = torch.autograd.grad(output, three, torch.ones_like(output))
        for ours, theirs in zip(gradients, expected(three, route)[1:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_an_operator_alone_sees_what_autocast_asks_for(three: list[Tensor]) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        for _ in range(3):
            assert autoattn.attention(*three, causal=True).dtype is three[0].dtype  # type: ignore[union-attr]
        with torch.autocast("cuda", dtype):
            for _ in range(3):
                assert autoattn.attention(*three, causal=True).dtype is dtype  # type: ignore[union-attr]


@pytest.mark.parametrize("prepared", [False, True])
def test_a_cuda_graph_holds_kernels(three: list[Tensor], launched: list[Any], prepared: bool) -> None:
    step(autoattn.attention, three)
    if not prepared:
        autoattn.runtime.call_cache.clear()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    launched.clear()
    with torch.cuda.graph(graph, stream=side):
        answers = step(autoattn.attention, three)
    assert len(launched) >= 3
    graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(answers, expected(three), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_reduce_overhead_holds_kernels(three: list[Tensor], launched: list[Any]) -> None:
    attend = torch.compile(autoattn.attention, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        answers = [tensor.clone() for tensor in step(attend, three)]
    assert len(launched) >= 3
    for ours, theirs in zip(answers, expected(three), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
