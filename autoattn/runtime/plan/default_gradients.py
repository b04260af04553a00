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
"""

from __future__ import annotations

from dataclasses import replace

from autoattn.codegen import search_space
from autoattn.core.device import Device, MatrixUnit
from autoattn.core.problem import DType, Op, Problem
from autoattn.errors import SpaceError
from autoattn.runtime.plan import cache_lookup, explanations, host_bound
from autoattn.runtime.plan.explanations import Explanation, Level

RULE = "pytorch_believed_faster"
PLAIN_TRITON = "triton/backward"  # the template of every card
CUDNN_STEP = 8  # head dims that cuDNN takes are multiples of it
_LENGTH = 4096  # of what stands for all lengths


def answer(problem: Problem, gradients: Explanation, card: Device) -> Explanation | None:
    """PyTorch's attention for both passes of a call; None where the default of a template differentiates it.

    Args:
        problem: forward, of a call that wants neither an LSE nor gradients that repeat to the bit.
        gradients: what was found for its backward problem.
    """
    if gradients.level is not Level.DEFAULT or gradients.variant is None or not is_fused(problem):
        return None
    belief = _belief(gradients.variant.template, problem.head_dim, card)
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


def are_pytorchs(card: Device | None) -> bool:
    """Whether PyTorch's attention answers plain training calls in 16 bits that nobody tuned, of whatever sizes.

    For calls that are traced before their lengths are known.
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
        op=Op.BACKWARD,
    )
    for space in search_space.of(Op.BACKWARD):
        try:
            template = space.default(usual, card).template
        except SpaceError:
            continue
        return _belief(template, usual.head_dim, card) is not None
    return True


def _belief(template: str, head_dim: int, card: Device) -> str | None:
    """Why PyTorch's backward pass is believed faster than a template's default; None where it is not."""
    if template != PLAIN_TRITON:
        return None
    if card.capabilities.matrix_unit is not MatrixUnit.WGMMA:
        return (
            f"nobody measured {template} without Hopper's warpgroup products, which FlashAttention-2 does without and "
            "cuDNN has wherever they are"
        )
    if head_dim % CUDNN_STEP:
        return None
    return f"{template}, tuned, took 0.98 to 1.45 of cuDNN's time on an H200, 1.23 in the geometric mean of 18 problems"
