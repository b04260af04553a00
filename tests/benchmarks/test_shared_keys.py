"""The rule for how many heads a program of gradients walks, beside the times that it was made of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measured_calls
import pytest
import samples
import shared_keys
from measured_calls import Subject
from shared_keys import Example

from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome, Trial
from autoattn.hardware import nvidia

EXAMPLES = shared_keys.read()[::4]


def test_the_rule_names_nearly_the_best_number_of_heads() -> None:
    shares = shared_keys.shares(EXAMPLES, None)
    assert len(shares) > 0.85 * len(EXAMPLES)
    assert statistics.geometric_mean(shares) > 0.995
    assert min(shares) > 0.9


@pytest.mark.parametrize("walked", shared_keys.WALKED)
def test_no_number_of_heads_is_the_best_of_all_problems(walked: int) -> None:
    assert statistics.geometric_mean(shared_keys.shares(EXAMPLES, walked)) < 0.97


def test_without_a_mask_the_rule_counts_turns_of_programs() -> None:
    """72 tiles of keys leave half of 132 SMs idle; 1.4 times as fast with 504 programs of a head each, on an H100."""
    [problem] = [
        each for each in shared_keys.problems() if str(each) == "backward bf16 B1 H28/4 2200x2200 D128 full bshd"
    ]
    assert shared_keys.walked_of_default(problem) == 1


def test_what_is_measured_was_crossed_as_a_file_says() -> None:
    for example in EXAMPLES[:8]:
        assert set(example.times_us) <= set(shared_keys.crossings(example.problem))
        assert example.best_us() == min(example.best_us(walked) for walked in shared_keys.WALKED)


def test_a_number_of_heads_that_was_not_timed_has_no_time() -> None:
    example = Example(problem=EXAMPLES[0].problem, times_us={(0, 2, 1): 10.0, (1, 2, 4): 8.0})
    assert example.best_us(2) == 8.0
    assert math.isinf(example.best_us(4))
    assert shared_keys.shares([example], 4) == []


def test_a_file_keeps_looks_and_the_rounds_of_finalists_and_no_problem_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lines(subjects: Iterator[Subject], end: float, device: object) -> Iterator[tuple[Problem, Any]]:
        first, second = next(subjects), next(subjects)
        look = samples.measurement(first.problem, 9.0)
        first.trials = [Trial(variant=each, outcome=Outcome.OK, measurement=look) for each in first.variants[:2]]
        first.trials.append(Trial(variant=first.variants[2], outcome=Outcome.WRONG_RESULT, detail="wrong"))
        final = first.variants[0]
        yield first.problem, {"times_us": [[final.template, final.as_dict(), 7.04]], "rivals_us": {}}
        yield second.problem, "no variant worked"

    monkeypatch.setattr(nvidia, "present", lambda: samples.H200)
    monkeypatch.setattr(measured_calls, "lines", lines)
    out = tmp_path / "times.jsonl"
    for _ in range(2):
        shared_keys.measure(seconds=1.0, out=out)
    examples = shared_keys.read(out)
    assert [sorted(example.times_us.values()) for example in examples] == [[7.0, 9.0]] * 2
    assert examples[0].problem != examples[1].problem


def test_measuring_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvidia, "present", lambda: None)
    with pytest.raises(SystemExit, match="on an NVIDIA GPU in this machine, and found none"):
        shared_keys.measure(seconds=1.0, out=tmp_path / "times.jsonl")
