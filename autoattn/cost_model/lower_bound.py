"""A lower bound of a variant's predicted time, by arithmetic, before anything is compiled.

The bound is the model's own prediction (`predictor`) for the least machine code that the variant could become: the
instructions that no compiler can leave out, the registers of the accumulators, no masking. So waves, tiles, occupancy
and the roofline count in it as they do in a prediction. docs/model.md says how far predictions lie above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autoattn.codegen import search_space
from autoattn.core.device import Device, MatrixUnit
from autoattn.core.problem import DType, Precision, Problem
from autoattn.core.trial import StaticReport
from autoattn.core.variant import Value, Variant
from autoattn.cost_model import predictor
from autoattn.cost_model.loop_cost import BFLOAT16_PARTS, widths
from autoattn.cost_model.occupancy import MAX_REGISTERS, RESERVED_SHARED, WARP, occupancy

WARPGROUP_WARPS = 4  # that a product of a warpgroup needs
WARP_ROWS = 16  # of a tensor core product: a warp that owns them reads all keys and values of a pass
MATRICES_BYTES = 512  # that LDSM.M88.4 reads for a warp
# Instructions that make so many bfloat16 parts of an element: each is rounded, two at a time, and taken off the rest.
PARTS_COST = {"bf16x3": 2, "bf16x6": 3.5}


def least_us(problem: Problem, device: Device, variant: Variant) -> float:
    """Microseconds below which no prediction for a feasible variant lies; 0 where arithmetic knows nothing of it."""
    if search_space.load(variant.template).specialised:
        return 0.0
    params = search_space.load(variant.template).params_of(variant)
    reports = (least_report(problem, device, params, product) for product in _products(problem, device, params))
    return min(
        predictor.predict(problem, device, variant, fewer).time_us
        for report in reports
        for fewer in _with_fewer_blocks(device, report)
    )


def least_report(problem: Problem, device: Device, params: Mapping[str, Value], product: str) -> StaticReport:
    """The least machine code of a variant; `product` is the opcode of its tensor cores, or FFMA."""
    block_m, block_n, warps = (int(params[name]) for name in ("BLOCK_M", "BLOCK_N", "num_warps"))
    threads = WARP * warps
    depth, depth_v = widths(problem, params)
    scores = block_m * block_n / threads  # of a thread in a pass
    # Each score is scaled and lessened by the maximum, goes through exp2, is added up, and rounded for the product.
    loop = {"MUFU.EX2": scores, "FFMA": scores, "FADD": scores}
    if params["softmax"] != "first_max":
        loop["FMNMX"] = scores
    if params["softmax"] == "online":
        loop["FMUL"] = block_m * depth_v / threads
    if problem.dtype is not DType.FLOAT32:
        loop["F2FP"] = scores / 2
    if params["products"] in BFLOAT16_PARTS:
        loop["FADD"] += PARTS_COST[str(params["products"])] * (scores + block_n * (depth + depth_v) / threads)
    if product == "FFMA":
        loop["FFMA"] += scores * (depth + depth_v)
    else:
        loop[product] = 1
        if product == "HMMA" and block_m >= WARP_ROWS * warps and params["products"] not in BFLOAT16_PARTS:
            loop["LDSM.M88.4"] = block_n * (depth + depth_v) * problem.key_bytes / MATRICES_BYTES
    if int(params["num_stages"]) > 1:
        loop["LDGSTS"] = 1
    return StaticReport(
        digest="",
        arch=device.arch,
        registers=min((block_m * depth_v + block_m * block_n) // threads, int(params["maxnreg"]) or MAX_REGISTERS),
        spilled_bytes=0,
        shared_bytes=0,
        num_warps=warps,
        code_bytes=0,
        loop={opcode: int(count) for opcode, count in loop.items()},
    )


def _products(problem: Problem, device: Device, params: Mapping[str, Value]) -> tuple[str, ...]:
    """The opcodes that a variant's products may become."""
    product = product_of(problem, params)
    warpgroups = device.capabilities.matrix_unit is not MatrixUnit.MMA and int(params["num_warps"]) >= WARPGROUP_WARPS
    return (product, "HGMMA.64x64x16.F32.BF16.RS") if warpgroups and product == "HMMA" else (product,)


def product_of(problem: Problem, params: Mapping[str, Value]) -> str:
    """The opcode of a variant's products where no warpgroup works on them."""
    precision = problem.precision if params["products"] == "as_asked" else None
    return "FFMA" if problem.dtype is DType.FLOAT32 and precision is Precision.IEEE else "HMMA"


def _with_fewer_blocks(device: Device, report: StaticReport) -> Iterator[StaticReport]:
    """The report, and what holds more of an SM: with few tiles, fewer blocks at a time may end sooner."""
    blocks = occupancy(device, report.registers, report.shared_bytes, report.num_warps)
    yield report
    while blocks > 1:
        blocks //= 2
        share = device.shared_bytes_per_sm // blocks - RESERVED_SHARED
        yield replace(report, shared_bytes=min(share, device.shared_bytes_per_block))
