"""Accuracy of the cost model on measured kernels, which a report shows beside predictions.

Each problem was judged by constants fitted on all the others; docs/model.md has the tables and what they leave open.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from autoattn.core.problem import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of predictions for one family of kernels, on one card."""

    card: str
    problems: int
    variants: int
    spearman: float  # median over the problems
    lowest: float
    error: float  # spread of the logarithm of predicted over measured time: median over the problems
    ten: float  # how much slower than the best measured one the best of the first ten was: median over the problems
    worst: float

    def __str__(self) -> str:
        return (
            f"{self.variants} random variants of {self.problems} problems, each judged by constants fitted on the "
            f"others: rank correlation {self.spearman:.2f} in the median and {self.lowest:.2f} at least; the best of "
            f"the first ten was {100 * self.ten:.1f}% slower than the best measured one in the median and "
            f"{100 * self.worst:.1f}% at most"
        )


# Family, as benchmarks/model_quality.py names it -> what it prints with --left-out
LEFT_OUT = {
    "triton": Quality(
        card="NVIDIA H200", problems=4, variants=157, spearman=0.976, lowest=0.973, error=0.18, ten=0.0, worst=0.0
    ),
    "gluon": Quality(
        card="NVIDIA H200", problems=4, variants=135, spearman=0.944, lowest=0.897, error=0.13, ten=0.0, worst=0.0
    ),
    "sm_80": Quality(
        card="NVIDIA H200", problems=2, variants=52, spearman=0.949, lowest=0.939, error=0.15, ten=0.0, worst=0.0
    ),
}

# The errors among the finalists of a problem, the median over problems, as benchmarks/model_quality.py prints them with
# --left-out of an H100 and an H200: of 16 bits by family, and of float32, which plain Triton has, by precision
AMONG_FAST = {"gluon": 0.05, "triton": 0.09}
AMONG_FAST_FLOAT32 = {"ieee": 0.13, "tf32": 0.14, "tf32x3": 0.17}


def known(arch: int) -> str:
    """What is known of predictions for an architecture, in sentences."""
    if arch == 90:
        return f"How well they rank was measured on an {LEFT_OUT['triton'].card}, on {LEFT_OUT['triton']}."
    if arch in (80, 86, 89):
        return (
            "How well they rank was measured on no card of this architecture, but for Ampere's instructions on an "
            f"{LEFT_OUT['sm_80'].card}, whose driver translated them, on {LEFT_OUT['sm_80']}."
        )
    return "How well they rank was measured on no card whose machine code is like this one's."


def error_of(template: str, arch: int, dtype: DType) -> float:
    """By how much predictions for a template's variants err from one another on an architecture, as a share.

    On Hopper, the larger one of the errors among random variants and among fast ones; of float32, that of the precision
    where it is the largest. The largest known error of random variants where nobody compared predictions with that
    architecture's machine code.
    """
    if arch == 90:
        family = "gluon" if template.startswith("gluon/") else "triton"
        among_fast = max(AMONG_FAST_FLOAT32.values()) if dtype is DType.FLOAT32 else AMONG_FAST[family]
        return max(LEFT_OUT[family].error, among_fast)
    if arch in (80, 86, 89):
        return LEFT_OUT["sm_80"].error
    return max(quality.error for quality in LEFT_OUT.values())


def error_between(templates: Set[str], arch: int, dtype: DType) -> float:
    """By how much predictions for variants of one template, or of two, err from one another, as a share.

    Of two templates, the errors add up as the root of the sum of their squares: they have nothing in common.
    """
    return math.hypot(*(error_of(template, arch, dtype) for template in templates))
