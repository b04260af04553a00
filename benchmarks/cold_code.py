"""Times kernels whose code the instruction cache no longer holds, by where their code lies. Needs a Hopper card.

python benchmarks/cold_code.py

Each kernel passes the gate. Instructions that never run are put in front of a kernel's code or behind it. "warm" is a
call right after the same call, "cold" one behind other kernels that run on all SMs; keys lie in memory in both.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import checked_calls
import torch
from code_layout import as_ptxas_lays_out
from variant_pool import GLUON, GLUON_BASE

from autoattn.codegen import render, search_space
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Layout, Problem
from autoattn.core.trial import StaticReport
from autoattn.core.variant import Source, Value
from autoattn.hardware import nvidia
from autoattn.hardware.timer import Call, Stopwatch
from autoattn.kernels import compiler

DEVICE = torch.device("cuda")
SAMPLES = 20
SPINS = 2  # of the GPU before a call: one that came late is taken again, behind itself
INSTRUCTION_BYTES = 16
CALL = Problem(
    dtype=DType.BFLOAT16, batch=8, heads_q=8, heads_kv=8, seq_q=512, seq_kv=1000, head_dim=128,
    mask=Mask.parse("causal"), layout=Layout.BSHD,
)  # fmt: skip
SMALL = replace(CALL, batch=2, heads_q=66, heads_kv=66, seq_q=200, seq_kv=200)  # a tile for each SM, and more
BASE: dict[str, Value] = {
    **GLUON_BASE,
    **{"BLOCK_N": 64, "num_stages": 3, "CTAS": 1, "PACK_GQA": 1, "HEAD_SPLIT": 0, "HEAD_GROUP": 0},
    **{"softmax": "first_max", "schedule": "one_tile", "output_buffer": "shared"},
}
PAIRED: dict[str, Value] = {"BLOCK_M": 64, "CTAS": 2}
CONSUMERS: dict[str, Value] = {"BLOCK_M": 128}
WIDE: dict[str, Value] = {"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 2}
FRONT, BACK = (
    "    queries = gl.allocate_shared_memory",
    "    wrong = gl.max(recompute",
)  # lines that the padding precedes


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kernel, and how its code lies."""

    name: str
    params: tuple[tuple[str, Value], ...]
    front: int = 0  # KB of instructions that never run, in front of the others
    back: int = 0  # ... and behind what always runs
    laid_out: bool = True  # whether what computes tiles again lies last

    @property
    def source(self) -> Source:
        """Its kernel."""
        source = render.render(CALL, search_space.load(GLUON).variant({**BASE, **dict(self.params)}))
        text = source.text
        for line, size in ((FRONT, self.front), (BACK, self.back)):
            if size:
                text = text.replace(line, f"    {padding(size)}\n{line}", 1)
        return replace(source, text=text)


def cases() -> Iterator[Case]:
    """The kernels that are timed."""
    for size in (0, 32, 64, 112):
        yield Case(name="64 x 64, two programs an SM", params=tuple(PAIRED.items()), back=size)
    for size in (16, 32, 40, 48, 64, 112):
        yield Case(name="64 x 64, two programs an SM", params=tuple(PAIRED.items()), front=size)
    for name, params in (("128 x 64", CONSUMERS), ("128 x 128", WIDE)):
        for laid_out in (False, True):
            yield Case(name=f"{name}, two consumers", params=tuple(params.items()), laid_out=laid_out)


def padding(size: int) -> str:
    """A line of Gluon with so many KB of instructions that never run."""
    skipped = "nanosleep.u32 1; " * (size * 1024 // INSTRUCTION_BYTES)
    text = f"{{{{ .reg .pred p; setp.ne.s32 p, $1, -1; @p bra DONE; {skipped}DONE: mov.u32 $0, $1; }}}}"
    return f'gl.inline_asm_elementwise("{text}", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)'


def others() -> list[Call]:
    """Kernels with other code, which run on all SMs and whose tensors are small."""
    left = torch.randn(2048, 1024, device=DEVICE, dtype=torch.bfloat16)
    right = torch.randn(1024, 2048, device=DEVICE, dtype=torch.bfloat16)
    space = search_space.load(GLUON)
    small = {
        str(params): render.render(SMALL, space.variant({**BASE, **params, "row_order": "ascending"}))
        for params in (PAIRED, CONSUMERS, WIDE)
    }
    return [
        partial(torch.mm, left, right), partial(torch.softmax, left, -1), partial(torch.sort, left),
        partial(torch.cumsum, left, 0), partial(torch.nn.functional.gelu, left), partial(torch.sum, left),
        *checked_calls.of(SMALL, small, DEVICE).values(),
    ]  # fmt: skip


def median_us(call: Call, before: Sequence[Call], stopwatch: Stopwatch) -> float:
    """Of a call behind others, whose keys lie in memory."""
    times = []
    for _ in range(SAMPLES):
        for other in before:
            other()
        times += stopwatch.samples(call, 1)
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    if nvidia.present() is None:
        sys.exit("benchmarks/cold_code.py measures on an NVIDIA GPU in this machine, and found none")
    stopwatch, before = Stopwatch(DEVICE, spins=SPINS), others()
    print("| tile | KB in front | KB behind | what computes again | KB of code | us warm | us cold |")
    print("|---|--:|--:|---|--:|--:|--:|")
    with TemporaryDirectory() as folder:
        for case in cases():
            with nullcontext() if case.laid_out else as_ptxas_lays_out(Path(folder)):
                call = checked_calls.of(CALL, {case.name: case.source}, DEVICE)[case.name]
                report = compiler.inspect(case.source, 90)
            size = report.code_bytes // 1024 if isinstance(report, StaticReport) else 0
            warm, cold = median_us(call, [call], stopwatch), median_us(call, before, stopwatch)
            last = "last" if case.laid_out else "as ptxas lays it out"
            print(
                f"| {case.name} | {case.front} | {case.back} | {last} | {size} | {warm:.1f} | {cold:.1f} |", flush=True
            )


if __name__ == "__main__":
    main()
