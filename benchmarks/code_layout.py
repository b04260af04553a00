"""Times kernels whose code that computes tiles again lies last, and as ptxas lays them out. Needs a Hopper card.

python benchmarks/code_layout.py --seed 0 --count 60

The kernels are those that drawn calls run whom nobody tuned (`drawn_calls.py`). Each passes the gate. Those of a call
meet in rounds with what a model runs between two of its attentions: a kernel that runs twice in a row finds its code
where it left it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import checked_calls
import drawn_calls
import torch
import triton
from variant_pool import GLUON

from autoattn.codegen import render
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.trial import StaticReport
from autoattn.core.variant import Source
from autoattn.hardware import nvidia
from autoattn.hardware.timer import Call, Stopwatch
from autoattn.kernels import code_layout, compiler
from autoattn.runtime.plan import cache_lookup

DEVICE = torch.device("cuda")
SECONDS = 0.25  # of a contest
BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The times of one call's kernels."""

    problem: Problem
    code_bytes: int
    times_us: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """How many times as fast the call has become."""
        return self.times_us[BEFORE] / self.times_us[AFTER]


def sources(card: Device, seed: int, count: int) -> dict[Problem, Source]:
    """Hopper's kernels that drawn calls run; several calls may share one."""
    variants = {problem: cache_lookup.explain(problem, card).variant for problem in drawn_calls.draw(seed, count)}
    return {
        problem: render.render(problem, variant)
        for problem, variant in variants.items()
        if variant is not None and variant.template == GLUON
    }


@contextmanager
def as_ptxas_lays_out(folder: Path) -> Iterator[None]:
    """Compiles without the layout, and keeps those kernels apart in Triton's cache."""
    with triton.knobs.cache.scope(), mock.patch.object(code_layout, "rare_code_last", lambda ptx: ptx):
        triton.knobs.cache.dir = str(folder)
        yield


def compile_both(source: Source, folder: Path) -> None:
    """Leaves a kernel in Triton's caches; for a process that has no GPU."""
    compiler.build(source, 90)
    with as_ptxas_lays_out(folder):
        compiler.build(source, 90)


def between() -> dict[str, Call]:
    """What a model runs between two attentions."""
    rows = torch.randn(4096, 4096, dtype=torch.bfloat16, device=DEVICE)
    return {
        "product": partial(torch.mm, rows, rows),
        "norm": partial(torch.nn.functional.layer_norm, rows, (4096,)),
        "gelu": partial(torch.nn.functional.gelu, rows),
        "softmax": partial(torch.softmax, rows, -1),
        "order": partial(torch.sort, rows[:256]),
    }


def rows(kernels: Mapping[Problem, Source], stopwatch: Stopwatch, folder: Path) -> Iterator[Row]:
    """Times in the median of rounds; a kernel that is wrong ends the program."""
    others = between()
    for problem, source in kernels.items():
        calls = checked_calls.of(problem, {AFTER: source}, DEVICE)
        with as_ptxas_lays_out(folder):
            calls |= checked_calls.of(problem, {BEFORE: source}, DEVICE)
        times = stopwatch.contest({**calls, **others}, problem.flops(), seconds=SECONDS, seed=0)
        report = compiler.inspect(source, 90)
        yield Row(
            problem=problem,
            code_bytes=report.code_bytes if isinstance(report, StaticReport) else 0,
            times_us={name: time.median_us for name, time in times.items()},
        )


def line(row: Row) -> str:
    """A row of the table."""
    before, after = row.times_us[BEFORE], row.times_us[AFTER]
    return f"| {row.problem} | {row.code_bytes // 1024} | {before:.1f} | {after:.1f} | {row.ratio:.3f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the drawn calls")
    parser.add_argument("--count", type=int, default=60, help="of these")
    options = parser.parse_args()
    card = nvidia.present()
    if card is None:
        sys.exit("benchmarks/code_layout.py measures on an NVIDIA GPU in this machine, and found none")
    kernels = sources(card, options.seed, options.count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
            list(
                pool.map(
                    partial(compile_both, folder=folder), {each.digest: each for each in kernels.values()}.values()
                )
            )
        print("| call | KB of code | us as ptxas lays it out | us with rare code last | how many times as fast |")
        print("|---|--:|--:|--:|--:|")
        done = []
        for each in rows(kernels, Stopwatch(DEVICE), folder):
            done.append(each)
            print(line(each), flush=True)
    print(f"\n{len(done)} calls: {statistics.geometric_mean(each.ratio for each in done):.3f} times as fast")


if __name__ == "__main__":
    main()
