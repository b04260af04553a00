"""The command line: what it prints, its exit codes, and one sentence for each mistake."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import samples
from typer.testing import CliRunner

from autoattn import cache, dispatch, gpu, plan, resources, space, tune, verify
from autoattn.cli.app import app, run
from autoattn.cli.progress import Display, Remaining, duration
from autoattn.cli.terminal import console, print_json
from autoattn.device import Device
from autoattn.errors import AutoattnError, CacheError
from autoattn.mask import Mask
from autoattn.plan import Progress, Summary
from autoattn.problem import Op, Problem

ROOT = Path(__file__).parent.parent
COMMANDS = ("tune", "show", "explain", "render", "verify", "report", "devices")
ONE = ("--dtype", "bf16", "--batch", "4", "--heads", "32", "--heads-kv", "8", "--seq-q", "1024", "--seq-kv", "4096",
       "--head-dim", "128", "--mask", "causal")  # fmt: skip
SHAPES = """
version: 1
defaults: {dtype: bf16, batch: 4, heads: 32, head_dim: 128}
groups:
  prefill: {problems: [{seq: [1024, 2048], mask: causal}]}
  train: {problems: [{seq: 1024, mask: [full, causal]}]}
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No GPU, no shipped cache and no terminal, whatever the machine and the checkout hold."""
    set_card(monkeypatch, None)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(resources, "shipped_cache", lambda: tmp_path / "shipped")


def set_card(monkeypatch: pytest.MonkeyPatch, card: Device | None) -> None:
    monkeypatch.setattr(gpu, "present", lambda index=None: card)


@pytest.fixture
def autoattn(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the program in this process; gives its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.yaml"
    path.write_text(SHAPES)
    return path


@pytest.fixture
def user_cache() -> Path:
    """A measured and a predicted entry of the H200 in the user's cache."""
    folder = resources.user_cache()
    entries = [samples.current(one) for one in (samples.measured(), samples.predicted(samples.problem(mask=Mask())))]
    cache.merge(folder, samples.H200, Op.FORWARD, entries)
    return folder


def assert_one_sentence(error: str) -> None:
    assert error.startswith("autoattn: ")
    assert error.count("\n") == 1
    assert error.endswith("\n")


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
    assert set(get_args(literal)) == {effort.value for effort in plan.Effort}


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tune"], "--device"),
        (["tune", "--device", "a30"], "got neither; give one"),
        (["tune", "--device", "a99", *ONE], "got 'a99'"),
        (["tune", "--device", "auto", *ONE], "found none"),
        (["tune", "--device", "a30", "--shapes", "none.yaml"], "none.yaml must be a YAML file, but there is none"),
        (["tune", "--device", "a30", "--shapes", "{folder}"], "it is a folder"),
        (["tune", "--device", "a30", "--shapes", "{shapes}", *ONE], "got both; give one"),
        (["tune", "--device", "a30", "--shapes", "{shapes}", "--group", "decode"], "got 'decode'; it has"),
        (["tune", "--device", "a30", "--group", "decode", *ONE], "got 'decode' without --shapes"),
        (["tune", "--device", "a30", "--shapes", "{shapes}", "--mask", "causal"], "give no part of a problem"),
        (["tune", "--device", "a30", "--effort", "huge", *ONE], "--effort"),
        (["tune", "--device", "a30", "--trials", "0", *ONE], "--trials must be at least 1, got 0"),
        (["tune", "--device", "a30", "--timeout", "-3", *ONE], "--timeout must be at least 1, got -3"),
        (["tune", "--device", "a30", "--timeout", "nan", *ONE], "--timeout must be at least 1, got nan"),
        (["tune", "--device", "a30", "--seed", "-1", *ONE], "--seed must be at least 0, got -1"),
        (["tune", "--device", "a30", "--jobs", "0", *ONE], "--jobs must be at least 1, got 0"),
        (["tune", "--device", "a30", "--trials", "many", *ONE], "--trials"),
        (["explain", "--dtype", "bf16"], "got no --heads and no --seq-q and no --head-dim"),
        (["explain", *ONE, "--dtype", "float64"], "got 'float64'"),
        (["explain", *ONE, "--dtype", "int8"], "got 'int8'"),
        (["explain", *ONE, "--batch", "0"], "batch must be a whole number from 1"),
        (["explain", *ONE, "--seq-q", "-5"], "got -5"),
        (["explain", *ONE, "--heads-kv", "5"], "heads_q must be a multiple of heads_kv, got 32 and 5"),
        (["explain", *ONE, "--head-dim", "257"], "head_dim must be at most 256, got 257"),
        (["explain", *ONE, "--mask", "diagonal"], "got 'diagonal'"),
        (["explain", *ONE, "--layout", "sbhd"], "got 'sbhd'"),
        (["explain", *ONE, "--precision", "tf32"], "got 'bf16:tf32'"),
        (["explain", *ONE, "--device", "a99"], "got 'a99'"),
        (["render"], "render needs a problem"),
        (["render", "--device", "a30", *ONE, "--param", "BLOCK_M"], "--param must be NAME=VALUE, got 'BLOCK_M'"),
        (["render", "--device", "a30", *ONE, "--param", "BLOCK_Q=64"], "got 'BLOCK_Q'; it has HEAD_SPLIT"),
        (["render", "--device", "a30", *ONE, "--param", "BLOCK_M=65"], "--param BLOCK_M must be one of"),
        (["render", "--device", "a30", *ONE, "--param", "softmax=x');import os#"], "--param softmax must be one of"),
        (["render", "--device", "a30", *ONE, "--template", "../../etc/passwd"], "a template is named family/operation"),
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


