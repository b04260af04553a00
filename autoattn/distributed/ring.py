"""Ring and all-gather: keys and values come to the queries, hop by hop, and their gradients go back.

Autograd keeps what the rank itself has, its output and its LSE; the backward pass asks for other keys again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autoattn.core.rank_choice import Method
from autoattn.distributed import partial_call, schedule
from autoattn.distributed.communication import Arrival, HopIndices, Ranks, Return
from autoattn.distributed.merging import MergedOutput, Sum
from autoattn.distributed.partial_call import Packing, Terms
from autoattn.distributed.rectangles import Reach, Rectangle, Span
from autoattn.distributed.schedule import Hop, Schedule, Split

Three: TypeAlias = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A part of a hop's calls: one attention call."""

    queries: Span
    keys: Span
    window: tuple[int, int]
    packing: Packing | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduleOnDevice:
    """A schedule with the tensors that its hops and calls read."""

    schedule: Schedule
    indices: tuple[HopIndices, ...]  # of each hop
    calls: tuple[tuple[Call, ...], ...]
    settles_sinks: bool  # whether calls of the first hop count the sinks: each query is in one of them
    axis: int  # of the tokens: 1, or 0 where sequences are packed


# Few, since places of tokens take memory: 8 bytes for each token that comes or goes, of packed documents.
@lru_cache(maxsize=32)
def placed(
    split: Split, rank: int, reach: Reach, method: Method, device: torch.device, *, packed: bool
) -> ScheduleOnDevice:
    """The schedule of a rank on a device."""
    plan = schedule.plan(split, rank, reach, method)
    return ScheduleOnDevice(
        schedule=plan,
        indices=tuple(HopIndices.of(hop, device) for hop in plan.hops),
        calls=tuple(tuple(_calls(hop, plan.queries, device, packed=packed)) for hop in plan.hops),
        # A packed call has all queries, and gives a sink to those that it shows no key, too.
        settles_sinks=plan.settles_sinks and not (packed and len(plan.hops[0].calls) > 1),
        axis=0 if packed else 1,
    )


def _calls(hop: Hop, queries: int, device: torch.device, *, packed: bool) -> Iterator[Call]:
    for group in hop.calls:
        if packed:
            packing = Packing.of(group, device)
            yield Call(queries=(0, queries), keys=(0, hop.length), window=group[0].window, packing=packing)
        else:
            yield from (_dense_call(rectangle) for rectangle in group)


def _dense_call(rectangle: Rectangle) -> Call:
    return Call(queries=rectangle.queries, keys=rectangle.keys, window=rectangle.window, packing=None)


def attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, terms: Terms, ranks: Ranks, plan: ScheduleOnDevice
) -> tuple[Tensor, Tensor]:
    """Output and LSE of the rank's queries; differentiable.

    Args:
        query, key, value: the rank's [batch, seq, heads, head_dim], or packed [tokens, heads, head_dim].
        sinks: [heads_q]
    """
    slopes = terms.slopes if terms.learns_slopes else None
    output, lse = _ContextAttention.apply(query, key, value, sinks, slopes, terms, ranks, plan)
    return output, lse


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, slopes: Tensor | None, terms: Terms,
        ranks: Ranks, plan: ScheduleOnDevice,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        output, lse = _forward((query, key, value), sinks, terms, ranks, plan)
        ctx.save_for_backward(query, key, value, sinks, slopes, output, lse)
        ctx.given = terms if slopes is None else replace(terms, slopes=None), ranks, plan
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, pull: Tensor | None, pull_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, slopes, output, lse = ctx.saved_tensors
        terms, ranks, plan = ctx.given
        terms = terms if slopes is None else replace(terms, slopes=slopes)
        pull = torch.zeros_like(output) if pull is None else pull.contiguous() if 0 in pull.stride() else pull
        answer, pulls = (output, lse), (pull, pull_lse)
        gradients, slopes_grad = _backward((query, key, value), answer, pulls, terms, ranks, plan)
        sinks_grad = _sinks_gradient(sinks, answer, pulls) if ctx.needs_input_grad[3] else None
        return *gradients, sinks_grad, slopes_grad, None, None, None


def _forward(
    three: Three, sinks: Tensor | None, terms: Terms, ranks: Ranks, plan: ScheduleOnDevice
) -> tuple[Tensor, Tensor]:
    query, axis = three[0], plan.axis
    early = sinks if plan.settles_sinks else None
    shape = torch.Size((*query.shape[:-1], three[2].shape[-1]))
    merged = MergedOutput(shape, query.dtype, axis, wide=plan.schedule.coverage > 2 or early is not sinks)
    for number, keys in enumerate(_arrivals(three[1:], ranks, plan)):
        for call in plan.calls[number]:
            parts = _parts((query, *keys), call, axis)
            posed = parts, call.window, terms, call.packing, early if number == 0 else None
            if not merged.merge_by(partial(partial_call.attend_into, *posed), call.queries, query.device):
                merged.add(*partial_call.attend(*posed), call.queries)
    if sinks is not None and early is None:
        merged.count(sinks)
    return merged.result(query.device)


