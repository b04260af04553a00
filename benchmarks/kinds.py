"""Times masks, packed sequences, head dims and float32 against their rivals, on the GPU that is here.

python benchmarks/kinds.py [FIGURE ...] [--write FILE]

Each figure is one contest: all calls are checked against the reference, then run in turn in one process, in random
order in each round. Our kernel is the fastest of the search space's seeds for the problem, which a short look picks.
Beside PyTorch's own attention the rivals are FlexAttention, compiled, and FlashAttention-4 where it can be imported, as
`autoattn bench` runs them.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import platform
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

import autoattn
from autoattn.baselines import pytorch_sdpa
from autoattn.baselines.external import PEERS
from autoattn.bench.kernel_results import LOOSE
from autoattn.codegen import render, search_space
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Layout, Precision, Problem
from autoattn.core.trial import Measurement
from autoattn.core.variant import Variant
from autoattn.hardware import nvidia
from autoattn.hardware.timer import Stopwatch
from autoattn.kernels import compiler, forward
from autoattn.reference import inputs
from autoattn.tensors.operands import Operands
from autoattn.validation import output_check

DEVICE = torch.device("cuda")
TEMPLATE = "triton/forward"
ROWS = 64  # query rows that are compared at full size
SECONDS = 1.5  # of each contest
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """Our kernel for a problem: checked, and the fastest of those that were tried."""

    problem: Problem
    operands: Operands
    variant: Variant
    call: Call


class Bench:
    """What all figures share: the stopwatch, and a pool that compiles."""

    def __init__(self) -> None:
        self.pool = ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"))
        self.stopwatch = Stopwatch(DEVICE)
        card = nvidia.present()
        assert card is not None, "needs an NVIDIA GPU"
        self.card = card
        self.lines: list[str] = []

    def ours(self, problem: Problem, keep: Callable[[Variant], bool] = lambda _: True, seed: int = 1) -> Ours:
        """The fastest seed that `keep` lets through and the gate passes, at small sizes and at this one."""
        points = search_space.load(TEMPLATE)
        variants = [variant for variant in points.seeds_for(problem, self.card) if keep(variant)]
        sources = [render.render(problem, variant) for variant in variants]
        list(self.pool.map(_compile, [(source, self.card.arch) for source in sources]))
        generator = torch.Generator().manual_seed(seed)
        case = output_check.make_case(problem, DEVICE, generator, rows=ROWS, guard=0)
        gate = output_check.Gate(problem, DEVICE)
        output = forward.empty_output(problem, case.operands.query)
        best: tuple[float, Variant, Call] | None = None
        for variant, source in zip(variants, sources, strict=True):
            try:
                kernel = compiler.load(source, DEVICE)
            except autoattn.AutoattnError:
                continue
            if not (gate.judge(kernel).ok and output_check.judge(kernel, [case]).ok):
                continue

            def call(kernel: compiler.Kernel = kernel) -> None:
                forward.launch(kernel, problem, case.operands, output, None)

            looked = self.stopwatch.screen(call, None if best is None else best[0]).median_us
            if best is None or looked < best[0]:
                best = (looked, variant, call)
        assert best is not None, f"no seed is right for {problem}"
        return Ours(problem=problem, operands=case.operands, variant=best[1], call=best[2])

    def contest(self, title: str, calls: dict[str, Call], flops: dict[str, int]) -> dict[str, Measurement]:
        """Runs the calls in turn and notes a table."""
        times = self.stopwatch.contest(calls, 1, seconds=SECONDS, seed=0)
        self.say(f"\n### {title}\n\n| call | median us | 20% to 80% | TFLOP/s |\n|---|---|---|---|")
        for name, measurement in times.items():
            rate = flops[name] / measurement.median_us / 1e6
            self.say(
                f"| {name} | {measurement.median_us:.1f} | {measurement.p20_us:.1f} to {measurement.p80_us:.1f} "
                f"| {rate:.0f} |"
            )
        return times

    def say(self, text: str) -> None:
        """Prints a line and keeps it for the file."""
        print(text, flush=True)
        self.lines.append(text)

    def rate(self, claim: str, ratio: float, wanted: str) -> None:
        """Notes a figure beside what was asked for."""
        self.say(f"\n**{claim}: {ratio:.2f}** (asked: {wanted})")


def _compile(job: tuple[object, int]) -> None:
    """Fills Triton's cache; what the compiler refuses is seen again when the kernel is loaded."""
    source, arch = job
    with contextlib.suppress(autoattn.AutoattnError):
        compiler.build(source, arch)  # type: ignore[arg-type]


