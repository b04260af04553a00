"""One search for the problems of a kind: whose turn it is, and that each kernel counts for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import samples
from samples import A30
from study_trials import SPACE, trial, variant

from autoattn.core import kernel_kind
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Problem
from autoattn.core.trial import Trial
from autoattn.core.variant import Variant
from autoattn.search.kind_search import KindSearch, cost_of, kinds_of
from autoattn.search.multi_template import Contest
from autoattn.search.study import Arithmetic, Study

SHORT, LONG = (samples.problem(seq_q=length, seq_kv=length) for length in (256, 4096))


@dataclass
class Carried:
    """Says of another problem's trial that it takes as long in each problem as its number says."""

    calls: list[tuple[Problem, Variant]] = field(default_factory=list)

    def __call__(self, problem: Problem, known: Trial) -> Trial:
        self.calls.append((problem, known.variant))
        return trial(known.variant, float(problem.seq_q))


def searched(*problems: Problem, carry: Any = None, budget: int = 24, seeds_only: bool = False) -> KindSearch:
    contests = [Contest([Study(None, SPACE, problem, A30, seed=0, budget=24)]) for problem in problems]
    return KindSearch(contests, carry or Carried(), budget=budget, seeds_only=seeds_only)


def enqueue(search: KindSearch, problem: Problem, *variants: Variant) -> None:
    search.contests[problem].enqueue(variants)


def turns(search: KindSearch, count: int) -> list[tuple[Problem, Variant]]:
    proposals = []
    for _ in range(count):
        proposed = search.propose()
        assert proposed is not None
        proposals.append((search.problem, proposed))
        search.record(trial(proposed))
    return proposals


def test_problems_propose_in_turn_and_those_with_seeds_first() -> None:
    search = searched(SHORT, LONG)
    enqueue(search, LONG, variant(1, 1), variant(2, 2), variant(3, 3))
    enqueue(search, SHORT, variant(4, 4))
    assert turns(search, 4) == [
        (SHORT, variant(4, 4)), (LONG, variant(1, 1)), (LONG, variant(2, 2)), (LONG, variant(3, 3)),
    ]  # fmt: skip
    assert [problem for problem, _ in turns(search, 4)] == [SHORT, LONG, SHORT, LONG]


def test_every_kernel_is_a_trial_of_every_problem_by_its_own_sizes() -> None:
    carried = Carried()
    search = searched(SHORT, LONG, carry=carried)
    enqueue(search, SHORT, variant(1, 1))
    turns(search, 1)
    assert search.recorded is SHORT
    assert carried.calls == [(LONG, variant(1, 1))]
    assert search.contests[SHORT].trials[variant(1, 1)].time_us == 11.0
    assert search.contests[LONG].trials[variant(1, 1)].time_us == LONG.seq_q


def test_a_problem_takes_no_kernel_that_its_sizes_forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searched(SHORT, LONG)
    monkeypatch.setattr(
        "autoattn.codegen.search_space.SearchSpace.why_infeasible",
        lambda self, of, problem, device: "too long" if problem == LONG else None,
    )
    enqueue(search, SHORT, variant(1, 1))
    turns(search, 1)
    assert not search.contests[LONG].trials


def test_what_is_on_its_way_for_one_problem_is_not_proposed_for_another() -> None:
    search = searched(SHORT, LONG)
    for problem in (SHORT, LONG):
        enqueue(search, problem, variant(1, 1), variant(2, 2))
    assert [search.propose(), search.propose()] == [variant(1, 1), variant(2, 2)]
    for known in (variant(1, 1), variant(2, 2)):
        search.record(trial(known))
    assert all(len(contest.trials) == contest.taken == 2 for contest in search.contests.values())


def test_what_another_problem_proposed_takes_nothing_of_the_budget() -> None:
    search = searched(SHORT, LONG, budget=3)
    proposals = turns(search, 6)
    assert [problem for problem, _ in proposals].count(LONG) == 3
    assert not search.more()
    assert search.propose() is None
    assert search.ended


def test_a_search_of_seeds_alone_ends_with_them() -> None:
    search = searched(SHORT, LONG, seeds_only=True)
    enqueue(search, LONG, variant(1, 1))
    assert turns(search, 1) == [(LONG, variant(1, 1))]
    assert not search.more()


def test_once_no_seed_waits_whoever_may_gain_most_has_the_turn_until_it_had_many() -> None:
    promises = {SHORT: 1.25, LONG: 1.5}
    contests = [
        Contest(
            [
                Study(
                    None,
                    SPACE,
                    problem,
                    A30,
                    seed=0,
                    budget=24,
                    arithmetic=Arithmetic(least_us=least, expected_us=least),
                )
            ]
        )
        for problem, promise in promises.items()
        for least in [lambda _, promise=promise: 100.0 / promise]
    ]
    search = KindSearch(contests, lambda problem, known: trial(known.variant, 100.0), budget=24, seeds_only=False)
    enqueue(search, SHORT, variant(1, 1))
    (proposed,) = [search.propose()]
    assert proposed == variant(1, 1)
    search.record(trial(proposed, 100.0))
    problems = []
    for _ in range(4):
        proposed = search.propose()
        assert proposed is not None
        problems.append(search.problem)
        search.record(trial(proposed, 100.0))
    # log(1.5) > log(1.25) > log(1.5) / 2 > log(1.5) / 3 > log(1.25) / 2
    assert problems == [LONG, SHORT, LONG, LONG]


@pytest.mark.parametrize(
    "same",
    [
        lambda problem: problem,
        lambda problem: replace(problem, batch=7),
        lambda problem: replace(problem, seq_q=128, seq_kv=128),
    ],
)
def test_kinds_gather_problems_that_share_kernels(same: Callable[[Problem], Problem]) -> None:
    other = replace(LONG, mask=Mask.parse("full"))
    problems = [LONG, other, same(LONG)]
    assert sorted(kinds_of(problems)) == [[0, 2], [1]]
    assert kernel_kind.shares_kernels(problems[0], problems[2])


def test_kinds_whose_kernels_compile_fastest_come_first() -> None:
    problems = [
        samples.problem(head_dim=width, head_dim_v=width, dtype=dtype)
        for width in (128, 16, 64)
        for dtype in (DType.FLOAT32, DType.BFLOAT16)
    ]
    costs = [cost_of(problems[number]) for (number,) in kinds_of(problems)]
    assert costs == sorted(costs)
    assert kinds_of(problems)[0] == [3]
