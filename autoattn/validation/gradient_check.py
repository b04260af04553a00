"""The gate for gradients: a backward kernel against autograd through the reference, in float64.

The rule is FlashAttention's own (tests/test_flash_attn.py and hopper/test_flash_attn.py): each gradient's largest error
is at most three times that of the same maths differentiated by PyTorch in the low precision, plus an absolute term the
size of an ulp. What the forward pass saves is the reference's, rounded, so that no kernel of ours vouches for another.

As in `output_check`, every tensor lies inside a larger one filled with NaN, gradients start as NaN, and every case runs
twice, the second time by the bound launches that calls use. The two agree to the bit, unless the template's search
space says that such launches do not; then the rule holds for each of them. A query that sees no key, and a key that no
query sees, has gradients of exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from autoattn.baselines import external, pytorch_sdpa
from autoattn.baselines.external import Peer
from autoattn.codegen import search_space
from autoattn.core.modifiers import Bias
from autoattn.core.problem import DType, Precision, Problem
from autoattn.core.trial import Verdict
from autoattn.kernels import backward
from autoattn.kernels.compiler import Kernel
from autoattn.reference import attention_formula, gradient_formula, inputs
from autoattn.reference.gradient_formula import Part
from autoattn.reference.inputs import Scores
from autoattn.tensors.operands import Gradients, Operands, Saved
from autoattn.validation import output_check

ERROR_RATIO = 3.0  # times PyTorch's own error in the low precision
TF32_ULP = 2.0**-10
STEEP_LENGTHS = (257, 256)
RING_LENGTHS = (300, 140)  # for the interpreter of Gluon: blocks of queries outnumber the slots of a ring
SPOT_HEADS = 2  # key heads of all sequences that are compared at full size; the small cases compare all
# Which of batch, heads, queries and keys share a learned bias; as many as do not meet the same groups and layouts.
SHARINGS = (
    *((True, False, False, False), (False, False, False, False), (True, True, False, False)),
    *((False, True, True, False), (True, False, False, True), (False, True, False, False), (True, True, True, True)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem with what the backward pass gets, the gradients to expect and what error is honest."""

    name: str
    problem: Problem
    operands: Operands  # inside tensors of NaN
    saved: Saved  # the same
    expected: tuple[Part, ...]  # in float64, of those parts that are compared
    allowed: dict[str, float]  # largest absolute error of each gradient
    guard: int  # rows of NaN behind each sequence


class Gate:
    """Cases for one kind of problem, made once and put to every kernel for it; small ones, as in `output_check`."""

    def __init__(
        self, problem: Problem, device: torch.device, *, tiny: bool = False, rings: bool = False, seed: int = 0
    ) -> None:
        """Makes the cases.

        Args:
            tiny: for an interpreter.
            rings: also one in which a tile of keys passes all slots of a ring of queries.
        """
        generator = torch.Generator(device="cpu").manual_seed(seed)
        lengths = output_check.TINY_LENGTHS if tiny else output_check.LENGTHS
        facts = [(pair, Scores.PLAIN) for pair in lengths]
        facts.append((lengths[0] if tiny else output_check.LOUD_LENGTHS, Scores.LOUD))
        # tf32 takes steep scores for others that are off by up to 0.2, and gradients by more than their own size.
        if problem.precision is not Precision.TF32:
            facts.append((lengths[0] if tiny else STEEP_LENGTHS, Scores.STEEP))
        if rings:
            facts.append((RING_LENGTHS, Scores.PLAIN))
        self.cases = [
            make_small_case(problem, *pair, number, device, generator, scores=scores)
            for number, (pair, scores) in enumerate(facts)
        ]

    def judge(self, kernel: Kernel) -> Verdict:
        """Runs every case; stops at the first that fails."""
        return judge(kernel, self.cases)


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
    """A case of the same kind as `problem`, small; `number` picks among group sizes, layouts, windows and SHARINGS."""
    small, lengths = output_check.small(problem, seq_q, seq_kv, number), output_check.lengths_of(problem, seq_q, seq_kv)
    guard, sharing = output_check.GUARD_ROWS, SHARINGS[number % len(SHARINGS)]
    operands = inputs.make(small, device, generator, scores=scores, guard=guard, lengths=lengths, sharing=sharing)
    return case_of(small, operands, generator, scores=scores, guard=guard)


def make_case(
    problem: Problem,
    device: torch.device,
    generator: torch.Generator,
    *,
    scores: Scores = Scores.PLAIN,
    heads: int | None = None,
    guard: int = 0,
    lengths: Sequence[tuple[int, int]] | None = None,
    lse: bool = False,
) -> Case:
    """Random operands and output gradients, and the gradients to expect of all key heads or of `heads` of them.

    Args:
        lse: whether the LSE has a gradient too
    """
    operands = inputs.make(problem, device, generator, scores=scores, guard=guard, lengths=lengths)
    return case_of(problem, operands, generator, scores=scores, heads=heads, guard=guard, lse=lse)


