"""What the gradients of a call are: autograd through the reference, whole or for one key head of one sequence alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autoattn import expression, reference
from autoattn.expression import MASK_NAMES, SCORE_NAMES
from autoattn.operands import BlockTable, Operands
from autoattn.ops.backward import Gradients, Saved
from autoattn.problem import Bias, Problem

Place = tuple[int, int]  # (batch entry, key head)
CHUNK_BYTES = 2**28  # of one matrix of scores that the reference differentiates at a time
SUMS = ("sinks", "bias")  # gradients that are sums over places


def places_of(problem: Problem, operands: Operands, heads: int | None) -> Iterator[Place]:
    """All key heads of all batch entries, or the first and the last ones."""
    every = [(entry, head) for entry in range(operands.query.shape[0]) for head in range(problem.heads_kv)]
    if heads is None or heads >= len(every):
        yield from every
        return
    yield from every[: heads - heads // 2] + every[len(every) - heads // 2 :]


def chunks(operands: Operands, dtype: torch.dtype) -> Iterator[Tensor]:
    """The query rows, so many at a time that the reference's scores fit."""
    seq_q, seq_kv = operands.query.shape[2], operands.key.shape[2]
    group = operands.query.shape[1] // operands.key.shape[1]
    rows = max(1, CHUNK_BYTES // (seq_kv * group * dtype.itemsize))
    yield from torch.arange(seq_q, device=operands.query.device).split(rows)


def at(gradients: Gradients, place: Place, problem: Problem) -> Gradients:
    """What belongs to one key head of one batch entry: the gradients of its query heads, of the key and the value."""
    entry, head = place
    group, one = _group(problem, head), slice(head, head + 1)
    return Gradients(
        query=gradients.query[entry, group], key=gradients.key[entry, one], value=gradients.value[entry, one]
    )


def sums_of(parts: Sequence[Gradients]) -> dict[str, Tensor]:
    """The gradients that all places add to, by name; none where places are missing."""
    found: dict[str, Tensor] = {}
    for name in SUMS:
        added = [getattr(part, name) for part in parts if getattr(part, name) is not None]
        if added:
            found[name] = torch.stack(added).sum(0)
    return found


def expected(
    problem: Problem, operands: Operands, saved: Saved, places: Sequence[Place], *, low: bool = False
) -> tuple[Gradients, ...]:
    """Gradients at some places by autograd, in float64; by PyTorch's own low precision if `low`.

    Where these are all places, each has what it adds to the gradients in SUMS, in their whole shapes.
    """
    complete = len(places) == operands.query.shape[0] * problem.heads_kv
    if not complete:
        operands = replace(operands, narrow_bias=None)
    if _knows_heads(problem):  # none stands alone
        whole = differentiated(problem, operands, saved, low=low)
        first, *others = (at(whole, place, problem) for place in places)
        return (replace(first, sinks=whole.sinks, bias=whole.bias) if complete else first), *others
    found = []
    for place in places:
        entries, group = slice(place[0], place[0] + 1), _group(problem, place[1])
        lse_grad = saved.lse_grad[entries, group] if saved.lse_grad is not None else None
        part = replace(saved, output_grad=saved.output_grad[entries, group], lse_grad=lse_grad)
        alone = differentiated(*_only(problem, operands, place), part, low=low)
        one = at(alone, (0, 0), replace(problem, heads_q=problem.group_size, heads_kv=1))
        found.append(replace(one, **_added(problem, operands, place, alone)) if complete else one)
    return tuple(found)


def differentiated(problem: Problem, operands: Operands, saved: Saved, *, low: bool) -> Gradients:
    """Gradients of a whole call, some rows at a time."""
    dtype = operands.query.dtype if low else torch.float64
    given = {name: getattr(operands, name) for name in ("query", "key", "value", "sinks")}
    given["narrow_bias"] = operands.narrow_bias if problem.modifiers.bias is Bias.LEARNED else None
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in given.items() if tensor is not None}
    operands = replace(operands, **leaves)
    if "narrow_bias" in leaves and operands.bias is not None:
        operands = replace(operands, bias=leaves["narrow_bias"].expand(operands.bias.shape))
    sums = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in leaves.items()}
    for rows in chunks(operands, dtype):
        if low and saved.lse_grad is None:
            made: tuple[Tensor, ...] = (reference.low_precision(problem, operands, rows=rows),)
        else:
            made = reference.attention(problem, operands, dtype=dtype, rows=rows)
        pulls = (saved.output_grad, saved.lse_grad) if saved.lse_grad is not None else (saved.output_grad,)
        pulls = tuple(pull[:, :, rows].to(one.dtype) for one, pull in zip(made, pulls, strict=False))
        grads = torch.autograd.grad(made[: len(pulls)], list(leaves.values()), pulls)
        for total, grad in zip(sums.values(), grads, strict=True):
            total += grad
    return Gradients(**{name.removeprefix("narrow_"): total for name, total in sums.items()})


