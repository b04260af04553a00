"""The gate for gradients: a backward kernel's numbers against autograd through the reference, in float64.

The rule is FlashAttention's own (tests/test_flash_attn.py and hopper/test_flash_attn.py): each gradient's largest error
is at most three times that of the same maths differentiated by PyTorch in the low precision, plus an absolute term the
size of an ulp. What the forward pass saves is the reference's, rounded, so that no kernel of ours vouches for another.

As in `validate`, every tensor lies inside a larger one filled with NaN, gradients start as NaN, and every case runs
twice, the second time by the bound launches that calls use. The two agree to the bit, unless the template's search
space says that its launches do not; then the rule holds for each of them. A query that sees no key, and a key that no
query sees, has gradients of exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from autoattn import expression, inputs, reference, rivals, space, validate
from autoattn.compile import Kernel
from autoattn.expression import MASK_NAMES
from autoattn.inputs import Scores
from autoattn.operands import BlockTable, Operands
from autoattn.ops import backward
from autoattn.ops.backward import Gradients, Saved
from autoattn.problem import DType, Precision, Problem
from autoattn.trial import Verdict

ERROR_RATIO = 3.0  # times PyTorch's own error in the low precision
TF32_ULP = 2.0**-10
CHUNK_BYTES = 2**28  # of one matrix of scores that the reference differentiates at a time
SPOT_HEADS = 2  # key heads of all sequences that are compared at full size; the small cases compare all


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem with what the backward pass gets, the gradients to expect and what error is honest."""

    name: str
    problem: Problem
    operands: Operands  # inside tensors of NaN
    saved: Saved  # the same
    places: tuple[tuple[int, int], ...]  # (batch entry, key head) that are compared
    expected: tuple[Gradients, ...]  # of each place, float64: query [group, seq_q, head_dim], key [1, seq_kv, ...], ...
    allowed: dict[str, float]  # largest absolute error of each gradient
    guard: int  # rows of NaN behind each sequence


class Gate:
    """Cases for one kind of problem, made once and put to every kernel for it; small ones, as in `validate`."""

    def __init__(self, problem: Problem, device: torch.device, *, tiny: bool = False, seed: int = 0) -> None:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        lengths = validate.TINY_LENGTHS if tiny else validate.LENGTHS
        facts = [(pair, Scores.PLAIN) for pair in lengths]
        facts.append((lengths[0] if tiny else validate.LOUD_LENGTHS, Scores.LOUD))
        # tf32 takes steep scores for others that are off by up to 0.2, and gradients by more than their own size.
        if problem.precision is not Precision.TF32:
            facts.append((lengths[0] if tiny else validate.STEEP_LENGTHS, Scores.STEEP))
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
    """A case of the same kind as `problem`, small; `number` picks among group sizes, layouts and windows."""
    one, lengths = validate.small(problem, seq_q, seq_kv, number), validate.lengths_of(problem, seq_q, seq_kv)
    return make_case(one, device, generator, scores=scores, guard=validate.GUARD_ROWS, lengths=lengths)


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
    places = tuple(_places(problem, operands, heads))
    expected = _expected(problem, operands, saved, places)
    rough = _expected(problem, operands, saved, places, low=True)
    name = f"{problem}{'' if scores is Scores.PLAIN else f' {scores.value}'}"
    return Case(
        name=name,
        problem=problem,
        operands=operands,
        saved=saved,
        places=places,
        expected=expected,
        allowed=_allowed(problem, operands, saved, places, expected, rough, scores),
        guard=guard,
    )


def full_case(problem: Problem, device: torch.device, generator: torch.Generator) -> Case:
    """The problem itself with contiguous inputs, compared at a few heads."""
    return make_case(problem, device, generator, heads=SPOT_HEADS)


def saved_of(problem: Problem, operands: Operands, generator: torch.Generator, *, guard: int = 0) -> Saved:
    """The reference's output and LSE as a forward kernel rounds them, and random normal gradients of the output."""
    sizes = (problem.heads_q, problem.seq_q, problem.tokens_q, problem.head_dim_v, guard, operands.query.device)
    output_grad = inputs.tensor(problem, *sizes, generator, dtype=problem.dtype.output)
    output = inputs.tensor(problem, *sizes, None, dtype=problem.dtype.output)
    lse = torch.empty(output.shape[:3], dtype=torch.float32, device=output.device)
    dtype = torch.float64 if problem.dtype is DType.FLOAT32 else torch.float32  # either is exact to the output's
    for rows in _chunks(operands, dtype):
        exact, sums = reference.attention(problem, operands, dtype=dtype, rows=rows)
        output[:, :, rows] = exact.to(output.dtype)
        lse[:, :, rows] = sums.float()
    return Saved(output=output, lse=lse, output_grad=output_grad)


