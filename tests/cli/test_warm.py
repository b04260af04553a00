"""`autoattn warm`: a line for each answer, and an exit code that says whether calls will find a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernels
import pytest
from command_line import Run, autoattn, no_card, user_cache  # noqa: F401 - fixtures

from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.runtime import warm_up
from autoattn.runtime.plan.needed_kernels import Answer
from autoattn.runtime.warm_up import WarmKernel

SHAPES = "version: 1\ngroups: {small: {problems: [{dtype: fp16, batch: 2, heads: 2, seq: [64, 128], head_dim: 32}]}}\n"


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    path = tmp_path / "shapes.yaml"
    path.write_text(SHAPES)
    return str(path)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """In place of the compilers: one answer a problem, by what a test puts here."""
    facts: dict[str, Any] = {"refused": False}

    def kernels_of(problems: list[Problem], card: Device, **options: Any) -> Iterator[WarmKernel]:
        facts.update(problems=problems, card=card.name, **options)
        for problem in problems:
            refused = facts["refused"]
            variant = None if refused else kernels.variant(BLOCK_M=64, BLOCK_N=32)
            reason = "too many registers" if refused else ""
            yield WarmKernel(problem=problem, answer=Answer.OUTPUT, variant=variant, reason=reason, refused=refused)

    monkeypatch.setattr(warm_up, "kernels_of", kernels_of)
    return facts


def test_each_answer_has_a_line_and_the_last_one_counts(autoattn: Run, shapes: str, compiled: dict[str, Any]) -> None:
    code, output, error = autoattn("warm", shapes, "--device", "h200", "--jobs", "3", "--cache", ".")
    assert (code, error) == (0, "")
    *lines, last = output.splitlines()
    assert lines == [f"{problem}, output: triton/forward 64x32 1w 1s" for problem in compiled["problems"]]
    assert last.startswith("2 ready in ")
    assert last.endswith(" s, 0 refused")
    assert (compiled["card"], compiled["jobs"], compiled["cache"]) == ("h200", 3, Path("."))


def test_a_refusal_is_told_by_the_exit_code(autoattn: Run, shapes: str, compiled: dict[str, Any]) -> None:
    compiled["refused"] = True
    code, output, _ = autoattn("warm", shapes, "--device", "h200")
    assert code == 1
    assert output.splitlines()[0].endswith("64x64 D32 full, output: no kernel, too many registers")
    assert output.splitlines()[-1].endswith("2 refused")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none.yaml", "--device", "h200"], "none.yaml must be a YAML file, but there is none"),
        (["{shapes}", "--device", "h2000"], "h2000"),
        (["{shapes}"], "--device auto needs an NVIDIA GPU in this machine, found none"),
        (["{shapes}", "--device", "h200", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["{shapes}", "--device", "h200", "--group", "none"], "none"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], sentence: str, autoattn: Run, shapes: str, compiled: dict[str, Any]
) -> None:
    code, output, error = autoattn("warm", *(word.format(shapes=shapes) for word in words))
    assert (code, output) == (2, "")
    assert error.startswith("autoattn: ")
    assert sentence in error
    assert len(error.splitlines()) == 1