def case_of(
    problem: Problem,
    operands: Operands,
    generator: torch.Generator,
    *,
    scores: Scores = Scores.PLAIN,
    heads: int | None = None,
    guard: int = 0,
    lse: bool = False,
) -> Case:
    """A case of operands that are there."""
    saved = saved_of(problem, operands, generator, guard=guard)
    if lse:
        pull = torch.randn(saved.lse.shape, generator=generator).to(saved.lse.device)
        saved = replace(saved, lse_grad=pull.masked_fill(saved.lse == -math.inf, 0.0))
    places = tuple(gradient_formula.places_of(problem, operands, heads))
    expected = gradient_formula.expected(problem, operands, saved, places)
    rough = gradient_formula.expected(problem, operands, saved, places, low=True)
    name = f"{problem}{'' if scores is Scores.PLAIN else f' {scores.value}'}"
    return Case(
        name=name,
        problem=problem,
        operands=operands,
        saved=saved,
        expected=expected,
        allowed=_allowed(problem, operands, saved, expected, rough, scores),
        guard=guard,
    )


def full_case(
    problem: Problem, device: torch.device, generator: torch.Generator, *, scores: Scores = Scores.PLAIN
) -> Case:
    """The problem itself with contiguous inputs, compared at a few heads."""
    return make_case(problem, device, generator, scores=scores, heads=SPOT_HEADS)


def saved_of(problem: Problem, operands: Operands, generator: torch.Generator, *, guard: int = 0) -> Saved:
    """The reference's output and LSE as a forward kernel rounds them, and random normal gradients of the output."""
    sizes = (problem.heads_q, problem.seq_q, problem.tokens_q, problem.head_dim_v, guard, operands.query.device)
    output_grad = inputs.tensor(problem, *sizes, generator, dtype=problem.dtype.output)
    output = inputs.tensor(problem, *sizes, None, dtype=problem.dtype.output)
    lse = torch.empty(output.shape[:3], dtype=torch.float32, device=output.device)
    dtype = torch.float64 if problem.dtype is DType.FLOAT32 else torch.float32  # either is exact to the output's
    for rows in gradient_formula.chunks(operands, dtype):
        exact, sums = attention_formula.attention(problem, operands, dtype=dtype, rows=rows)
        output[:, :, rows] = exact.to(output.dtype)
        lse[:, :, rows] = sums.float()
    return Saved(output=output, lse=lse, output_grad=output_grad)


def judge(kernel: Kernel, cases: Sequence[Case]) -> Verdict:
    """The verdict over all cases, or over those up to the first that fails."""
    worst = Verdict(ok=True, checks=0, max_error=0.0, rms_error=0.0, allowed=math.inf)
    closest = -1.0
    alike = search_space.load(kernel.source.variant.template).repeats(kernel.source.variant)
    for count, case in enumerate(cases, start=1):
        worst = replace(worst, checks=count)
        first, second = run(kernel, case), run(kernel, case, as_calls_do=True)
        reason = _malformed(first, case) or _malformed(second, case) or (unlike(first, second) if alike else "")
        if reason:
            return replace(worst, ok=False, max_error=math.inf, reason=f"{case.name}: {reason}")
        for gradients in (first,) if alike else (first, second):
            by_name = errors_by_name(gradients, case)
            for name, (error, _) in by_name.items():
                allowed = case.allowed[name]
                if not error <= allowed:
                    reason = f"{case.name}: the {name}'s gradient has error {error:.3g} where {allowed:.3g} is allowed"
                    return replace(worst, ok=False, max_error=error, allowed=allowed, reason=reason)
            max_error, rms_error, allowed = joined(by_name, case)
            worst = replace(worst, rms_error=max(worst.rms_error, rms_error))
            if max_error / allowed > closest:
                closest = max_error / allowed
                worst = replace(worst, max_error=max_error, allowed=allowed)
    return worst


def run(kernel: Kernel, case: Case, *, as_calls_do: bool = False) -> Gradients:
    """The kernel's gradients, inside NaN.

    Args:
        as_calls_do: by bound launches, where there may be any, so that no call runs what the gate did not
    """
    gradients = empty_gradients(case)
    facts = kernel, case.problem, case.operands, case.saved, gradients
    if as_calls_do:
        backward.ready(*facts)(gradients)
    else:
        backward.launch(*facts)
    return gradients


def room_of(case: Case) -> Gradients:
    """What kernels that are timed on a case may all write to: the gradients."""
    return backward.empty_gradients(case.problem, case.operands)


