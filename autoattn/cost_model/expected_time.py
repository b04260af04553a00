"""Which variants are worth a compiler's time, by arithmetic: an estimate of each one's predicted time.

A bound (`lower_bound`) leaves out the registers of the products' factors. They decide how many blocks share an SM, and
whether a thread spills. Here the least machine code of a variant gets the registers that such code had when it was
compiled. So searches without the card compile first what may win (docs/decisions/kind-searches.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoattn.codegen import search_space
from autoattn.core.device import Device, MatrixUnit
from autoattn.core.problem import DType, Precision, Problem
from autoattn.core.variant import Value, Variant
from autoattn.cost_model import predictor
from autoattn.cost_model.loop_cost import BFLOAT16_PARTS, widths
from autoattn.cost_model.lower_bound import least_report, least_us, product_of
from autoattn.cost_model.occupancy import MAX_REGISTERS, WARP


@dataclass(frozen=True, slots=True, kw_only=True)
class _Registers:
    """Registers of a thread: a constant, its share of the output's tile, and multiples of its shares of three tiles."""

    constant: float
    scores: float
    query: float
    keys: float
    most: float  # times the limit: no variant that was compiled wants more and came within 5% of the best prediction


# `python benchmarks/register_fit.py` fits them to 355 kernels that a search for shapes.yaml compiled for sm_80 with
# Triton 3.6. For kernels that spill little, the root mean square error is 27 to 35 registers.
_IN_16_BITS = _Registers(constant=102, scores=1.35, query=0.0, keys=1.0, most=2.0)
_TF32 = _Registers(constant=83, scores=1.75, query=0.65, keys=1.65, most=1.5)
_IN_PARTS = _Registers(constant=56, scores=4.9, query=1.55, keys=1.1, most=3.1)
_IEEE = _Registers(constant=122, scores=2.7, query=2.3, keys=2.55, most=1.2)
SPILLS = 0.5  # power of the demand over the limit that an expected time grows with


def expected_us(problem: Problem, device: Device, variant: Variant) -> float:
    """Microseconds that a prediction of a feasible variant may come to; it orders variants and promises nothing.

    Infinite where so many registers would spill that it cannot be the fastest, and the bound itself where the estimate
    of registers does not hold: on cards whose tensor cores read shared memory, and for specialised programs.
    """
    if device.capabilities.matrix_unit is not MatrixUnit.MMA or search_space.load(variant.template).specialised:
        return least_us(problem, device, variant)
    params = search_space.load(variant.template).params_of(variant)
    slower = spilled(problem, params)
    if math.isinf(slower):
        return math.inf
    report = least_report(problem, device, params, product_of(problem, params))
    report = replace(report, registers=int(min(registers(problem, params), _limit(params))))
    return predictor.predict(problem, device, variant, report).time_us * slower


def spilled(problem: Problem, params: Mapping[str, Value]) -> float:
    """How many times longer a variant is expected to take since its threads spill registers."""
    over = registers(problem, params) / _limit(params)
    return math.inf if over > _registers_of(problem, params).most else max(1.0, over) ** SPILLS


def registers(problem: Problem, params: Mapping[str, Value]) -> float:
    """Registers that a thread of a variant wants; more than the limit are spilled."""
    need = _registers_of(problem, params)
    block_m, block_n = int(params["BLOCK_M"]), int(params["BLOCK_N"])
    depth, depth_v = widths(problem, params)
    scores, query, keys = need.scores * block_m * block_n, need.query * block_m * depth, need.keys * block_n * depth
    return need.constant + (block_m * depth_v + scores + query + keys) / (WARP * int(params["num_warps"]))


def _registers_of(problem: Problem, params: Mapping[str, Value]) -> _Registers:
    if problem.dtype is not DType.FLOAT32:
        return _IN_16_BITS
    if params["products"] in BFLOAT16_PARTS or problem.precision is Precision.TF32X3:
        return _IN_PARTS
    return _IEEE if problem.precision is Precision.IEEE else _TF32


def _limit(params: Mapping[str, Value]) -> int:
    return int(params["maxnreg"]) or MAX_REGISTERS