def _backward(
    three: Three, answer: tuple[Tensor, Tensor], pulls: tuple[Tensor, Tensor | None], terms: Terms, ranks: Ranks,
    plan: ScheduleOnDevice,
) -> tuple[tuple[Tensor, ...], Tensor | None]:  # fmt: skip
    query, *own = three
    axis = plan.axis
    query_sum = Sum(query.shape, axis, wide=plan.schedule.coverage > 2)
    own_sums = [Sum(tensor.shape, axis, wide=ranks.size > 2) for tensor in own]
    slopes_grad = torch.zeros_like(terms.slopes) if terms.slopes is not None and terms.learns_slopes else None
    returning: tuple[int, Return] | None = None
    for number, keys in enumerate(_arrivals(own, ranks, plan)):
        key_sums = [Sum(tensor.shape, axis, wide=True) for tensor in keys]
        for call in plan.calls[number]:
            output, pull = (_narrowed(tensor, call.queries, axis) for tensor in (answer[0], pulls[0]))
            lse = _narrowed(answer[1], call.queries, -1)
            pull_lse = None if pulls[1] is None else _narrowed(pulls[1], call.queries, -1)
            gradients = partial_call.differentiate(
                _parts((query, *keys), call, axis), call.window, terms, call.packing, (output, lse), (pull, pull_lse)
            )
            query_sum.add(gradients.query, call.queries)
            key_sums[0].add(gradients.key, call.keys)
            key_sums[1].add(gradients.value, call.keys)
            if slopes_grad is not None and gradients.slopes is not None:
                slopes_grad = slopes_grad + gradients.slopes
        totals = [total.result(tensor) for total, tensor in zip(key_sums, keys, strict=True)]
        begun = Return(ranks, plan.schedule.hops[number], plan.indices[number], totals, own, axis)
        if returning is not None:
            _collect(*returning, own_sums, plan)
        returning = number, begun
    if returning is not None:
        _collect(*returning, own_sums, plan)
    sums = (query_sum, *own_sums)
    return tuple(total.result(tensor) for total, tensor in zip(sums, three, strict=True)), slopes_grad


def _arrivals(own: Sequence[Tensor], ranks: Ranks, plan: ScheduleOnDevice) -> Iterator[list[Tensor]]:
    """Keys and values of each hop; those of the next are on their way meanwhile."""
    before: Arrival | None = None
    for hop, indices in zip(plan.schedule.hops, plan.indices, strict=True):
        arrival = Arrival(ranks, hop, indices, own, plan.axis, before)
        if before is not None:
            yield before.wait()
        before = arrival
    if before is not None:
        yield before.wait()


def _collect(number: int, begun: Return, sums: Sequence[Sum], plan: ScheduleOnDevice) -> None:
    """Adds what other ranks send of a hop, in the order of the ranks."""
    hop, indices = plan.schedule.hops[number], plan.indices[number]
    places = {target.rank: index for target, index in zip(hop.targets, indices.targets, strict=True)}
    for transfer, gradients in begun.wait():
        for total, gradient in zip(sums, gradients, strict=True):
            if (index := places[transfer.rank]) is None:
                total.add(gradient, transfer.spans[0])
            else:
                total.add_at(gradient, index)


def _parts(three: Sequence[Tensor], call: Call, axis: int) -> Three:
    """What a call reads."""
    query, key, value = three
    return (
        _narrowed(query, call.queries, axis),
        _narrowed(key, call.keys, axis),
        _narrowed(value, call.keys, axis),
    )


def _narrowed(tensor: Tensor, span: Span, axis: int) -> Tensor:
    if span == (0, tensor.shape[axis]):
        return tensor
    if axis == 1 and tensor.shape[0] == 1:  # with the strides of a whole tensor, which prepared calls are kept for
        return tensor[0].narrow(0, span[0], span[1] - span[0])[None]
    return tensor.narrow(axis, span[0], span[1] - span[0])


def _sinks_gradient(sinks: Tensor, answer: tuple[Tensor, Tensor], pulls: tuple[Tensor, Tensor | None]) -> Tensor:
    """The share of the rank's queries in the gradient of the sinks, [heads_q]."""
    (output, lse), (pull, pull_lse) = answer, pulls
    moved = -(output.to(lse.dtype) * pull).sum(-1).transpose(-1, -2)  # [..., heads, seq]
    moved = moved if pull_lse is None else moved + pull_lse
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse) * moved
    return share.sum(dim=tuple(each for each in range(share.dim()) if each != share.dim() - 2)).to(sinks.dtype)
