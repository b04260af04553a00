"""The known devices: their facts agree with each other, and people find them."""

from __future__ import annotations

import dataclasses

import pytest

from autoattn.core import device_profiles
from autoattn.core.device import Device
from autoattn.errors import DeviceError

# Dense operations that one SM does in one clock: 16-bit tensor, float32. NVIDIA's architecture whitepapers.
PER_CLOCK = {80: (2048, 128), 86: (1024, 256), 89: (1024, 256), 90: (4096, 256), 100: (8192, 256), 120: (1024, 256)}
GEFORCE = ("rtx3090", "rtx4090", "rtx5090")  # half rate when accumulating in float32

every_device = pytest.mark.parametrize("device", device_profiles.all_devices(), ids=lambda device: device.name)


def test_the_promised_devices_are_there() -> None:
    names = [device.name for device in device_profiles.all_devices()]
    assert names == sorted(set(names))
    assert {"a30", "a100", "a100-40gb", "h100", "h200", "l4", "rtx4090", "rtx5090", "b200"} <= set(names)


@every_device
def test_published_rates_agree_with_sms_and_clock(device: Device) -> None:
    half, single = (device.sm_count * rate * device.clock_mhz * 1e6 for rate in PER_CLOCK[device.arch])
    if device.name in GEFORCE:
        half /= 2
    assert device.peak_flops["float16"] == device.peak_flops["bfloat16"] == pytest.approx(half, rel=0.01)
    assert device.peak_flops["tf32"] == pytest.approx(half / 2, rel=0.01)
    assert device.peak_flops["float32"] == pytest.approx(single, rel=0.01)


@every_device
def test_facts_are_possible(device: Device) -> None:
    assert device.arch in PER_CLOCK
    assert 48 * 1024 < device.shared_bytes_per_block == device.shared_bytes_per_sm - 1024
    assert device.registers_per_sm == 65536
    assert device.max_threads_per_sm % 32 == 0
    assert 0 < device.sustained_clock_mhz <= device.clock_mhz < 3000
    assert 1e11 < device.bandwidth < 1e13
    assert 16 * 2**30 < device.memory_bytes < 256 * 2**30
    assert set(device.peak_flops) == {"float16", "bfloat16", "tf32", "float32"}


@every_device
def test_every_fact_has_a_source(device: Device) -> None:
    identity = {"name", "full_name", "arch", "aliases", "sources"}
    facts = {field.name for field in dataclasses.fields(Device)} - identity
    assert set(device.sources) == facts
    assert all(device.sources.values())


@every_device
def test_a_sustained_clock_without_a_source_is_the_peaks_and_says_so(device: Device) -> None:
    assert (device.sustained_clock_mhz == device.clock_mhz) == (
        "no published figure" in device.sources["sustained_clock_mhz"]
    )


def test_a30_is_as_varlen_a30_reports_it() -> None:
    a30 = device_profiles.named("a30")
    assert (a30.full_name, a30.arch, a30.sm_count, a30.clock_mhz) == ("NVIDIA A30", 80, 56, 1440)
    assert (a30.shared_bytes_per_sm, a30.l2_bytes, a30.bandwidth) == (164 * 1024, 24576 * 1024, 933e9)
    assert a30.memory_bytes == 24060 * 2**20
    assert (a30.max_blocks_per_sm, a30.max_threads_per_sm, a30.registers_per_sm) == (32, 2048, 65536)


@pytest.mark.parametrize(
    ("arch", "per_sm", "per_block", "threads", "blocks"),
    [(80, 164, 163, 2048, 32), (86, 100, 99, 1536, 16), (89, 100, 99, 1536, 24), (90, 228, 227, 2048, 32),
     (100, 228, 227, 2048, 32), (120, 100, 99, 1536, 24)],
)  # fmt: skip
def test_limits_follow_the_compute_capability(
    arch: int, per_sm: int, per_block: int, threads: int, blocks: int
) -> None:
    devices = [device for device in device_profiles.all_devices() if device.arch == arch]
    assert devices
    for device in devices:
        assert (device.shared_bytes_per_sm, device.shared_bytes_per_block) == (per_sm * 1024, per_block * 1024)
        assert (device.max_threads_per_sm, device.max_blocks_per_sm) == (threads, blocks)


@every_device
def test_a_device_answers_to_all_its_names(device: Device) -> None:
    for name in (device.name, device.full_name, *device.aliases):
        assert device_profiles.named(name) is device
        assert device_profiles.named(f" {name.upper()} ") is device


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A30", "a30"),
        ("NVIDIA A30", "a30"),
        ("A100", "a100"),
        ("A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("nvidia h100 80gb hbm3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("GeForce RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
    ],
)
def test_people_spell_devices_their_way(text: str, name: str) -> None:
    assert device_profiles.named(text).name == name


def test_no_spelling_means_two_devices() -> None:
    for device in device_profiles.all_devices():
        for name in (device.name, device.full_name, *device.aliases):
            assert device_profiles.named(name) is device, name


@pytest.mark.parametrize(
    "text", ["", "gpu", "mi300x", "A10G", "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB", "v100"]
)
def test_an_unknown_device_is_refused_with_the_whole_list(text: str) -> None:
    with pytest.raises(DeviceError) as caught:
        device_profiles.named(text)
    message = str(caught.value)
    assert repr(text) in message
    assert all(device.name in message for device in device_profiles.all_devices())
    assert "\n" not in message


@pytest.mark.parametrize(("text", "near"), [("rtx4080", "rtx4090"), ("h10O", "h100"), ("a30x", "a30")])
def test_an_unknown_device_is_answered_with_the_nearest(text: str, near: str) -> None:
    with pytest.raises(DeviceError, match=rf"did you mean [^?]*\b{near}\b[^?]*\?"):
        device_profiles.named(text)
