"""The worst case of kernels that keep their first maximum, on a real card: what is computed twice, and rightly."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import kernels
import pytest
import torch

from autoattn.codegen import render, search_space, template_facts
from autoattn.core.cache_entry import WorstCase
from autoattn.core.device import Device
from autoattn.core.problem import DType, Precision, Problem
from autoattn.core.variant import Variant
from autoattn.hardware import nvidia
from autoattn.kernels import compiler, forward
from autoattn.reference import inputs
from autoattn.reference.inputs import Scores
from autoattn.search.gpu_jobs import Outgrow

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
HOPPER, PLAIN = "gluon/forward", "triton/forward"
HEADS = 2 * 8  # of all sequences
FACTS: dict[str, Any] = {
    "dtype": DType.BFLOAT16, "batch": 2, "heads_q": 8, "heads_kv": 8, "seq_q": 4096, "seq_kv": 4096, "head_dim": 128,
}  # fmt: skip


@pytest.fixture
def card() -> Device:
    present = nvidia.present()
    assert present is not None
    return present


def keeping(problem: Problem, card: Device, template: str, **changes: Any) -> Variant:
    """The first seed that keeps its first maximum, changed; skips where the card has no such kernel."""
    points = search_space.load(template)
    for seed in points.seeds_for(problem, card):
        if seed["softmax"] == template_facts.FIRST_MAX:
            variant = Variant.of(template, {**seed.as_dict(), **changes})
            assert points.why_infeasible(variant, problem, card) is None
            return variant
    pytest.skip(f"{template} has no seed that keeps its first maximum here")


def worst_of(problem: Problem, variant: Variant) -> WorstCase:
    """It is as right as these types can say it: a row is nearly one value, or a mean of two whose scores are close."""
    worst_case = Outgrow(problem=problem, source=render.render(problem, variant), seed=0).run({})
    assert isinstance(worst_case, WorstCase), worst_case
    assert worst_case.max_error < {DType.FLOAT16: 0.01, DType.BFLOAT16: 0.06, DType.FLOAT32: 0.01}[problem.dtype]
    return worst_case


@pytest.mark.parametrize("schedule", ["dynamic", "persistent", "one_tile"])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_worst_inputs_have_hoppers_kernels_compute_their_tiles_twice(
    mask: str, dtype: DType, schedule: str, card: Device
) -> None:
    """All tiles but, under a causal mask, those of the first rows, which see no other keys than their first block's."""
    problem = kernels.problem(**{**FACTS, "mask": mask, "dtype": dtype})
    changes: dict[str, Any] = {"schedule": schedule}
    if schedule == "one_tile":
        changes |= {"query_stages": 1, "output_buffer": "shared"}
    worst_case = worst_of(problem, keeping(problem, card, HOPPER, **changes))
    assert worst_case.tiles >= HEADS * 4096 // 256
    spared = HEADS if mask == "causal" else 0
    assert worst_case.tiles - spared <= worst_case.redone <= worst_case.tiles
    assert 1.2 < worst_case.slowdown < 8.0


@pytest.mark.parametrize(
    "changes",
    [{"mask": "window:1024,0"}, {"head_dim": 64}, {"seq_q": 2048, "heads_kv": 2}],
    ids=["window", "head dim 64", "fewer queries, grouped"],
)
def test_nearly_all_of_other_problems_tiles_are_computed_twice(changes: dict[str, Any], card: Device) -> None:
    problem = kernels.problem(**{**FACTS, **changes})
    worst_case = worst_of(problem, keeping(problem, card, HOPPER))
    assert worst_case.tiles - HEADS <= worst_case.redone <= worst_case.tiles
    assert worst_case.slowdown > 1.2


@pytest.mark.parametrize("mask", ["full", "causal", "window:1024,0", "blocks:128x128,0.5"])
def test_the_worst_inputs_have_plain_tritons_kernels_compute_their_tiles_twice(mask: str, card: Device) -> None:
    """They do not count tiles. A kernel that never computes one again leaves NaN in each that should have been."""
    problem = kernels.problem(**{**FACTS, "mask": mask})
    variant = keeping(problem, card, PLAIN)
    worst_case = worst_of(problem, variant)
    assert (worst_case.tiles, worst_case.redone) == (0, 0)
    assert worst_case.slowdown > 1.2
    source = render.render(problem, variant)
    test = "if tl.max(tl.where(spoilt == 0.0, 0, 1)) > 0:"
    assert source.text.count(test) == 1
    never = replace(source, text=source.text.replace(test, test.replace("> 0:", "> 1:")))
    operands = inputs.make(problem, CUDA, torch.Generator().manual_seed(1), scores=Scores.OUTGROWN)
    output = forward.empty_output(problem, operands.query)
    forward.launch(compiler.load(never, CUDA), problem, operands, output, None)
    rows = int(variant["BLOCK_M"])
    spoilt = output.isnan().any(3).unflatten(2, (-1, rows)).any(3)  # [batch, heads, tiles]
    first = math.ceil(int(variant["BLOCK_N"]) / rows)  # tiles that may see the first block alone
    assert bool(spoilt[:, :, 0 if mask == "full" else first :].all())


@pytest.mark.parametrize("shared", [{}, {"SPLITS": 4}], ids=["tiles alone", "tiles shared"])
@pytest.mark.parametrize("head_dim", [40, 64])
def test_worst_cases_in_tf32_are_as_right_as_what_it_keeps_of_values(
    head_dim: int, shared: dict[str, Any], card: Device
) -> None:
    """Their scores are exact; values reach 5 and lose up to 2**-10 of that."""
    facts = {"dtype": DType.FLOAT32, "precision": Precision.TF32, "head_dim": head_dim, "mask": "causal"}
    problem = kernels.problem(**{**FACTS, **facts, "seq_q": 2538, "seq_kv": 2538})
    assert worst_of(problem, keeping(problem, card, PLAIN, **shared)).slowdown > 1.2


def test_normal_inputs_have_no_worst_case(card: Device) -> None:
    """What the test above calls spoilt is not so without scores that outgrow a maximum."""
    problem = kernels.problem(**{**FACTS, "mask": "causal"})
    source = render.render(problem, keeping(problem, card, HOPPER))
    operands = inputs.make(problem, CUDA, torch.Generator().manual_seed(1))
    output = forward.empty_output(problem, operands.query)
    flags = forward.launch(compiler.load(source, CUDA), problem, operands, output, None, counting=True)
    assert flags is not None
    assert int(flags.sum()) == 0