def _knows_heads(problem: Problem) -> bool:
    """Whether numbers depend on which batch entry and which head they belong to."""
    texts = (problem.modifiers.score_mod, SCORE_NAMES), (problem.mask.mod, MASK_NAMES)
    asked = [expression.parse(text, names).answer.asks for text, names in texts if text]
    return problem.modifiers.dropout or any(not each.isdisjoint({"b", "h"}) for each in asked)


def _group(problem: Problem, head: int) -> slice:
    """The query heads that share a key head."""
    return slice(head * problem.group_size, (head + 1) * problem.group_size)


def _added(problem: Problem, operands: Operands, place: Place, alone: Gradients) -> dict[str, Tensor]:
    """What a place's gradients add to those in SUMS, in their whole shapes."""
    found, group = {}, _group(problem, place[1])
    if alone.sinks is not None:
        found["sinks"] = alone.sinks.new_zeros(problem.heads_q)
        found["sinks"][group] = alone.sinks
    if alone.bias is not None and operands.narrow_bias is not None:
        found["bias"] = alone.bias.new_zeros(operands.narrow_bias.shape)
        entries = slice(place[0], place[0] + 1)
        found["bias"][_own(operands.narrow_bias, entries, group)] = alone.bias
    return found


def _own(tensor: Tensor, entries: slice, group: slice) -> tuple[slice, slice]:
    """Where some batch entries and heads have their part of a [batch or 1, heads or 1, ...] tensor."""
    return entries if tensor.shape[0] > 1 else slice(None), group if tensor.shape[1] > 1 else slice(None)


def _only(problem: Problem, operands: Operands, place: Place) -> tuple[Problem, Operands]:
    """One key head of one batch entry, with the query heads that share it, as a problem of its own."""
    entry, head = place
    group = _group(problem, head)
    entries, one = slice(entry, entry + 1), slice(head, head + 1)
    packed, table, narrow = problem.packed, operands.table, operands.narrow_bias
    small = replace(problem, heads_q=problem.group_size, heads_kv=1, batch=problem.batch if packed else 1)
    return small, replace(
        operands,
        query=operands.query[entries, group],
        key=operands.key[entries, one],
        value=operands.value[entries, one],
        bias=operands.bias[entries, group] if operands.bias is not None else None,
        narrow_bias=narrow[_own(narrow, entries, group)] if narrow is not None else None,
        slopes=operands.slopes[slice(None) if packed else entries, group] if operands.slopes is not None else None,
        sinks=operands.sinks[group] if operands.sinks is not None else None,
        table=_rows_of(table, _own(table.full_counts, entries, group)) if table is not None else None,
    )


def _rows_of(table: BlockTable, part: tuple[slice, slice]) -> BlockTable:
    """The block table of some batch entries and heads."""
    return replace(
        table,
        full_counts=table.full_counts[part],
        full_blocks=table.full_blocks[part],
        partial_counts=table.partial_counts[part],
        partial_blocks=table.partial_blocks[part],
    )
