"""The scripts that time the tuner: what they share out, and what they hand to triton.autotune."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import samples

from autoattn import gpu, render, space
from autoattn.ops import forward

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import exhaustive
import speed


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "present", lambda index=None: samples.H200)


def test_two_shards_share_the_problems_and_keep_kinds_together() -> None:
    parts = [exhaustive.kinds(number, 2) for number in range(2)]
    problems = [problem for part in parts for group in part for problem in group]
    assert len(problems) == len(set(problems)) == 20
    assert all(group[0].shares_kernels(one) for part in parts for group in part for one in group)
    sizes = [sum(map(len, part)) for part in parts]
    assert abs(sizes[0] - sizes[1]) <= 2


def test_neighbours_are_feasible_and_differ_in_one_parameter() -> None:
    problem = speed.grouped("d128-causal")[2]
    (winner, *_) = speed.sampled(problem, 1, speed.TEMPLATE, seed=0)
    near = exhaustive.neighbours(problem, winner, 5, random.Random(0))
    assert len(near) == len(set(near)) == 5
    params = space.load(speed.TEMPLATE).params_of
    for one in near:
        assert sum(params(one)[name] != value for name, value in params(winner).items()) == 1
        assert space.load(speed.TEMPLATE).why_infeasible(one, problem, samples.H200) is None


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
