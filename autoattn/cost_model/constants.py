"""Constants of the cost model that no data sheet gives, fitted on measured kernels (docs/model.md)."""

from __future__ import annotations

from dataclasses import dataclass

from autoattn.cost_model.kernel_kind import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Of one kind of machine code. Fitted by benchmarks/model_quality.py within BOUNDS."""

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


BOUNDS = {
    "pass_latency": (0.0, 1000.0),
    "load_latency": (300.0, 1500.0),
    "one_ahead": (0.0, 1.0),
    "behind_barrier": (0.0, 1.0),
    "sharpness": (2.0, 20.0),
    "spill_latency": (20.0, 200.0),
    "barrier_latency": (0.0, 500.0),
    "serial_product": (0.0, 100.0),
    "warp_overlap": (0.0, 1.0),
    "left_reads": (0.0, 1.0),
    "ahead": (0.0, 2.0),
    "walking": (0.0, 1.0),
}
# Those that speak of a kind of machine code; the others are left as they stand above.
FITTED = {
    Path.WARPGROUP: tuple(name for name in BOUNDS if name not in ("ahead", "walking")),
    Path.SPECIALISED: (
        *("pass_latency", "load_latency", "one_ahead", "behind_barrier", "sharpness"),
        *("ahead", "walking"),
    ),
    Path.SYNCHRONOUS: (
        *("pass_latency", "load_latency", "one_ahead", "behind_barrier", "sharpness", "spill_latency"),
        *("barrier_latency", "warp_overlap"),
    ),
}
_SYNCHRONOUS = Constants(
    pass_latency=50.0,
    load_latency=433.0,
    one_ahead=0.618,
    behind_barrier=0.606,
    sharpness=2.0,
    spill_latency=43.6,
    barrier_latency=101.0,
    warp_overlap=0.0277,
)
CONSTANTS = {
    Path.WARPGROUP: Constants(
        pass_latency=175.0,
        load_latency=389.0,
        one_ahead=1.0,
        behind_barrier=0.676,
        sharpness=3.8,
        spill_latency=41.5,
        barrier_latency=62.8,
        serial_product=7.84,
        warp_overlap=0.321,
        left_reads=0.774,
    ),
    # The hardware that reads left factors is the same.
    Path.SPECIALISED: Constants(
        pass_latency=225.0,
        load_latency=1280.0,
        one_ahead=0.227,
        behind_barrier=0.0812,
        sharpness=6.52,
        ahead=0.437,
        walking=0.0389,
        left_reads=0.774,
    ),
    Path.SYNCHRONOUS: _SYNCHRONOUS,
    Path.LANES: _SYNCHRONOUS,  # never fitted by itself
}
