"""Finds drawn calls on which the portfolio's choice may lose most, which are worth a measurement.

The model of the measured times (`portfolio_model.py`) knows how sure it is. Of a drawn call it gives the times of a few
variants, and how their errors go together. The loss of the choice is its time over the least of these times. Its
expectation is large where the choice is slow by what was measured, and where nothing like the call was measured.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import drawn_calls
import msgspec
import numpy as np
import portfolio_model
from gaussian_process import Array
from portfolio_model import TimeModel

from autoattn.core import kernel_kind
from autoattn.core.device import Device
from autoattn.core.problem import DType, Problem
from autoattn.core.variant import Variant

OF_A_KIND = 6  # chosen calls that share kernels, at most
SAMPLES = 256  # of the times of a call's variants
SHORT_US = 2.5  # of the roofline: with a launch, some 8 us
FEW_KEYS = 2048  # of a short call
MOST_FLOPS = 4e12  # of a problem whose reference a GPU computes in a second or two
MOST_FLOAT32_FLOPS = 6e10


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A drawn problem, the variants to be measured on it, the portfolio's choice first, and what that may lose."""

    problem: Problem
    variants: tuple[Variant, ...]
    expected_loss: float  # a logarithm

    def document(self) -> dict[str, Any]:
        """A line of a file, for JSON."""
        variants = [[variant.template, variant.as_dict()] for variant in self.variants]
        return {"problem": self.problem, "variants": variants, "expected_loss": round(self.expected_loss, 4)}


def read(path: Path) -> list[Call]:
    """The calls of a file of such lines."""
    documents = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [
        Call(
            problem=msgspec.convert(document["problem"], Problem),
            variants=tuple(Variant.of(template, params) for template, params in document["variants"]),
            expected_loss=document["expected_loss"],
        )
        for document in documents
    ]


def quick(seed: int, count: int) -> list[Problem]:
    """The first drawn problems whose reference takes no long time."""
    return [problem for problem in drawn_calls.draw(seed, count) if _is_quick(problem)]


def ordered(model: TimeModel, calls: Sequence[tuple[Problem, Sequence[Variant]]], device: Device) -> list[Call]:
    """Calls by what their first variant is expected to lose, most first.

    Args:
        calls: problems with their variants, the portfolio's choice first.
    """
    losses = [_expected_loss(mean, covariance) for mean, covariance in model.believed(calls, device)]
    known = [
        Call(problem=problem, variants=tuple(variants), expected_loss=loss)
        for (problem, variants), loss in zip(calls, losses, strict=True)
    ]
    return sorted(known, key=lambda call: (-call.expected_loss, call.problem.key))


def first_of_kinds(calls: Iterable[Call]) -> Iterator[Call]:
    """The first few calls of each kind of kernel."""
    counts = Counter[object]()
    for call in calls:
        kind = kernel_kind.of(call.problem)
        counts[kind] += 1
        if counts[kind] <= OF_A_KIND:
            yield call


def is_short(problem: Problem, device: Device) -> bool:
    """Whether a good kernel takes some 8 us at most."""
    return portfolio_model.roofline_us(problem, device) <= SHORT_US and problem.seq_kv <= FEW_KEYS


def _expected_loss(mean: Array, covariance: Array) -> float:
    rng = np.random.default_rng(0)
    logs = rng.multivariate_normal(mean, covariance, SAMPLES, check_valid="ignore", method="eigh")
    return float((logs[:, 0] - logs.min(axis=1)).mean())


def _is_quick(problem: Problem) -> bool:
    most_flops = MOST_FLOAT32_FLOPS if problem.dtype is DType.FLOAT32 else MOST_FLOPS
    return problem.flops() <= most_flops
