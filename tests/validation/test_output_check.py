"""The gate: a right kernel passes, and each planted fault is refused.

The kernels are written in PyTorch, so no GPU is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kernels
import pytest
import torch
from planted_calls import (
    CAUSAL,
    CPU,
    FAULTS,
    FLOAT8,
    Body,
    Call,
    Planted,
    answers_a_little_differently_each_time,
    answers_zeros,
    gate,
    judged,
    leaves_one_element_unwritten,
    longer,
    masks_nothing,
    right,
    writes_the_row_behind,
)
from torch import Tensor

from autoattn.codegen import render
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Precision, Problem
from autoattn.core.variant import Traits
from autoattn.kernels import forward
from autoattn.reference import attention_formula, inputs
from autoattn.reference.inputs import Scores
from autoattn.validation import gradient_check, output_check
from autoattn.validation.output_check import Case, Gate

pytestmark = pytest.mark.sampled

PLAIN = kernels.NUMBERS[:4]
PROBLEMS = [
    kernels.problem(dtype=dtype, precision=precision, mask=mask, head_dim=head_dim, layout=layout)
    for (dtype, precision), mask, (head_dim, layout) in zip(
        itertools.chain(PLAIN, PLAIN, PLAIN),
        itertools.cycle(kernels.MASKS),
        itertools.cycle(((16, Layout.BHSD), (57, Layout.BSHD))),
        strict=False,
    )
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_right_kernel_passes(problem: Problem) -> None:
    verdict = judged(right, problem)
    assert verdict.ok, verdict.reason
    assert verdict.checks >= len(output_check.LENGTHS)
    assert 0.0 < verdict.max_error <= verdict.allowed
    assert 0.0 < verdict.rms_error < verdict.allowed


@pytest.mark.parametrize("problem", PROBLEMS[:4], ids=str)
def test_the_same_maths_in_the_low_precision_passes(problem: Problem) -> None:
    def rough(call: Call) -> None:
        with torch.backends.mkldnn.flags(enabled=False):  # with AMX, its bfloat16 products of wild inputs gave NaN
            call.output.copy_(attention_formula.low_precision(*call.problem_and_operands()))

    verdict = judged(rough, problem)
    assert verdict.ok, verdict.reason


def test_a_right_kernel_passes_in_float8() -> None:
    verdict = judged(right, FLOAT8)
    assert verdict.ok, verdict.reason


def test_a_right_kernel_passes_the_tiny_gate() -> None:
    assert judged(right, tiny=True).ok


@pytest.mark.parametrize(("body", "problem"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_kernel_is_refused_that(body: Body, problem: Problem | None) -> None:
    verdict = judged(body, problem)
    assert not verdict.ok
    assert verdict.reason


@pytest.mark.parametrize(("body", "problem"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_tiny_gate_refuses_a_kernel_that(body: Body, problem: Problem | None) -> None:
    assert not judged(body, problem, tiny=True).ok


def test_products_in_tf32_are_refused_where_float32_was_asked_for() -> None:
    def coarse(call: Call) -> None:
        call.output.copy_(attention_formula.low_precision(*call.problem_and_operands(precision=Precision.TF32)))

    problem = kernels.problem(dtype=DType.FLOAT32, head_dim=64)
    assert not judged(coarse, problem).ok
    assert judged(coarse, replace(problem, precision=Precision.TF32)).ok
    plain, of_tf32 = (case_of(other).allowed for other in (problem, replace(problem, precision=Precision.TF32)))
    assert 100 * plain < of_tf32


@pytest.mark.parametrize("block_n", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(DType.FLOAT16, 65504.0), (DType.BFLOAT16, 3.4e38), (DType.FLOAT32, 3.4e38)]
)
def test_weights_that_overflow_around_the_first_blocks_maximum_are_refused(
    dtype: DType, limit: float, block_n: int
) -> None:
    """What first_max would be without its redo pass, and lazy without its rescaling."""

    def keeps_the_first_maximum(call: Call) -> None:
        group = call.query.shape[1] // call.key.shape[1]
        key, value = (tensor.double().repeat_interleave(group, 1) for tensor in (call.key, call.value))
        scores = (call.query.double() * call.scale) @ key.mT
        weights = torch.exp(scores - scores[..., :block_n].amax(-1, keepdim=True))
        weights = torch.where(weights > limit, math.inf, weights)
        call.output.copy_(weights @ value / weights.sum(-1, keepdim=True))

    problem = kernels.problem(dtype=dtype, mask="full", head_dim=64)
    assert not judged(keeps_the_first_maximum, problem).ok


def test_a_fault_is_named_with_the_case_and_what_was_wrong() -> None:
    said = {
        body: judged(body, problem).reason
        for body, problem in FAULTS
        if body
        in (leaves_one_element_unwritten, writes_the_row_behind, answers_a_little_differently_each_time, masks_nothing)
    }
    assert "never written" in said[leaves_one_element_unwritten]
    assert said[writes_the_row_behind].endswith("it wrote outside the output")
    assert said[answers_a_little_differently_each_time].endswith("two runs on the same inputs differ")
    assert " is allowed" in said[masks_nothing]
    assert all(reason.startswith("fp16 B2 H") for reason in said.values())


def test_a_refused_kernel_is_not_run_on_further_cases() -> None:
    problem = kernels.problem()
    planted = Planted(problem=problem, body=answers_zeros)
    verdict = gate(problem).judge(planted)  # type: ignore[arg-type]
    assert (verdict.checks, planted.launches) == (1, 2)


def test_in_an_interpreter_the_first_case_alone_runs_twice() -> None:
    """It has no races; a second run sees what the first one left."""
    problem = kernels.problem(mask="causal")
    planted = Planted(problem=problem, body=right)
    verdict = Gate(problem, CPU, tiny=True).judge(planted)  # type: ignore[arg-type]
    assert verdict.ok, verdict.reason
    assert planted.launches == verdict.checks + 1
    planted = Planted(problem=problem, body=right)
    assert Gate(problem, CPU).judge(planted).checks * 2 == planted.launches  # type: ignore[arg-type]


# --- cases ------------------------------------------------------------------------------------------------------------


def case_of(problem: Problem, **facts: Any) -> Case:
    return output_check.make_case(problem, CPU, torch.Generator().manual_seed(0), **facts)


def tensors_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    return case.operands.query, case.operands.key, case.operands.value


@pytest.mark.parametrize("layout", [Layout.BHSD, Layout.BSHD])
def test_inputs_and_outputs_stand_in_rooms_of_nan(layout: Layout) -> None:
    problem = kernels.problem(layout=layout)
    case = case_of(problem)
    for tensor, heads, seq in zip(tensors_of(case), (4, 2, 2), (33, 50, 50), strict=True):
        assert tensor.shape == (2, heads, seq, 16)
        assert tensor.isfinite().all()
        room = tensor._base
        assert room is not None
        assert int(room.isnan().sum()) == 2 * heads * case.guard * 16
        assert longer(tensor)[:, :, -1].isnan().all()
        assert tensor.stride()[2] == (16 if layout is Layout.BHSD else heads * 16)


def test_rooms_are_filled_alike_for_one_seed_and_unlike_for_another() -> None:
    problem = kernels.problem()
    first, again = Gate(problem, CPU, tiny=True), Gate(problem, CPU, tiny=True)
    other = Gate(problem, CPU, tiny=True, seed=1)
    assert torch.equal(first.cases[0].operands.query, again.cases[0].operands.query)
    assert not torch.equal(first.cases[0].operands.query, other.cases[0].operands.query)
    assert not torch.equal(first.cases[0].operands.key, first.cases[0].operands.value)


def test_at_full_size_the_first_and_the_last_row_are_always_compared() -> None:
    problem = kernels.problem(seq_q=500)
    case = case_of(problem, rows=10)
    assert len(case.rows) <= 10
    assert (int(case.rows[0]), int(case.rows[-1])) == (0, 499)
    assert case.expected.shape == (2, 4, len(case.rows), 16)


def test_a_row_that_is_not_compared_must_be_written_all_the_same() -> None:
    problem = kernels.problem(seq_q=500)
    case = case_of(problem, rows=10)
    spared = next(row for row in range(500) if row not in case.rows.tolist())

    def forgets_a_row(call: Call) -> None:
        call.output.copy_(call.right())
        call.output[:, :, spared] = math.nan

    verdict = output_check.judge(Planted(problem=problem, body=forgets_a_row), [case])  # type: ignore[arg-type]
    assert not verdict.ok
    assert "never written" in verdict.reason


@pytest.mark.parametrize("head_dim", [16, 40, 128])
def test_a_worst_case_in_tf32_allows_a_small_share_of_a_value(head_dim: int) -> None:
    """Values reach 4, and some row would read other keys if scores lost bits, here or in the yardstick."""
    lengths = {"seq_q": 700, "seq_kv": 700, "head_dim": head_dim}
    problem = kernels.problem(dtype=DType.FLOAT32, precision=Precision.TF32, mask="causal", **lengths)
    usual = output_check.full_case(problem, CPU, torch.Generator().manual_seed(1)).operands
    seed = torch.Generator().manual_seed(1)
    case = output_check.case_of(problem, inputs.outgrown(usual), seed, scores=Scores.OUTGROWN)
    assert case.allowed < 0.1


def test_without_a_guard_the_inputs_are_contiguous() -> None:
    case = case_of(kernels.problem(), guard=0)
    assert all(tensor.is_contiguous() for tensor in tensors_of(case))
    verdict = output_check.judge(Planted(problem=case.problem, body=right), [case])  # type: ignore[arg-type]
    assert verdict.ok, verdict.reason


def test_a_kernel_with_an_lse_gets_room_for_it() -> None:
    rooms = []

    def looks(call: Call) -> None:
        rooms.append(call.lse)
        right(call)
        if call.lse is not None:
            call.lse.copy_(attention_formula.attention(*call.problem_and_operands())[1])

    case = case_of(kernels.problem())
    for lse in (False, True):
        planted = Planted(problem=case.problem, body=looks, traits=Traits(lse=lse))
        assert output_check.judge(planted, [case]).ok  # type: ignore[arg-type]
    assert rooms[:2] == [None, None]
    assert [room.shape for room in rooms[2:] if room is not None] == [(2, 4, 33)] * 2
    assert all(room.dtype is torch.float32 for room in rooms[2:] if room is not None)


def in_powers_of_two(lse: Tensor) -> Tensor:
    return lse / math.log(2.0)


def infinite_where_a_row_sees_nothing(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -math.inf, math.inf)  # as FlashAttention-2 has it


def without_the_last_row(lse: Tensor) -> Tensor:
    return torch.cat((lse[:, :, :-1], torch.full_like(lse[:, :, -1:], math.nan)), dim=2)


def of_another_head(lse: Tensor) -> Tensor:
    return lse.flip(1)


@pytest.mark.parametrize(
    "wrong", [in_powers_of_two, infinite_where_a_row_sees_nothing, without_the_last_row, of_another_head]
)
def test_an_lse_is_refused_that_is(wrong: Callable[[Tensor], Tensor]) -> None:
    def errs(call: Call) -> None:
        right(call)
        if call.lse is not None:
            call.lse.copy_(wrong(attention_formula.attention(*call.problem_and_operands())[1]))

    planted = Planted(problem=CAUSAL, body=errs, traits=Traits(lse=True))
    verdict = gate(CAUSAL).judge(planted)  # type: ignore[arg-type]
    assert not verdict.ok
    assert "LSE" in verdict.reason or "two runs" in verdict.reason


def test_the_verdict_states_the_case_that_came_closest() -> None:
    problem = kernels.problem()
    cases = [case_of(replace(problem, seq_q=seq)) for seq in (8, 16, 24)]

    def errs_at_16(call: Call) -> None:
        call.output.copy_(call.right())
        if call.query.shape[2] == 16:
            call.output[0, 0, 0, 0] = float(cases[1].expected[0, 0, 0, 0]) + 0.9 * cases[1].allowed

    verdict = output_check.judge(Planted(problem=problem, body=errs_at_16), cases)  # type: ignore[arg-type]
    assert verdict.ok, verdict.reason
    assert verdict.checks == 3
    assert verdict.allowed == cases[1].allowed
    assert verdict.max_error == pytest.approx(0.9 * cases[1].allowed, rel=0.2)


def test_small_problems_keep_what_the_kernel_is_compiled_for() -> None:
    problem = kernels.problem(
        dtype=DType.FLOAT32, precision=Precision.TF32, batch=64, heads_q=32, heads_kv=4, head_dim=57, mask="causal"
    )
    for case in Gate(problem, CPU, tiny=True).cases:
        assert case.problem.family == problem.family
        assert case.problem.mask.causal
        assert case.problem.batch == 2


ALIGNED: list[dict[str, Any]] = [
    *({"modifiers": Modifiers(bias=bias)} for bias in (Bias.ADDITIVE, Bias.BOOLEAN, Bias.KEYS)),
    {"dtype": DType.FLOAT32, "head_dim": 20, "modifiers": Modifiers(bias=Bias.ADDITIVE)},
    {"head_dim": 72, "head_dim_v": 24, "layout": Layout.BSHD},
    {"layout": Layout.PACKED, "tokens_q": 70, "tokens_kv": 120},
]


@pytest.mark.parametrize("gate_of", [output_check.Gate, gradient_check.Gate])
@pytest.mark.parametrize("facts", ALIGNED, ids=str)
def test_no_case_has_memory_that_a_kernels_loads_are_too_wide_for(
    facts: dict[str, Any], gate_of: type[output_check.Gate | gradient_check.Gate]
) -> None:
    """A load of 16 bytes at another address stops the GPU, and with it all that the process does after it."""
    problem = kernels.problem(**{"seq_q": 64, "seq_kv": 64, "head_dim": 16, **facts})
    assumed = render.natural_traits(problem)
    for case in gate_of(problem, CPU).cases:
        operands, output = case.operands, output_check.empty_output(case.problem, case.guard, CPU)
        memory = forward.traits_of(operands.query, operands.key, operands.value, output, bias=operands.bias)
        assert memory.alignment >= assumed.alignment, case.name
        if case.problem.seq_q > 1:  # booleans of one query are taken for those of keys, which say nothing of it
            assert memory.bias_alignment >= assumed.bias_alignment, case.name


@pytest.mark.parametrize("mask", ["window:9,3", "window:9,0", "window:9,-1", "window:-1,3"])
def test_the_widths_of_a_window_change_from_case_to_case_and_its_sides_do_not(mask: str) -> None:
    problem = kernels.problem(mask=mask)
    masks = [case.problem.mask for case in Gate(problem, CPU, tiny=True).cases]
    assert len(set(masks)) > 2
    assert {each.structure for each in masks} == {problem.mask.structure}


def test_packed_cases_hold_empty_sequences_and_a_tail() -> None:
    problem = kernels.problem(layout=Layout.PACKED, tokens_q=70, tokens_kv=120)
    for case in Gate(problem, CPU, tiny=True).cases:
        lengths = [pair[1::2] for pair in case.operands.spans()]
        assert {(0, 0), (3, 0), (0, 9)} <= set(lengths)
        assert case.problem.tokens_q - sum(pair[0] for pair in lengths) == output_check.TAIL
        assert (case.expected_lse[:, :, -output_check.TAIL :] == -math.inf).all()


@pytest.mark.parametrize("modifiers", kernels.MODIFIERS[1:], ids=lambda modifiers: "-".join(modifiers.names))
def test_every_modifier_changes_the_gates_answers(modifiers: Modifiers) -> None:
    """So that a kernel which forgets it is refused."""
    problem = kernels.problem(modifiers=modifiers)
    right = case_of(problem)
    for name in modifiers.names:
        fewer, operands = forgotten(name)
        rest = replace(problem, modifiers=replace(modifiers, **fewer))
        answer, _ = attention_formula.attention(rest, replace(right.operands, **operands))
        assert float((answer - right.expected).abs().max()) > 3 * right.allowed, name


def forgotten(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What changes in the modifiers and in the operands when a kernel forgets one."""
    stem = name.split("-")[0]
    changes: dict[str, Any] = {"mod": {"score_mod": ""}, "bias": {"bias": Bias.NONE}}
    operands: dict[str, Any] = {"bias": {"bias": None}, "sinks": {"sinks": None}, "alibi": {"slopes": None}}
    return changes.get(stem, {stem: False}), operands.get(stem, {})


