"""The command line: help, exit codes, the process, and one sentence for each mistake."""

from __future__ import annotations

import errno
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from cache_files import FORWARD_FILE
from command_line import (  # noqa: F401 - fixtures
    CALL,
    COMMANDS,
    ROOT,
    Run,
    assert_one_sentence,
    autoattn,
    no_card,
    shapes,
    user_cache,
)
from typer.testing import CliRunner

from autoattn import cli
from autoattn.cli.app import app, run
from autoattn.cli.terminal import console
from autoattn.errors import AutoattnError
from autoattn.runtime.plan import cache_lookup
from autoattn.search import search_options

# Help


def test_no_arguments_show_the_commands(autoattn: Run) -> None:
    code, out, _ = autoattn()
    assert code == 0
    assert all(command in out for command in COMMANDS)
    assert "Exit codes" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"autoattn {command}" in " ".join(result.output.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_use_only_options_that_exist(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400"}).output
    options, _, examples = text.partition("Example")
    assert set(re.findall(r"--[a-z-]+", examples)) <= set(re.findall(r"--[a-z-]+", options))


def test_the_version_is_printed(autoattn: Run) -> None:
    code, out, _ = autoattn("--version")
    assert code == 0
    assert out.startswith("autoattn")


def test_efforts_of_the_command_line_are_those_of_tune() -> None:
    from autoattn.cli.tune import command

    literal, _ = get_args(inspect.signature(command, eval_str=True).parameters["effort"].annotation)
    assert set(get_args(literal)) == {effort.value for effort in search_options.Effort}


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tune"], "--device"),
        (["tune", "--device", "a30"], "got neither; give one"),
        (["tune", "--device", "a99", *CALL], "got 'a99'"),
        (["tune", "--device", "auto", *CALL], "found none"),
        (["tune", "--device", "a30", "--shapes", "none.yaml"], "none.yaml must be a YAML file, but there is none"),
        (["tune", "--device", "a30", "--shapes", "{folder}"], "it is a folder"),
        (["tune", "--device", "a30", "--shapes", "{shapes}", *CALL], "got both; give one"),
        (["tune", "--device", "a30", "--shapes", "{shapes}", "--group", "decode"], "got 'decode'; it has"),
        (["tune", "--device", "a30", "--group", "decode", *CALL], "got 'decode' without --shapes"),
        (["tune", "--device", "a30", "--shapes", "{shapes}", "--mask", "causal"], "give no part of a problem"),
        (["tune", "--device", "a30", "--effort", "huge", *CALL], "--effort"),
        (["tune", "--device", "a30", "--trials", "0", *CALL], "--trials must be at least 1, got 0"),
        (["tune", "--device", "a30", "--timeout", "-3", *CALL], "--timeout must be at least 1, got -3"),
        (["tune", "--device", "a30", "--timeout", "nan", *CALL], "--timeout must be at least 1, got nan"),
        (["tune", "--device", "a30", "--seed", "-1", *CALL], "--seed must be a whole number from 0 to 4294967295, got"),
        (["tune", "--device", "a30", "--seed", "4294967296", *CALL], "to 4294967295, got 4294967296; correct it"),
        (["tune", "--device", "x" * 999, *CALL], f"got '{'x' * 59}; known are"),
        (["tune", "--device", "a30", "--jobs", "0", *CALL], "--jobs must be at least 1, got 0"),
        (["tune", "--device", "a30", "--trials", "many", *CALL], "--trials"),
        (["explain", "--dtype", "bf16"], "got no --heads and no --seq-q and no --head-dim"),
        (["explain", *CALL, "--dtype", "float64"], "got 'float64'"),
        (["explain", *CALL, "--dtype", "int8"], "got 'int8'"),
        (["explain", *CALL, "--batch", "0"], "batch must be a whole number from 1"),
        (["explain", *CALL, "--seq-q", "-5"], "got -5"),
        (["explain", *CALL, "--heads-kv", "5"], "heads_q must be a multiple of heads_kv, got 32 and 5"),
        (["explain", *CALL, "--head-dim", "257"], "head_dim must be at most 256, got 257"),
        (["explain", *CALL, "--mask", "diagonal"], "got 'diagonal'"),
        (["explain", *CALL, "--layout", "sbhd"], "got 'sbhd'"),
        (["explain", *CALL, "--precision", "tf32"], "for float32 alone, got precision: tf32 with bfloat16; leave"),
        (["explain", *CALL, "--numerics", "fast"], "numerics must be any or online, got 'fast'; correct it"),
        (["tune", "--device", "a30", "--shapes", "{shapes}", "--numerics", "online"], "give no part of a problem"),
        (["explain", *CALL, "--device", "a99"], "got 'a99'"),
        (["render"], "render needs a problem"),
        (["render", "--device", "a30", *CALL, "--param", "BLOCK_M"], "--param must be NAME=VALUE, got 'BLOCK_M'"),
        (["render", "--device", "a30", *CALL, "--param", "BLOCK_Q=64"], "got 'BLOCK_Q'; it has PACK_GQA"),
        (["render", "--device", "a30", *CALL, "--param", "BLOCK_M=65"], "--param BLOCK_M must be one of"),
        (["render", "--device", "a30", *CALL, "--param", "softmax=x');import os#"], "--param softmax must be one of"),
        (["render", "--device", "a30", *CALL, "--template", "../../etc/passwd"], "template is named family/operation"),
        (["show", "--evidence", "rumour"], "--evidence"),
        (["bogus"], "No such command 'bogus'"),
        (["show", "--bogus"], "--bogus"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_exit_code_2(
    autoattn: Run, shapes: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    given = [argument.replace("{shapes}", str(shapes)).replace("{folder}", str(tmp_path)) for argument in arguments]
    code, out, error = autoattn(*given)
    assert code == 2, error
    assert out == ""
    assert_one_sentence(error)
    assert words in error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "must be YAML"),
        ("", "but it is empty"),
        ("version: 1\ngroups: {g: {problems: [{dtyp: bf16}]}}", "unknown key 'dtyp'"),
        ("version: 1\ngroups: {g: {problems: [{dtype: bf16, batch: 0, heads: 1, seq: 8, head_dim: 8}]}}", "got 0"),
        ("version: 1\ngroups: {g: {problems: [{dtype: f8, batch: 1, heads: 1, seq: 8, head_dim: 8}]}}", "got 'f8'"),
        ("version: 7", "got 7"),
    ],
)
def test_a_bad_shapes_file_is_one_sentence_and_exit_code_2(autoattn: Run, shapes: Path, text: str, words: str) -> None:
    shapes.write_text(text)
    code, _, error = autoattn("tune", "--device", "a30", "--shapes", shapes)
    assert code == 2
    assert_one_sentence(error)
    assert words in error
    assert str(shapes) in error


@pytest.mark.parametrize("command", ["show", "report", "verify --device h200", "render --device h200 {problem}"])
def test_a_damaged_cache_is_one_sentence_and_exit_code_1(autoattn: Run, tmp_path: Path, command: str) -> None:
    path = tmp_path / "cache" / "h200" / FORWARD_FILE
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": 1, "entr')
    arguments = command.format(problem=" ".join(CALL)).split()
    code, _, error = autoattn(*arguments, "--cache", tmp_path / "cache")
    assert code == 1
    assert_one_sentence(error)
    assert str(path) in error
    assert path.read_text() == '{"schema": 1, "entr'


def test_nothing_to_report_or_verify_is_one_sentence_and_exit_code_1(autoattn: Run, tmp_path: Path) -> None:
    for arguments in (["report", "--out", tmp_path / "out"], ["verify", "--device", "a30"]):
        code, _, error = autoattn(*arguments)
        assert code == 1
        assert_one_sentence(error)
        assert "run autoattn tune" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "failure",
    [
        PermissionError(errno.EACCES, "Permission denied", "/nowhere/report"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EROFS, "Read-only file system", "/nowhere"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_sentence_and_exit_code_1(
    autoattn: Run, user_cache: Path, monkeypatch: pytest.MonkeyPatch, failure: OSError
) -> None:
    from autoattn.report import files

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(files, "write", fail)
    code, _, error = autoattn("report", "--cache", user_cache, "--out", user_cache / "out")
    assert code == 1
    assert_one_sentence(error)
    assert failure.strerror in error


def test_an_out_that_is_a_file_is_one_sentence(autoattn: Run, user_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    code, _, error = autoattn("report", "--cache", user_cache, "--out", tmp_path / "taken")
    assert code == 1
    assert_one_sentence(error)
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_broken_program_still_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(cache_lookup, "explain", broken)
    with pytest.raises(TypeError, match="a bug"):
        run(["explain", *CALL])


def test_every_error_of_ours_has_an_exit_code() -> None:
    def below(kind: type[AutoattnError]) -> list[type[AutoattnError]]:
        return [kind] + [deeper for child in kind.__subclasses__() for deeper in below(child)]

    assert {kind.exit_code for kind in below(AutoattnError)} == {1, 2}


def test_control_codes_of_an_error_do_not_reach_the_terminal(autoattn: Run) -> None:
    code, _, error = autoattn("tune", "--device", "a30", "--shapes", "\x1b[31mred\x07.yaml")
    assert code == 2
    assert_one_sentence(error)
    assert error.strip().isprintable()


# In a process of its own


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autoattn", *arguments],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, check=False,
    )  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["tune"], 2),
        (["tune", "--device", "a99", *CALL], 2),
        (["verify", "--device", "a30"], 1),
    ],
)
def test_exit_codes_of_the_process(arguments: list[str], code: int, tmp_path: Path) -> None:
    done = process(*arguments, "--cache", str(tmp_path)) if arguments[0] == "verify" else process(*arguments)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    script = f"{shlex.quote(sys.executable)} -m autoattn devices --json | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_an_interrupt_while_the_program_loads_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "autoattn.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "autoattn.cli.app")
    monkeypatch.delattr(cli, "app")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert_one_sentence(capsys.readouterr().err)


def test_plain_ascii_output_is_possible() -> None:
    done = process("devices", PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 0
    assert "NVIDIA A30" in done.stdout


def test_the_console_is_wide_where_there_is_no_terminal() -> None:
    assert console().width >= 160


@pytest.mark.parametrize(("width", "columns"), [(80, 3), (100, 5), (140, 7)])
def test_a_narrow_terminal_loses_the_last_columns_and_no_figures(
    autoattn: Run, user_cache: Path, monkeypatch: pytest.MonkeyPatch, width: int, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = autoattn("show", "--evidence", "measured")
    names = ["Problem", "us", "TFLOP/s", "Evidence", "Runs on", "Best rival, or bound", "Tile"]
    head = next(line for line in out.splitlines() if "Problem" in line)
    assert [name in head for name in names] == [position < columns for position in range(len(names))]
    assert "400.0" in out
    assert all(len(line) <= width for line in out.splitlines() if not line.startswith((" (", "h200", "1 of 1")))
    assert ("left out" in out) == (columns < len(names))
