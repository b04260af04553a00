"""Short training calls on a real GPU: PyTorch's attention, unless a CUDA graph is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from functional_calls_gpu import launched, normal  # noqa: F401 - a fixture
from torch import Tensor

import autoattn
from autoattn import cache, functional, gpu, learning, space

pytestmark = pytest.mark.gpu


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Tensor]]:
    """Query, key and value of a causal call, whose passes are tuned as if each took the GPU 20 us."""
    monkeypatch.setenv("AUTOATTN_CACHE", str(tmp_path))
    functional.forget()
    torch._dynamo.reset()
    found, device = [normal(4, 12, 256, 64).requires_grad_() for _ in range(3)], gpu.present()
    assert device is not None
    with torch.no_grad():
        one = autoattn.explain(*found, causal=True).problem
    assert one is not None
    for each, family in ((one, "triton/forward"), (learning.backward_of(one), "triton/backward")):
        variant = space.load(family).default(each, device)
        cache.merge(tmp_path, device, each.op, [samples.tuned(each, variant, time_us=20.0)])
    functional.forget()
    yield found
    functional.forget()


def step(attend: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    output = attend(*tensors, causal=True)
    return [output, *torch.autograd.grad(output, tensors, torch.ones_like(output))]


def expected(tensors: list[Tensor]) -> list[Tensor]:
    return step(
        lambda *given, causal: torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal), tensors
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_a_short_step_runs_what_pytorch_runs(three: list[Tensor], launched: list[Any], compiled: bool) -> None:
    attend = torch.compile(autoattn.attention, fullgraph=True) if compiled else autoattn.attention
    step(attend, three)
    launched.clear()
    for ours, theirs in zip(step(attend, three), expected(three), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    assert not [one for one in launched if one.get()["name"].startswith(("forward", "backward"))]
    assert autoattn.explain(*three, causal=True).route == "sdpa"


@pytest.mark.parametrize("prepared", [False, True])
def test_a_cuda_graph_holds_kernels(three: list[Tensor], launched: list[Any], prepared: bool) -> None:
    step(autoattn.attention, three)
    if not prepared:
        autoattn.prepared.forget()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    launched.clear()
    with torch.cuda.graph(graph, stream=side):
        found = step(autoattn.attention, three)
    assert len(launched) >= 3
    graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(found, expected(three), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_reduce_overhead_holds_kernels(three: list[Tensor], launched: list[Any]) -> None:
    attend = torch.compile(autoattn.attention, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = [one.clone() for one in step(attend, three)]
    assert len(launched) >= 3
    for ours, theirs in zip(found, expected(three), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
