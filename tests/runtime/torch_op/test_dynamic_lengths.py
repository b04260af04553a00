"""Fifty lengths under torch.compile(dynamic=True) and torch.export: one program serves them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functional_calls import SINKS, SLOPES, noise, nothing_planned  # noqa: F401 - a fixture
from rarely import rarely
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import autoattn
from autoattn.core.mask import Mask

pytestmark = pytest.mark.sampled

ATTENTION = torch.ops.autoattn.attention.default
BACKWARD = torch.ops.autoattn.attention_backward.default

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


def with_options(options: dict[str, Any]) -> Call:
    """A call whose arguments Dynamo reads from a dict: with dynamic=True it makes symbols of their whole numbers."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return autoattn.attention(query, key, value, **options)

    return attend


def packed_with(options: dict[str, Any]) -> Call:
    """A packed call whose sequences are of at most 99 tokens."""

    def attend(query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_kv: Tensor, *_: int) -> Any:
        return autoattn.packed_attention(query, key, value, starts_q, starts_kv, 99, 99, **options)

    return attend


def packed(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_kv: Tensor, most_q: int, most_kv: int
) -> Any:
    return autoattn.packed_attention(query, key, value, starts_q, starts_kv, most_q, most_kv, causal=True)


def dense(length: int) -> list[Any]:
    return [noise(2, heads, length, 16, seed=heads) for heads in (4, 2, 2)]


def dense_bshd(length: int) -> list[Any]:
    return [tensor.transpose(1, 2).contiguous() for tensor in dense(length)]


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
    "window of symbols": (with_options({"window": (10, 2)}), dense),
    "Mask of symbols": (with_options({"mask": Mask.window(9, 2)}), dense),
    "top-left": (with_options({"causal": "top-left"}), dense),
    "softcap, bshd": (with_options({"causal": True, "softcap": 2.0, "layout": "bshd"}), dense_bshd),
    "slopes, sinks, lse": (with_options({"alibi_slopes": SLOPES, "sinks": SINKS, "return_lse": True}), dense),
    "packed window of symbols": (packed_with({"window": (5, 5), "softcap": 2.0}), ragged),
    "packed lse": (packed_with({"return_lse": True}), ragged),
}
EXPORTED = ("causal", "decode", "window", "packed")
OFTEN = (
    *(("causal", True), ("decode", True), ("packed", True), ("window of symbols", True), ("Mask of symbols", False)),
)


def first(answer: Any) -> Tensor:
    """The output, whether the LSE was returned or not."""
    output: Tensor = answer if isinstance(answer, Tensor) else answer[0]
    return output


def assert_alike(traced: Call, call: Call, given: list[Any], *, learns: bool) -> None:
    """Outputs, and gradients where they are wanted, are those of the call that nobody traced."""
    results = []
    for function in (traced, call):
        leaves = [tensor.detach().requires_grad_(learns) for tensor in given[:3]]
        output = first(function(*leaves, *given[3:]))
        grads = torch.autograd.grad(output.square().sum(), leaves) if learns else ()
        results.append([output.detach(), *grads])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("kind", "learns"),
    rarely([(kind, learns) for kind in KINDS for learns in (False, True)], lambda case: case in OFTEN),
)
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


def test_by_default_the_second_length_makes_a_symbol_and_the_others_compile_nothing() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(window, backend=counter, fullgraph=True)
    counts = []
    for length in LENGTHS:
        compiled(*dense(length))
        counts.append(counter.frame_count)
    assert counts == [1, *([2] * (len(LENGTHS) - 1))]


def test_another_width_of_a_window_is_another_graph() -> None:
    """The widths are words of the operator."""

    def attend(width: int, *three: Tensor) -> Any:
        return autoattn.attention(*three, window=(width, 0))

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    for width in (10, 11, 10):
        torch.testing.assert_close(compiled(width, *dense(40)), attend(width, *dense(40)))
    words = [node.kwargs["mask"] for graph in counter.graphs for node in graph.graph.nodes if node.target is ATTENTION]
    assert set(words) == {"window:10,0", "window:11,0"}


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
def test_shapes_of_both_passes_follow_from_symbols_without_a_guard(layout: str) -> None:
    call, tensors = KINDS["packed lse" if layout == "packed" else "softcap, bshd" if layout == "bshd" else "window"]
    given = tensors(40)[:5]
    leaves = [tensor.requires_grad_() for tensor in given[:3]]

    def both(*given: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(first(call(*given)).sum(), given[:3]))

    graph = make_fx(both, tracing_mode="symbolic")(*leaves, *given[3:])
    assert {ATTENTION, BACKWARD} <= {node.target for node in graph.graph.nodes}
    shapes = [node.meta["val"].shape for node in graph.graph.nodes if node.op == "placeholder"]
    axis = {"bhsd": 2, "bshd": 1, "packed": 0}[layout]
    symbols = {symbol for shape in shapes[:2] for symbol in shape[axis].node.expr.free_symbols}
    assert symbols
    for guard in graph.shape_env.guards:  # there is one: the query's heads are a multiple of the key's
        assert not guard.expr.free_symbols & symbols, guard


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


@pytest.mark.parametrize("kind", EXPORTED)
def test_one_exported_program_serves_fifty_lengths(kind: str) -> None:
    call, tensors = KINDS[kind]
    exported = torch.export.export(
        _Module(call), tuple(tensors(LENGTHS[5])), dynamic_shapes=(_dims(kind),), strict=False
    )
    program = exported.module()
    for length in LENGTHS:
        torch.testing.assert_close(program(*tensors(length)), call(*tensors(length)))


@pytest.mark.parametrize("strict", [False, True])
def test_one_exported_program_serves_packed_batches_of_any_number_of_sequences(strict: bool) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Any:
        return autoattn.packed_attention(query, key, value, starts, starts, 99, 99, causal=True)

    def batch(tokens: int, longest: int) -> list[Tensor]:
        starts = torch.tensor([*range(0, tokens, longest), tokens], dtype=torch.int32)
        return [*(noise(tokens, heads, 16, seed=heads) for heads in (4, 2, 2)), starts]

    tokens, offsets = torch.export.Dim("tokens"), torch.export.Dim("offsets")
    dims = (({0: tokens}, {0: tokens}, {0: tokens}, {0: offsets}),)
    exported = torch.export.export(_Module(attend), tuple(batch(90, 30)), dynamic_shapes=dims, strict=strict)
    assert ATTENTION in [node.target for node in exported.graph.nodes]
    program = exported.module()
    for length in LENGTHS:
        given = batch(length + 30, 3 + length % 17)
        torch.testing.assert_close(program(*given), attend(*given))
