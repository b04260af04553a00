"""The scripts of examples/ run in seconds on small sizes, and print what they promise."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
from checkout_paths import CHECKOUT

pytest.importorskip("transformers", reason="needs Hugging Face Transformers, which is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:PyTorch's attention computes")
SMALL = ["--hidden", "64", "--layers", "2", "--heads", "4", "--kv-heads", "2"]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, CHECKOUT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_prints_speeds_and_agrees(cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    load("generate").main([*SMALL, "--prompt", "12", "--tokens", "10", "--batch", "2", "--cache", cache])
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w+) +[\d.]+ tokens a second", printed, flags=re.MULTILINE) == ["sdpa", "autoattn"]
    assert "20 of 20 tokens agree" in printed


def test_training_learns_with_the_losses_of_sdpa(capsys: pytest.CaptureFixture[str]) -> None:
    load("train_llama").main([*SMALL, "--tokens", "96", "--longest", "48", "--steps", "6"])
    lines = re.findall(r"^(\w+) +loss ([\d.]+) to ([\d.]+), +[\d.]+ tokens a second$", capsys.readouterr().out, re.M)
    (sdpa, *losses), (autoattn, *ours) = lines
    assert (sdpa, autoattn) == ("sdpa", "autoattn")
    assert ours == losses
    assert float(losses[1]) < float(losses[0])


def test_too_few_steps_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("train_llama").main(["--steps", "2"])
    assert "--steps must be at least 3" in capsys.readouterr().err
