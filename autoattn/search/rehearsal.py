"""What an interpreter checks of a variant without the GPU: its structure on a small problem, and the outcome."""

from __future__ import annotations

from dataclasses import replace

from autoattn.codegen import render, search_space, template_facts
from autoattn.core.problem import DType, Op, Precision, Problem
from autoattn.core.tile_widths import padded, pieces
from autoattn.core.trial import Outcome, Verdict
from autoattn.core.variant import Source, Variant
from autoattn.search.gpu_jobs import kind_of
from autoattn.workers.worker_pool import Failure


def structure(problem: Problem, variant: Variant) -> tuple[Problem, Source]:
    """The same Jinja branches with the smallest numbers, in a dtype that the interpreter computes rightly."""
    if search_space.load(variant.template).specialised:
        return _gluon_structure(problem, variant)
    dtype = DType.FLOAT32 if problem.dtype is DType.FLOAT32 else DType.FLOAT16
    if problem.op is Op.BACKWARD:
        return _gradient_structure(replace(problem, dtype=dtype), variant)
    split = bool(variant["HEAD_SPLIT"])
    odd = render.natural_traits(problem).alignment == 1  # nothing divides the strides: a branch of its own
    head_dim = head_dim_v = _small_head_dim(problem.head_dim, split=split, odd=odd)
    if problem.is_latent:  # whose values are the first of two tiles of keys
        head_dim_v = pieces(head_dim)[0]
    elif problem.head_dim_v != problem.head_dim:
        head_dim_v = _small_head_dim(problem.head_dim_v, split=split, odd=odd)
        # Two head dims stay two, also where one number would have the branches of both.
        if head_dim_v == head_dim:
            head_dim_v += 16 if head_dim == 16 else 32
    small, mask = search_space.load(variant.template).rehearsed(variant, problem.mask)
    # The interpreter knows no bfloat16 products, and tf32 ones take their factors in another order.
    products = variant["products"] != template_facts.AS_ASKED
    kind = replace(
        kind_of(replace(problem, mask=mask)),
        dtype=dtype,
        precision=Precision.IEEE if products else problem.precision,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
    )
    return kind, render.render(kind, small)


def _gluon_structure(problem: Problem, variant: Variant) -> tuple[Problem, Source]:
    """The same of kernels in Gluon, whose interpreter multiplies all types rightly and minds no wide heads."""
    small, mask = search_space.load(variant.template).rehearsed(variant, problem.mask)
    kind = kind_of(replace(problem, mask=mask))
    return kind, render.render(kind, small)


def _gradient_structure(problem: Problem, variant: Variant) -> tuple[Problem, Source]:
    """The same of kernels for gradients."""
    odd = render.natural_traits(problem).alignment == 1
    head_dim = _small_head_dim(problem.head_dim, split=False, odd=odd)
    head_dim_v = head_dim
    if problem.head_dim_v != problem.head_dim:
        head_dim_v = _small_head_dim(problem.head_dim_v, split=False, odd=odd)
        head_dim_v += 16 * (head_dim_v == head_dim)
    small, mask = search_space.load(variant.template).rehearsed(variant, problem.mask)
    kind = replace(kind_of(replace(problem, mask=mask)), head_dim=head_dim, head_dim_v=head_dim_v)
    return kind, render.render(kind, small)


def _small_head_dim(head_dim: int, *, split: bool, odd: bool) -> int:
    """A small head dim that is held in as many tiles, and fills the last one just when `head_dim` does."""
    widths = pieces(head_dim) if split else (padded(head_dim),)
    if sum(widths) == head_dim:
        return 16 if len(widths) == 1 else 48  # 32 + 16
    small = 24 if len(widths) == 1 else 40
    return small + odd


def outcome_of(result: Verdict | Failure) -> Outcome:
    """What a rehearsal came to."""
    if isinstance(result, Failure):
        return result.outcome
    return Outcome.OK if result.ok else Outcome.WRONG_RESULT


def reason_of(result: Verdict | Failure) -> str:
    """Why a rehearsal failed, in words; empty where it did not."""
    return result.detail if isinstance(result, Failure) else result.reason
