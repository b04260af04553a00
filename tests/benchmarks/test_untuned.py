"""The examination of untuned calls: what it draws, and how it compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import drawn_calls
import pytest
import samples
import untuned

from autoattn.bench.kernel_results import Contestant, Row
from autoattn.cache import store
from autoattn.core.problem import DType, Op, Precision
from autoattn.core.variant import Variant
from autoattn.runtime.plan.explanations import Explanation, Level
from autoattn.runtime.plan.reasons import Reasons


def test_a_seed_names_its_calls_and_another_seed_names_others() -> None:
    assert drawn_calls.draw(3, 40)[:10] == drawn_calls.draw(3, 10)
    assert not set(drawn_calls.draw(3, 40)) & set(drawn_calls.draw(4, 40))


def test_sixty_calls_have_all_that_programs_do() -> None:
    problems = drawn_calls.draw(0, 60)
    assert len(set(problems)) == 60
    assert any(problem.seq_q == 1 for problem in problems)
    assert any(1 < problem.seq_q < problem.seq_kv for problem in problems)
    assert any(problem.seq_q > problem.seq_kv for problem in problems)
    assert {problem.dtype for problem in problems} == {DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32}
    assert {problem.mask.causal for problem in problems} == {True, False}
    assert any(problem.group_size > 1 for problem in problems)
    assert any(problem.head_dim & (problem.head_dim - 1) for problem in problems)


def test_a_seed_that_the_portfolio_knows_is_not_examined(tmp_path: Path) -> None:
    (tmp_path / "h200_chosen_examined9.jsonl").write_text("")
    untuned.refuse_known(90, tmp_path)
    with pytest.raises(SystemExit, match=r"rests on those of seed 9 \(h200_chosen_examined9.jsonl\); name another"):
        untuned.refuse_known(9, tmp_path)


@pytest.mark.parametrize("seed", range(5))
def test_no_drawn_call_is_longer_than_a_run_allows(seed: int) -> None:
    for problem in drawn_calls.draw(seed, 100):
        ieee = problem.dtype is DType.FLOAT32 and problem.precision is Precision.IEEE
        assert 0 < problem.flops() <= (drawn_calls.MOST_IEEE_FLOPS if ieee else drawn_calls.MOST_FLOPS)


PROBLEM = samples.problem()


def contestant(name: str, time_us: float, **facts: Any) -> Contestant:
    return Contestant(name=name, times_us=(time_us,) * 60, **facts)


def explanation(route: str) -> Explanation:
    return Explanation(problem=PROBLEM, route=route, level=Level.DEFAULT, reasons=Reasons("it is"))


def standing(untuned_route: str = "kernel", default_us: float = 200.0) -> untuned.Standing:
    row = Row(
        problem=PROBLEM,
        contestants=(
            contestant("autoattn", 100.0, ours=True),
            contestant("untuned", 110.0, ours=True),
            contestant("default", default_us, ours=True),
            contestant("sdpa-flash", 150.0),
            contestant("sdpa-cudnn", 120.0),
        ),
    )
    explanations = {"untuned": explanation(untuned_route), "default": explanation("kernel")}
    return untuned.standing(row, untuned.Choices(problem=PROBLEM, explanations=explanations), tuned=True)


def test_ratios_above_one_say_that_the_first_is_faster() -> None:
    compared = standing()
    assert compared.ratio("untuned", "tuned") == pytest.approx(100 / 110)
    assert compared.ratio("default", "peer") == pytest.approx(120 / 200)
    assert compared.ratio("tuned", "peer") == pytest.approx(1.2)
    assert compared.ratio("predicted", "tuned") is None
    assert compared.intervals["untuned over tuned"].ratio == pytest.approx(100 / 110)


SMALL, LARGE = (Variant.of("triton/forward", {"BLOCK_M": rows}) for rows in (16, 64))


def choices_of(**variants: Variant) -> untuned.Choices:
    """What each contestant runs."""
    explanations = {name: replace(explanation("kernel"), variant=variant) for name, variant in variants.items()}
    return untuned.Choices(problem=PROBLEM, explanations=explanations)


def test_contestants_of_the_same_kernel_are_timed_once_and_share_its_times() -> None:
    choices = choices_of(untuned=SMALL, default=LARGE, predicted=LARGE)
    assert untuned.timed_beside(choices, tuned=True) == {"untuned": SMALL, "default": LARGE}
    compared = untuned.standing(standing().row, choices, tuned=True)
    assert compared.times_us["predicted"] == compared.times_us["default"] == 200.0
    assert compared.ratio("predicted", "default") == 1.0


def test_where_nothing_was_tuned_an_untuned_call_is_timed_once_and_no_call_counts_as_tuned() -> None:
    choices = choices_of(untuned=SMALL, default=SMALL, predicted=LARGE)
    assert untuned.timed_beside(choices, tuned=False) == {"predicted": LARGE}
    row = replace(
        standing().row,
        contestants=(contestant("autoattn", 100.0, ours=True), contestant("predicted", 90.0, ours=True)),
    )
    compared = untuned.standing(row, choices, tuned=False)
    assert compared.times_us == {"untuned": 100.0, "default": 100.0, "predicted": 90.0}
    assert compared.ratio("untuned", "tuned") is None


def test_what_was_compared_before_ctrl_c_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def compared() -> Iterator[untuned.Standing]:
        yield standing()
        raise KeyboardInterrupt

    assert [each.row.problem for each in untuned.gathered(compared(), 2)] == [PROBLEM]
    times = "untuned 110.0 us, default 200.0 us, tuned 100.0 us, sdpa-cudnn 120.0 us"
    assert capsys.readouterr().err == f"[1/2] {PROBLEM}: {times}\n"


def test_an_untuned_call_that_pytorch_answers_has_the_time_of_its_backend() -> None:
    assert standing("sdpa-flash").times_us["untuned"] == 150.0


def test_the_page_has_the_mean_the_lowest_and_a_row_for_each_problem() -> None:
    compared = [standing(), standing(default_us=50.0)]
    lines = untuned.summary(compared)
    (line,) = (line for line in lines if line.startswith("| default over tuned"))
    assert line.startswith("| default over tuned | 2 | 1.000 | 0.500 | 1 |")
    rows = untuned.table(compared)
    assert len(rows) == 4
    assert "0.500 (0.500 to 0.500)" in rows[2]


def test_a_user_who_never_tuned_has_the_shipped_cache_and_a_default_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    store.merge(own, samples.H200, Op.FORWARD, [samples.current(samples.measured(PROBLEM))])
    store.merge(shipped, samples.H200, Op.FORWARD, [samples.current(samples.measured(samples.problem(seq_q=1000)))])
    monkeypatch.setenv("AUTOATTN_CACHE", str(own))
    monkeypatch.setattr("autoattn.codegen.resources.shipped_cache", lambda: shipped)
    (choices,) = untuned.choices([PROBLEM], samples.H200, own)
    levels = {name: chosen.level for name, chosen in choices.explanations.items()}
    assert levels == {"untuned": Level.BUCKET, "default": Level.DEFAULT, "predicted": Level.EXACT}
