"""Draws calls of kinds of which the portfolio's measurements have few: float32, odd head dims, windows, short calls.

What untuned calls lost to tuned ones on problems that were not measured says which these are
(results/2026-11-24_h200_untuned_7.md, results/2026-11-25_h100_untuned_61.md, results/2026-11-26_h100_untuned_67.md,
results/2026-11-26_h100_untuned_75.md, results/2026-11-26_h100_untuned_77.md).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import drawn_calls

from autoattn.core import roofline
from autoattn.core.device import Device
from autoattn.core.problem import DType, Precision, Problem

IEEE = DType.FLOAT32, Precision.IEEE
TF32 = DType.FLOAT32, Precision.TF32
TF32X3 = DType.FLOAT32, Precision.TF32X3
BF16 = DType.BFLOAT16, Precision.IEEE
FP16 = DType.FLOAT16, Precision.IEEE
SHORT_US = 2.5  # of the roofline: with a launch, some 8 us
FEW_KEYS = 2048  # of a short call
FEW_QUERIES = 5  # as many as a step of generation has
MOST_BYTES = 1.5e8  # of operands, whose reference is computed in a second or two
MOST_FLOPS = 1e12
MOST_FLOAT32_FLOPS = 6e10


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A kind of kernel."""

    numbers: tuple[DType, Precision]
    head_dim: int
    causal: bool = False
    window: bool = False  # then causal as well
    generation: bool = False  # few queries on many keys
    short: bool = False  # of its problems all, else every second one

    def holds(self, problem: Problem) -> bool:
        """Whether a problem is one of these."""
        mask = problem.mask.bounded_right, problem.mask.bounded_left
        if mask != (self.causal or self.window, self.window):
            return False
        return not self.generation or problem.seq_q <= FEW_QUERIES


