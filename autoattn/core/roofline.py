"""The roofline of a problem on a card: the time below which the tensor cores and the memory let no kernel go."""

from __future__ import annotations

from autoattn.core.device import Device
from autoattn.core.problem import DType, Precision, Problem


def peak_flops(problem: Problem, device: Device | None) -> float | None:
    """The card's peak for a problem's products, in flop per second; None where nobody knows it."""
    if device is None:
        return None
    if problem.dtype is DType.FLOAT8:  # twice that of 16 bits on every card that has it, by their data sheets
        half = device.peak_flops.get(DType.FLOAT16.value)
        return None if half is None else 2 * half
    name = problem.dtype.value
    if problem.dtype is DType.FLOAT32 and problem.precision is not Precision.IEEE:
        name = "tf32"
    return device.peak_flops.get(name)


def seconds(problem: Problem, device: Device | None) -> float | None:
    """What the slower of products and memory takes at least, at the clock that the card keeps; None where unknown."""
    peak = peak_flops(problem, device)
    if device is None or not peak or not device.bandwidth:
        return None
    sustained = peak * device.sustained_clock_mhz / device.clock_mhz
    return max(problem.flops() / sustained, problem.bytes() / device.bandwidth)
