"""Predicts a kernel's time from its machine code and the facts of a GPU; docs/model.md derives every formula.

In one breath: the blocks on an SM are the customers of a closed queueing network. In each pass of the loop over keys a
block visits the tensor cores, the vector units (softmax) and the shared memory, and waits for latencies that no unit
works on. Mean value analysis gives the time of a pass when so many blocks share the SM (`loop_cost`); the passes of all
tiles, scheduled over the SMs (`tile_schedule`), give the time of the kernel, unless the L2 or the DRAM takes longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoattn.codegen import search_space
from autoattn.core.device import Device
from autoattn.core.key_cache import PART_GROUP
from autoattn.core.problem import Op, Problem
from autoattn.core.trial import Prediction, StaticReport
from autoattn.core.variant import Value, Variant
from autoattn.cost_model import tile_schedule
from autoattn.cost_model.constants import CONSTANTS, Constants
from autoattn.cost_model.kernel_kind import Path, Program, path_of, program_of
from autoattn.cost_model.loop_cost import Demand, demand, key_bytes, pass_cycles, widths
from autoattn.cost_model.occupancy import SCHEDULERS, occupancy, why_unlaunchable

# Bytes that an SM draws from the L2 per cycle while all others do. sm_80: 5,120 a cycle for 108 SMs (A100 whitepaper),
# a little lost; sm_90: kernels measured on an H200 drew 28 and were bound elsewhere; the others are assumptions.
L2_BYTES = {80: 40.0, 86: 24.0, 89: 20.0, 90: 40.0, 100: 40.0, 120: 20.0}
DRAM_EFFICIENCY = 0.9  # of the peak: 4.30 of 4.8 TB/s copied on an H200
CODE_LINE = 128  # bytes of code that come at once
LAUNCH_US = 4.0  # an empty kernel between two events


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Work:
    """All that a kernel has to do: the passes of each row tile of a head, and what a pass costs."""

    heads: int
    plain: tile_schedule.Array  # [tiles] passes of the loop that does not mask
    masked: tile_schedule.Array  # [tiles] of the one that does
    costs: tuple[Demand, Demand]  # of a pass of each
    setup: float  # cycles of a tile outside its loops
    program: Program
    constants: Constants

    @property
    def tiles(self) -> int:
        return len(self.plain) * self.heads

    def rows(self, blocks: int) -> tile_schedule.Array:
        """Cycles that each row tile of a head holds a slot, when `blocks` blocks share an SM."""
        workers = blocks * self.program.workers
        cycles = [
            workers * pass_cycles(cost, workers, self.program.warps, self.constants, ahead=self.program.ahead)
            for cost in self.costs
        ]
        return self.plain * cycles[0] + self.masked * cycles[1] + self.setup

    def unit_cycles(self) -> dict[str, float]:
        """Cycles of an SM's time that all passes together ask of each unit."""
        workers = self.heads * self.program.workers
        passes = (float(self.plain.sum()) * workers, float(self.masked.sum()) * workers)
        cycles = {
            unit: sum(n * getattr(cost, unit) for n, cost in zip(passes, self.costs, strict=True))
            for unit in ("tensor", "issue", "exp", "shared")
        }
        for unit in ("tensor", "issue", "exp"):  # a block of fewer than four warps leaves schedulers to others
            cycles[unit] *= min(1.0, self.program.warps / SCHEDULERS)
        return cycles


def why_unknown(problem: Problem, device: Device) -> str | None:
    """Why the model says nothing of a problem's kernels on a device; None when it does."""
    if problem.op is not Op.FORWARD:
        return f"the model knows forward kernels alone, and these are of {problem.op.value}"
    return None if device.peak_flops else "nobody described this card's peak rates"


