"""Several templates in one search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import samples

from autoattn.codegen import search_space
from autoattn.core.problem import DType, Op
from autoattn.core.trial import Outcome, Trial
from autoattn.core.variant import Variant
from autoattn.search import multi_template
from autoattn.search.multi_template import Contest


@dataclass
class Planned:
    """A study that proposes numbers in order, as far as it has any."""

    template: str
    best_us: float = float("inf")
    left: int = 100
    queue: list[Variant] = field(default_factory=list)
    trials: dict[Variant, Trial] = field(default_factory=dict)
    problem: Any = None

    @property
    def space(self) -> Planned:
        return self

    @property
    def waiting(self) -> bool:
        return bool(self.queue)

    def enqueue(self, variants: list[Variant]) -> None:
        self.queue += variants

    def propose(self, more: Callable[[], bool] = lambda: True) -> Variant | None:
        if self.queue:
            return self.queue.pop(0)
        self.left -= 1
        return Variant.of(self.template, {"number": self.left}) if self.left >= 0 else None

    def record(self, trial: Trial) -> None:
        self.trials[trial.variant] = trial


def proposed(contest: Contest, count: int) -> list[str]:
    return [variant.template for _ in range(count) if (variant := contest.propose()) is not None]


def of(*studies: Planned) -> Contest:
    return Contest(studies)  # type: ignore[arg-type]


def test_seeds_of_all_templates_are_tried_in_turn_before_anything_else() -> None:
    left, right = Planned("left", best_us=1.0), Planned("right")
    contest = of(left, right)
    contest.enqueue([Variant.of(name, {"seed": number}) for name in ("left", "right") for number in range(3)])
    contest.enqueue([Variant.of("absent", {"seed": 0})])
    assert sorted(proposed(contest, 4)) == ["left", "left", "right", "right"]
    assert sorted(proposed(contest, 2)) == ["left", "right"]
    assert not left.waiting
    assert not right.waiting


def test_seeds_of_one_template_do_not_wait_for_another_that_has_none() -> None:
    contest = of(Planned("left", best_us=1.0), Planned("right"))
    contest.enqueue([Variant.of("right", {"seed": number}) for number in range(5)])
    assert proposed(contest, 5) == ["right"] * 5


def test_the_template_that_is_ahead_takes_most_turns_and_the_other_is_not_forgotten() -> None:
    contest = of(Planned("left", best_us=2.0), Planned("right", best_us=1.0))
    templates = proposed(contest, 40)
    assert 5 <= templates.count("left") <= 10
    assert templates.count("right") >= 30


def test_a_template_without_more_variants_gives_its_turns_away() -> None:
    contest = of(Planned("left", best_us=1.0, left=2), Planned("right", best_us=2.0, left=3))
    assert sorted(proposed(contest, 9)) == ["left", "left", "right", "right", "right"]
    assert contest.propose() is None


def test_where_a_variant_does_not_work_the_next_one_is_tried_and_no_other() -> None:
    contest = of(Planned("left"), Planned("right"))
    names = ("absent", "left", "right", "left", "right")
    variants = [Variant.of(name, {"seed": number}) for number, name in enumerate(names)]
    contest.record(Trial(variant=variants[1], outcome=Outcome.COMPILE_ERROR))  # known before
    contest.enqueue_until_working(variants)
    tried: list[Variant] = []
    while contest.waiting and len(tried) < len(variants):
        variant = contest.propose()
        assert variant is not None
        tried.append(variant)
        outcome = Outcome.OK if variant == variants[3] else Outcome.INFEASIBLE
        contest.record(Trial(variant=variant, outcome=outcome))
    assert tried == [variants[2], variants[3]]


def test_trials_go_to_their_templates_study_and_are_told_of_together() -> None:
    left, right = Planned("left"), Planned("right")
    contest = of(left, right)
    trials = [Trial(variant=Variant.of(name, {}), outcome=Outcome.OK, digest="0" * 16) for name in ("left", "right")]
    for trial in trials:
        contest.record(trial)
    assert (left.trials, right.trials) == ({trials[0].variant: trials[0]}, {trials[1].variant: trials[1]})
    assert list(contest.trials.values()) == trials


@pytest.mark.parametrize("measured", [False, True])
def test_every_template_with_a_seed_takes_part_with_the_card_and_without_it(measured: bool) -> None:
    problem = samples.problem()
    spaces = multi_template.spaces(problem, samples.H200, measured)
    names = [points.template for points in search_space.of(problem.op) if points.seeds_for(problem, samples.H200)]
    assert [points.template for points in spaces] == names == ["gluon/forward", "triton/forward"]


def test_without_the_card_no_template_takes_part_where_no_model_predicts() -> None:
    gradients = samples.problem(op=Op.BACKWARD)
    assert multi_template.spaces(gradients, samples.H200, True)
    assert multi_template.spaces(gradients, samples.H200, False) == []
    assert "must be tuned on the card: the model knows forward kernels alone" in multi_template.why_no_space(
        gradients, samples.H200
    )


def test_a_problem_without_any_variant_is_explained_by_every_template() -> None:
    problem = samples.problem(dtype=DType.FLOAT8)
    assert multi_template.spaces(problem, samples.A30, True) == []
    assert "float8 products need" in multi_template.why_no_space(problem, samples.A30)
