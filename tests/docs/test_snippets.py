"""Every code block of the documentation: Python runs, commands are parsed, and YAML unfolds into problems.

The blocks of a page share their names, in the order of the page. What a page says that a line prints is compared.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from checkout_paths import CHECKOUT
from fake_device import set_device
from fake_tuner import fake_tune
from model_configs import LLAMA

from autoattn.cli import app
from autoattn.core import device_profiles
from autoattn.search import tuner
from autoattn.shapes import shapes_file

PAGES = tuple(
    str(path.relative_to(CHECKOUT))
    for path in (*sorted(CHECKOUT.glob("*.md")), *sorted((CHECKOUT / "docs").rglob("*.md")))
)
# Pages whose Python another test runs, since it needs more than to be run.
RUN_BY = {
    "README.md": "tests/docs/test_readme.py",
    "docs/context-parallel.md": "tests/docs/test_context_parallel.py",
    "docs/frames.md": "tests/test_frames.py",
    "docs/integrations.md": "tests/docs/test_integrations.py",
    "docs/kv-cache.md": "tests/test_decoding.py",
}
SHELL = ("sh", "console")
LANGUAGES = {"python", *SHELL, "yaml", "text", "", "{eval-rst}"}  # the last: read when the site is built
NEEDS = {"docs/tutorials/llama.md": "transformers"}


class Block(NamedTuple):
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    return [Block(*fields) for fields in re.findall(r"^```(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def of(page: str, *languages: str) -> list[str]:
    return [block.text for block in blocks(page) if block.language in languages]


def commands(page: str) -> Iterator[list[str]]:
    """Words of each command: lines of shell blocks, those of sessions behind "$", and indented `autoattn`."""
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    lines = [line[4:] for line in re.findall(r"^    autoattn .*$", text, re.MULTILINE)]
    for language, shell in blocks(page):
        if language in SHELL:
            lines += re.findall(r"^\$ (.*)$", shell, re.MULTILINE) if language == "console" else shell.splitlines()
    command = ""
    for line in lines:
        command = f"{command}\n{line}" if command else line
        try:
            words = shlex.split(command.replace("\\\n", " "), comments=True)
        except ValueError:  # a quotation, or a line that ends with a backslash, goes on
            continue
        command = ""
        while words and re.fullmatch(r"[A-Z]+=\S*", words[0]):
            del words[0]  # variables of the environment
        if words:
            yield words
    assert not command, page


RUNNABLE = [page for page in PAGES if page not in RUN_BY and of(page, "python")]


@pytest.mark.parametrize("page", RUNNABLE)
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page], reason=f"needs {NEEDS[page]}, which is not installed")
    monkeypatch.chdir(CHECKOUT)
    names: dict[str, Any] = {"__name__": "page"}
    printed = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # there may be no GPU
        for block in blocks(page):
            if block.language == "python":
                exec(block.text, names)
                printed = capsys.readouterr().out
                for said in re.findall(r"^print\(.*\)\n# (.*)$", block.text, re.MULTILINE):
                    assert said in printed.splitlines()
            elif block.language == "":
                assert printed.strip() == block.text.strip()


@pytest.mark.parametrize(("page", "test"), RUN_BY.items())
def test_the_other_pages_are_run_by_the_test_that_is_named(page: str, test: str) -> None:
    assert of(page, "python")
    text = (CHECKOUT / test).read_text(encoding="utf-8")
    assert Path(page).name in text
    assert re.search(r"\bexec(ute)?[(,]", text)


def test_every_block_is_of_a_language_that_is_tested() -> None:
    assert {block.language for page in PAGES for block in blocks(page)} <= LANGUAGES


def test_every_command_is_one_of_the_program_of_make_or_of_a_script() -> None:
    program: Any = typer.main.get_command(app.app)
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    extras = re.findall(r"^(\w+) = \[", (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    seen = set()
    for page in PAGES:
        for word, *words in commands(page):
            seen.add(word)
            if word == "autoattn":
                check_command(program, words)
            elif word == "make":
                assert f"\n{words[0]}: " in makefile, page
            elif word == "pip":
                assert words[0] == "install", page
                assert all(extra in extras for extra in re.findall(r"\[(\w+)\]", words[1])), page
            elif word in ("python", ".venv/bin/python"):
                script = next((part for part in words if part.endswith(".py")), None)
                assert script is None or (CHECKOUT / script).exists(), page
            else:
                pytest.fail(f"{page}: no test knows the command {word}")
    assert {"autoattn", "make", "pip", "python"} <= seen


def check_command(program: Any, words: list[str]) -> None:
    """Fails unless `autoattn` takes these words; nothing runs."""
    with program.make_context("autoattn", [], resilient_parsing=True) as context:
        if words[0].startswith("--"):
            assert words[0] in {name for option in program.params for name in option.opts}
            return
        name, command, rest = program.resolve_command(context, words)
        with command.make_context(name, rest, parent=context) as below:
            if hasattr(command, "commands"):
                name, command, rest = command.resolve_command(below, rest)
                command.make_context(name, rest, parent=below).close()


TUNED_BY = [page for page in PAGES if re.search(r"tutorials/|getting-started", page)]


@pytest.mark.parametrize("page", TUNED_BY)
def test_what_a_tutorial_tunes_and_asks_is_a_problem(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands run on an H200 that is not there; the search is left out."""
    set_device(monkeypatch, device_profiles.named("h200"))
    monkeypatch.setattr(tuner, "tune", fake_tune({}))
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(LLAMA))
    given = of(page, "yaml")
    Path("shapes.yaml").write_text(given[-1]) if given else shutil.copy(CHECKOUT / "shapes.yaml", "shapes.yaml")
    for word, *words in commands(page):
        if word == "autoattn" and words[0] in ("tune", "explain", "devices"):
            assert app.run(words) == 0, (words, capsys.readouterr().err)


@pytest.mark.parametrize("page", [page for page in PAGES if of(page, "yaml")])
def test_the_yaml_of_a_page_is_a_shapes_file(page: str) -> None:
    for block in of(page, "yaml"):
        assert shapes_file.parse(yaml.safe_load(block), page)
