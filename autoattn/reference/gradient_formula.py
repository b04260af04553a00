"""The reference of gradients: autograd through the formula, for one key head of one sequence at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from autoattn.core.modifiers import Bias
from autoattn.core.problem import Problem
from autoattn.reference import attention_formula
from autoattn.reference.attention_formula import Origin
from autoattn.tensors.operands import BlockTable, Gradients, Operands, Saved

Place: TypeAlias = tuple[int, int]  # (batch entry, key head)
CHUNK_BYTES = 2**28  # of one matrix of scores that the reference differentiates at a time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """What a part of one gradient is."""

    name: str  # as in Gradients
    index: tuple[slice, ...]  # where it stands in that
    numbers: Tensor  # float64, or whatever PyTorch's low precision leaves of it


def places_of(problem: Problem, operands: Operands, heads: int | None) -> Iterator[Place]:
    """All key heads of all batch entries, or the first and the last ones.

    Where sequences share a tensor that has a gradient, the first and the last key heads of each: then all that adds to
    theirs is there.
    """
    entries, every = range(operands.query.shape[0]), range(problem.heads_kv)
    if heads is None or heads >= len(entries) * len(every):
        yield from ((entry, head) for entry in entries for head in every)
    elif problem.modifiers.sinks or problem.modifiers.bias is Bias.LEARNED:
        kept = dict.fromkeys((*every[: heads - heads // 2], *every[len(every) - heads // 2 :]))
        yield from ((entry, head) for entry in entries for head in kept)
    else:
        flat = [(entry, head) for entry in entries for head in every]
        yield from flat[: heads - heads // 2] + flat[len(flat) - heads // 2 :]


def chunks(operands: Operands, dtype: torch.dtype) -> Iterator[Tensor]:
    """The query rows, so many at a time that the reference's scores fit."""
    seq_q, seq_kv = operands.query.shape[2], operands.key.shape[2]
    group = operands.query.shape[1] // operands.key.shape[1]
    rows = max(1, CHUNK_BYTES // (seq_kv * group * dtype.itemsize))
    yield from torch.arange(seq_q, device=operands.query.device).split(rows)


def joined(parts: Sequence[Part]) -> dict[str, Tensor]:
    """The numbers of all parts of each gradient, one behind the other."""
    pieces: dict[str, list[Tensor]] = {}
    for part in parts:
        pieces.setdefault(part.name, []).append(part.numbers.flatten())
    return {name: torch.cat(numbers) for name, numbers in pieces.items()}


def expected(
    problem: Problem, operands: Operands, saved: Saved, places: Sequence[Place], *, low: bool = False
) -> tuple[Part, ...]:
    """Gradients at some places by autograd, in float64; by PyTorch's own low precision if `low`.

    What several places add to, as sequences to the gradient of a sink, is there if all of these places are.
    """
    parts: dict[str, Part] = {}
    sharers: Counter[str] = Counter()
    for place in places_of(problem, operands, None):
        sharers.update(map(str, _indices(problem, operands, place).items()))
    for place in places:
        entries, group = slice(place[0], place[0] + 1), _group(problem, place[1])
        lse_grad = saved.lse_grad[entries, group] if saved.lse_grad is not None else None
        pull = replace(saved, output_grad=saved.output_grad[entries, group], lse_grad=lse_grad)
        origin = Origin(sequence=place[0], head=group.start, heads_q=problem.heads_q)
        alone = differentiated(*_only(problem, operands, place), pull, low=low, origin=origin)
        for name, index in _indices(problem, operands, place).items():
            known = str((name, index))
            sharers[known] -= 1
            numbers = getattr(alone, name)
            if known in parts:
                parts[known].numbers.add_(numbers)
            else:
                parts[known] = Part(name=name, index=index, numbers=numbers)
    return tuple(part for known, part in parts.items() if not sharers[known])


def differentiated(
    problem: Problem, operands: Operands, saved: Saved, *, low: bool, origin: Origin | None = None
) -> Gradients:
    """Gradients of a whole call, or of a part of one that lies at `origin`, some rows at a time."""
    dtype = operands.query.dtype if low else torch.float64
    given = {name: getattr(operands, name) for name in ("query", "key", "value", "sinks")}
    given["narrow_bias"] = operands.narrow_bias if problem.modifiers.bias is Bias.LEARNED else None
    given["slopes"] = operands.slopes if problem.modifiers.learned_slopes else None
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in given.items() if tensor is not None}
    operands = replace(operands, **leaves)
    if "narrow_bias" in leaves and operands.bias is not None:
        operands = replace(operands, bias=leaves["narrow_bias"].expand(operands.bias.shape))
    sums = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in leaves.items()}
    for rows in chunks(operands, dtype):
        if low and saved.lse_grad is None:
            outputs: tuple[Tensor, ...] = (
                attention_formula.low_precision(problem, operands, rows=rows, origin=origin),
            )
        else:
            outputs = attention_formula.attention(problem, operands, dtype=dtype, rows=rows, origin=origin)
        pulls = (saved.output_grad, saved.lse_grad) if saved.lse_grad is not None else (saved.output_grad,)
        pulls = tuple(pull[:, :, rows].to(tensor.dtype) for tensor, pull in zip(outputs, pulls, strict=False))
        grads = torch.autograd.grad(outputs[: len(pulls)], list(leaves.values()), pulls)
        for total, grad in zip(sums.values(), grads, strict=True):
            total += grad
    return Gradients(**{name.removeprefix("narrow_"): total for name, total in sums.items()})


def _group(problem: Problem, head: int) -> slice:
    """The query heads that share a key head."""
    return slice(head * problem.group_size, (head + 1) * problem.group_size)


def _indices(problem: Problem, operands: Operands, place: Place) -> dict[str, tuple[slice, ...]]:
    """Where the gradients have what a place adds to them, by name."""
    entry, head = place
    entries, kv_head, group = slice(entry, entry + 1), slice(head, head + 1), _group(problem, head)
    indices: dict[str, tuple[slice, ...]] = {
        "query": (entries, group),
        "key": (entries, kv_head),
        "value": (entries, kv_head),
    }
    if operands.sinks is not None:
        indices["sinks"] = (group,)
    if operands.narrow_bias is not None and problem.modifiers.bias is Bias.LEARNED:
        indices["bias"] = _own(operands.narrow_bias, entries, group)
    if problem.modifiers.learned_slopes:
        indices["slopes"] = (slice(None) if problem.packed else entries, group)
    return indices


def _own(tensor: Tensor, entries: slice, group: slice) -> tuple[slice, slice]:
    """Where some batch entries and heads have their part of a [batch or 1, heads or 1, ...] tensor."""
    return entries if tensor.shape[0] > 1 else slice(None), group if tensor.shape[1] > 1 else slice(None)


def _only(problem: Problem, operands: Operands, place: Place) -> tuple[Problem, Operands]:
    """One key head of one batch entry, with the query heads that share it, as a problem of its own."""
    entry, head = place
    group = _group(problem, head)
    entries, kv_head = slice(entry, entry + 1), slice(head, head + 1)
    packed, table, narrow = problem.packed, operands.table, operands.narrow_bias
    small = replace(problem, heads_q=problem.group_size, heads_kv=1, batch=problem.batch if packed else 1)
    return small, replace(
        operands,
        query=operands.query[entries, group],
        key=operands.key[entries, kv_head],
        value=operands.value[entries, kv_head],
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
