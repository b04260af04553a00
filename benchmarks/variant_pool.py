"""The variants that benchmarks/portfolios.py measures: a wide pool to be screened, and few that cover what was."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from portfolio_examples import Example, as_kept
from portfolio_model import Owner, padded_count

from autoattn.cache import store
from autoattn.codegen import head_order, portfolio, resources, search_space
from autoattn.core.cache_entry import KERNEL, CacheEntry
from autoattn.core.device import Device
from autoattn.core.key_cache import PART_GROUP
from autoattn.core.problem import DType, Precision, Problem
from autoattn.core.variant import Value, Variant

TimesUs: TypeAlias = Callable[[list[Variant]], Mapping[Variant, float]]
Expected: TypeAlias = Mapping[Owner, Mapping[Variant, float]]
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
    (64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 96), (128, 128), (192, 64), (192, 128),
)  # fmt: skip
GLUON_SCHEDULES: tuple[dict[str, Value], ...] = (
    {"schedule": "one_tile", "output_buffer": "shared"},
    {"schedule": "persistent", "output_buffer": "own"},
    {"schedule": "dynamic", "output_buffer": "own", "query_stages": 2},
    {"schedule": "dynamic", "output_buffer": "shared"},
)
PAIRED_ROWS = 128  # of a tile that one consumer of two warpgroups computes
EARLY_KEYS = (64,)  # of a block of such a tile
ONE_BLOCK_TILES = ((64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128))  # of a call's keys, at most
TRITON_TILES = (
    (32, 32, 2), (32, 64, 4), (64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 4), (128, 64, 4), (128, 64, 8),
    (128, 128, 8),
)  # fmt: skip
# Finals of float32 chose tiles of few warps too, and of few rows beside many keys.
FLOAT32_ROWS_TILES = (*TRITON_TILES, (16, 128, 4), (32, 64, 2))
FEW_ROWS_TILES = ((16, 32, 1), (16, 64, 2), (16, 64, 4), (16, 128, 4), (32, 64, 4), (64, 64, 4))
SMALL_TILES = (
    (16, 16, 1), (16, 32, 1), (16, 64, 1), (16, 64, 2), (16, 128, 4), (32, 32, 1), (32, 32, 2), (32, 64, 2),
    (64, 32, 4), (64, 64, 4), (64, 128, 4),
)  # fmt: skip
FLOAT32_TILES = (
    (16, 16, 1), (16, 16, 2), (16, 16, 4), (16, 32, 2), (16, 32, 4), (16, 64, 4), (32, 16, 2), (32, 16, 4), (32, 32, 4),
    (32, 32, 1), (32, 32, 2), (32, 64, 2), (32, 32, 8), (64, 16, 4), (64, 32, 4), (64, 32, 8), (64, 64, 4),
)  # fmt: skip
OF_A_TILE = 3  # candidates of it
OF_A_SPLIT_TILE = 4  # where rows are few, and the programs that share their keys are many or few
SPLITS = (1, 2, 4, 8, 16, 32, 64)
SPLIT_TILES = ((16, 32, 2), (16, 64, 2), (16, 64, 4), (16, 128, 2), (16, 128, 4))
MOST_SPLIT_ROWS = 16  # of heads that share keys: a tile of few rows, whose parts are added up by rows or groups
PROGRAMS_AN_SM = 0.2, 4.0  # of calls whose tiles programs share: fewer leave SMs idle, and more have too much to add up
LONG_TILE = 128  # rows: where a head has fewer queries in float32, heads that share keys may share tiles too
MOST_TILE_ROWS = max(rows for rows, _ in GLUON_TILES)
HEADS_OF_TILES = (2, 4, 8, 16)  # of those that share keys, in the rows of a tile
MOST_PACKED_QUERIES = 256  # of a head: longer calls have no tiles of all heads that share keys
FEW_ROWS = 64  # of a head or of heads that share keys: programs split the keys, and heads share tiles
FEW_TILES = 256  # of 128 queries: then programs may split the keys too
MOST_PROGRAMS_AN_SM = 2  # of tiles of more rows that more than four programs share
MOST_SEEDS = 8  # of a template
FAR = 1.5  # times the best: screening looks no further
LEAST_GAIN = 0.0005  # of one more variant in a cover: what it saves of the time, in the mean of the problems
LEAST_EXPECTED_GAIN = 0.00006  # where a model expects times: it sees what a variant saves where nobody measured it
FEWEST_WINS = 2  # of a variant that may cover others
NEAR_WINNERS = 12  # of each family: winners of the problems that are most alike


def pool(problem: Problem, device: Device) -> list[Variant]:
    """Feasible variants as calls run them: seeds of the problem, winners of problems alike, grids, and other seeds.

    Sizes of one kind of kernel have most of them in common, so that few kernels are compiled for many problems.
    """
    spaces = {space.template: space for space in search_space.of(problem.op)}
    coming: dict[Variant, None] = {}
    for space in spaces.values():
        coming |= dict.fromkeys(space.seeds_for(problem, device)[:MOST_SEEDS])
    for template in spaces:
        coming |= dict.fromkeys(list(winners(device, problem, template))[:NEAR_WINNERS])
    grids = (
        _gluon_grid(problem), _one_block_grid(problem), _triton_grid(problem, device), _split_grid(problem, device),
    )  # fmt: skip
    for template, params in itertools.chain(*grids):
        if template in spaces and spaces[template].holds(params):
            coming[spaces[template].variant(params)] = None
    return feasible(running(coming, problem, device), problem, device)


def running(variants: Iterable[Variant], problem: Problem, device: Device) -> list[Variant]:
    """Variants with heads in the order that suits a problem, each once."""
    return list(dict.fromkeys(head_order.suiting(variant, problem, device) for variant in variants))


def candidates(
    problem: Problem, device: Device, cover: Sequence[Variant], times_us: TimesUs, count: int
) -> list[Variant]:
    """What a call runs today, and of the pool, the cover and small tiles those that are believed to be the fastest.

    Few have a tile in common: a belief that is wrong of a tile is wrong of all its variants.

    Args:
        times_us: what variants are believed to take.
    """
    today = portfolio.starters_for(problem, device)[:1]
    coming = running([*cover, *_small_tiles(problem)], problem, device)
    known = dict.fromkeys([*today, *feasible(coming, problem, device), *pool(problem, device)])
    believed = times_us(list(known))
    chosen, of_tiles = dict.fromkeys(today), Counter[object]()
    most = OF_A_SPLIT_TILE if _has_few_rows(problem) else OF_A_TILE
    for variant in sorted(known, key=lambda variant: (believed[variant], str(variant))):
        params = variant.as_dict()
        tile = variant.template, params["BLOCK_M"], params["BLOCK_N"]
        if len(chosen) < count and of_tiles[tile] < most:
            of_tiles[tile] += variant not in chosen
            chosen[variant] = None
    return list(chosen)


def _small_tiles(problem: Problem) -> Iterator[Variant]:
    """Kernels of little code and few warps, which short calls like, and small tiles for wide heads in float32."""
    space = search_space.load(TRITON)
    float32 = problem.dtype is DType.FLOAT32
    exact = float32 and problem.precision is Precision.IEEE
    products = ("as_asked", "bf16x6") if exact else ("as_asked",)
    # Without a mask two of the loops are nearly the same.
    loops = ("branch", "split", "every") if _is_masked(problem) else ("branch", "split")
    splits = (1, 4, 16) if float32 and _has_few_rows(problem) else (1,)
    for (rows, keys, warps), loop, stages, product, count in itertools.product(
        FLOAT32_TILES if float32 else SMALL_TILES, loops, (1, 3), products, splits
    ):
        yield space.variant(
            {
                **TRITON_BASE,
                **{"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages, "mask_loop": loop},
                **{"HEAD_SPLIT": 0, "products": product, "SPLITS": count},
            }
        )


@lru_cache(maxsize=4)
def shipped_entries(device: Device) -> tuple[CacheEntry, ...]:
    """The shipped entries of a card, whatever they chose."""
    return tuple(entries_of(resources.shipped_cache(), device))


def entries_of(cache: Path, device: Device) -> Iterator[CacheEntry]:
    """The entries of a card in a folder, whatever they chose."""
    for file in store.read_folder(cache):
        if file.fingerprint == device.fingerprint:
            yield from file.entries.values()


def winners(device: Device, problem: Problem, template: str) -> Iterator[Variant]:
    """The shipped winners of the card that are points of today's space: head dims and masks most alike go first."""
    space = search_space.load(template)
    alike = [
        (
            abs(math.log2(entry.problem.head_dim / problem.head_dim)),
            entry.problem.mask.structure != problem.mask.structure,
            entry.problem.key,
            entry.variant,
        )
        for entry in shipped_entries(device)
        if entry.choice == KERNEL
        and entry.problem.dtype.bytes == problem.dtype.bytes
        and entry.variant.template == template
        and _holds(space, entry.variant)
    ]
    for *_, variant in sorted(alike, key=lambda item: item[:-1]):
        yield variant


