"""How much each feature counts for the model of times: what decides counts more than what says nothing."""

from __future__ import annotations

import itertools

import numpy as np
import portfolio_model
import portfolio_scales
import samples
from portfolio_model import Sample

from autoattn.codegen import search_space
from autoattn.core.problem import DType, Layout
from autoattn.core.variant import Variant

WARPS, STAGES, LENGTHS = (2, 4, 8), (1, 2, 3, 4), (512, 1024, 2048)


def variant(warps: int, stages: int) -> Variant:
    seed = search_space.load("triton/forward").seeds_for(samples.problem(), samples.H200)[0]
    return search_space.load(seed.template).variant({**seed.as_dict(), "num_warps": warps, "num_stages": stages})


def samples_by_stages() -> list[Sample]:
    """Times that stages decide; of layouts, dtypes and warps they know nothing."""
    rng = np.random.default_rng(0)
    return [
        Sample(
            problem=samples.problem(seq_q=length, seq_kv=length, dtype=dtype, layout=layout),
            variant=variant(warps, stages),
            device=samples.H200,
            time_us=length**2 / 1e4 * (1.0 + 0.5 * (stages % 2)) * rng.normal(1.0, 0.01),
            rough=False,
        )
        for length, warps, stages, dtype, layout in itertools.product(
            LENGTHS, WARPS, STAGES, (DType.FLOAT16, DType.BFLOAT16), (Layout.BHSD, Layout.BSHD)
        )
    ]


def test_what_decides_times_counts_more_than_what_does_not() -> None:
    known = samples_by_stages()
    weights = portfolio_scales.fit(known)
    assert list(weights) == portfolio_model.feature_names(known)
    assert weights["stages"] > 4 * max(weights["warps"], weights["bshd"], weights["float16"]), weights
