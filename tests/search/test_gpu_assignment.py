"""Which GPU looks at a problem's variants."""

from __future__ import annotations

from dataclasses import replace

from fake_pool import LARGE

from autoattn.search.gpu_assignment import GpuAssignment

PROBLEMS = [replace(LARGE, batch=batch) for batch in (1, 2, 4, 8)]


def test_problems_take_gpus_in_turn_and_keep_them() -> None:
    gpus = GpuAssignment(3)
    assert [gpus.home_of(problem) for problem in PROBLEMS] == [0, 1, 2, 0]
    assert [gpus.home_of(problem) for problem in reversed(PROBLEMS)] == [0, 2, 1, 0]


def test_a_search_has_the_gpus_that_are_no_other_searchs_home() -> None:
    gpus = GpuAssignment(4)
    first, second, *_ = PROBLEMS
    with gpus.searching(first):
        assert gpus.places_for(first) == [0, 1, 2, 3]
        with gpus.searching(second):
            assert gpus.places_for(first) == [0, 2, 3]
            assert gpus.places_for(second) == [1, 2, 3]
        assert gpus.places_for(first) == [0, 1, 2, 3]


def test_a_gpu_looks_at_one_variant_of_a_problem_and_only_at_home_does_another_wait() -> None:
    gpus = GpuAssignment(2)
    first, second, third, _ = PROBLEMS
    assert [gpus.home_of(problem) for problem in (first, second, third)] == [0, 1, 0]
    with gpus.searching(first), gpus.searching(third):
        assert gpus.free_for(first, []) == [0, 1]
        assert gpus.free_for(first, [(first, 0)]) == [1]
        assert gpus.free_for(first, [(third, 0)]) == [0, 1], "it waits behind the other problem's"
        assert gpus.free_for(first, [(third, 0), (second, 0)]) == [1]
        assert gpus.free_for(first, [(third, 1)]) == [0], "no queue where neither is at home"
