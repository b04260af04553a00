"""The GPUs that autoattn knows without having them, each fact with its source.

Peak rates are dense and accumulate in float32, as attention does, at `clock_mhz`. Where nobody published the clock
that a matrix kernel keeps, the sustained clock is the peak's, and the sources say so. The GB of a datasheet's memory
count as GiB: the driver reports a little less, so that what does not fit here fits on no such card.
"""

from __future__ import annotations

import difflib
import re

from autoattn.core.device import GUIDE, KIB, Device, capabilities_of
from autoattn.errors import DeviceError

MIB = 1024 * 1024

_A100_SHEET = "NVIDIA A100 datasheet"
_A100_PAPER = "NVIDIA A100 Tensor Core GPU Architecture whitepaper, table Comparison of NVIDIA Data Center GPUs"
_H100_PAPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper, table that compares A100 and H100"
_ADA_PAPER = "NVIDIA Ada GPU Architecture whitepaper V2, appendix tables"
_GA102_PAPER = "NVIDIA Ampere GA102 GPU Architecture whitepaper V2, appendix A, GeForce RTX 3090"
_RTX_BLACKWELL_PAPER = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A, GeForce RTX 5090"
_A30_REPORT = "device report at the head of the published table in benchmarks/shapes/varlen_a30.yaml"
_RESTATED = "(the other units' clock) to the tensor cores' clock"
_NO_CLOCK = "no published figure: taken as the peak's clock, so predictions for this card are optimistic"


def _device(
    name: str,
    full_name: str,
    arch: int,
    *,
    sm_count: int,
    l2_mib: int,
    bandwidth: float,  # GB/s
    memory_mib: int,
    clock_mhz: int,
    tflops: tuple[float, float, float],  # 16-bit tensor, tf32 tensor, float32 without tensor cores
    sources: dict[str, str],
    sustained_clock_mhz: int | None = None,
    aliases: tuple[str, ...] = (),
) -> Device:
    """A device whose limits per SM follow from its compute capability."""
    limits = capabilities_of(arch)
    half, tf32, single = (rate * 1e12 for rate in tflops)
    per_sm = ("shared_bytes_per_sm", "shared_bytes_per_block", "registers_per_sm", "max_threads_per_sm")
    return Device(
        name=name,
        full_name=full_name,
        arch=arch,
        sm_count=sm_count,
        shared_bytes_per_sm=limits.shared_bytes_per_sm,
        shared_bytes_per_block=limits.shared_bytes_per_block,
        registers_per_sm=64 * KIB,  # of 32 bits, on every architecture here
        max_threads_per_sm=limits.max_threads_per_sm,
        max_blocks_per_sm=limits.max_blocks_per_sm,
        l2_bytes=l2_mib * MIB,
        bandwidth=bandwidth * 1e9,
        memory_bytes=memory_mib * MIB,
        clock_mhz=clock_mhz,
        sustained_clock_mhz=sustained_clock_mhz or clock_mhz,
        peak_flops={"float16": half, "bfloat16": half, "tf32": tf32, "float32": single},
        aliases=aliases,
        sources={
            **dict.fromkeys((*per_sm, "max_blocks_per_sm"), f"{GUIDE}, {arch // 10}.{arch % 10}"),
            "sustained_clock_mhz": _NO_CLOCK,
            **sources,
        },
    )


def _a100(
    name: str, full_name: str, bandwidth: float, memory_gib: int, datasheet: str, aliases: tuple[str, ...]
) -> Device:
    throttled = (
        "notes on frequency beside the tables of benchmarks/shapes/flash2_a100.yaml: an A100, not said which, drops "
        "from 1410 to about 1200 MHz by its power"
    )
    facts = ("sm_count", "l2_bytes", "clock_mhz", "peak_flops")
    return _device(
        name,
        full_name,
        80,
        sm_count=108,
        l2_mib=40,
        bandwidth=bandwidth,
        memory_mib=memory_gib * 1024,
        clock_mhz=1410,
        sustained_clock_mhz=1200,
        tflops=(312, 156, 19.5),
        aliases=aliases,
        sources={
            **dict.fromkeys(facts, _A100_PAPER),
            "bandwidth": datasheet,
            "memory_bytes": f"{_A100_SHEET}, {memory_gib} GB",
            "sustained_clock_mhz": throttled,
        },
    )


