"""The README's example, its figures, and the output that tutorials of tuning show.

On a CPU the example, which asks for a GPU, runs there with short sequences; what it prints is that of an H200.
What tunes for minutes is not run, but its times are those of the committed cache.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import yaml
from checkout_paths import CHECKOUT

from autoattn.cache import store
from autoattn.cli import app, show
from autoattn.codegen import search_space
from autoattn.core import triton_release
from autoattn.shapes import shapes_file

ROOT = CHECKOUT
README = (ROOT / "README.md").read_text(encoding="utf-8")
YOUR_CARD, ABSENT_CARD = (
    (ROOT / "docs" / "tutorials" / f"{name}-card.md").read_text(encoding="utf-8") for name in ("your", "absent")
)
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
H200 = "NVIDIA H200"


def on_a_cpu(example: str) -> str:
    """The same without a GPU, and short."""
    return (
        example.replace(' device="cuda",', "")
        .replace("1024", "16")
        .replace("4096", "32")
        .replace("bfloat16", "float32")
    )


def test_the_example_runs_on_a_cpu() -> None:
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # there may be no GPU
        exec(on_a_cpu(EXAMPLE), names)
    assert names["output"].shape == (4, 32, 16, 128)
    assert len(EXAMPLE.splitlines()) <= 10


@pytest.mark.gpu
def test_the_example_prints_on_a_gpu_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    exec(EXAMPLE, {})
    said = re.findall(r"^print\(.*\)\n# (.*)$", EXAMPLE, flags=re.MULTILINE)
    if torch.cuda.get_device_name() == H200:
        assert capsys.readouterr().out.split("\n") == [*said, ""]


# Result -> what stands there, and what the pages say of it.
FIGURES = (
    ("2026-11-26_h200_training.md", "| outputs, dense | 26 | 1.119 |", "1.12"),
    ("2026-11-27_h200_training.md", "| gradients, all below | 32 | **1.102** |", "1.10"),
    ("2026-11-21_h200_dense_online.md", "our kernel is **1.007x** as fast", "1.01"),
    ("2026-11-29_h200_worst.md", "its usual time in the geometric mean, 2.47x to 3.25x", "2.5 to 3.3"),
    ("2026-11-22_h200_models.md", "steps are 2 to 6% faster with autoattn (second section: 2 to 4%", "2 to 4% faster"),
)


@pytest.mark.parametrize(("result", "measured", "figure"), FIGURES)
def test_a_figure_of_the_readme_stands_in_the_committed_result(result: str, measured: str, figure: str) -> None:
    assert measured in (ROOT / "benchmarks" / "results" / result).read_text(encoding="utf-8")
    for page in (README, PERFORMANCE):
        assert figure in page
        assert result in page


def test_the_commands_of_the_checkout_stay_in_the_readme() -> None:
    assert "\nmake tune " in README
    assert "\nmake test " in README


def test_the_shapes_file_unfolds_into_as_many_problems_as_the_page_says() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", YOUR_CARD, flags=re.DOTALL)
    assert len(shapes_file.parse(yaml.safe_load(example), "your-card.md")) == 4
    assert "these are four problems" in YOUR_CARD


def test_the_page_counts_the_parameters_of_the_search() -> None:
    page = YOUR_CARD.replace("\n", " ")
    for template, count in {"triton/forward": "nineteen", "gluon/forward": "twenty-two"}.items():
        assert f"(../../templates/{template}.py.j2), {count} parameters)" in page
        assert len(search_space.load(template).choices) == {"nineteen": 19, "twenty-two": 22}[count]


def words(text: str) -> list[str]:
    """Lines without the width of a table's columns."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_winners_are_those_that_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist may set one
    monkeypatch.setattr(triton_release, "installed", lambda: "3.6.0")  # whose times stand on the page
    (example,) = re.findall(r"```console\n\$ autoattn (show .*?)```", YOUR_CARD, flags=re.DOTALL)
    command, *said = example.splitlines()
    assert app.run(command.split()) == 0
    printed = words(capsys.readouterr().out)
    lines = [line for line in words("\n".join(said)) if line and line != "..." and set(line) != {"─"}]
    assert len(lines) == 8
    assert [line for line in dict.fromkeys(printed) if line in lines] == lines  # both operations have a heading


def test_the_predicted_times_are_those_of_the_cache() -> None:
    said = re.findall(r"^\[ ?\d+/95\] (.*): (\S+) us, (\S+) TFLOP/s predicted", ABSENT_CARD, flags=re.MULTILINE)
    (file,) = (file for file in store.read_folder(ROOT / "cache") if file.device == "a30")
    entries = [file.entries[named.problem.key] for named in shapes_file.load(ROOT / "shapes.yaml")]
    predicted = [(str(entry.problem), *show.row(entry)[1:3]) for entry in entries]
    assert len(said) == 3
    assert set(said) <= set(predicted)
