"""Launches of both passes that were made before: where each of their tensors lies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import gradient_kernels
import pytest
import torch
from torch import Tensor

from autoattn.codegen.render import natural_traits
from autoattn.core.problem import DType, Layout, Op
from autoattn.kernels import backward
from autoattn.kernels.compiler import Kernel
from autoattn.runtime import training_call
from autoattn.runtime.plan import gradient_problem
from autoattn.runtime.run import autograd
from autoattn.tensors.operands import Operands

ROWS, SUMS, TURNS = 2 * 2 * 4 * 128, 256, 12  # numbers of 4 bytes: a head's 33 queries take 128 rows


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The addresses of each launch of a backward pass."""
    addresses: list[tuple[int, ...]] = []
    monkeypatch.setattr(backward, "may_bind", lambda problem, query: True)
    monkeypatch.setattr(backward, "bind", lambda *facts: (addresses.append,))
    return addresses


def pair(tensors: tuple[Tensor, ...], layout: Layout, rooms: dict[str, Any]) -> training_call.TrainingCall:
    forward = gradient_kernels.problem(layout=layout, heads_q=4, heads_kv=4, seq_q=33, seq_kv=33, dtype=DType.FLOAT16)
    backward_problem = gradient_problem.backward_of(forward)
    source = gradient_kernels.source(backward_problem, natural_traits(backward_problem))
    kernel = Kernel(
        source=source,
        module=cast(Any, SimpleNamespace(**rooms)),
        compiled=object(),
        device=torch.device("cpu"),
        sm_count=1,
    )
    both = gradient_problem.Pass(problem=forward, forward=kernel, backward=kernel, backward_problem=backward_problem)
    views = [tensor.transpose(1, 2) if layout is Layout.BSHD else tensor for tensor in tensors]
    operands = Operands(query=views[0], key=views[1], value=views[2], scale=1.0)

    def run(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(query), torch.zeros(2, 4, 33)

    call = training_call.prepare(both, operands, run)
    assert call is not None
    return call


@pytest.mark.parametrize("layout", [Layout.BHSD, Layout.BSHD])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("turns", [0, TURNS])
def test_each_room_lies_behind_the_one_before(
    launched: list[tuple[int, ...]], layout: Layout, turned: bool, turns: int
) -> None:
    """Turned: as a model's projections leave heads, side by side in each token, though the layout says otherwise."""
    shape = (2, 4, 33, 16) if layout is Layout.BHSD else (2, 33, 4, 16)
    tensors = tuple(torch.randn(shape).half() for _ in range(3))
    if turned:
        tensors = tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors)
    tensors = tuple(tensor.requires_grad_() for tensor in tensors)
    rooms = {"sums": lambda *sizes: SUMS} | ({"turns": lambda *sizes: turns} if turns else {})
    call = pair(tensors, layout, rooms)
    assert call.both.backward_problem.op is Op.BACKWARD
    output = call(*tensors)
    push = torch.randn(shape).half()
    grads = torch.autograd.grad(output, tensors, push)
    (addresses,) = launched
    at = dict(zip(backward.POINTERS, addresses, strict=False))
    for name, tensor, grad in zip(("query", "key", "value"), tensors, grads, strict=True):
        assert (at[f"{name}_ptr"], at[f"{name}_grad_ptr"]) == (tensor.data_ptr(), grad.data_ptr())
        assert grad.stride() == tensor.stride()
    assert at["output_grad_ptr"] == push.data_ptr()
    places = [at[name] - at["row_lse_ptr"] for name in ("delta_ptr", "query_sums_ptr", "turns_ptr")]
    assert places == [2 * ROWS, 4 * ROWS, 4 * (ROWS + SUMS)]
    assert call.memory.numbers == ROWS + SUMS + -(-turns // 4) * 4
    assert "query_copy_ptr" not in at
    assert (at["cu_seqlens_q_ptr"], at["lse_grad_ptr"]) == (0, 0)


def test_gradients_of_shared_keys_lie_behind_the_turns(launched: list[tuple[int, ...]]) -> None:
    tensors = tuple(torch.randn(2, 4, 33, 16).half().requires_grad_() for _ in range(3))
    rooms = {"sums": lambda *sizes: SUMS, "turns": lambda *sizes: 2, "key_sums": lambda *sizes: 10}
    call = pair(tensors, Layout.BHSD, rooms)
    torch.autograd.grad(call(*tensors), tensors, torch.randn(2, 4, 33, 16).half())
    at = dict(zip(backward.POINTERS, launched[0], strict=False))
    assert at["key_sums_ptr"] - at["row_lse_ptr"] == 4 * (ROWS + SUMS + 4)
    assert call.memory.numbers == ROWS + SUMS + 4 + 12, "each room begins at a multiple of 16 bytes"


def test_turned_copies_lie_behind_the_other_rooms(launched: list[tuple[int, ...]]) -> None:
    tensors = tuple(torch.randn(2, 4, 33, 16).half().requires_grad_() for _ in range(3))
    shapes = {"query": (2, 4, 16, 128), "key": (2, 4, 16, 256), "output_grad": (2, 4, 32, 128)}
    call = pair(tensors, Layout.BHSD, {"copies": lambda *sizes: shapes, "turns": lambda *sizes: 2})
    torch.autograd.grad(call(*tensors), tensors, torch.randn(2, 4, 33, 16).half())
    at = dict(zip(backward.POINTERS, launched[0], strict=True))
    begin, (query, key, push) = ROWS + 4, (2 * 4 * 16 * 128, 2 * 4 * 16 * 256, 2 * 4 * 32 * 128)
    places = [at[f"{name}_copy_ptr"] - at["row_lse_ptr"] for name in backward.COPIES]
    assert places == [4 * begin, 4 * (begin + query), 4 * (begin + query + key)]
    assert call.memory.numbers == begin + query + key + push


def test_an_output_gradient_that_stands_for_negatives_is_copied(launched: list[tuple[int, ...]]) -> None:
    tensors = tuple(torch.randn(2, 4, 33, 16).half().requires_grad_() for _ in range(3))
    call = pair(tensors, Layout.BHSD, {"sums": lambda *sizes: SUMS})
    push = torch.randn(2, 4, 33, 16).half()
    negated = torch._neg_view(push)
    for given in (push, negated):  # the second finds the launches of the first, whose strides are the same
        call.differentiate(given, None, *(tensor.detach() for tensor in (*tensors, tensors[0])), torch.zeros(2, 4, 33))
    first, second = (dict(zip(backward.POINTERS, each, strict=False))["output_grad_ptr"] for each in launched)
    assert first == push.data_ptr() == negated.data_ptr() != second
    assert autograd.reads(call.both.backward, push)
    assert not autograd.reads(call.both.backward, negated)
