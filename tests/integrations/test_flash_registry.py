"""PyTorch's FlashAttention operators: autoattn answers what its kernels take, and the kernels before the rest.

PyTorch has these operators for GPUs alone. Here a formula stands in for its kernels, registered for the CPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention
from torch.nn import functional as F  # noqa: N812 - the name that PyTorch's own documentation uses

from autoattn.integrations.torch import NAME, flash_registry, register
from autoattn.runtime.torch_op import kernel_choices

aten = torch.ops.aten
SDPA, SDPA_BACKWARD = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"
FLASH, FLASH_BACKWARD = "_flash_attention_forward", "_flash_attention_backward"


def formula(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Output and LSE of [batch, heads, seq, head_dim]."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + key.shape[2] - query.shape[2])
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.fixture
def before() -> Iterator[list[str]]:
    """The operators whose kernels before ran, in order."""
    ran: list[str] = []

    def sdpa(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # type: ignore[no-untyped-def]
        ran.append(SDPA)
        none = query.new_empty(0)
        return *formula(query, key, value, is_causal, scale), none, none, query.shape[2], key.shape[2], none, none, none

    def sdpa_backward(grad, query, key, value, *rest, scale=None):  # type: ignore[no-untyped-def]
        ran.append(SDPA_BACKWARD)
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    def flash(query, key, value, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, debug, **others):  # type: ignore[no-untyped-def]
        ran.append(FLASH)
        none = query.new_empty(0)
        return torch.zeros_like(query), query.new_zeros(query.shape[1], query.shape[0]), none, none, none

    def flash_backward(grad, query, key, value, *rest, **others):  # type: ignore[no-untyped-def]
        ran.append(FLASH_BACKWARD)
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    library = torch.library.Library("aten", "IMPL")
    for name, kernel in (
        (SDPA, sdpa),
        (SDPA_BACKWARD, sdpa_backward),
        (FLASH, flash),
        (FLASH_BACKWARD, flash_backward),
    ):
        library.impl(name, kernel, "CPU")
    yield ran
    library._destroy()


@pytest.fixture
def kernels(before: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[flash_registry.FlashKernels]:
    """autoattn in the place of those; calls of 16 queries and more are said to have a kernel."""
    monkeypatch.setattr(kernel_choices, "takes", lambda tensors, words, learns: tensors[0].shape[-2] >= 16)
    active = flash_registry.activate("CPU")
    yield active
    active.remove()


def three(seq: int = 16, *, requires_grad: bool = False) -> list[Tensor]:
    torch.manual_seed(seq)
    return [torch.randn(2, 4, seq, 32, requires_grad=requires_grad) for _ in range(3)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_that_a_kernel_takes_runs_it(causal: bool, before: list[str]) -> None:
    query, key, value = three()
    output, lse, *_, debug = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=0.3)
    expected = formula(query, key, value, causal, 0.3)
    torch.testing.assert_close((output, lse), expected, atol=1e-5, rtol=1e-5)
    assert before == []
    assert debug.numel() == 0


@pytest.mark.usefixtures("kernels")
def test_the_output_lies_in_memory_as_the_query() -> None:
    query, key, value = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in three())
    assert aten._scaled_dot_product_flash_attention(query, key, value)[0].stride() == query.stride()


@pytest.mark.usefixtures("kernels")
def test_both_passes_run_kernels(before: list[str]) -> None:
    inputs = three(requires_grad=True)
    output = aten._scaled_dot_product_flash_attention(*inputs, 0.0, True)[0]
    pull = torch.randn_like(output)
    query, key, value = inputs
    expected = torch.autograd.grad(formula(query, key, value, True, None)[0], inputs, pull)
    torch.testing.assert_close(torch.autograd.grad(output, inputs, pull), expected, atol=1e-5, rtol=1e-5)
    assert before == []


@pytest.mark.usefixtures("kernels")
def test_other_calls_run_the_kernels_before(before: list[str]) -> None:
    few = three(8, requires_grad=True)
    aten._scaled_dot_product_flash_attention(*few, 0.0, True)[0].sum().backward()
    assert before == [SDPA, SDPA_BACKWARD]
    aten._scaled_dot_product_flash_attention(*three(), 0.5)
    assert before[2:] == [SDPA]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("window", [(None, None), (5, 0)])
def test_packed_sequences_run_kernels(window: tuple[int | None, int | None], before: list[str]) -> None:
    query, key, value = (torch.randn(40, 16, 32) for _ in range(3))  # [tokens, heads, head_dim]
    offsets = torch.tensor([0, 15, 40], dtype=torch.int32)
    output, lse, *_ = aten._flash_attention_forward(
        query, key, value, offsets, offsets, 25, 25, 0.0, True, False, window_size_left=window[0],
        window_size_right=window[1],
    )  # fmt: skip
    assert before == []
    assert lse.shape == (16, 40)
    for begin, end in ((0, 15), (15, 40)):
        part = [tensor[begin:end].transpose(0, 1)[None] for tensor in (query, key, value)]
        kept = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
        if window[0] is not None:
            kept &= ~torch.ones_like(kept).tril(-window[0] - 1)
        expected = F.scaled_dot_product_attention(*part, attn_mask=kept)
        torch.testing.assert_close(output[begin:end].transpose(0, 1)[None], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("kernels")
def test_varlen_attn_runs_kernels_in_both_passes(before: list[str]) -> None:
    from torch.nn.attention.varlen import varlen_attn

    inputs = [torch.randn(40, 16, 32, requires_grad=True) for _ in range(3)]
    offsets = torch.tensor([0, 40], dtype=torch.int32)
    causal = (
        {"window_size": (-1, 0)} if "window_size" in inspect.signature(varlen_attn).parameters else {"is_causal": True}
    )
    output = varlen_attn(*inputs, offsets, offsets, 40, 40, **causal)
    pull = torch.randn_like(output)
    dense = F.scaled_dot_product_attention(*(tensor.transpose(0, 1)[None] for tensor in inputs), is_causal=True)
    expected = torch.autograd.grad(dense, inputs, pull.transpose(0, 1)[None])
    torch.testing.assert_close(torch.autograd.grad(output, inputs, pull), expected, atol=1e-5, rtol=1e-5)
    assert before == []


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["seqused_k", "alibi_slopes"])
def test_paged_keys_and_slopes_run_the_kernel_before(name: str, before: list[str]) -> None:
    query = torch.randn(40, 16, 32)
    offsets = torch.tensor([0, 40], dtype=torch.int32)
    given: dict[str, Any] = {name: torch.ones(1, dtype=torch.int32) if name == "seqused_k" else torch.ones(16)}
    aten._flash_attention_forward(query, query, query, offsets, offsets, 40, 40, 0.0, True, False, **given)
    assert before == [FLASH]


def test_removal_brings_the_kernels_before_back(before: list[str]) -> None:
    active = flash_registry.activate("CPU")
    active.remove()
    active.remove()
    aten._scaled_dot_product_flash_attention(*three())
    assert before == [SDPA]


def test_no_kernel_takes_a_call_on_the_cpu(before: list[str]) -> None:
    active = flash_registry.activate("CPU")
    aten._scaled_dot_product_flash_attention(*three())
    aten._scaled_dot_product_flash_attention(*three(requires_grad=True))
    active.remove()
    assert before == [SDPA, SDPA]


def test_pytorch_lists_and_activates_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    active: list[str] = []

    class Handle:
        def remove(self) -> None:
            active.remove(NAME)

    def activate() -> Handle:
        active.append(NAME)
        return Handle()

    monkeypatch.setattr(flash_registry, "activate", activate)
    assert register() == NAME
    assert NAME in attention.list_flash_attention_impls()
    assert active == []
    attention.activate_flash_attention_impl(NAME)
    assert (attention.current_flash_attention_impl(), active) == (NAME, [NAME])
    attention.restore_flash_attention_impl()
    assert (attention.current_flash_attention_impl(), active) == (None, [])
