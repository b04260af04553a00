"""Forward kernels that merge their output into one of other keys, in the interpreters of Triton and of Gluon."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gluon_kernels
import gluon_texts
import kernels
import merged
import pytest
import torch
from interpreted import CPU, SECONDS
from merged import Merge

from autoattn.codegen import render
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Layout, Problem
from autoattn.core.variant import Source
from autoattn.errors import AutoattnError, CompileError
from autoattn.kernels import compiler
from autoattn.reference.inputs import Scores
from autoattn.validation import output_check
from autoattn.workers.worker_pool import Failure, Pool

pytestmark = pytest.mark.interpreter

WIDE, OWN = torch.float32, torch.float16
PACKED: dict[str, Any] = {"layout": Layout.PACKED, "tokens_q": 70, "tokens_kv": 120}
SINKS = Modifiers(sinks=True)
# Facts of the problem, parameters, the running output, and queries and keys.
TRITON: dict[str, tuple[dict[str, Any], dict[str, Any], torch.dtype, tuple[int, int]]] = {
    "full": ({"mask": "full"}, {}, WIDE, (33, 50)),
    "rows without keys": ({"mask": "causal"}, {}, WIDE, (50, 33)),
    "in the own dtype": ({"mask": "window:9,3"}, {}, OWN, (37, 85)),
    "tiles shared": ({"mask": "causal"}, {"SPLITS": 4}, WIDE, (37, 85)),
    "heads in a tile": ({"mask": "full"}, {"SPLITS": 2, "PACK_GQA": 1}, OWN, (5, 85)),
    "one tile after another": ({"mask": "full"}, {"PERSISTENT": 1, "softmax": "first_max"}, WIDE, (33, 50)),
    "packed": ({"mask": "causal", **PACKED}, {}, WIDE, (19, 34)),
    "sinks": ({"mask": "full", "modifiers": SINKS, "head_dim_v": 24}, {"softmax": "lazy"}, OWN, (33, 50)),
    "two pieces": ({"mask": "full", "head_dim": 24}, {"HEAD_SPLIT": 1}, WIDE, (33, 50)),
}
BASE: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 32, "num_stages": 2}
ONLINE: dict[str, Any] = {"softmax": "online", "overlap": 0, "row_sum": "each"}
# Facts of the problem, parameters, the running output, and the scores.
GLUON: dict[str, tuple[dict[str, Any], dict[str, Any], torch.dtype, Scores]] = {
    "full": ({"mask": "full"}, {"softmax": "vote", "overlap": 1}, torch.bfloat16, Scores.PLAIN),
    "a tile computed again": ({"mask": "full"}, {"softmax": "first_max", "overlap": 1}, WIDE, Scores.OUTGROWN),
    "hidden values that are wild": ({"mask": "causal"}, ONLINE, WIDE, Scores.WILD),
    "walking": (
        {"mask": "causal"}, {**ONLINE, "schedule": "dynamic", "output_buffer": "own", "query_stages": 1},
        torch.bfloat16, Scores.WILD,
    ),
    "packed": ({"mask": "causal", "layout": Layout.PACKED}, {"softmax": "lazy"}, torch.bfloat16, Scores.PLAIN),
    "heads in a tile": ({"mask": "full"}, {**ONLINE, "PACK_GQA": 4}, WIDE, Scores.PLAIN),
    "two tiles of a head": ({"mask": "full", "head_dim": 192}, {"HEAD_SPLIT": 1}, WIDE, Scores.PLAIN),
}  # fmt: skip


def of_triton(name: str) -> Merge:
    facts, chosen, running, lengths = TRITON[name]
    problem = kernels.problem(**facts)
    traits = merged.traits_for(render.natural_traits(problem), problem, running)
    return Merge(source=kernels.source(problem, traits, **chosen), problem=problem, running=running, lengths=lengths)


def said(child: Pool, merge: Merge) -> str:
    outcome = child.result(merge, SECONDS)
    assert not isinstance(outcome, Failure), f"{outcome.outcome.value}: {outcome.detail}"
    return str(outcome)


@pytest.mark.parametrize("name", TRITON)
def test_a_kernel_of_triton_merges_as_the_formula_does(child: Pool, name: str) -> None:
    assert said(child, of_triton(name)) == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (' & (log_sum != float("-inf"))', ""),
        ("(before_weight > 0.0)", "(before_weight > -1.0)"),
        ("share *= own_weight / total", "share *= own_weight"),
        ("stride_lb", "0"),
    ],
)
def test_a_planted_fault_of_triton_is_found(child: Pool, right: str, wrong: str) -> None:
    merge = of_triton("rows without keys")
    text = merge.source.text.replace(right, wrong) if wrong != "0" else changed_uses(merge.source.text, right, wrong)
    assert text != merge.source.text
    assert said(child, replace(merge, source=replace(merge.source, text=text))) != ""


def changed_uses(text: str, name: str, other: str) -> str:
    """The text with a product by an argument changed, but not the argument."""
    return text.replace(f"* {name}", f"* {other}")


def of_gluon(name: str) -> tuple[Problem, Source]:
    facts, chosen, running, _ = GLUON[name]
    problem = gluon_kernels.problem(**{"head_dim": 64, **facts})
    traits = merged.traits_for(render.natural_traits(problem), problem, running)
    return problem, gluon_kernels.source(problem, traits, **{**BASE, **chosen})


def gluon_said(name: str, problem: Problem, source: Source) -> str:
    _, _, running, scores = GLUON[name]
    generator = torch.Generator().manual_seed(0)
    case = output_check.make_small_case(problem, 70, 200, 1, CPU, generator, scores=scores)
    try:
        return merged.fault(replace(compiler.load(source, CPU), sm_count=1), case, running)
    except AutoattnError as error:
        return str(error)


@pytest.mark.parametrize("name", GLUON)
def test_a_kernel_of_gluon_merges_as_the_formula_does(name: str) -> None:
    assert gluon_said(name, *of_gluon(name)) == ""


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("full", "kept = before_weight / both", "kept = before_weight"),
        ("a tile computed again", "written = written & right", "written = written"),
        ("a tile computed again", "written = written & (gl.load(flag_ptrs) == 1)", "written = written"),
        ("hidden values that are wild", "written = written & right", "written = written"),
    ],
)
def test_a_planted_fault_of_gluon_is_found(name: str, right: str, wrong: str) -> None:
    problem, source = of_gluon(name)
    assert gluon_said(name, problem, gluon_texts.planted(source, right, wrong)) != ""


@pytest.mark.parametrize("dtype", [DType.FLOAT8])
def test_a_kernel_of_float8_merges_nothing(dtype: DType) -> None:
    problem = kernels.problem(dtype=dtype, head_dim=32)
    traits = replace(render.natural_traits(problem), lse=True, merged="fp32")
    with pytest.raises(CompileError, match=r"kernels merge outputs of float16, bfloat16 and float32 alone, got .*"):
        kernels.source(problem, traits)
