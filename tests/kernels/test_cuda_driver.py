"""CUDA's driver is told what cuda.h says, and its errors become sentences."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace
from typing import Any

import fake_cuda
import pytest
from fake_cuda import FakeCuda

from autoattn.codegen.precompiled import TensorMap
from autoattn.errors import CompileError
from autoattn.kernels import cuda_driver
from autoattn.kernels.cuda_driver import Launcher, MapEncoder

MAP = TensorMap(element_type=9, element_bytes=2, swizzle=3, box=(1, 1, 64, 32))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake_cuda.install(monkeypatch)


def launcher(**facts: Any) -> Launcher:
    defaults: dict[str, Any] = {
        "offsets": [0, 8], "size": 12, "warps": 4, "shared_bytes": 512, "dependent": False, "cooperative": False,
    }  # fmt: skip
    return Launcher.of("forward", 77, **defaults | facts)


def test_structures_have_the_size_of_cuda_h() -> None:
    # CUlaunchConfig: 7 unsigned, stream, attributes, count; CUlaunchAttribute: id, padding, 64 bytes.
    assert ctypes.sizeof(cuda_driver.LaunchConfig) == 56
    assert ctypes.sizeof(cuda_driver.LaunchAttribute) == 72


def test_a_function_with_little_shared_memory_is_loaded_as_it_is(driver: FakeCuda) -> None:
    assert cuda_driver.load_function(b"code", "forward", 48 * 1024, 232448) == 1001
    assert (driver.modules, driver.names, driver.attributes) == ([b"code"], [b"forward"], [])


def test_a_function_with_more_shared_memory_may_have_all_that_the_card_gives(driver: FakeCuda) -> None:
    cuda_driver.load_function(b"code", "forward", 48 * 1024 + 1, 232448)
    assert driver.attributes == [(8, 232448 - 16)]  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, less the static


def test_a_card_with_too_little_shared_memory_is_said(driver: FakeCuda) -> None:
    with pytest.raises(CompileError, match="programs of forward need 200000 bytes of shared memory, but those of the"):
        cuda_driver.load_function(b"code", "forward", 200000, 101376)
    assert not driver.modules


@pytest.mark.parametrize("step", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_code_that_the_driver_refuses_is_a_sentence(driver: FakeCuda, step: str) -> None:
    driver.errors[step] = 209
    with pytest.raises(CompileError, match="the driver must load the machine code of forward, got CUDA_ERROR_209"):
        cuda_driver.load_function(b"code", "forward", 100_000, 232448)


def test_a_missing_driver_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(CompileError, match=r"loaded by the CUDA driver, but libcuda.so.1: cannot open .*; install"):
        cuda_driver.library.__wrapped__()


def test_a_tensor_map_has_the_innermost_axis_first_and_steps_in_bytes(driver: FakeCuda) -> None:
    encoded = MapEncoder(MAP)(4096, (2, 3, 100, 64), (19200, 6400, 64, 1))
    assert encoded == b"\1" * 128
    assert driver.maps == [
        {
            "kind": 9, "address": 4096, "sizes": [64, 100, 3, 2], "steps": [128, 12800, 38400], "box": [32, 64, 1, 1],
            "ones": [1, 1, 1, 1], "rest": (0, 3, 2, 0), "aligned": True,
        }
    ]  # fmt: skip


def test_an_encoder_gives_each_tensor_a_map_of_its_own(driver: FakeCuda) -> None:
    encoder = MapEncoder(MAP)
    first = encoder(4096, (2, 3, 100, 64), (19200, 6400, 64, 1))
    second = encoder(8192, (1, 2**31, 7, 32), (2**40, 224, 32, 1))
    assert (first, second) == (b"\1" * 128, b"\2" * 128), "the first is not written over"
    assert driver.maps[1]["address"] == 8192
    assert (driver.maps[1]["sizes"], driver.maps[1]["steps"]) == ([32, 7, 2**31, 1], [64, 448, 2**41])


def test_a_tensor_that_no_map_can_hold_is_said(driver: FakeCuda) -> None:
    driver.errors["cuTensorMapEncodeTiled"] = 1
    with pytest.raises(RuntimeError, match=r"of shape \(2, 4\) and strides \(4, 1\) at 0x10 cannot be encoded: CUDA_"):
        MapEncoder(replace(MAP, box=(2, 4)))(16, (2, 4), (4, 1))


def test_a_launch_gives_each_parameter_by_its_address(driver: FakeCuda) -> None:
    driver.sizes = [8, 4]
    launcher()((3, 2, 1), 9, struct.Struct("<qi").pack_into, (-5, 7))
    (launch,) = driver.launches
    assert (launch.function, launch.grid, launch.threads, launch.shared_bytes, launch.stream) == (
        77, (3, 2, 1), 128, 512, 9,
    )  # fmt: skip
    assert launch.attributes == []
    assert driver.values == [[struct.pack("<q", -5), struct.pack("<i", 7)]]


@pytest.mark.parametrize(
    ("facts", "attributes"),
    [
        ({"dependent": True}, [(6, 1)]),  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        ({"cooperative": True}, [(2, 1)]),  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        ({"dependent": True, "cooperative": True}, [(6, 1), (2, 1)]),
    ],
)
def test_a_launch_has_the_attributes_of_its_function(
    driver: FakeCuda, facts: dict[str, bool], attributes: list[tuple[int, int]]
) -> None:
    launcher(**facts)((1, 1, 1), 0, struct.Struct("<qi").pack_into, (0, 0))
    assert driver.launches[0].attributes == attributes


def test_an_empty_grid_is_not_launched(driver: FakeCuda) -> None:
    launcher()((0, 1, 1), 0, struct.Struct("<qi").pack_into, (0, 0))
    assert not driver.launches


def test_a_refused_launch_raises(driver: FakeCuda) -> None:
    driver.errors["cuLaunchKernelEx"] = 1
    with pytest.raises(RuntimeError, match="the driver refused to launch forward: CUDA_ERROR_1"):
        launcher()((1, 1, 1), 0, struct.Struct("<qi").pack_into, (0, 0))


def test_a_launch_after_a_failed_one_runs(driver: FakeCuda) -> None:
    launch = launcher()
    with pytest.raises(struct.error):
        launch((1, 1, 1), 0, struct.Struct("<qi").pack_into, (0, 2**40))
    launch((1, 1, 1), 0, struct.Struct("<qi").pack_into, (0, 1))
    assert len(driver.launches) == 1
