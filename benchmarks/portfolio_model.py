"""Predicts the times of variants on problems that nobody measured, from those that were, by Gaussian processes.

They know a variant by its parameters, and a problem with it by what a card has to do: tiles, waves, passes over keys,
products, and bytes. How much each of these features counts is fitted to the measured times (`portfolio_scales.py`).
A portfolio that learns from measured problems alone chooses badly on kinds that it has not seen; one that
learns from many drawn problems whose times are predicted comes near the model (docs/decisions/portfolios.md).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from gaussian_process import Array, GaussianProcess, Targets

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
)
SCALES = Path(__file__).resolve().parent / "data" / "feature_scales.json"
NOISE = 0.001  # variance of the logarithm of a time measured in rounds
DIGITS = 2  # of the logarithm of a predicted time
ROUGH = 3  # times as much of a screened one


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a variant makes a card do for a problem."""

    tiles: int
    programs: int
    slots: int  # programs that run at once
    passes: float  # over blocks of keys, of all tiles
    longest: float  # passes of the longest program
    masked: float  # share of the passes
    bytes_read: float  # keys and values, by all passes
    products: float  # of a pass, in flops
    rows_used: float  # share of the tiles' rows
    added: float  # numbers of what others left that the last program of a tile reads


def work_of(problem: Problem, variant: Variant, device: Device) -> Work:
    """Tiles and passes as the template counts them; what fits an SM is estimated."""
    params = variant.as_dict()
    rows, keys = int(params["BLOCK_M"]), int(params["BLOCK_N"])
    gluon = variant.template.startswith("gluon")
    pack = int(params.get("PACK_GQA", 0))
    together = max(1, pack) if gluon else padded_count(problem.group_size) if pack else 1
    splits = int(params.get("SPLITS", 1))
    plain, masked = tile_schedule.key_blocks(problem, rows, keys, "split", together)
    heads = tile_schedule.heads_of(problem, together)
    blocks = plain + masked
    width = sum(pieces(problem.head_dim)) if params.get("HEAD_SPLIT") else padded(problem.head_dim)
    passes = float(blocks.sum()) * heads
    tiles = len(blocks) * heads
    return Work(
        tiles=tiles,
        programs=tiles * splits,
        slots=device.sm_count * _programs_an_sm(problem, params, width, gluon=gluon),
        passes=passes,
        longest=max(1.0, float(blocks.max()) / splits),
        masked=float(masked.sum()) / max(1.0, float(blocks.sum())),
        bytes_read=passes * keys * 2 * width * problem.dtype.bytes,
        products=4.0 * rows * keys * width,
        rows_used=problem.seq_q * problem.heads_q * problem.batch / (tiles * rows),
        added=_added(problem, params, together) * width,
    )


def _added(problem: Problem, params: dict[str, Value], together: int) -> float:
    """Rows of parts that the last program of a tile reads, one behind the other."""
    splits, rows = int(params.get("SPLITS", 1)), int(params["BLOCK_M"])
    if params.get("parts_read") == "by_rows":
        return splits * min(rows, problem.seq_q * together)
    if params.get("parts_read") == "by_groups":
        return (min(splits, PART_GROUP) + splits / PART_GROUP) * rows
    return splits * rows


def padded_count(count: int) -> int:
    """The power of two from `count` on."""
    return 1 << (count - 1).bit_length()


