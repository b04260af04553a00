"""Calls on a part of the keys: by kernels, which take the output and LSE of all keys, and by PyTorch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from computed_launches import card, enter, tune  # noqa: F401 - a fixture
from torch import Tensor

import autoattn
from autoattn import functional
from autoattn.core.problem import Problem
from autoattn.distributed import merging, partial_call
from autoattn.distributed.partial_call import Packing, Terms
from autoattn.distributed.rectangles import Rectangle
from autoattn.kernels import backward, merge
from autoattn.kernels.compiler import Kernel
from autoattn.reference import merge_formula
from autoattn.runtime.torch_op.kernel_choices import KernelChoices
from autoattn.tensors.operands import Gradients, Operands, Saved
from autoattn.tensors.partial_outputs import PartialOutputs

TERMS = Terms(scale=None, softcap=0.0, deterministic=False, learns=True)


def differentiate(kernel: Kernel, problem: Problem, operands: Operands, saved: Saved, gradients: Gradients) -> None:
    """As a kernel does it without a mask: weights are those that the given LSE makes."""
    groups = operands.query.shape[1] // operands.key.shape[1]
    query, pull = operands.query.float(), saved.output_grad.float()
    key, value = (tensor.float().repeat_interleave(groups, 1) for tensor in (operands.key, operands.value))
    weights = torch.exp(query @ key.mT * operands.scale - saved.lse[..., None])
    inner = weights * (pull @ value.mT - (pull * saved.output.float()).sum(-1, keepdim=True)) * operands.scale
    gradients.query.copy_(inner @ key)
    for room, gradient in ((gradients.key, inner.mT @ query), (gradients.value, weights.mT @ pull)):
        room.copy_(gradient.unflatten(1, (-1, groups)).sum(2))


def merge_in_place(kernel: Kernel, parts: PartialOutputs) -> None:
    """As the kernel does it."""
    for room, merged in zip((parts.first, parts.first_lse), merge_formula.merge(parts), strict=True):
        room.copy_(merged)


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the output's gradient, [batch, seq, heads, head_dim]."""
    torch.manual_seed(0)
    shapes = (1, 32, 4, 16), (1, 64, 2, 16), (1, 64, 2, 16), (1, 32, 4, 16)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def by_halves(query: Tensor, key: Tensor, value: Tensor, pull: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of two calls on half of the keys each."""
    halves = [(query, *(tensor[:, half : half + 32] for tensor in (key, value))) for half in (0, 32)]
    merged = merging.MergedOutput(query.shape, query.dtype, 1, wide=True)
    for three in halves:
        merged.add(*partial_call.attend(three, (-1, -1), TERMS, None, None), (0, 32))
    answer = merged.result(query.device)
    gradients = [partial_call.differentiate(three, (-1, -1), TERMS, None, answer, (pull, None)) for three in halves]
    first, second = gradients
    return answer[0], [
        first.query + second.query,
        torch.cat([first.key, second.key], 1),
        torch.cat([first.value, second.value], 1),
    ]


def whole(query: Tensor, key: Tensor, value: Tensor, pull: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    output = autoattn.attention(*leaves, layout="bshd")
    return output.detach(), list(torch.autograd.grad(output, leaves, pull.double()))


def test_kernels_of_both_passes_get_the_output_and_the_lse_of_all_keys(
    card: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = tensors(torch.float16)
    tune(card, [given[0], *(tensor[:, :32] for tensor in given[1:3])], layout="bshd")
    monkeypatch.setattr(backward, "launch", differentiate)
    monkeypatch.setattr(backward, "may_bind", lambda problem, query: False)
    monkeypatch.setattr(merge, "launch_in_place", merge_in_place)
    output, gradients = by_halves(*given)
    assert card["forward"] == 2
    expected, expected_gradients = whole(*given)
    for tensor, right in zip([output, *gradients], [expected, *expected_gradients], strict=True):
        torch.testing.assert_close(tensor.double(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("packed", [False, True])
def test_what_was_prepared_for_both_passes_runs_without_asking_for_a_choice(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    query, key, value, pull = tensors(torch.float16)
    three, packing = (query, key[:, :32].contiguous(), value[:, :32].contiguous()), None
    if packed:
        three, pull = (three[0][0], three[1][0], three[2][0]), pull[0]
        packing = Packing.of([Rectangle(queries=(0, 32), keys=(0, 32))], query.device)
        problem = functional.explain_packed(*three, packing.cu_seqlens_q, packing.cu_seqlens_kv, 32, 32).problem
    else:
        problem = autoattn.explain(*three, layout="bshd").problem
    assert problem is not None
    enter(card, problem)
    answers = []
    for _ in range(3):
        answer = partial_call.attend(three, (-1, -1), TERMS, packing, None)
        gradients = partial_call.differentiate(three, (-1, -1), TERMS, packing, answer, (pull, None))
        answers.append([*answer, *gradients[:3]])
        monkeypatch.setattr(KernelChoices, "takes", lambda *given, **words: pytest.fail("a choice was asked for"))
    assert card["backward"] == 3
    for again in answers[1:]:
        for tensor, expected in zip(again, answers[0], strict=True):
            assert torch.equal(tensor, expected)


def test_pytorch_differentiates_a_call_where_no_kernel_does() -> None:
    given = tensors(torch.float64)
    output, gradients = by_halves(*given)
    expected, expected_gradients = whole(*given)
    for tensor, right in zip([output, *gradients], [expected, *expected_gradients], strict=True):
        torch.testing.assert_close(tensor, right)


def test_tokens_in_no_rectangle_stand_in_sequences_that_see_nothing() -> None:
    some = [Rectangle(queries=(2, 5), keys=(0, 4)), Rectangle(queries=(5, 6), keys=(7, 9))]
    packing = Packing.of(some, torch.device("cpu"))
    assert packing.cu_seqlens_q.tolist() == [0, 2, 5, 5, 6]
    assert packing.cu_seqlens_kv.tolist() == [0, 0, 4, 7, 9]
    assert (packing.max_seqlen_q, packing.max_seqlen_kv) == (3, 4)
