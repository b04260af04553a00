"""Draws realistic attention calls: a seed names them, and nobody tunes to them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

from autoattn.core import kernel_kind
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Layout, Precision, Problem

HEADS = (
    (1, 1), (2, 2), (4, 4), (8, 8), (12, 12), (16, 16), (32, 32), (2, 1), (4, 1), (5, 1), (8, 1), (8, 4), (10, 2),
    (16, 8), (24, 8), (32, 8), (32, 16), (40, 8), (64, 8), (64, 16), (128, 16),
)  # fmt: skip
HEAD_DIMS = (32, 40, 64, 64, 64, 72, 80, 96, 112, 120, 128, 128, 128, 128, 160, 192, 256)
LENGTHS = (17, 33, 64, 100, 128, 197, 256, 333, 500, 512, 577, 1000, 1024, 1500, 2048, 3000, 4097, 8191, 16_384, 60_000)
BATCHES = (1, 1, 1, 2, 2, 3, 4, 8, 16, 32, 64)
NUMBERS = (
    (10, DType.BFLOAT16, Precision.IEEE),
    (7, DType.FLOAT16, Precision.IEEE),
    (1, DType.FLOAT32, Precision.IEEE),
    (2, DType.FLOAT32, Precision.TF32),
)
MOST_FLOPS = 2e13  # some 40 ms of an H200's tensor cores
MOST_IEEE_FLOPS = 4e11  # the lanes of float32 are 16 times as slow, and more
MOST_BYTES = 6e9


def draw(seed: int, count: int) -> list[Problem]:
    """Distinct forward problems; the first ones are the same whatever the count."""
    rng = random.Random(f"calls {seed}")
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        problem = drawn_problem(rng)
        if is_affordable(problem):
            problems[problem] = None
    return list(problems)


def with_sizes(problem: Problem, count: int) -> list[Problem]:
    """A drawn problem and others of its kind of kernel: `count` in all, with drawn heads, batches and lengths."""
    rng = random.Random(f"sizes of {problem.key}")
    problems = {problem: None}
    while len(problems) < count:
        other = drawn_problem(rng, numbers=(problem.dtype, problem.precision), head_dim=problem.head_dim)
        if is_affordable(other) and kernel_kind.shares_kernels(other, problem):
            problems[other] = None
    return list(problems)


def is_affordable(problem: Problem) -> bool:
    """Whether a card has the memory for a call, and is done with it soon."""
    few = problem.flops() <= _most_flops(problem) and problem.bytes() <= MOST_BYTES
    return few and problem.kept_pairs() > 0


def drawn_problem(
    rng: random.Random, numbers: tuple[DType, Precision] | None = None, head_dim: int | None = None
) -> Problem:
    """One problem, which need not be affordable; of these numbers and this head dim where they are given."""
    kinds: dict[Callable[[random.Random, Problem], Problem], int] = {
        _self_attention: 10, _decode: 5, _chunk: 3, _cross: 3,
    }  # fmt: skip
    heads_q, heads_kv = rng.choice(HEADS)
    dtype, precision = (
        numbers
        or rng.choices(
            [(dtype, precision) for _, dtype, precision in NUMBERS], weights=[weight for weight, _, _ in NUMBERS]
        )[0]
    )
    problem = Problem(
        dtype=dtype,
        precision=precision,
        batch=rng.choice(BATCHES),
        heads_q=heads_q,
        heads_kv=heads_kv,
        seq_q=1,
        seq_kv=1,
        head_dim=head_dim or rng.choice(HEAD_DIMS),
        layout=rng.choice((Layout.BHSD, Layout.BSHD)),
    )
    kind = rng.choices(list(kinds), weights=list(kinds.values()))[0]
    return kind(rng, problem)


def _length(rng: random.Random, least: int = 17, most: int = 60_000) -> int:
    """Half of the lengths are those that programs like, half are any."""
    if rng.random() < 0.5:
        return rng.choice([length for length in LENGTHS if least <= length <= most])
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def _self_attention(rng: random.Random, problem: Problem) -> Problem:
    length = _length(rng, most=16_384)
    masks = ["causal", "causal", "causal", "full", "full", f"window:{min(length - 1, rng.choice((31, 127, 1023)))},0"]
    return replace(problem, seq_q=length, seq_kv=length, mask=Mask.parse(rng.choice(masks)))


def _decode(rng: random.Random, problem: Problem) -> Problem:
    return replace(problem, seq_q=rng.choice((1, 1, 1, 1, 2, 5)), seq_kv=_length(rng, least=100))


def _chunk(rng: random.Random, problem: Problem) -> Problem:
    queries = rng.choice((64, 100, 128, 256, 512))
    keys = _length(rng, least=queries + 1)
    return replace(problem, seq_q=queries, seq_kv=keys, mask=Mask.parse("causal"))


def _cross(rng: random.Random, problem: Problem) -> Problem:
    return replace(problem, seq_q=_length(rng, most=8191), seq_kv=_length(rng, most=8191))


def _most_flops(problem: Problem) -> float:
    ieee = problem.dtype is DType.FLOAT32 and problem.precision is Precision.IEEE
    return MOST_IEEE_FLOPS if ieee else MOST_FLOPS
