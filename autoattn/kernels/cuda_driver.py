"""CUDA's driver library: loads machine code, launches it, encodes TMA descriptors; the only module that calls it."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from autoattn.codegen.precompiled import TensorMap
from autoattn.errors import CompileError

WARP = 32  # threads
# Values of cuda.h's enumerations
_JIT_INPUT_PTX = 1
_PREFER_SHARED = 1
_STATIC_SHARED_BYTES, _MAX_DYNAMIC_SHARED_BYTES = 1, 8  # CU_FUNC_ATTRIBUTE_...
_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # CU_LAUNCH_ATTRIBUTE_...
_L2_PROMOTION_128B = 2
WITHOUT_ASKING = 48 * 1024  # bytes of dynamic shared memory that every function may use
MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of a CUtensorMap


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and 64 bytes for its value behind it."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"grid_{axis}", ctypes.c_uint) for axis in "xyz"),
        *((f"block_{axis}", ctypes.c_uint) for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def library() -> Any:
    """The driver library.

    Raises:
        CompileError: it is not installed.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CompileError(f"machine code is loaded by the CUDA driver, but {error}; install NVIDIA's driver") from None


def error_name(error: int) -> str:
    """The name of an error's number, as CUDA_ERROR_INVALID_IMAGE."""
    name = ctypes.c_char_p()
    library().cuGetErrorName(error, ctypes.byref(name))
    return name.value.decode() if name.value else f"CUDA error {error}"


def load_function(code: bytes, name: str, shared_bytes: int, max_shared_bytes: int) -> int:
    """The handle of a function of a cubin, loaded into the current context. It stays there until the process ends.

    Args:
        shared_bytes: dynamic shared memory that its programs use.
        max_shared_bytes: what a program of the card may have at most.

    Raises:
        CompileError: the driver refused the code, or the card has too little shared memory.
    """
    if shared_bytes > max_shared_bytes:
        raise CompileError(
            f"programs of {name} need {shared_bytes} bytes of shared memory, but those of the card may have "
            f"{max_shared_bytes}"
        )
    driver, module, function, static = library(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    steps: list[Callable[[], int]] = [
        lambda: driver.cuModuleLoadData(ctypes.byref(module), code),
        lambda: driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
    ]
    if shared_bytes > WITHOUT_ASKING:
        steps += [
            lambda: driver.cuFuncSetCacheConfig(function, _PREFER_SHARED),
            lambda: driver.cuFuncGetAttribute(ctypes.byref(static), _STATIC_SHARED_BYTES, function),
            lambda: driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_BYTES, max_shared_bytes - static.value),
        ]
    for step in steps:
        if error := step():
            raise CompileError(f"the driver must load the machine code of {name}, got {error_name(error)}")
    assert function.value is not None
    return function.value


def link(ptx: str) -> bytes:
    """The cubin that the driver makes of a PTX text for the current context's card.

    Raises:
        CompileError: the driver refused; it says why only in its number of the error.
    """
    driver = library()
    linker, cubin, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    text = ptx.encode() + b"\0"
    steps: list[Callable[[], int]] = [
        lambda: driver.cuLinkCreate_v2(0, None, None, ctypes.byref(linker)),
        lambda: driver.cuLinkAddData_v2(linker, _JIT_INPUT_PTX, text, ctypes.c_size_t(len(text)), b"", 0, None, None),
        lambda: driver.cuLinkComplete(linker, ctypes.byref(cubin), ctypes.byref(size)),
    ]
    try:
        for step in steps:
            if error := step():
                raise CompileError(f"the driver must translate older PTX, got CUDA error {error}; update the driver")
        return ctypes.string_at(cubin, size.value)
    finally:
        if linker:
            driver.cuLinkDestroy(linker)


