"""Cost of a pass of the loop over keys: what it asks of each unit of an SM, and how passes share one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoattn.core.device import Device, MatrixUnit
from autoattn.core.problem import DType, Precision, Problem
from autoattn.core.tile_widths import filled, pieces
from autoattn.core.variant import Value
from autoattn.cost_model.constants import Constants
from autoattn.cost_model.kernel_kind import SYNCHRONOUS, WARPGROUP, Program
from autoattn.cost_model.occupancy import SCHEDULERS, WARP

_SELECT = ("FSEL", "SEL", "FMNMX", "FMNMX3", "IMNMX", "VIMNMX", "FSETP", "ISETP", "PLOP3", "P2R", "R2P")
ALU = frozenset((*_SELECT, "LOP3", "SHF", "IADD3", "VIADD", "LEA", "SGXT", "PRMT", "F2FP"))
FMA = frozenset(("FMUL", "FADD", "FFMA", "FMUL2", "FADD2", "FFMA2", "HFMA2", "IMAD"))
SLOW = frozenset(("MUFU", "I2F", "F2I", "F2F"))  # sixteen lanes an SM
MEMORY = {"STS": 1.0, "LDS": 1.0, "LDL": 1.0, "STL": 1.0, "STSM": 4.0, "SHFL": 1.0}  # SM cycles of 128 bytes, 32 bit
WIDTH = {"128": 4.0, "64": 2.0}
# Issued in the shadow of a product
FEEDS = frozenset(("HMMA", "QMMA", *WARPGROUP, "UTCHMMA", "UTCQMMA", "LDSM", "LDGSTS", "LDG"))
# Share of the peak that mma.sync reaches where wgmma or tcgen05 reaches all (Luo et al. 2024, arXiv:2402.13499: 63%).
SYNCHRONOUS_PRODUCT = 0.63
BFLOAT16_PARTS = {"bf16x3": 3, "bf16x6": 6}  # products of bfloat16 that stand for one of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Cycles of an SM's time that one block's pass asks of each unit."""

    tensor: float
    issue: float  # vector instructions
    exp: float
    shared: float
    latency: float  # that no unit works on

    def stations(self) -> tuple[float, float, float]:
        """Cycles at each queue of the network: issue and exp are one (docs/model.md)."""
        return self.tensor, self.issue + self.exp, self.shared


def demand(
    problem: Problem, device: Device, params: Mapping[str, Value], loop: Mapping[str, int], program: Program,
    constants: Constants,
) -> Demand:  # fmt: skip
    """What a worker's pass costs, from its tile's shape and the loop's instruction mix."""
    num_warps = program.warps
    shares = num_warps / SCHEDULERS  # warps of a block on each scheduler, at best
    counts = {"alu": 0, "fma": 0, "slow": 0, "issued": 0}
    shared = operands = 0.0
    for opcode, count in loop.items():
        base, _, modifiers = opcode.partition(".")
        cycles = MEMORY.get(base, 0.0) * WIDTH.get(modifiers, 1.0)
        shared += cycles * count * num_warps
        if base == "LDSM":
            operands += int(modifiers[-1:] if modifiers[-1:].isdigit() else 4) * count * num_warps
        counts["alu"] += count * (base in ALU)
        counts["fma"] += count * (base in FMA)
        counts["slow"] += count * (base in SLOW)
        counts["issued"] += count * (base not in SLOW and base not in FEEDS)
    issue = max(counts["issued"], 2 * counts["alu"], WARP / device.capabilities.float32_lanes * counts["fma"])
    return Demand(
        tensor=max(_tensor_cycles(problem, device, params, loop, program, constants), operands),
        issue=max(shares, 1.0) * issue,
        exp=max(shares, 1.0) * 8 * counts["slow"],
        shared=shared + (0.0 if program.specialised else _synchronous_copy(problem, params, loop)),
        latency=_latency(params, loop, program, constants),
    )


