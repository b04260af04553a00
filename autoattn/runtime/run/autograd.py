"""Attention for autograd: a forward kernel that leaves the LSE, and backward kernels that were tuned.

Saved are query, key, value, output and LSE, which grow with the lengths and not with their product.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autoattn.core.problem import Bias, Problem
from autoattn.errors import TensorError
from autoattn.kernels import backward, forward
from autoattn.kernels.compiler import Kernel
from autoattn.runtime.plan.gradient_problem import Pass
from autoattn.runtime.run import recompute_counter
from autoattn.tensors.operands import Gradients, Operands, Saved


def launch(one: Pass, operands: Operands) -> tuple[Tensor, Tensor]:
    """The output [batch, heads_q, seq_q, head_dim_v] and the LSE, which the backward kernels read."""
    query = operands.query
    output = forward.empty_output(one.problem, query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    flags = forward.launch(one.forward, one.problem, operands, output, lse, counting=bool(recompute_counter.counting))
    if flags is not None:
        recompute_counter.note(flags)
    return output, lse


def differentiate(
    kernel: Kernel, problem: Problem, operands: Operands, output: Tensor, lse: Tensor, output_grad: Tensor | None,
    lse_grad: Tensor | None,
) -> Gradients:  # fmt: skip
    """Gradients by backward kernels.

    Args:
        problem: backward.
        output, lse: what `launch` gave.
        output_grad, lse_grad: of these; None for 0.
    """
    gradients = backward.empty_gradients(problem, operands)
    pull = torch.zeros_like(output) if output_grad is None else _as_read(output_grad, kernel)
    if kernel.source.traits.lse:
        lse_grad = lse_grad_as_read(lse_grad, lse)
    saved = Saved(output=output, lse=lse, output_grad=pull, lse_grad=lse_grad)
    backward.launch(kernel, problem, operands, saved, gradients)
    return gradients


def attend(one: Pass, operands: Operands) -> tuple[Tensor, Tensor | None]:
    """The output [batch, heads_q, seq_q, head_dim_v], and the LSE where the backward kernels take its gradient."""
    modifiers = one.backward_problem.modifiers
    bias = operands.narrow_bias if modifiers.bias is Bias.LEARNED else None
    slopes = operands.slopes if modifiers.learned_slopes else None
    three = operands.query, operands.key, operands.value
    output, lse = _Attention.apply(*three, operands.sinks, bias, slopes, operands, one)
    return output, lse if one.backward.source.traits.lse else None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, bias: Tensor | None,
        slopes: Tensor | None, operands: Operands, both: Pass,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        operands = _with(operands, query, key, value, sinks, bias, slopes)
        output, lse = launch(both, operands)
        ctx.save_for_backward(query, key, value, output, lse, sinks, bias, slopes)
        # Without what is saved, so that nothing keeps it alive but autograd.
        nothing = query.new_empty(0)
        ctx.operands = replace(operands, query=nothing, key=nothing, value=nothing, sinks=None)
        if bias is not None:
            ctx.operands = replace(ctx.operands, bias=None, narrow_bias=None)
        if slopes is not None:
            ctx.operands = replace(ctx.operands, slopes=None)
        ctx.problem, ctx.kernel = both.backward_problem, both.backward
        ctx.set_materialize_grads(False)
        if not both.backward.source.traits.lse:
            ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor) -> tuple[Tensor | None, ...]:
        grads = _Gradients.apply(*pulls, *ctx.saved_tensors, ctx.operands, ctx.problem, ctx.kernel)
        return (
            *(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)),
            None,
            None,
        )


class Once(torch.autograd.Function):
    """A backward pass as a function of its own, so that a second derivative meets an error and not a zero."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise TensorError(
            "attention must be differentiated once, got a second time, for which there is no kernel; write the formula "
            "in plain PyTorch, or use F.scaled_dot_product_attention with its backend MATH, where that is needed"
        )


class _Gradients(Once):
    @staticmethod
    def forward(
        ctx: Any, output_grad: Tensor | None, lse_grad: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
        output: Tensor, lse: Tensor, sinks: Tensor | None, bias: Tensor | None, slopes: Tensor | None,
        operands: Operands, problem: Problem, kernel: Kernel,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        operands = _with(operands, query, key, value, sinks, bias, slopes)
        gradients = differentiate(kernel, problem, operands, output, lse, output_grad, lse_grad)
        return gradients.query, gradients.key, gradients.value, gradients.sinks, gradients.bias, gradients.slopes


def _with(
    operands: Operands, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, bias: Tensor | None,
    slopes: Tensor | None,
) -> Operands:  # fmt: skip
    """The same with the tensors that autograd knows; a bias, where it knows one, is expanded again."""
    slopes = operands.slopes if slopes is None else slopes
    operands = replace(operands, query=query, key=key, value=value, sinks=sinks, slopes=slopes)
    if bias is None:
        return operands
    return replace(operands, narrow_bias=bias, bias=bias.expand(*query.shape[:3], key.shape[2]))


def reads(kernel: Kernel, output_grad: Tensor) -> bool:
    """Whether backward kernels read an output gradient where it lies, a [batch, heads_q, seq_q, head_dim_v] view."""
    traits = kernel.source.traits
    grad_traits = forward.traits_of(output_grad)
    steps = zip(output_grad.shape, output_grad.stride(), strict=True)
    apart = all(step > 0 for size, step in steps if size > 1)
    readable = apart and not output_grad.is_neg()
    return readable and grad_traits.alignment % traits.alignment == 0 and grad_traits.wide <= traits.wide


def lse_grad_as_read(lse_grad: Tensor | None, lse: Tensor) -> Tensor:
    """An LSE's gradient as the kernels read it, 0 where it is missing."""
    return torch.zeros_like(lse) if lse_grad is None else lse_grad.resolve_neg().contiguous()


def _as_read(output_grad: Tensor, kernel: Kernel) -> Tensor:
    """An output gradient as the kernels read it: sums and expansions leave strides of 0 and axes in any order."""
    if reads(kernel, output_grad):
        return output_grad
    return output_grad.clone(memory_format=torch.contiguous_format)
