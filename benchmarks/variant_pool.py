"""The pool of variants that benchmarks/portfolios.py measures on each problem: seeds, winners, and grids of tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import lru_cache

from autoattn.cache import store
from autoattn.codegen import resources, search_space
from autoattn.core.device import Device
from autoattn.core.problem import DType, Problem
from autoattn.core.variant import Value, Variant

GLUON = "gluon/forward"
TRITON = "triton/forward"
# What a grid does not vary.
GLUON_BASE: dict[str, Value] = {
    "overlap": 1, "queries_in": "shared", "query_stages": 1, "mask_loop": "split", "softmax": "vote",
    "ping_pong": "none", "slot_release": "named", "v_wait": "late", "row_sum": "last", "software_exp2": 0,
    "producer_registers": 24, "HEAD_GROUP": 1, "row_order": "descending",
}  # fmt: skip
TRITON_BASE: dict[str, Value] = {
    "products": "as_asked", "maxnreg": 0, "mask_loop": "split", "softmax": "online", "barrier": "none",
    "HEAD_GROUP": 1, "row_order": "descending", "PERSISTENT": 0,
}  # fmt: skip
GLUON_TILES = (
    (64, 32), (64, 64), (64, 80), (64, 128), (128, 32), (128, 64), (128, 80), (128, 96), (128, 128), (128, 160),
    (192, 64), (192, 128),
)  # fmt: skip
TRITON_TILES = (
    (16, 32, 1), (16, 64, 2), (16, 64, 4), (16, 128, 4), (32, 32, 2), (32, 64, 2), (32, 64, 4), (64, 32, 4),
    (64, 64, 4), (64, 128, 4), (128, 32, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8),
)  # fmt: skip
SPLITS = (1, 2, 4, 8, 16, 32, 64)
FEW_ROWS = 64  # of a head or of heads that share keys: programs split the keys, and heads share tiles


def pool(problem: Problem, device: Device) -> list[Variant]:
    """Feasible variants, in the same order for all problems: seeds of the problem, other seeds, winners, grids."""
    spaces = {space.template: space for space in search_space.of(problem.op)}
    coming: dict[Variant, None] = {}
    for space in spaces.values():
        coming |= dict.fromkeys(space.seeds_for(problem, device))
    for space in spaces.values():
        coming |= dict.fromkeys(space.variant(params) for _, params in space.seeds)
    coming |= dict.fromkeys(winners(device, problem))
    for template, params in itertools.chain(_gluon_grid(problem), _triton_grid(problem)):
        if template in spaces and spaces[template].holds(params):
            coming[spaces[template].variant(params)] = None
    return [variant for variant in coming if spaces[variant.template].why_infeasible(variant, problem, device) is None]


@lru_cache(maxsize=4)
def _entries(device: Device) -> tuple[tuple[int, Variant], ...]:
    return tuple(
        (entry.problem.dtype.bytes, entry.variant)
        for file in store.read_folder(resources.shipped_cache())
        if file.fingerprint == device.fingerprint
        for entry in file.entries.values()
        if entry.choice == "kernel"
    )


def winners(device: Device, problem: Problem) -> Iterator[Variant]:
    """The shipped winners of the card, of problems with as wide elements, that are points of today's spaces."""
    for element_bytes, variant in _entries(device):
        space = search_space.load(variant.template)
        if element_bytes == problem.dtype.bytes and space in search_space.of(problem.op) and _holds(space, variant):
            yield variant


def _holds(space: search_space.SearchSpace, variant: Variant) -> bool:
    return space.holds(variant.as_dict())


def _gluon_grid(problem: Problem) -> Iterator[tuple[str, Mapping[str, Value]]]:
    packs = _packs(problem, 16)
    buffers = ("own", "shared")
    for (rows, keys), schedule, ctas, stages, pack, split, buffer in itertools.product(
        GLUON_TILES, ("one_tile", "persistent"), (1, 2), (2, 3), packs, (0, 1), buffers
    ):
        if (ctas == 2) != (rows == 64):  # two programs an SM are worth it where each is small
            continue
        yield (
            GLUON,
            {
                **GLUON_BASE,
                **{"BLOCK_M": rows, "BLOCK_N": keys, "CTAS": ctas, "num_stages": stages, "PACK_GQA": pack},
                **{"HEAD_SPLIT": split, "schedule": schedule, "output_buffer": buffer},
            },
        )


def _triton_grid(problem: Problem) -> Iterator[tuple[str, Mapping[str, Value]]]:
    few = problem.seq_q * problem.group_size <= FEW_ROWS
    packs = (0, 1) if problem.group_size > 1 and few else (0,)
    splits = SPLITS if few else SPLITS[:3]
    products = ("as_asked", "bf16x3", "bf16x6") if problem.dtype is DType.FLOAT32 else ("as_asked",)
    for (rows, keys, warps), count, stages, pack, product in itertools.product(
        TRITON_TILES, splits, (2, 3), packs, products
    ):
        if few and rows > FEW_ROWS:
            continue
        yield (
            TRITON,
            {
                **TRITON_BASE,
                **{"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages, "SPLITS": count},
                **{"PACK_GQA": pack, "HEAD_SPLIT": 0, "products": product},
            },
        )


def _packs(problem: Problem, most: int) -> tuple[int, ...]:
    """Heads in the rows of a tile: one, and as many as share keys where a head has few rows."""
    together = 1 << (problem.group_size - 1).bit_length()
    few = problem.seq_q * problem.group_size <= 4 * FEW_ROWS
    return (1, min(together, most)) if together > 1 and few else (1,)
