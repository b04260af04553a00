"""The machine code of measured variants: which problems are drawn, and that the file gives back what was written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import finalists
import pytest
import samples
from finalists import Finalists
from kernels import problem as problem_of
from portfolio_examples import Example

from autoattn.codegen import search_space
from autoattn.core.problem import DType, Precision, Problem
from autoattn.core.trial import StaticReport
from autoattn.cost_model import predictor

VARIANTS = search_space.load("triton/forward").seeds_for(samples.problem(), samples.H200)[:5]


def example(problem: Problem, best_us: float, variants: int = 5) -> Example:
    times_us = {variant: best_us + place for place, variant in enumerate(VARIANTS[:variants])}
    return Example(problem=problem, device=samples.H200, times_us=times_us, rivals_us={})


def report(**changes: object) -> StaticReport:
    facts = {
        "digest": "d", "arch": 90, "registers": 128, "spilled_bytes": 8, "shared_bytes": 4096, "num_warps": 4,
        "code_bytes": 30_000, "loop": {"HGMMA.64x64x16.F32.BF16.RS": 8, "MUFU.EX2": 40}, "code": "c",
    }  # fmt: skip
    return StaticReport(**{**facts, **changes})  # type: ignore[arg-type]


def test_so_many_problems_of_each_kind_and_range_are_drawn_and_always_the_same() -> None:
    tf32 = {"dtype": DType.FLOAT32, "precision": Precision.TF32}
    examples = [
        example(problem_of(seq_q=100 + number, **numbers), best_us)
        for numbers in ({"dtype": DType.BFLOAT16}, tf32)
        for best_us in (5.0, 500.0)
        for number in range(50)
    ]
    drawn = finalists.drawn(examples)
    counted = Counter((finalists.numbers_of(each.problem), each.best_us) for each in drawn)
    assert counted == {("16 bits", 5.0): 32, ("16 bits", 500.0): 32, ("tf32", 5.0): 8, ("tf32", 500.0): 8}
    assert finalists.drawn(examples) == drawn
    assert len({each.problem for each in drawn[:4]}) == 4
    assert {finalists.numbers_of(each.problem) for each in drawn[:4]} == {"16 bits", "tf32"}, "the kinds take turns"


def test_problems_of_few_finalists_are_not_drawn() -> None:
    assert finalists.drawn([example(samples.problem(), 5.0, variants=4)]) == []


def test_the_file_gives_back_what_the_model_reads_and_leaves_out_what_failed(tmp_path: Path) -> None:
    measured = example(samples.problem(), 20.0)
    reports = {variant: report(registers=100 + place) for place, variant in enumerate(VARIANTS[:3])}
    written = finalists.of(measured, reports)
    assert list(written.times_us) == VARIANTS[:3]
    path = tmp_path / "finalists.jsonl.gz"
    finalists.write([written], path)
    first = path.read_bytes()
    (restored,) = finalists.read(path)
    assert (restored.problem, restored.device, restored.times_us) == (
        written.problem, written.device, written.times_us,
    )  # fmt: skip
    for variant, kept in reports.items():
        predicted = [
            predictor.predict(measured.problem, samples.H200, variant, each)
            for each in (kept, restored.reports[variant])
        ]
        assert predicted[0] == predicted[1]
    finalists.write([written], path)
    assert path.read_bytes() == first


def test_the_committed_finalists_are_of_every_kind_and_were_measured() -> None:
    problems: list[Finalists] = list(finalists.read())
    kinds = Counter(finalists.numbers_of(each.problem) for each in problems)
    assert set(kinds) == set(finalists.COUNTS)
    assert kinds["16 bits"] >= 60
    assert {each.device.name for each in problems} == {"h100", "h200"}
    assert all(set(each.times_us) == set(each.reports) for each in problems)


@pytest.mark.parametrize("name", ["digest", "code"])
def test_what_the_model_does_not_read_is_not_kept(tmp_path: Path, name: str) -> None:
    path = tmp_path / "finalists.jsonl.gz"
    finalists.write([finalists.of(example(samples.problem(), 20.0), dict.fromkeys(VARIANTS, report()))], path)
    (restored,) = finalists.read(path)
    assert {getattr(each, name) for each in restored.reports.values()} == {""}
