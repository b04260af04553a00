"""A few random calls in Triton's interpreter; `benchmarks/fuzz.py` runs many."""

from __future__ import annotations

import random
from dataclasses import replace

import drawn
import interpreted
import pytest
import strategies
from drawn import Compare, Drawn
from hypothesis import HealthCheck, given, seed, settings

from autoattn.codegen import render
from autoattn.core import kernel_kind
from autoattn.core.problem import Problem
from autoattn.workers.worker_pool import Pool

pytestmark = pytest.mark.interpreter

EXAMPLES = 30


def faults(child: Pool, drawn_call: Drawn) -> object:
    return child.result(Compare(source=drawn_call.source, calls=(drawn_call.call,)), interpreted.SECONDS)


@pytest.mark.slow
@seed(0)
@settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
@given(drawn_call=strategies.calls())
def test_any_kernel_answers_any_call_as_the_reference_does(child: Pool, drawn_call: Drawn) -> None:
    assert faults(child, drawn_call) == ("",), drawn_call


@settings(max_examples=100)
@given(problem=strategies.problems())
def test_any_problem_shares_kernels_with_itself_resized(problem: Problem) -> None:
    other = drawn.resized(random.Random(0), problem, drawn.TINY).problem
    assert kernel_kind.shares_kernels(problem, other)
    traits = render.natural_traits(problem)  # how long the rows of a bias are, decides how wide they are loaded
    assert drawn.kernels.source(problem, traits).digest == drawn.kernels.source(other, traits).digest


def test_a_seed_names_a_call() -> None:
    for number in range(20):
        first, again = (drawn.drawn(random.Random(number)) for _ in range(2))
        assert first == again
        assert first.source.digest == again.source.digest


def test_the_calls_reach_every_axis() -> None:
    calls = [drawn.drawn(random.Random(number)) for number in range(600)]
    problems = [each.call.problem for each in calls]
    assert {problem.mask.kind for problem in problems} == set(drawn.MaskKind)
    assert {problem.layout for problem in problems} == set(drawn.Layout)
    # A learned bias is of gradients alone
    assert {problem.modifiers.bias for problem in problems} == set(drawn.Bias) - {drawn.Bias.LEARNED}
    for name in ("score_mod", "softcap", "alibi", "sinks", "dropout"):
        assert {bool(getattr(problem.modifiers, name)) for problem in problems} == {False, True}
    assert any(problem.head_dim != problem.head_dim_v for problem in problems)
    assert any((0, 0) in (each.call.lengths or ()) for each in calls)


def test_a_planted_fault_is_found_within_few_calls(child: Pool) -> None:
    refusals = 0
    for number in range(8):
        drawn_call = drawn.drawn(random.Random(number))
        text = drawn_call.source.text.replace("row_sum * shrink + tl.sum(weights, 1)", "row_sum + tl.sum(weights, 1)")
        text = text.replace("row_sum += tl.sum(weights, 1)", "row_sum += tl.max(weights, 1)")
        broken = Compare(source=replace(drawn_call.source, text=text), calls=(drawn_call.call,))
        refusals += child.result(broken, interpreted.SECONDS) != ("",)
    assert refusals >= 4
