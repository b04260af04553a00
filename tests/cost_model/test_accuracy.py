"""How well the model ranked: the figures that a report prints are those of the last run that left problems out."""

from __future__ import annotations

import pytest
from checkout_paths import BENCHMARKS

from autoattn.core.problem import DType
from autoattn.cost_model import accuracy

RESULTS = BENCHMARKS / "results"


def test_the_figures_are_those_of_the_last_run_that_left_problems_out() -> None:
    text = max(RESULTS.glob("*_model_quality_left_out.md")).read_text(encoding="utf-8")
    summary = text.partition("| family | problems |")[2]
    for family, quality in accuracy.LEFT_OUT.items():
        line = next(line for line in summary.splitlines() if line.startswith(f"| {family} |"))
        assert line == (
            f"| {family} | {quality.problems} | {quality.variants} | {quality.spearman:.3f}, {quality.lowest:.3f} | "
            f"{100 * quality.ten:.1f}%, {100 * quality.worst:.1f}% |"
        )


def test_errors_among_fast_variants_are_those_of_the_last_run() -> None:
    text = max(RESULTS.glob("*_model_quality_left_out.md")).read_text(encoding="utf-8").partition("| finalists |")[2]
    errors = {f"16 bits, {family}": error for family, error in accuracy.AMONG_FAST.items()}
    errors |= {f"{precision}, triton": error for precision, error in accuracy.AMONG_FAST_FLOAT32.items()}
    for kind, error in errors.items():
        line = next(line for line in text.splitlines() if line.startswith(f"| {kind} |"))
        assert f"| {error:.2f}, " in line


def test_an_error_is_the_larger_one_of_random_and_of_fast_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accuracy.error_of("triton/forward", 90, DType.FLOAT32) == accuracy.LEFT_OUT["triton"].error
    assert accuracy.error_of("triton/forward", 90, DType.FLOAT16) == accuracy.LEFT_OUT["triton"].error
    monkeypatch.setitem(accuracy.AMONG_FAST_FLOAT32, "tf32", 0.5)
    monkeypatch.setitem(accuracy.AMONG_FAST, "triton", 0.4)
    assert accuracy.error_of("triton/forward", 90, DType.FLOAT32) == 0.5, "of the worst precision"
    assert accuracy.error_of("triton/forward", 90, DType.FLOAT16) == 0.4
    assert accuracy.error_of("gluon/forward", 90, DType.FLOAT16) == accuracy.LEFT_OUT["gluon"].error
    assert accuracy.error_of("triton/forward", 80, DType.FLOAT32) == accuracy.LEFT_OUT["sm_80"].error


def test_what_is_known_depends_on_whose_machine_code_was_measured() -> None:
    assert str(accuracy.LEFT_OUT["triton"]) in accuracy.known(90)
    for arch in (80, 86, 89):
        assert "no card of this architecture" in accuracy.known(arch)
        assert str(accuracy.LEFT_OUT["sm_80"]) in accuracy.known(arch)
    assert "no card whose machine code" in accuracy.known(100)
