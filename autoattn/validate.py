"""The gate: a kernel's numbers against the reference, before anybody times it.

The rule is FlashAttention's own (tests/test_flash_attn.py): the largest error against a higher-precision reference is
at most twice that of the same maths done by PyTorch in the low precision, plus an absolute term the size of an ulp
(FlashAttention-3's yardstick: twice the largest |x + 0.3 - 0.3 - x| over the reference x).

In IEEE float32 PyTorch's own error is a few ulps and no yardstick alone: exp2 on the GPU errs by 2**-22 (PTX ISA,
ex2.approx) and scores round at their own size, so eight ulps of the largest value are allowed beside it. That is still
500 times less than what tf32 products would need.

Every tensor lies inside a larger one filled with NaN, so that a read or a write out of bounds is seen; outputs start as
NaN, so that an element never written is seen; every case runs twice and must agree to the bit, so that a race is seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from autoattn import reference
from autoattn.compile import Kernel
from autoattn.ops import forward
from autoattn.problem import DType, Layout, Problem
from autoattn.trial import Verdict

ERROR_RATIO = 2.0  # times PyTorch's own error in the low precision
FLOAT32_ULPS = 8  # of the largest value
GUARD_ROWS = 3  # NaN rows behind each sequence; odd, so that strides are no multiple of the tile either
# (seq_q, seq_kv): one row, one key, tile multiples, one more or less, primes, more queries than keys.
LENGTHS = ((1, 1), (1, 147), (113, 203), (128, 128), (256, 129), (203, 113), (64, 1), (257, 256), (384, 640))
LOUD_LENGTHS, STEEP_LENGTHS = (113, 203), (257, 256)
TINY_LENGTHS = ((17, 34), (34, 17), (16, 32))  # for the interpreter, where a tile takes tens of milliseconds
GROUPS = (1, 2)  # query heads that share a key head; a kernel's text serves all group sizes and both layouts
LOUD = 6.0  # a factor on queries
STEEP_QUERY = 16.0  # one element of each query
STEEP_RISE = 240.0  # what it adds to the last key's score; e**89 overflows in float32


class Scores(str, Enum):
    """How a case's scores are spread."""

    PLAIN = "plain"  # random normal queries and keys
    LOUD = "loud"  # row maxima move by more than 2**8 from block to block
    STEEP = "steep"  # they rise so far that weights around the first block's maximum overflow, even in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem with inputs, the reference's answer and what error is honest."""

    name: str
    problem: Problem
    query: Tensor  # [batch, heads_q, seq_q, head_dim], inside a tensor of NaN
    key: Tensor
    value: Tensor
    expected: Tensor  # [batch, heads_q, rows, head_dim] in float64
    rows: Tensor  # [rows] the query positions that are compared
    allowed: float  # largest absolute error
    guard: int  # rows of NaN behind each sequence


class Gate:
    """Cases for one kind of problem, made once and put to every kernel for it.

    Group size and layout change from case to case, because they never reach a kernel's text.
    """

    def __init__(self, problem: Problem, device: torch.device, *, tiny: bool = False, seed: int = 0) -> None:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        lengths = TINY_LENGTHS if tiny else LENGTHS
        self.device = device
        facts = [(pair, Scores.PLAIN) for pair in lengths]
        facts += [
            (lengths[0] if tiny else LOUD_LENGTHS, Scores.LOUD),
            (lengths[0] if tiny else STEEP_LENGTHS, Scores.STEEP),
        ]
        self.cases = [
            make_case(small(problem, seq_q, seq_kv, number), device, generator, scores=scores)
            for number, ((seq_q, seq_kv), scores) in enumerate(facts)
        ]

    def judge(self, kernel: Kernel) -> Verdict:
        """Runs every case; stops at the first that fails."""
        return judge(kernel, self.cases)


