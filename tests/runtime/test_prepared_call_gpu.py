"""Prepared answers on a real GPU: the bits of the ordinary way's, in graphs, on side streams and on other cards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from threads import together
from torch import Tensor

import autoattn
from autoattn import functional
from autoattn.runtime import call_cache
from autoattn.runtime.plan.reasons import Reasons

pytestmark = pytest.mark.gpu

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal with lse": {"causal": True, "return_lse": True},
    "window": {"window": (64, 0)},
    "softcap": {"softcap": 5.0, "scale": 0.3},
    "bshd": {"layout": "bshd", "causal": True, "return_lse": True},
}


@pytest.fixture(autouse=True)
def no_shipped_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """Without a cache the template's default runs, so that a rival's choice hides no kernel."""
    monkeypatch.setattr("autoattn.codegen.resources.shipped_cache", lambda: tmp_path)
    functional.forget()
    torch.manual_seed(0)
    yield
    functional.forget()


def three(seq: int = 256, heads: int = 4, head_dim: int = 64, device: str = "cuda") -> list[Tensor]:
    return [torch.randn(2, heads, seq, head_dim, device=device).bfloat16() for _ in range(3)]


def ordinary(call: Callable[[], Any]) -> Any:
    """What a call gives that finds nothing prepared."""
    with (
        mock.patch.object(call_cache, "find", return_value=None),
        mock.patch.object(call_cache, "find_guarded", return_value=None),
    ):
        return call()


def same(first: Any, second: Any) -> bool:
    first_tensors, second_tensors = (answer if isinstance(answer, tuple) else (answer,) for answer in (first, second))
    return all(
        torch.equal(left, right) and left.stride() == right.stride()
        for left, right in zip(first_tensors, second_tensors, strict=True)
    )


def count() -> int:
    return call_cache.info().calls


@pytest.mark.parametrize("name", CALLS)
def test_a_prepared_call_gives_the_bits_of_the_ordinary_one(name: str) -> None:
    first, second = three(), three()
    autoattn.attention(*first, **CALLS[name])
    assert count() == 1
    output = autoattn.attention(*second, **CALLS[name])
    assert count() == 1
    assert same(output, ordinary(lambda: autoattn.attention(*second, **CALLS[name])))


def test_ten_thousand_calls_give_the_same() -> None:
    query, key, value = three(seq=64)
    wanted = ordinary(lambda: autoattn.attention(query, key, value, causal=True))
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        different += (autoattn.attention(query, key, value, causal=True) != wanted).sum()
    assert int(different) == 0


def test_other_addresses_alignments_and_strides_are_told_apart() -> None:
    room = torch.randn(3, 2 * 4 * 100 * 64 + 64, device="cuda").bfloat16()
    for shift in (0, 8, 1, 2, 4, 0, 16, 3, 1):
        tensors = [row[shift : shift + 2 * 4 * 100 * 64].view(2, 4, 100, 64) for row in room]
        output = autoattn.attention(*tensors)
        assert torch.equal(output, ordinary(lambda given=tensors: autoattn.attention(*given))), shift
    wide = torch.randn(3, 2, 4, 100, 80, device="cuda").bfloat16()
    for head_dim in (64, 72, 64, 57):
        tensors = [tensor[..., :head_dim] for tensor in wide]
        output = autoattn.attention(*tensors)
        assert torch.equal(output, ordinary(lambda given=tensors: autoattn.attention(*given))), head_dim


def test_a_graph_holds_prepared_calls_and_follows_its_inputs() -> None:
    query, key, value = three()
    autoattn.attention(query, key, value, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = autoattn.attention(autoattn.attention(query, key, value, causal=True), key, value, causal=True)
    query.copy_(torch.randn_like(query))
    graph.replay()
    torch.cuda.synchronize()
    inner = ordinary(lambda: autoattn.attention(query, key, value, causal=True))
    assert torch.equal(output, ordinary(lambda: autoattn.attention(inner, key, value, causal=True)))


def test_a_graph_that_met_no_kernel_prepares_nothing() -> None:
    query, key, value = three(seq=320)
    torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        autoattn.attention(query, key, value)
    assert count() == 0
    autoattn.attention(query, key, value)
    assert count() == 1
    assert autoattn.explain(query, key, value).route == "kernel"


def test_a_side_stream_orders_a_prepared_launch() -> None:
    query, key, value = three(seq=1024)
    autoattn.attention(query, key, value)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        query.normal_()
        output = autoattn.attention(query, key, value)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(output, ordinary(lambda: autoattn.attention(query, key, value)))


def test_tensors_on_another_card_than_the_current_one_are_launched_there() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    here, there = three(device="cuda:0"), three(device="cuda:1")
    for tensors in (here, there):
        for _ in range(2):
            output = autoattn.attention(*tensors)
            assert output.device == tensors[0].device
            assert torch.cuda.current_device() == 0
        assert torch.equal(output, ordinary(lambda given=tensors: autoattn.attention(*given)))
    assert count() == 2
    with torch.cuda.device(1):
        assert torch.equal(autoattn.attention(*here), ordinary(lambda: autoattn.attention(*here)))


def test_packed_calls_are_prepared_and_follow_their_offsets() -> None:
    query, key, value = (torch.randn(200, 4, 64, device="cuda").bfloat16() for _ in range(3))
    for split in (50, 120, 50):
        offsets = torch.tensor([0, split, 200], dtype=torch.int32, device="cuda")
        given = (query, key, value, offsets, offsets, 150, 150)
        output_and_lse = autoattn.packed_attention(*given, causal=True, return_lse=True)
        assert same(
            output_and_lse,
            ordinary(lambda arguments=given: autoattn.packed_attention(*arguments, causal=True, return_lse=True)),
        )
    assert count() == 1


def test_launch_hooks_see_prepared_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = three()
    autoattn.attention(*tensors)
    seen: list[Any] = []
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda facts: seen.append(facts.get()["name"]))
    autoattn.attention(*tensors)
    assert len(seen) == 1


def test_a_gradient_that_is_wanted_later_goes_to_pytorch() -> None:
    query, key, value = three()
    for _ in range(2):
        assert not autoattn.attention(query, key, value).requires_grad
    query.requires_grad_()
    for _ in range(2):
        output = autoattn.attention(query, key, value)
        assert output.requires_grad
    output.float().sum().backward()
    assert query.grad is not None
    with torch.no_grad():
        assert not autoattn.attention(query, key, value).requires_grad
    assert count() == 2


def test_threads_on_streams_of_their_own_get_what_is_theirs() -> None:
    inputs = [three(seq=64 + 32 * (number % 2)) for number in range(4)]
    wanted = [autoattn.attention(*tensors) for tensors in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(300):
                if not torch.equal(autoattn.attention(*inputs[number]), wanted[number]):
                    wrong.append(number)

    together(work)
    assert wrong == []


@pytest.mark.parametrize("backend", ["sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient"])
def test_a_rival_is_called_with_its_backend_alone_and_leaves_the_switches(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autoattn.runtime.plan import cache_lookup, explanations
    from autoattn.runtime.plan.explanations import Level

    chosen = explanations.Explanation(
        problem=None, route=backend, level=Level.EXACT, reasons=Reasons("it was the fastest")
    )
    monkeypatch.setattr(cache_lookup, "explain", lambda problem, device, folder: chosen)
    cuda = torch.backends.cuda
    switches = (
        cuda.flash_sdp_enabled, cuda.cudnn_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled,
    )  # fmt: skip
    before = [enabled() for enabled in switches]
    tensors = three()
    first = autoattn.attention(*tensors, causal=True)
    assert count() == 1
    assert torch.equal(autoattn.attention(*tensors, causal=True), first)
    assert [enabled() for enabled in switches] == before
