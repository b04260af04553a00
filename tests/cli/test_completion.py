"""Shell completion: what the tab key offers, and that it waits for nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import samples
from cache_files import FORWARD_FILE
from command_line import COMMANDS, ROOT

from autoattn.cache import store
from autoattn.core.problem import Op

pytestmark = pytest.mark.sampled


def process(words: str, *, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the program as a shell's completion does."""
    code = "import sys\nsys.argv[0] = 'autoattn'\nfrom autoattn.cli import main\ntry:\n    main()\nfinally:\n"
    code += "    assert not {'torch', 'optuna', 'rich.table'} & set(sys.modules), 'heavy'\n"
    return subprocess.run(
        [sys.executable, "-c", code, *words.split()],
        capture_output=True, text=True, cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def completed(line: str, *, cwd: Path = ROOT) -> list[str]:
    """What bash offers for the last word of a line."""
    words = line.split(" ")
    run = process("", cwd=cwd, _AUTOATTN_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.split("\n")[:-1] if run.stdout.strip() else []


@pytest.mark.parametrize(
    "line", ["autoattn ", "autoattn tune --shapes shapes.yaml --group ", "autoattn tune --device a"]
)
def test_the_tab_key_offers_commands_groups_and_devices(line: str) -> None:
    offered = completed(line)
    expected = {
        "autoattn ": set(COMMANDS),
        "autoattn tune --device a": {"auto", "a10", "a30", "a100", "a100-40gb"},
    }.get(line, {"varlen-a30", "passes", "flash2-a100"})
    assert expected <= set(offered)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("autoattn bench shapes.yaml --group v", ["varlen-a30"]),
        ("autoattn tune --shapes none.yaml --group ", []),
        ("autoattn explain --dtype b", ["bfloat16"]),
        ("autoattn explain --precision tf", ["tf32", "tf32x3"]),
        ("autoattn explain --modifier a", ["alibi"]),
        ("autoattn explain --operation b", ["backward"]),
        ("autoattn show --sort t", ["time", "tflops"]),
        ("autoattn cache export al", ["all"]),
    ],
)
def test_the_tab_key_offers_values_of_options(line: str, expected: list[str]) -> None:
    assert completed(line) == expected


def test_the_tab_key_offers_keys_of_a_cache(tmp_path: Path) -> None:
    entry = samples.measured()
    store.merge(tmp_path / "mine", samples.H200, Op.FORWARD, [entry])
    assert completed("autoattn cache export --cache mine forward_", cwd=tmp_path) == [entry.problem.key]
    (tmp_path / "mine" / "h200" / FORWARD_FILE).write_text("damaged")
    assert completed("autoattn cache export --cache mine forward_", cwd=tmp_path) == []


def test_a_script_for_the_shell_is_shown_and_installed(tmp_path: Path) -> None:
    environment: dict[str, Any] = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = process("--show-completion bash", **environment)
    assert "complete -o default -F _autoattn_completion autoattn" in shown.stdout
    installed = process("--install-completion bash", **environment)
    assert "bash completion installed in" in installed.stdout
    assert any("_AUTOATTN_COMPLETE" in path.read_text() for path in tmp_path.rglob("*autoattn*"))
