"""Predicts the times of variants on problems that nobody measured, from those that were: a Gaussian process.

It knows a variant by its parameters, and a problem with it by what a card has to do: tiles, waves, passes over keys,
products, and bytes. How much each of these features counts is fitted to the measured times (`portfolio_scales.py`).
A portfolio that learns from measured problems alone chooses badly on kinds that it has not seen; one that
learns from many drawn problems whose times are predicted comes near the model (docs/decisions/portfolios.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from autoattn.core import roofline
from autoattn.core.device import Device
from autoattn.core.key_cache import PART_GROUP
from autoattn.core.problem import Precision, Problem
from autoattn.core.tile_widths import padded, pieces
from autoattn.core.variant import Value, Variant
from autoattn.cost_model import tile_schedule

Array: TypeAlias = npt.NDArray[np.float64]
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
LENGTH_SCALE = 14.0  # of the kernel, in standard deviations of the features, which each have a weight of their own
SCALES = Path(__file__).resolve().parent / "data" / "feature_scales.json"
NOISE = 0.001  # variance of the logarithm of a time measured in rounds
IN_COMMON = 0.003  # variance of what the logarithms of all times of a problem on a card have in common
DIGITS = 2  # of the logarithm of a predicted time
ROWS_AT_ONCE = 1024  # of the covariance of all samples
MOST_RESIDUAL = 1e-9  # of the samples' values, when their weights are exact enough
MOST_STEPS = 50  # of conjugate gradients towards these
SAMPLES_AT_ONCE = 512  # of a prediction, so that their covariances stay in a core's cache
GROUPS_AT_ONCE = 100  # of inputs, whose covariance with all samples takes 0.4 GB
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
        "full_waves": max(1.0, waves), "element_bytes": problem.dtype.bytes,
    }  # fmt: skip
    flags: dict[str, float] = {
        "wave_begun": min(waves, 1.0), "ieee": problem.precision is Precision.IEEE,
        "tf32x3": problem.precision is Precision.TF32X3, "left": problem.mask.bounded_left,
        "right": problem.mask.bounded_right, "gluon": variant.template.startswith("gluon"),
        "grouped_heads": int(params.get("HEAD_GROUP", 1)) > 1,
    }  # fmt: skip
    flags |= {f"{name}={value}": params.get(name) == value for name, values in CHOICES for value in values}
    logs = {name: math.log2(max(size, 1e-6)) for name, size in sizes.items()}
    return logs | {name: float(flag) for name, flag in flags.items()}


def matrix(cases: Iterable[tuple[Problem, Variant, Device]]) -> Array:
    """Features of each case, [cases, features]."""
    return np.array([list(features(*case).values()) for case in cases])


@cache
def scales() -> Mapping[str, float]:
    """The weight of each feature."""
    weights: dict[str, float] = json.loads(SCALES.read_text(encoding="utf-8"))
    return weights


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Samples as a Gaussian process takes them."""

    names: tuple[str, ...]  # of the features
    inputs: Array  # [samples, features]
    values: Array  # [samples], logarithms
    noise: Array  # [samples], variances of these
    owners: tuple[Owner, ...]  # of each sample

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Targets:
        """The features and targets of samples."""
        first = samples[0]
        return cls(
            names=tuple(features(first.problem, first.variant, first.device)),
            inputs=matrix((sample.problem, sample.variant, sample.device) for sample in samples),
            values=np.array([target(sample.problem, sample.device, sample.time_us) for sample in samples]),
            noise=np.array([NOISE * (ROUGH if sample.rough else 1) for sample in samples]),
            owners=tuple((sample.problem, sample.device) for sample in samples),
        )

    def numbers(self) -> npt.NDArray[np.intp]:
        """A number for each sample, which those of one owner share: [samples]."""
        known = {owner: number for number, owner in enumerate(dict.fromkeys(self.owners))}
        return np.array([known[owner] for owner in self.owners])


