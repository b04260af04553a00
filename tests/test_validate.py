"""The gate: a right kernel passes, and each planted fault is refused.

The kernels are written in PyTorch, so no GPU is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import kernels
import pytest
import torch
from torch import Tensor

from autoattn import reference, validate
from autoattn.mask import Mask
from autoattn.operands import Operands
from autoattn.problem import Bias, DType, Layout, Modifiers, Precision, Problem
from autoattn.trial import Verdict
from autoattn.validate import Case, Gate
from autoattn.variant import Traits

CPU = torch.device("cpu")


@dataclass(kw_only=True)
class Call:
    """What a planted kernel is launched with: [batch, heads, seq, head_dim] views."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor | None
    scale: float
    problem: Problem
    times: int  # launches before this one
    scales: dict[str, Tensor | None]  # of query, key and value, as float8 has them

    @property
    def mask(self) -> Mask:
        return self.problem.mask

    def right(self, **changes: Any) -> Tensor:
        """The answer in float32, rounded to the output's type; with changes, of changed inputs."""
        precise = torch.float64 if self.output.dtype is torch.float32 else torch.float32
        answer, _ = reference.attention(*self.asked(**changes), dtype=precise)
        return answer.to(self.output.dtype)

    def asked(self, *, mask: Mask | None = None, precision: Precision | None = None, **changes: Any) -> Any:
        """The problem and the operands of this launch, or of changed ones."""
        tensors = {"query": self.query, "key": self.key, "value": self.value, "scale": self.scale, **self.scales}
        operands = Operands(**{**tensors, **changes})
        sizes = {
            "batch": operands.query.shape[0], "heads_q": operands.query.shape[1], "seq_q": operands.query.shape[2],
            "heads_kv": operands.key.shape[1], "seq_kv": operands.key.shape[2],
        }  # fmt: skip
        mask = mask if mask is not None else self.mask
        precision = precision if precision is not None else self.problem.precision
        return replace(self.problem, **sizes, layout=Layout.BHSD, mask=mask, precision=precision), operands


Body = Callable[[Call], None]


@dataclass(kw_only=True)
class Planted:
    """What the gate asks of a kernel, with a body in PyTorch."""

    problem: Problem
    body: Body
    traits: Traits = field(default_factory=Traits)
    sm_count: int = 1
    launches: int = 0

    @property
    def source(self) -> Any:
        return SimpleNamespace(traits=self.traits)

    @property
    def module(self) -> Any:
        return SimpleNamespace(grid=lambda batch, heads_q, rows, sm_count: (batch * heads_q,))

    def launch(self, grid: tuple[int], arguments: Mapping[str, Any]) -> None:
        self.body(
            Call(
                query=arguments["query_ptr"], key=arguments["key_ptr"], value=arguments["value_ptr"],
                output=arguments["output_ptr"], lse=arguments["lse_ptr"],
                scale=arguments["scale"], problem=self.problem, times=self.launches,
                scales={name: arguments[f"{name}_ptr"] for name in ("query_scale", "key_scale", "value_scale")},
            )
        )  # fmt: skip
        self.launches += 1


def judged(body: Body, one: Problem | None = None, *, tiny: bool = False) -> Verdict:
    one = one if one is not None else CAUSAL
    return gate(one, tiny=tiny).judge(Planted(problem=one, body=body))  # type: ignore[arg-type]


@cache
def gate(one: Problem, *, tiny: bool = False) -> Gate:
    return Gate(one, CPU, tiny=tiny)


def right(call: Call) -> None:
    call.output.copy_(call.right())


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


@pytest.mark.parametrize("one", PROBLEMS, ids=str)
def test_a_right_kernel_passes(one: Problem) -> None:
    verdict = judged(right, one)
    assert verdict.ok, verdict.reason
    assert verdict.checks >= len(validate.LENGTHS)
    assert 0.0 < verdict.max_error <= verdict.allowed
    assert 0.0 < verdict.rms_error < verdict.allowed


@pytest.mark.parametrize("one", PROBLEMS[:4], ids=str)
def test_the_same_maths_in_the_low_precision_passes(one: Problem) -> None:
    def rough(call: Call) -> None:
        call.output.copy_(reference.low_precision(*call.asked()))

    verdict = judged(rough, one)
    assert verdict.ok, verdict.reason


def test_a_right_kernel_passes_in_float8() -> None:
    verdict = judged(right, FLOAT8)
    assert verdict.ok, verdict.reason


