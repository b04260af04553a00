"""The bound that needs no machine code: no prediction lies below it, and it tells good variants from bad ones."""

from __future__ import annotations

import statistics
from typing import Any

import measured_kernels
import model_quality
import pytest
from modelled import A30, A100, H200, PARAMS, plain, problem, report

from autoattn.codegen import search_space
from autoattn.core.device import Device
from autoattn.core.problem import DType, Precision, Problem
from autoattn.core.trial import StaticReport
from autoattn.core.variant import Variant
from autoattn.cost_model import accuracy, lower_bound, predictor

CASES = [
    (row.name, case)
    for row in measured_kernels.recorded_rows()
    for case in row.cases
    if not search_space.load(case.variant.template).specialised
]


def predicted(of: Problem, on: Device, variant: Variant, kernel: StaticReport) -> float:
    return predictor.predict(of, on, variant, kernel).time_us


def bound(of: Problem, on: Device = A100, **params: Any) -> float:
    return lower_bound.least_us(of, on, plain(PARAMS | params))


def test_no_prediction_for_machine_code_that_was_read_lies_below_the_bound() -> None:
    """Of every variant that was measured, for its own problem and a short one; none by more than the model errs."""
    ratios = [
        predicted(case.problem, H200, case.variant, case.report)
        / lower_bound.least_us(case.problem, H200, case.variant)
        for _, case in CASES
    ]
    assert len(ratios) > 300
    assert min(ratios) * (1.0 + accuracy.error_of("triton/forward", 90, DType.BFLOAT16)) > 1.0
    assert sum(ratio < 1.0 for ratio in ratios) <= len(ratios) / 100


@pytest.mark.parametrize("of", [problem(), problem("causal", batch=1, heads_q=1, heads_kv=1, seq_q=128, seq_kv=128)])
@pytest.mark.parametrize("on", [A30, A100], ids=lambda device: device.name)
def test_more_instructions_registers_and_shared_memory_never_go_below_the_bound(of: Problem, on: Device) -> None:
    for registers, shared_bytes in ((128, 8 * 1024), (168, 48 * 1024), (255, 96 * 1024)):
        kernel = report(registers=registers, shared_bytes=shared_bytes)
        assert predicted(of, on, plain(PARAMS), kernel) >= bound(of, on)


def test_the_bound_leaves_out_variants_that_measured_slow() -> None:
    """Half of what was measured on a problem cannot be the fastest, by the bound alone; the fastest one always may."""
    shares = []
    for row in measured_kernels.recorded_rows():
        cases = [case for name, case in CASES if name == row.name]
        if len(cases) < model_quality.FEWEST:
            continue
        times = {case.variant: predicted(case.problem, H200, case.variant, case.report) for case in cases}
        bounds = {case.variant: lower_bound.least_us(case.problem, H200, case.variant) for case in cases}
        best = min(times, key=times.__getitem__)
        assert bounds[best] <= times[best] * 1.01
        shares.append(sum(bounds[variant] > times[best] for variant in bounds) / len(bounds))
    assert statistics.median(shares) > 0.2


def test_what_must_be_done_is_in_the_bound() -> None:
    short, long = problem(seq_kv=1024), problem(seq_kv=4096)
    assert bound(long) > 3 * bound(short), "passes"
    assert bound(long, BLOCK_M=16, num_warps=1) > bound(long), "narrow tiles walk the keys more often"
    assert bound(long, num_stages=1) > bound(long), "nothing is copied ahead"
    ieee = problem(dtype=DType.FLOAT32, precision=Precision.IEEE)
    assert bound(ieee) > bound(ieee, products="bf16x6"), "single multiplications"


def test_of_programs_whose_warps_specialise_arithmetic_knows_nothing() -> None:
    of = problem(head_dim=128)
    (variant, *_) = search_space.load("gluon/forward").seeds_for(of, H200)
    assert lower_bound.least_us(of, H200, variant) == 0.0
