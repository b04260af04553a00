"""docs/commands.md: every command on the page runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from command_line import ROOT, Run, autoattn, no_card, user_cache  # noqa: F401 - fixtures
from fake_tuner import fake_tune
from model_configs import LLAMA

from autoattn.runtime import warm_up
from autoattn.search import tuner
from autoattn.shapes import shapes_file

PAGE = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line.removeprefix("$ autoattn "))
    for block in re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in block.splitlines()
]


def test_every_command_of_the_page_runs(
    autoattn: Run, user_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = fake_tune({})
    monkeypatch.setattr(tuner, "tune", fake)
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(warm_up, "kernels_of", lambda *given, **options: iter(()))
    assert len(COMMANDS) == 12 + 1
    for command in COMMANDS:
        if command == ["--show-completion"]:
            continue  # ends the process: tests/cli/test_completion.py runs it
        code, _, error = autoattn(*command)
        assert (code, error) == (0, ""), command
    assert len(shapes_file.load(Path("llama.yaml"))) == 6
    assert {problem.seq_q for problem in fake.called["problems"]} == {2048, 8192}  # type: ignore[attr-defined]
