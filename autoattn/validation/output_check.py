"""The gate for outputs: a kernel against the reference, before it is timed.

The rule is FlashAttention's own (tests/test_flash_attn.py): the largest error against a higher-precision reference is
at most twice that of the same maths done by PyTorch in the low precision, plus an absolute term the size of an ulp
(FlashAttention-3's yardstick: twice the largest |x + 0.3 - 0.3 - x| over the reference x).

In IEEE float32 PyTorch's own error is a few ulps and no yardstick alone: exp2 on the GPU errs by 2**-22 (PTX ISA,
ex2.approx) and scores round at their own size, so eight ulps of the largest value are allowed beside it. That is still
500 times less than what tf32 products would need.

Every tensor lies inside a larger one filled with NaN, so that a read or a write out of bounds is seen; outputs start as
NaN, so that an element never written is seen; every case runs twice and must agree to the bit, so that a race is seen.
The interpreter runs one thread after the other and has no races: there the first case alone runs twice, to see what one
run leaves behind for the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from autoattn.baselines import pytorch_sdpa
from autoattn.baselines.external import Peer
from autoattn.codegen import render
from autoattn.core.mask import Mask, MaskKind
from autoattn.core.modifiers import Bias
from autoattn.core.problem import DType, Layout, Precision, Problem
from autoattn.core.trial import Verdict
from autoattn.kernels import forward
from autoattn.kernels.compiler import Kernel
from autoattn.reference import attention_formula, inputs
from autoattn.reference.inputs import LOUD_RISE, OUTGROWN_RISE, STEEP_RISE, Scores
from autoattn.tensors.operands import Operands
from autoattn.validation import batch_invariance

ERROR_RATIO = 2.0  # times PyTorch's own error in the low precision
FLOAT32_ULPS = {Precision.IEEE: 8, Precision.TF32: 8, Precision.TF32X3: 64}  # of the largest value
# The size that scores reach
RISES = {Scores.LOUD: LOUD_RISE, Scores.STEEP: STEEP_RISE, Scores.OUTGROWN: OUTGROWN_RISE}
LSE_ERROR = 2e-3  # and as much times the largest LSE; scores of 16-bit inputs are exact to float32
GUARD_ROWS = 3  # NaN rows behind each sequence; odd, so that strides are no multiple of the tile either
# (seq_q, seq_kv): one row, one key, tile multiples, one more or less, primes, more queries than keys.
LENGTHS = ((1, 1), (1, 147), (113, 203), (128, 128), (256, 129), (203, 113), (64, 1), (257, 256), (384, 640))
LOUD_LENGTHS, WILD_LENGTHS = (113, 203), (203, 211)
# Keys for eight programs that share a tile: each has several blocks to compute again.
STEEP_LENGTHS = (257, 2050)
TINY_LENGTHS = ((17, 34), (34, 17), (16, 32))  # for an interpreter, where a tile takes tens of milliseconds
RING_LENGTHS = (70, 200)  # for that of Gluon: blocks of 32 keys outnumber the slots of a ring
WINDOWS = ((40, 9), (0, 0), (7, 64), (130, 3), (64, 0))  # (left, right), as far as the mask has a bound there
# Beside its own lengths, a packed case holds sequences of these: empty ones, and ones with keys or queries alone.
BESIDE = ((0, 0), (3, 0), (1, 5), (0, 9), (33, 18))
TAIL = 5  # tokens behind the last packed sequence
SPOT_ROWS = 64  # query rows that are compared at full size; the small cases compare all
GROUPS = (1, 2)  # query heads that share a key head; a kernel's text serves all group sizes and both layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem with operands, the reference's answer and what error is honest."""

    name: str
    problem: Problem
    operands: Operands  # inside tensors of NaN
    expected: Tensor  # [batch, heads_q, rows, head_dim_v] in float64
    expected_lse: Tensor  # [batch, heads_q, rows] in float64
    rows: Tensor  # [rows] the query positions that are compared
    allowed: float  # largest absolute error
    guard: int  # rows of NaN behind each sequence