class TimeModel:
    """A Gaussian process over the logarithm of time over the roofline's."""

    def __init__(self, known: Targets, weights: Sequence[float]) -> None:
        """Fits.

        Args:
            known: the samples.
            weights: of the features.
        """
        self._mean = known.inputs.mean(axis=0)
        self._deviation = (known.inputs.std(axis=0) + 1e-9) / np.array(weights)
        self._offset = float(known.values.mean())
        self._samples = self._scaled(known.inputs)
        self._columns = _columns(self._samples)
        self._factor = self._factored(known)
        self._weights = self._weighted(known)
        self._in_common = dict.fromkeys(known.owners, 0.0)
        for owner, weight in zip(known.owners, self._weights, strict=True):
            self._in_common[owner] += IN_COMMON * float(weight)

    def __getstate__(self) -> dict[str, Any]:
        """What other processes need to predict: not the factor, which has gigabytes."""
        return {name: value for name, value in vars(self).items() if name not in ("_factor", "_samples")}

    def predict(self, inputs: Array) -> Array:
        """The targets of other inputs."""
        rows = _rows(self._scaled(inputs))
        predicted = np.full(len(rows), self._offset)
        for begin in range(0, len(self._weights), SAMPLES_AT_ONCE):
            known = slice(begin, begin + SAMPLES_AT_ONCE)
            predicted += _covariance(rows, self._columns[:, known]) @ self._weights[known]
        return predicted

    def believed(self, groups: Sequence[Array]) -> Iterator[tuple[Array, Array]]:
        """The targets of each group of inputs, [inputs], and how their errors go together, [inputs, inputs].

        Without what the times of a problem have in common, which says nothing of which is the shortest.
        """
        for begin in range(0, len(groups), GROUPS_AT_ONCE):
            scaled = [self._scaled(inputs) for inputs in groups[begin : begin + GROUPS_AT_ONCE]]
            cross = _covariance(_rows(np.concatenate(scaled)), self._columns).T  # [samples, inputs of the groups]
            explained = self._solved(cross)
            ends = np.cumsum([len(inputs) for inputs in scaled])[:-1]
            for inputs, of_known, by_known in zip(
                scaled, np.split(cross, ends, axis=1), np.split(explained, ends, axis=1), strict=True
            ):
                expected = self._offset + of_known.T @ self._weights
                yield expected, _covariance(_rows(inputs), _columns(inputs)) - of_known.T @ by_known

    def times_us(self, problem: Problem, variants: Sequence[Variant], device: Device) -> dict[Variant, float]:
        """What variants are believed to take, rounded so that the last bits of a sum decide nothing."""
        logs = self.predict(matrix((problem, variant, device) for variant in variants))
        logs += self._in_common.get((problem, device), 0.0)
        least_us = LAUNCH_US + roofline_us(problem, device)
        return {
            variant: least_us * math.exp(round(float(log), DIGITS)) for variant, log in zip(variants, logs, strict=True)
        }

    def _solved(self, right: Array) -> Array:
        """What the covariance of the samples takes to this, in single precision: [samples, columns]."""
        # torch.cholesky_solve would copy the factor
        single = torch.from_numpy(right).float().to(self._factor.device)
        half = torch.linalg.solve_triangular(self._factor, single, upper=False)
        solved: Array = torch.linalg.solve_triangular(self._factor.mT, half, upper=True).double().cpu().numpy()
        return solved

    def _factored(self, known: Targets) -> torch.Tensor:
        """The factor of the samples' covariance, in its memory: 4 bytes times the square of the samples.

        On a GPU where there is one, which factors in seconds what two cores take ten minutes for.
        """
        place, count = "cuda" if torch.cuda.is_available() else "cpu", len(known.noise)
        covariance = torch.empty((count, count), dtype=torch.float32, device=place)
        for rows, exact in self._covariances(known):
            covariance[rows] = torch.from_numpy(exact).to(place, torch.float32)
        columns = covariance.mT  # LAPACK factors columns where they lie; the matrix is symmetric
        return torch.linalg.cholesky(columns, out=columns)

    def _covariances(self, known: Targets) -> Iterator[tuple[slice, Array]]:
        """Rows of the samples' covariance, in double precision."""
        numbers = known.numbers()
        for begin in range(0, len(numbers), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            covariance = _covariance(_rows(self._samples[rows]), self._columns)
            covariance += IN_COMMON * (numbers[rows, None] == numbers)
            covariance[np.arange(len(covariance)), begin + np.arange(len(covariance))] += known.noise[rows]
            yield rows, covariance

    def _weighted(self, known: Targets) -> Array:
        """What the samples' covariance takes to their values, in double precision: [samples].

        By conjugate gradients, which the factor of single precision lets end in a few steps (Golub and Van Loan, Matrix
        Computations, 11.5).
        """
        residual = known.values - self._offset
        weights, solved = np.zeros_like(residual), self._solved(residual[:, None])[:, 0]
        direction, product = solved, residual @ solved
        for _ in range(MOST_STEPS):
            image = np.concatenate([covariance @ direction for _, covariance in self._covariances(known)])
            step = product / (direction @ image)
            weights += step * direction
            residual = residual - step * image
            if np.abs(residual).max() < MOST_RESIDUAL:
                return weights
            solved = self._solved(residual[:, None])[:, 0]
            product, before = residual @ solved, product
            direction = solved + product / before * direction
        raise AssertionError(f"the weights of {len(residual)} samples are not known after {MOST_STEPS} steps")

    def _scaled(self, inputs: Array) -> Array:
        scaled: Array = (inputs - self._mean) / (self._deviation * LENGTH_SCALE)
        return scaled


def _rows(scaled: Array) -> Array:
    """Scaled features, [inputs, features], as the left factor of a product that gives three times squared distances."""
    return np.concatenate([-6.0 * scaled, 3.0 * _squares(scaled), np.full((len(scaled), 1), 3.0)], axis=1)


def _columns(scaled: Array) -> Array:
    """The right factor of that product: [features and two, inputs]."""
    return np.ascontiguousarray(np.concatenate([scaled, np.ones((len(scaled), 1)), _squares(scaled)], axis=1).T)


def _squares(scaled: Array) -> Array:
    squares: Array = (scaled**2).sum(axis=1)[:, None]
    return squares


def _covariance(rows: Array, columns: Array) -> Array:
    """Matern's, of smoothness 3/2, in as few arrays as will do: [inputs of the rows, inputs of the columns]."""
    distance: Array = rows @ columns
    np.maximum(distance, 0.0, out=distance)
    np.sqrt(distance, out=distance)
    covariance = np.negative(distance)
    np.exp(covariance, out=covariance)
    distance += 1.0
    covariance *= distance
    return covariance


def fit(samples: Sequence[Sample]) -> TimeModel:
    """A model of measured times."""
    known = Targets.of(samples)
    return TimeModel(known, [scales()[name] for name in known.names])
