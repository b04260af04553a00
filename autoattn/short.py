"""Training calls so short that a step waits for the CPU, which PyTorch's attention needs less of than kernels of ours.

A node of autograd in Python, and the launches behind it, take longer than PyTorch's own in C++. Where the GPU is done
with both passes before the CPU has launched them, nobody gets what kernels save there. While a CUDA graph is captured
the CPU's time is nobody's, so that kernels answer there.
"""

from __future__ import annotations

from autoattn import dispatch, rivals
from autoattn.dispatch import Explanation
from autoattn.entry import KERNEL
from autoattn.problem import Problem
from autoattn.rivals import SDPA

# What both passes of a call take the CPU, in microseconds, on the host of an H200
# (benchmarks/results/2026-11-22_h200_overhead.md, at its end).
HOST_US = {KERNEL: 175.0, SDPA: 147.0}


def why(forward: Explanation, backward: Explanation) -> str | None:
    """Why PyTorch's attention runs both passes of calls whose kernels were found; None where the kernels do.

    A pass takes as long as the measured problem that speaks for it, times what the pairs of its own are of those. Only
    calls count that F.scaled_dot_product_attention says in full.
    """
    problem, passes = forward.problem, (forward, backward)
    if problem is None or not _is_plain(problem):
        return None
    times = [pair for one in passes if (pair := _times(one)) is not None]
    kernels, theirs = (sum(pair[number] for pair in times) for number in (0, 1))
    if len(times) < len(passes) or max(kernels, theirs) >= HOST_US[KERNEL]:
        return None
    return (
        f"both passes of kernels take the GPU about {kernels:.0f} us and the CPU {HOST_US[KERNEL]:.0f}, so that a step "
        f"waits for the CPU, which PyTorch's attention needs for {HOST_US[SDPA]:.0f}"
    )


def _is_plain(problem: Problem) -> bool:
    """Whether PyTorch's attention says it in full, with nothing written out for it."""
    aligned = not problem.mask.causal or problem.seq_q == problem.seq_kv
    return aligned and rivals.why_not_sdpa(problem) is None and rivals.bind(problem, 1.0, SDPA) is not None


def _times(found: Explanation) -> tuple[float, float] | None:
    """Microseconds of the kernel and of the fastest of PyTorch's backends; None where they were not measured."""
    entry = found.entry
    if found.problem is None or entry is None:
        return None
    rival = min((one.measurement.median_us for one in entry.rivals if one.name in dispatch.ROUTES), default=None)
    measured = entry.problem.flops()
    if rival is None or not measured:
        return None
    share = found.problem.flops() / measured
    return entry.time_us * share, rival * share