# In 16 bits what untuned calls lost most on since, then float32, then the others: a run that ends early has the first.
GAPS = (
    Gap(numbers=BF16, head_dim=40, generation=True), Gap(numbers=FP16, head_dim=64, generation=True),
    Gap(numbers=BF16, head_dim=120, generation=True), Gap(numbers=BF16, head_dim=128),
    Gap(numbers=FP16, head_dim=160, generation=True), Gap(numbers=BF16, head_dim=64, causal=True),
    Gap(numbers=FP16, head_dim=40, causal=True), Gap(numbers=BF16, head_dim=112),
    Gap(numbers=FP16, head_dim=80, generation=True), Gap(numbers=FP16, head_dim=256, causal=True),
    Gap(numbers=BF16, head_dim=192, causal=True), Gap(numbers=BF16, head_dim=256, generation=True),
    Gap(numbers=FP16, head_dim=120), Gap(numbers=BF16, head_dim=160, causal=True),
    Gap(numbers=BF16, head_dim=32, generation=True), Gap(numbers=FP16, head_dim=128, causal=True),
    Gap(numbers=BF16, head_dim=64), Gap(numbers=FP16, head_dim=112, generation=True), Gap(numbers=BF16, head_dim=80),
    Gap(numbers=FP16, head_dim=192), Gap(numbers=BF16, head_dim=96, causal=True), Gap(numbers=FP16, head_dim=72),
    Gap(numbers=BF16, head_dim=40), Gap(numbers=TF32, head_dim=128), Gap(numbers=TF32, head_dim=64, causal=True),
    Gap(numbers=TF32, head_dim=96), Gap(numbers=TF32, head_dim=128, generation=True),
    Gap(numbers=TF32, head_dim=80, causal=True), Gap(numbers=IEEE, head_dim=64), Gap(numbers=TF32, head_dim=192),
    Gap(numbers=TF32, head_dim=64, window=True), Gap(numbers=TF32, head_dim=40, causal=True),
    Gap(numbers=TF32, head_dim=256, causal=True), Gap(numbers=IEEE, head_dim=128, causal=True),
    Gap(numbers=TF32, head_dim=112), Gap(numbers=TF32, head_dim=32), Gap(numbers=TF32, head_dim=64, generation=True),
    Gap(numbers=TF32X3, head_dim=128), Gap(numbers=TF32, head_dim=160), Gap(numbers=TF32, head_dim=120, causal=True),
    Gap(numbers=IEEE, head_dim=40), Gap(numbers=TF32, head_dim=72), Gap(numbers=IEEE, head_dim=96, causal=True),
    Gap(numbers=TF32, head_dim=128, window=True), Gap(numbers=TF32, head_dim=80, generation=True),
    Gap(numbers=IEEE, head_dim=128, generation=True), Gap(numbers=BF16, head_dim=192, generation=True),
    Gap(numbers=BF16, head_dim=32, window=True), Gap(numbers=BF16, head_dim=72, generation=True),
    Gap(numbers=BF16, head_dim=192), Gap(numbers=FP16, head_dim=80, window=True),
    Gap(numbers=BF16, head_dim=128, generation=True), Gap(numbers=FP16, head_dim=64, window=True),
    Gap(numbers=BF16, head_dim=120, causal=True), Gap(numbers=FP16, head_dim=96, generation=True),
    Gap(numbers=BF16, head_dim=128, window=True), Gap(numbers=FP16, head_dim=160), Gap(numbers=BF16, head_dim=256),
    Gap(numbers=FP16, head_dim=40, generation=True), Gap(numbers=BF16, head_dim=112, window=True),
    Gap(numbers=BF16, head_dim=128, causal=True), Gap(numbers=FP16, head_dim=40), Gap(numbers=FP16, head_dim=80),
    Gap(numbers=BF16, head_dim=32), Gap(numbers=FP16, head_dim=72, causal=True), Gap(numbers=IEEE, head_dim=160),
    Gap(numbers=BF16, head_dim=96), Gap(numbers=FP16, head_dim=128), Gap(numbers=BF16, head_dim=40, causal=True),
    Gap(numbers=FP16, head_dim=64, causal=True), Gap(numbers=BF16, head_dim=80, causal=True),
    Gap(numbers=TF32, head_dim=128, causal=True), Gap(numbers=FP16, head_dim=32, causal=True),
    Gap(numbers=BF16, head_dim=120, causal=True), Gap(numbers=FP16, head_dim=112, causal=True),
    Gap(numbers=FP16, head_dim=96, causal=True), Gap(numbers=TF32, head_dim=40), Gap(numbers=IEEE, head_dim=120),
    Gap(numbers=BF16, head_dim=160), Gap(numbers=IEEE, head_dim=256), Gap(numbers=BF16, head_dim=256),
    Gap(numbers=TF32, head_dim=64), Gap(numbers=FP16, head_dim=64, short=True), Gap(numbers=FP16, head_dim=160),
    Gap(numbers=IEEE, head_dim=128), Gap(numbers=BF16, head_dim=192), Gap(numbers=TF32, head_dim=128),
    Gap(numbers=BF16, head_dim=72, short=True), Gap(numbers=IEEE, head_dim=64, causal=True),
    Gap(numbers=TF32, head_dim=256), Gap(numbers=FP16, head_dim=112, short=True),
    Gap(numbers=BF16, head_dim=128, short=True), Gap(numbers=IEEE, head_dim=192), Gap(numbers=TF32, head_dim=96),
    Gap(numbers=BF16, head_dim=40, short=True), Gap(numbers=IEEE, head_dim=256, causal=True),
    Gap(numbers=FP16, head_dim=192, causal=True), Gap(numbers=TF32, head_dim=32, causal=True),
    Gap(numbers=BF16, head_dim=64, causal=True, short=True), Gap(numbers=IEEE, head_dim=80),
    Gap(numbers=TF32X3, head_dim=64), Gap(numbers=FP16, head_dim=224), Gap(numbers=TF32, head_dim=160, causal=True),
    Gap(numbers=FP16, head_dim=120, causal=True, short=True), Gap(numbers=IEEE, head_dim=32),
    Gap(numbers=FP16, head_dim=128, causal=True, short=True), Gap(numbers=TF32X3, head_dim=128, causal=True),
)  # fmt: skip


def draw(seed: int, sizes: int, device: Device) -> list[Problem]:
    """`sizes` problems of each gap, which share compiled kernels, beside one another."""
    rng = random.Random(f"gaps {seed}")
    return [problem for gap in GAPS for problem in _of(gap, rng, sizes, device)]


def is_short(problem: Problem, device: Device) -> bool:
    """Whether a good kernel takes some 8 us at most."""
    seconds = roofline.seconds(problem, device)
    assert seconds is not None, f"no data sheet of {device.name}"
    return 1e6 * seconds <= SHORT_US and problem.seq_kv <= FEW_KEYS


def _of(gap: Gap, rng: random.Random, sizes: int, device: Device) -> list[Problem]:
    problems: dict[Problem, None] = {}
    while len(problems) < sizes:
        problem = drawn_calls.one(rng, gap.numbers, gap.head_dim)
        wants_short = gap.short or len(problems) % 2 == 0
        if gap.holds(problem) and _is_quick(problem) and is_short(problem, device) == wants_short:
            problems[problem] = None
    return list(problems)


def _is_quick(problem: Problem) -> bool:
    """Whether its operands and their reference take no long time to be made."""
    most_flops = MOST_FLOAT32_FLOPS if problem.dtype is DType.FLOAT32 else MOST_FLOPS
    return problem.kept_pairs() > 0 and problem.flops() <= most_flops and problem.bytes() <= MOST_BYTES
