"""What a kernel's time would be, from its machine code and the facts of a GPU: docs/model.md derives every formula.

In one breath: the blocks on an SM are the customers of a closed queueing network. In each pass of the loop over keys a
block visits the tensor cores, the vector units (softmax) and the shared memory, and waits for latencies that no unit
works on. Mean value analysis gives the time of a pass when so many blocks share the SM; the passes of all tiles,
scheduled over the SMs, give the time of the kernel, unless the L2 or the DRAM takes longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoattn import waves
from autoattn.device import Device
from autoattn.problem import DType, Precision, Problem, pieces
from autoattn.program import WARPGROUP, Program, program_of
from autoattn.trial import Prediction, StaticReport
from autoattn.variant import Value

WARP = 32  # threads
REGISTER_UNIT = 256  # registers are handed to a warp in units of so many
SHARED_UNIT = 128  # bytes, likewise
RESERVED_SHARED = 1024  # bytes of each block's shared memory that CUDA keeps for itself, sm_80 and later
MAX_REGISTERS = 255  # per thread
SCHEDULERS = 4  # of an SM: each owns a quarter of its warps, vector units and tensor cores

_SELECT = ("FSEL", "SEL", "FMNMX", "FMNMX3", "IMNMX", "VIMNMX", "FSETP", "ISETP", "PLOP3", "P2R", "R2P")
ALU = frozenset((*_SELECT, "LOP3", "SHF", "IADD3", "VIADD", "LEA", "SGXT", "PRMT", "F2FP"))
FMA = frozenset(("FMUL", "FADD", "FFMA", "FMUL2", "FADD2", "FFMA2", "HFMA2", "IMAD"))
SLOW = frozenset(("MUFU", "I2F", "F2I", "F2F"))  # sixteen lanes an SM
MEMORY = {"STS": 1.0, "LDS": 1.0, "LDL": 1.0, "STL": 1.0, "STSM": 4.0, "SHFL": 1.0}  # SM cycles of 128 bytes, 32 bit
WIDTH = {"128": 4.0, "64": 2.0}
# Issued in the shadow of a product
FEEDS = frozenset(("HMMA", "QMMA", *WARPGROUP, "UTCHMMA", "UTCQMMA", "LDSM", "LDGSTS", "LDG"))
# Bytes that an SM draws from the L2 per cycle while all others do. sm_80: 5,120 a cycle for 108 SMs (A100 whitepaper),
# a little lost; sm_90: kernels measured on an H200 drew 28 and were bound elsewhere; the others are assumptions.
L2_BYTES = {80: 40.0, 86: 24.0, 89: 20.0, 90: 40.0, 100: 40.0}
# Share of the peak that mma.sync reaches where wgmma or tcgen05 reaches all (Luo et al. 2024, arXiv:2402.13499: 63%).
SYNCHRONOUS_PRODUCT = 0.63
BFLOAT16_PARTS = {"bf16x3": 3, "bf16x6": 6}  # products of bfloat16 that stand for one of float32
DRAM_EFFICIENCY = 0.9  # of the peak: 4.30 of 4.8 TB/s copied on an H200
LAUNCH_US = 4.0  # an empty kernel between two events


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What no data sheet tells. Fitted on measured kernels by benchmarks/model_quality.py within BOUNDS."""

    pass_latency: float = 250.0  # cycles of a pass that no unit works on: products that drain, reductions, barriers
    load_latency: float = 410.0  # cycles until a block of keys or values arrives that nobody asked for ahead of time
    one_ahead: float = 1.0  # share of it that two stages still show
    behind_barrier: float = 0.65  # share of it that a second load adds when a barrier keeps it from starting early
    spill_latency: float = 40.0  # cycles of each reload of a spilled register
    barrier_latency: float = 150.0  # cycles of each barrier of a pass beyond two
    serial_product: float = 31.0  # cycles of each warpgroup instruction beyond a pass's own four
    warp_overlap: float = 0.25  # w warps of a block on a scheduler overlap like w ** warp_overlap blocks
    ahead: float = 0.0  # workers that one whose next product runs beside its softmax counts for, beyond itself
    walking: float = 1.0  # share of a tile's setup that shows where the same program walks on to the next one


BOUNDS = {
    "pass_latency": (0.0, 1000.0),
    "load_latency": (300.0, 1500.0),
    "one_ahead": (0.0, 1.0),
    "behind_barrier": (0.0, 1.0),
    "spill_latency": (20.0, 200.0),
    "barrier_latency": (0.0, 500.0),
    "serial_product": (0.0, 100.0),
    "warp_overlap": (0.0, 1.0),
    "ahead": (0.0, 2.0),
    "walking": (0.0, 1.0),
}
CONSTANTS = Constants()