class Gate:
    """Cases for one kind of problem, made once and put to every kernel for it.

    Group size, layout and the widths of windows change from case to case, because they never reach a kernel's text.
    """

    def __init__(
        self, problem: Problem, device: torch.device, *, tiny: bool = False, rings: bool = False, seed: int = 0
    ) -> None:
        """Makes the cases.

        Args:
            tiny: for an interpreter.
            rings: also some in which tiles of tiny cases pass all slots of a ring, and are computed again.
        """
        generator = torch.Generator(device="cpu").manual_seed(seed)
        lengths = TINY_LENGTHS if tiny else LENGTHS
        self.device, self.tiny = device, tiny
        facts = [(pair, Scores.PLAIN) for pair in lengths]
        facts += [
            (lengths[0] if tiny else LOUD_LENGTHS, Scores.LOUD),
            (lengths[0] if tiny else STEEP_LENGTHS, Scores.STEEP),
        ]
        if problem.dtype is DType.FLOAT8:  # 8 bits cannot hold what loud and steep scores are made of, nor infinity
            facts = facts[: len(lengths)]
        elif hides_pairs(problem):
            facts.append((lengths[0] if tiny else WILD_LENGTHS, Scores.WILD))
        if rings:
            facts.append((RING_LENGTHS, Scores.PLAIN if problem.dtype is DType.FLOAT8 else Scores.OUTGROWN))
        self.cases = [
            make_small_case(problem, *pair, number, device, generator, scores=scores)
            for number, (pair, scores) in enumerate(facts)
        ]

        self.invariant = problem.cache is not None and problem.cache.batch_invariant
        if self.invariant:  # the last case
            self.cases.append(_of_one_batch(problem, device, generator, tiny=tiny))

    def judge(self, kernel: Kernel) -> Verdict:
        """Runs every case; stops at the first that fails."""
        verdict = judge(kernel, self.cases, again=1 if self.tiny else len(self.cases))
        if not self.invariant or not verdict.ok:
            return verdict
        reason = _batch_dependence(kernel, self.cases[-1])
        return replace(verdict, ok=not reason, checks=verdict.checks + 1, reason=reason)


def _of_one_batch(problem: Problem, device: torch.device, generator: torch.Generator, *, tiny: bool) -> Case:
    """Sequences of unequal lengths in one batch, for a kernel that must give each its own bits."""
    lengths = batch_invariance.TINY_LENGTHS if tiny else batch_invariance.LENGTHS
    queries, keys = zip(*lengths, strict=True)
    facts = {"batch": len(lengths), "seq_q": max(queries), "seq_kv": max(keys)}
    facts |= {"tokens_q": sum(queries), "tokens_kv": sum(keys)} if problem.packed else {}
    together = replace(small(problem, max(queries), max(keys)), **facts)
    return make_case(together, device, generator, guard=0, lengths=lengths)


def _batch_dependence(kernel: Kernel, case: Case) -> str:
    """Whether a sequence has other bits alone than in its batch, in words; empty where it has the same."""
    together, _ = run(kernel, case)
    for sequence in range(case.problem.batch):
        apart = batch_invariance.alone(case.problem, case.operands, sequence)
        if apart is None:
            continue
        problem, operands, rows = apart
        output, _ = run(kernel, replace(case, problem=problem, operands=operands))
        if not _same(together[:, :, rows] if problem.packed else together[rows], output):
            return f"{case.problem}: a sequence has other bits alone than with those that share its batch"
    return ""


def hides_pairs(problem: Problem) -> bool:
    """Whether a key can be hidden from some queries and seen by others."""
    mask, bias = problem.mask, problem.modifiers.bias
    return mask.kind is not MaskKind.FULL or bias not in (Bias.NONE, Bias.KEYS)


