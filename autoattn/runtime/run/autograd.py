"""Attention for autograd: a forward kernel that leaves the LSE, and backward kernels.

Saved are query, key, value, output and LSE, which grow with the lengths and not with their product. Second derivatives
are PyTorch's, of the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autoattn.baselines import pytorch_sdpa
from autoattn.core.modifiers import Bias
from autoattn.core.problem import Problem
from autoattn.kernels import backward, forward
from autoattn.kernels.compiler import Kernel
from autoattn.runtime.plan.gradient_problem import Pass
from autoattn.runtime.run import recompute_counter
from autoattn.tensors.operands import Gradients, Operands, Saved


def launch(both: Pass, operands: Operands) -> tuple[Tensor, Tensor]:
    """The output [batch, heads_q, seq_q, head_dim_v] and the LSE, which the backward kernels read."""
    query = operands.query
    output = forward.empty_output(both.problem, query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    flags = forward.launch(both.forward, both.problem, operands, output, lse, counting=bool(recompute_counter.counting))
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


def attend(both: Pass, operands: Operands) -> tuple[Tensor, Tensor | None]:
    """The output [batch, heads_q, seq_q, head_dim_v], and the LSE where the backward kernels take its gradient."""
    modifiers = both.backward_problem.modifiers
    bias = operands.narrow_bias if modifiers.bias is Bias.LEARNED else None
    slopes = operands.slopes if modifiers.learned_slopes else None
    three = operands.query, operands.key, operands.value
    output, lse = _Attention.apply(*three, operands.sinks, bias, slopes, operands, both)
    return output, lse if both.backward.source.traits.lse else None


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


class _Gradients(torch.autograd.Function):
    """A backward pass as a function of its own, so that a second derivative is right and not a zero."""

    @staticmethod
    def forward(
        ctx: Any, output_grad: Tensor | None, lse_grad: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
        output: Tensor, lse: Tensor, sinks: Tensor | None, bias: Tensor | None, slopes: Tensor | None,
        operands: Operands, problem: Problem, kernel: Kernel,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        ctx.save_for_backward(output_grad, lse_grad, query, key, value, sinks, bias, slopes)
        ctx.operands, ctx.problem = operands, problem
        ctx.set_materialize_grads(False)
        operands = _with(operands, query, key, value, sinks, bias, slopes)
        gradients = differentiate(kernel, problem, operands, output, lse, output_grad, lse_grad)
        return gradients.query, gradients.key, gradients.value, gradients.sinks, gradients.bias, gradients.slopes

    @staticmethod
    def backward(ctx: Any, *pushes: Tensor | None) -> tuple[Tensor | None, ...]:
        def attend(*inputs: Any) -> tuple[Tensor, Tensor]:
            return formula(ctx.problem, _with(ctx.operands, *inputs))

        output_grad, lse_grad, *inputs = ctx.saved_tensors
        pulls, seconds = differentiate_again(attend, (output_grad, lse_grad), inputs, pushes)
        return *pulls, *seconds[:3], None, None, *seconds[3:], None, None, None


def formula(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """Output and LSE in plain PyTorch, whatever autocast says."""
    with torch.autocast(operands.query.device.type, enabled=False):
        return pytorch_sdpa.eager(problem, operands)


def differentiate_again(
    attend: Callable[..., tuple[Tensor, Tensor]], pulls: Sequence[Tensor | None], inputs: Sequence[Tensor | None],
    pushes: Sequence[Tensor | None],
) -> tuple[list[Tensor | None], list[Tensor | None]]:  # fmt: skip
    """Second derivatives, by PyTorch from the formula: there is no kernel, and the scores are in memory.

    Args:
        attend: output and LSE of the inputs.
        pulls: the gradients of output and LSE; None for 0.
        inputs: what the gradients are of; None where there is none.
        pushes: the gradients of these gradients; None for 0.

    Returns:
        The gradients of pulls and of inputs.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Each a tensor of its own: query, key and value may be one, or be computed from one another.
        own_pulls, own_inputs = ([_apart(tensor) for tensor in tensors] for tensors in (pulls, inputs))
        pairs = [
            (output, pull) for output, pull in zip(attend(*own_inputs), own_pulls, strict=True) if pull is not None
        ]
        learners = [tensor for tensor in own_inputs if tensor is not None]
        outputs, given = zip(*pairs, strict=True)
        first = iter(torch.autograd.grad(outputs, learners, given, create_graph=True, allow_unused=True))
        gradients = [None if tensor is None else next(first) for tensor in own_inputs]
        pushed = [
            (gradient, push)
            for gradient, push in zip(gradients, pushes, strict=True)
            if gradient is not None and gradient.requires_grad and push is not None
        ]
        wanted = [tensor for tensor in (*own_pulls, *own_inputs) if tensor is not None]
        if not pushed:
            return [None] * len(pulls), [None] * len(inputs)
        outputs, given = zip(*pushed, strict=True)
        gradients = iter(torch.autograd.grad(outputs, wanted, given, create_graph=again, allow_unused=True))
    seconds = [None if tensor is None else next(gradients) for tensor in (*own_pulls, *own_inputs)]
    return seconds[: len(pulls)], seconds[len(pulls) :]


def _apart(tensor: Tensor | None) -> Tensor | None:
    """The tensor under another name, of which PyTorch takes gradients apart from others'."""
    if tensor is None:
        return None
    return (tensor if tensor.requires_grad else tensor.detach().requires_grad_()).view_as(tensor)


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
