"""Fifty lengths under torch.compile(dynamic=True) and torch.export: one program serves them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functional_calls import noise, nothing_planned  # noqa: F401 - a fixture
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import autoattn

LENGTHS = range(20, 70)  # PyTorch takes sizes that agree in the first call, such as batch and length, for one symbol
Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def nothing_traced() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def causal(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return autoattn.attention(query, key, value, causal=True)


def decode(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return autoattn.attention(query, key, value, scale=0.3)


def window(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return autoattn.attention(query, key, value, window=(16, 0))


def packed(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_kv: Tensor, most_q: int, most_kv: int
) -> Any:
    return autoattn.packed_attention(query, key, value, starts_q, starts_kv, most_q, most_kv, causal=True)


def dense(length: int) -> list[Any]:
    return [noise(2, heads, length, 16, seed=heads) for heads in (4, 2, 2)]


def growing(length: int) -> list[Any]:
    """One query, and views of a longer cache of keys."""
    return [noise(2, 4, 1, 16), *(noise(2, 2, 99, 16, seed=seed)[:, :, :length] for seed in (1, 2))]


def ragged(length: int) -> list[Any]:
    queries, keys = (length, 3, length % 7), (length + 1 + length % 5, 3, length % 11)
    starts = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (queries, keys)]
    tokens = int(starts[0][-1]), int(starts[1][-1])
    tensors = noise(tokens[0], 4, 16, seed=1), noise(tokens[1], 2, 16, seed=2), noise(tokens[1], 2, 16, seed=3)
    return [*tensors, *starts, max(queries), max(keys)]


KINDS: dict[str, tuple[Call, Callable[[int], list[Any]]]] = {
    "causal": (causal, dense),
    "decode": (decode, growing),
    "window": (window, dense),
    "packed": (packed, ragged),
}


def assert_alike(traced: Call, call: Call, given: list[Any], *, learns: bool) -> None:
    """Outputs, and gradients where they are wanted, are those of the call that nobody traced."""
    results = []
    for function in (traced, call):
        leaves = [tensor.detach().requires_grad_(learns) for tensor in given[:3]]
        output = function(*leaves, *given[3:])
        grads = torch.autograd.grad(output.square().sum(), leaves) if learns else ()
        results.append([output.detach(), *grads])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_lengths_are_compiled_once(kind: str, learns: bool) -> None:
    call, tensors = KINDS[kind]
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    assert_alike(traced, call, tensors(LENGTHS[0]), learns=learns)
    compiled = counter.frame_count
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in LENGTHS:
            assert_alike(traced, call, tensors(length), learns=learns)
    assert counter.frame_count == compiled > 0


class _Module(torch.nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, *given: Any) -> Any:
        return self.call(*given)


def _dims(kind: str) -> tuple[Any, ...]:
    """Which sizes of the arguments are symbols."""
    queries, keys = torch.export.Dim("queries", min=2), torch.export.Dim("keys", min=2)
    if kind == "packed":
        most = torch.export.Dim.DYNAMIC
        return ({0: queries}, {0: keys}, {0: keys}, None, None, most, most)
    if kind == "decode":
        keys = torch.export.Dim("keys", min=2, max=98)  # fewer than the cache holds
        return (None, {2: keys}, {2: keys})
    return ({2: queries}, {2: keys}, {2: keys})


@pytest.mark.parametrize("kind", KINDS)
def test_one_exported_program_serves_fifty_lengths(kind: str) -> None:
    call, tensors = KINDS[kind]
    exported = torch.export.export(
        _Module(call), tuple(tensors(LENGTHS[5])), dynamic_shapes=(_dims(kind),), strict=False
    )
    program = exported.module()
    for length in LENGTHS:
        torch.testing.assert_close(program(*tensors(length)), call(*tensors(length)))