def cover(examples: Sequence[Example], expected: Expected | None = None) -> list[Variant]:
    """Variants of which one is near the best on each measured problem, those first that save most time.

    Problems with as wide elements share a cover.

    Args:
        expected: the times that variants are expected to take where they were not measured. Without them, what was not
            measured on a problem counts as FAR from its best; with them, what has none.
    """
    variants: dict[Variant, None] = {}
    for element_bytes in sorted({example.problem.dtype.bytes for example in examples}):
        alike = [example for example in examples if example.problem.dtype.bytes == element_bytes]
        variants |= dict.fromkeys(_covering(alike, expected))
    return list(variants)


def winners_of(examples: Sequence[Example]) -> list[Variant]:
    """What was the fastest on a few problems."""
    wins = Counter(
        as_kept(min(example.times_us, key=example.times_us.__getitem__), example.problem) for example in examples
    )
    return sorted((variant for variant, count in wins.items() if count >= FEWEST_WINS), key=str)


def _covering(examples: Sequence[Example], expected: Expected | None) -> Iterator[Variant]:
    times = [_times_us(example, expected) for example in examples]
    known = sorted({variant for times_us in times for variant in times_us}, key=str)
    places = {variant: place for place, variant in enumerate(known)}
    regrets = np.full((len(examples), len(known)), math.log(FAR))
    for row, (example, times_us) in enumerate(zip(examples, times, strict=True)):
        for variant, time_us in times_us.items():
            regret = max(0.0, math.log(time_us / example.best_us))
            regrets[row, places[variant]] = min(regret, math.log(FAR))
    least = np.full(len(examples), math.log(FAR))
    least_gain = LEAST_GAIN if expected is None else LEAST_EXPECTED_GAIN
    while True:
        gains = np.maximum(0.0, least[:, None] - regrets).sum(axis=0)
        column = int(gains.argmax())
        if gains[column] < least_gain * len(examples):
            return
        yield known[column]
        least = np.minimum(least, regrets[:, column])


