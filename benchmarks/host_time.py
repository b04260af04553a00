"""Measures what the host does for calls of new lengths, phase by phase, with a GPU or without one.

python benchmarks/host_time.py [--row TEXT] [--lengths 32] [--warm]

The programs are those of dynamic.py. Where there is a GPU, calls run on it, each once the one before it is done. Where
there is none, calls are planned, bound and launched as on an H200, on tensors of the CPU whose content nobody reads; in
place of the driver stand C functions that do nothing. So times of both launchers count, that of precompiled kernels and
Triton's own, but not the driver's. Each call then finds the CPU's caches emptied, as one does that waited for the GPU;
with --warm it does not. Phases are measured in calls of their own: a phase holds those indented under it, and each
costs about a microsecond more than it would unseen.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dynamic
import pytest
import torch
import triton
from triton.backends.nvidia import driver

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

import fake_device
from fake_device import CUDA

from autoattn.core import device_profiles
from autoattn.core.variant import Source
from autoattn.kernels import backward, bound_launch, compiler, cuda_driver, precompiled_kernel, zeroed_scratch
from autoattn.kernels.compiler import Kernel
from autoattn.kernels.manifest import TMA
from autoattn.runtime import call, prepared_call, resized_call, training_call
from autoattn.runtime.plan import planner

H200 = device_profiles.named("h200")
EMPTIED = 8 << 20  # bytes that are written between calls, so that the CPU's caches hold nothing of the last one
WARM = 8  # calls of other lengths before the clock starts
DESCRIPTOR = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64], "fp4_padded": False}
# (module or class, function, name in the table)
PHASES = (
    (resized_call, "take_apart", "take apart"),
    (resized_call, "prepare", "prepare"),
    (planner, "replan", "  choose for a new class"),
    (prepared_call, "resize", "  resize"),
    (call, "answer", "plan and run"),
    (training_call.TrainingCall, "differentiate", "backward pass"),
    (training_call.TrainingCall, "_bind", "  resize backward launches"),
    (bound_launch.Bound, "__call__", "launch"),
    (bound_launch.Maps, "__missing__", "  encode a descriptor"),
)


class Driver:
    """In place of libcuda, and of what Triton asks of it: C functions that give 0 whatever they get."""

    def __init__(self) -> None:
        nothing = ctypes.CDLL(None).pthread_getconcurrency
        self.cuLaunchKernelEx = self.cuTensorMapEncodeTiled = self.cuTensorMapReplaceAddress = nothing
        self.cuFuncSetCacheConfig = self.cuFuncGetAttribute = self.cuFuncSetAttribute = lambda *given: 0
        self.utils = SimpleNamespace(fill_tma_descriptor="".format, fill_tma_descriptor_tiled="".format)

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:  # noqa: N802
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        function._obj.value = 1
        return 0

    def get_current_stream(self, index: int) -> int:
        return 0


class Compiled:
    """In place of Triton's CompiledKernel: its launcher passes on what Triton's own does."""

    function, packed_metadata = 1, ()

    def __init__(self, signature: dict[str, str]) -> None:
        boxes = sum(kind.startswith(TMA) for kind in signature.values())
        nothing: Any = "".format  # a C function that takes anything
        self.run = SimpleNamespace(
            launch=driver.wrap_handle_tensordesc(
                nothing, dict(enumerate(signature.values())), [{**DESCRIPTOR} for _ in range(boxes)]
            ),
            global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=False,
            arg_annotations=None, kernel_signature=None,
        )  # fmt: skip

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given: None


def load(source: Source, device: torch.device) -> Kernel:
    """A kernel that is compiled in no time."""
    module: Any = compiler.load_module(source)

    def ready(name: str, part: str = "") -> Kernel:
        signature = {argument: module.SIGNATURE[argument] for argument in getattr(module, name).arg_names}
        return Kernel(
            source=source, module=module, compiled=Compiled(signature), device=CUDA, sm_count=H200.sm_count, name=part
        )

    whole = Kernel(source=source, module=module, compiled=None, device=CUDA, sm_count=H200.sm_count)
    if whole.manifest.parts:
        return compiler.of_parts([ready(name, name) for name in whole.manifest.parts])
    return ready(source.name)


@contextmanager
def fake_card() -> Iterator[None]:
    """As if an H200 were here, with the cache and the machine code that are shipped."""
    patch, library, may_bind, loaded = pytest.MonkeyPatch(), Driver(), backward.may_bind, precompiled_kernel.load
    patch.setattr(cuda_driver, "library", lambda: library)
    patch.setattr(triton.runtime.driver, "_active", library)
    patch.setattr(precompiled_kernel, "load", lambda kernel, source, device: loaded(kernel, source, CUDA))
    fake_device.set_driver(patch, {})
    fake_device.set_device(patch, H200)
    fake_device.set_context(patch)
    fake_device.set_streams(patch, library.get_current_stream)
    patch.setattr(planner, "why_not_on", lambda device: None)
    patch.setattr(compiler, "load", load)
    patch.setattr(backward, "may_bind", lambda problem, query: may_bind(problem, SimpleNamespace(is_cuda=True)))
    patch.setattr(zeroed_scratch, "new_zeros", lambda size, index: torch.zeros(size, dtype=torch.int32))
    patch.setattr(zeroed_scratch, "new_zeros_on", lambda size, index, stream: torch.zeros(size, dtype=torch.int32))
    patch.setattr(zeroed_scratch, "settle", lambda index: None)
    patch.setattr(dynamic, "DEVICE", torch.device("cpu"))
    patch.setattr(dynamic, "tensor", tensor)
    try:
        yield
    finally:
        patch.undo()


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, learns: bool = False) -> torch.Tensor:
    """In place of random numbers: memory that nobody touches."""
    return torch.empty(shape, dtype=dtype, requires_grad=learns)


@contextmanager
def phases(times: dict[str, list[float]]) -> Iterator[None]:
    """Notes the microseconds of each phase."""

    def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(*given: Any, **words: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return function(*given, **words)
            finally:
                times[name].append((time.perf_counter_ns() - begin) / 1e3)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for owner, function, name in PHASES:
            patch.setattr(owner, function, timed(getattr(owner, function), name))
        yield


class Program:
    """A row of dynamic.py: all its lengths as new ones, then all again."""

    def __init__(self, row: dynamic.Row, count: int, *, warm: bool) -> None:
        self.row, self.warm = row, warm
        self.lengths = dynamic.draw_lengths(row, count + WARM)
        self.room = torch.zeros(EMPTIED // 8, dtype=torch.int64)

    def times(self, spent: dict[str, list[float]]) -> tuple[list[float], list[float]]:
        """Microseconds of each new length, and of each again; what `spent` gathers is of the new ones."""
        fake_device.forget()
        prepare = self.row.contestants()["autoattn"]
        for length in self.lengths[:WARM]:
            self.timed(prepare(length))
        spent.clear()
        new = [self.timed(prepare(length)) for length in self.lengths[WARM:]]
        kept = {name: list(times) for name, times in spent.items()}
        for length in self.lengths[WARM:]:  # memory may lie elsewhere, so that its descriptors are new
            self.timed(prepare(length))
        again = [self.timed(prepare(length)) for length in self.lengths[WARM:]]
        spent.clear()
        spent.update(kept)
        return new, again

    def timed(self, run: Callable[[], object]) -> float:
        if torch.cuda.is_initialized():
            return dynamic.timed(run)[0]
        if not self.warm:
            self.room.add_(1)
        begin = time.perf_counter_ns()
        output = run()
        end = time.perf_counter_ns()
        del output
        return (end - begin) / 1e3


def table(count: int, only: str, *, warm: bool) -> Iterator[str]:
    """Lines of markdown: of each program the whole time, and its phases with how often each occurs in a call."""
    yield "| a program | new length: host us | the slowest | again | more |"
    yield "|---|--:|--:|--:|--:|"
    for row in dynamic.ROWS:
        if only not in row.name:
            continue
        program, spent = Program(row, count, warm=warm), defaultdict[str, list[float]](list)
        new, again = program.times(spent)
        first, second = statistics.median(new), statistics.median(again)
        yield f"| {row.name} | {first:.0f} | {max(new):.0f} | {second:.0f} | {first - second:.0f} |"
        with phases(spent):
            program.times(spent)
        for _, _, name in PHASES:
            if times := spent.get(name):
                often = f"{len(times) / count:.2g} x"
                label = "&nbsp; " + name.replace("  ", "&nbsp; ")
                yield f"| {label} | {often} {statistics.median(times):.1f} | {max(times):.0f} | | |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Times the host's part of calls of new lengths.")
    parser.add_argument("--row", default="", help="only programs whose name holds this")
    parser.add_argument("--lengths", type=int, default=32, help="new lengths of each program")
    parser.add_argument("--warm", action="store_true", help="without a GPU, do not empty the CPU's caches")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with nullcontext() if torch.cuda.is_available() else fake_card():
        for line in table(options.lengths, options.row, warm=options.warm):
            print(line, flush=True)


if __name__ == "__main__":
    main()