def test_a_right_kernel_passes_the_tiny_gate() -> None:
    assert judged(right, tiny=True).ok


# --- planted faults ---------------------------------------------------------------------------------------------------


def hides_one_key_too_many(call: Call) -> None:
    shifted = torch.cat((call.key[:, :, :1] * 0.0, call.key[:, :, :-1]), dim=2)
    values = torch.cat((call.value[:, :, :1], call.value[:, :, :-1]), dim=2)
    call.output.copy_(call.right(key=shifted, value=values))


def shows_one_key_too_many(call: Call) -> None:
    call.output.copy_(masked(call, lambda rows, keys, shift: keys <= rows + shift + 1))


def hides_the_diagonal(call: Call) -> None:
    call.output.copy_(masked(call, lambda rows, keys, shift: keys < rows + shift))


def aligns_at_the_other_corner(call: Call) -> None:
    call.output.copy_(call.right(mask=Mask.parse("causal:top-left")))


def masks_nothing(call: Call) -> None:
    call.output.copy_(call.right(mask=Mask()))


def leaves_one_element_unwritten(call: Call) -> None:
    room = call.output[-1, -1, -1, -1].clone()
    right(call)
    call.output[-1, -1, -1, -1] = room


def leaves_the_last_rows_unwritten(call: Call) -> None:
    rows = call.output.shape[2] // 64 * 64
    call.output[:, :, :rows].copy_(call.right()[:, :, :rows])


def writes_the_row_behind(call: Call) -> None:
    right(call)
    longer(call.output)[:, :, -1] = 0.0


def reads_the_key_behind(call: Call) -> None:
    call.output.copy_(call.right(key=longer(call.key), value=longer(call.value), mask=Mask()))


def multiplies_what_is_behind_by_zero(call: Call) -> None:
    right(call)
    call.output.add_(longer(call.value)[:, :1, -1:] * 0.0)


def scales_a_little_more(call: Call) -> None:
    call.output.copy_(call.right(scale=call.scale * 1.05))


def scales_by_the_padded_head_dim(call: Call) -> None:
    call.output.copy_(call.right(scale=call.problem.head_dim_padded**-0.5))


def scales_nothing(call: Call) -> None:
    call.output.copy_(call.right(scale=1.0))


def swaps_the_scales_of_key_and_value(call: Call) -> None:
    key, value = call.scales["key_scale"], call.scales["value_scale"]
    call.output.copy_(call.right(key_scale=value, value_scale=key))


def scales_values_by_the_querys_scale(call: Call) -> None:
    call.output.copy_(call.right(value_scale=call.scales["query_scale"]))


def counts_padded_keys_of_a_tile(call: Call) -> None:
    """Keys up to the next multiple of 64 take part with score 0 and value 0."""
    missing = -call.key.shape[2] % 64
    key, value = (torch.nn.functional.pad(tensor, (0, 0, 0, missing)) for tensor in (call.key, call.value))
    if call.mask.causal:
        query = torch.nn.functional.pad(call.query, (0, 0, missing, 0))
        call.output.copy_(call.right(query=query, key=key, value=value)[:, :, missing:])
    else:
        call.output.copy_(call.right(key=key, value=value))