# --- values that are no finite numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "hidden"),
    [
        ({}, False),
        ({"modifiers": Modifiers(bias=Bias.KEYS)}, False),  # a key is hidden from all queries or from none
        ({"mask": "causal"}, True),
        ({"mask": "window:3,0"}, True),
        ({"mask": "blocks:16x16,0.5"}, True),
        ({"modifiers": Modifiers(bias=Bias.ADDITIVE)}, True),
    ],
)
def test_wild_values_are_put_to_kernels_that_hide_pairs(facts: dict[str, Any], hidden: bool) -> None:
    cases = gate(kernels.problem(**facts), tiny=True).cases
    assert [case.name.endswith("wild") for case in cases].count(True) == hidden
    assert all(case.name.endswith("wild") or bool(case.expected.isfinite().all()) for case in cases)


def test_a_value_that_spoils_rows_that_do_not_see_it_is_caught() -> None:
    """What a plain product of weights and values gives: 0 * NaN for the rows that the mask hides it from."""
    problem = kernels.problem(mask="causal")
    case = next(case for case in gate(problem, tiny=True).cases if case.name.endswith("wild"))
    spoilt = case.expected.masked_fill(torch.ones_like(case.expected, dtype=torch.bool), math.nan)
    assert not output_check.same_wild(spoilt, case.expected)
    assert output_check.same_wild(case.expected.clone(), case.expected)