def predict(
    problem: Problem, device: Device, variant: Variant, report: StaticReport,
    constants: Mapping[Path, Constants] = CONSTANTS,
) -> Prediction:  # fmt: skip
    """What the kernel's time would be on the device.

    Args:
        variant: whose template has a search space, which says how its programs divide their work.
        report: of its machine code for the device's architecture.
        constants: of each kind of machine code.

    Raises:
        ValueError: the kernel cannot run on the device; ask `why_unlaunchable` first.
    """
    if reason := why_unlaunchable(device, report):
        raise ValueError(f"a prediction needs a kernel that can run; {reason}")
    own, space = constants[path_of(report, variant.template)], search_space.load(variant.template)
    params = space.all_params_of(variant)
    together = space.heads_of_tile(params, problem)
    work = _work(problem, device, variant, report, own, together)
    fitting = occupancy(device, report.registers, report.shared_bytes, report.num_warps)
    resident = min(fitting, work.program.persistent or fitting)
    resident = max(1, min(resident, -(-work.tiles // device.sm_count)))
    hertz = device.sustained_clock_mhz * 1e6
    memory = _memory_seconds(
        problem, device, params, work.plain + work.masked, device.sm_count * resident, hertz, together
    )
    units = {unit: cycles / device.sm_count / hertz for unit, cycles in work.unit_cycles().items()}
    seconds = _together_seconds((_cycles(work, device, params, resident) / hertz, *memory.values()), own)
    code_us = 1e6 * own.code_line * report.code_bytes / CODE_LINE / hertz
    time_us = 1e6 * seconds + LAUNCH_US + code_us
    parts_us = {unit: 1e6 * seconds for unit, seconds in (units | memory).items()}
    parts_us |= {"launch": LAUNCH_US, "code": code_us}
    return Prediction(
        time_us=time_us,
        bound=_bound(parts_us, time_us),
        parts_us=parts_us,
        occupancy=fitting,
        waves=work.tiles / (device.sm_count * fitting),
    )


def _work(
    problem: Problem, device: Device, variant: Variant, report: StaticReport, constants: Constants, together: int
) -> _Work:
    program, params = program_of(variant, report), search_space.load(variant.template).all_params_of(variant)
    mask_loop = str(params["mask_loop"]) if report.masked_loop else "every"
    splits = int(params.get("SPLITS", 1))
    plain, masked = tile_schedule.key_blocks(
        problem, int(params["BLOCK_M"]), int(params["BLOCK_N"]), mask_loop, together
    )
    if splits > 1:
        plain, masked = tile_schedule.shared(plain, masked, splits)
    first, second = (
        demand(problem, device, params, loop, program, constants)
        for loop in (report.loop, report.masked_loop or report.loop)
    )
    return _Work(
        heads=tile_schedule.heads_of(problem, together), plain=plain, masked=masked, costs=(first, second),
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
        return tile_schedule.dealt_makespan(
            full, work.heads, group, descending=descending, programs=programs, slots=slots
        )

    def slowdown(left: int) -> float:
        """Of the last tiles, which have the SMs to themselves."""
        blocks = max(1, min(resident, -(-left // device.sm_count)))
        return float(work.rows(blocks).max() / full.max())

    return tile_schedule.makespan(full, work.heads, group, descending=descending, slots=slots, slowdown=slowdown)


def _together_seconds(seconds: tuple[float, ...], constants: Constants) -> float:
    """What runs side by side: a little more than the longest, since each makes the others wait at times."""
    longest = max(seconds)
    power = constants.sharpness
    root: float = sum((part / longest) ** power for part in seconds) ** (1 / power)
    return longest * root


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


def _adding_up(problem: Problem, params: Mapping[str, Value], constants: Constants) -> float:
    """Cycles of the program that adds up what those that share its tile left: it writes one part and reads all."""
    splits = int(params.get("SPLITS", 1))
    if splits == 1:
        return 0.0
    rows, parts_read = int(params["BLOCK_M"]), params.get("parts_read")
    if parts_read == "by_rows":
        rows = min(rows, problem.seq_q * (problem.group_size if params.get("PACK_GQA") else 1))
    part = rows * (widths(problem, params)[1] + 2) * 4
    if (problem.is_latent or parts_read == "by_groups") and splits > PART_GROUP:
        # It reads a group, writes its sum, and reads the sums of all groups.
        splits = PART_GROUP + 1 + splits // PART_GROUP
    return (1 + splits) * part / 64 + 3 * constants.load_latency


def _memory_seconds(
    problem: Problem,
    device: Device,
    params: Mapping[str, Value],
    blocks: tile_schedule.Array,
    slots: int,
    hertz: float,
    together: int,
) -> dict[str, float]:
    """Seconds that the L2 and the DRAM take to deliver keys and values, and DRAM the rest."""
    heads, tiles = tile_schedule.heads_of(problem, together), len(blocks)
    read = float(blocks.sum()) * heads * key_bytes(problem, params)
    group = min(int(params["HEAD_GROUP"]) or heads, heads)
    # Heads at work at once, and how many tiles that run together want the same keys.
    at_work = min(heads, max(1.0, slots / (group * tiles)) * group, slots)
    apart = max(1.0, at_work * together / problem.group_size)
    keys = _keys_at_work(problem, int(params["BLOCK_M"]), min(tiles, slots / at_work))
    working_set = apart * keys * problem.elements_per_key * problem.key_bytes
    missing = max(0.0, 1 - device.l2_bytes / working_set)
    # What no tile sees is not read, and what one reads alone is read once, however much exceeds the L2.
    once = min(problem.bytes_of_keys, read)
    again = missing * max(0.0, read / max(1.0, min(slots, heads * tiles) / apart) - once)
    moved = problem.bytes() - problem.bytes_of_keys + once + again
    return {
        "l2": read / (L2_BYTES.get(device.arch, 40.0) * device.sm_count * hertz),
        "dram": moved / (DRAM_EFFICIENCY * device.bandwidth),
    }


def _keys_at_work(problem: Problem, block_m: int, together: float) -> float:
    """Keys of a head that its tiles which run together walk: all, or those around them where the mask is a band."""
    first, last = problem.band(problem.seq_q, problem.seq_kv)
    if first is None or last is None:
        return problem.seq_kv
    return min(problem.seq_kv, together * block_m + last - first)