def call_of(kernel: Kernel, case: Case, room: Gradients) -> Callable[[], object]:
    """The kernels on a case's tensors, ready to be timed."""
    return partial(backward.ready(kernel, case.problem, case.operands, case.saved), room)


def rival_calls(case: Case) -> dict[str, Callable[[], Gradients]]:
    """The backward passes of the rivals on a case's tensors, ready to be timed; their forward passes are done."""
    calls = pytorch_sdpa.gradient_calls(case.problem, case.operands, case.saved.output_grad)
    return {name: partial(_named, call) for name, call in calls.items()}


def peer_call(peer: Peer, case: Case) -> Callable[[], Gradients]:
    """A peer's backward pass on a case's tensors, ready to be timed; raises whatever the peer raises."""
    return external.backward_pass(peer, case.problem, case.operands, case.saved.output_grad)


def _named(call: Callable[[], tuple[Tensor, ...]]) -> Gradients:
    query, key, value = call()
    return Gradients(query=query, key=key, value=value)


def empty_gradients(case: Case) -> Gradients:
    """Views full of NaN, with the case's guard behind each sequence."""
    problem, device = case.problem, case.operands.query.device

    def empty(heads: int, seq: int, tokens: int, head_dim: int) -> Tensor:
        return inputs.tensor(problem, heads, seq, tokens, head_dim, case.guard, device, None)

    return Gradients(
        query=empty(problem.heads_q, problem.seq_q, problem.tokens_q, problem.head_dim),
        key=empty(problem.heads_kv, problem.seq_kv, problem.tokens_kv, problem.head_dim),
        value=empty(problem.heads_kv, problem.seq_kv, problem.tokens_kv, problem.head_dim_v),
        sinks=torch.full_like(case.operands.sinks, math.nan) if case.operands.sinks is not None else None,
        bias=_empty_bias(case),
        slopes=_empty_slopes(case),
    )


def _empty_bias(case: Case) -> Tensor | None:
    """The same for that of a learned bias, with the guard behind its queries."""
    narrow = case.operands.narrow_bias
    if narrow is None or case.problem.modifiers.bias is not Bias.LEARNED:
        return None
    batch, heads, queries, keys = narrow.shape
    return narrow.new_full((batch, heads, queries + case.guard, keys), math.nan)[:, :, :queries]


def _empty_slopes(case: Case) -> Tensor | None:
    """The same for that of learned slopes, with another sequence behind the last."""
    slopes = case.operands.slopes
    if slopes is None or not case.problem.modifiers.learned_slopes:
        return None
    batch, heads = slopes.shape
    return slopes.new_full((batch + 1, heads), math.nan)[:batch]


def errors(gradients: Gradients, case: Case) -> tuple[float, float]:
    """Largest and root mean square error of the three gradients, as `joined` makes one of them."""
    largest, mean, _ = joined(errors_by_name(gradients, case), case)
    return largest, mean


def joined(each: Mapping[str, tuple[float, float]], case: Case) -> tuple[float, float, float]:
    """Largest and root mean square error, and what is allowed, as one for all gradients.

    Each error is scaled by the largest allowance over its own gradient's, so that the one that comes closest to its
    allowance speaks for all.
    """
    most = max(case.allowed.values())
    scaled = [(most / case.allowed[name], *pair) for name, pair in each.items()]
    return max(scale * error for scale, error, _ in scaled), max(scale * mean for scale, _, mean in scaled), most


def errors_by_name(gradients: Gradients, case: Case) -> dict[str, tuple[float, float]]:
    """Largest and root mean square error of each gradient, at the compared places."""
    off = [
        replace(part, numbers=(getattr(gradients, part.name)[part.index].double() - part.numbers).abs())
        for part in case.expected
    ]
    whole = {name: errors.nan_to_num(nan=math.inf) for name, errors in gradient_formula.joined(off).items()}
    return {name: (float(error.max()), float(error.square().mean().sqrt())) for name, error in whole.items()}


def _written(gradients: Gradients) -> list[tuple[str, Tensor]]:
    """(name, gradient) of those that kernels write themselves."""
    more = ("bias", gradients.bias), ("slopes", gradients.slopes)
    return [*gradients.named(), *((name, gradient) for name, gradient in more if gradient is not None)]


def unlike(first: Gradients, second: Gradients) -> str:
    """Where two runs differ, in words; nothing where they are the same to the bit."""
    pairs = zip(_written(first), _written(second), strict=True)
    differ = [name for (name, gradient), (_, again) in pairs if not torch.equal(gradient, again)]
    return f"two runs on the same inputs differ in the {differ[0]}'s gradient" if differ else ""