def problem(seq: int, head_dim: int, *, batch: int = 1, heads: int = 16, mask: str = "full", **facts: Any) -> Problem:
    """A square problem; bfloat16 unless said otherwise."""
    facts = {"dtype": DType.BFLOAT16, **facts}
    return Problem(
        batch=batch, heads_q=heads, heads_kv=heads, seq_q=seq, seq_kv=seq, head_dim=head_dim,
        mask=Mask.parse(mask), **facts,
    ).simplified()  # fmt: skip


def described(ours: Ours) -> str:
    """The parameters that differ from the space's base."""
    names = (
        "BLOCK_M",
        "BLOCK_N",
        "num_warps",
        "num_stages",
        "mask_loop",
        "softmax",
        "HEAD_GROUP",
        "HEAD_SPLIT",
        "products",
    )
    return " ".join(str(ours.variant[name]) for name in names)


def agrees(output: torch.Tensor, ours: Ours) -> bool:
    """Whether a peer computes the same: a wrong mask would be no peer."""
    ours.call()
    case = output_check.case_of(ours.problem, ours.operands, torch.Generator().manual_seed(2), rows=ROWS)
    return output_check.errors(output, case)[0] <= LOOSE * case.allowed


def peer_call(name: str, ours: Ours) -> Call | None:
    """A peer on the same operands; None where it is missing, fails or is not right."""
    peer = PEERS[name]
    reason = peer.why_not(ours.problem)
    if reason is None:
        try:
            call = peer.prepare(ours.problem, ours.operands)
            if agrees(call(), ours):
                return call
            reason = "its answer is wrong"
        except Exception as error:  # a peer that fails is none
            reason = f"{type(error).__name__} {str(error)[:200]}"
    print(f"{name}: {reason}")
    return None


def with_rivals(ours: Ours, *, others: Iterable[str] = ()) -> dict[str, Call]:
    """Our call, PyTorch's, and those of the other peers that work."""
    calls: dict[str, Call] = {f"ours {described(ours)}": ours.call, **pytorch_sdpa.calls(ours.problem, ours.operands)}
    for name in others:
        call = peer_call(name, ours)
        if call is not None:
            calls[name] = call
    return calls


def best_rival(times: dict[str, Measurement]) -> float:
    """Microseconds of the fastest call that is not ours."""
    return min(measurement.median_us for name, measurement in times.items() if not name.startswith("ours"))


def ours_of(times: dict[str, Measurement]) -> float:
    """Microseconds of our call."""
    return next(measurement.median_us for name, measurement in times.items() if name.startswith("ours"))


def windows(bench: Bench) -> None:
    """Windows over 65,536 tokens against FlexAttention and FlashAttention-4, which gets the layout that it knows."""
    for layout, targets in ((Layout.BHSD, ("at least 1.35", "at least 0.97")), (Layout.BSHD, ("nothing", "nothing"))):
        for left, wanted in zip((128, 1024), targets, strict=True):
            ours = bench.ours(problem(65536, 56, heads=128, mask=f"window:{left},0", layout=layout))
            calls = with_rivals(ours, others=("flex", "fa4"))
            flops = dict.fromkeys(calls, ours.problem.flops())
            title = f"Window ({left}, 0), 65536 tokens, 128 heads, D 56, bfloat16, {layout.value}"
            times = bench.contest(title, calls, flops)
            claim = f"Window ({left}, 0), {layout.value}, over its best rival"
            bench.rate(claim, best_rival(times) / ours_of(times), wanted)
            del ours, calls
            torch.cuda.empty_cache()


