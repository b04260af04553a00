"""`autoattn init` and `--model`: the file that is written, and the problems of a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import samples
from command_line import CALL, Run, assert_one_sentence, autoattn, no_card  # noqa: F401 - fixtures
from fake_device import set_device
from fake_tuner import fake_tune
from model_configs import BERT, DEEPSEEK, LLAMA

from autoattn.core.problem import Op
from autoattn.search import tuner
from autoattn.shapes import shapes_file as shapes_files


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither transformers nor huggingface_hub, and an empty folder to work in."""
    for name in ("transformers", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tuner that does nothing; `.called` says with what."""
    fake = fake_tune({})
    monkeypatch.setattr(tuner, "tune", fake)
    return fake


def config(tmp_path: Path, content: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path / "config.json"


def test_init_writes_a_file_that_loads_and_tunes_as_it_stands(autoattn: Run, tuned: Any) -> None:
    code, out, error = autoattn("init")
    assert (code, error) == (0, "")
    assert out == "shapes.yaml: next, autoattn tune --device auto --shapes shapes.yaml\n"
    assert autoattn("tune", "--device", "h200", "--shapes", "shapes.yaml")[0] == 0
    assert len(tuned.called["problems"]) == 5


def test_init_never_replaces_a_file_unless_forced(autoattn: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mine")
    code, out, error = autoattn("init", "mine.yaml")
    assert (code, out) == (2, "")
    assert_one_sentence(error)
    assert "mine.yaml is there already; name another file, or add --force to replace it" in error
    assert (tmp_path / "mine.yaml").read_text() == "mine"
    assert autoattn("init", "mine.yaml", "--force")[0] == 0
    assert shapes_files.load(tmp_path / "mine.yaml")


def test_init_says_where_nothing_can_be_written(autoattn: Run) -> None:
    code, _, error = autoattn("init", "no/such/folder/shapes.yaml")
    assert code == 1
    assert_one_sentence(error)


@pytest.mark.parametrize("content", [LLAMA, BERT, DEEPSEEK])
def test_init_writes_the_problems_that_tune_makes_of_a_model(
    autoattn: Run, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any]
) -> None:
    set_device(monkeypatch, samples.H200)
    path = config(tmp_path, content)
    choices = ("--model", path, "--lengths", "256,512", "--batch", 2, "--dtype", "fp16")
    assert autoattn("tune", "--device", "h200", *choices)[0] == 0
    by_model = tuned.called["problems"]
    assert autoattn("init", "model.yaml", *choices)[0] == 0
    autoattn("tune", "--device", "h200", "--shapes", "model.yaml")
    assert tuned.called["problems"] == by_model
    assert {(problem.batch, problem.dtype.value, problem.seq_kv) for problem in by_model} == {
        (2, "float16", 256),
        (2, "float16", 512),
    }


def test_gradients_of_a_model_are_left_out_where_the_card_is_absent_and_that_is_said(
    autoattn: Run, tuned: Any, tmp_path: Path
) -> None:
    _, out, _ = autoattn("tune", "--device", "h200", "--model", config(tmp_path, LLAMA))
    assert "Note: 3 problems of gradients are left out, which need the card.\n" in out
    assert {problem.op for problem in tuned.called["problems"]} == {Op.FORWARD}
    assert "left out" not in autoattn("tune", "--device", "h200", "--model", tmp_path, "--group", "decode")[1]


def test_groups_of_a_model_may_be_picked(autoattn: Run, tuned: Any, tmp_path: Path) -> None:
    path = config(tmp_path, LLAMA)
    autoattn("tune", "--device", "h200", "--model", tmp_path, "--group", "decode")
    assert [problem.seq_q for problem in tuned.called["problems"]] == [1, 1, 1]
    code, _, error = autoattn("tune", "--device", "h200", "--model", path, "--group", "serving")
    assert code == 2
    assert f"--group must be a group of --model {path}, got 'serving'; it has prefill, training, decode" in error


def test_what_was_assumed_is_said_and_written(autoattn: Run, tuned: Any, tmp_path: Path) -> None:
    path = config(tmp_path, BERT)
    assert (
        "Note: the config names no dtype, so bfloat16 is taken;"
        in autoattn("tune", "--device", "h200", "--model", path)[1]
    )
    assert "Note: the config names no dtype" in autoattn("init", "--model", path)[1]
    text = " ".join(line.removeprefix("# ") for line in (tmp_path / "shapes.yaml").read_text().splitlines())
    assert "Note: the config names no dtype, so bfloat16 is taken; --dtype names another." in text


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("tune", "--device", "h200", "--model", "{file}", "--shapes", "x"), "from --model or from --shapes, got both"),
        (("tune", "--device", "h200", "--model", "{file}", *CALL), "from the options of one problem, got both"),
        (("tune", "--device", "h200", "--model", "{file}", "--heads", "0"), "options of one problem, got both"),
        (("tune", "--device", "h200", "--lengths", "1024", *CALL), "--lengths is a choice for --model, got no --model"),
        (("tune", "--device", "h200", "--model", "{file}", "--lengths", "a"), "--lengths must be whole numbers from 1"),
        (("tune", "--device", "h200", "--model", "{file}", "--dtype", "int8"), "got 'int8'"),
        (("tune", "--device", "h200", "--model", "{file}", "--batch", "0"), "batch must be a whole number from 1"),
        (("tune", "--device", "h200", "--model", "./none"), "must be a model's config.json, but there is none"),
        (("init", "--model", "none.json"), "must be a model's config.json, but there is none"),
        (("init", "--model", "a/model"), "must be a path where neither transformers nor huggingface_hub is installed"),
        (("init", "--batch", "2"), "--batch is a choice for --model, got no --model"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(autoattn: Run, tmp_path: Path, words: tuple[str, ...], fault: str) -> None:
    path = config(tmp_path, LLAMA)
    code, out, error = autoattn(*(word.replace("{file}", str(path)) for word in words))
    assert (code, out) == (2, "")
    assert_one_sentence(error)
    assert fault in error
    assert not (tmp_path / "shapes.yaml").exists()


def test_a_head_dim_that_no_kernel_takes_is_refused_before_a_file_is_written(autoattn: Run, tmp_path: Path) -> None:
    code, _, error = autoattn("init", "--model", config(tmp_path, {**LLAMA, "head_dim": 512}))
    assert code == 2
    assert_one_sentence(error)
    assert "head_dim must be at most 256, got 512" in error
    assert not (tmp_path / "shapes.yaml").exists()


def test_a_name_is_looked_up_by_transformers_without_a_download(
    autoattn: Run, tuned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups: list[Any] = []

    def from_pretrained(name: str, **words: Any) -> Any:
        lookups.append((name, words))
        if name != "a/model":
            raise OSError("We couldn't connect to\n'https://huggingface.co'")
        return SimpleNamespace(to_dict=lambda: LLAMA)

    installed = SimpleNamespace(AutoConfig=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", installed)  # type: ignore[arg-type]
    assert autoattn("tune", "--device", "h200", "--model", "a/model")[0] == 0
    assert tuned.called["problems"][0].heads_q == 32
    assert lookups == [("a/model", {"local_files_only": True, "trust_remote_code": False})]
    code, _, error = autoattn("tune", "--device", "h200", "--model", "other")
    assert code == 2
    assert_one_sentence(error)
    assert "a name that transformers has on this machine, got 'other'" in error
    assert "name a config.json, or a folder that holds one" in error


def test_a_name_is_looked_up_in_the_cache_of_huggingface_hub(
    autoattn: Run, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path, LLAMA)
    cached = {"a/model": str(path), "gone": object()}
    hub = SimpleNamespace(try_to_load_from_cache=lambda name, file: cached.get(name))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    assert autoattn("tune", "--device", "h200", "--model", "a/model")[0] == 0
    for name in ("gone", "never"):
        code, _, error = autoattn("tune", "--device", "h200", "--model", name)
        assert code == 2
        assert_one_sentence(error)
        assert "whose config huggingface_hub has on this machine" in error
