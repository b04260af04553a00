"""Predicts on all cores what variants take on drawn problems: those that a network learns from, and new ones."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import doubtful_calls
import drawn_calls
import environment
import variant_pool
from portfolio_examples import Example
from portfolio_model import Owner, TimeModel

from autoattn.codegen import head_order, portfolio, search_space
from autoattn.codegen.feasibility import SharedRules
from autoattn.codegen.space_facts import size_facts
from autoattn.core import kernel_kind
from autoattn.core.device import Device
from autoattn.core.problem import DType, Precision, Problem
from autoattn.core.variant import Variant

PREDICTED_FROM = 3000  # the first seed of the problems whose times are predicted
# Problems; the first, of 16 bits.
PREDICTED: Mapping[DType | Precision, int] = {
    DType.FLOAT16: 84_000, Precision.TF32: 24_000, Precision.IEEE: 15_000
}  # fmt: skip
TF32X3_OF = 4  # one problem of tf32 in so many
# One problem in so many is predicted with sequences so many times as long, up to 131,072 tokens. None is measured, as
# they take too long.
LONG_OF, LONGER = 5, 8
CHUNK = 100  # problems that a process takes at once
CANDIDATES = 12  # of a long call for a measurement
SHORT_CANDIDATES = 16  # of a short one, whose times the model knows less well
T = TypeVar("T")


def drawn_problems(counts: Mapping[DType | Precision, int] = PREDICTED) -> list[Problem]:
    """Drawn problems, so many of each way to form products; float32 is seldom drawn, and its rules need as many."""
    left = dict(counts)
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
class Predictor:
    """What a process needs to predict."""

    model: TimeModel
    cover: Sequence[Variant]
    card: Device
    rules: SharedRules = field(default_factory=SharedRules)
    # All but a problem's sizes -> places in the cover of what some sizes let run, and the names of rules of sizes
    kinds: dict[Hashable, list[tuple[int, tuple[str, ...]]]] = field(default_factory=dict)

    def times_us(self, problem: Problem) -> list[tuple[int, float]]:
        """Places in the cover of what can run a problem, and its predicted times as calls run it."""
        able = self.able(problem)
        if not able:
            return []
        running = [head_order.suiting(self.cover[place], problem, self.card) for place in able]
        times = self.model.times_us(problem, list(dict.fromkeys(running)), self.card)
        return [(place, times[variant]) for place, variant in zip(able, running, strict=True)]

    def able(self, problem: Problem) -> list[int]:
        """Places in the cover of what can run a problem; of all rules, only those of sizes are asked each time."""
        kind = kernel_kind.of(problem), problem.numerics
        if kind not in self.kinds:
            self.kinds[kind] = list(self._judged(problem))
        facts = self.rules.facts(size_facts(problem))
        return [place for place, names in self.kinds[kind] if all(map(facts.__getitem__, names))]

    def _judged(self, problem: Problem) -> Iterator[tuple[int, tuple[str, ...]]]:
        """What `kinds` holds of a problem's kind."""
        for place, variant in enumerate(self.cover):
            judgement = search_space.load(variant.template).judgement_of(variant, problem, self.card)
            if portfolio.is_available(variant) and not judgement.hopeless:
                yield place, self.rules.names(judgement)

    def candidates(self, problem: Problem) -> list[Variant]:
        """What a call runs today, then what is expected to be the fastest of a pool."""
        count = SHORT_CANDIDATES if doubtful_calls.is_short(problem, self.card) else CANDIDATES
        times_us = partial(self.model.times_us, problem, device=self.card)
        return variant_pool.candidates(problem, self.card, self.cover, times_us, count)


_predictor: Predictor | None = None  # of a process


def of(
    model: TimeModel, cover: Sequence[Variant], problems: Sequence[Problem], card: Device
) -> list[dict[Variant, float]]:
    """The predicted times, in microseconds, of the variants that can run each problem."""
    times = _answers(Predictor(model=model, cover=cover, card=card), Predictor.times_us, problems)
    return [{cover[number]: time_us for number, time_us in each} for each in times]


def cover(model: TimeModel, examples: Sequence[Example]) -> list[Variant]:
    """Few variants, each the fastest on problems of the examples, of which one is near the best on all of these."""
    winners = variant_pool.winners_of(examples)
    expected: dict[Owner, Mapping[Variant, float]] = {}
    for card in dict.fromkeys(example.device for example in examples):
        problems = list(dict.fromkeys(example.problem for example in examples if example.device == card))
        times = of(model, winners, problems, card)
        expected |= {(problem, card): each for problem, each in zip(problems, times, strict=True)}
    return variant_pool.cover(examples, expected)


def candidates(
    model: TimeModel, cover: Sequence[Variant], problems: Sequence[Problem], card: Device
) -> list[list[Variant]]:
    """The variants that are worth a measurement on each problem, of which the first is what a call runs today."""
    return _answers(Predictor(model=model, cover=cover, card=card), Predictor.candidates, problems)


def _answers(predictor: Predictor, ask: Callable[[Predictor, Problem], T], problems: Sequence[Problem]) -> list[T]:
    """What is asked of each problem; many problems are shared out to all cores."""
    if len(problems) <= CHUNK:
        return [ask(predictor, problem) for problem in problems]
    # What rules say of a kind of kernel is worked out once and kept for a while: problems of a kind go together.
    order = sorted(range(len(problems)), key=lambda place: (str(kernel_kind.of(problems[place])), place))
    # Each multiplies matrices on one core: together they have all of them busy.
    one_thread = environment.variable("OPENBLAS_NUM_THREADS", "1")
    with one_thread, multiprocessing.get_context("spawn").Pool(os.cpu_count(), _begin, [predictor]) as pool:
        answers = pool.imap(partial(_answer, ask), [problems[place] for place in order], CHUNK)
        of_place = dict(zip(order, answers, strict=True))
    return [of_place[place] for place in range(len(problems))]


def _begin(predictor: Predictor) -> None:
    global _predictor
    _predictor = predictor


def _answer(ask: Callable[[Predictor, Problem], T], problem: Problem) -> T:
    assert _predictor is not None
    return ask(_predictor, problem)
