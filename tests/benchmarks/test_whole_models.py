"""The benchmark of whole models: each row has a time of each attention or says why not, and none of a wrong one."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rarely import rarely

pytest.importorskip("transformers", reason="needs Hugging Face Transformers, which is not installed")
import model_tasks
import whole_models
from model_tasks import MODELS, Model, Task

from autoattn import functional
from autoattn.hardware import nvidia
from autoattn.integrations import huggingface

CPU = torch.device("cpu")
REFUSED = {"Gemma2Config", "GptOssConfig"}  # by Transformers itself, with SDPA


@pytest.fixture(autouse=True)
def registered() -> None:
    huggingface.register()


def options(**said: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"row": "", "rounds": 3, "seconds": 100.0, "compiled": False, **said})


def rows_of(model: Model, **said: Any) -> list[whole_models.Row]:
    return list(whole_models.rows([model.shrunk()], CPU, options(**said)))


@pytest.mark.filterwarnings("ignore:PyTorch's attention computes")
@pytest.mark.parametrize(
    "model", rarely(MODELS, lambda model: model.config == "Gemma2Config"), ids=lambda model: model.name
)
def test_a_row_has_times_of_all_attentions_or_the_reason(model: Model) -> None:
    rows = rows_of(model)
    assert [row.task for row in rows] == [task for task in model.tasks if task is not Task.COMPILED]
    for row in rows:
        assert set(row.reasons) == ({"sdpa"} if model.config in REFUSED else set()), row.reasons
        timed = {"autoattn", "sdpa", "eager"} - set(row.reasons)
        assert {name for name in (*whole_models.RIVALS, "autoattn") if row.milliseconds(name)} == timed
        assert all(len(row.milliseconds(name)) == 3 for name in timed)
        assert row.ran, "what answered the calls"


@pytest.mark.filterwarnings("ignore:PyTorch's attention computes")
def test_an_attention_whose_numbers_are_wrong_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    before = functional.attention
    monkeypatch.setattr(
        functional, "attention", lambda query, key, value, **words: before(query, key.flip(2), value, **words)
    )
    for row in rows_of(MODELS[0]):
        assert row.reasons["autoattn"].startswith("wrong: its error is")
        assert not row.milliseconds("autoattn")
        assert row.milliseconds("sdpa")


def test_an_attention_that_fails_says_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(*given: Any, **words: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(functional, "attention", attention)
    (row,) = rows_of(MODELS[0], row="prefill")
    assert row.reasons == {"autoattn": "OutOfMemoryError: no room"}
    assert row.milliseconds("eager")
    lines = list(whole_models.table(iter([row])))
    assert "| [1] |" in lines[2]
    assert lines[-1] == "1. autoattn: OutOfMemoryError: no room"


def test_rows_behind_the_last_second_are_listed() -> None:
    rows = rows_of(MODELS[0], seconds=-1.0)
    assert [row.reasons for row in rows] == [{"autoattn": "not reached in --seconds -1"}] * 4


def test_no_float_that_is_not_finite_is_right() -> None:
    ones = torch.ones(3)
    assert whole_models.distance(ones * torch.nan, ones) == float("inf")
    assert whole_models.distance(ones * 1.5, ones) == pytest.approx(0.5)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_models_of_a_gpu_are_built_with_their_real_layers(model: Model) -> None:
    net = model_tasks.build(model, torch.device("meta"), torch.bfloat16)
    weights = dict(net.named_parameters())
    assert all(weight.dtype is torch.bfloat16 for weight in weights.values())
    sizes = {"LlamaConfig": 1.14e9, "MistralConfig": 1.14e9, "Gemma2Config": 0.91e9, "GptOssConfig": 0.69e9,
             "BertConfig": 0.11e9, "ViTConfig": 0.08e9}  # fmt: skip
    assert sum(weight.numel() for weight in weights.values()) == pytest.approx(sizes[model.config], rel=0.05)


def test_the_page_names_the_machine_and_has_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    words = ["--device", "cpu", "--tiny", "--rounds", "9", "--row", "384 pixels, forward", "--out", str(page)]
    whole_models.main(words)
    text = page.read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    assert text.startswith("# Whole models on a CPU, 20")
    assert f"`python benchmarks/whole_models.py {' '.join(words)}`" in text
    number = r"[\d.e+]+ \([\d.e+]+ to [\d.e+]+\)"
    ratio = rf"{number}, \*\*[\d.]+\*\* \([\d.]+ to [\d.]+\)"
    cells = [r"ViT large, 384 pixels", "forward pass, 2 pictures", number, ratio, "", ratio, r"sdpa \(2\)"]
    assert re.search("^\\| " + r" \| ".join(cells) + r" \|$", text, re.MULTILINE)
    assert re.search(r"^- forward pass: sdpa takes [\d.]+ times as long \(1 row\)$", text, re.MULTILINE)


def test_examples_make_one_table_and_one_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        if name == "train_llama":
            return SimpleNamespace(main=lambda words: 1 / 0)
        return SimpleNamespace(main=lambda words: {"sdpa": 200.0, "autoattn": 210.0})

    monkeypatch.setattr(whole_models, "_load_example", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, _, *lines = whole_models.example_table(tiny=True)
    ends = [line.split("` | ")[1] for line in lines]
    assert ends == [
        "tokens a second | autoattn | 210.0 | 200.0 | 1.050 |",
        "tokens a second | autoattn | ZeroDivisionError: division by zero |  |  |",
        "steps a second | autoattn | 210.0 | 200.0 | 1.050 |",
    ]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:PyTorch's attention computes")
def test_the_examples_run_with_these_words(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers.models.attention_dispatch", reason="needs diffusers, which is not installed")
    lines = list(whole_models.example_table(tiny=True))
    assert len(lines) == 5
    assert all(re.search(r"\| autoattn \| [\d.,]+ \| [\d.,]+ \| [\d.]+ \|$", line) for line in lines[2:])


def test_without_a_gpu_it_says_how_to_try_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvidia, "present", lambda: None)
    with pytest.raises(SystemExit):
        whole_models.main([])
    assert "give --device cpu --tiny to try the script" in capsys.readouterr().err
