"""Problems and variants of the forward template, and sets of them that cover a template's branches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoattn.codegen import render, search_space
from autoattn.codegen.search_space import SearchSpace
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Precision, Problem
from autoattn.core.variant import Source, Traits, Value, Variant

TEMPLATE = "triton/forward"
BASE: dict[str, Value] = {
    "BLOCK_M": 16,
    "BLOCK_N": 16,
    "num_warps": 1,
    "num_stages": 1,
    "maxnreg": 0,
    "mask_loop": "split",
    "softmax": "online",
    "barrier": "none",
    "HEAD_GROUP": 1,
    "row_order": "descending",
    "PERSISTENT": 0,
    "HEAD_SPLIT": 0,
    "products": "as_asked",
}
NUMBERS = (
    (DType.FLOAT16, Precision.IEEE),
    (DType.BFLOAT16, Precision.IEEE),
    (DType.FLOAT32, Precision.IEEE),
    (DType.FLOAT32, Precision.TF32),
    (DType.FLOAT32, Precision.TF32X3),
    (DType.FLOAT8, Precision.IEEE),
)
MASKS = ("full", "causal:bottom-right", "causal:top-left")


def problem(**changes: Any) -> Problem:
    """A small problem; `mask` may be words."""
    facts: dict[str, Any] = {
        "dtype": DType.FLOAT16,
        "batch": 2,
        "heads_q": 4,
        "heads_kv": 2,
        "seq_q": 33,
        "seq_kv": 50,
        "head_dim": 16,
    }
    facts |= changes
    if isinstance(facts.get("mask"), str):
        facts["mask"] = Mask.parse(facts["mask"])
    return Problem(**facts)


def variant(**changes: Value) -> Variant:
    """The smallest variant, changed."""
    return search_space.load(TEMPLATE).variant(BASE | changes)


def source(problem: Problem, traits: Traits | None = None, **changes: Value) -> Source:
    """The rendered kernel of the smallest variant, changed."""
    return render.render(problem, variant(**changes), traits)


def covering(choices: Mapping[str, Sequence[Any]], strength: int = 2) -> list[dict[str, Any]]:
    """Few points that hold every combination of values of any `strength` parameters; always the same ones.

    Greedy: each point starts from a combination that is still missing, then takes the value that completes most others.
    """
    names = list(choices)
    groups = list(itertools.combinations(names, min(strength, len(names))))
    missing = {(group, values) for group in groups for values in itertools.product(*(choices[name] for name in group))}
    points = []
    while missing:
        group, values = min(missing, key=repr)
        point = dict(zip(group, values, strict=True))
        for name in names:
            if name not in point:
                full = [group for group in groups if name in group and point.keys() >= {*group} - {name}]
                point[name] = max(choices[name], key=lambda value: _completed(point | {name: value}, full, missing))
        points.append({name: point[name] for name in names})
        missing -= {(group, tuple(point[name] for name in group)) for group in groups}
    return points


def _completed(
    point: dict[str, Any], groups: Sequence[tuple[str, ...]], missing: set[tuple[tuple[str, ...], tuple[Any, ...]]]
) -> int:
    return sum((group, tuple(point[name] for name in group)) in missing for group in groups)


MODIFIERS = (
    Modifiers(),
    Modifiers(bias=Bias.KEYS),
    Modifiers(bias=Bias.BOOLEAN, sinks=True),
    Modifiers(bias=Bias.ADDITIVE, softcap=True),
    Modifiers(alibi=True, dropout=True),
    Modifiers(score_mod="captured0: float32[2]\nscore * tanh(captured0[h, q_idx])", sinks=True),
    Modifiers(score_mod="where(q_idx % 3 == b, score, -inf)", softcap=True, alibi=True, sinks=True, dropout=True),
)
# The masks beside full and causal, and how memory lies: "packed" goes with some of them.
KINDS: tuple[dict[str, Any], ...] = (
    *({"mask": mask} for mask in MASKS),
    {"mask": "window:9,3"},
    {"mask": "window:9,0"},
    {"mask": "window:9,-1"},
    {"mask": "window:-1,3"},
    {"mask": "blocks:16x32,0.5"},
    {"mask": Mask.blocks(32, 16, 0.5, "captured0: int32[1]\ncaptured0[q_idx] >= captured0[kv_idx]")},
    *(
        {"mask": mask, "layout": Layout.PACKED, "tokens_q": 70, "tokens_kv": 120}
        for mask in ("full", "causal", "window:9,3")
    ),
)


def every_point(space: SearchSpace) -> Iterator[Variant]:
    """Every point of a search space, feasible or not."""
    for values in itertools.product(*space.choices.values()):
        yield space.variant(dict(zip(space.choices, values, strict=True)))


def every_text() -> Iterator[tuple[Problem, Source]]:
    """Sources that cover every pair of choices that reach the template's text."""
    for point in covering(
        {
            "numbers": NUMBERS,
            "dims": ((16, 16), (57, 57), (80, 80), (24, 40), (96, 17)),
            "kind": range(len(KINDS)),
            "modifiers": MODIFIERS,
            "traits": ((1, False), (8, False), (8, True), (1, True)),
            "lse": (False, True),
            "mask_loop": ("split", "every", "branch"),
            "softmax": ("online", "lazy", "first_max"),
            "barrier": ("none", "after_qk", "before_pv", "loop_end"),
            "HEAD_GROUP": (1, 4, 0),
            "HEAD_SPLIT": (0, 1),
            "row_order": ("descending", "ascending"),
            "PERSISTENT": (0, 2),
            "maxnreg": (0, 168),
            "SPLITS": (1, 4),
            "PACK_GQA": (0, 1),
        }
    ):
        yield _of_point(point)


