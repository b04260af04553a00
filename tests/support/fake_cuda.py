"""A fake CUDA driver library: notes what is loaded, encoded and launched, and answers as libcuda does."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest

from autoattn.kernels import cuda_driver


@dataclass
class Launch:
    """A launch as the driver got it."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    stream: int
    attributes: list[tuple[int, int]]
    parameters: list[int]  # addresses of values


@dataclass
class FakeCuda:
    """In place of libcuda; a call whose name is in `errors` gives that number."""

    sizes: list[int] = field(default_factory=list)  # of the parameters' values, to copy them
    errors: dict[str, int] = field(default_factory=dict)
    modules: list[bytes] = field(default_factory=list)
    attributes: list[tuple[int, int]] = field(default_factory=list)  # that were set of functions
    maps: list[dict[str, Any]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    values: list[list[bytes]] = field(default_factory=list)  # of each launch's parameters
    names: list[bytes] = field(default_factory=list)

    def cuGetErrorName(self, error: int, name: Any) -> int:  # noqa: N802
        name._obj.value = f"CUDA_ERROR_{error}".encode()
        return 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:  # noqa: N802
        self.modules.append(code)
        module._obj.value = len(self.modules)
        return self.errors.get("cuModuleLoadData", 0)

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        self.names.append(name)
        function._obj.value = 1000 + len(self.names)
        return self.errors.get("cuModuleGetFunction", 0)

    def cuFuncSetCacheConfig(self, function: Any, config: int) -> int:  # noqa: N802
        return self.errors.get("cuFuncSetCacheConfig", 0)

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: Any) -> int:  # noqa: N802
        value._obj.value = 16
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        self.attributes.append((attribute, value))
        return self.errors.get("cuFuncSetAttribute", 0)

    def cuTensorMapEncodeTiled(  # noqa: N802
        self, room: Any, kind: int, rank: int, address: Any, sizes: Any, steps: Any, box: Any, ones: Any,
        interleave: int, swizzle: int, promotion: int, fill: int,
    ) -> int:  # fmt: skip
        self.maps.append(
            {
                "kind": kind, "address": address.value, "sizes": list(sizes), "steps": list(steps)[: rank - 1],
                "box": list(box), "ones": list(ones), "rest": (interleave, swizzle, promotion, fill),
                "aligned": room.value % 64 == 0,
            }
        )  # fmt: skip
        ctypes.memset(room.value, len(self.maps), 128)
        return self.errors.get("cuTensorMapEncodeTiled", 0)

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:  # noqa: N802
        launch = config._obj
        assert extra is None
        addresses = list(parameters)
        self.launches.append(
            Launch(
                function=function.value, grid=(launch.grid_x, launch.grid_y, launch.grid_z), threads=launch.block_x,
                shared_bytes=launch.shared_bytes, stream=launch.stream or 0, parameters=addresses,
                attributes=[(launch.attributes[place].id, launch.attributes[place].value)
                            for place in range(launch.attribute_count)],
            )
        )  # fmt: skip
        if self.sizes:
            pairs = zip(addresses, self.sizes, strict=True)
            self.values.append([ctypes.string_at(address, size) for address, size in pairs])
        return self.errors.get("cuLaunchKernelEx", 0)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Puts one in the place of the driver library."""
    library = FakeCuda()
    monkeypatch.setattr(cuda_driver, "library", lambda: library)
    return library