def judge(kernel: Kernel, cases: Sequence[Case]) -> Verdict:
    """The verdict over all cases, or over those up to the first that fails."""
    worst = Verdict(ok=True, checks=0, max_error=0.0, rms_error=0.0, allowed=math.inf)
    closest = -1.0
    for count, case in enumerate(cases, start=1):
        worst = replace(worst, checks=count)
        first, second = run(kernel, case), run(kernel, case, as_calls_do=True)
        alike = space.load(kernel.source.variant.template).deterministic
        reason = _malformed(first, case) or _malformed(second, case) or (_unlike(first, second) if alike else "")
        if reason:
            return replace(worst, ok=False, max_error=math.inf, reason=f"{case.name}: {reason}")
        for found in (first,) if alike else (first, second):
            each = errors_by_name(found, case)
            for name, (error, _) in each.items():
                allowed = case.allowed[name]
                if not error <= allowed:
                    reason = f"{case.name}: the {name}'s gradient has error {error:.3g} where {allowed:.3g} is allowed"
                    return replace(worst, ok=False, max_error=error, allowed=allowed, reason=reason)
            max_error, rms_error, allowed = joined(each, case)
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
    if not as_calls_do or not backward.may_bind(case.problem, case.operands.query):
        backward.launch(*facts)
        return gradients
    scratch = backward.empty_scratch(kernel, case.problem, case.operands.query)
    for launch in backward.bind(*facts, scratch):
        launch(backward.addresses_of(case.operands, case.saved, gradients, scratch))
    return gradients


def room_of(case: Case) -> Gradients:
    """What kernels that are timed on a case may all write to: the gradients."""
    return backward.empty_gradients(case.problem, case.operands)


def call_of(kernel: Kernel, case: Case, room: Gradients) -> Callable[[], object]:
    """The kernels on a case's tensors, ready to be timed."""
    return partial(backward.launch, kernel, case.problem, case.operands, case.saved, room)


def rival_calls(case: Case) -> dict[str, Callable[[], Gradients]]:
    """The backward passes of the rivals on a case's tensors, ready to be timed; their forward passes are done."""
    found = rivals.gradient_calls(case.problem, case.operands, case.saved.output_grad)
    return {name: partial(_named, call) for name, call in found.items()}


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
    )


def errors(found: Gradients, case: Case) -> tuple[float, float]:
    """Largest and root mean square error of the three gradients, as `joined` makes one of them."""
    largest, mean, _ = joined(errors_by_name(found, case), case)
    return largest, mean


def joined(each: Mapping[str, tuple[float, float]], case: Case) -> tuple[float, float, float]:
    """Largest and root mean square error, and what is allowed, as one for all gradients.

    Each error is scaled by the largest allowance over its own gradient's, so that the one that comes closest to its
    allowance speaks for all.
    """
    most = max(case.allowed.values())
    scaled = [(most / case.allowed[name], *pair) for name, pair in each.items()]
    return max(scale * one for scale, one, _ in scaled), max(scale * mean for scale, _, mean in scaled), most


def errors_by_name(found: Gradients, case: Case) -> dict[str, tuple[float, float]]:
    """Largest and root mean square error of each gradient, at the compared places."""
    pairs: dict[str, list[Tensor]] = {}
    for place, expected in zip(case.places, case.expected, strict=True):
        for (name, ours), (_, theirs) in zip(at(found, place, case.problem).named(), expected.named(), strict=True):
            pairs.setdefault(name, []).append((ours.double() - theirs).abs().nan_to_num(nan=math.inf))
    whole = {name: torch.cat(parts) for name, parts in pairs.items()}
    sinks = sinks_of(case.problem, case.places, case.expected)
    if sinks is not None:
        assert found.sinks is not None
        whole["sinks"] = (found.sinks.double() - sinks).abs().nan_to_num(nan=math.inf)
    return {name: (float(error.max()), float(error.square().mean().sqrt())) for name, error in whole.items()}


def sinks_of(problem: Problem, places: Sequence[tuple[int, int]], parts: Sequence[Gradients]) -> Tensor | None:
    """[heads_q] gradients of the sinks, from those of all places; None where some are missing."""
    heads = problem.heads_kv * (1 if problem.packed else problem.batch)
    if parts[0].sinks is None or len(places) < heads:
        return None
    total = parts[0].sinks.new_zeros(problem.heads_kv, problem.group_size)
    for (_, head), part in zip(places, parts, strict=True):
        total[head] += part.sinks
    return total.flatten()


