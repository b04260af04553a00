"""The scripts that time the tuner: what they share out, and what they hand to triton.autotune."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import exhaustive
import fake_device
import planted_tuner
import pytest
import samples
import speed
from checkout_paths import python_path

from autoattn.codegen import render, search_space
from autoattn.core import kernel_kind
from autoattn.kernels import forward
from autoattn.search import trial_pipeline


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_device.set_device(monkeypatch, samples.H200)


def test_two_shards_share_the_problems_and_keep_kinds_together() -> None:
    parts = [exhaustive.kinds(number, 2) for number in range(2)]
    problems = [problem for part in parts for group in part for problem in group]
    assert len(problems) == len(set(problems)) == 20
    assert all(kernel_kind.shares_kernels(group[0], problem) for part in parts for group in part for problem in group)
    sizes = [sum(map(len, part)) for part in parts]
    assert abs(sizes[0] - sizes[1]) <= 2


def test_neighbours_are_feasible_and_differ_in_one_parameter() -> None:
    problem = speed.grouped("d128-causal")[2]
    (winner, *_) = speed.sampled(problem, 1, speed.TEMPLATE, seed=0)
    near = exhaustive.neighbours(problem, winner, 5, random.Random(0))
    assert len(near) == len(set(near)) == 5
    params = search_space.load(speed.TEMPLATE).params_of
    for neighbour in near:
        assert sum(params(neighbour)[name] != value for name, value in params(winner).items()) == 1
        assert search_space.load(speed.TEMPLATE).why_infeasible(neighbour, problem, samples.H200) is None


def test_a_list_has_the_seeds_and_is_the_same_for_the_same_seed() -> None:
    problem = speed.grouped("d64-full")[2]
    listed = speed.sampled(problem, 20, speed.TEMPLATE, seed=0)
    assert len(set(listed)) == 20
    assert listed == speed.sampled(problem, 20, speed.TEMPLATE, seed=0)
    assert listed[:5] == speed.sampled(problem, 5, speed.TEMPLATE, seed=1), "the seeds come first"


def test_triton_autotune_is_given_each_variants_own_kernel_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = speed.grouped("d64-full")[2]
    variants = speed.sampled(problem, 3, speed.TEMPLATE, seed=0)
    rendered = speed.Rendered(problem, variants)
    configs = rendered.configs()
    launched: list[Any] = []
    monkeypatch.setattr(forward, "empty_output", lambda *_: None)
    monkeypatch.setattr(forward, "launch", lambda kernel, *_: launched.append(kernel))
    properties: Any = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(speed.torch.cuda, "get_device_properties", lambda _: properties)
    query: Any = type("Query", (), {"device": "cuda:0"})
    case: Any = type("Case", (), {"operands": type("Operands", (), {"query": query})})
    for config in configs:
        rendered.run(case, grid=(1,), warmup=False, **config.all_kwargs())
    assert [kernel.source for kernel in launched] == [render.render(problem, variant) for variant in variants]
    for kernel, module in zip(launched, rendered.modules, strict=True):
        assert kernel.compiled.function is getattr(module, kernel.source.name)
        assert module.OPTIONS.items() <= kernel.compiled.options.items()


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that compile nothing and launch nothing."""
    for name, job in planted_tuner.PLANTED.items():
        monkeypatch.setattr(trial_pipeline, name, job)
    monkeypatch.setattr(trial_pipeline, "COMPILER_MODULE", "planted_tuner")
    monkeypatch.setenv("PYTHONPATH", python_path())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ours_tries_the_whole_list_and_gives_the_place_of_the_fastest(planted: None) -> None:
    problem = speed.grouped("d64-full")[2]
    variants = speed.sampled(problem, 8, speed.TEMPLATE, seed=0)
    times = [planted_tuner.time_us(render.render(problem, variant).digest) for variant in variants]
    assert speed.of_ours(problem, variants) == {"winner": times.index(min(times)), "right": 8}


def test_triton_autotune_leaves_out_what_fails_and_takes_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = speed.grouped("d64-full")[2]
    variants = speed.sampled(problem, 4, speed.TEMPLATE, seed=0)
    tried: list[int] = []

    def run(self: Any, case: Any, *, grid: Any, warmup: bool, VARIANT: int, **options: Any) -> None:
        tried.append(VARIANT)
        if VARIANT == 1:
            speed.Jitted(None, {})[(1,)]()  # has no `run`

    def timer(self: Any) -> Any:
        return lambda call, quantiles: [call() or 10.0 - tried[-1]] * 3

    monkeypatch.setattr(speed.Rendered, "run", run)
    monkeypatch.setattr(speed.output_check, "full_case", lambda *_: object())
    monkeypatch.setattr(speed.triton.runtime.driver, "_active", type("Driver", (), {"get_benchmarker": timer})())
    assert speed.of_triton(problem, variants) == {"winner": 3, "right": 3}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_problems_of_a_kind_are_measured_with_the_same_variants_and_the_winner_stands_to_the_best(
    planted: None, tmp_path: Path
) -> None:
    group = speed.grouped("d64-window")
    first, second = (speed.sampled(member, 3, speed.TEMPLATE, seed=0) for member in group)
    quick = {
        member.key: exhaustive.Tuned(winner=tried[0], choice="kernel", trials=3, seconds=1.0, tried=tried)
        for member, tried in zip(group, (first, second), strict=True)
    }
    rows = dict(exhaustive.measured([group], quick, 2))
    assert list(rows) == group
    for problem, row in rows.items():
        assert isinstance(row, dict), row
        assert row["variants"] == row["right"] >= len({*first, *second})
        ours = planted_tuner.time_us(render.render(problem, quick[problem.key].winner).digest)
        assert row["ratio"] == pytest.approx(ours / row["best_us"], rel=0.01)
        assert row["ratio"] > 1
