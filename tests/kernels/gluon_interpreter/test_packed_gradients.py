"""Gradients of packed sequences in Hopper's template, in the Gluon interpreter: each sequence is alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hopper_gradients
import pytest
import torch
from gluon_texts import CPU, planted
from rarely import rarely

from autoattn.codegen import render
from autoattn.core.problem import Layout, Problem
from autoattn.core.variant import Source
from autoattn.errors import AutoattnError
from autoattn.kernels import backward, compiler
from autoattn.validation import gradient_check
from autoattn.validation.gradient_check import Case

pytestmark = pytest.mark.interpreter

GUARD_ROWS = 3
# (queries, keys) of each sequence: none, around a block of queries, several tiles of keys, and either one alone
EVEN = tuple((length, length) for length in (0, 1, 63, 64, 65, 200))
UNEVEN = ((0, 9), (70, 130), (5, 0), (130, 70), (1, 1))
TAIL = 5  # tokens behind the last sequence


def make_problem(lengths: tuple[tuple[int, int], ...] = EVEN, **changes: Any) -> Problem:
    queries, keys = zip(*lengths, strict=True)
    sizes = {"batch": len(lengths), "seq_q": max(queries), "seq_kv": max(keys), "heads_q": 2, "heads_kv": 1}
    tokens = {"tokens_q": sum(queries) + TAIL, "tokens_kv": sum(keys) + TAIL}
    return hopper_gradients.problem(layout=Layout.PACKED, **{**sizes, **tokens, "head_dim": 64, **changes})


def rendered(problem: Problem, *, lse: bool = False, **chosen: Any) -> Source:
    """The template's default for many such sequences, changed; texts do not depend on lengths."""
    many = replace(problem, batch=40, heads_q=32, heads_kv=16, seq_q=800, seq_kv=800, tokens_q=16384, tokens_kv=16384)
    return render.render(
        problem,
        hopper_gradients.variant(many, **{"key_stages": 1, **chosen}),
        replace(render.natural_traits(problem), lse=lse),
    )


def case_of(problem: Problem, lengths: tuple[tuple[int, int], ...], lse: bool) -> Case:
    generator = torch.Generator().manual_seed(0)
    return gradient_check.make_case(problem, CPU, generator, guard=GUARD_ROWS, lengths=lengths, lse=lse)


def judged(text: Source, problem: Problem, lengths: tuple[tuple[int, int], ...] = EVEN, programs: int = 1) -> str:
    """What the gate says of the kernels, or the fault that ends them; empty where they are right."""
    kernel = replace(compiler.load(text, CPU), sm_count=programs)
    try:
        return gradient_check.judge(kernel, [case_of(problem, lengths, text.traits.lse)]).reason
    except AutoattnError as error:
        return str(error)


WALK: dict[str, Any] = {"schedule": "dynamic", "order": "any"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({"mask": "full"}, {**WALK, "BLOCK_M": 64, "next_scores": "own_step"}),
    "causal": ({"mask": "causal"}, {**WALK, "BLOCK_M": 128}),
    "a program a tile": ({"mask": "causal"}, {"schedule": "one_tile", "order": "any", "mask_loop": "branch"}),
    "in turns": ({"mask": "causal", "head_dim": 128}, {"schedule": "dynamic", "order": "descending"}),
    "in turns, by threads": ({"mask": "full"}, {"schedule": "one_tile", "order": "ascending", "summing": "threads"}),
    "window, in turns": ({"mask": "window:40,9"}, {"schedule": "dynamic", "order": "descending", "mask_loop": "split"}),
    "window": ({"mask": "window:40,9"}, {**WALK, "slot_release": "mbarrier"}),
    "window on the left": ({"mask": "window:40,-1", "head_dim": 80, "head_dim_v": 56}, WALK),
    "two tiles of keys": ({"mask": "causal"}, {**WALK, "key_stages": 2, "BLOCK_M": 64}),
    "two tiles of keys, in turns": ({"mask": "full"}, {"schedule": "dynamic", "order": "ascending", "key_stages": 2}),
    "wide heads": ({"mask": "causal", "head_dim": 192, "head_dim_v": 128}, {}),
    "between powers of two": ({"mask": "causal", "head_dim": 96}, {**WALK, "num_stages": 2}),
}


@pytest.mark.parametrize("lengths", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "kind", rarely(CASES, lambda kind: kind in ("causal", "in turns", "window", "two tiles of keys"))
)
def test_gradients_are_those_of_each_sequences_own_pairs(kind: str, lengths: tuple[tuple[int, int], ...]) -> None:
    facts, chosen = CASES[kind]
    problem = make_problem(lengths, **facts)
    text = rendered(problem, lse=lengths is UNEVEN, **chosen)
    # The interpreter runs programs one after the other, so that none can wait for the turn of a later one.
    programs = 1 if "turns" in kind else 2
    assert judged(text, problem, lengths, programs) == ""


