"""Loads a rendered Gluon kernel, unchanged, with the interpreter's names in place of Triton's, and launches it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from autoattn.errors import InterpretationError, SynchronizationError
from autoattn.kernels.gluon_interpreter import scheduler
from autoattn.kernels.gluon_interpreter.global_memory import GlobalMemory
from autoattn.kernels.gluon_interpreter.language import BUILTINS, JitFunction
from autoattn.kernels.gluon_interpreter.scheduler import Partition, Program
from autoattn.kernels.gluon_interpreter.tensors import Tensor, to_tensor
from autoattn.kernels.gluon_interpreter.tma import TensorDescriptor

_NUMBERS = {"i32": torch.int32, "i64": torch.int64, "fp32": torch.float32, "fp64": torch.float64}
_ELEMENTS = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp8e4nv": torch.float8_e4m3fn,
}


class InterpretedModule(ModuleType):
    """A rendered kernel whose functions the interpreter runs."""

    launches = 0  # so far: each has the partitions take turns in another order


def load_module(name: str, path: str, text: str) -> InterpretedModule:
    """Runs the text of a rendered kernel; `linecache` must hold it under its path."""
    module = InterpretedModule(name)
    module.__dict__.update(__file__=path, __builtins__=BUILTINS)
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def launch(module: InterpretedModule, name: str, grid: tuple[int, ...], arguments: Mapping[str, object]) -> None:
    """Runs the programs of a grid one after the other.

    Args:
        arguments: by their names in the SIGNATURE; all memory that the kernel may touch is that of tensors among them.

    Raises:
        SynchronizationError: the kernel deadlocks, misses a barrier or touches memory that is not its own.
        InterpretationError: the interpreter does not know what the kernel says.
    """
    function: JitFunction = getattr(module, name)
    memory, seed = GlobalMemory(arguments), module.launches
    module.launches += 1
    values = [_argument(module, memory, each, arguments[each]) for each in function.arg_names]
    options = getattr(module, "PARTS", {}).get(name) or module.OPTIONS
    count = grid[0]
    for number in range(count):
        program = Program(number=number, count=count, memory=memory, seed=seed)
        whole = Partition(name=name, warps=options["num_warps"], program=program)
        with scheduler.acting_as(whole):
            try:
                function(*values)
            except (SynchronizationError, InterpretationError):
                raise
            except Exception as error:
                words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                raise InterpretationError(f"the interpreter cannot run {name}: {words}") from error
            program.end(whole)


def _argument(module: InterpretedModule, memory: GlobalMemory, name: str, value: Any) -> Any:
    """What a kernel gets for an argument of its SIGNATURE."""
    kind = module.SIGNATURE[name]
    if kind.startswith("tensordesc"):
        block, layout = module.DESCRIPTORS[name]
        match = re.match(r"tensordesc<(\w+)\[", kind)
        assert match is not None
        view = memory.box(value.address, value.shape, value.strides, _ELEMENTS[match[1]])
        return TensorDescriptor(name=name, tensor=view, block=tuple(block), layout=layout)
    if isinstance(value, torch.Tensor):
        return Tensor(torch.tensor(value.data_ptr(), dtype=torch.int64), value.dtype)
    return None if value is None else to_tensor(value, _NUMBERS[kind])