def small(problem: Problem, seq_q: int, seq_kv: int, number: int = 0) -> Problem:
    """The same kind of problem, small: two sequences and two key heads, so that every stride counts."""
    group = GROUPS[number % len(GROUPS)]
    layout = tuple(Layout)[number // len(GROUPS) % len(Layout)]
    return replace(problem, batch=2, heads_q=2 * group, heads_kv=2, seq_q=seq_q, seq_kv=seq_kv, layout=layout)


def make_case(
    problem: Problem,
    device: torch.device,
    generator: torch.Generator,
    *,
    scores: Scores = Scores.PLAIN,
    rows: int | None = None,
    guard: int = GUARD_ROWS,
) -> Case:
    """Random normal inputs for `problem`, and the reference's answer for all or for `rows` random query rows."""
    query = guarded(problem, problem.heads_q, problem.seq_q, guard, device, generator)
    key = guarded(problem, problem.heads_kv, problem.seq_kv, guard, device, generator)
    value = guarded(problem, problem.heads_kv, problem.seq_kv, guard, device, generator)
    if scores is Scores.LOUD:
        query *= LOUD
    elif scores is Scores.STEEP:
        query[..., -1] = STEEP_QUERY
        last = STEEP_RISE / STEEP_QUERY * problem.head_dim**0.5
        key[..., -1] = torch.linspace(0.0, last, problem.seq_kv, device=device)
    if rows is None or rows >= problem.seq_q:
        positions = torch.arange(problem.seq_q)
    else:  # the first and the last row are where masks go wrong
        some = torch.randint(problem.seq_q, (rows - 2,), generator=generator)
        positions = torch.cat((torch.tensor([0, problem.seq_q - 1]), some))
    positions = positions.to(device)
    expected, allowed = _answer(problem, query, key, value, positions)
    if scores is Scores.STEEP:  # a float32 score rounds at its own size, here and in PyTorch in another order
        allowed += STEEP_RISE * torch.finfo(torch.float32).eps * float(value.abs().max())
    name = f"{problem}{'' if scores is Scores.PLAIN else f' {scores.value}'}"
    return Case(
        name=name,
        problem=problem,
        query=query,
        key=key,
        value=value,
        expected=expected,
        rows=positions,
        allowed=allowed,
        guard=guard,
    )


def guarded(
    problem: Problem, heads: int, seq: int, guard: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """A [batch, heads, seq, head_dim] view in the problem's layout, with `guard` rows of NaN behind every sequence.

    Filled with random normal numbers, or left NaN when there is no generator.
    """
    dtype = reference.TORCH_DTYPE[problem.dtype]
    rows = seq + guard
    if problem.layout is Layout.BHSD:
        room = torch.full((problem.batch, heads, rows, problem.head_dim), math.nan, dtype=dtype, device=device)
    else:
        room = torch.full((problem.batch, rows, heads, problem.head_dim), math.nan, dtype=dtype, device=device)
        room = room.transpose(1, 2)
    view = room[:, :, :seq]
    if generator is not None:
        seed = int(torch.randint(2**31, (1,), generator=generator))
        view.normal_(generator=torch.Generator(device=device).manual_seed(seed))
    return view


def judge(kernel: Kernel, cases: Sequence[Case]) -> Verdict:
    """The verdict over all cases, or over those up to the first that fails."""
    worst = Verdict(ok=True, checks=0, max_error=0.0, rms_error=0.0, allowed=math.inf)
    closest = -1.0
    for count, case in enumerate(cases, start=1):
        max_error, rms_error, reason = _compare(kernel, case)
        if max_error / case.allowed > closest:
            closest = max_error / case.allowed
            worst = replace(worst, max_error=max_error, allowed=case.allowed)
        worst = replace(worst, checks=count, rms_error=max(worst.rms_error, rms_error))
        if reason:
            return replace(worst, ok=False, max_error=max_error, allowed=case.allowed, reason=f"{case.name}: {reason}")
    return worst


def _compare(kernel: Kernel, case: Case) -> tuple[float, float, str]:
    """Largest and root mean square error of one case, and what is wrong with it in words."""
    first, second = (run(kernel, case) for _ in range(2))
    room = first._base if first._base is not None else first
    if not torch.equal(first, second) and not first.isnan().any():
        return math.inf, math.inf, "two runs on the same inputs differ"
    missing = int(first.isnan().sum())
    if missing:
        return math.inf, math.inf, f"{missing} of {first.numel()} outputs are NaN or never written"
    if int(room.isnan().sum()) != room.numel() - first.numel():
        return math.inf, math.inf, "it wrote outside the output"
    max_error, rms_error = errors(first, case)
    reason = "" if max_error <= case.allowed else f"error {max_error:.3g} where {case.allowed:.3g} is allowed"
    return max_error, rms_error, reason


def errors(output: Tensor, case: Case) -> tuple[float, float]:
    """Largest and root mean square error of an output [batch, heads_q, seq_q, head_dim] at the compared rows."""
    error = (output[:, :, case.rows].double() - case.expected).abs()
    return float(error.max()), float(error.square().mean().sqrt())


def run(kernel: Kernel, case: Case) -> Tensor:
    """The kernel's output for a case, [batch, heads_q, seq_q, head_dim] inside NaN."""
    output = guarded(case.problem, case.problem.heads_q, case.problem.seq_q, case.guard, case.query.device, None)
    lse = None
    if kernel.source.traits.lse:
        lse = case.query.new_full(output.shape[:3], math.nan, dtype=torch.float32)
    forward.launch(kernel, case.query, case.key, case.value, output, lse, case.problem.head_dim**-0.5)
    return output


def _answer(problem: Problem, query: Tensor, key: Tensor, value: Tensor, rows: Tensor) -> tuple[Tensor, float]:
    """The reference's output at `rows`, head by head to bound its memory, and the largest honest error."""
    scale = problem.head_dim**-0.5
    expected = query.new_empty((problem.batch, problem.heads_q, len(rows), problem.head_dim), dtype=torch.float64)
    honest = 0.0
    for batch in range(problem.batch):
        for head in range(problem.heads_kv):
            group = slice(head * problem.group_size, (head + 1) * problem.group_size)
            part = (
                query[batch : batch + 1, group],
                key[batch : batch + 1, head : head + 1],
                value[batch : batch + 1, head : head + 1],
            )
            exact, _ = reference.attention(*part, mask=problem.mask, scale=scale, rows=rows)
            rough = reference.low_precision(
                *part, mask=problem.mask, scale=scale, precision=problem.precision, rows=rows
            )
            expected[batch : batch + 1, group] = exact
            honest = max(honest, float((rough.double() - exact).abs().max()))
    coarse = expected.to(query.dtype)
    absolute = 2.0 * float((coarse + 0.3 - 0.3 - coarse).abs().max())
    if problem.dtype is DType.FLOAT32:
        absolute += FLOAT32_ULPS * torch.finfo(torch.float32).eps * float(value.abs().max())
    return expected, ERROR_RATIO * honest + absolute
