"""Gradients under block tables in Hopper's template, in the Gluon interpreter: each head walks lists of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hopper_gradients
import interpreted
import pytest
import torch
from gluon_texts import CPU
from rarely import rarely

from autoattn.codegen import render
from autoattn.core.mask import Mask
from autoattn.core.problem import Modifiers, Problem
from autoattn.core.variant import Source
from autoattn.errors import AutoattnError
from autoattn.kernels import compiler
from autoattn.tensors import block_table
from autoattn.tensors.operands import Operands
from autoattn.validation import gradient_check

pytestmark = pytest.mark.interpreter

DOCUMENTS = "captured0: int32[1]\ncaptured0[q_idx] >= captured0[kv_idx]"
SINKS = Modifiers(sinks=True)
HEADS = "(q_idx + h + b) % 3 != kv_idx % 3"
# Facts, what the default is changed by, and lengths: of blocks of queries that end behind the last query, too.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "whole blocks": ({"mask": Mask.blocks(64, 128, 0.5)}, {"next_scores": "own_step"}, (200, 300)),
    "documents": ({"mask": Mask.blocks(64, 128, 0.5, DOCUMENTS)}, {"next_scores": "after_value_grad"}, (150, 300)),
    "by heads": ({"mask": Mask.blocks(256, 128, 0.5, HEADS)}, {"schedule": "one_tile", "BLOCK_M": 128}, (600, 290)),
    "two tiles of keys": ({"mask": Mask.blocks(64, 128, 0.5, HEADS)}, {"key_stages": 2, "BLOCK_M": 64}, (150, 300)),
    "sinks": ({"mask": Mask.blocks(128, 128, 0.5, HEADS), "head_dim": 128, "modifiers": SINKS}, {}, (333, 200)),
    "between powers of two": ({"mask": Mask.blocks(128, 256, 0.5, HEADS), "head_dim": 80}, {}, (200, 600)),
    "wide heads": ({"mask": Mask.blocks(64, 64, 0.5, DOCUMENTS), "head_dim": 192, "head_dim_v": 128}, {}, (150, 200)),
}


def make_problem(lengths: tuple[int, int], **facts: Any) -> Problem:
    sizes = {"batch": 2, "heads_q": 2, "heads_kv": 1, "seq_q": lengths[0], "seq_kv": lengths[1], "head_dim": 64}
    return hopper_gradients.problem(**{**sizes, **facts})


def rendered(problem: Problem, **chosen: Any) -> Source:
    """The template's default for a large problem of this kind, changed."""
    many = hopper_gradients.problem(
        mask=problem.mask, modifiers=problem.modifiers, head_dim=problem.head_dim, head_dim_v=problem.head_dim_v
    )
    return render.render(problem, hopper_gradients.feasible(many, **chosen))


def own_tables(problem: Problem) -> Operands:
    """Each sequence and head has a table of its own; the first one's first queries and last keys are in no block."""
    generator = torch.Generator().manual_seed(0)
    shape = (
        problem.batch,
        problem.heads_q,
        -(-problem.seq_q // problem.mask.block_q),
        -(-problem.seq_kv // problem.mask.block_kv),
    )
    kept, cut = (torch.rand(shape, generator=generator) < share for share in (0.6, 0.5))
    kept[0, 0, 0] = False
    kept[0, 0, :, -1] = False
    sizes = {"block_q": problem.mask.block_q, "block_kv": problem.mask.block_kv, "seq_kv": problem.seq_kv}
    table = block_table.table_of(kept, **sizes, partial=cut if problem.mask.mod else None)
    return replace(interpreted.inside_nan(problem), table=table)


def judged(text: Source, problem: Problem) -> str:
    """What the gate says of the kernels, or the fault that ends them; empty where they are right."""
    case = gradient_check.case_of(problem, own_tables(problem), torch.Generator().manual_seed(0), guard=0, lse=False)
    try:
        return gradient_check.judge(compiler.load(text, CPU), [case]).reason
    except AutoattnError as error:
        return str(error)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", rarely(CASES, lambda name: name in ("whole blocks", "documents", "wide heads")))
def test_each_head_has_the_gradients_of_its_own_table(name: str) -> None:
    facts, chosen, lengths = CASES[name]
    problem = make_problem(lengths, **facts)
    assert judged(rendered(problem, **chosen), problem) == ""


FAULTS = {
    "steps behind the last query": ("count * STEPS - gl.maximum((last + 1) * STEPS - steps, 0)", "count * STEPS"),
    "a list that is not read": ("        steps += count", "        steps = count"),
    "the other list": ("turned_partial_counts_ptr, turned_partial_blocks_ptr, turned_partial_width, seq_q\n",
        "turned_full_counts_ptr, turned_full_blocks_ptr, turned_full_width, seq_q\n"),
    "the table of another head": ("i_h * turned_stride_th", "i_kv * turned_stride_th"),
    "a mask that is not asked": ("& (kept), weights", "& (kept | True), weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", rarely(FAULTS, lambda name: name in list(FAULTS)[:2]))
def test_a_planted_fault_is_found(name: str) -> None:
    problem = make_problem((300, 300), mask=Mask.blocks(256, 128, 0.5, HEADS))
    text = rendered(problem, BLOCK_M=64, next_scores="after_value_grad")
    assert judged(text, problem) == ""
    right, wrong = FAULTS[name]
    assert right in text.text
    assert judged(replace(text, text=text.text.replace(right, wrong)), problem) != ""
