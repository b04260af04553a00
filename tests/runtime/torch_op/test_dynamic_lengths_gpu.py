"""Fifty lengths of one compiled function, one CUDA graph of ten ragged batches, and new lengths of many streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import formula
import pytest
import torch
from functional_calls_gpu import TOLERANCE, band, no_shipped_cache, normal  # noqa: F401 - a fixture
from threads import together
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import autoattn
from autoattn.errors import TensorError

pytestmark = pytest.mark.gpu
NEAR = TOLERANCE[torch.bfloat16]
Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def nothing_traced() -> None:
    torch._dynamo.reset()


def exact(query: Tensor, key: Tensor, value: Tensor, **words: Any) -> Tensor:
    """The output in float64 of [batch, heads, seq, head_dim] tensors."""
    return formula.attention(query, key, value, keep=band(query.shape[2], key.shape[2], **words))[0]


def assert_near(ours: Tensor, expected: Tensor, tolerance: float = NEAR) -> None:
    error = float((ours.detach().double() - expected.detach().double()).abs().max())
    assert error <= tolerance * max(1.0, float(expected.detach().abs().max()))


def three(queries: int, keys: int) -> list[Tensor]:
    return [normal(2, heads, seq, 64) for heads, seq in ((4, queries), (2, keys), (2, keys))]


KINDS: dict[str, tuple[dict[str, Any], Callable[[int], list[Tensor]]]] = {
    "causal": ({"causal": True}, lambda length: three(length, length)),
    "decode": ({}, lambda length: three(1, length)),
    "window": ({"window": (50, 0)}, lambda length: three(length, length)),
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_lengths_are_compiled_no_more_after_the_second(kind: str, learns: bool) -> None:
    words, tensors = KINDS[kind]
    counter = CompileCounterWithBackend("inductor")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return autoattn.attention(query, key, value, **words)

    traced = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    compiled = []
    for length in range(120, 170):
        leaves = [tensor.requires_grad_(learns) for tensor in tensors(length)]
        doubles = [tensor.detach().double().requires_grad_(learns) for tensor in leaves]
        output, expected = traced(*leaves), exact(*doubles, **words)
        assert_near(output, expected)
        if learns:
            push = torch.randn_like(output)
            gradients = torch.autograd.grad(output, leaves, push)
            for ours, other in zip(gradients, torch.autograd.grad(expected, doubles, push.double()), strict=True):
                assert_near(ours, other)
        compiled.append(counter.frame_count)
    assert compiled[-1] == compiled[1]


def packed_exact(tensors: list[Tensor], ends: list[int]) -> Tensor:
    """The causal output of packed sequences in float64, one sequence after the other."""
    outputs = []
    for start, end in zip([0, *ends], ends, strict=False):
        if end > start:
            part = [tensor[start:end].transpose(0, 1)[None] for tensor in tensors]
            outputs.append(exact(*part, causal=True)[0].transpose(0, 1))
    return torch.cat(outputs)


BATCHES = [
    [100, 250, 400], [1, 2, 400], [0, 0, 400], [200, 200, 400], [199, 399, 400], [10, 20, 30], [128, 256, 384],
    [0, 200, 200], [3, 130, 330], [77, 177, 377],
]  # fmt: skip


def test_a_graph_follows_lengths_that_are_written_into_its_offsets() -> None:
    tensors = [normal(400, heads, 64) for heads in (4, 2, 2)]
    starts = torch.tensor([0, 150, 300, 400], dtype=torch.int32, device="cuda")

    def attend() -> Any:
        return autoattn.packed_attention(*tensors, starts, starts, 400, 400, causal=True)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend()
    for ends in BATCHES:
        starts.copy_(torch.tensor([0, *ends], dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert_near(output[: ends[-1]], packed_exact(tensors, ends))
    starts.copy_(torch.tensor([0, 300, 100, 400], dtype=torch.int32))
    graph.replay()  # wrong offsets give wrong rows, and touch no foreign memory
    torch.cuda.synchronize()
    with pytest.raises(TensorError, match="never decrease"):
        attend()


def test_a_captured_training_step_follows_lengths_that_are_written_into_its_offsets() -> None:
    leaves = [normal(400, heads, 64).requires_grad_() for heads in (4, 2, 2)]
    starts = torch.tensor([0, 150, 300, 400], dtype=torch.int32, device="cuda")
    push = torch.randn_like(leaves[0])

    def step(starts: Tensor) -> list[Tensor]:
        output: Any = autoattn.packed_attention(*leaves, starts, starts, 400, 400, window=(100, 0), softcap=20.0)
        return [output.detach(), *torch.autograd.grad(output, leaves, push)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # autograd's own rule for what is captured
        for _ in range(3):
            step(starts)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(starts)
    for ends in BATCHES:
        starts.copy_(torch.tensor([0, *ends], dtype=torch.int32))
        graph.replay()
        for ours, expected in zip(results, step(starts.clone()), strict=True):
            assert_near(ours, expected)
        assert not results[0][ends[-1] :].any()  # tokens behind the last sequence


def test_offsets_on_another_device_are_refused() -> None:
    tensors = [normal(400, 4, 64) for _ in range(3)]
    starts = torch.tensor([0, 150, 400], dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(TensorError, match="must be on the query's device cuda:0, got cpu; move it"):
            autoattn.packed_attention(*tensors, starts, starts.cuda(), 400, 400)


def test_threads_on_streams_of_their_own_meet_new_lengths_at_once() -> None:
    room = three(900, 900)
    expected = {length: exact(*(t[:, :, :length] for t in room), causal=True) for length in range(600, 900, 5)}
    torch.cuda.synchronize()
    wrong: list[int] = []
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for length in list(expected)[:: 1 if number % 2 else -1]:
                    output = autoattn.attention(*(tensor[:, :, :length] for tensor in room), causal=True)
                    if float((output.double() - expected[length]).abs().max()) > NEAR:  # type: ignore[union-attr]
                        wrong.append(length)
        except BaseException as error:
            failed.append(error)

    together(work)
    assert (wrong, failed) == ([], [])