@pytest.mark.parametrize("schedule", ["one_tile", "dynamic"])
def test_numbers_of_a_sequence_reach_no_other_one(schedule: str) -> None:
    lengths = ((65, 65), (63, 63), (66, 66))
    problem = make_problem(lengths, mask="causal", heads_q=1)
    kernel = compiler.load(rendered(problem, schedule=schedule, order="any"), CPU)
    case = case_of(problem, lengths, lse=False)
    clean, spoilt = gradient_check.room_of(case), gradient_check.room_of(case)
    backward.launch(kernel, problem, case.operands, case.saved, clean)
    for tensor in (case.operands.query, case.operands.key, case.operands.value, case.saved.output_grad):
        tensor[:, :, 65:128] = math.nan
        tensor[:, :, 194:] = math.inf  # behind the last sequence
    backward.launch(kernel, problem, case.operands, case.saved, spoilt)
    for (name, ours), (_, theirs) in zip(spoilt.named(), clean.named(), strict=True):
        for begin, end in ((0, 65), (128, 194)):
            torch.testing.assert_close(ours[:, :, begin:end], theirs[:, :, begin:end], msg=name)
        assert bool(ours[:, :, 65:128].isnan().any())
        assert not bool(ours[:, :, 194:].any()), "tokens behind the last sequence have gradients of 0"


@pytest.mark.parametrize("order", ["any", "descending"])
def test_sequences_with_more_queries_come_first_and_tiles_without_keys_not_at_all(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = ((3, 200), (0, 130), (70, 0), (70, 129), (9, 1))
    problem = make_problem(lengths, mask="causal", heads_q=1)
    kernel = compiler.load(rendered(problem, schedule="dynamic", order=order), CPU)
    case, kept = case_of(problem, lengths, lse=False), []
    make = backward.empty_scratch
    monkeypatch.setattr(backward, "empty_scratch", lambda *facts: kept.append(make(*facts)) or kept[-1])
    backward.launch(kernel, problem, case.operands, case.saved, gradient_check.room_of(case))
    table = kept[0].turns[-(2 * len(lengths) + 3) :].tolist()
    begins, sequences = table[: len(lengths) + 2], table[len(lengths) + 2 :]
    assert sequences == [2, 3, 4, 0, 1, 5], "what lies behind the last one counts as one without queries"
    assert begins == [0, 0, 2, 3, 5, 7, 8]


FAULTS = [  # (in the text, in its place)
    ("EDGE - seq_q + start_m, 0]", "EDGE - seq_q + start_m + 1, 0]"),
    ("gl.load(order_ptr + middle) <= tile", "gl.load(order_ptr + middle) < tile"),
    ("end_kv, i_kv, EDGE - seq_kv + start_n, 0], values", "end_kv + 1, i_kv, EDGE - seq_kv - 1 + start_n, 0], values"),
    ("i_h * stride_r + first_block * BLOCK_M", "i_h * stride_r + (first_block - 1) * BLOCK_M"),
]


@pytest.mark.parametrize(("right", "wrong"), rarely(FAULTS, lambda fault: FAULTS.index(fault) < 2))
def test_a_planted_fault_is_found(right: str, wrong: str) -> None:
    lengths = ((65, 65), (64, 64), (0, 0), (1, 1))
    problem = make_problem(lengths, mask="causal", heads_q=1)
    text = rendered(problem, **WALK, BLOCK_M=64, next_scores="own_step")
    assert judged(text, problem, lengths) == ""
    assert judged(planted(text, right, wrong), problem, lengths).startswith("backward bf16 "), (
        "the gate found no other number"
    )


def test_a_sequence_may_be_longer_than_its_tokens() -> None:
    """Offsets that pass the tokens are cut there, as in the kernels of every card."""
    lengths = ((65, 65), (70, 70))
    problem = make_problem(lengths, mask="causal", heads_q=1, tokens_q=135, tokens_kv=135)
    kernel = compiler.load(rendered(problem, **WALK), CPU)
    case = case_of(problem, lengths, lse=False)
    within, beyond = gradient_check.room_of(case), gradient_check.room_of(case)
    backward.launch(kernel, problem, case.operands, case.saved, within)
    for offsets in (case.operands.cu_seqlens_q, case.operands.cu_seqlens_kv):
        assert offsets is not None
        offsets[-1] += 1000
    backward.launch(kernel, problem, case.operands, case.saved, beyond)
    for (name, ours), (_, theirs) in zip(beyond.named(), within.named(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