def forgets_the_tail_of_the_keys(call: Call) -> None:
    kept = max(1, call.key.shape[2] // 16 * 16)
    call.output.copy_(call.right(key=call.key[:, :, :kept], value=call.value[:, :, :kept], mask=Mask()))


def reads_key_heads_in_turn(call: Call) -> None:
    """Query head h reads key head h modulo their number: right only when all heads have their own."""
    heads = torch.arange(call.query.shape[1]) % call.key.shape[1]
    call.output.copy_(call.right(key=call.key[:, heads], value=call.value[:, heads]))


def reads_the_first_key_head_only(call: Call) -> None:
    call.output.copy_(call.right(key=call.key[:, :1], value=call.value[:, :1]))


def reads_the_first_sequence_only(call: Call) -> None:
    call.output.copy_(call.right(key=call.key[:1].expand_as(call.key), value=call.value[:1].expand_as(call.value)))


def assumes_contiguous_queries(call: Call) -> None:
    dense = torch.empty(call.query.shape).stride()
    room = call.query.as_strided(call.query.shape, dense)
    call.output.copy_(call.right(query=room))


def answers_zeros(call: Call) -> None:
    call.output.zero_()


def answers_the_mean(call: Call) -> None:
    call.output.copy_(call.right(query=call.query * 0.0))


def answers_nan_where_a_row_sees_nothing(call: Call) -> None:
    call.output.copy_(call.right())
    blind = call.query.shape[2] - call.key.shape[2]
    call.output[:, :, : max(0, blind)] = math.nan


def answers_the_mean_where_a_row_sees_nothing(call: Call) -> None:
    call.output.copy_(call.right())
    blind = max(0, call.query.shape[2] - call.key.shape[2])
    call.output[:, :, :blind] = call.value.mean(dim=2, keepdim=True).repeat_interleave(
        call.query.shape[1] // call.key.shape[1], dim=1
    )


def answers_a_little_differently_each_time(call: Call) -> None:
    call.output.copy_(call.right())
    flip = torch.finfo(call.output.dtype).eps * call.times
    call.output[0, 0, 0, 0] *= 1.0 + flip


def errs_in_one_element_of_a_late_head(call: Call) -> None:
    call.output.copy_(call.right())
    call.output[-1, -1, call.output.shape[2] // 2, -1] += 0.05


def sums_in_sixteen_bits(call: Call) -> None:
    scores = (call.query * call.scale) @ call.key.repeat_interleave(call.query.shape[1] // call.key.shape[1], 1).mT
    hidden = ~reference.visible(*call.asked(), torch.arange(call.query.shape[2]))
    weights = scores.float().masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0).bfloat16()
    value = call.value.repeat_interleave(call.query.shape[1] // call.key.shape[1], 1).bfloat16()
    acc = torch.zeros(call.output.shape, dtype=torch.bfloat16)
    for key in range(0, call.key.shape[2], 16):
        acc += weights[..., key : key + 16] @ value[:, :, key : key + 16]
    call.output.copy_(acc)


def masked(call: Call, sees: Callable[[Tensor, Tensor, int], Tensor]) -> Tensor:
    group = call.query.shape[1] // call.key.shape[1]
    key, value = (tensor.float().repeat_interleave(group, 1) for tensor in (call.key, call.value))
    seq_q, seq_kv = call.query.shape[2], call.key.shape[2]
    seen = sees(torch.arange(seq_q)[:, None], torch.arange(seq_kv)[None, :], seq_kv - seq_q)
    scores = (call.query.float() * call.scale @ key.mT).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ value).to(call.output.dtype)


def longer(tensor: Tensor) -> Tensor:
    """The view and the row behind each of its sequences."""
    batch, heads, seq, head_dim = tensor.shape
    return tensor.as_strided((batch, heads, seq + 1, head_dim), tensor.stride(), tensor.storage_offset())


CAUSAL = kernels.problem(mask="causal", head_dim=24)
FULL = kernels.problem(mask="full", head_dim=24)
FLOAT8 = kernels.problem(dtype=DType.FLOAT8, head_dim=32)
FAULTS: list[tuple[Body, Problem | None]] = [
    (hides_one_key_too_many, None),
    (shows_one_key_too_many, None),
    (hides_the_diagonal, None),
    (aligns_at_the_other_corner, None),
    (masks_nothing, None),
    (leaves_one_element_unwritten, None),
    (leaves_the_last_rows_unwritten, None),
    (writes_the_row_behind, None),
    (reads_the_key_behind, FULL),
    (multiplies_what_is_behind_by_zero, None),
    (scales_a_little_more, None),
    (scales_by_the_padded_head_dim, None),
    (scales_nothing, None),
    (counts_padded_keys_of_a_tile, FULL),
    (counts_padded_keys_of_a_tile, kernels.problem(mask="causal:top-left")),
    (forgets_the_tail_of_the_keys, FULL),
    (reads_key_heads_in_turn, None),
    (reads_key_heads_in_turn, replace(CAUSAL, heads_q=2)),  # the same kernel serves grouped heads too
    (reads_the_first_key_head_only, None),
    (reads_the_first_sequence_only, None),
    (assumes_contiguous_queries, None),
    (answers_zeros, None),
    (answers_the_mean, None),
    (answers_nan_where_a_row_sees_nothing, None),
    (answers_the_mean_where_a_row_sees_nothing, None),
    (answers_a_little_differently_each_time, None),
    (errs_in_one_element_of_a_late_head, None),
    (sums_in_sixteen_bits, None),
    (swaps_the_scales_of_key_and_value, FLOAT8),
    (scales_values_by_the_querys_scale, FLOAT8),
]


@pytest.mark.parametrize(("body", "one"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_kernel_is_refused_that(body: Body, one: Problem | None) -> None:
    verdict = judged(body, one)
    assert not verdict.ok
    assert verdict.reason


@pytest.mark.parametrize(("body", "one"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_tiny_gate_refuses_a_kernel_that(body: Body, one: Problem | None) -> None:
    assert not judged(body, one, tiny=True).ok


def test_products_in_tf32_are_refused_where_float32_was_asked_for() -> None:
    def coarse(call: Call) -> None:
        call.output.copy_(reference.low_precision(*call.asked(precision=Precision.TF32)))

    one = kernels.problem(dtype=DType.FLOAT32, head_dim=64)
    assert not judged(coarse, one).ok
    assert judged(coarse, replace(one, precision=Precision.TF32)).ok
    plain, of_tf32 = (case_of(other).allowed for other in (one, replace(one, precision=Precision.TF32)))
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

    one = kernels.problem(dtype=dtype, mask="full", head_dim=64)
    assert not judged(keeps_the_first_maximum, one).ok


def test_a_fault_is_named_with_the_case_and_what_was_wrong() -> None:
    said = {
        body: judged(body, one).reason
        for body, one in FAULTS
        if body
        in (leaves_one_element_unwritten, writes_the_row_behind, answers_a_little_differently_each_time, masks_nothing)
    }
    assert "never written" in said[leaves_one_element_unwritten]
    assert said[writes_the_row_behind].endswith("it wrote outside the output")
    assert said[answers_a_little_differently_each_time].endswith("two runs on the same inputs differ")
    assert " is allowed" in said[masks_nothing]
    assert all(reason.startswith("fp16 B2 H") for reason in said.values())


def test_a_refused_kernel_is_not_run_on_further_cases() -> None:
    one = kernels.problem()
    planted = Planted(problem=one, body=answers_zeros)
    verdict = gate(one).judge(planted)  # type: ignore[arg-type]
    assert (verdict.checks, planted.launches) == (1, 2)


# --- cases ------------------------------------------------------------------------------------------------------------


def case_of(one: Problem, **facts: Any) -> Case:
    return validate.make_case(one, CPU, torch.Generator().manual_seed(0), **facts)


def tensors_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    return case.operands.query, case.operands.key, case.operands.value


@pytest.mark.parametrize("layout", [Layout.BHSD, Layout.BSHD])
def test_inputs_and_outputs_stand_in_rooms_of_nan(layout: Layout) -> None:
    one = kernels.problem(layout=layout)
    case = case_of(one)
    for tensor, heads, seq in zip(tensors_of(case), (4, 2, 2), (33, 50, 50), strict=True):
        assert tensor.shape == (2, heads, seq, 16)
        assert tensor.isfinite().all()
        room = tensor._base
        assert room is not None
        assert int(room.isnan().sum()) == 2 * heads * case.guard * 16
        assert longer(tensor)[:, :, -1].isnan().all()
        assert tensor.stride()[2] == (16 if layout is Layout.BHSD else heads * 16)


def test_rooms_are_filled_alike_for_one_seed_and_unlike_for_another() -> None:
    one = kernels.problem()
    first, again = Gate(one, CPU, tiny=True), Gate(one, CPU, tiny=True)
    other = Gate(one, CPU, tiny=True, seed=1)
    assert torch.equal(first.cases[0].operands.query, again.cases[0].operands.query)
    assert not torch.equal(first.cases[0].operands.query, other.cases[0].operands.query)
    assert not torch.equal(first.cases[0].operands.key, first.cases[0].operands.value)


def test_at_full_size_the_first_and_the_last_row_are_always_compared() -> None:
    one = kernels.problem(seq_q=500)
    case = case_of(one, rows=10)
    assert len(case.rows) <= 10
    assert (int(case.rows[0]), int(case.rows[-1])) == (0, 499)
    assert case.expected.shape == (2, 4, len(case.rows), 16)


def test_a_row_that_is_not_compared_must_be_written_all_the_same() -> None:
    one = kernels.problem(seq_q=500)
    case = case_of(one, rows=10)
    spared = next(row for row in range(500) if row not in case.rows.tolist())

    def forgets_a_row(call: Call) -> None:
        call.output.copy_(call.right())
        call.output[:, :, spared] = math.nan

    verdict = validate.judge(Planted(problem=one, body=forgets_a_row), [case])  # type: ignore[arg-type]
    assert not verdict.ok
    assert "never written" in verdict.reason


def test_without_a_guard_the_inputs_are_contiguous() -> None:
    case = case_of(kernels.problem(), guard=0)
    assert all(tensor.is_contiguous() for tensor in tensors_of(case))
    verdict = validate.judge(Planted(problem=case.problem, body=right), [case])  # type: ignore[arg-type]
    assert verdict.ok, verdict.reason


def test_a_kernel_with_an_lse_gets_room_for_it() -> None:
    rooms = []

    def looks(call: Call) -> None:
        rooms.append(call.lse)
        right(call)
        if call.lse is not None:
            call.lse.copy_(reference.attention(*call.asked())[1])

    case = case_of(kernels.problem())
    for lse in (False, True):
        planted = Planted(problem=case.problem, body=looks, traits=Traits(lse=lse))
        assert validate.judge(planted, [case]).ok  # type: ignore[arg-type]
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
            call.lse.copy_(wrong(reference.attention(*call.asked())[1]))

    planted = Planted(problem=CAUSAL, body=errs, traits=Traits(lse=True))
    verdict = gate(CAUSAL).judge(planted)  # type: ignore[arg-type]
    assert not verdict.ok
    assert "LSE" in verdict.reason or "two runs" in verdict.reason


def test_the_verdict_states_the_case_that_came_closest() -> None:
    one = kernels.problem()
    cases = [case_of(replace(one, seq_q=seq)) for seq in (8, 16, 24)]

    def errs_at_16(call: Call) -> None:
        call.output.copy_(call.right())
        if call.query.shape[2] == 16:
            call.output[0, 0, 0, 0] = float(cases[1].expected[0, 0, 0, 0]) + 0.9 * cases[1].allowed

    verdict = validate.judge(Planted(problem=one, body=errs_at_16), cases)  # type: ignore[arg-type]
    assert verdict.ok, verdict.reason
    assert verdict.checks == 3
    assert verdict.allowed == cases[1].allowed
    assert verdict.max_error == pytest.approx(0.9 * cases[1].allowed, rel=0.2)


def test_small_problems_keep_what_the_kernel_is_compiled_for() -> None:
    one = kernels.problem(
        dtype=DType.FLOAT32, precision=Precision.TF32, batch=64, heads_q=32, heads_kv=4, head_dim=57, mask="causal"
    )
    for case in Gate(one, CPU, tiny=True).cases:
        assert case.problem.family == one.family
        assert case.problem.mask.causal
        assert case.problem.batch == 2


@pytest.mark.parametrize("mask", ["window:9,3", "window:9,0", "window:9,-1", "window:-1,3"])
def test_the_widths_of_a_window_change_from_case_to_case_and_its_sides_do_not(mask: str) -> None:
    one = kernels.problem(mask=mask)
    masks = [case.problem.mask for case in Gate(one, CPU, tiny=True).cases]
    assert len(set(masks)) > 2
    assert {each.structure for each in masks} == {one.mask.structure}


def test_packed_cases_hold_empty_sequences_and_a_tail() -> None:
    one = kernels.problem(layout=Layout.PACKED, tokens_q=70, tokens_kv=120)
    for case in Gate(one, CPU, tiny=True).cases:
        lengths = [pair[1::2] for pair in case.operands.spans()]
        assert {(0, 0), (3, 0), (0, 9)} <= set(lengths)
        assert case.problem.tokens_q - sum(pair[0] for pair in lengths) == validate.TAIL
        assert (case.expected_lse[:, :, -validate.TAIL :] == -math.inf).all()


@pytest.mark.parametrize("modifiers", kernels.MODIFIERS[1:], ids=lambda modifiers: "-".join(modifiers.names))
def test_every_modifier_changes_the_gates_answers(modifiers: Modifiers) -> None:
    """So that a kernel which forgets it is refused."""
    one = kernels.problem(modifiers=modifiers)
    right = case_of(one)
    for name in modifiers.names:
        fewer, operands = forgotten(name)
        rest = replace(one, modifiers=replace(modifiers, **fewer))
        answer, _ = reference.attention(rest, replace(right.operands, **operands))
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
    one = kernels.problem(mask="causal")
    case = next(case for case in gate(one, tiny=True).cases if case.name.endswith("wild"))
    spoilt = case.expected.masked_fill(torch.ones_like(case.expected, dtype=torch.bool), math.nan)
    assert not validate._same_wild(spoilt, case.expected)
    assert validate._same_wild(case.expected.clone(), case.expected)