def one_sided(bench: Bench) -> None:
    """One-sided windows against the causal mask."""
    masks = ("causal", "window:128,-1", "window:1024,-1", "window:-1,128", "window:-1,1024")
    kinds = [bench.ours(problem(65536, 56, heads=16, mask=mask)) for mask in masks]
    calls = {f"{ours.problem.mask} {described(ours)}": ours.call for ours in kinds}
    flops = {name: ours.problem.flops() for name, ours in zip(calls, kinds, strict=True)}
    times = list(bench.contest("One-sided windows, 65536 tokens, 16 heads, D 56, bfloat16", calls, flops).values())
    for ours, measurement in zip(kinds[1:], times[1:], strict=True):
        work = ours.problem.kept_pairs() / kinds[0].problem.kept_pairs()
        claim = f"Time of {ours.problem.mask} over causal, with {100 * (work - 1):.1f}% more pairs"
        bench.rate(claim, measurement.median_us / times[0].median_us, "at most 1.03")


def sparse(bench: Bench) -> None:
    """Block tables against the dense call, and against FlexAttention with the same table."""
    facts: dict[str, Any] = {"seq": 8192, "head_dim": 128, "batch": 4}
    dense = bench.ours(problem(**facts))
    calls = {f"dense {described(dense)}": dense.call}
    tables = []
    for density in (0.5, 0.1):
        ours = bench.ours(problem(**facts, mask=f"blocks:128x128,{density}"))
        table = ours.operands.table
        assert table is not None
        counts = table.full_counts + table.partial_counts
        share = float(counts.float().mean()) / (facts["seq"] / 128)
        name = f"{density:.0%} ({share:.3f} kept)"
        calls[f"{name} {described(ours)}"] = ours.call
        tables.append((density, len(calls) - 1))
        other = peer_call("flex", ours)
        if other is not None:
            calls[f"{name} flex"] = other
    flops = dict.fromkeys(calls, dense.problem.flops())
    times = list(bench.contest("Block tables, B4 H16 S8192 D128 bfloat16; dense TFLOP/s", calls, flops).values())
    for (density, place), wanted in zip(tables, ("at least 1.7", "at least 5"), strict=True):
        ratio = times[0].median_us / times[place].median_us
        bench.rate(f"Dense time over that of {density:.0%} of the blocks", ratio, wanted)


def packed(bench: Bench) -> None:
    """64 sequences of mixed lengths against what each would take among its like."""
    for mask in ("full", "causal"):
        packed_problem = problem(
            2048, 128, batch=64, mask=mask, layout=Layout.PACKED, tokens_q=65536, tokens_kv=65536
        )  # fmt: skip
        ours = bench.ours(packed_problem)
        alike = bench.ours(problem(1024, 128, batch=64, mask=mask, layout=Layout.BSHD))
        parts = 0.0
        for length, _ in packed_problem.lengths():
            part = problem(length, 128, batch=64, mask=mask, layout=Layout.BSHD)
            operands = inputs.make(part, DEVICE, torch.Generator().manual_seed(0))
            kernel = compiler.load(render.render(part, alike.variant), DEVICE)
            output = forward.empty_output(part, operands.query)
            looked = bench.stopwatch.screen(
                lambda k=kernel, p=part, o=operands, t=output: forward.launch(k, p, o, t, None), None
            )
            parts += looked.median_us / 64
        calls = with_rivals(ours)
        times = bench.contest(f"64 packed sequences, {mask}, 65536 tokens, 16 heads, D 128, bfloat16",
                              calls, dict.fromkeys(calls, packed_problem.flops()))  # fmt: skip
        bench.say(f"\nSum of the parts, each length alone in a batch of 64: {parts:.1f} us ({described(alike)})")
        bench.rate(f"Packed, {mask}, over the sum of its parts", ours_of(times) / parts, "at most 1.10")


