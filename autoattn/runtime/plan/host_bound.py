"""Chooses PyTorch's attention where a training step waits for the CPU, which it needs less of than our kernels.

A node of autograd in Python, and the launches behind it, take longer than PyTorch's own in C++, and of PyTorch's
backends cuDNN's, which it prefers, takes longest. Where the GPU is done with both passes before the CPU has launched
them, nobody gets what the faster kernels save there. While a CUDA graph is captured the CPU's time is nobody's, so that
kernels of ours answer there.
"""

from __future__ import annotations

from dataclasses import replace

from autoattn.baselines import pytorch_sdpa
from autoattn.baselines.pytorch_sdpa import SDPA
from autoattn.core.cache_entry import KERNEL
from autoattn.core.modifiers import Bias
from autoattn.core.problem import Problem
from autoattn.runtime.plan import explanations
from autoattn.runtime.plan.explanations import Explanation

# What both passes of a call take the CPU, in microseconds, on the host of an H200. SDPA's are those of cuDNN; how much
# less the others take was seen in the steps of a model (benchmarks/results/2026-11-22_h200_overhead.md, at its end).
HOST_US = {KERNEL: 175.0, SDPA: 147.0, "sdpa-flash": 118.0, "sdpa-efficient": 87.0}
_NAMES = {
    SDPA: "PyTorch's attention",
    "sdpa-flash": "PyTorch's FlashAttention-2",
    "sdpa-efficient": "PyTorch's memory-efficient attention",
}


def answer(forward: Explanation, backward: Explanation) -> Explanation | None:
    """How PyTorch's attention runs both passes of a call whose kernels were found; None where the kernels do.

    What a pass takes is the longer of the GPU's time and the CPU's. The GPU needs as long as for the measured problem
    that speaks for it, times what the pairs of its own, or of its class of sizes, are of those. Only calls count that
    F.scaled_dot_product_attention says in full.
    """
    problem = forward.problem
    if problem is None or not is_plain(problem):
        return None
    first, second = _times(forward), _times(backward)
    routes = [route for route in HOST_US if route in (KERNEL, SDPA) or pytorch_sdpa.is_one_operator(problem, route)]
    gpu_us = {route: first[route] + second[route] for route in routes if route in first and route in second}
    if not gpu_us or gpu_us[KERNEL] >= HOST_US[KERNEL]:
        return None
    route = min(gpu_us, key=lambda name: max(gpu_us[name], HOST_US[name]))
    if route == KERNEL:
        return None
    reason = (
        f"both passes of kernels take the GPU about {gpu_us[KERNEL]:.0f} us and the CPU {HOST_US[KERNEL]:.0f}, so that "
        f"a step waits for the CPU, which {_NAMES[route]} needs for {HOST_US[route]:.0f}"
    )
    return replace(explanations.of_sdpa(reason, problem, forward.reasons.texts), route=route)


def is_plain(problem: Problem) -> bool:
    """Whether PyTorch's attention says it in full, with nothing written out for it."""
    aligned = not problem.mask.causal or problem.seq_q == problem.seq_kv
    plain = aligned and problem.modifiers.bias is Bias.NONE and pytorch_sdpa.why_not_sdpa(problem) is None
    return plain and pytorch_sdpa.bind(problem, 1.0, SDPA) is not None


def _times(explanation: Explanation) -> dict[str, float]:
    """Microseconds that the kernel and PyTorch's backends take the GPU; empty where they were not measured."""
    entry, problem = explanation.entry, explanation.chosen_for or explanation.problem
    if problem is None or entry is None or not entry.problem.flops():
        return {}
    share = problem.flops() / entry.problem.flops()
    times = {rival.name: rival.measurement.median_us for rival in entry.rivals}
    return {route: share * time_us for route, time_us in {**times, KERNEL: entry.time_us}.items()}