@pytest.mark.parametrize("command", ["show", "report", "verify --device h200", "render --device h200 {one}"])
def test_a_damaged_cache_is_one_sentence_and_exit_code_1(autoattn: Run, tmp_path: Path, command: str) -> None:
    path = tmp_path / "cache" / "h200" / "forward.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": 1, "entr')
    arguments = command.format(one=" ".join(ONE)).split()
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

    monkeypatch.setattr(dispatch, "explain", broken)
    with pytest.raises(TypeError, match="a bug"):
        run(["explain", *ONE])


def test_every_error_of_ours_has_an_exit_code() -> None:
    def below(kind: type[AutoattnError]) -> list[type[AutoattnError]]:
        return [kind] + [deeper for child in kind.__subclasses__() for deeper in below(child)]

    assert {kind.exit_code for kind in below(AutoattnError)} == {1, 2}


def test_control_codes_of_an_error_do_not_reach_the_terminal(autoattn: Run) -> None:
    code, _, error = autoattn("tune", "--device", "a30", "--shapes", "\x1b[31mred\x07.yaml")
    assert code == 2
    assert_one_sentence(error)
    assert error.strip().isprintable()


# Tune


def fake_tune(
    entries: dict[str, Any], *, failed: dict[str, str] | None = None, interrupted: bool = False, kept: int = 0
) -> Callable[..., Summary]:
    def tuned(
        problems: list[Problem], device: Device, *, measured: bool, options: plan.Options, listen: Callable[..., None]
    ) -> Summary:
        tuned.called = {"problems": problems, "device": device, "measured": measured, "options": options}  # type: ignore[attr-defined]
        for index, problem in enumerate(problems):
            facts: dict[str, Any] = {"problem": problem, "index": index, "total": len(problems), "planned": 96}
            listen(Progress(**facts, phase="search", tried=48, best_us=512.5, best_tflops=268.2, detail=""))
            phase = "kept" if index < kept else "done"
            best = None if problem.key in (failed or {}) else 400.25
            listen(Progress(**facts, phase=phase, tried=96, best_us=best, best_tflops=best and 343.4, detail="why"))
        path = options.cache / device.name / "forward.json"
        return Summary(
            entries=entries, kept=kept, failed=failed or {}, interrupted=interrupted,
            outcomes={"ok": 71, "infeasible": 20}, kernels=64, seconds=12.5, path=path,
        )  # fmt: skip

    return tuned