def _times_us(example: Example, expected: Expected | None) -> Mapping[Variant, float]:
    """What variants take on an example's problem, as measured, else as expected."""
    if expected is None:
        return example.times_us
    times = expected[example.problem, example.device]
    return {variant: example.running_us.get(variant, time_us) for variant, time_us in times.items()}


def feasible(variants: Sequence[Variant], problem: Problem, device: Device) -> list[Variant]:
    """Those that can run a problem."""
    return [variant for variant in variants if portfolio.is_feasible(variant, problem, device)]


def _holds(space: search_space.SearchSpace, variant: Variant) -> bool:
    return space.holds(variant.as_dict())


def _gluon_grid(problem: Problem) -> Iterator[tuple[str, Mapping[str, Value]]]:
    tiles = GLUON_TILES if not _has_few_rows(problem) else GLUON_TILES[:4]
    for (rows, keys), schedule, pack, split in itertools.product(tiles, GLUON_SCHEDULES, _packs(problem), (0, 1)):
        params = {
            **GLUON_BASE,
            **schedule,
            # Two programs an SM are worth it where each is small, and more slots where keys are few.
            **{"BLOCK_M": rows, "BLOCK_N": keys, "CTAS": _programs_an_sm(problem, rows), "PACK_GQA": pack},
            **{"HEAD_SPLIT": split, "num_stages": 2 if keys > 64 else 3},
        }
        for softmax in ("vote", "first_max"):
            yield GLUON, params | {"softmax": softmax}
            yield from _paired(params | {"softmax": softmax})
            if schedule["schedule"] != "one_tile":
                yield GLUON, params | {"softmax": softmax, "ping_pong": "named"}


def _paired(params: Mapping[str, Value]) -> Iterator[tuple[str, Mapping[str, Value]]]:
    """The same tile by one consumer of eight warps; beside few keys it also waits early, with one call less."""
    if params["BLOCK_M"] == PAIRED_ROWS:
        waits = ("late", "early") if params["BLOCK_N"] in EARLY_KEYS else ("late",)
        for v_wait in waits:
            yield GLUON, {**params, "WARPGROUPS": 2, "v_wait": v_wait}


def _programs_an_sm(problem: Problem, rows: int) -> int:
    """Two of small tiles; of wider heads two do not fit an SM."""
    return 2 if rows == 64 and problem.head_dim_v_padded <= 128 else 1