def float32(bench: Bench) -> None:
    """float32 against PyTorch's best backend."""
    for precision, wanted in ((Precision.TF32, "at least 5"), (Precision.IEEE, "at least 1.3"), (Precision.TF32X3, "")):
        for seq, batch in ((4096, 4), (16384, 1)):
            for mask in ("full", "causal"):
                float32_problem = problem(seq, 64, batch=batch, mask=mask, dtype=DType.FLOAT32, precision=precision)
                ours = bench.ours(float32_problem)
                # PyTorch has no tf32x3: its rival there is the same call in IEEE products.
                calls: dict[str, Call] = {f"ours {described(ours)}": ours.call}
                torch.set_float32_matmul_precision("highest")
                calls |= pytorch_sdpa.calls(plain(float32_problem), ours.operands)
                title = f"float32 {precision.value}, B{batch} H16 S{seq} D64 {mask}"
                times = bench.contest(title, calls, dict.fromkeys(calls, float32_problem.flops()))
                bench.rate(f"{title}, over PyTorch's best", best_rival(times) / ours_of(times), wanted or "nothing")


def plain(problem: Problem) -> Problem:
    """The same problem in IEEE products."""
    facts = {
        name: getattr(problem, name) for name in ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "mask")
    }
    return Problem(dtype=problem.dtype, **facts)


def memory(bench: Bench) -> None:
    """Rows of the tables of passes that ran out of memory: batch 8, 16384 tokens, float32."""
    bench.say("\n### Peak memory of a call, batch 8, one head, 16384 tokens, float32\n")
    bench.say("| D | route | peak over query, key, value, output and LSE |\n|---|---|---|")
    worst = 0.0
    for head_dim in (16, 32, 64, 128):
        torch.cuda.empty_cache()
        query, key, value = (torch.randn(8, 1, 16384, head_dim, device=DEVICE) for _ in range(3))
        autoattn.attention(query, key, value, return_lse=True)
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated() - 3 * query.nbytes
        torch.cuda.reset_peak_memory_stats()
        output, lse = autoattn.attention(query, key, value, return_lse=True)
        torch.cuda.synchronize()
        ratio = (torch.cuda.max_memory_allocated() - base) / (4 * query.nbytes + lse.nbytes)
        worst = max(worst, ratio)
        bench.say(f"| {head_dim} | {autoattn.explain(query, key, value).route} | {ratio:.3f} |")
        del output, lse
    bench.rate("Largest peak", worst, "below 1.1")


def head_dims(bench: Bench) -> None:
    """Two tiles for a head dim that is no power of two against one padded tile."""
    for head_dim, wanted in ((80, "at least 1.2"), (96, "nothing")):
        for mask in ("full", "causal"):
            measured_problem = problem(4096, head_dim, batch=4, mask=mask)
            split = bench.ours(measured_problem, lambda variant: variant["HEAD_SPLIT"] == 1)
            whole = bench.ours(measured_problem, lambda variant: variant["HEAD_SPLIT"] == 0)
            calls = {f"ours, two tiles {described(split)}": split.call, f"one tile {described(whole)}": whole.call}
            calls |= pytorch_sdpa.calls(measured_problem, split.operands)
            times = list(bench.contest(f"B4 H16 S4096 D{head_dim} {mask} bfloat16",
                                       calls, dict.fromkeys(calls, measured_problem.flops())).values())  # fmt: skip
            bench.rate(f"D {head_dim} {mask}, padded over split", times[1].median_us / times[0].median_us, wanted)


FIGURES = {
    "windows": windows,
    "one-sided": one_sided,
    "sparse": sparse,
    "packed": packed,
    "float32": float32,
    "memory": memory,
    "head-dims": head_dims,
}


def main() -> None:
    """Runs the figures that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"some of {', '.join(FIGURES)}; all when none")
    parser.add_argument("--write", type=Path, help="a Markdown file for the tables")
    options = parser.parse_args()
    if unknown := [name for name in options.figures if name not in FIGURES]:
        parser.error(f"figures are {', '.join(FIGURES)}, got {unknown[0]}")
    warnings.simplefilter("ignore")
    bench = Bench()
    name = torch.cuda.get_device_name()
    bench.say(f"# Kinds of attention on an {name}, {date.today()}\n")
    bench.say(
        f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}: "
        "`python benchmarks/kinds.py`"
    )
    for figure in options.figures or FIGURES:
        FIGURES[figure](bench)
    if options.write is not None:
        options.write.write_text("\n".join(bench.lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