def _programs_an_sm(problem: Problem, params: dict[str, Value], width: int, *, gluon: bool) -> int:
    if gluon:
        return int(params.get("CTAS", 1))
    rows, keys, threads = int(params["BLOCK_M"]), int(params["BLOCK_N"]), 32 * int(params["num_warps"])
    shared = (int(params["num_stages"]) * 2 * keys + rows) * width * problem.dtype.bytes
    registers = min(255, rows * (width + keys) // threads + 50)
    return max(1, min(SHARED_MEMORY // shared, 2048 // threads, 65536 // (threads * registers)))


def roofline_us(problem: Problem, device: Device) -> float:
    """The least time that products and bytes of a problem take."""
    seconds = roofline.seconds(problem, device)
    assert seconds is not None, f"no data sheet of {device.name}"
    return 1e6 * seconds


def features(problem: Problem, variant: Variant, device: Device) -> dict[str, float]:
    """What the model knows of a variant on a problem, by name; sizes and ratios as powers of two."""
    params, work = variant.as_dict(), work_of(problem, variant, device)
    least_us, waves = roofline_us(problem, device), work.programs / work.slots
    peak = roofline.peak_flops(problem, device)
    assert peak is not None, f"no data sheet of {device.name}"
    span = max(work.longest * min(1.0, math.ceil(waves)), work.passes / work.slots)
    at_once = work.slots / device.sm_count
    rows, keys = int(params["BLOCK_M"]), int(params["BLOCK_N"])
    width = work.products / (4.0 * rows * keys)
    sizes: dict[str, float] = {
        "waves": waves, "longest": work.longest, "span": span, "rows": rows, "keys": keys, "width": width,
        "products": work.products, "products_in_turn": span * work.products * at_once,
        "products_us": 1e6 * span * work.products * work.slots / peak, "programs": work.programs,
        "last_wave": math.ceil(waves) / waves, "splits": work.programs / work.tiles,
        "warps": int(params.get("num_warps", rows // 16 + 4)), "stages": int(params["num_stages"]),
        "programs_an_sm": at_once, "packed_heads": max(1, int(params.get("PACK_GQA", 1))),
        "products_over_flops": work.passes * work.products / max(1, problem.flops()), "group": problem.group_size,
        "width_used": problem.head_dim / width, "bytes": problem.bytes(), "flops": problem.flops(),
        "least_us": least_us, "seq_q": problem.seq_q, "seq_kv": problem.seq_kv,
        "heads_an_sm": problem.heads_kv * problem.batch / device.sm_count, "masked": 0.01 + work.masked,
        "bytes_over_least": work.bytes_read / problem.bytes(),
        "l2_over_least": work.bytes_read / L2_BYTES_PER_US / max(least_us, 0.1),
        "l2_us": 2.0 + work.bytes_read / L2_BYTES_PER_US, "rows_used": work.rows_used, "added": work.added,
        "full_waves": max(1.0, waves), "element_bytes": problem.dtype.bytes, "head_dim": problem.head_dim,
        "batch": problem.batch,
    }  # fmt: skip
    flags: dict[str, float] = {
        "wave_begun": min(waves, 1.0), "ieee": problem.precision is Precision.IEEE,
        "tf32x3": problem.precision is Precision.TF32X3, "left": problem.mask.bounded_left,
        "right": problem.mask.bounded_right, "gluon": variant.template.startswith("gluon"),
        "bshd": problem.layout is Layout.BSHD, "float16": problem.dtype is DType.FLOAT16,
        "grouped_heads": int(params.get("HEAD_GROUP", 1)) > 1,
    }  # fmt: skip
    flags |= {f"{name}={value}": params.get(name) == value for name, values in CHOICES for value in values}
    logs = {name: math.log2(max(size, 1e-6)) for name, size in sizes.items()}
    return logs | {name: float(flag) for name, flag in flags.items()}


def matrix(cases: Iterable[tuple[Problem, Variant, Device]]) -> Array:
    """Features of each case, [cases, features]."""
    return np.array([list(features(*case).values()) for case in cases])


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
    return list(features(first.problem, first.variant, first.device))


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
    return Targets(
        inputs=matrix((sample.problem, sample.variant, sample.device) for sample in samples),
        values=np.array([target(sample.problem, sample.device, sample.time_us) for sample in samples]),
        noise=np.array([NOISE * (ROUGH if sample.rough else 1) for sample in samples]),
        owners=tuple((sample.problem, sample.device) for sample in samples),
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
        inputs = matrix((problem, variant, device) for variant in variants)
        logs = self._processes[size_name(problem)].predict(inputs, (problem, device))
        least_us = LAUNCH_US + roofline_us(problem, device)
        return {
            variant: least_us * math.exp(round(float(log), DIGITS)) for variant, log in zip(variants, logs, strict=True)
        }

    def believed(self, calls: Sequence[tuple[Problem, Sequence[Variant]]], device: Device) -> list[tuple[Array, Array]]:
        """For each problem its variants' targets, [variants], and how errors go together, [variants, variants]."""
        groups = defaultdict[str, list[Array]](list)
        for problem, variants in calls:
            groups[size_name(problem)].append(matrix((problem, variant, device) for variant in variants))
        beliefs = {size: self._processes[size].believed(some) for size, some in groups.items()}
        return [next(beliefs[size_name(problem)]) for problem, _ in calls]
