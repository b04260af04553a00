"""Chooses PyTorch's attention for plain training calls that nobody tuned, where its gradients are believed faster.

A template's default differentiates every call that a kernel can. Plain calls in 16 bits have kernels of PyTorch's that
are as memory-efficient, so that the faster of the two is to answer. What is believed rests on times of an H200
(benchmarks/results/2026-11-22_h200_backward.md), all of head dims 64, 128 and 256, over 1,024 to 16,384 tokens:

- gluon/backward took 0.74 to 0.90 of cuDNN's time. Its seeds are what won there, so that its defaults run.
- triton/backward, tuned, took 0.98 to 1.45 of cuDNN's time, 1.23 in the geometric mean. PyTorch's attention prefers
  cuDNN there, which takes head dims that are multiples of 8.
- triton/backward took 0.58 to 0.97 of FlashAttention-2's time, which takes the other head dims, padded. Both are
  written for all cards, but only Triton's compiler forms warpgroup products of Hopper.
- Nobody measured triton/backward without warpgroup products. FlashAttention-2 is written for the products that are left
  then, and cuDNN has kernels of each card, so that PyTorch's gradients are believed faster.

Beside a bias that is added and does not learn, triton/backward is the only template, and nobody measured it. This is an
estimate: its products are those that it takes without a bias. Both passes of kernels read the bias three times.
PyTorch's answer passes over it five times, since it finds the queries that see no key and copies the bias without them.
A pass over 16 bits takes an H200 0.4 ps a number, and cuDNN's products take 2 or 4 ps a pair (head dim 64 or 128, both
passes, 450 TFLOPS). So cuDNN's lead of 1.23 is worth more than two passes from head dim 128 on, and wherever two
sequences or heads share the bias; else kernels may be ahead by a tenth. FlashAttention-2 takes no bias. Nobody has
times of what does on older cards, or where query heads share key heads: there the default runs.
"""

from __future__ import annotations

from dataclasses import replace

from autoattn.baselines import pytorch_sdpa
from autoattn.codegen import search_space
from autoattn.codegen.render import ELEMENT
from autoattn.core.device import Device, MatrixUnit
from autoattn.core.problem import Bias, DType, Modifiers, Op, Problem
from autoattn.errors import SpaceError
from autoattn.runtime.plan import cache_lookup, explanations, host_bound
from autoattn.runtime.plan.explanations import Explanation, Level

RULE = "pytorch_believed_faster"
PLAIN_TRITON = "triton/backward"  # the template of every card
CUDNN_STEP = 8  # head dims that cuDNN takes are multiples of it
_LENGTH = 4096  # of what stands for all lengths


def answer(
    problem: Problem, gradients: Explanation, card: Device, bias_element: str | None = None
) -> Explanation | None:
    """PyTorch's attention for both passes of a call; None where the default of a template differentiates it.

    Args:
        problem: forward, of a call that wants neither an LSE nor gradients that repeat to the bit.
        gradients: what was found for its backward problem.
        bias_element: Triton's name of the element type of a bias; None is the query's.
    """
    if gradients.level is not Level.DEFAULT or gradients.variant is None or gradients.problem is None:
        return None
    biased = gradients.problem.modifiers.bias is Bias.ADDITIVE
    if not (is_fused_with_bias(problem, bias_element) if biased else is_fused(problem)):
        return None
    belief = _belief(gradients.variant.template, problem.head_dim, card, biased=biased)
    if belief is None:
        return None
    reason = (
        "an input needs a gradient, nobody tuned gradients near to these, and PyTorch's are believed faster than a "
        f"default of {gradients.variant.template}; autoattn tune measures that for problems of operation: backward"
    )
    explanation = explanations.of_sdpa(reason, problem, (*gradients.reasons.texts, f"{RULE}: {belief}"))
    return replace(explanation, chosen_for=gradients.chosen_for)


def is_fused(problem: Problem) -> bool:
    """Whether F.scaled_dot_product_attention says a call in full, and FlashAttention-2 or cuDNN differentiates it."""
    return (
        problem.dtype in (DType.FLOAT16, DType.BFLOAT16)
        and problem.head_dim == problem.head_dim_v
        and host_bound.is_plain(problem)
    )


def is_fused_with_bias(problem: Problem, bias_element: str | None = None) -> bool:
    """The same of a call with a bias that is added, which PyTorch would round to the query's dtype, and cuDNN.

    Args:
        bias_element: Triton's name of the element type of the bias; None is the query's.
    """
    return (
        problem.modifiers == Modifiers(bias=Bias.ADDITIVE)
        and bias_element in (None, ELEMENT[problem.dtype])
        and problem.heads_q == problem.heads_kv
        and is_fused(replace(problem, modifiers=Modifiers()))
        and not pytorch_sdpa.is_mask_written_out(problem)
    )


def are_pytorchs(card: Device | None, *, biased: bool = False) -> bool:
    """Whether PyTorch's attention answers plain training calls in 16 bits that nobody tuned, of whatever sizes.

    For calls that are traced before their lengths are known.

    Args:
        biased: of calls that are plain but for a bias that is added and does not learn, with a key head for each query
            head, and head dims that cuDNN takes.
    """
    if card is None or cache_lookup.device_supported(card) is not None:
        return True
    usual = Problem(
        dtype=DType.BFLOAT16,
        batch=1,
        heads_q=1,
        heads_kv=1,
        seq_q=_LENGTH,
        seq_kv=_LENGTH,
        head_dim=128,
        modifiers=Modifiers(bias=Bias.ADDITIVE if biased else Bias.NONE),
        op=Op.BACKWARD,
    )
    for space in search_space.of(Op.BACKWARD):
        try:
            template = space.default(usual, card).template
        except SpaceError:
            continue
        return _belief(template, usual.head_dim, card, biased=biased) is not None
    return True


def _belief(template: str, head_dim: int, card: Device, *, biased: bool) -> str | None:
    """Why PyTorch's backward pass is believed faster than a template's default; None where it is not."""
    if template != PLAIN_TRITON or (biased and card.capabilities.matrix_unit is not MatrixUnit.WGMMA):
        return None
    if card.capabilities.matrix_unit is not MatrixUnit.WGMMA:
        return (
            f"nobody measured {template} without Hopper's warpgroup products, which FlashAttention-2 does without and "
            "cuDNN has wherever they are"
        )
    if head_dim % CUDNN_STEP:
        return None
    times = (
        f"{template}, tuned, took 0.98 to 1.45 of cuDNN's time on an H200, 1.23 in the geometric mean of 18 problems"
    )
    if biased:
        return f"{times} without a bias, which PyTorch's answer passes over five times and kernels read three times"
    return times
