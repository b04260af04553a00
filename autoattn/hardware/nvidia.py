"""The NVIDIA card in this machine: its identity, and its state through NVML."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from autoattn.core import device_profiles
from autoattn.core.device import Device, capabilities_of
from autoattn.core.paired_stats import Pulse
from autoattn.errors import DeviceError

# Throttle reasons that make a round unfair: thermal and power slowdowns, not the power cap of normal load.
_SLOWDOWN = ("nvmlClocksThrottleReasonHwSlowdown", "nvmlClocksThrottleReasonHwThermalSlowdown")
# All that may hold clocks down while a kernel runs, in words.
_REASONS = {
    "power cap": "nvmlClocksThrottleReasonSwPowerCap",
    "thermal limit": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "hardware slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "hardware thermal slowdown": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
    "clocks set by a user": "nvmlClocksThrottleReasonApplicationsClocksSetting",
}


def present(index: int | None = None) -> Device | None:
    """The CUDA device `index` (the current one when None) as facts; None when there is none.

    A card without a profile is described by what the driver says of it; its peak rates are then unknown (empty).
    """
    if not torch.cuda.is_available():
        return None
    return describe(torch.cuda.current_device() if index is None else index)


def resolve(text: str) -> tuple[Device, bool]:
    """The device that `text` names ("auto" for the card in this machine), and whether it is that card.

    Raises:
        DeviceError: nobody described such a device, or there is no card for "auto".
    """
    card = present()
    if text.strip().lower() == "auto":
        if card is None:
            names = ", ".join(device.name for device in device_profiles.all_devices())
            raise DeviceError(f"--device auto needs an NVIDIA GPU in this machine, found none; name one of {names}")
        return card, True
    if card is not None and text.strip().lower() in (card.name, card.full_name.lower()):
        return card, True
    device = device_profiles.named(text)
    return (card, True) if card is not None and card.name == device.name else (device, False)


def fingerprint_of(name: str) -> str | None:
    """The fingerprint of the card that a device's name stands for: of the card in this machine, else of its profile.

    None where nobody described such a device.
    """
    try:
        return resolve(name)[0].fingerprint
    except DeviceError:
        return None


def alike(device: Device) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES calls each visible card that is such a device; times of other cards are no match."""
    count = torch.cuda.device_count()
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    names = given if len(given) >= count and given[0] else [str(index) for index in range(count)]
    cards = [(names[index], present(index)) for index in range(count)]
    return tuple(name for name, card in cards if card is not None and card.fingerprint == device.fingerprint)


@lru_cache(maxsize=16)
def describe(index: int) -> Device:
    """What `present` gives for a card; the driver is asked once."""
    properties = torch.cuda.get_device_properties(index)
    arch = properties.major * 10 + properties.minor
    try:
        profile = device_profiles.named(properties.name)
    except DeviceError:
        return Device(
            name="".join(letter if letter.isalnum() else "-" for letter in properties.name.lower()),
            full_name=properties.name,
            arch=arch,
            sm_count=properties.multi_processor_count,
            shared_bytes_per_sm=properties.shared_memory_per_multiprocessor,
            shared_bytes_per_block=properties.shared_memory_per_block_optin,
            registers_per_sm=properties.regs_per_multiprocessor,
            max_threads_per_sm=properties.max_threads_per_multi_processor,
            max_blocks_per_sm=capabilities_of(arch).max_blocks_per_sm,  # which PyTorch does not tell
            l2_bytes=properties.L2_cache_size,
            bandwidth=0.0,
            memory_bytes=properties.total_memory,
            clock_mhz=0,
            sustained_clock_mhz=0,
            sources={"all": "the CUDA driver"},
        )
    # What the driver says of this very card wins over the data sheet (MIG slices and sisters differ).
    return replace(
        profile,
        arch=arch,
        full_name=properties.name,
        sm_count=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
    )


def pulse(index: int) -> Pulse | None:
    """Reads clock and temperature through NVML; None where NVML is missing or refuses."""
    nvml = load_nvml()
    if nvml is None:
        return None
    try:
        handle = _handle(nvml, index)
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return Pulse(
            clock_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            slowed=any(reasons & getattr(nvml, name) for name in _SLOWDOWN),
            temperature_c=_temperature(nvml, handle),
            reasons=tuple(words for words, name in _REASONS.items() if reasons & getattr(nvml, name)),
        )
    except nvml.NVMLError:
        return None


def joules(index: int) -> float | None:
    """What the card has used since the driver was loaded, in joules; None where NVML or the card does not count it.

    The driver adds to it every 20 to 100 ms.
    """
    nvml = load_nvml()
    if nvml is None:
        return None
    try:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(_handle(nvml, index))) / 1e3
    except nvml.NVMLError:
        return None


def _temperature(nvml: ModuleType, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    except nvml.NVMLError:  # parts of a card may tell their clock alone
        return None


def driver_version() -> str | None:
    """The driver's version, as "580.159.04"; None without NVML."""
    nvml = load_nvml()
    return str(nvml.nvmlSystemGetDriverVersion()) if nvml is not None else None


def _handle(nvml: ModuleType, index: int) -> Any:
    # NVML counts all cards, CUDA only the visible ones; the UUID names the same card to both.
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


@lru_cache(maxsize=1)
def load_nvml() -> ModuleType | None:
    """NVML, initialised; None where there is no library, no driver or no permission."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no library, no driver, no permission: the card works without a clock reading
        return None
    return nvml
