"""Which predictions are taken in place of a default, and what becomes of the calls."""

from __future__ import annotations

from collections.abc import Mapping

import kernels
import pytest
import samples
import taken_predictions
from taken_predictions import Prospect

from autoattn.codegen import search_space
from autoattn.core.problem import DType, Precision, Problem
from autoattn.core.variant import Variant
from autoattn.cost_model import accuracy

PROBLEM = kernels.problem(dtype=DType.BFLOAT16, head_dim=64)
DEFAULT, OTHER, THIRD = search_space.load("triton/forward").seeds_for(PROBLEM, samples.H200)[:3]
ERROR = accuracy.error_of("triton/forward", 90, PROBLEM.dtype)
SPEEDUP = 1.0 + 1.6 * ERROR  # of what OTHER is predicted to be


def prospect(other_us: float, problem: Problem = PROBLEM) -> Prospect:
    """The default takes 100 us and is predicted to; OTHER is predicted to be faster, and takes `other_us`."""
    times_us: Mapping[Variant, float] = {DEFAULT: 100.0, OTHER: other_us, THIRD: 80.0}
    return Prospect(
        problem=problem,
        arch=90,
        default=DEFAULT,
        times_us=times_us,
        predicted_us={DEFAULT: 100.0, OTHER: 100.0 / SPEEDUP, THIRD: 120.0},
    )


@pytest.mark.parametrize(("multiple", "taken"), [(0.0, OTHER), (1.5, OTHER), (1.7, DEFAULT), (3.0, DEFAULT)])
def test_a_prediction_is_taken_where_it_beats_the_default_by_the_margin(multiple: float, taken: Variant) -> None:
    assert prospect(50.0).taken(multiple) == taken


def test_a_table_tells_what_calls_take_and_how_many_are_slower_than_the_default() -> None:
    rows = taken_predictions.table([prospect(125.0), prospect(50.0), prospect(102.0)])
    assert rows[2] == f"| never taken | {(100 / 80 * 100 / 50 * 100 / 80) ** (1 / 3):.3f} | 0 | 0 | 1.00 |"
    assert rows[3] == f"| 0 | {(125 / 80 * 1 * 102 / 80) ** (1 / 3):.3f} | 3 | 1 | 0.80 |"
    assert rows[-2] == rows[2].replace("never taken", "2"), "twice the error is more than what it is predicted to gain"


def test_tables_are_of_all_problems_and_of_each_kind_of_numbers() -> None:
    tf32 = kernels.problem(dtype=DType.FLOAT32, precision=Precision.TF32, head_dim=64)
    titles = [text.partition("\n")[0] for text in taken_predictions.tables([prospect(50.0), prospect(50.0, tf32)])]
    assert titles == ["## All: 2 problems", "## 16 bits: 1 problems", "## tf32 and tf32x3: 1 problems"]
