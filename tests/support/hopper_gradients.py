"""Problems and variants of Hopper's backward template."""

from __future__ import annotations

from typing import Any

import kernels

from autoattn.codegen import render, search_space
from autoattn.core import device_profiles
from autoattn.core.problem import DType, Layout, Op, Problem
from autoattn.core.variant import Source, Traits, Value, Variant

TEMPLATE = "gluon/backward"
H200 = device_profiles.named("h200")


def problem(**changes: Any) -> Problem:
    """Large enough that every value of every parameter is worth trying."""
    sizes = {"batch": 4, "heads_q": 32, "heads_kv": 8, "seq_q": 4096, "seq_kv": 8192, "dtype": DType.BFLOAT16}
    if changes.get("layout") is Layout.PACKED:
        sizes |= {"tokens_q": 9000, "tokens_kv": 18000}
    return kernels.problem(op=Op.BACKWARD, **{**sizes, "head_dim": 128, **changes})


def variant(problem: Problem, **changes: Value) -> Variant:
    """The template's default for a problem, changed; feasible or not."""
    points = search_space.load(TEMPLATE)
    return points.variant({**points.params_of(points.default(problem, H200)), **changes})


def source(problem: Problem, traits: Traits | None = None, **changes: Value) -> Source:
    """The rendered kernels of the template's default, changed."""
    return render.render(problem, variant(problem, **changes), traits)


def feasible(problem: Problem, **changes: Value) -> Variant:
    """The variant, which must be feasible."""
    candidate = variant(problem, **changes)
    assert search_space.load(TEMPLATE).why_infeasible(candidate, problem, H200) is None
    return candidate