def _one_block_grid(problem: Problem) -> Iterator[tuple[str, Mapping[str, Value]]]:
    """Kernels for keys of one block: one stage, and queries in registers, leave room for two programs an SM.

    Programs that take several tiles have more stages: the next tiles' queries and keys arrive meanwhile.
    """
    fitting = [(rows, keys) for rows, keys in ONE_BLOCK_TILES if keys // 2 < max(problem.seq_kv, 32) <= keys]
    for (rows, keys), pack, split, softmax in itertools.product(fitting, _packs(problem), (0, 1), ("online", "lazy")):
        params = {
            **GLUON_BASE,
            **{"BLOCK_M": rows, "BLOCK_N": keys, "CTAS": _programs_an_sm(problem, rows), "PACK_GQA": pack},
            **{"HEAD_SPLIT": split, "softmax": softmax, "row_sum": "each"},
        }
        for schedule, queries_in in itertools.product(GLUON_SCHEDULES, ("shared", "registers")):
            yield GLUON, params | schedule | {"num_stages": 1, "queries_in": queries_in}
        several = {"schedule": "persistent", "output_buffer": "own", "query_stages": 2}
        for stages, group in itertools.product((2, 4), (1, 4)):
            yield GLUON, params | several | {"num_stages": stages, "HEAD_GROUP": group}


def _triton_grid(problem: Problem, device: Device) -> Iterator[tuple[str, Mapping[str, Value]]]:
    few, float32 = _has_few_rows(problem), problem.dtype is DType.FLOAT32
    packs = (0, 1) if problem.group_size > 1 and (few or (float32 and problem.seq_q <= LONG_TILE)) else (0,)
    products = ("as_asked", "bf16x3", "bf16x6") if float32 else ("as_asked",)
    tiles = FEW_ROWS_TILES if few else FLOAT32_ROWS_TILES if float32 else TRITON_TILES
    maxima = ("online", "first_max") if float32 and not few else ("online",)
    for (rows, keys, warps), pack, product, split, softmax in itertools.product(tiles, packs, products, (0, 1), maxima):
        for count in SPLITS if few else _shares(problem, device, rows):
            yield (
                TRITON,
                {
                    **TRITON_BASE,
                    **{"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": 3 if rows < 128 else 2},
                    **{"SPLITS": count, "PACK_GQA": pack, "HEAD_SPLIT": split, "products": product},
                    "softmax": softmax,
                    **({"parts_read": "by_groups"} if count > PART_GROUP and not few else {}),
                },
            )


def _shares(problem: Problem, device: Device, rows: int) -> list[int]:
    """Numbers of programs that may share the keys of a tile of so many rows."""
    tiles = problem.batch * problem.heads_q * -(-problem.seq_q // rows)
    few_tiles = problem.batch * problem.heads_q * problem.seq_q <= 128 * FEW_TILES
    most = MOST_PROGRAMS_AN_SM * device.sm_count
    return [count for count in SPLITS if count == 1 or (count <= 4 and few_tiles) or count * tiles <= most]


def _split_grid(problem: Problem, device: Device) -> Iterator[tuple[str, Mapping[str, Value]]]:
    """Tiles of few rows that many programs share, and both ways to add up their parts that are made for these."""
    rows = problem.seq_q * problem.group_size
    if rows > MOST_SPLIT_ROWS:
        return
    tiles = problem.batch * problem.heads_kv
    fewest, most = (share * device.sm_count for share in PROGRAMS_AN_SM)
    product = "bf16x6" if problem.dtype is DType.FLOAT32 and problem.precision is Precision.IEEE else "as_asked"
    for (block_m, keys, warps), count, parts_read, loop, stages, split in itertools.product(
        SPLIT_TILES, (*SPLITS[1:], 128), ("by_rows", "by_groups"), ("split", "branch"), (3, 5), (0, 1)
    ):
        if fewest <= tiles * count <= most and (parts_read == "by_rows" or rows > 2):
            yield (
                TRITON,
                {
                    **TRITON_BASE,
                    **{"BLOCK_M": block_m, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages},
                    **{"SPLITS": count, "PACK_GQA": int(problem.group_size > 1), "HEAD_SPLIT": split},
                    **{"parts_read": parts_read, "products": product, "mask_loop": loop},
                },
            )


def _has_few_rows(problem: Problem) -> bool:
    return problem.seq_q * problem.group_size <= FEW_ROWS


def _is_masked(problem: Problem) -> bool:
    return problem.mask.bounded_left or problem.mask.bounded_right


def _packs(problem: Problem) -> tuple[int, ...]:
    """Heads in the rows of a tile: one, the two largest numbers whose queries a tile holds, and all that share keys.

    Where all queries of heads that share keys fit four small tiles, all of these heads count as fitting. Of more
    queries, tiles with two or four heads have fewer, of whose pairs a mask hides fewer. Tiles of all heads read the
    keys once. Up to 256 queries they are the fastest of some calls, with a mask and without (seed 1048).
    """
    powers = [heads for heads in HEADS_OF_TILES if heads <= padded_count(problem.group_size)]
    few = problem.seq_q * problem.group_size <= 4 * FEW_ROWS
    fitting = [heads for heads in powers if few or heads * problem.seq_q <= MOST_TILE_ROWS]
    some = fitting[-2:] or (powers[:2] if _is_masked(problem) else [])
    every = powers[-1:] if problem.seq_q <= MOST_PACKED_QUERIES else []
    return tuple(sorted({1, *some, *every}))
