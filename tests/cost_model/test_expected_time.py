"""Expected times: the order in which variants are worth compiling, against kernels that were compiled."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import register_fit
from modelled import A30, A100, H200, PARAMS, plain, problem

from autoattn.core.problem import DType, Precision
from autoattn.cost_model import expected_time, lower_bound

IEEE = problem(dtype=DType.FLOAT32, precision=Precision.IEEE)
ROWS = register_fit.read()


def wants(row: dict[str, Any]) -> float:
    """Registers that a compiled kernel's thread is expected to want, over its limit."""
    return expected_time.registers(register_fit.problem_of(row), row["params"]) / register_fit.limit_of(row)


def test_kernels_that_want_twice_the_registers_spilled_and_those_that_want_three_quarters_hardly_did() -> None:
    assert len(ROWS) > 300
    assert all(row["spilled_bytes"] > 0 for row in ROWS if wants(row) > 2)
    few = [row for row in ROWS if wants(row) < 0.75]
    assert len(few) > 30
    assert sum(row["spilled_bytes"] > 64 for row in few) <= len(few) / 20


def test_no_kernel_that_is_left_out_came_near_the_best_prediction_and_many_hopeless_ones_are() -> None:
    out = [row for row in ROWS if math.isinf(expected_time.spilled(register_fit.problem_of(row), row["params"]))]
    assert min(row["over_best"] for row in out) > register_fit.NEAR
    hopeless = [row for row in ROWS if row["over_best"] > 4]
    assert sum(row in out for row in hopeless) > len(hopeless) / 4


@pytest.mark.parametrize("of", [problem(), IEEE], ids=str)
def test_an_expected_time_is_never_below_the_bound(of: Any) -> None:
    for changes in ({}, {"BLOCK_M": 64}, {"BLOCK_N": 32, "num_warps": 2}, {"maxnreg": 128}):
        variant = plain(PARAMS | changes)
        assert expected_time.expected_us(of, A100, variant) >= lower_bound.least_us(of, A100, variant)


def test_products_without_tensor_cores_are_expected_to_want_small_tiles() -> None:
    assert math.isinf(expected_time.expected_us(IEEE, A30, plain(PARAMS | {"BLOCK_M": 128, "BLOCK_N": 128})))
    assert math.isfinite(expected_time.expected_us(IEEE, A30, plain(PARAMS | {"BLOCK_M": 32, "BLOCK_N": 32})))


def test_on_cards_whose_products_read_shared_memory_the_bound_is_all_that_is_known() -> None:
    variant = plain(PARAMS)
    assert expected_time.expected_us(problem(), H200, variant) == lower_bound.least_us(problem(), H200, variant)


def test_a_tighter_limit_of_registers_is_expected_to_cost_time() -> None:
    of = replace(problem(), dtype=DType.FLOAT16)
    tight = plain(PARAMS | {"maxnreg": 128})
    assert expected_time.spilled(of, tight.as_dict()) > expected_time.spilled(of, plain(PARAMS).as_dict())
