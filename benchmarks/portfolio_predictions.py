"""Draws the problems that a portfolio's network learns from, and predicts what variants take on each, on all cores."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import drawn_calls
import environment
from portfolio_model import TimeModel

from autoattn.codegen import portfolio
from autoattn.core import kernel_kind
from autoattn.core.device import Device
from autoattn.core.problem import DType, Precision, Problem
from autoattn.core.variant import Variant

PREDICTED_FROM = 3000  # the first seed of the problems whose times are predicted
# Problems; the first, of 16 bits.
PREDICTED = {DType.FLOAT16: 105_000, Precision.TF32: 24_000, Precision.IEEE: 15_000}
TF32X3_OF = 4  # one problem of tf32 in so many
# One problem in so many is predicted with sequences so many times as long, up to 131,072 tokens. None is measured, as
# they take too long.
LONG_OF, LONGER = 5, 8
CHUNK = 100  # problems that a process takes at once


def drawn_problems() -> list[Problem]:
    """Drawn problems, so many of each way to form products; float32 is seldom drawn, and its rules need as many."""
    left = dict(PREDICTED)
    problems: dict[Problem, None] = {}
    for seed in itertools.count(PREDICTED_FROM):
        for problem in drawn_calls.draw(seed, 50):
            numbers = problem.precision if problem.dtype is DType.FLOAT32 else DType.FLOAT16
            if left[numbers] and problem not in problems:
                left[numbers] -= 1
                if numbers is Precision.TF32 and left[numbers] % TF32X3_OF == 0:
                    problem = replace(problem, precision=Precision.TF32X3)
                if problem.seq_q == problem.seq_kv and left[numbers] % LONG_OF == 0:
                    problem = replace(problem, seq_q=LONGER * problem.seq_q, seq_kv=LONGER * problem.seq_kv)
                problems[problem] = None
        if not any(left.values()):
            return list(problems)
    raise AssertionError("seeds never end")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Predictor:
    """What a process needs to predict."""

    model: TimeModel
    cover: Sequence[Variant]
    card: Device

    def times_us(self, problem: Problem) -> list[tuple[int, float]]:
        """Places in the cover of what can run a problem, and its predicted times."""
        able = [number for number, variant in enumerate(self.cover)
                if portfolio.is_feasible(variant, problem, self.card)]  # fmt: skip
        if not able:
            return []
        times = self.model.times_us(problem, [self.cover[number] for number in able], self.card)
        return list(zip(able, times.values(), strict=True))


_predictor: _Predictor | None = None  # of a process


def of(
    model: TimeModel, cover: Sequence[Variant], problems: Sequence[Problem], card: Device
) -> list[dict[Variant, float]]:
    """The predicted times, in microseconds, of the variants that can run each problem."""
    predictor = _Predictor(model=model, cover=cover, card=card)
    if len(problems) <= CHUNK:
        times = map(predictor.times_us, problems)
        return [_named(cover, each) for each in times]
    # What rules say of a kind of kernel is worked out once and kept for a while: problems of a kind go together.
    order = sorted(range(len(problems)), key=lambda place: (str(kernel_kind.of(problems[place])), place))
    # Each multiplies matrices on one core: together they have all of them busy.
    one_thread = environment.variable("OPENBLAS_NUM_THREADS", "1")
    with one_thread, multiprocessing.get_context("spawn").Pool(os.cpu_count(), _begin, [predictor]) as pool:
        answers = pool.imap(_times_us, [problems[place] for place in order], CHUNK)
        of_place = dict(zip(order, answers, strict=True))
    return [_named(cover, of_place[place]) for place in range(len(problems))]


def _named(cover: Sequence[Variant], times: Sequence[tuple[int, float]]) -> dict[Variant, float]:
    return {cover[number]: time_us for number, time_us in times}


def _begin(predictor: _Predictor) -> None:
    global _predictor
    _predictor = predictor


def _times_us(problem: Problem) -> list[tuple[int, float]]:
    assert _predictor is not None
    return _predictor.times_us(problem)
