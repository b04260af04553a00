"""Precompiled kernels are loaded and launched with the parameters that their machine code takes."""

from __future__ import annotations

import struct
from typing import Any

import fake_cuda
import fake_device
import pytest
import torch
from fake_cuda import FakeCuda
from precompiled_kernels import PROBLEM, TRAITS, VARIANT, cubin, function, precompiled_kernel

from autoattn.codegen import render
from autoattn.codegen.precompiled import BEFORE, PART
from autoattn.errors import CompileError
from autoattn.kernels import bound_launch
from autoattn.kernels import precompiled_kernel as loading
from autoattn.kernels.compiler import Kernel
from autoattn.kernels.tma_descriptor import Descriptor

# A kernel's host side: what a launch takes, and its grid.
LAUNCH_TEXT = """
SIGNATURE = {'query': 'tensordesc<bf16[1, 64], layout>', 'output_ptr': '*bf16', 'stride_ob': 'i64', 'seq_q': 'i32',
             'scale': 'fp32'}
def grid(batch, heads_q, seq_q, sm_count):
    return (batch * heads_q,)
"""
SIZES = [128, 4, 4, 8, 8, 8, 8, 4, 4, 8, 8]  # of the parameters: a map, its shape and strides, ..., two of Triton's own
QUERY = Descriptor(address=4096, shape=(100, 64), strides=(64, 1))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    library = fake_cuda.install(monkeypatch)
    fake_device.set_driver(monkeypatch, {})
    fake_device.set_context(monkeypatch)
    fake_device.set_streams(monkeypatch, lambda index: 5)
    monkeypatch.setattr(bound_launch, "filled_maps", [])
    return library


def load(**facts: Any) -> Kernel:
    kernel = precompiled_kernel(launch_text=LAUNCH_TEXT, **facts)
    return loading.load(kernel, render.render(PROBLEM, VARIANT, TRAITS), torch.device("cuda", 0))


def expected(address: int, map_byte: int, seq_q: int = 100) -> list[bytes]:
    """The bytes of the parameters of a launch on a query of [seq_q, 64]."""
    return [
        bytes([map_byte]) * 128, *(struct.pack("<i", size) for size in (seq_q, 64)),
        *(struct.pack("<q", step) for step in (64, 1)), struct.pack("<Q", address), struct.pack("<q", 6400),
        struct.pack("<i", 7), struct.pack("<f", 0.125), bytes(8), bytes(8),
    ]  # fmt: skip


def test_a_kernel_is_loaded_with_its_host_side(driver: FakeCuda) -> None:
    kernel = load()
    assert driver.modules == [cubin()]
    assert driver.names == [b"forward"]
    assert list(kernel.parameters) == ["query", "output_ptr", "stride_ob", "seq_q", "scale"]
    assert kernel.manifest.grid is not None
    assert kernel.manifest.grid(2, 3, 100, kernel.sm_count) == (6,)
    assert kernel.precompiled == "precompiled with Triton 3.6.0 for sm_90"


def test_a_launch_gives_what_the_machine_code_takes(driver: FakeCuda) -> None:
    driver.sizes = SIZES
    output = torch.zeros(4, dtype=torch.bfloat16)
    arguments = {"query": QUERY, "output_ptr": output, "stride_ob": 6400, "seq_q": 7, "scale": 0.125}
    load().launch((6,), arguments)
    (launch,) = driver.launches
    assert (launch.grid, launch.stream, launch.threads) == ((6, 1, 1), 5, 128)
    assert driver.values == [expected(output.data_ptr(), 1)]


