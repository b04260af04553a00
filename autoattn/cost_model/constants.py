"""Constants of the cost model that no data sheet gives, fitted on measured kernels (docs/model.md)."""

from __future__ import annotations

from dataclasses import dataclass

from autoattn.cost_model.kernel_kind import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Of one kind of machine code. Fitted by benchmarks/model_fit.py within BOUNDS."""

    pass_latency: float  # cycles of a pass that no unit works on: products that drain, reductions, barriers
    load_latency: float  # cycles until a block of keys or values arrives that nobody asked for ahead of time
    one_ahead: float  # share of it that two stages still show; of programs that specialise, one stage
    behind_barrier: float  # share of it that a second load adds where it cannot start early
    sharpness: float  # of the greatest of the SMs', the L2's and the DRAM's time: a mean of this power
    spill_latency: float = 40.0  # cycles of each reload of a spilled register
    barrier_latency: float = 0.0  # cycles of each barrier of a pass beyond two
    serial_product: float = 0.0  # cycles of each warpgroup instruction beyond a pass's own four
    warp_overlap: float = 0.25  # w warps of a block on a scheduler overlap like w ** warp_overlap blocks
    left_reads: float = 1.0  # share of a warpgroup product's reads of its left factor that show
    ahead: float = 0.0  # workers that one whose next product runs beside its softmax counts for, beyond itself
    walking: float = 1.0  # share of a tile's setup that shows where the same program walks on to the next one
    code_line: float = 0.0  # cycles that a launch waits for each line of its code, which no cache has


BOUNDS = {
    "pass_latency": (0.0, 3000.0),
    "load_latency": (300.0, 1500.0),
    "one_ahead": (0.0, 1.0),
    "behind_barrier": (0.05, 1.0),
    "sharpness": (1.0, 20.0),
    "spill_latency": (20.0, 200.0),
    "barrier_latency": (0.0, 500.0),
    "serial_product": (0.0, 100.0),
    "warp_overlap": (0.0, 1.0),
    "left_reads": (0.0, 1.0),
    "ahead": (0.0, 2.0),
    "walking": (0.0, 1.0),
    "code_line": (0.0, 60.0),
}
_OF_WARPS = (
    *("pass_latency", "load_latency", "one_ahead", "behind_barrier", "sharpness", "spill_latency"),
    *("barrier_latency", "warp_overlap", "code_line"),
)
# Those that speak of a kind of machine code; the others are left as they stand above.
FITTED = {
    Path.WARPGROUP: tuple(name for name in BOUNDS if name not in ("ahead", "walking")),
    Path.SPECIALISED: (
        *("pass_latency", "load_latency", "one_ahead", "behind_barrier", "sharpness"),
        *("ahead", "walking", "code_line"),
    ),
    Path.SYNCHRONOUS: _OF_WARPS,
    Path.SMALL_TILES: _OF_WARPS,
    # No measured kernel has two stages or a barrier: of these, it has what mma.sync had.
    Path.LANES: tuple(name for name in _OF_WARPS if name not in ("one_ahead", "behind_barrier", "barrier_latency")),
}

CONSTANTS = {
    Path.WARPGROUP: Constants(
        pass_latency=188.0,
        load_latency=552.0,
        one_ahead=1.0,
        behind_barrier=0.205,
        sharpness=1.61,
        spill_latency=43.7,
        barrier_latency=86.1,
        serial_product=11.9,
        warp_overlap=0.246,
        left_reads=1.0,
        code_line=22.4,
    ),
    # The hardware that reads left factors is the same.
    Path.SPECIALISED: Constants(
        pass_latency=190.0,
        load_latency=1250.0,
        one_ahead=0.303,
        behind_barrier=0.285,
        sharpness=1.98,
        ahead=0.813,
        walking=0.57,
        code_line=13.3,
        left_reads=1.0,
    ),
    Path.SYNCHRONOUS: Constants(
        pass_latency=43.2,
        load_latency=683.0,
        one_ahead=0.556,
        behind_barrier=0.05,
        sharpness=1.81,
        spill_latency=34.3,
        barrier_latency=109.0,
        warp_overlap=0.0838,
        code_line=13.8,
    ),
    Path.SMALL_TILES: Constants(
        pass_latency=138.0,
        load_latency=729.0,
        one_ahead=0.432,
        behind_barrier=0.598,
        sharpness=1.4,
        spill_latency=36.7,
        barrier_latency=32.4,
        warp_overlap=0.0,
        code_line=17.4,
    ),
    Path.LANES: Constants(
        pass_latency=1390.0,
        load_latency=300.0,
        one_ahead=0.618,
        behind_barrier=0.606,
        sharpness=1.0,
        spill_latency=38.7,
        warp_overlap=0.0,
        code_line=24.5,
    ),
}