def _tensor_cycles(
    problem: Problem, device: Device, params: Mapping[str, Value], loop: Mapping[str, int], program: Program,
    constants: Constants,
) -> float:  # fmt: skip
    """Cycles of the two products on an SM's tensor cores; 0 where they run on the float32 lanes."""
    parts = BFLOAT16_PARTS.get(str(params.get("products")), 0)
    if problem.dtype is DType.FLOAT32 and problem.precision is Precision.IEEE and not parts:
        return 0.0
    rate = _tensor_rate(problem, device, parts) / (device.sm_count * device.clock_mhz * 1e6)  # flop per SM and cycle
    block_m, block_n, num_warps = program.rows, program.block_n, program.warps
    depth, depth_v = widths(problem, params)
    if params.get("queries_in") == "shared":
        # gluon/forward multiplies no padding, but 32 bytes of each row at least.
        depth = sum(filled(problem.head_dim, depth, 32 // problem.dtype.bytes))
    scores, sums = (2 * block_m * block_n * elements / rate for elements in (depth, depth_v))
    warpgroup = [opcode for opcode in loop if opcode.startswith(WARPGROUP)]
    if not warpgroup:
        synchronous = any(opcode.startswith(SYNCHRONOUS) for opcode in loop)
        old = synchronous and device.capabilities.matrix_unit is not MatrixUnit.MMA
        return (scores + sums) * max(1.0, SCHEDULERS / num_warps) / (SYNCHRONOUS_PRODUCT if old else 1.0)
    # wgmma reads its right factor, and for Q K^T mostly its left one too, from shared memory at 128 bytes a cycle.
    left = 0 if all(opcode.endswith(".RS") for opcode in warpgroup) else 64 * constants.left_reads  # rows of each
    groups = num_warps / SCHEDULERS
    tall = max(1.0, block_m / 64 / groups)  # 64-row products of a warpgroup
    wide = block_n / max(1.0, groups * 64 / block_m)  # keys of each
    element = 2 * parts if parts else problem.dtype.bytes
    reads = groups * tall * depth * element * (left + wide) / 128
    return max(scores, reads) + sums


def _tensor_rate(problem: Problem, device: Device, parts: int) -> float:
    """Flop per second of the tensor cores at the peak's clock; `parts` bfloat16 products form one where not 0."""
    if parts:
        return device.peak_flops[DType.BFLOAT16.value] / parts
    if problem.dtype is DType.FLOAT8:  # twice the rate of 16 bits on every card that has it, by their data sheets
        return 2 * device.peak_flops[DType.FLOAT16.value]
    if problem.dtype is DType.FLOAT32:
        return device.peak_flops["tf32"] / (3 if problem.precision is Precision.TF32X3 else 1)
    return device.peak_flops[problem.dtype.value]


def widths(problem: Problem, params: Mapping[str, Value]) -> tuple[int, int]:
    """Elements that tiles hold of a head of query and key, and of value."""
    split = int(params.get("HEAD_SPLIT", 0))
    return (
        sum(pieces(problem.head_dim)) if split else problem.head_dim_padded,
        sum(pieces(problem.head_dim_v)) if split == 1 else problem.head_dim_v_padded,
    )


def _synchronous_copy(problem: Problem, params: Mapping[str, Value], loop: Mapping[str, int]) -> float:
    """Cycles to pull keys and values through the SM's port to the L2, 64 bytes a cycle, where the pass waits for it."""
    return 0.0 if _copies_ahead(loop) else key_bytes(problem, params) / 64


def _copies_ahead(loop: Mapping[str, int]) -> bool:
    return any(opcode.startswith(("LDGSTS", "UTMALDG")) for opcode in loop)


def key_bytes(problem: Problem, params: Mapping[str, Value]) -> int:
    return int(params["BLOCK_N"]) * problem.elements_per_key * problem.key_bytes


def _latency(params: Mapping[str, Value], loop: Mapping[str, int], program: Program, constants: Constants) -> float:
    loads = 0.0
    if program.specialised:  # one slot: the next keys come once these are read
        if int(params["num_stages"]) == 1:  # and where products run ahead, the values come after them
            loads = 1 + constants.behind_barrier if program.ahead else constants.one_ahead
    elif not _copies_ahead(loop):
        loads = 1 + constants.behind_barrier * (params["barrier"] in ("after_qk", "before_pv"))
    elif int(params["num_stages"]) <= 2:
        loads = constants.one_ahead
    reloads = sum(count for opcode, count in loop.items() if opcode.startswith("LDL"))
    waits = sum(count for opcode, count in loop.items() if opcode.startswith("WARPGROUP"))
    return (
        constants.pass_latency
        + constants.load_latency * loads
        + constants.spill_latency * reloads
        + constants.barrier_latency * max(0, loop.get("BAR", 0) - 2) * (not program.specialised)
        + constants.serial_product * max(0, waits - 4)
    )


def pass_cycles(cost: Demand, blocks: float, num_warps: int, constants: Constants, *, ahead: bool = False) -> float:
    """Cycles between two passes that an SM completes, when `blocks` blocks share it.

    A closed network of queues, solved by approximate mean value analysis (Schweitzer 1979). Warps of one block that
    share a scheduler overlap only in part, since they wait for one another at barriers.
    """
    parts = max(1.0, num_warps / SCHEDULERS) ** constants.warp_overlap
    # Blocks of fewer than four warps share the schedulers out among them.
    parts *= 1 + constants.ahead * ahead
    customers = max(1.0, blocks * min(1.0, num_warps / SCHEDULERS)) * parts
    services = [cycles / parts for cycles in cost.stations()]
    queues = [customers / len(services)] * len(services)
    share = (customers - 1) / customers
    cycle = 0.0
    for _ in range(100):
        times = [service * (1 + share * queue) for service, queue in zip(services, queues, strict=True)]
        before, cycle = cycle, cost.latency + sum(times)
        queues = [customers * time / cycle for time in times]
        if abs(cycle - before) <= 1e-5 * cycle:
            break
    return cycle / blocks