def at(gradients: Gradients, place: tuple[int, int], problem: Problem) -> Gradients:
    """What belongs to one key head of one batch entry: the gradients of its query heads, of the key and the value."""
    entry, head = place
    group = slice(head * problem.group_size, (head + 1) * problem.group_size)
    one = slice(head, head + 1)
    sinks = gradients.sinks[group] if gradients.sinks is not None else None
    return Gradients(
        query=gradients.query[entry, group], key=gradients.key[entry, one], value=gradients.value[entry, one],
        sinks=sinks,
    )  # fmt: skip


def _unlike(first: Gradients, second: Gradients) -> str:
    """Where two runs differ, in words."""
    pairs = zip(first.named(), second.named(), strict=True)
    differ = [name for (name, gradient), (_, again) in pairs if not torch.equal(gradient, again)]
    return f"two runs on the same inputs differ in the {differ[0]}'s gradient" if differ else ""


def _malformed(found: Gradients, case: Case) -> str:
    """What is wrong with gradients beside their size, in words."""
    for name, gradient in found.named():
        if missing := int(gradient.isnan().sum()):
            return f"{missing} of {gradient.numel()} elements of the {name}'s gradient are NaN or never written"
        room = gradient._base if gradient._base is not None else gradient
        if int(room.isnan().sum()) != room.numel() - gradient.numel():
            return f"it wrote outside the {name}'s gradient"
    blind = case.saved.lse == -math.inf
    if bool(found.query[blind].count_nonzero()):
        return "the gradient of a query that sees no key is not 0"
    for place, expected in zip(case.places, case.expected, strict=True):
        unseen = (expected.value == 0).all(-1) & (expected.key == 0).all(-1)
        part = at(found, place, case.problem)
        if bool(part.key[unseen].count_nonzero()) or bool(part.value[unseen].count_nonzero()):
            return "the gradient of a key that no query sees is not 0"
    return ""


def _places(problem: Problem, operands: Operands, heads: int | None) -> Iterator[tuple[int, int]]:
    """All key heads of all batch entries, or the first and the last ones."""
    every = [(entry, head) for entry in range(operands.query.shape[0]) for head in range(problem.heads_kv)]
    if heads is None or heads >= len(every):
        yield from every
        return
    yield from every[: heads - heads // 2] + every[len(every) - heads // 2 :]


def _chunks(operands: Operands, dtype: torch.dtype) -> Iterator[Tensor]:
    """The query rows, so many at a time that the reference's scores fit."""
    seq_q, seq_kv = operands.query.shape[2], operands.key.shape[2]
    group = operands.query.shape[1] // operands.key.shape[1]
    rows = max(1, CHUNK_BYTES // (seq_kv * group * dtype.itemsize))
    yield from torch.arange(seq_q, device=operands.query.device).split(rows)


def _expected(
    problem: Problem, operands: Operands, saved: Saved, places: Sequence[tuple[int, int]], *, low: bool = False
) -> tuple[Gradients, ...]:
    """Gradients of some key heads by autograd, in float64; by PyTorch's own low precision if `low`."""
    if _knows_heads(problem):  # none stands alone
        whole = _differentiated(problem, operands, saved, low=low)
        parts = [at(whole, place, problem) for place in places]
        if whole.sinks is None:
            return tuple(parts)
        # The sums over all batch entries are told once.
        nothing = torch.zeros_like(whole.sinks[: problem.group_size])
        return tuple(
            replace(part, sinks=nothing) if entry else part for part, (entry, _) in zip(parts, places, strict=True)
        )
    found = []
    for entry, head in places:
        entries, group = slice(entry, entry + 1), slice(head * problem.group_size, (head + 1) * problem.group_size)
        lse_grad = saved.lse_grad[entries, group] if saved.lse_grad is not None else None
        part = replace(saved, output_grad=saved.output_grad[entries, group], lse_grad=lse_grad)
        alone = _differentiated(*_only(problem, operands, (entry, head)), part, low=low)
        found.append(at(alone, (0, 0), replace(problem, heads_q=problem.group_size, heads_kv=1)))
    return tuple(found)


def _knows_heads(problem: Problem) -> bool:
    """Whether numbers depend on which batch entry and which head they belong to."""
    mod = problem.mask.mod
    asked = expression.parse(mod, MASK_NAMES).answer.asks if mod else frozenset()
    return problem.modifiers.dropout or not asked.isdisjoint({"b", "h"})


def _differentiated(problem: Problem, operands: Operands, saved: Saved, *, low: bool) -> Gradients:
    """Gradients of a whole call, some rows at a time."""
    dtype = operands.query.dtype if low else torch.float64
    names = ["query", "key", "value", *(["sinks"] if operands.sinks is not None else [])]
    given = {name: getattr(operands, name) for name in names}
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in given.items()}
    operands = replace(operands, **leaves)
    sums = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in leaves.items()}
    for rows in _chunks(operands, dtype):
        if low and saved.lse_grad is None:
            made: tuple[Tensor, ...] = (reference.low_precision(problem, operands, rows=rows),)
        else:
            made = reference.attention(problem, operands, dtype=dtype, rows=rows)
        pulls = (saved.output_grad, saved.lse_grad) if saved.lse_grad is not None else (saved.output_grad,)
        pulls = tuple(pull[:, :, rows].to(one.dtype) for one, pull in zip(made, pulls, strict=False))
        grads = torch.autograd.grad(made[: len(pulls)], list(leaves.values()), pulls)
        for total, grad in zip(sums.values(), grads, strict=True):
            total += grad
    return Gradients(**sums)


