"""Measures what a call costs the CPU, ours beside PyTorch's own attention, on the GPU that is here.

python benchmarks/overhead.py [--calls 10000] [--write]

Each call is timed by itself on the host's clock, from the call to its return: reading the arguments, memory for the
output and the launch, but not the kernel. Training calls are both passes, on problems that are long enough to run
kernels (runtime/plan/host_bound.py), a tenth as often. All calls of a shape take turns in one process, in random
order in each round, and the GPU is waited for between rounds, outside the clock, so that no launch waits for room in
the queue.
PyTorch's backends are named outside the clock too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import date

import torch
import triton
from kept import keep
from torch.nn.attention import sdpa_kernel

import autoattn
from autoattn import functional
from autoattn.baselines import pytorch_sdpa
from autoattn.hardware import nvidia

DEVICE = torch.device("cuda")
WARM = 100  # rounds that are not counted
ROUNDS_IN_FLIGHT = 16  # with a dozen calls each; CUDA's queue holds 1024 launches
SHAPES = (  # batch, query heads, key heads, tokens, head dim, causal
    (1, 1, 1, 128, 64, False),
    (1, 8, 8, 128, 64, False),
    (1, 8, 8, 128, 64, True),
    (4, 16, 16, 512, 128, True),
    (2, 32, 8, 256, 128, True),
    (1, 8, 8, 256, 80, False),
)
TRAINED = ((4, 32, 32, 4096, 64, True), (4, 16, 16, 4096, 128, True))  # tuned for an H200, both passes
SDPA = "torch SDPA"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A call, and what must be done around it outside the clock."""

    call: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    microseconds: list[float] = field(default_factory=list)


def contestants(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> dict[str, Contestant]:
    """Our doors, and PyTorch's attention by each backend that takes the tensors."""
    module = autoattn.Attention(causal=causal)
    gqa = query.shape[1] != key.shape[1]
    attend = torch.nn.functional.scaled_dot_product_attention

    def theirs() -> torch.Tensor:
        return attend(query, key, value, is_causal=causal, enable_gqa=gqa)

    def by_door() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=gqa)

    calls = {
        SDPA: Contestant(call=theirs),
        "autoattn.attention": Contestant(call=lambda: autoattn.attention(query, key, value, causal=causal)),
        "autoattn.attention with LSE (a kernel)": Contestant(
            call=lambda: autoattn.attention(query, key, value, causal=causal, return_lse=True)
        ),
        "autoattn.functional.scaled_dot_product_attention": Contestant(call=by_door),
        "autoattn.Attention": Contestant(call=lambda: module(query, key, value)),
        # A list as window is never prepared (autoattn.prepared); this one binds nobody.
        "autoattn.attention, not prepared": Contestant(
            call=lambda: autoattn.attention(query, key, value, causal=causal, window=[-1, -1])  # type: ignore[arg-type]
        ),
    }
    for name, backend in pytorch_sdpa.BACKENDS.items():
        try:
            with warnings.catch_warnings(), sdpa_kernel(backend):
                warnings.simplefilter("ignore")
                theirs()
        except RuntimeError:
            continue
        calls[f"torch {name}"] = Contestant(call=theirs, around=lambda sdp_backend=backend: sdpa_kernel(sdp_backend))
    return calls


def trained(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> dict[str, Contestant]:
    """Both passes of our function and of PyTorch's attention."""
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    push = torch.randn_like(query)

    def both(attend: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(), leaves, push)

    def ours() -> torch.Tensor:
        return autoattn.attention(query, key, value, causal=causal)  # type: ignore[return-value]

    def theirs() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return {SDPA: Contestant(call=both(theirs)), "autoattn.attention": Contestant(call=both(ours))}


def measure(calls: dict[str, Contestant], rounds: int) -> None:
    """Times each call once a round."""
    order = list(calls.values())
    shuffle = random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        for number in range(-WARM, rounds):
            shuffle(order)
            for contestant in order:
                with contestant.around():
                    start = time.perf_counter_ns()
                    contestant.call()
                    spent = time.perf_counter_ns() - start
                if number >= 0:
                    contestant.microseconds.append(spent / 1000)
            if number % ROUNDS_IN_FLIGHT == 0:
                torch.cuda.synchronize()
    finally:
        gc.enable()
        torch.cuda.synchronize()


def table(shape: tuple[int, int, int, int, int, bool], rounds: int, *, training: bool = False) -> list[str]:
    """One shape's lines of Markdown."""
    batch, heads_q, heads_kv, seq, head_dim, causal = shape
    query, key, value = (
        torch.randn(batch, heads, seq, head_dim, device=DEVICE, dtype=torch.bfloat16)
        for heads in (heads_q, heads_kv, heads_kv)
    )
    calls = (trained if training else contestants)(query, key, value, causal)
    route = autoattn.explain(query, key, value, causal=causal).route
    measure(calls, rounds)
    medians = {name: statistics.median(contestant.microseconds) for name, contestant in calls.items()}
    title = f"B{batch} H{heads_q}/{heads_kv} S{seq} D{head_dim} {'causal' if causal else 'full'}, bfloat16"
    title += ", both passes" if training else ""
    lines = [f"\n### {title}: `autoattn.attention` takes {route}\n", "| call | median us | 10% to 90% | over SDPA |"]
    lines.append("|---|---|---|---|")
    for name, contestant in calls.items():
        tenths = statistics.quantiles(contestant.microseconds, n=10)
        ratio = medians[name] / medians[SDPA]
        lines.append(f"| {name} | {medians[name]:.1f} | {tenths[0]:.1f} to {tenths[-1]:.1f} | {ratio:.2f} |")
    return lines


def main() -> None:
    """Measures all shapes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000, help="of each kind and shape")
    parser.add_argument("--write", action="store_true", help="keep the tables under benchmarks/results/")
    options = parser.parse_args()
    card = nvidia.present()
    if card is None:
        parser.error("this measures on an NVIDIA GPU, and torch finds none")
    lines = [
        f"# What a call costs the CPU that feeds an {torch.cuda.get_device_name()}, {date.today()}\n",
        f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}, "
        f"medians of {options.calls} calls: `python benchmarks/overhead.py`",
    ]
    print("\n".join(lines), flush=True)
    for shape in (*SHAPES, *TRAINED):
        training = shape in TRAINED
        shape_lines = table(shape, options.calls // 10 if training else options.calls, training=training)
        print("\n".join(shape_lines), flush=True)
        lines += shape_lines
    if options.write:
        path = keep(f"{card.name}_overhead", "\n".join(lines))
        print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
