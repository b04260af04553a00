"""What fits on an SM at once: CUDA's own arithmetic, and why a kernel does not fit at all."""

from __future__ import annotations

from autoattn.core.device import Device
from autoattn.core.trial import StaticReport

WARP = 32  # threads
REGISTER_UNIT = 256  # registers are handed to a warp in units of so many
SHARED_UNIT = 128  # bytes, likewise
RESERVED_SHARED = 1024  # bytes of each block's shared memory that CUDA keeps for itself, sm_80 and later
MAX_REGISTERS = 255  # per thread
SCHEDULERS = 4  # of an SM: each owns a quarter of its warps, vector units and tensor cores


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
