"""What workers do for benchmarks/variants.py: compile a variant, and time it if it computes rightly."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome, StaticReport
from autoattn.core.variant import Source
from autoattn.errors import CompileError
from autoattn.hardware.timer import Stopwatch
from autoattn.kernels import compiler, forward
from autoattn.kernels.compiler import Kernel
from autoattn.kernels.sass import disassembler
from autoattn.search.gpu_jobs import kind_of
from autoattn.validation import output_check
from autoattn.validation.output_check import Gate
from autoattn.workers.worker_pool import Failure

ROWS = 64  # query rows that are compared at full size
THREADS = 8  # the driver compiles outside of Python's lock
Memory = dict[Hashable, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Compiles a source and reads the machine code; needs no GPU."""

    source: Source
    arch: int
    ptx_arch: int | None  # as in compile.inspect

    def run(self, memory: Memory) -> StaticReport | Failure:
        try:
            return compiler.inspect(self.source, self.arch, ptx_arch=self.ptx_arch)
        except CompileError as error:
            return Failure(outcome=Outcome.COMPILE_ERROR, detail=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Translate:
    """Has the driver make machine code of many kernels' PTX at once, for the looks to come."""

    sources: tuple[Source, ...]
    ptx_arch: int

    def run(self, memory: Memory) -> int:
        """How many were translated."""
        torch.cuda.init()
        device = torch.device("cuda", torch.cuda.current_device())
        # One by one: Triton's settings belong to the process.
        built = [compiler.build(source, self.ptx_arch).asm["ptx"] for source in self.sources]
        with ThreadPoolExecutor(THREADS) as pool:
            futures = [pool.submit(compiler.translated, ptx, device) for ptx in built]
        return sum(future.exception() is None for future in futures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """A variant that computes rightly."""

    median_us: float
    registers: int  # that the driver says a thread has
    report: StaticReport | None  # of what the driver made of older PTX, where that can be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Checks a kernel against the reference at full size, and times it however slow it is."""

    problem: Problem
    source: Source
    ptx_arch: int | None
    gate: bool  # check it on all of the gate's cases too

    def run(self, memory: Memory) -> Looked | Failure:
        """The time, or what is wrong."""
        kernel = _kernel(memory, self.source, self.ptx_arch)
        if isinstance(kernel, Failure):
            return kernel
        device = torch.device("cuda")
        if memory.get("problem") != self.problem:
            memory.pop("case", None)
            torch.cuda.empty_cache()
            generator = torch.Generator().manual_seed(1)
            memory["case"] = output_check.make_case(self.problem, device, generator, rows=ROWS, guard=0)
            memory["gate"] = Gate(kind_of(self.problem), device).cases if self.gate else []
            memory["problem"] = self.problem
            memory.setdefault("stopwatch", Stopwatch(device))
        case = memory["case"]
        verdict = output_check.judge(kernel, [*memory["gate"], case])
        if not verdict.ok:
            return Failure(outcome=Outcome.WRONG_RESULT, detail=verdict.reason)
        output = forward.empty_output(self.problem, case.operands.query)
        looked = memory["stopwatch"].screen(
            lambda: forward.launch(kernel, self.problem, case.operands, output, None), None
        )
        report = _translated(kernel) if self.ptx_arch else None
        return Looked(median_us=looked.median_us, registers=kernel.compiled.n_regs, report=report)


def _kernel(memory: Memory, source: Source, ptx_arch: int | None) -> Kernel | Failure:
    name = ("kernel", source.digest, ptx_arch)
    if name not in memory:
        try:
            memory[name] = compiler.load(source, torch.device("cuda"), ptx_arch=ptx_arch)
        except CompileError as error:
            memory[name] = Failure(outcome=Outcome.COMPILE_ERROR, detail=str(error))
    kernel: Kernel | Failure = memory[name]
    return kernel


def _translated(kernel: Kernel) -> StaticReport | None:
    """What the driver's machine code says; None where it is newer than our disassembler."""
    properties = torch.cuda.get_device_properties(kernel.device)
    try:
        return disassembler.read(
            kernel.compiled.kernel, digest=kernel.source.digest, arch=properties.major * 10 + properties.minor,
            shared_bytes=kernel.compiled.metadata.shared, num_warps=kernel.compiled.metadata.num_warps,
        )  # fmt: skip
    except CompileError:
        return None
