"""The problem of a call's gradients, and what kernels of both passes need."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autoattn import torch_private
from autoattn.codegen import render
from autoattn.core.cache_entry import KERNEL
from autoattn.core.modifiers import Bias
from autoattn.core.problem import Op, Precision, Problem
from autoattn.core.variant import Traits
from autoattn.kernels import forward
from autoattn.kernels.compiler import Kernel
from autoattn.runtime.plan.explanations import Explanation, Level
from autoattn.tensors.operands import Operands, View


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """The kernels of both passes of calls that somebody may differentiate."""

    problem: Problem  # forward
    forward: Kernel  # leaves the LSE
    backward: Kernel
    backward_problem: Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Which tensors that change scores get gradients; these take kernels that others do without."""

    bias: bool = False  # one that is added
    slopes: bool = False

    @classmethod
    def of(cls, operands: Operands) -> Learned:
        """What autograd will want."""

        def wanted(tensor: Tensor | None) -> bool:
            return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()

        return cls(bias=wanted(operands.narrow_bias), slopes=wanted(operands.slopes))


NONE_LEARNED = Learned()


def backward_of(problem: Problem, *, deterministic: bool = False, learned: Learned = NONE_LEARNED) -> Problem:
    """The problem of a call's gradients; those of tf32x3 products are formed of IEEE ones, which are no less exact.

    Args:
        deterministic: whether they repeat to the bit.
        learned: which gradients there are beside those of query, key, value and sinks.
    """
    bias = Bias.LEARNED if learned.bias else problem.modifiers.bias
    modifiers = replace(problem.modifiers, bias=bias, learned_slopes=learned.slopes)
    precision = Precision.IEEE if problem.precision is Precision.TF32X3 else problem.precision
    return replace(problem, op=Op.BACKWARD, deterministic=deterministic, modifiers=modifiers, precision=precision)


def why_not(operands: Operands) -> str | None:
    """Why no backward kernel may serve a call whose inputs need gradients, whatever was tuned; None when one may."""
    if torch_private.are_transforms_active():
        return "torch.func differentiates it, which takes PyTorch's own derivatives"
    return None


def why_not_by(explanation: Explanation) -> str | None:
    """Why no kernel of ours runs for what was found for a backward problem; None when one does."""
    if explanation.route == KERNEL:
        return None
    if explanation.level is Level.SDPA:
        return explanation.reason
    return f"{explanation.route} was the fastest for the gradients"


def traits_of(problem: Problem, operands: Operands, *, lse: bool) -> Traits:
    """What the memory of the inputs, and of a new output or of new gradients, asks of kernels; output gradients follow.

    Args:
        lse: whether the LSE is an answer too; of backward kernels: one that may have a gradient.
    """
    traits = forward.traits_of(operands.query, operands.key, operands.value, lse=lse, bias=operands.bias)
    new = render.natural_traits(problem)
    wide = traits.wide or new.wide or forward.reaches_far(View.of(operands.query), problem.head_dim_v)
    return replace(traits, alignment=math.gcd(traits.alignment, new.alignment), wide=wide)