def test_the_first_line_says_that_nothing_is_measured(
    autoattn: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "tune", fake_tune({}))
    _, out, _ = autoattn("tune", "--device", "a30", "--shapes", shapes)
    first = out.splitlines()[0]
    assert first == (
        "Predicting for NVIDIA A30 (not in this machine: no NVIDIA GPU was found): nothing here is measured"
    )


def test_the_first_line_names_the_other_card_in_the_machine(
    autoattn: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_card(monkeypatch, samples.H200)
    monkeypatch.setattr(tune, "tune", fake_tune({}))
    _, out, _ = autoattn("tune", "--device", "a30", "--shapes", shapes)
    assert "Predicting for NVIDIA A30 (not in this machine: there is NVIDIA H200)" in out.splitlines()[0]


@pytest.mark.parametrize("name", ["h200", "auto", "NVIDIA H200"])
def test_on_the_card_itself_it_measures(
    autoattn: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    set_card(monkeypatch, samples.H200)
    fake = fake_tune({})
    monkeypatch.setattr(tune, "tune", fake)
    _, out, _ = autoattn("tune", "--device", name, "--shapes", shapes)
    assert out.splitlines()[0] == "Measuring on NVIDIA H200, the card in this machine"
    assert fake.called["measured"] is True  # type: ignore[attr-defined]
    assert "predicted" not in out


def test_options_reach_the_search(autoattn: Run, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_tune({})
    monkeypatch.setattr(tune, "tune", fake)
    autoattn("tune", "--device", "a30", "--shapes", shapes, "--group", "prefill", "--effort", "max", "--trials", 7,
             "--timeout", 60, "--seed", 3, "--cache", tmp_path / "mine", "--jobs", 2)  # fmt: skip
    called = fake.called  # type: ignore[attr-defined]
    assert [problem.seq_q for problem in called["problems"]] == [1024, 2048]
    assert called["device"] == samples.A30
    options = called["options"]
    assert (options.effort, options.trials, options.timeout_s) == (plan.Effort.MAX, 7, 60.0)
    assert (options.seed, options.cache, options.jobs) == (3, tmp_path / "mine", 2)


def test_the_cache_is_the_users_when_none_is_named(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_tune({})
    monkeypatch.setattr(tune, "tune", fake)
    autoattn("tune", "--device", "a30", *ONE)
    assert fake.called["options"].cache == resources.user_cache()  # type: ignore[attr-defined]
    assert fake.called["problems"] == [samples.problem()]  # type: ignore[attr-defined]


def test_without_a_terminal_each_finished_problem_is_one_plain_line(
    autoattn: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "tune", fake_tune({}, kept=1))
    _, out, _ = autoattn("tune", "--device", "a30", "--shapes", shapes)
    lines = [line for line in out.splitlines() if line.startswith("[")]
    assert lines == [
        "[1/3] bf16 B4 H32 1024x1024 D128 causal: already up to date, 400.2 us, 343 TFLOP/s predicted",
        "[2/3] bf16 B4 H32 2048x2048 D128 causal: 400.2 us, 343 TFLOP/s predicted, 96 tried",
        "[3/3] bf16 B4 H32 1024x1024 D128 full: 400.2 us, 343 TFLOP/s predicted, 96 tried",
    ]
    assert "\x1b" not in out


def test_the_end_has_a_table_for_each_group_and_the_cache_file(
    autoattn: Run, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = samples.problem(heads_kv=32, seq_kv=1024)
    monkeypatch.setattr(tune, "tune", fake_tune({one.key: samples.predicted(one)}))
    code, out, _ = autoattn("tune", "--device", "a30", "--shapes", shapes, "--cache", tmp_path / "mine")
    assert code == 0
    prefill, train = out.index("\nprefill, predicted"), out.index("\ntrain, predicted")
    row = next(line for line in out[prefill:train].splitlines() if str(one) in line)
    assert "predicted" in row
    assert "500.0" in row
    assert "bound by tensor" in row
    assert f"Cache: {tmp_path / 'mine' / 'a30' / 'forward.json'}" in out
    assert "91 trials (71 ok, 20 infeasible), 64 distinct kernels compiled" in out


def test_a_failed_problem_gives_its_reason_and_exit_code_1(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "tune", fake_tune({}, failed={samples.problem().key: "no variant fits"}))
    code, out, _ = autoattn("tune", "--device", "a30", *ONE)
    assert code == 1
    assert re.search(r"causal:bottom-right +failed +no variant fits", out)
    assert "no kernel (why)" in out


def test_an_interrupted_run_says_how_to_go_on_and_exits_with_130(
    autoattn: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "tune", fake_tune({}, interrupted=True))
    code, out, _ = autoattn("tune", "--device", "a30", *ONE)
    assert code == 130
    assert "run the same command again to go on" in out


def test_an_interrupt_outside_the_search_exits_with_130(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune", interrupted)
    code, _, error = autoattn("tune", "--device", "a30", *ONE)
    assert code == 130
    assert_one_sentence(error)


def test_an_unwritable_cache_is_one_sentence_and_exit_code_1(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise CacheError("the cache /x must be writable, but it is not; use --cache DIR")

    monkeypatch.setattr(tune, "tune", refused)
    code, _, error = autoattn("tune", "--device", "a30", *ONE)
    assert code == 1
    assert error == "autoattn: the cache /x must be writable, but it is not; use --cache DIR\n"


def test_a_terminal_shows_bars_and_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    from io import StringIO

    from rich.console import Console

    screen = Console(file=StringIO(), force_terminal=True, width=120)
    options = plan.Options(effort=plan.Effort.QUICK, trials=None, timeout_s=None, seed=0, cache=Path(), jobs=None)
    with Display(screen, measured=True) as display:
        fake_tune({})([samples.problem()], samples.H200, measured=True, options=options, listen=display)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "all problems" in text
    assert "[1/1]" in text
    assert "best 400.2 us, 343 TFLOP/s" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor was hidden and is back


def test_time_left_counts_only_what_was_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("autoattn.cli.progress.time.monotonic", lambda: now[0])
    clock = Remaining()
    facts: dict[str, Any] = {"problem": samples.problem(), "total": 4, "planned": 10, "detail": ""}
    facts |= {"best_us": None, "best_tflops": None}
    assert clock.left() is None
    clock.hear(Progress(**facts, index=0, phase="kept", tried=0))
    assert clock.left() is None
    now[0] = 110.0
    clock.hear(Progress(**facts, index=1, phase="search", tried=5))
    assert clock.left() == pytest.approx(50.0)  # half a problem took 10 s; two and a half are left
    clock.hear(Progress(**facts, index=1, phase="done", tried=10))
    assert clock.left() == pytest.approx(20.0)


@pytest.mark.parametrize(("seconds", "text"), [(4.25, "4.2 s"), (42, "42 s"), (190, "3 min 10 s"), (7500, "2 h 5 min")])
def test_durations_are_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# Show


def test_show_lists_measured_and_predicted_in_tables_of_their_own(autoattn: Run, user_cache: Path) -> None:
    code, out, _ = autoattn("show")
    assert code == 0
    measured, predicted = out.index("h200, measured"), out.index("h200, predicted")
    assert measured < out.index("0.91x sdpa-cudnn") < predicted < out.index("bound by tensor")


def test_show_filters_by_evidence_and_device(autoattn: Run, user_cache: Path) -> None:
    assert "predicted" not in autoattn("show", "--evidence", "measured")[1]
    assert "0.91x" in autoattn("show", "--device", "NVIDIA H200")[1]
    code, out, _ = autoattn("show", "--device", "a30")
    assert code == 0
    assert "holds no such entry" in out


def test_show_json_is_one_document(autoattn: Run, user_cache: Path) -> None:
    code, out, error = autoattn("show", "--json", "--evidence", "measured")
    assert (code, error) == (0, "")
    (file,) = json.loads(out)
    (entry,) = file["entries"]
    assert (file["device"], file["cache"]) == ("h200", str(user_cache))
    assert entry["evidence"] == "measured"
    assert entry["problem"]["heads_q"] == 32
    assert entry["measurement"]["median_us"] == 400.0
    assert json.loads(autoattn("show", "--json", "--device", "a30")[1]) == []


def test_json_holds_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"rms_error": float("nan"), "time_us": float("inf"), "entry": samples.measured()})
    document = json.loads(capsys.readouterr().out)
    assert (document["rms_error"], document["time_us"]) == (None, None)


def test_show_keeps_control_codes_of_a_cache_from_the_terminal(autoattn: Run, tmp_path: Path) -> None:
    name = "\x1b[31m[red]red[/red]\nrow"
    rival = dataclasses.replace(samples.measured().rivals[0], name=name)
    cache.merge(tmp_path, samples.H200, Op.FORWARD, [samples.measured(choice=name, rivals=(rival,))])
    _, out, _ = autoattn("show", "--cache", tmp_path)
    assert "\x1b" not in out
    assert "[red]red[/red]\\nrow" in out


# Explain


def explained(problem: Problem, device: Device | None, folder: Path | None = None) -> dispatch.Explanation:
    explained.called = (problem, device, folder)  # type: ignore[attr-defined]
    return dispatch.Explanation(
        problem=problem, route="kernel", level=dispatch.Level.BUCKET, reason="a tuned problem is near",
        entry=samples.measured(), variant=samples.measured().variant,
        steps=("exact: no entry for this problem", "bucket: found one"),
    )  # fmt: skip


def test_explain_prints_route_level_reason_and_steps(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "explain", explained)
    code, out, _ = autoattn("explain", "--device", "h200", "--cache", "here", *ONE)
    assert code == 0
    words = ("kernel", "bucket", "a tuned problem is near", "BLOCK_M=", "1. exact: no entry", "2. bucket: found one")
    positions = [out.index(word) for word in words]
    assert positions == sorted(positions)
    assert explained.called == (samples.problem(), samples.H200, Path("here"))  # type: ignore[attr-defined]


def test_explain_json_is_one_object_for_a_problem_and_a_list_for_a_file(
    autoattn: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "explain", explained)
    one = json.loads(autoattn("explain", "--json", *ONE)[1])
    assert (one["route"], one["level"], one["problem"]["seq_kv"]) == ("kernel", "bucket", 4096)
    assert len(one["steps"]) == 2
    many = json.loads(autoattn("explain", "--json", "--shapes", shapes)[1])
    assert [document["problem"]["seq_q"] for document in many] == [1024, 2048, 1024]


# Render


def test_render_writes_the_templates_default_as_python(autoattn: Run) -> None:
    code, out, _ = autoattn("render", "--device", "a30", *ONE)
    assert code == 0
    assert out.splitlines()[0] == f"# {samples.problem()}, for NVIDIA A30"
    assert "# default of the template; source digest " in out.splitlines()[1]
    compile(out, "kernel.py", "exec")
    assert "@triton.jit" in out


def test_render_prefers_the_winner_of_the_cache(autoattn: Run, user_cache: Path, tmp_path: Path) -> None:
    code, out, _ = autoattn("render", "--device", "h200", *ONE, "--out", tmp_path / "kernel.py")
    assert (code, out) == (0, f"{tmp_path / 'kernel.py'}\n")
    text = (tmp_path / "kernel.py").read_text()
    assert "# measured winner of the cache" in text
    assert f"BLOCK_M = tl.constexpr({samples.measured().params['BLOCK_M']})" in text


def test_render_changes_what_param_names(autoattn: Run) -> None:
    _, out, _ = autoattn("render", "--device", "a30", *ONE, "--param", "BLOCK_M=64", "--param", "BLOCK_N=32")
    assert "changed by --param" in out.splitlines()[1]
    assert "BLOCK_M = tl.constexpr(64)" in out
    assert "BLOCK_N = tl.constexpr(32)" in out


def test_render_says_when_a_variant_cannot_run_on_the_device(autoattn: Run) -> None:
    choices = space.load("triton/forward").choices
    largest = {"BLOCK_M": max(choices["BLOCK_M"]), "BLOCK_N": max(choices["BLOCK_N"]), "num_warps": 1}  # type: ignore[type-var]
    settings = [word for name, value in largest.items() for word in ("--param", f"{name}={value}")]
    _, out, _ = autoattn("render", "--device", "a30", *ONE, *settings)
    assert out.splitlines()[2].startswith("# cannot run on that device: ")


def test_render_adds_the_log_sum_exp(autoattn: Run) -> None:
    assert "lse_ptr" not in autoattn("render", "--device", "a30", *ONE)[1]
    assert "lse_ptr" in autoattn("render", "--device", "a30", *ONE, "--lse")[1]


# Verify, report, devices


def test_verify_lists_kernels_and_exits_with_1_when_one_fails(
    autoattn: Run, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(ok: bool) -> Callable[..., list[verify.Verification]]:
        return lambda entries, device: [
            verify.Verification(problem=entry.problem, ok=ok, detail="the digests") for entry in entries
        ]

    monkeypatch.setattr(verify, "verify", checked(True))
    code, out, _ = autoattn("verify", "--device", "h200")
    assert code == 0
    assert out.count("the digests") == 2
    monkeypatch.setattr(verify, "verify", checked(False))
    code, out, _ = autoattn("verify", "--device", "h200")
    assert code == 1
    assert out.count("FAILED") == 2


def test_verify_takes_the_users_entry_before_the_shipped_one(
    autoattn: Run, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = samples.measured(time_us=999.0)
    cache.merge(resources.shipped_cache(), samples.H200, Op.FORWARD, [shipped])
    seen: list[Any] = []
    monkeypatch.setattr(verify, "verify", lambda entries, device: seen.extend(entries) or [])
    autoattn("verify", "--device", "h200")
    assert [entry.time_us for entry in seen if entry.problem == shipped.problem] == [400.0]


def test_report_prints_the_files_it_wrote(autoattn: Run, user_cache: Path, tmp_path: Path) -> None:
    code, out, _ = autoattn("report", "--cache", user_cache, "--out", tmp_path / "out")
    assert code == 0
    assert out.splitlines() == [str(tmp_path / "out" / "report.html"), str(tmp_path / "out" / "report.md")]
    assert all(Path(line).stat().st_size > 0 for line in out.splitlines())


def test_report_takes_the_shipped_cache_when_the_users_is_empty(autoattn: Run, tmp_path: Path) -> None:
    cache.merge(resources.shipped_cache(), samples.A30, Op.FORWARD, [samples.predicted()])
    code, out, _ = autoattn("report", "--out", tmp_path / "out")
    assert code == 0
    assert "NVIDIA A30" in Path(out.splitlines()[1]).read_text()


def test_devices_lists_profiles_and_says_what_is_here(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = autoattn("devices")
    assert code == 0
    assert "NVIDIA A30" in out
    assert "No NVIDIA GPU was found" in out
    set_card(monkeypatch, samples.H200)
    assert "In this machine: NVIDIA H200 (h200)." in autoattn("devices")[1]


def test_devices_json_is_one_document(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(autoattn("devices", "--json")[1])
    assert document["present"] is None
    assert {"a30", "a100", "h100", "h200", "l4", "rtx4090", "b200"} <= {one["name"] for one in document["devices"]}


# In a process of its own


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autoattn", *arguments],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), (["tune"], 2), (["tune", "--device", "a99", *ONE], 2), (["verify", "--device", "a30"], 1)],
)
def test_exit_codes_of_the_process(arguments: list[str], code: int, tmp_path: Path) -> None:
    done = process(*arguments, "--cache", str(tmp_path)) if arguments[0] == "verify" else process(*arguments)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    script = f"{sys.executable} -m autoattn devices --json | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "{\n"
    assert done.stderr == ""


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
    assert all(len(line) <= width for line in out.splitlines() if not line.startswith((" (", "h200")))
    assert ("left out" in out) == (columns < len(names))
