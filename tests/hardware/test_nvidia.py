"""The card in this machine, told by a fake driver."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import samples
import torch
from fake_device import set_driver

from autoattn.core import device_profiles
from autoattn.core.paired_stats import Pulse
from autoattn.errors import DeviceError
from autoattn.hardware import nvidia


class NVMLError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """NVML, as far as it is asked."""

    NVML_CLOCK_SM = 1
    nvmlClocksThrottleReasonHwSlowdown = 8  # noqa: N815 - NVML's own names
    nvmlClocksThrottleReasonHwThermalSlowdown = 64  # noqa: N815
    nvmlClocksThrottleReasonSwPowerCap = 4  # noqa: N815
    nvmlClocksThrottleReasonSwThermalSlowdown = 32  # noqa: N815
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 128  # noqa: N815
    nvmlClocksThrottleReasonApplicationsClocksSetting = 2  # noqa: N815
    NVML_TEMPERATURE_GPU = 0
    NVMLError = NVMLError

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self.requested_uuid = uuid
        return uuid

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802
        return int(self.reasons)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        if self.clock is None:
            raise NVMLError
        return int(self.clock)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        if self.heat is None:
            raise NVMLError
        return int(self.heat)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.159.04"


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    nvidia.describe.cache_clear()
    yield
    nvidia.describe.cache_clear()


def plug_in(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    """Puts a card into the machine."""
    set_driver(monkeypatch, facts)


@pytest.fixture
def without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    set_driver(monkeypatch)


# --- which card -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_a_card")
def test_without_a_card_there_is_none() -> None:
    assert nvidia.present() is None


def test_a_known_card_is_its_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch)
    assert nvidia.present() == device_profiles.named("h200")


def test_what_the_driver_says_of_a_slice_wins_over_the_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, multi_processor_count=16, L2_cache_size=2**23, total_memory=2**34)
    card = nvidia.present()
    assert card is not None
    assert (card.name, card.sm_count, card.l2_bytes, card.memory_bytes) == ("h200", 16, 2**23, 2**34)
    assert card.fingerprint != samples.H200.fingerprint


def test_a_card_that_nobody_described_is_what_the_driver_says_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, name="NVIDIA Mystery 9000", major=12, minor=0)
    card = nvidia.present()
    assert card is not None
    assert (card.name, card.full_name, card.arch) == ("nvidia-mystery-9000", "NVIDIA Mystery 9000", 120)
    assert (card.sm_count, card.shared_bytes_per_block, card.peak_flops) == (132, 232448, {})
    assert card.memory_bytes == samples.H200.memory_bytes
    assert card.max_blocks_per_sm == 24  # of its architecture: the driver's properties lack it


def test_the_card_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch)
    nvidia.present(0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: pytest.fail("it was asked again"))
    assert nvidia.present(0) == nvidia.present()


# --- what a name means ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["auto", " AUTO ", "h200", "H200", "NVIDIA H200", "nvidia h200"])
def test_the_card_in_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    plug_in(monkeypatch)
    assert nvidia.resolve(text) == (samples.H200, True)


def test_another_card_than_the_one_in_the_machine_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch)
    assert nvidia.resolve("a30") == (samples.A30, False)


@pytest.mark.usefixtures("without_a_card")
@pytest.mark.parametrize("text", ["a30", "A30", "NVIDIA A30"])
def test_without_a_card_a_name_is_a_profile(text: str) -> None:
    assert nvidia.resolve(text) == (samples.A30, False)


def test_a_card_without_a_profile_answers_to_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, name="NVIDIA Mystery 9000")
    for text in ("auto", "nvidia-mystery-9000", "NVIDIA Mystery 9000"):
        device, here = nvidia.resolve(text)
        assert (device.full_name, here) == ("NVIDIA Mystery 9000", True)


@pytest.mark.usefixtures("without_a_card")
def test_auto_without_a_card_says_what_to_name() -> None:
    with pytest.raises(
        DeviceError, match=r"^--device auto needs an NVIDIA GPU in this machine, found none; name one of"
    ):
        nvidia.resolve("auto")


@pytest.mark.usefixtures("without_a_card")
def test_a_name_that_nobody_knows_is_refused() -> None:
    with pytest.raises(DeviceError, match="z9999"):
        nvidia.resolve("z9999")


# --- what it is doing -------------------------------------------------------------------------------------------------


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    plug_in(monkeypatch)
    fake = FakeNvml(reasons=0, clock=1755, heat=61)
    monkeypatch.setattr(nvidia, "load_nvml", lambda: fake)
    return fake


@pytest.mark.parametrize(("reasons", "slowed"), [(0, False), (4, False), (8, True), (64, True), (4 | 64, True)])
def test_a_slowdown_is_told_from_the_power_cap_of_normal_load(nvml: FakeNvml, reasons: int, slowed: bool) -> None:
    nvml.reasons = reasons
    pulse = nvidia.pulse(0)
    assert pulse is not None
    assert (pulse.clock_mhz, pulse.slowed, pulse.temperature_c) == (1755, slowed, 61)


def test_what_holds_the_clock_down_is_told_in_words(nvml: FakeNvml) -> None:
    nvml.reasons = 4 | 64 | 1  # 1 is idleness, which holds nothing down
    pulse = nvidia.pulse(0)
    assert pulse is not None
    assert pulse.reasons == ("power cap", "hardware thermal slowdown")


@pytest.mark.parametrize("uuid", ["1234", "GPU-1234"])
def test_the_card_is_the_one_that_cuda_means(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    plug_in(monkeypatch, uuid=uuid)
    nvidia.pulse(0)
    assert nvml.requested_uuid == "GPU-1234"


def test_a_card_that_tells_no_temperature_tells_its_clock(nvml: FakeNvml) -> None:
    nvml.heat = None
    assert nvidia.pulse(0) == Pulse(clock_mhz=1755, slowed=False)


def test_a_card_that_tells_no_clock_works_without_one(nvml: FakeNvml) -> None:
    nvml.clock = None
    assert nvidia.pulse(0) is None


def test_without_nvml_there_is_no_clock_and_no_driver_version(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch)
    monkeypatch.setattr(nvidia, "load_nvml", lambda: None)
    assert nvidia.pulse(0) is None
    assert nvidia.driver_version() is None


def test_the_driver_tells_its_version(nvml: FakeNvml) -> None:
    assert nvidia.driver_version() == "580.159.04"


# --- several cards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, ("0", "2")), ("", ("0", "2")), ("4,1, GPU-77", ("4", "GPU-77")), ("3,2,1,0", ("3", "1"))],
)
def test_only_cards_that_are_such_a_device_measure_for_it(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, names: tuple[str, ...]
) -> None:
    """Of three, the second one has fewer SMs."""
    set_driver(monkeypatch, *({"multi_processor_count": count} for count in (132, 66, 132)))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvidia.alike(samples.H200) == names
    assert nvidia.alike(samples.A30) == ()


@pytest.mark.usefixtures("without_a_card")
def test_without_cards_none_is_alike() -> None:
    assert nvidia.alike(samples.H200) == ()
