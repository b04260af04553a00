"""`autoattn.use`: a block of code calls autoattn where it calls SDPA, and nothing else changes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from replaced_calls import calls  # noqa: F401 - a fixture
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that PyTorch's own documentation uses

import autoattn


def three(seq: int = 8, *, requires_grad: bool = False) -> list[Tensor]:
    torch.manual_seed(seq)
    return [torch.randn(2, 4, seq, 16, requires_grad=requires_grad) for _ in range(3)]


def test_the_numbers_are_those_of_pytorch(calls: list[Any]) -> None:
    inputs = three()
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True)
    with autoattn.use():
        output = F.scaled_dot_product_attention(*inputs, is_causal=True)
    torch.testing.assert_close(output, expected)
    assert calls == [(2, 4, 8, 16)]


def test_a_call_that_goes_on_to_pytorch_does_not_come_back(calls: list[Any]) -> None:
    query = three()[0].double()
    with autoattn.use() as replaced:
        F.scaled_dot_product_attention(query, query, query, attn_mask=torch.ones(8, 8, dtype=torch.bool))
    assert (len(calls), replaced.calls.total()) == (1, 1)


def test_modules_of_pytorch_are_seen(calls: list[Any]) -> None:
    module, tokens = torch.nn.MultiheadAttention(64, 4, batch_first=True), torch.randn(2, 8, 64)
    with autoattn.use():
        module(tokens, tokens, tokens, need_weights=False)
    assert len(calls) == 1


def test_what_was_replaced_is_counted_with_its_reason() -> None:
    with autoattn.use() as replaced:
        assert str(replaced) == "no calls of F.scaled_dot_product_attention"
        for seq in (8, 8, 12):
            F.scaled_dot_product_attention(*three(seq))
    ((way, count),) = replaced.calls.items()
    assert count == 3
    assert way.startswith("sdpa: the tensors are on the cpu")
    assert str(replaced) == f"3 calls by {way}"


def test_the_end_restores_pytorch_also_after_an_error(calls: list[Any]) -> None:
    before = F.scaled_dot_product_attention
    with pytest.raises(KeyError), autoattn.use():
        raise KeyError
    assert F.scaled_dot_product_attention is before
    F.scaled_dot_product_attention(*three())
    assert calls == []


def test_blocks_may_be_nested(calls: list[Any]) -> None:
    with autoattn.use() as outer:
        with autoattn.use() as inner:
            F.scaled_dot_product_attention(*three())
        F.scaled_dot_product_attention(*three())
    F.scaled_dot_product_attention(*three())
    assert len(calls) == 2
    assert (outer.calls.total(), inner.calls.total()) == (1, 1)


def test_blocks_of_several_threads_may_overlap(calls: list[Any]) -> None:
    before = F.scaled_dot_product_attention
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with autoattn.use():
            entered.set()
            left.wait()
            F.scaled_dot_product_attention(*three())

    thread = threading.Thread(target=other)
    with autoattn.use():
        thread.start()
        entered.wait()
    assert F.scaled_dot_product_attention is not before  # the other block goes on
    left.set()
    thread.join()
    assert F.scaled_dot_product_attention is before
    assert len(calls) == 1


def test_a_function_that_was_kept_longer_than_the_block_is_pytorchs(calls: list[Any]) -> None:
    with autoattn.use():
        kept = F.scaled_dot_product_attention
    inputs = three()
    torch.testing.assert_close(kept(*inputs), F.scaled_dot_product_attention(*inputs))
    assert calls == []


def test_a_wrong_call_raises_as_without_the_block() -> None:
    query, key, value = three()
    with autoattn.use() as replaced, pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(query, key[:, :, :3], value)
    with autoattn.use(), pytest.raises(TypeError):
        F.scaled_dot_product_attention(query)  # type: ignore[call-arg]
    assert replaced.calls.total() <= 1


def test_gradients_and_checkpoints_run_in_the_block(calls: list[Any]) -> None:
    inputs = three(requires_grad=True)
    with autoattn.use():
        output = torch.utils.checkpoint.checkpoint(F.scaled_dot_product_attention, *inputs, use_reentrant=False)
        output.sum().backward()
    assert len(calls) == 2
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*inputs).sum(), inputs)
    torch.testing.assert_close([tensor.grad for tensor in inputs], list(expected))


def test_compiled_code_is_compiled_for_the_block_and_anew_outside() -> None:
    graphs: list[str] = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph

    def attend(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query, is_causal=True)

    query = three()[0]
    compiled = torch.compile(attend, backend=note, fullgraph=True)
    with autoattn.use():
        inside = compiled(query)
    outside = compiled(query)
    with autoattn.use():
        compiled(query)
    torch.testing.assert_close(inside, outside)
    assert ["autoattn.attention" in graph for graph in graphs] == [True, False]
