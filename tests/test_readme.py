"""The README: its examples run, and print what it says.

On a CPU the first example, which asks for a GPU, runs there with short sequences; what it prints is that of an H200.
The console examples are not run: they tune for minutes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from autoattn import shapes, space

PAGE = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
H200 = "NVIDIA H200"


def run(example: str, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """(what the example prints, what its comments under `print` say that it prints)"""
    said = re.findall(r"^print\(.*\)\n# (.*)$", example, flags=re.MULTILINE)
    capsys.readouterr()
    exec(example, names)
    return capsys.readouterr().out.strip(), "\n".join(said)


def on_a_cpu(example: str) -> str:
    """The same without a GPU, and short."""
    return example.replace(' device="cuda",', "").replace("1024", "16").replace("4096", "32")


def test_the_examples_run_one_after_the_other_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLES) == 3
    names: dict[str, Any] = {}
    run(on_a_cpu(EXAMPLES[0]), names, capsys)
    assert names["output"].shape == (4, 32, 16, 128)
    run(EXAMPLES[1], names, capsys)
    tensors = (torch.randn(2, 9, heads, 16) for heads in (4, 2, 2))
    assert names["Block"]()(*tensors).shape == (2, 9, 4, 16)
    printed, said = run(EXAMPLES[2], names, capsys)
    assert said
    assert printed == said


@pytest.mark.gpu
def test_the_examples_run_as_they_stand_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for example in EXAMPLES:
        printed, said = run(example, names, capsys)
        if "cuda" not in example or torch.cuda.get_device_name() == H200:
            assert printed == said


def test_the_shapes_file_unfolds_into_as_many_problems_as_the_page_says() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(shapes.parse(yaml.safe_load(example), "README.md")) == 4
    assert "these are four problems" in PAGE


def test_the_page_counts_the_parameters_of_the_search() -> None:
    page = PAGE.replace("\n", " ")
    for template, count in {"triton/forward": "fifteen", "gluon/forward": "twenty-one"}.items():
        assert f"(templates/{template}.py.j2), {count} parameters)" in page
        assert len(space.load(template).choices) == {"fifteen": 15, "twenty-one": 21}[count]
