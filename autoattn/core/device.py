"""Facts about a GPU that may not be in this machine; the known ones stand in `device_profiles`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of GPU.

    Rates are dense peaks at `clock_mhz`. The fingerprint decides whether a measurement holds for a card; the
    architecture only seeds a search.
    """

    name: str  # the short name that stands in commands and folders: "a30"
    full_name: str  # what the driver calls it: "NVIDIA A30"
    arch: int  # compute capability times ten: 80, 86, 89, 90, 100
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
    peak_flops: dict[str, float] = field(default_factory=dict)  # float16, bfloat16, tf32, float32 -> flop/s, dense
    aliases: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)  # fact -> where it comes from

    @property
    def fingerprint(self) -> str:
        """What must agree for a measured entry to hold: name, architecture, SM count and L2."""
        return f"{self.full_name}/sm_{self.arch}/{self.sm_count}sm/{self.l2_bytes}l2"
