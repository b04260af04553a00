"""Loads a precompiled kernel onto a card and launches it by the CUDA driver, without Triton's compiler or launcher."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from autoattn import torch_private
from autoattn.codegen.precompiled import BEFORE, PART, Function, PrecompiledKernel
from autoattn.core.variant import Source
from autoattn.errors import CompileError
from autoattn.kernels import cuda_driver
from autoattn.kernels.compiler import Kernel, launch_facts, launch_hooks, make_current, of_parts
from autoattn.kernels.manifest import TMA
from autoattn.kernels.tma_descriptor import Descriptor

# Triton's type of an argument -> bytes of the parameter, and how `struct` writes it
PARAMETERS = {
    "i8": (1, "b"), "i16": (2, "h"), "i32": (4, "i"), "i64": (8, "q"), "u8": (1, "B"), "u16": (2, "H"),
    "u32": (4, "I"), "u64": (8, "Q"), "fp32": (4, "f"), "fp64": (8, "d"),
}  # fmt: skip
_POINTER = 8, "Q"
_HIDDEN = 2  # pointers behind the arguments: to scratch memory, and to a profiler's; 0 in ours


def parameters_of(function: Function) -> list[tuple[int, int, str]]:
    """(bytes, alignment, format of `struct`) of each parameter of the machine code, in its order.

    A TMA descriptor is followed by its shape and its strides, and two pointers to scratch memory end the list
    (Triton 3.6 to 3.9).
    """
    parameters = []
    for name, kind in function.arguments:
        if kind.startswith(TMA):
            rank = kind.split("[")[1].split("]")[0].count(",") + 1
            maps = [(cuda_driver.MAP_BYTES, cuda_driver.MAP_ALIGNMENT, f"{cuda_driver.MAP_BYTES}s")]
            parameters += maps + [(4, 4, "i")] * rank + [(8, 8, "q")] * rank
            continue
        size, code = _POINTER if kind.startswith("*") else PARAMETERS.get(kind, (0, ""))
        if not size:
            raise CompileError(f"the argument {name} of a precompiled kernel has the type {kind}, which none takes")
        parameters.append((size, size, code))
    return parameters + [(_POINTER[0], _POINTER[0], _POINTER[1])] * _HIDDEN


def packing_of(function: Function) -> tuple[struct.Struct, list[int]]:
    """What writes the values of a launch's parameters, each at a multiple of its alignment, and where each begins."""
    code, end, offsets = "<", 0, []
    for size, alignment, letter in parameters_of(function):
        gap = -end % alignment
        code += (f"{gap}x" if gap else "") + letter
        offsets.append(end + gap)
        end += gap + size
    return struct.Struct(code), offsets


class LoadedFunction:
    """A function on a card; `bound_launch` and `Kernel.launch` take it in the place of Triton's CompiledKernel."""

    listed = None  # as of `bound_launch`: a launch takes its arguments one by one

    def __init__(self, function: Function, handle: int, device: torch.device) -> None:
        packing, offsets = packing_of(function)
        self.facts, self.device = function, device
        self.parameters = tuple(name for name, _ in function.arguments)
        self._pack = packing.pack_into
        self._encoders = [
            cuda_driver.MapEncoder(function.tensor_maps[name])
            for name, kind in function.arguments
            if kind.startswith(TMA)
        ]
        self._launch = cuda_driver.Launcher.of(
            function.name,
            handle,
            offsets=offsets,
            size=packing.size,
            warps=function.warps,
            shared_bytes=function.shared_bytes,
            dependent=function.dependent,
            cooperative=function.cooperative,
        )

    def launch(self, x: int, y: int, z: int, stream: int, facts: Any, enter: Any, leave: Any, *values: object) -> None:
        """Launches on a stream; takes what a bound launch has, in its order.

        Args:
            facts: for Triton's launch hooks, as enter and leave.
            values: arguments, with descriptors as an encoded map, the shape and the strides.
        """
        if enter is not None:
            enter(facts)
        self._launch((x, y, z), stream, self._pack, (*values, 0, 0))
        if leave is not None:
            leave(facts)

    def settings(self, compiled: object) -> tuple[tuple[object, ...], tuple[object, ...]]:
        """What stands between the stream and the launch's metadata, and behind its hooks: nothing."""
        return (), ()

    def encoder(self, place: int, device: torch.device) -> cuda_driver.MapEncoder:
        """What encodes the descriptor at a place among them."""
        return self._encoders[place]

    def launch_metadata(self, grid: tuple[object, ...], stream: int, *values: object) -> Any:
        """What Triton's launch hooks get."""
        return launch_facts({"name": self.facts.name, "function": self._launch.function, "stream": stream})

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        """A launch on the current stream that takes tensors, descriptors and numbers."""

        def launched(*arguments: object) -> None:
            values: list[object] = []
            encoders = iter(self._encoders)
            for argument in arguments:
                if isinstance(argument, Descriptor):
                    encoded = next(encoders)(argument.address, argument.shape, argument.strides)
                    values += [encoded, *argument.shape, *argument.strides]
                else:
                    values.append(_number(argument))
            stream, (enter, leave) = torch_private.current_stream(self.device.index), launch_hooks()
            facts = self.launch_metadata(grid, stream) if enter or leave else None
            self.launch(*grid, stream, facts, enter, leave, *values)

        return launched


def _number(argument: object) -> object:
    """An argument as a parameter holds it: a tensor is its address, and one that is not there is 0."""
    if argument is None:
        return 0
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def load(precompiled: PrecompiledKernel, source: Source, device: torch.device) -> Kernel:
    """Loads the machine code onto a card.

    Args:
        source: the kernel's text, and what it was rendered for.
        device: a numbered CUDA device.

    Raises:
        CompileError: the machine code is for another architecture, does not fit the card, or the driver refused it.
    """
    facts, properties = precompiled.facts, torch.cuda.get_device_properties(device)
    arch = properties.major * 10 + properties.minor
    if facts.arch != arch:
        raise CompileError(
            f"machine code must be for the card's architecture, sm_{arch}, got a kernel {precompiled}; compile it anew"
        )
    module = host_side(precompiled)
    parts, before, main = [], None, None
    with torch.cuda.device(device):
        make_current(device)
        for function in facts.functions:
            handle = cuda_driver.load_function(
                precompiled.code[function.name],
                function.name,
                function.shared_bytes,
                properties.shared_memory_per_block_optin,
            )
            kernel = Kernel(
                source=source,
                module=module,
                compiled=LoadedFunction(function, handle, device),
                device=device,
                sm_count=properties.multi_processor_count,
                name=function.name if function.role == PART else "",
                precompiled=str(precompiled),
            )
            if function.role == PART:
                parts.append(kernel)
            elif function.role == BEFORE:
                before = kernel
            else:
                main = kernel
    return of_parts(parts) if main is None else replace(main, before=before)


def host_side(precompiled: PrecompiledKernel) -> ModuleType:
    """The module of what the kernel's text says of its launches."""
    module = ModuleType(f"autoattn_launch_{precompiled.facts.digest}")
    exec(compile(precompiled.launch_text, f"{module.__name__}.py", "exec"), module.__dict__)
    return module