def small(problem: Problem, seq_q: int, seq_kv: int, number: int = 0) -> Problem:
    """The same kind of problem, small: two sequences and two key heads, so that every stride counts.

    Where a kernel loads 16 bytes of a bias at once, `seq_kv` is rounded up to a multiple of the keys that these hold: a
    call with other keys runs another text.
    """
    seq_kv += -seq_kv % max(1, render.natural_traits(problem).bias_alignment)
    group = GROUPS[number % len(GROUPS)]
    mask = _small_mask(problem.mask, number)
    small_problem = replace(problem, heads_q=2 * group, heads_kv=2, mask=mask, key_lengths=None)
    if not problem.packed:
        layout = (Layout.BHSD, Layout.BSHD)[number // len(GROUPS) % 2]
        return replace(small_problem, batch=2, layout=layout, seq_q=seq_q, seq_kv=seq_kv)
    queries, keys = (tuple(pair) for pair in zip((seq_q, seq_kv), *BESIDE, strict=True))
    return replace(
        small_problem,
        batch=len(queries),
        seq_q=max(queries),
        seq_kv=max(keys),
        tokens_q=sum(queries) + TAIL,
        tokens_kv=sum(keys) + TAIL,
    )


def _small_mask(mask: Mask, number: int) -> Mask:
    """The same structure with other widths."""
    if mask.kind is not MaskKind.WINDOW:
        return mask
    left, right = WINDOWS[number % len(WINDOWS)]
    return replace(
        mask,
        left=left if mask.bounded_left else None,
        right=max(right, 1) if mask.right else mask.right,  # 0 is a structure of its own
    )


def make_small_case(
    problem: Problem,
    seq_q: int,
    seq_kv: int,
    number: int,
    device: torch.device,
    generator: torch.Generator,
    *,
    scores: Scores = Scores.PLAIN,
) -> Case:
    """A case of the same kind as `problem`, small; `number` picks among group sizes, layouts and windows."""
    small_problem, lengths = small(problem, seq_q, seq_kv, number), lengths_of(problem, seq_q, seq_kv)
    return make_case(small_problem, device, generator, scores=scores, guard=GUARD_ROWS, lengths=lengths)


def lengths_of(problem: Problem, seq_q: int, seq_kv: int) -> tuple[tuple[int, int], ...] | None:
    """(queries, keys) of each sequence of a small case, packed or on a cache; None where they are all alike."""
    if problem.packed:
        return (*BESIDE[:2], (seq_q, seq_kv), *BESIDE[2:])
    return ((seq_q, seq_kv), (seq_q, seq_kv // 3)) if problem.cache is not None else None


def make_case(
    problem: Problem,
    device: torch.device,
    generator: torch.Generator,
    *,
    scores: Scores = Scores.PLAIN,
    rows: int | None = None,
    guard: int = GUARD_ROWS,
    lengths: Sequence[tuple[int, int]] | None = None,
) -> Case:
    """Random operands for `problem`, and the reference's answer for all or for `rows` random query rows."""
    operands = inputs.make(problem, device, generator, scores=scores, guard=guard, lengths=lengths)
    return case_of(problem, operands, generator, scores=scores, rows=rows, guard=guard)


def full_case(problem: Problem, device: torch.device, generator: torch.Generator) -> Case:
    """The problem itself with contiguous inputs, compared at a few rows."""
    return make_case(problem, device, generator, rows=SPOT_ROWS, guard=0)


def case_of(
    problem: Problem,
    operands: Operands,
    generator: torch.Generator,
    *,
    scores: Scores = Scores.PLAIN,
    rows: int | None = None,
    guard: int = 0,
) -> Case:
    """A case of operands that are there."""
    length = operands.query.shape[2]
    if rows is None or rows >= length:
        positions = torch.arange(length)
    else:  # the first and the last row are where masks go wrong
        some = torch.randint(length, (rows - 2,), generator=generator)
        positions = torch.cat((torch.tensor([0, length - 1]), some)).unique()
    positions = positions.to(operands.query.device)
    expected, expected_lse = attention_formula.attention(problem, operands, rows=positions)
    allowed = _allowed(problem, operands, expected, positions)
    if scores in RISES:  # a float32 score rounds at its own size, here and in PyTorch in another order
        largest = float(_tame(operands.value.float()).abs().max())
        largest *= 1.0 if operands.value_scale is None else float(operands.value_scale.max())
        allowed += RISES[scores] * torch.finfo(torch.float32).eps * largest
    name = f"{problem}{'' if scores is Scores.PLAIN else f' {scores.value}'}"
    return Case(
        name=name,
        problem=problem,
        operands=operands,
        expected=expected,
        expected_lse=expected_lse,
        rows=positions,
        allowed=allowed,
        guard=guard,
    )


def judge(kernel: Kernel, cases: Sequence[Case], again: int | None = None) -> Verdict:
    """The verdict over all cases, or over those up to the first that fails; the first `again` of them run twice."""
    worst = Verdict(ok=True, checks=0, max_error=0.0, rms_error=0.0, allowed=math.inf)
    closest = -1.0
    for count, case in enumerate(cases, start=1):
        max_error, rms_error, reason = _compare(kernel, case, twice=again is None or count <= again)
        if max_error / case.allowed > closest:
            closest = max_error / case.allowed
            worst = replace(worst, max_error=max_error, allowed=case.allowed)
        worst = replace(worst, checks=count, rms_error=max(worst.rms_error, rms_error))
        if reason:
            return replace(worst, ok=False, max_error=max_error, allowed=case.allowed, reason=f"{case.name}: {reason}")
    return worst


def _compare(kernel: Kernel, case: Case, *, twice: bool) -> tuple[float, float, str]:
    """Largest and root mean square error of one case, and what is wrong with it in words."""
    first, lse = run(kernel, case)
    second, second_lse = run(kernel, case) if twice else (first, lse)
    room = first._base if first._base is not None else first
    if not _same(first, second) or (lse is not None and second_lse is not None and not _same(lse, second_lse)):
        return math.inf, math.inf, "two runs on the same inputs differ"
    missing = int(first.isnan().sum()) - int(case.expected.isnan().sum())
    if missing > 0:
        return math.inf, math.inf, f"{missing} of {first.numel()} outputs are NaN or never written"
    if int(room.isnan().sum()) - int(first.isnan().sum()) != room.numel() - first.numel():
        return math.inf, math.inf, "it wrote outside the output"
    if not same_wild(first[:, :, case.rows], case.expected):
        return math.inf, math.inf, "its NaN and inf do not stand where the reference has them"
    max_error, rms_error = errors(first, case)
    reason = "" if max_error <= case.allowed else f"error {max_error:.3g} where {case.allowed:.3g} is allowed"
    if lse is not None and not reason:
        reason = _wrong_lse(lse[:, :, case.rows].double(), case)
    return max_error, rms_error, reason


def same_wild(output: Tensor, expected: Tensor) -> bool:
    """Whether NaN, inf and -inf stand in the same places."""
    tests = (torch.isnan, torch.isposinf, torch.isneginf)
    return all(bool(torch.equal(test(output), test(expected))) for test in tests)


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(_tame(left), _tame(right)) and same_wild(left, right)


def _tame(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _wrong_lse(lse: Tensor, case: Case) -> str:
    """What is wrong with the log-sum-exp, in words."""
    blind = case.expected_lse == -math.inf
    if not torch.equal(lse == -math.inf, blind) or not torch.equal(lse.isnan(), case.expected_lse.isnan()):
        return "its LSE is not -inf just where a row sees no key"
    blind |= case.expected_lse.isnan()
    error = (lse - case.expected_lse).masked_fill(blind, 0.0).abs().nan_to_num(nan=math.inf)
    loose = 4.0 if case.problem.precision is Precision.TF32 else 1.0  # products of 10 bits
    allowed = loose * LSE_ERROR * max(1.0, float(case.expected_lse.masked_fill(blind, 0.0).abs().max()))
    return "" if float(error.max()) <= allowed else f"LSE error {float(error.max()):.3g} where {allowed:.3g} is allowed"


def errors(output: Tensor, case: Case) -> tuple[float, float]:
    """Largest and root mean square error of an output [batch, heads_q, seq_q, head_dim_v] at the compared rows."""
    error = (output[:, :, case.rows].double() - case.expected).abs()
    error = error.masked_fill(~case.expected.isfinite(), 0.0)
    return float(error.max()), float(error.square().mean().sqrt())


def run(kernel: Kernel, case: Case) -> tuple[Tensor, Tensor | None]:
    """The kernel's output [batch, heads_q, seq_q, head_dim_v], inside NaN, and LSE where the kernel gives one.

    A kernel that merges finds the output and the LSE of no key.
    """
    problem, operands, traits = case.problem, case.operands, kernel.source.traits
    output = empty_output(problem, case.guard, operands.query.device, widened=traits.merged == "fp32")
    if traits.merged:
        output.zero_()
    lse = None
    if traits.lse:
        nothing = -math.inf if traits.merged else math.nan
        lse = torch.full(output.shape[:3], nothing, dtype=torch.float32, device=output.device)
    forward.launch(kernel, problem, operands, output, lse)
    return output, lse


def room_of(case: Case) -> Tensor:
    """What kernels that are timed on a case may all write to: the output."""
    return forward.empty_output(case.problem, case.operands.query)


def call_of(kernel: Kernel, case: Case, room: Tensor) -> Callable[[], object]:
    """The kernel on a case's tensors, ready to be timed."""
    return partial(forward.launch, kernel, case.problem, case.operands, room, None)


def rival_calls(case: Case) -> dict[str, Callable[[], Tensor]]:
    """The rivals on a case's tensors, ready to be timed."""
    return pytorch_sdpa.calls(case.problem, case.operands)


def peer_call(peer: Peer, case: Case) -> Callable[[], Tensor]:
    """A peer on a case's tensors in its own layout, ready to be timed; raises whatever the peer raises."""
    return peer.prepare(case.problem, case.operands)


def empty_output(problem: Problem, guard: int, device: torch.device, *, widened: bool = False) -> Tensor:
    """A [batch, heads_q, seq_q, head_dim_v] view full of NaN, with `guard` more rows of it behind each sequence.

    Args:
        widened: in float32, whatever the problem's output is.
    """
    sizes = (problem.heads_q, problem.seq_q, problem.tokens_q, problem.head_dim_v)
    dtype = DType.FLOAT32 if widened else problem.dtype.output
    return inputs.tensor(problem, *sizes, guard, device, None, dtype=dtype)


def _allowed(problem: Problem, operands: Operands, expected: Tensor, rows: Tensor) -> float:
    """The largest honest error of an output."""
    rough = attention_formula.low_precision(problem, operands, rows=rows)
    honest = float(_tame((rough.double() - expected).masked_fill(~expected.isfinite(), 0.0)).abs().max())
    coarse = _tame(expected).to(attention_formula.TORCH_DTYPE[problem.dtype.output])
    absolute = 2.0 * float((coarse + 0.3 - 0.3 - coarse).abs().max())
    if problem.dtype is DType.FLOAT32:
        eps = torch.finfo(torch.float32).eps
        absolute += FLOAT32_ULPS[problem.precision] * eps * float(_tame(operands.value).abs().max())
    return max(ERROR_RATIO * honest + absolute, float(torch.finfo(torch.float32).tiny))  # 0 when every key is hidden