def test_a_bound_launch_gives_the_same(driver: FakeCuda) -> None:
    driver.sizes = SIZES
    arguments = {"query": QUERY, "output_ptr": None, "stride_ob": 6400, "seq_q": 7, "scale": 0.125}
    bound = bound_launch.bind(load(), (6,), arguments, ("query_ptr", "output_ptr"), None, ("seq_q",))
    bound((4096, 512))
    bound((4096, 1024))
    assert driver.values == [expected(512, 1), expected(1024, 1)]  # the map of one address is encoded once
    bound_launch.resize(bound, (9,), (7,), {"query": ((300, 64), (64, 1))}, 0)((4096, 512))
    assert driver.values[2] == expected(512, 2, seq_q=300)
    assert driver.launches[2].grid == (9, 1, 1)


def test_a_pointer_that_is_not_there_is_zero(driver: FakeCuda) -> None:
    driver.sizes = SIZES
    load().launch((6,), {"query": QUERY, "output_ptr": None, "stride_ob": 6400, "seq_q": 7, "scale": 0.125})
    assert driver.values == [expected(0, 1)]


def test_launch_hooks_of_triton_are_called(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    names = []
    hook = lambda facts: names.append(facts.get()["name"])  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", hook)
    arguments = {"query": QUERY, "output_ptr": None, "stride_ob": 6400, "seq_q": 7, "scale": 0.125}
    bound_launch.bind(load(), (6,), arguments, ("query_ptr", "output_ptr"), None)((4096, 512))
    assert names == ["forward", "forward"]
    load().launch((6,), arguments)
    assert names == ["forward"] * 4


def test_parts_are_launched_one_by_one(driver: FakeCuda) -> None:
    code = cubin()
    rows = function(code, name="rows", role=PART, arguments=(("output_ptr", "*bf16"),), tensor_maps={})
    keys = function(code, name="keys", role=PART, arguments=(("seq_q", "i32"),), tensor_maps={}, dependent=True)
    kernel = precompiled_kernel(launch_text="PARTS = {'rows': {}, 'keys': {}}\n", functions=(rows, keys))
    object.__setattr__(kernel, "code", {"rows": code, "keys": code})
    loaded = loading.load(kernel, render.render(PROBLEM, VARIANT, TRAITS), torch.device("cuda", 0))
    assert loaded.compiled is None
    assert [(part.name, list(part.parameters)) for part in loaded.parts] == [
        ("rows", ["output_ptr"]),
        ("keys", ["seq_q"]),
    ]


def test_what_runs_before_is_kept_apart(driver: FakeCuda) -> None:
    code = cubin()
    before = function(code, name="forward_before", role=BEFORE, arguments=(("seq_q", "i32"),), tensor_maps={})
    kernel = precompiled_kernel(launch_text=LAUNCH_TEXT, functions=(function(code), before))
    object.__setattr__(kernel, "code", {"forward": code, "forward_before": code})
    loaded = loading.load(kernel, render.render(PROBLEM, VARIANT, TRAITS), torch.device("cuda", 0))
    assert loaded.before is not None
    assert list(loaded.before.parameters) == ["seq_q"]


def test_machine_code_for_another_card_is_refused(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_device.set_driver(monkeypatch, {"major": 8, "minor": 0})
    words = "must be for the card's architecture, sm_80, got a kernel precompiled with Triton 3.6.0 for sm_90"
    with pytest.raises(CompileError, match=words):
        load()
    assert not driver.modules


def test_types_that_no_parameter_has_are_refused() -> None:
    with pytest.raises(CompileError, match="argument gate of a precompiled kernel has the type fp12, which none takes"):
        loading.parameters_of(function(arguments=(("gate", "fp12"),), tensor_maps={}))


def test_each_value_begins_at_a_multiple_of_its_alignment() -> None:
    arguments = (("seq_q", "i32"), ("query", "tensordesc<bf16[1, 64]>"), ("scale", "fp32"), ("stride", "i64"))
    packing, offsets = loading.packing_of(function(arguments=arguments))
    parameters = loading.parameters_of(function(arguments=arguments))
    assert all(offset % alignment == 0 for offset, (_, alignment, _) in zip(offsets, parameters, strict=True))
    assert offsets[:2] == [0, 64]
    assert packing.size == offsets[-1] + 8