def _malformed(gradients: Gradients, case: Case) -> str:
    """What is wrong with gradients beside their size, in words."""
    for name, gradient in _written(gradients):
        if missing := int(gradient.isnan().sum()):
            return f"{missing} of {gradient.numel()} elements of the {name}'s gradient are NaN or never written"
        room = gradient._base if gradient._base is not None else gradient
        if int(room.isnan().sum()) != room.numel() - gradient.numel():
            return f"it wrote outside the {name}'s gradient"
    blind = case.saved.lse == -math.inf
    if bool(gradients.query[blind].count_nonzero()):
        return "the gradient of a query that sees no key is not 0"
    keys, values = ([part for part in case.expected if part.name == name] for name in ("key", "value"))
    for key, value in zip(keys, values, strict=True):
        unseen = (key.numbers == 0).all(-1) & (value.numbers == 0).all(-1)
        if bool(gradients.key[key.index][unseen].any()) or bool(gradients.value[value.index][unseen].any()):
            return "the gradient of a key that no query sees is not 0"
    return ""


def _allowed(
    problem: Problem,
    operands: Operands,
    saved: Saved,
    expected: Sequence[Part],
    rough: Sequence[Part],
    scores: Scores,
) -> dict[str, float]:
    """The largest honest error of each gradient."""
    eps = torch.finfo(torch.float32).eps
    # How large the gradient of a weight may be, which is taken from another of its size to give that of a score; and
    # what that is multiplied by.
    weight_grad = float(saved.output_grad.abs().max() * operands.value.abs().max()) * problem.head_dim_v**0.5
    # By how much an output that was rounded moves delta. PyTorch makes delta of the weights, so that a sole pair has no
    # error there, whose weight grew by what is dropped elsewhere; without dropout its output is the value, and exact.
    # A sink's gradient is a sum of deltas, whose errors may cancel by chance in PyTorch.
    rounding = 0.0
    if (problem.modifiers.dropout or problem.modifiers.sinks) and saved.output.dtype is not torch.float32:
        products = saved.output.double() * saved.output_grad.double()
        rounding = 0.5 * torch.finfo(saved.output.dtype).eps * float(products.square().sum(-1).sqrt().max())
    exacts, lows = gradient_formula.joined(expected), gradient_formula.joined(rough)
    counts = _counts(problem, operands)
    allowed = {}
    for name, exact in exacts.items():
        low = lows[name]
        coarse = exact.to(attention_formula.TORCH_DTYPE[problem.dtype])
        absolute = 2.0 * float((coarse + 0.3 - 0.3 - coarse).abs().max())
        absolute += output_check.FLOAT32_ULPS[Precision.IEEE] * eps * weight_grad * counts[name]
        if problem.modifiers.dropout:
            absolute += rounding * counts[name]
        elif name == "sinks":
            absolute += rounding
        if problem.precision is Precision.TF32:  # delta comes of whole operands, what it is taken from of cut ones
            absolute += TF32_ULP / 2 * weight_grad * counts[name]
            if name == "value":  # a weight errs with its score; in PyTorch the sum under it errs along
                absolute += TF32_ULP * float(exact.abs().max())
        if problem.dtype is DType.FLOAT32:
            absolute += output_check.FLOAT32_ULPS[problem.precision] * eps * float(exact.abs().max())
        if scores in output_check.RISES:  # a weight errs by its score's ulps, here and in PyTorch in another order
            # tf32's scores come of cut operands, the LSE of whole ones.
            ulp = TF32_ULP if problem.precision is Precision.TF32 else eps
            # What a weight is off by counts as often as its gradient is large: sqrt(head_dim_v) of normal numbers.
            often = counts[name] * problem.head_dim_v**0.5
            absolute += output_check.RISES[scores] * ulp * (often + float(exact.abs().max()))
        honest = float((low - exact).abs().max())
        allowed[name] = max(ERROR_RATIO * honest + absolute, float(torch.finfo(torch.float32).tiny))
    return allowed


def _counts(problem: Problem, operands: Operands) -> dict[str, float]:
    """What a number of each gradient counts the gradient of a weight with."""
    largest = {name: operands.scale * float(getattr(operands, name).abs().max()) for name in ("query", "key")}
    counts = {"query": largest["key"], "key": largest["query"], "value": 0.0, "sinks": float(problem.batch)}
    if (narrow := operands.narrow_bias) is not None:  # so many queries share one
        counts["bias"] = problem.batch * problem.heads_q * problem.seq_q * narrow.shape[3] // narrow.numel()
    # The distances of all queries, whose errors have either sign.
    counts["slopes"] = problem.seq_q**0.5 * max(problem.seq_q, problem.seq_kv)
    return counts