_DEVICES = (
    _device(
        "a10",
        "NVIDIA A10",
        86,
        sm_count=72,
        l2_mib=6,
        bandwidth=600,
        memory_mib=24 * 1024,
        clock_mhz=1695,
        tflops=(125, 62.5, 31.2),
        sources={
            "sm_count": "NVIDIA A10 datasheet: 9,216 CUDA cores at 128 per SM",
            "l2_bytes": "NVIDIA Ampere GA102 GPU Architecture whitepaper V2: 512 KiB for each of 12 memory controllers",
            "bandwidth": "NVIDIA A10 datasheet",
            "memory_bytes": "NVIDIA A10 datasheet: 24 GB GDDR6",
            "clock_mhz": "NVIDIA A10 product brief: boost clock",
            "peak_flops": "NVIDIA A10 datasheet, without sparsity; bfloat16 accumulates in float32",
        },
    ),
    _device(
        "a30",
        "NVIDIA A30",
        80,
        sm_count=56,
        l2_mib=24,
        bandwidth=933,
        memory_mib=24060,
        clock_mhz=1440,
        tflops=(165, 82, 10.3),
        sources={
            **dict.fromkeys(("sm_count", "l2_bytes", "bandwidth", "clock_mhz"), _A30_REPORT),
            "shared_bytes_per_sm": f"{_A30_REPORT}; {GUIDE}, 8.0",
            "registers_per_sm": f"{_A30_REPORT}; {GUIDE}, 8.0",
            "max_threads_per_sm": f"{_A30_REPORT}; {GUIDE}, 8.0",
            "max_blocks_per_sm": f"{_A30_REPORT}; {GUIDE}, 8.0",
            "memory_bytes": f"{_A30_REPORT}: memory_total",
            "peak_flops": "NVIDIA A30 datasheet, without sparsity",
        },
    ),
    _a100(
        "a100",
        "NVIDIA A100-SXM4-80GB",
        2039,
        80,
        "NVIDIA A100 datasheet, A100 80GB SXM",
        ("a100-80gb", "a100-sxm", "a100-sxm-80gb", "a100-sxm4"),
    ),
    _a100(
        "a100-40gb",
        "NVIDIA A100-SXM4-40GB",
        1555,
        40,
        f"{_A100_PAPER}: 1,555 GB/s",
        ("a100-sxm-40gb",),
    ),
    _device(
        "h100",
        "NVIDIA H100 80GB HBM3",
        90,
        sm_count=132,
        l2_mib=50,
        bandwidth=3350,
        memory_mib=80 * 1024,
        clock_mhz=1830,
        tflops=(989.4, 494.7, 61.8),
        aliases=("h100-sxm", "h100-sxm5", "h100-80gb", "h100-sxm5-80gb"),
        sources={
            **dict.fromkeys(("sm_count", "l2_bytes"), _H100_PAPER),
            "bandwidth": "NVIDIA H100 datasheet, H100 SXM",
            "memory_bytes": "NVIDIA H100 datasheet, H100 SXM: 80 GB",
            "clock_mhz": f"{_H100_PAPER}: boost clock for tensor core operations",
            "peak_flops": f"{_H100_PAPER}; float32 restated from 66.9 TFLOPS at 1980 MHz {_RESTATED}",
        },
    ),
    _device(
        "h100-pcie",
        "NVIDIA H100 PCIe",
        90,
        sm_count=114,
        l2_mib=50,
        bandwidth=2000,
        memory_mib=80 * 1024,
        clock_mhz=1620,
        tflops=(756, 378, 47.3),
        aliases=("h100-pcie-80gb",),
        sources={
            **dict.fromkeys(("sm_count", "l2_bytes"), _H100_PAPER),
            "bandwidth": f"{_H100_PAPER}: 2,000 GB/s",
            "memory_bytes": "NVIDIA H100 datasheet, H100 PCIe: 80 GB",
            "clock_mhz": f"{_H100_PAPER}: boost clock for tensor core operations",
            "peak_flops": f"{_H100_PAPER}; float32 restated from 51.2 TFLOPS at 1755 MHz {_RESTATED}",
        },
    ),
    _device(
        "h200",
        "NVIDIA H200",
        90,
        sm_count=132,
        l2_mib=60,
        bandwidth=4800,
        memory_mib=141 * 1024,
        clock_mhz=1830,
        sustained_clock_mhz=1770,
        tflops=(989.4, 494.7, 61.8),
        aliases=("h200-sxm", "h200-sxm5", "h200-141gb"),
        sources={
            "sm_count": "device properties that PyTorch prints on an NVIDIA H200: 132 multiprocessors",
            "l2_bytes": "device properties that PyTorch prints on an NVIDIA H200: L2 60 MB",
            "bandwidth": "NVIDIA H200 datasheet",
            "memory_bytes": "NVIDIA H200 datasheet: 141 GB HBM3e",
            "clock_mhz": f"{_H100_PAPER}: boost clock for tensor core operations; the H200 has the same processor",
            "sustained_clock_mhz": "measured on an H200 for this project: 1980 MHz falls to about 1770 MHz at 690 W "
            "under matrix products and attention",
            "peak_flops": "NVIDIA H200 datasheet, half of the rates with sparsity; float32 restated from 67 TFLOPS at "
            f"1980 MHz {_RESTATED}",
        },
    ),
    _device(
        "l4",
        "NVIDIA L4",
        89,
        sm_count=58,
        l2_mib=48,
        bandwidth=300,
        memory_mib=24 * 1024,
        clock_mhz=2040,
        tflops=(121, 60, 30.3),
        sources={
            "sm_count": f"{_ADA_PAPER}: L4, 7,424 CUDA cores at 128 per SM",
            "l2_bytes": f"{_ADA_PAPER}: L4, 49,152 KB",
            "bandwidth": "NVIDIA L4 datasheet",
            "memory_bytes": "NVIDIA L4 datasheet: 24 GB GDDR6",
            "clock_mhz": "NVIDIA L4 product brief: boost clock",
            "peak_flops": "NVIDIA L4 datasheet, half of the rates with sparsity; bfloat16 accumulates in float32",
            "sustained_clock_mhz": f"{_NO_CLOCK} (its power limit is 72 W)",
        },
    ),
    _device(
        "rtx3090",
        "NVIDIA GeForce RTX 3090",
        86,
        sm_count=82,
        l2_mib=6,
        bandwidth=936,
        memory_mib=24 * 1024,
        clock_mhz=1695,
        tflops=(71, 35.6, 35.6),
        aliases=("3090",),
        sources={
            **dict.fromkeys(("sm_count", "l2_bytes", "bandwidth", "clock_mhz"), _GA102_PAPER),
            "memory_bytes": f"{_GA102_PAPER}: 24,576 MB",
            "peak_flops": f"{_GA102_PAPER}: tensor rates with FP32 accumulate, half of those with FP16 accumulate",
        },
    ),
    _device(
        "rtx4090",
        "NVIDIA GeForce RTX 4090",
        89,
        sm_count=128,
        l2_mib=72,
        bandwidth=1008,
        memory_mib=24 * 1024,
        clock_mhz=2520,
        tflops=(165.2, 82.6, 82.6),
        aliases=("4090",),
        sources={
            **dict.fromkeys(("sm_count", "l2_bytes", "bandwidth", "clock_mhz"), f"{_ADA_PAPER}: GeForce RTX 4090"),
            "memory_bytes": f"{_ADA_PAPER}: GeForce RTX 4090, 24 GB",
            "peak_flops": f"{_ADA_PAPER}: GeForce RTX 4090, tensor rates with FP32 accumulate, half of those with FP16 "
            "accumulate",
        },
    ),
    _device(
        "rtx5090",
        "NVIDIA GeForce RTX 5090",
        120,
        sm_count=170,
        l2_mib=96,
        bandwidth=1792,
        memory_mib=32 * 1024,
        clock_mhz=2407,
        tflops=(209.5, 104.8, 104.8),
        aliases=("5090",),
        sources={
            **dict.fromkeys(("sm_count", "bandwidth", "clock_mhz"), _RTX_BLACKWELL_PAPER),
            "l2_bytes": f"{_RTX_BLACKWELL_PAPER}: 98,304 KB",
            "memory_bytes": f"{_RTX_BLACKWELL_PAPER}: 32 GB",
            "peak_flops": f"{_RTX_BLACKWELL_PAPER}: tensor rates with FP32 accumulate, half of those with FP16 "
            "accumulate",
        },
    ),
    _device(
        "b200",
        "NVIDIA B200",
        100,
        sm_count=148,
        l2_mib=126,
        bandwidth=8000,
        memory_mib=180 * 1024,
        clock_mhz=1856,
        tflops=(2250, 1125, 70.3),
        aliases=("b200-sxm", "b200-sxm6"),
        sources={
            "sm_count": "device properties that PyTorch prints on an NVIDIA B200: 148 multiprocessors",
            "l2_bytes": "device properties that PyTorch prints on an NVIDIA B200: L2 126 MB",
            "bandwidth": "NVIDIA HGX B200 datasheet: up to 8 TB/s",
            "memory_bytes": "NVIDIA DGX B200 datasheet: 1,440 GB of eight GPUs",
            "clock_mhz": "derived: where 148 SMs of 8,192 operations a clock reach the datasheet's bfloat16 rate",
            "peak_flops": "NVIDIA HGX B200 datasheet: 2.25 PFLOPS bfloat16 without sparsity, tf32 half of it; float32 "
            "derived: 256 operations a clock and SM at this clock",
        },
    ),
)


def all_devices() -> tuple[Device, ...]:
    """Every known device, sorted by name."""
    return tuple(sorted(_DEVICES, key=lambda device: device.name))


def named(text: str) -> Device:
    """The device that a user means: its short name, the driver's name or an alias, in any case and punctuation.

    Raises:
        DeviceError: nobody described such a device; the message names those that come close.
    """
    wanted = _plain(text)
    spellings = {_plain(name): device for device in _DEVICES for name in _names(device)}
    if wanted in spellings:
        return spellings[wanted]
    near = {spellings[match].name: None for match in difflib.get_close_matches(wanted, spellings, n=6, cutoff=0.6)}
    hint = f"did you mean {' or '.join(list(near)[:3])}? " if near else ""
    known = ", ".join(device.name for device in all_devices())
    raise DeviceError(f"device must be one that autoattn knows, got {text!r:.60}; {hint}known are {known}")


def _names(device: Device) -> tuple[str, ...]:
    return (device.name, device.full_name, *device.aliases)


def _plain(text: str) -> str:
    """Letters and digits alone, without the vendor: "NVIDIA GeForce RTX 4090" and "rtx-4090" read the same."""
    return re.sub(r"[^a-z0-9]|nvidia|geforce", "", text.lower())