# --- what fits on an SM -----------------------------------------------------------------------------------------------


def occupancy(device: Device, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Blocks that fit on one SM; 0 when not even one does.

    Args:
        registers: per thread; a warp gets them in units of 256.
        shared_bytes: per block; a unit is 128 bytes, and CUDA adds 1 KiB of its own to each block.
        num_warps: per block.
    """
    warp_registers = _up(max(registers, 1) * WARP, REGISTER_UNIT)
    # Each scheduler has a quarter of the registers, and a warp's come from its own.
    warps = device.registers_per_sm // SCHEDULERS // warp_registers * SCHEDULERS
    if registers > MAX_REGISTERS or shared_bytes > device.shared_bytes_per_block:
        return 0
    return min(
        warps // num_warps,
        device.shared_bytes_per_sm // (_up(shared_bytes, SHARED_UNIT) + RESERVED_SHARED),
        device.max_threads_per_sm // (WARP * num_warps),
        device.max_blocks_per_sm,
    )


def why_unlaunchable(device: Device, report: StaticReport) -> str | None:
    """One sentence that says why a compiled kernel cannot run on the device; None when it can."""
    threads = WARP * report.num_warps
    if report.shared_bytes > device.shared_bytes_per_block:
        return (
            f"it needs {report.shared_bytes:,} bytes of shared memory per block, and {device.full_name} has "
            f"{device.shared_bytes_per_block:,}"
        )
    if threads > device.max_threads_per_sm:
        return f"it needs {threads} threads per block, and an SM of {device.full_name} has {device.max_threads_per_sm}"
    if occupancy(device, report.registers, report.shared_bytes, report.num_warps) == 0:
        return (
            f"it needs {report.registers} registers for each of {threads} threads, and an SM of {device.full_name} "
            f"has {device.registers_per_sm:,}"
        )
    return None


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


# --- one pass of the loop over keys -----------------------------------------------------------------------------------


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
    constants: Constants = CONSTANTS,
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
    lanes = 16 if device.arch == 80 else 32  # float32 lanes of a scheduler
    issue = max(counts["issued"], 2 * counts["alu"], WARP / lanes * counts["fma"])
    return Demand(
        tensor=max(_tensor_cycles(problem, device, params, loop, program), operands),
        issue=max(shares, 1.0) * issue,
        exp=max(shares, 1.0) * 8 * counts["slow"],
        shared=shared + (0.0 if program.specialised else _synchronous_copy(problem, params, loop)),
        latency=_latency(params, loop, program, constants),
    )


def _tensor_cycles(
    problem: Problem, device: Device, params: Mapping[str, Value], loop: Mapping[str, int], program: Program
) -> float:
    """Cycles of the two products on an SM's tensor cores; 0 where they run on the float32 lanes."""
    parts = BFLOAT16_PARTS.get(str(params.get("products")), 0)
    if problem.dtype is DType.FLOAT32 and problem.precision is Precision.IEEE and not parts:
        return 0.0
    rate = _tensor_rate(problem, device, parts) / (device.sm_count * device.clock_mhz * 1e6)  # flop per SM and cycle
    block_m, block_n, num_warps = program.rows, program.block_n, program.warps
    depth, depth_v = _widths(problem, params)
    scores, sums = (2 * block_m * block_n * elements / rate for elements in (depth, depth_v))
    warpgroup = [opcode for opcode in loop if opcode.startswith(WARPGROUP)]
    if not warpgroup:
        old = any(opcode.startswith(("HMMA", "QMMA")) for opcode in loop) and device.arch >= 90
        return (scores + sums) * max(1.0, SCHEDULERS / num_warps) / (SYNCHRONOUS_PRODUCT if old else 1.0)
    # wgmma reads its right factor, and for Q K^T mostly its left one too, from shared memory at 128 bytes a cycle.
    left = 0 if all(opcode.endswith(".RS") for opcode in warpgroup) else 64  # rows of each
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


def _widths(problem: Problem, params: Mapping[str, Value]) -> tuple[int, int]:
    """Elements that tiles hold of a head of query and key, and of value."""
    split = int(params.get("HEAD_SPLIT", 0))
    return (
        sum(pieces(problem.head_dim)) if split else problem.head_dim_padded,
        sum(pieces(problem.head_dim_v)) if split == 1 else problem.head_dim_v_padded,
    )


def _synchronous_copy(problem: Problem, params: Mapping[str, Value], loop: Mapping[str, int]) -> float:
    """Cycles to pull keys and values through the SM's port to the L2, 64 bytes a cycle, where the pass waits for it."""
    return 0.0 if _copies_ahead(loop) else _key_bytes(problem, params) / 64


def _copies_ahead(loop: Mapping[str, int]) -> bool:
    return any(opcode.startswith(("LDGSTS", "UTMALDG")) for opcode in loop)


def _key_bytes(problem: Problem, params: Mapping[str, Value]) -> int:
    return int(params["BLOCK_N"]) * (problem.head_dim + problem.head_dim_v) * problem.dtype.bytes


def _latency(params: Mapping[str, Value], loop: Mapping[str, int], program: Program, constants: Constants) -> float:
    loads = 0.0
    if program.specialised:  # one slot: the next keys come once these are read
        loads = constants.one_ahead * (int(params["num_stages"]) == 1)
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


def pass_cycles(
    cost: Demand, blocks: float, num_warps: int, constants: Constants = CONSTANTS, *, ahead: bool = False
) -> float:
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
    others = (customers - 1) / customers
    cycle = 0.0
    for _ in range(100):
        times = [service * (1 + others * queue) for service, queue in zip(services, queues, strict=True)]
        before, cycle = cycle, cost.latency + sum(times)
        queues = [customers * time / cycle for time in times]
        if abs(cycle - before) <= 1e-5 * cycle:
            break
    return cycle / blocks


# --- the whole kernel -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Work:
    """All that a kernel has to do: the passes of each row tile of a head, and what a pass costs."""

    heads: int
    plain: waves.Array  # [tiles] passes of the loop that does not mask
    masked: waves.Array  # [tiles] of the one that does
    costs: tuple[Demand, Demand]  # of a pass of each
    setup: float  # cycles of a tile outside its loops
    program: Program
    constants: Constants

    @property
    def tiles(self) -> int:
        return len(self.plain) * self.heads

    def rows(self, blocks: int) -> waves.Array:
        """Cycles that each row tile of a head holds a slot, when `blocks` blocks share an SM."""
        workers = blocks * self.program.workers
        each = [
            workers * pass_cycles(cost, workers, self.program.warps, self.constants, ahead=self.program.ahead)
            for cost in self.costs
        ]
        return self.plain * each[0] + self.masked * each[1] + self.setup

    def unit_cycles(self) -> dict[str, float]:
        """Cycles of an SM's time that all passes together ask of each unit."""
        each = self.heads * self.program.workers
        passes = (float(self.plain.sum()) * each, float(self.masked.sum()) * each)
        found = {
            unit: sum(n * getattr(cost, unit) for n, cost in zip(passes, self.costs, strict=True))
            for unit in ("tensor", "issue", "exp", "shared")
        }
        for unit in ("tensor", "issue", "exp"):  # a block of fewer than four warps leaves schedulers to others
            found[unit] *= min(1.0, self.program.warps / SCHEDULERS)
        return found


def predict(
    problem: Problem, device: Device, params: Mapping[str, Value], report: StaticReport,
    constants: Constants = CONSTANTS,
) -> Prediction:  # fmt: skip
    """What the kernel's time would be on the device.

    Args:
        params: of the variant; see search_spaces.
        report: of its machine code for the device's architecture.

    Raises:
        ValueError: the kernel cannot run on the device; ask `why_unlaunchable` first.
    """
    if reason := why_unlaunchable(device, report):
        raise ValueError(f"a prediction needs a kernel that can run; {reason}")
    work = _work(problem, device, params, report, constants)
    fitting = occupancy(device, report.registers, report.shared_bytes, report.num_warps)
    resident = min(fitting, work.program.persistent or fitting)
    resident = max(1, min(resident, -(-work.tiles // device.sm_count)))
    hertz = device.sustained_clock_mhz * 1e6
    memory = _memory_seconds(problem, device, params, work.plain + work.masked, device.sm_count * resident, hertz)
    units = {unit: cycles / device.sm_count / hertz for unit, cycles in work.unit_cycles().items()}
    time_us = 1e6 * max(_cycles(work, device, params, resident) / hertz, *memory.values()) + LAUNCH_US
    parts_us = {unit: 1e6 * seconds for unit, seconds in (units | memory).items()} | {"launch": LAUNCH_US}
    return Prediction(
        time_us=time_us,
        bound=_bound(parts_us, time_us),
        parts_us=parts_us,
        occupancy=fitting,
        waves=work.tiles / (device.sm_count * fitting),
    )


def _work(
    problem: Problem, device: Device, params: Mapping[str, Value], report: StaticReport, constants: Constants
) -> _Work:
    program = program_of(params, report)
    mask_loop = str(params["mask_loop"]) if report.masked_loop else "every"
    together, splits = _together(problem, params), int(params.get("SPLITS", 1))
    plain, masked = waves.key_blocks(problem, int(params["BLOCK_M"]), int(params["BLOCK_N"]), mask_loop, together)
    if splits > 1:
        plain, masked = waves.shared(plain, masked, splits)
    first, second = (
        demand(problem, device, params, loop, program, constants)
        for loop in (report.loop, report.masked_loop or report.loop)
    )
    return _Work(
        heads=waves.heads_of(problem, together), plain=plain, masked=masked, costs=(first, second),
        setup=_setup(params, report, program, constants) + _adding_up(problem, params, constants),
        program=program, constants=constants,
    )  # fmt: skip


def _cycles(work: _Work, device: Device, params: Mapping[str, Value], resident: int) -> float:
    """Cycles until the last tile is done, when `resident` blocks share an SM."""
    full = work.rows(resident)
    descending = params["row_order"] == "descending"
    group = int(params["HEAD_GROUP"]) or work.heads
    slots = device.sm_count * resident
    if work.program.persistent and work.program.dealt:
        programs = min(work.tiles, work.program.persistent * device.sm_count)
        return waves.dealt_makespan(full, work.heads, group, descending=descending, programs=programs, slots=slots)

    def slowdown(left: int) -> float:
        """Of the last tiles, which have the SMs to themselves."""
        blocks = max(1, min(resident, -(-left // device.sm_count)))
        return float(work.rows(blocks).max() / full.max())

    return waves.makespan(full, work.heads, group, descending=descending, slots=slots, slowdown=slowdown)


def _bound(parts_us: Mapping[str, float], time_us: float) -> str:
    """The unit that needs longest; latency when no unit needs half of the time."""
    unit = max(parts_us, key=parts_us.__getitem__)
    return unit if parts_us[unit] >= time_us / 2 else "latency"


def _setup(params: Mapping[str, Value], report: StaticReport, program: Program, constants: Constants) -> float:
    """Cycles of a tile outside its loops: Q arrives, each loop's first keys arrive, the output is written."""
    if program.specialised:
        return constants.load_latency * 3 * (constants.walking if program.persistent else 1.0)
    loops = 2 if report.masked_loop and params["mask_loop"] == "split" else 1
    again = params["softmax"] == "first_max"  # reads the first block for its maximum alone
    return constants.load_latency * (2 + loops + again)


def _together(problem: Problem, params: Mapping[str, Value]) -> int:
    """Query heads whose rows are dealt out as those of one head."""
    return problem.group_size if params.get("PACK_GQA") else 1


def _adding_up(problem: Problem, params: Mapping[str, Value], constants: Constants) -> float:
    """Cycles of the program that adds up what those that share its tile left: it writes one part and reads all."""
    splits = int(params.get("SPLITS", 1))
    if splits == 1:
        return 0.0
    part = int(params["BLOCK_M"]) * (_widths(problem, params)[1] + 2) * 4
    return (1 + splits) * part / 64 + 3 * constants.load_latency


def _memory_seconds(
    problem: Problem, device: Device, params: Mapping[str, Value], blocks: waves.Array, slots: int, hertz: float
) -> dict[str, float]:
    """Seconds that the L2 and the DRAM take to deliver keys and values, and DRAM the rest."""
    heads, tiles = waves.heads_of(problem, _together(problem, params)), len(blocks)
    read = float(blocks.sum()) * heads * _key_bytes(problem, params)
    group = min(int(params["HEAD_GROUP"]) or heads, heads)
    # Heads at work at once, and how many tiles that run together want the same keys.
    at_work = min(heads, max(1.0, slots / (group * tiles)) * group, slots)
    apart = max(1.0, at_work * _together(problem, params) / problem.group_size)
    keys = _keys_at_work(problem, int(params["BLOCK_M"]), min(tiles, slots / at_work))
    working_set = apart * keys * (problem.head_dim + problem.head_dim_v) * problem.dtype.bytes
    missing = max(0.0, 1 - device.l2_bytes / working_set)
    again = missing * read / max(1.0, min(slots, heads * tiles) / apart)
    return {
        "l2": read / (L2_BYTES.get(device.arch, 40.0) * device.sm_count * hertz),
        "dram": (problem.bytes() + again) / (DRAM_EFFICIENCY * device.bandwidth),
    }


def _keys_at_work(problem: Problem, block_m: int, together: float) -> float:
    """Keys of a head that its tiles which run together walk: all, or those around them where the mask is a band."""
    first, last = problem.band(problem.seq_q, problem.seq_kv)
    if first is None or last is None:
        return problem.seq_kv
    return min(problem.seq_kv, together * block_m + last - first)
