"""Predicts the times of variants on problems that nobody measured, from those that were, by Gaussian processes.

They know a variant by its parameters, and a problem with it by what a card has to do: tiles, waves, passes over keys,
products, and bytes. How much each of these features counts is fitted to the measured times (`portfolio_scales.py`).
A portfolio that learns from measured problems alone chooses badly on kinds that it has not seen; one that
learns from many drawn problems whose times are predicted comes near the model (docs/decisions/portfolios.md).
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

import box_costs
import numpy as np
import numpy.typing as npt
from gaussian_process import Array, GaussianProcess, Targets

from autoattn.codegen import head_order
from autoattn.core import roofline
from autoattn.core.device import Device
from autoattn.core.key_cache import PART_GROUP
from autoattn.core.problem import DType, Layout, Precision, Problem
from autoattn.core.tile_widths import padded, pieces
from autoattn.core.variant import Value, Variant
from autoattn.cost_model import tile_schedule

Owner: TypeAlias = tuple[Problem, Device]  # of times
LAUNCH_US = 4.0
L2_BYTES_PER_US = 5.5e6
BOX_US = 0.001  # of the TMA unit of an SM for a box of one row (docs/decisions/head-dims.md)
TILE_BLOCKS = 2  # that a tile takes as long as, beside its own
TAIL_SPEED = 0.6  # time of the last tiles, which share SMs with few others, over that of the others
LINES_KEPT = 1e8  # bytes that programs walk at once, until they no longer find the lines that others have read
SHARED_MEMORY = 227_000  # bytes of an SM that programs may have
# Of a choice among names, and whether the variant has it.
CHOICES: tuple[tuple[str, tuple[Value, ...]], ...] = (
    ("schedule", ("persistent", "dynamic")),
    ("softmax", ("vote", "first_max", "lazy")),
    ("ping_pong", ("named", "mbarrier")),
    ("output_buffer", ("own",)),
    ("overlap", (1,)),
    ("query_stages", (2,)),
    ("mask_loop", ("split", "branch", "split_own")),
    ("row_order", ("descending",)),
    ("PERSISTENT", (1,)),
    ("HEAD_SPLIT", (1, 2)),
    ("products", ("bf16x3", "bf16x6")),
    ("parts_read", ("by_rows", "by_groups")),
    ("WARPGROUPS", (2,)),
)
SCALES = Path(__file__).resolve().parent / "data" / "feature_scales.json"
NOISE = 0.001  # variance of the logarithm of a time measured in rounds
DIGITS = 2  # of the logarithm of a predicted time
ROUGH = 3  # times as much of a screened one


class Kernels:
    """The parameters of variants, each [variants]."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._params = [variant.as_dict() for variant in variants]
        self.gluon = np.array([variant.template.startswith("gluon") for variant in variants])
        self.rows, self.keys = self.sizes("BLOCK_M"), self.sizes("BLOCK_N")  # of a tile
        self.splits = self.sizes("SPLITS", 1)
        self.groups = self.sizes(head_order.GROUP, 1)
        # Where the parameters do not say, a few beside those of 16 rows each
        self.warps = np.where(self.have("num_warps", None), self.rows // 16 + 4, self.sizes("num_warps", 1))

    def sizes(self, name: str, default: int = 0) -> npt.NDArray[np.int64]:
        """A parameter; `default` of those that do not have it."""
        return np.array([params.get(name, default) for params in self._params], dtype=np.int64)

    def have(self, name: str, value: Value | None) -> npt.NDArray[np.bool_]:
        """Whether a parameter has a value."""
        return np.array([params.get(name) == value for params in self._params])


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What variants make a card do for a problem, each [variants]."""

    tiles: Array
    programs: Array
    slots: Array  # programs that run at once
    passes: Array  # over blocks of keys, of all tiles
    longest: Array  # passes of the longest program
    masked: Array  # share of the passes
    bytes_read: Array  # keys and values, by all passes
    boxes: Array  # of a pass over keys and values, in what one of whole lines costs
    products: Array  # of a pass, in flops
    rows_used: Array  # share of the tiles' rows
    added: Array  # numbers of what others left that the last program of a tile reads
    tail: Array  # time until the last program ends, over that in the order of heads that suits the problem


def work_of(problem: Problem, kernels: Kernels, device: Device) -> Work:
    """Tiles and passes as the template counts them; what fits an SM is estimated."""
    pack = kernels.sizes("PACK_GQA")
    together = np.where(kernels.gluon, np.maximum(1, pack), np.where(pack > 0, padded_count(problem.group_size), 1))
    walks = list(zip(kernels.rows.tolist(), kernels.keys.tolist(), together.tolist(), strict=True))
    walked = {walk: _walked(problem, *walk) for walk in dict.fromkeys(walks)}
    tiles, passes, longest, masked = np.array([walked[walk] for walk in walks]).T
    halves, whole = sum(pieces(problem.head_dim)), padded(problem.head_dim)
    width: Array = np.where(kernels.sizes("HEAD_SPLIT") > 0, halves, whole).astype(np.float64)
    slots = device.sm_count * np.where(kernels.gluon, kernels.sizes("CTAS", 1), _fitting(problem, kernels, width))
    row_bytes = problem.head_dim * problem.dtype.bytes
    cost: Array = np.where(kernels.gluon, box_costs.box_cost(row_bytes), 1.0)  # plain Triton kernels have no boxes
    return Work(
        tiles=tiles,
        programs=tiles * kernels.splits,
        slots=slots,
        passes=passes,
        longest=np.maximum(1.0, longest / kernels.splits),
        masked=masked,
        bytes_read=passes * kernels.keys * 2 * width * problem.dtype.bytes,
        boxes=2.0 * box_costs.boxes_of_row(row_bytes) * kernels.keys * cost,
        products=4.0 * kernels.rows * kernels.keys * width,
        rows_used=problem.seq_q * problem.heads_q * problem.batch / (tiles * kernels.rows),
        added=_added(problem, kernels, together) * width,
        tail=_tails(problem, kernels, device, walks, slots),
    )


def _tails(
    problem: Problem, kernels: Kernels, device: Device, walks: Sequence[tuple[int, int, int]], slots: Array
) -> Array:
    """What the order of heads costs where rows differ in length: [variants]."""
    tails = np.ones(len(walks))
    if not head_order.is_uneven(problem):
        return tails
    orders = {together: head_order.heads_side_by_side(problem, device, together) for _, _, together in walks}
    suiting = np.array([orders[together] for _, _, together in walks])
    dealt = kernels.have("schedule", "persistent") | kernels.have("PERSISTENT", 1)
    ends = cache(partial(_end, problem))
    for place in np.flatnonzero((kernels.groups != suiting) & (kernels.splits == 1)):
        walk, programs, in_turn = walks[place], int(slots[place]), bool(dealt[place])
        end, least = (ends(walk, int(group[place]), programs, in_turn) for group in (kernels.groups, suiting))
        tails[place] = end / least
    return tails


def _end(problem: Problem, walk: tuple[int, int, int], group: int, slots: int, dealt: bool) -> float:
    """Blocks of keys until the last tile is done, with so many heads side by side."""
    plain, masked = tile_schedule.key_blocks(problem, walk[0], walk[1], "split", walk[2])
    costs, heads = plain + masked + TILE_BLOCKS, tile_schedule.heads_of(problem, walk[2])
    if dealt:
        programs = min(slots, len(costs) * heads)
        return tile_schedule.dealt_makespan(
            costs, heads, group or heads, descending=True, programs=programs, slots=slots
        )
    return tile_schedule.makespan(
        costs, heads, group or heads, descending=True, slots=slots, slowdown=lambda left: TAIL_SPEED
    )


def _walked(problem: Problem, rows: int, keys: int, together: int) -> tuple[float, float, float, float]:
    """Tiles of so many rows, their passes over blocks of keys, those of the longest tile, and the masked share."""
    plain, masked = tile_schedule.key_blocks(problem, rows, keys, "split", together)
    heads, blocks = tile_schedule.heads_of(problem, together), plain + masked
    of_head = float(blocks.sum())
    return len(blocks) * heads, of_head * heads, float(blocks.max()), float(masked.sum()) / max(1.0, of_head)


def _added(problem: Problem, kernels: Kernels, together: npt.NDArray[np.int64]) -> Array:
    """Rows of parts that the last program of a tile reads, one behind the other: [variants]."""
    parts = np.where(
        kernels.have("parts_read", "by_groups"),
        np.minimum(kernels.splits, PART_GROUP) + kernels.splits / PART_GROUP,
        kernels.splits,
    )
    queries = np.minimum(kernels.rows, problem.seq_q * together)
    return parts * np.where(kernels.have("parts_read", "by_rows"), queries, kernels.rows)


def padded_count(count: int) -> int:
    """The power of two from `count` on."""
    return 1 << (count - 1).bit_length()


def _fitting(problem: Problem, kernels: Kernels, width: Array) -> Array:
    """Programs of plain Triton kernels that fit an SM: [variants]."""
    rows, keys, threads = kernels.rows, kernels.keys, 32 * kernels.warps
    shared = (kernels.sizes("num_stages") * 2 * keys + rows) * width * problem.dtype.bytes
    registers = np.minimum(255, rows * (width + keys) // threads + 50)
    fitting = np.minimum(np.minimum(SHARED_MEMORY // shared, 2048 // threads), 65536 // (threads * registers))
    return np.maximum(1.0, fitting)


def roofline_us(problem: Problem, device: Device) -> float:
    """The least time that products and bytes of a problem take."""
    seconds = roofline.seconds(problem, device)
    assert seconds is not None, f"no data sheet of {device.name}"
    return 1e6 * seconds


def _peak_flops(problem: Problem, device: Device) -> float:
    """Of the card, in flop per second."""
    peak = roofline.peak_flops(problem, device)
    assert peak is not None, f"no data sheet of {device.name}"
    return peak


def features(problem: Problem, variants: Sequence[Variant], device: Device) -> dict[str, Array | float]:
    """What the model knows of variants on a problem, by name; sizes and ratios as powers of two.

    Each is [variants], or a number that all variants have in common.
    """
    kernels = Kernels(variants)
    work, least_us, peak = work_of(problem, kernels, device), roofline_us(problem, device), _peak_flops(problem, device)
    waves, at_once = work.programs / work.slots, work.slots / device.sm_count
    span = np.maximum(work.longest, work.passes / work.slots) * work.tail
    width = work.products / (4.0 * kernels.rows * kernels.keys)
    sizes: dict[str, Array | float] = {
        "waves": waves, "longest": work.longest, "span": span, "rows": kernels.rows, "keys": kernels.keys,
        "width": width, "products": work.products, "products_in_turn": span * work.products * at_once,
        "products_us": 1e6 * span * work.products * work.slots / peak, "programs": work.programs,
        "last_wave": np.ceil(waves) / waves, "splits": work.programs / work.tiles, "warps": kernels.warps,
        "stages": kernels.sizes("num_stages"), "programs_an_sm": at_once,
        "packed_heads": np.maximum(1, kernels.sizes("PACK_GQA", 1)),
        "products_over_flops": work.passes * work.products / max(1, problem.flops()), "group": problem.group_size,
        "width_used": problem.head_dim / width, "bytes": problem.bytes(), "flops": problem.flops(),
        "least_us": least_us, "seq_q": problem.seq_q, "seq_kv": problem.seq_kv,
        "heads_an_sm": problem.heads_kv * problem.batch / device.sm_count, "masked": 0.01 + work.masked,
        "bytes_over_least": work.bytes_read / problem.bytes(),
        "l2_over_least": work.bytes_read / L2_BYTES_PER_US / max(least_us, 0.1),
        "l2_us": 2.0 + work.bytes_read / L2_BYTES_PER_US, "rows_used": work.rows_used, "added": work.added,
        "full_waves": np.maximum(1.0, waves), "element_bytes": problem.dtype.bytes, "head_dim": problem.head_dim,
        "batch": problem.batch, "boxes_us": 2.0 + BOX_US * span * at_once * work.boxes,
        "box_cost": box_costs.box_cost(problem.head_dim * problem.dtype.bytes),
        "lines_read_again": 1.0 + _lines_read_again(problem, kernels, work) / LINES_KEPT,
    }  # fmt: skip
    flags: dict[str, Array | float] = {
        "wave_begun": np.minimum(waves, 1.0), "ieee": problem.precision is Precision.IEEE,
        "tf32x3": problem.precision is Precision.TF32X3, "left": problem.mask.bounded_left,
        "right": problem.mask.bounded_right, "gluon": kernels.gluon, "bshd": problem.layout is Layout.BSHD,
        "float16": problem.dtype is DType.FLOAT16, "grouped_heads": kernels.groups != 1,
    }  # fmt: skip
    flags |= {f"{name}={value}": kernels.have(name, value) for name, values in CHOICES for value in values}
    return {name: np.log2(np.maximum(size, 1e-6)) for name, size in sizes.items()} | flags


def _lines_read_again(problem: Problem, kernels: Kernels, work: Work) -> Array:
    """Bytes of lines beside the rows of a head which programs walk at once: [variants].

    Where the heads of a token lie side by side and rows do not begin with lines, two heads share a line. Programs that
    walk far drift apart, until the second one finds the line in the L2 no longer (docs/decisions/head-dims.md).
    """
    row_bytes = problem.head_dim * problem.dtype.bytes
    walked: Array = np.minimum(work.programs, work.slots) * work.longest * kernels.keys * 2.0 * row_bytes
    side_by_side = problem.layout is not Layout.BHSD and problem.heads_kv > 1
    return walked * (side_by_side * (box_costs.lines_over_row(row_bytes) - 1.0))


def matrix(problem: Problem, variants: Sequence[Variant], device: Device) -> Array:
    """Features of variants on a problem: [variants, features]."""
    columns = features(problem, variants, device).values()
    return np.stack([np.broadcast_to(column, len(variants)) for column in columns], axis=1, dtype=np.float64)


@cache
def scales() -> Mapping[str, Mapping[str, float]]:
    """The weight of each feature, for each size of elements by its name."""
    weights: dict[str, dict[str, float]] = json.loads(SCALES.read_text(encoding="utf-8"))
    return weights


def size_name(problem: Problem) -> str:
    """What the size of a problem's elements is called: a model knows only problems of one size."""
    return f"{8 * problem.dtype.bytes} bits"


def target(problem: Problem, device: Device, time_us: float) -> float:
    """What the model predicts in place of a time."""
    return math.log(time_us / (LAUNCH_US + roofline_us(problem, device)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One time of a variant."""

    problem: Problem
    variant: Variant
    device: Device
    time_us: float
    rough: bool  # a first look


def feature_names(samples: Sequence[Sample]) -> list[str]:
    """The names of the features that samples have, in their order."""
    first = samples[0]
    return list(features(first.problem, [first.variant], first.device))


def weights_of(samples: Sequence[Sample]) -> list[float]:
    """The weight of each feature for samples of one size of elements."""
    weights = scales()[size_name(samples[0].problem)]
    return [weights[name] for name in feature_names(samples)]


def of_sizes(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Samples by the size of their problems' elements."""
    samples_of = defaultdict[str, list[Sample]](list)
    for sample in samples:
        samples_of[size_name(sample.problem)].append(sample)
    return dict(samples_of)


def targets_of(samples: Sequence[Sample]) -> Targets:
    """The features of samples, and what is predicted of them."""
    owners = [(sample.problem, sample.device) for sample in samples]
    inputs = [
        matrix(problem, [samples[place].variant for place in places], device)
        for (problem, device), places in itertools.groupby(range(len(samples)), key=owners.__getitem__)
    ]
    return Targets(
        inputs=np.concatenate(inputs),
        values=np.array([target(sample.problem, sample.device, sample.time_us) for sample in samples]),
        noise=np.array([NOISE * (ROUGH if sample.rough else 1) for sample in samples]),
        owners=tuple(owners),
    )


class TimeModel:
    """The logarithm of time over the roofline's: a Gaussian process for each size of elements.

    One for all sizes knows nothing more, and its matrix takes twice as long to factor (docs/decisions/portfolios.md).
    """

    def __init__(self, samples: Iterable[Sample], *, with_errors: bool = False) -> None:
        """Fits; `believed` needs a model with errors, which keeps gigabytes for it."""
        self._processes = {
            size: GaussianProcess(targets_of(some), weights_of(some), with_errors=with_errors)
            for size, some in of_sizes(samples).items()
        }

    def times_us(self, problem: Problem, variants: Sequence[Variant], device: Device) -> dict[Variant, float]:
        """What variants are believed to take, rounded so that the last bits of a sum decide nothing."""
        logs = self._processes[size_name(problem)].predict(matrix(problem, variants, device), (problem, device))
        least_us = LAUNCH_US + roofline_us(problem, device)
        return {
            variant: least_us * math.exp(round(float(log), DIGITS)) for variant, log in zip(variants, logs, strict=True)
        }

    def believed(self, calls: Sequence[tuple[Problem, Sequence[Variant]]], device: Device) -> list[tuple[Array, Array]]:
        """For each problem its variants' targets, [variants], and how errors go together, [variants, variants]."""
        groups = defaultdict[str, list[Array]](list)
        for problem, variants in calls:
            groups[size_name(problem)].append(matrix(problem, variants, device))
        beliefs = {size: self._processes[size].believed(some) for size, some in groups.items()}
        return [next(beliefs[size_name(problem)]) for problem, _ in calls]
