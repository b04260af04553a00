"""The README and docs/getting-started.md: their examples and commands run, and print what the pages say.

On a CPU the first example, which asks for a GPU, runs there with short sequences; what it prints is that of an H200.
What tunes for minutes is not run, but its times are those of the committed cache.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from typing import Any

import pytest
import torch
import typer
import yaml
from checkout_paths import CHECKOUT

from autoattn.cache import store
from autoattn.cli import app, show
from autoattn.codegen import search_space
from autoattn.core import triton_release
from autoattn.shapes import shapes_file

ROOT = CHECKOUT
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
EXAMPLES = [text for page in (README, PAGE) for text in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)]
SHELL = "".join(text for page in (README, PAGE) for text in re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL))
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
    assert len(shapes_file.parse(yaml.safe_load(example), "docs/getting-started.md")) == 4
    assert "these are four problems" in PAGE


def test_the_page_counts_the_parameters_of_the_search() -> None:
    page = PAGE.replace("\n", " ")
    for template, count in {"triton/forward": "seventeen", "gluon/forward": "twenty-one"}.items():
        assert f"(../templates/{template}.py.j2), {count} parameters)" in page
        assert len(search_space.load(template).choices) == {"seventeen": 17, "twenty-one": 21}[count]


def words(text: str) -> list[str]:
    """Lines without the width of a table's columns."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_winners_are_those_that_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist may set one
    monkeypatch.setattr(triton_release, "installed", lambda: "3.6.0")  # whose times stand on the page
    (example,) = re.findall(r"```console\n\$ autoattn (show .*?)```", PAGE, flags=re.DOTALL)
    command, *said = example.splitlines()
    assert app.run(command.split()) == 0
    printed = words(capsys.readouterr().out)
    lines = [line for line in words("\n".join(said)) if line and line != "..." and set(line) != {"─"}]
    assert len(lines) == 8
    assert [line for line in dict.fromkeys(printed) if line in lines] == lines  # both operations have a heading


def test_the_predicted_times_are_those_of_the_cache() -> None:
    said = re.findall(r"^\[ ?\d+/95\] (.*): (\S+) us, (\S+) TFLOP/s predicted", PAGE, flags=re.MULTILINE)
    (file,) = (file for file in store.read_folder(ROOT / "cache") if file.device == "a30")
    entries = [file.entries[one.problem.key] for one in shapes_file.load(ROOT / "shapes.yaml")]
    predicted = [(str(entry.problem), *show.row(entry)[1:3]) for entry in entries]
    assert len(said) == 3
    assert set(said) <= set(predicted)


def test_the_commands_are_commands_of_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """`autoattn` takes their options and files, and `make` has their targets; none of them is run."""
    monkeypatch.chdir(ROOT)
    program: Any = typer.main.get_command(app.app)
    counts = Counter[str]()
    lines = [line.partition("#")[0] for line in SHELL.splitlines()]
    for word, *words in (shlex.split(line) for line in lines if line.strip()):
        counts[word] += 1
        if word == "autoattn":
            with program.make_context("autoattn", [], resilient_parsing=True) as context:
                name, command, rest = program.resolve_command(context, words)
                command.make_context(name, rest, parent=context).close()
        elif word == "make":
            assert f"\n{words[0]}: " in (ROOT / "Makefile").read_text(encoding="utf-8")
        else:
            assert (word, words) == ("pip", ["install", "."])
    assert counts == {"autoattn": 7, "make": 2, "pip": 1}
    assert "\nmake tune " in README
    assert "\nmake test " in README
