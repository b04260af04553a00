"""Says from measured times what a tile of gluon/forward takes beside its blocks of keys, and what each block takes.

python benchmarks/tile_costs.py

Where all tiles of a call run at once, the longest one has the time of the call. Of kernels that compute one tile a
program, of one head, least squares fit a time for a tile and one for each of its blocks, all errors relative. The time
for a tile has the launch in it, and what a cold L2 takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import portfolio_examples
from portfolio_examples import DATA, Example, mask_name
from variant_pool import GLUON

from autoattn.codegen import search_space
from autoattn.cost_model import tile_schedule

HEAD_DIMS = 64, 128  # whose rows begin with lines
TILES = (64, 64), (128, 64), (128, 128)
BUSY = 0.4  # of the places for programs are taken, at least
FEWEST_BLOCKS = 5  # of the longest tile
FEWEST_TIMES = 7  # of a row


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Kind:
    """What has a row of its own."""

    head_dim: int
    tile: tuple[int, int]
    programs_an_sm: int
    mask: str


def longest(example: Example) -> Iterator[tuple[Kind, float, float]]:
    """The kind of each variant whose tiles all run at once, the blocks of its longest tile, and its time."""
    problem = example.problem
    if problem.dtype.bytes != 2 or problem.head_dim not in HEAD_DIMS:
        return
    for variant, time_us in example.times_us.items():
        params = variant.as_dict()
        if variant.template != GLUON or params["schedule"] != "one_tile":
            continue
        tile, programs_an_sm = (int(params["BLOCK_M"]), int(params["BLOCK_N"])), int(params.get("CTAS", 1))
        if tile not in TILES or search_space.load(GLUON).heads_of_tile(params, problem) != 1:
            continue
        plain, masked = tile_schedule.key_blocks(problem, *tile, "split", 1)
        places = programs_an_sm * example.device.sm_count
        tiles = len(plain) * tile_schedule.heads_of(problem, 1)
        blocks = float((plain + masked).max())
        if BUSY * places <= tiles <= places and blocks >= FEWEST_BLOCKS:
            mask = mask_name(problem.mask)
            yield Kind(head_dim=problem.head_dim, tile=tile, programs_an_sm=programs_an_sm, mask=mask), blocks, time_us


def costs(blocks: Iterable[float], times_us: Iterable[float]) -> tuple[float, float]:
    """Microseconds of a tile, and of each block."""
    of_tile = np.array([[1.0, count] for count in blocks])
    times = np.array(list(times_us))
    (begin, each), *_ = np.linalg.lstsq(of_tile / times[:, None], np.ones(len(times)), rcond=None)
    return float(begin), float(each)


def table(examples: Iterable[Example]) -> list[str]:
    """A row for each kind that enough times are known of."""
    known: defaultdict[Kind, list[tuple[float, float]]] = defaultdict(list)
    for example in examples:
        for kind, blocks, time_us in longest(example):
            known[kind].append((blocks, time_us))
    lines = [
        "| head dim | tile | programs an SM | mask | times | us a tile | us a block |",
        "|--:|---|--:|---|--:|--:|--:|",
    ]
    for kind, pairs in sorted(known.items()):
        if len(pairs) >= FEWEST_TIMES:
            begin, each = costs(*zip(*pairs, strict=True))
            lines.append(
                f"| {kind.head_dim} | {kind.tile[0]} x {kind.tile[1]} | {kind.programs_an_sm} | {kind.mask} | "
                f"{len(pairs)} | {begin:.1f} | {each:.2f} |"
            )
    return lines


if __name__ == "__main__":
    print("\n".join(table(portfolio_examples.examples_of(DATA))))
