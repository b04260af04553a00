"""Calls on which the portfolio may lose most: what comes first, and how a file keeps it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import doubtful_calls
import msgspec
import numpy as np
import portfolio_model
import portfolios
import pytest
import samples
from doubtful_calls import Call
from gaussian_process import GaussianProcess
from portfolio_model import TimeModel
from typer.testing import CliRunner

from autoattn.codegen import search_space
from autoattn.core import kernel_kind
from autoattn.core.problem import DType, Problem
from autoattn.core.variant import Variant

H200 = samples.H200
FAST, SLOW = search_space.load("triton/forward").seeds_for(samples.problem(), H200)[:2]
LENGTHS = (1024, 1536, 2048, 3072, 4096)


def problem(seq: int, heads: int = 8) -> Problem:
    return samples.problem(batch=2, heads_q=heads, heads_kv=heads, seq_q=seq, seq_kv=seq, dtype=DType.FLOAT16)


KNOWN = [
    portfolio_model.Sample(
        problem=problem(seq), device=H200, variant=variant, time_us=factor * seq**2 / 1e4, rough=False
    )
    for seq in LENGTHS
    for variant, factor in ((FAST, 1.0), (SLOW, 2.0))
]


@pytest.fixture(scope="module")
def model() -> TimeModel:
    """One variant took half the other's time on all measured problems."""
    return TimeModel(KNOWN, with_errors=True)


def test_a_choice_that_was_measured_to_be_slow_is_expected_to_lose_as_much(model: TimeModel) -> None:
    calls = [(problem(2048), (FAST, SLOW)), (problem(1536), (SLOW, FAST))]
    slow, fast = doubtful_calls.ordered(model, calls, H200)
    assert (slow.problem, slow.variants) == (problem(1536), (SLOW, FAST))
    assert slow.expected_loss == pytest.approx(math.log(2.0), abs=0.06)
    assert 0.0 <= fast.expected_loss < 0.01


def test_a_call_unlike_all_that_was_measured_comes_before_one_that_was(model: TimeModel) -> None:
    known, unknown = problem(2048), problem(17, heads=1)
    first, second = doubtful_calls.ordered(model, [(known, (FAST, SLOW)), (unknown, (FAST, SLOW))], H200)
    assert (first.problem, second.problem) == (unknown, known)
    assert first.expected_loss > 0.05 > second.expected_loss


def test_the_model_is_sure_of_ratios_that_were_measured_alone_and_believes_what_it_predicts(model: TimeModel) -> None:
    (mean, sure), (_, unsure) = model.believed([(problem(seq), (FAST, SLOW)) for seq in (2048, 40)], H200)
    process = GaussianProcess(portfolio_model.targets_of(KNOWN), portfolio_model.weights_of(KNOWN))
    inputs = portfolio_model.matrix(problem(2048), [FAST, SLOW], H200)
    assert np.allclose(mean, process.predict(inputs))
    assert sure.shape == (2, 2)
    ratio = np.array([1.0, -1.0])  # of logarithms
    assert ratio @ sure @ ratio < 2 * portfolio_model.NOISE < ratio @ unsure @ ratio


def test_calls_of_both_sizes_of_elements_have_their_own_beliefs_in_their_order() -> None:
    wide = [
        replace(each, problem=replace(each.problem, dtype=DType.FLOAT32), time_us=3 * each.time_us) for each in KNOWN
    ]
    model = TimeModel([*KNOWN, *wide], with_errors=True)
    calls = [
        (replace(problem(seq), dtype=dtype), (FAST, SLOW)) for seq in (2048, 40) for dtype in DType if dtype.bytes > 1
    ]
    together = model.believed(calls, H200)
    for call, (mean, errors) in zip(calls, together, strict=True):
        ((mean_alone, errors_alone),) = model.believed([call], H200)
        np.testing.assert_allclose(mean, mean_alone)
        np.testing.assert_allclose(errors, errors_alone, atol=1e-5)


def test_few_calls_of_a_kind_of_kernel_are_chosen_those_first_that_lose_most() -> None:
    alike = [Call(problem=problem(seq), variants=(FAST,), expected_loss=1.0 / seq) for seq in range(1024, 1044)]
    other = Call(problem=samples.problem(head_dim=256), variants=(FAST,), expected_loss=0.0)
    chosen = list(doubtful_calls.first_of_kinds([*alike, other]))
    assert chosen == [*alike[: doubtful_calls.OF_A_KIND], other]
    assert len({kernel_kind.of(call.problem) for call in chosen}) == 2


def test_calls_that_take_long_to_be_checked_are_left_out() -> None:
    chosen = doubtful_calls.quick(portfolios.RESERVED, 60)
    assert 20 < len(chosen) < 60
    assert all(call.flops() <= doubtful_calls.MOST_FLOPS for call in chosen)


def test_few_queries_on_gigabytes_of_keys_are_not_left_out() -> None:
    assert any(call.bytes() > 1e9 and call.seq_q < 16 for call in doubtful_calls.quick(portfolios.RESERVED, 400))


def test_a_file_of_chosen_calls_reads_back(tmp_path: Path) -> None:
    variants: tuple[Variant, ...] = (SLOW, FAST)
    call = Call(problem=problem(2048), variants=variants, expected_loss=0.25)
    path = tmp_path / "chosen.jsonl"
    path.write_bytes(msgspec.json.encode(call.document()) + b"\n")
    assert doubtful_calls.read(path) == [call]


def test_seeds_that_are_examined_are_not_chosen_from() -> None:
    result = CliRunner().invoke(portfolios.app, ["choose", "--seed", "81"])
    assert result.exit_code == 2
    assert "seeds below 1000 draw what untuned.py examines" in " ".join(result.output.split())


def test_a_problem_that_is_slow_with_one_variant_is_slow_with_another_but_its_neighbours_are_not() -> None:
    known = [
        portfolio_model.Sample(
            problem=problem(seq), device=H200, variant=FAST, time_us=factor * seq**2 / 1e4, rough=False
        )
        for seq, factor in zip(LENGTHS, (1.0, 1.0, 1.5, 1.0, 1.0), strict=True)
    ]
    model = TimeModel(known)
    slower = {seq: math.log(model.times_us(problem(seq), (SLOW,), H200)[SLOW]) for seq in (2048, 2049)}
    assert slower[2048] > slower[2049] + 0.01
