"""What architectures can do: each its own, whatever the one before it had."""

from __future__ import annotations

import dataclasses
import re

import pytest
from checkout_paths import CHECKOUT
from samples import A30, H200

from autoattn.core import device, device_profiles
from autoattn.core.device import Backend, Capabilities, MatrixUnit, capabilities_of

MMA, WGMMA, TCGEN05 = MatrixUnit


@pytest.mark.parametrize(
    ("arch", "unit", "tma", "float8"),
    [
        (80, MMA, False, False), (86, MMA, False, False), (89, MMA, False, True), (90, WGMMA, True, True),
        (100, TCGEN05, True, True), (103, TCGEN05, True, True), (120, MMA, True, True), (121, MMA, True, True),
    ],
)  # fmt: skip
def test_an_architecture_has_its_own_units(arch: int, unit: MatrixUnit, tma: bool, float8: bool) -> None:
    capabilities = capabilities_of(arch)
    assert (capabilities.matrix_unit, capabilities.tma, capabilities.float8_products) == (unit, tma, float8)
    assert (capabilities.backend, capabilities.warp_size) == (Backend.CUDA, 32)


def test_a_newer_architecture_inherits_nothing() -> None:
    assert [arch for arch in device.ARCHITECTURES if capabilities_of(arch).matrix_unit is WGMMA] == [90]
    unknown = capabilities_of(999)
    assert (unknown.matrix_unit, unknown.tma, unknown.float8_products) == (MMA, False, False)
    limits = [
        field.name for field in dataclasses.fields(Capabilities) if field.name.endswith(("_per_sm", "_per_block"))
    ]
    assert len(limits) == 4
    for known in device.ARCHITECTURES.values():
        assert all(getattr(unknown, name) <= getattr(known, name) for name in limits)


def test_sm_120_has_the_shared_memory_of_ada() -> None:
    assert capabilities_of(120).shared_bytes_per_block == capabilities_of(89).shared_bytes_per_block == 99 * 1024


@pytest.mark.parametrize("profile", device_profiles.all_devices(), ids=lambda profile: profile.name)
def test_a_profiles_limits_are_its_architectures(profile: device.Device) -> None:
    assert profile.arch in device.ARCHITECTURES
    for name in ("shared_bytes_per_sm", "shared_bytes_per_block", "max_threads_per_sm", "max_blocks_per_sm"):
        assert getattr(profile, name) == getattr(profile.capabilities, name)


def test_a_device_has_what_its_architecture_has() -> None:
    assert (A30.capabilities.matrix_unit, H200.capabilities.matrix_unit) == (MMA, WGMMA)
    assert (A30.capabilities.float32_lanes, H200.capabilities.float32_lanes) == (16, 32)


def test_the_page_of_devices_has_the_whole_table() -> None:
    page = (CHECKOUT / "docs" / "devices.md").read_text(encoding="utf-8").partition("## What an architecture can do")[2]
    rows = re.findall(
        r"^\| (sm_[^|]*) \| (\S+) \| (yes|no) \| (yes|no) \| (\d+), (\d+) KiB \| (\d+), (\d+) \|$", page, re.M
    )
    table = {int(arch): row for names, *row in rows for arch in re.findall(r"sm_(\d+)", names)}
    words = {MMA: "mma.sync", WGMMA: "wgmma", TCGEN05: "tcgen05"}
    assert table == {
        arch: [
            *(
                words[capabilities.matrix_unit],
                "yes" if capabilities.tma else "no",
                "yes" if capabilities.float8_products else "no",
            ),
            *(str(size // 1024) for size in (capabilities.shared_bytes_per_sm, capabilities.shared_bytes_per_block)),
            *(str(most) for most in (capabilities.max_threads_per_sm, capabilities.max_blocks_per_sm)),
        ]
        for arch, capabilities in device.ARCHITECTURES.items()
    }