def _only(problem: Problem, operands: Operands, place: tuple[int, int]) -> tuple[Problem, Operands]:
    """One key head of one batch entry, with the query heads that share it, as a problem of its own."""
    entry, head = place
    group = slice(head * problem.group_size, (head + 1) * problem.group_size)
    entries, one = slice(entry, entry + 1), slice(head, head + 1)
    packed, table = problem.packed, operands.table
    small = replace(problem, heads_q=problem.group_size, heads_kv=1, batch=problem.batch if packed else 1)
    return small, replace(
        operands,
        query=operands.query[entries, group],
        key=operands.key[entries, one],
        value=operands.value[entries, one],
        bias=operands.bias[entries, group] if operands.bias is not None else None,
        slopes=operands.slopes[slice(None) if packed else entries, group] if operands.slopes is not None else None,
        sinks=operands.sinks[group] if operands.sinks is not None else None,
        table=_rows_of(table, entries, group) if table is not None else None,
    )


def _rows_of(table: BlockTable, entries: slice, group: slice) -> BlockTable:
    """A block table of one batch entry and of some heads alone."""
    batch, heads, _ = table.full_counts.shape
    part = entries if batch > 1 else slice(None), group if heads > 1 else slice(None)
    return replace(
        table,
        full_counts=table.full_counts[part],
        full_blocks=table.full_blocks[part],
        partial_counts=table.partial_counts[part],
        partial_blocks=table.partial_blocks[part],
    )


def _allowed(
    problem: Problem,
    operands: Operands,
    saved: Saved,
    places: Sequence[tuple[int, int]],
    expected: Sequence[Gradients],
    rough: Sequence[Gradients],
    scores: Scores,
) -> dict[str, float]:
    """The largest honest error of each gradient."""
    eps = torch.finfo(torch.float32).eps
    # How large the gradient of a weight may be, which is taken from another of its size to give that of a score; and
    # what that is multiplied by.
    weight_grad = float(saved.output_grad.abs().max() * operands.value.abs().max()) * problem.head_dim_v**0.5
    factors = {name: operands.scale * float(getattr(operands, name).abs().max()) for name in ("query", "key")}
    terms = {"query": weight_grad * factors["key"], "key": weight_grad * factors["query"], "value": 0.0}
    pairs = {
        name: tuple(torch.cat([getattr(one, name) for one in each]) for each in (expected, rough)) for name in terms
    }
    sinks = tuple(sinks_of(problem, places, each) for each in (expected, rough))
    if sinks[0] is not None:  # a sum over all queries of what a score's gradient is made of
        pairs["sinks"], terms["sinks"] = sinks, weight_grad * problem.batch
    found = {}
    for name, (exact, low) in pairs.items():
        coarse = exact.to(reference.TORCH_DTYPE[problem.dtype])
        absolute = 2.0 * float((coarse + 0.3 - 0.3 - coarse).abs().max())
        absolute += validate.FLOAT32_ULPS[Precision.IEEE] * eps * terms[name]
        if problem.precision is Precision.TF32:  # delta comes of whole operands, what it is taken from of cut ones
            absolute += TF32_ULP / 2 * terms[name]
        if problem.dtype is DType.FLOAT32:
            absolute += validate.FLOAT32_ULPS[problem.precision] * eps * float(exact.abs().max())
        if scores in validate.RISES:  # a weight errs by its score's ulps, here and in PyTorch in another order
            ulp = (
                TF32_ULP if problem.precision is Precision.TF32 else eps
            )  # scores of cut operands, an LSE of whole ones
            absolute += validate.RISES[scores] * ulp * (terms[name] / weight_grad + float(exact.abs().max()))
        honest = float((low - exact).abs().max())
        found[name] = max(ERROR_RATIO * honest + absolute, float(torch.finfo(torch.float32).tiny))
    return found
