"""One sequence of a call on a cache as a call of its own: whether its bits are the same there, the gate asks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from autoattn.core.problem import Problem
from autoattn.tensors.operands import Operands

# (queries, keys) of the sequences that share a batch: one is long, so that what is shared out by all lengths is seen
LENGTHS = ((1, 60), (3, 3001), (2, 0), (1, 517), (3, 1203))
TINY_LENGTHS = ((3, 34), (1, 150), (2, 0))  # for an interpreter

# Tensors that have something of each sequence
_OF_CACHE = "lengths", "pages", "rows", "leftpad"
_OF_OPERANDS = "key_scale", "value_scale", "slopes"


def alone(problem: Problem, operands: Operands, sequence: int) -> tuple[Problem, Operands, slice] | None:
    """A sequence without the others of its batch; None where it has no query.

    Returns:
        the problem and its operands, and which rows of the whole output, along the batch or of packed tokens, it has.
    """
    assert operands.cache is not None
    own = slice(sequence, sequence + 1)
    query, offsets, rows = operands.query[own], None, own
    facts: dict[str, Any] = {"batch": 1}
    key, value, cache = operands.key, operands.value, operands.cache
    if cache.pages is None and cache.rows is None:
        key, value = key[own], value[own]
    if operands.cu_seqlens_q is not None:
        begin, end = operands.cu_seqlens_q[sequence : sequence + 2].tolist()
        rows = slice(begin, end)
        if begin == end:
            return None
        query, offsets = operands.query[:, :, rows], operands.cu_seqlens_q[sequence : sequence + 2] - begin
        facts |= {"seq_q": end - begin, "tokens_q": end - begin, "tokens_kv": problem.seq_kv}
    places: dict[str, Any] = {name: _part(getattr(cache, name), own) for name in _OF_CACHE}
    parts: dict[str, Any] = {name: _part(getattr(operands, name), own) for name in _OF_OPERANDS}
    changed = replace(
        operands,
        query=query,
        key=key,
        value=value,
        cu_seqlens_q=offsets,
        cache=replace(cache, **places),
        **parts,
    )
    return replace(problem, **facts), changed, rows


def _part(tensor: Tensor | None, own: slice) -> Tensor | None:
    return None if tensor is None else tensor[own]
