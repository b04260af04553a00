"""Facts about a GPU that may not be in this machine; the known ones stand in `device_profiles`.

What an architecture can do stands in one table here, so that nobody compares its number: a newer architecture need not
have what an older one had.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

KIB = 1024
GUIDE = "CUDA C++ Programming Guide, Compute Capabilities, table Technical Specifications per Compute Capability"


class Backend(str, Enum):
    """Whose compiler and driver run a device's kernels, in Triton's words."""

    CUDA = "cuda"


class MatrixUnit(str, Enum):
    """The matrix products that a device runs at its peak rate, in PTX's words."""

    MMA = "mma"  # mma.sync: of a warp; factors and sums lie in registers
    WGMMA = "wgmma"  # of a warpgroup, asynchronous; factors lie in shared memory, sums in registers
    TCGEN05 = "tcgen05"  # of a block, asynchronous; factors lie in shared memory, sums in tensor memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an architecture can do, and the limits of its SMs."""

    backend: Backend = Backend.CUDA
    warp_size: int = 32  # threads
    matrix_unit: MatrixUnit
    tma: bool  # whether a unit of the SM copies boxes of tensors between device memory and shared memory
    float8_products: bool  # whether the matrix unit multiplies float8
    float32_lanes: int = 32  # of each of an SM's four schedulers
    shared_bytes_per_sm: int
    shared_bytes_per_block: int  # the opt-in maximum
    max_threads_per_sm: int
    max_blocks_per_sm: int


def _capabilities(
    matrix_unit: MatrixUnit, shared_kib: int, threads: int, blocks: int, *, tma: bool = True, float8: bool = True,
    lanes: int = 32,
) -> Capabilities:  # fmt: skip
    """Of an SM with so much shared memory, of which the system keeps 1 KiB for each block (GUIDE)."""
    return Capabilities(
        matrix_unit=matrix_unit,
        tma=tma,
        float8_products=float8,
        float32_lanes=lanes,
        shared_bytes_per_sm=shared_kib * KIB,
        shared_bytes_per_block=(shared_kib - 1) * KIB,
        max_threads_per_sm=threads,
        max_blocks_per_sm=blocks,
    )


# Compute capability times ten -> what it can do. Limits of the SMs: GUIDE. Matrix units, TMA and types: PTX ISA 9.0,
# "Target ISA Notes" of mma (float8 from sm_89), wgmma.mma_async (sm_90a alone), tcgen05.mma (sm_100a, sm_101a, which is
# sm_110a since, sm_103a) and cp.async.bulk.tensor (from sm_90). Lanes: 64 float32 units of an SM in the A100
# whitepaper, 128 in those of the others.
ARCHITECTURES = {
    80: _capabilities(MatrixUnit.MMA, 164, 2048, 32, tma=False, float8=False, lanes=16),
    86: _capabilities(MatrixUnit.MMA, 100, 1536, 16, tma=False, float8=False),
    87: _capabilities(MatrixUnit.MMA, 164, 1536, 16, tma=False, float8=False),
    89: _capabilities(MatrixUnit.MMA, 100, 1536, 24, tma=False),
    90: _capabilities(MatrixUnit.WGMMA, 228, 2048, 32),
    100: _capabilities(MatrixUnit.TCGEN05, 228, 2048, 32),
    103: _capabilities(MatrixUnit.TCGEN05, 228, 2048, 32),
    110: _capabilities(MatrixUnit.TCGEN05, 228, 1536, 24),
    120: _capabilities(MatrixUnit.MMA, 100, 1536, 24),
    121: _capabilities(MatrixUnit.MMA, 100, 1536, 24),
}
# Of an architecture that the table lacks: mma.sync, which every NVIDIA GPU since Volta has, and the smallest limits.
_LEAST = _capabilities(MatrixUnit.MMA, 64, 1024, 16, tma=False, float8=False)


def capabilities_of(arch: int) -> Capabilities:
    """What compute capability `arch` (times ten) can do; of an unknown one, the least that autoattn relies on."""
    return ARCHITECTURES.get(arch, _LEAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of GPU.

    Rates are dense peaks at `clock_mhz`. The fingerprint decides whether a measurement holds for a card; the
    architecture only seeds a search.
    """

    name: str  # the short name that stands in commands and folders: "a30"
    full_name: str  # what the driver calls it: "NVIDIA A30"
    arch: int  # compute capability times ten: 80, 86, 89, 90, 100, 120; names a target and is not to be compared
    sm_count: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int  # the opt-in maximum
    registers_per_sm: int  # 32-bit registers
    max_threads_per_sm: int
    max_blocks_per_sm: int
    l2_bytes: int
    bandwidth: float  # bytes per second, peak
    memory_bytes: int = 0  # device memory; 0 where it is unknown
    clock_mhz: int  # the clock that the peak rates are stated at
    sustained_clock_mhz: int  # what a matrix kernel keeps up under the power limit
    peak_flops: dict[str, float] = field(
        default_factory=dict, hash=False
    )  # float16, bfloat16, tf32, float32 -> flop/s, dense
    aliases: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict, hash=False)  # fact -> where it comes from

    @property
    def capabilities(self) -> Capabilities:
        """What its architecture can do."""
        return capabilities_of(self.arch)

    @property
    def fingerprint(self) -> str:
        """What must agree for a measured entry to hold: name, architecture, SM count and L2."""
        return f"{self.full_name}/sm_{self.arch}/{self.sm_count}sm/{self.l2_bytes}l2"
