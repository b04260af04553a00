"""Kernels written in PyTorch, right and with a fault each: what the gate is there to tell apart without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import kernels
import torch
from torch import Tensor

from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Layout, Precision, Problem
from autoattn.core.trial import Verdict
from autoattn.core.variant import Traits
from autoattn.kernels.manifest import DealtSizes, Manifest
from autoattn.reference import attention_formula
from autoattn.tensors.operands import Operands
from autoattn.validation.output_check import Gate

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
        answer, _ = attention_formula.attention(*self.problem_and_operands(**changes), dtype=precise)
        return answer.to(self.output.dtype)

    def problem_and_operands(
        self, *, mask: Mask | None = None, precision: Precision | None = None, **changes: Any
    ) -> Any:
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
    before: None = None  # it has no pass before
    dealt: dict[tuple[int, int, int], DealtSizes] = field(default_factory=dict)

    @property
    def source(self) -> Any:
        return SimpleNamespace(traits=self.traits)

    @property
    def manifest(self) -> Manifest:
        return Manifest(grid=lambda batch, heads_q, rows, sm_count: (batch * heads_q,))

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


def judged(body: Body, problem: Problem | None = None, *, tiny: bool = False) -> Verdict:
    problem = problem if problem is not None else CAUSAL
    return gate(problem, tiny=tiny).judge(Planted(problem=problem, body=body))  # type: ignore[arg-type]


@cache
def gate(problem: Problem, *, tiny: bool = False) -> Gate:
    return Gate(problem, CPU, tiny=tiny)


def right(call: Call) -> None:
    call.output.copy_(call.right())


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
    hidden = ~attention_formula.visible(*call.problem_and_operands(), torch.arange(call.query.shape[2]))  # type: ignore[call-arg]
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
