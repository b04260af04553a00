"""Work of each tile of a launch, and the schedule of tiles over the SMs: waves and their tail."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapreplace
from typing import Any

import numpy as np

from autoattn.core.problem import Problem

Array = np.ndarray[Any, np.dtype[np.float64]]


def heads_of(problem: Problem, together: int = 1) -> int:
    """Heads in program order: of all sequences, unless those stand one behind the other in each head.

    Args:
        together: query heads whose rows are dealt out as those of one head; the last of those that share a key head
            may be fewer.
    """
    teams = problem.heads_kv * -(-problem.group_size // together)
    return teams * (1 if problem.packed else problem.batch)


def key_blocks(problem: Problem, block_m: int, block_n: int, mask_loop: str, together: int = 1) -> tuple[Array, Array]:
    """Blocks of keys that each row tile of one head walks: those that need no mask, and those that do.

    With the mask loop `every` all blocks run the one loop there is and count as the first kind. A head of packed
    sequences has the tiles of all of them; those that belong to none walk nothing. The rows of a block table are taken
    to be equally long.
    """
    if problem.mask.sparse:
        plain, masked = _table_blocks(problem, block_m, block_n)
    elif problem.packed:
        plain, masked = _packed_blocks(problem, block_m, block_n, together)
    else:
        plain, masked = _band_blocks(problem, problem.seq_q, _mean_keys(problem), block_m, block_n, together)
    if mask_loop == "every":
        return plain + masked, np.zeros_like(plain)
    return plain, masked


def _mean_keys(problem: Problem) -> int:
    """Keys of a sequence: of unequal ones in a cache the mean, since programs share these out by their lengths."""
    if problem.key_lengths is None:
        return problem.seq_kv
    return math.ceil(sum(problem.key_lengths.drawn(problem.batch)) / problem.batch)


def shared(plain: Array, masked: Array, splits: int) -> tuple[Array, Array]:
    """The same for each program, where `splits` of them share the longest tile and fewer share the others."""
    blocks = plain + masked
    parts = np.clip(np.ceil(blocks * splits / max(1.0, blocks.max())), 1, np.maximum(1, blocks)).astype(int)
    return np.repeat(plain / parts, parts), np.repeat(masked / parts, parts)


def _band_blocks(
    problem: Problem, seq_q: int, seq_kv: int, block_m: int, block_n: int, together: int
) -> tuple[Array, Array]:
    """The blocks of one sequence, as the template counts them (begin_n, inner_n, inner_end and end_n there)."""
    rows = np.arange(0, seq_q * together, block_m, dtype=np.float64)
    starts, stops = rows // together, (rows + block_m - 1) // together + 1
    first, last = problem.band(seq_q, seq_kv)
    begin: Array = np.zeros_like(starts)
    inner: Array = np.zeros_like(starts)
    end: Array = np.full_like(starts, seq_kv)
    visible: Array = np.full_like(starts, seq_kv)
    if last is not None:
        end = np.clip(stops + last, 0, seq_kv)
        visible = np.clip(starts + last + 1, 0, seq_kv)  # keys that all rows of the tile see
    if first is not None:
        begin = np.floor(np.clip(starts + first, 0, seq_kv) / block_n)
        inner = np.ceil(np.clip(stops - 1 + first, 0, seq_kv) / block_n)
    blocks = np.maximum(np.ceil(end / block_n) - begin, 0)
    plain = np.clip(np.floor(visible / block_n) - inner, 0, blocks)
    return plain, blocks - plain


def _packed_blocks(problem: Problem, block_m: int, block_n: int, together: int) -> tuple[Array, Array]:
    """The tiles of sequence b begin at its first row // block_m + b."""
    tiles = problem.tokens_q * together // block_m + problem.batch + 1
    plain, masked = np.zeros(tiles), np.zeros(tiles)
    begin = 0
    for place, (seq_q, seq_kv) in enumerate(problem.lengths()):
        bands = _band_blocks(problem, seq_q, seq_kv, block_m, block_n, together)
        row = begin * together // block_m + place
        for whole, part in zip((plain, masked), bands, strict=True):
            whole[row : row + len(part)] = part
        begin += seq_q
    return plain, masked


def _table_blocks(problem: Problem, block_m: int, block_n: int) -> tuple[Array, Array]:
    """Of the blocks that a row of the table keeps on average, half are cut where the mask has an expression; without
    one, only the last block of keys is, where the keys do not fill it.
    """
    mask = problem.mask
    tiles, across = -(-problem.seq_q // block_m), -(-problem.seq_kv // mask.block_kv)
    kept = mask.density * across
    cut = kept / 2 if mask.mod else mask.density * (problem.seq_kv % mask.block_kv > 0)
    steps = mask.block_kv // block_n
    return np.full(tiles, (kept - cut) * steps), np.full(tiles, cut * steps)


def makespan(
    costs: Array, heads: int, group: int, *, descending: bool, slots: int, slowdown: Callable[[int], float]
) -> float:
    """Time until the last tile is done, when each free slot takes the next tile in program order.

    Args:
        costs: of each row tile of one head, in the order of its rows, at full occupancy; any unit.
        heads: of all sequences together.
        group: heads next to one another in program order.
        descending: the last row tile of a head comes first.
        slots: blocks that run at once.
        slowdown: blocks that still run -> their time relative to full occupancy, at most 1.

    Equal tiles run in whole waves. Unequal ones keep the slots equally busy until the last two rounds, which are
    played out; the tiles of a thin tail have an SM more to themselves and run faster by `slowdown`.
    """
    tiles = len(costs) * heads
    longest, shortest = float(costs.max()), float(costs.min())
    full, rest = divmod(tiles, slots)
    if full == 0 or longest - shortest <= 1e-9 * longest:
        return full * longest + (longest * slowdown(rest) if rest else 0.0)
    balanced = float(costs.sum()) * heads / slots
    last = _last_tiles(costs[::-1] if descending else costs, heads, group, min(tiles, 2 * slots))
    ready = [0.0] * slots
    for cost in map(float, last):
        heapreplace(ready, ready[0] + cost)
    end = max(ready)
    tail = max(0.0, end - float(last.sum()) / slots)
    return balanced + tail * slowdown(max(1, slots // 2))


def _last_tiles(order: Array, heads: int, group: int, count: int) -> Array:
    """Costs of the last `count` tiles in program order."""
    costs: list[Array] = []
    left, have = heads, 0
    while have < count and left > 0:
        members = left % group or min(group, left)
        costs.insert(0, np.repeat(order, members))
        have += len(order) * members
        left -= members
    return np.concatenate(costs)[-count:]


def dealt_makespan(costs: Array, heads: int, group: int, *, descending: bool, programs: int, slots: int) -> float:
    """The same for persistent programs, which deal the tiles out round robin whatever each has to do."""
    order = costs[::-1] if descending else costs
    tile = np.arange(len(costs) * heads)
    place = tile % (group * len(order))
    members = np.minimum(group, heads - tile // (group * len(order)) * group)
    works = np.bincount(tile % programs, weights=order[place // members], minlength=programs)
    ready = [0.0] * slots
    for work in works.tolist():
        heapreplace(ready, ready[0] + work)
    return max(ready)