class MapEncoder:
    """Encodes TMA descriptors of one kind of box.

    What the driver reads and writes lies in memory of the encoder's own, under a lock, and is described to ctypes once:
    each encoding fills in numbers alone.
    """

    def __init__(self, tensor_map: TensorMap) -> None:
        rank = len(tensor_map.box)
        self._element_bytes = tensor_map.element_bytes
        self._lock = threading.Lock()
        numbers = bytearray(8 * 2 * rank)
        self._fill = partial(struct.Struct(f"<{2 * rank - 1}Q").pack_into, numbers, 0)
        large, small = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        sizes, steps = large.from_buffer(numbers), large.from_buffer(numbers, 8 * rank)
        room = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        begin = ctypes.addressof(room) + -ctypes.addressof(room) % MAP_ALIGNMENT
        self._map, self._address = (ctypes.c_char * MAP_BYTES).from_address(begin), ctypes.c_void_p()
        self._room = room  # lives as long as the map in it
        self._encode = partial(
            library().cuTensorMapEncodeTiled, ctypes.c_void_p(begin), tensor_map.element_type, rank, self._address,
            sizes, steps, small(*reversed(tensor_map.box)), small(*[1] * rank), 0, tensor_map.swizzle,
            _L2_PROMOTION_128B, 0,
        )  # fmt: skip

    def __call__(self, address: int, shape: Sequence[int], strides: Sequence[int]) -> bytes:
        """The CUtensorMap of a tensor; reads beyond its end give zeros.

        Args:
            address: of the first element, a multiple of 16.
            shape: elements of each axis, the last axis last.
            strides: elements between neighbours of each axis; that of the last is 1.

        Raises:
            RuntimeError: there is no map of such a tensor.
        """
        size = self._element_bytes
        with self._lock:
            # The driver takes the innermost axis first, and steps in bytes without that of this axis.
            self._fill(*shape[::-1], *[size * step for step in strides[-2::-1]])
            self._address.value = address
            error = self._encode()
            encoded = self._map.raw
        if error:
            raise RuntimeError(
                f"a TMA descriptor of a tensor of shape {tuple(shape)} and strides {tuple(strides)} at {address:#x} "
                f"cannot be encoded: {error_name(error)}"
            )
        return encoded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launcher:
    """Launches one function.

    What the driver reads lies in memory of the launcher's own, under a lock: threads launch one after the other. Each
    parameter is given by its address, since code for Hopper aligns them to addresses that only the driver knows.
    """

    name: str
    function: int
    values: Any  # memory for the values of a launch's parameters
    parameters: Any  # the address of each
    config: LaunchConfig
    config_address: Any
    attributes: Any  # memory that `config` points into
    lock: threading.Lock
    call: Callable[..., int]  # cuLaunchKernelEx

    @classmethod
    def of(
        cls,
        name: str,
        function: int,
        *,
        offsets: Sequence[int],
        size: int,
        warps: int,
        shared_bytes: int,
        dependent: bool,
        cooperative: bool,
    ) -> Launcher:
        """A launcher of a loaded function.

        Args:
            offsets: of the parameters' values in memory, in bytes.
            size: bytes of them all.
        """
        values = ctypes.create_string_buffer(size)
        begin = ctypes.addressof(values)
        wanted = ((_PROGRAMMATIC_STREAM_SERIALIZATION, dependent), (_COOPERATIVE, cooperative))
        ids = [number for number, is_wanted in wanted if is_wanted]
        attributes = (LaunchAttribute * max(1, len(ids)))(*(LaunchAttribute(id=number, value=1) for number in ids))
        config = LaunchConfig(
            block_x=WARP * warps, block_y=1, block_z=1, shared_bytes=shared_bytes, attribute_count=len(ids),
            attributes=ctypes.cast(attributes, ctypes.POINTER(LaunchAttribute)),
        )  # fmt: skip
        return cls(
            name=name,
            function=function,
            values=values,
            parameters=(ctypes.c_void_p * len(offsets))(*(begin + offset for offset in offsets)),
            config=config,
            config_address=ctypes.byref(config),
            attributes=attributes,
            lock=threading.Lock(),
            call=library().cuLaunchKernelEx,
        )

    def __call__(
        self, grid: tuple[int, int, int], stream: int, pack: Callable[..., None], values: Sequence[object]
    ) -> None:
        """Launches, unless the grid is empty.

        Args:
            stream: handle of a stream of the current context.
            pack: writes the values, as `struct.Struct.pack_into` does.

        Raises:
            RuntimeError: the driver refused the launch.
        """
        if 0 in grid:
            return
        config = self.config
        with self.lock:
            pack(self.values, 0, *values)
            config.grid_x, config.grid_y, config.grid_z = grid
            config.stream = stream
            error = self.call(self.config_address, ctypes.c_void_p(self.function), self.parameters, None)
        if error:
            raise RuntimeError(f"the driver refused to launch {self.name}: {error_name(error)}")
