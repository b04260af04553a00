"""A small search space, and trials of its variants."""

from __future__ import annotations

from samples import prediction

from autoattn.codegen.search_space import Requirement, SearchSpace
from autoattn.codegen.space_rules import Rule
from autoattn.core.trial import Outcome, Trial
from autoattn.core.variant import Variant

TEMPLATE = "triton/forward"
SPACE = SearchSpace(
    template=TEMPLATE,
    interpreted=True,
    triton=(),
    fixed={},
    digest="0" * 16,
    choices={"a": (1, 2, 3, 4, 5, 6), "b": (0, 1, 2, 3, 4), "c": ("w", "x", "y", "z")},
    about={},
    let={"sum": Rule("a + b")},
    require=(Requirement(rule=Rule("sum % 2 == 0"), because="the sum of a and b must be even"),),
    seeds=(),
)


def variant(a: int, b: int, c: str = "w") -> Variant:
    return Variant.of(TEMPLATE, {"a": a, "b": b, "c": c})


def trial(variant: Variant, time_us: float | None = None) -> Trial:
    """A trial whose time grows with a and b; None for the time, so that the best is a=1, b=1."""
    if time_us is None:
        time_us = 10.0 * int(variant["a"]) + int(variant["b"])
    return Trial(variant=variant, outcome=Outcome.OK, digest=variant.digest, prediction=prediction(time_us))


def failed(variant: Variant) -> Trial:
    return Trial(variant=variant, outcome=Outcome.CRASH, detail="the process died (SIGSEGV)")