def _of_point(point: dict[str, Any]) -> tuple[Problem, Source]:
    dtype, precision = point.pop("numbers")
    alignment, wide = point.pop("traits")
    head_dim, head_dim_v = point.pop("dims")
    kind, modifiers = KINDS[point.pop("kind")], point.pop("modifiers")
    if "layout" in kind:
        modifiers = replace(modifiers, bias=Bias.NONE)  # packed sequences take none
    point_problem = problem(
        dtype=dtype, precision=precision, head_dim=head_dim, head_dim_v=head_dim_v, modifiers=modifiers, **kind
    )
    if point["PERSISTENT"]:
        point["SPLITS"] = 1
    if point_problem.mask.sparse or modifiers.bias is not Bias.NONE or modifiers.score_mod or modifiers.dropout:
        point["PACK_GQA"] = 0  # which these know nothing of
    natural = render.natural_traits(point_problem)
    traits = replace(natural, alignment=min(alignment, natural.alignment), wide=wide, lse=point.pop("lse"))
    return point_problem, source(point_problem, traits, **point)


def relatives(problem: Problem) -> Iterator[Problem]:
    """Problems that differ from `problem` only in what the launch is told: batch, heads, lengths, layout, widths."""
    changes: list[dict[str, Any]] = [{"batch": 7}, {"heads_q": 12, "heads_kv": 3}, {"heads_q": 8, "heads_kv": 8}]
    if problem.packed:
        changes += [{"tokens_q": 999, "tokens_kv": 777}, {"seq_q": 1, "seq_kv": 2}]
    else:
        changes += [{"seq_q": 1, "seq_kv": 777}, {"seq_q": 4096, "seq_kv": 4097}, {"layout": Layout.BSHD}]
    if problem.mask.bounded_left:
        changes += [{"mask": replace(problem.mask, left=0)}, {"mask": replace(problem.mask, left=4096)}]
    if problem.mask.right:
        changes += [{"mask": replace(problem.mask, right=1)}, {"mask": replace(problem.mask, right=4096)}]
    if problem.mask.sparse:
        changes += [{"mask": replace(problem.mask, density=0.25)}]
    for change in changes:
        yield replace(problem, **change)
