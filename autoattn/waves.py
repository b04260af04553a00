"""How much work each tile of a launch has, and how long the tiles take to run out: waves and their tail."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapreplace
from typing import Any

import numpy as np

from autoattn.problem import Problem

Array = np.ndarray[Any, np.dtype[np.float64]]


def key_blocks(problem: Problem, block_m: int, block_n: int, mask_loop: str) -> tuple[Array, Array]:
    """Blocks of keys that each row tile of one head walks: those that need no mask, and those that do.

    With the mask loop `every` all blocks run the one loop there is and count as the first kind.
    """
    starts = np.arange(0, problem.seq_q, block_m, dtype=np.float64)
    if problem.mask.causal:
        ends = np.clip(starts + block_m + problem.shift, 0, problem.seq_kv)
        visible = np.clip(starts + problem.shift + 1, 0, problem.seq_kv)  # keys that all rows of the tile see
    else:
        ends = visible = np.full_like(starts, problem.seq_kv)
    blocks = np.ceil(ends / block_n)
    if mask_loop == "every":
        return blocks, np.zeros_like(blocks)
    inner = np.minimum(np.floor(visible / block_n), blocks)
    return inner, blocks - inner


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
    found: list[Array] = []
    left, have = heads, 0
    while have < count and left > 0:
        members = left % group or min(group, left)
        found.insert(0, np.repeat(order, members))
        have += len(order) * members
        left -= members
    return np.concatenate(found)[-count:]


def dealt_makespan(costs: Array, heads: int, group: int, *, descending: bool, programs: int) -> float:
    """The same for persistent programs, which deal the tiles out round robin whatever each has to do."""
    tiles = len(costs) * heads
    order = costs[::-1] if descending else costs
    worst = 0.0
    for program in {0, programs // 2, programs - 1}:
        tile = np.arange(program, tiles, programs)
        place = tile % (group * len(order))
        members = np.minimum(group, heads - tile // (group * len(order)) * group)
        worst = max(worst, float(order[place // members].sum()))
    return worst
