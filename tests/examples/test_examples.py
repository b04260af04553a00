"""The scripts of examples/ run in seconds on small sizes, and print what they promise."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
from checkout_paths import CHECKOUT
from replaced_calls import calls  # noqa: F401 - a fixture

from autoattn import functional

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
    sizes = ["--prompt", "12", "--tokens", "10", "--batch", "2", "--rounds", "1", "--cache", cache]
    load("generate").main([*SMALL, *sizes])
    lines = re.findall(r"^(\w+) +[\d.]+ tokens a second, .*; (.*) tokens agree$", capsys.readouterr().out, re.M)
    assert lines == [("sdpa", "20 of 20"), ("autoattn", "20 of 20")]


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


IMAGE = ["--heads", "1", "--layers", "1", "--pixels", "64", "--text", "8", "--steps", "2", "--rounds", "1"]


def test_images_have_the_latents_of_sdpa_by_calls_of_autoattn(
    capsys: pytest.CaptureFixture[str], calls: list[Any]
) -> None:
    pytest.importorskip("diffusers.models.attention_dispatch", reason="needs diffusers, which is not installed")
    speeds = load("generate_images").main(IMAGE)
    printed = capsys.readouterr().out
    pattern = r"^(\w+) +[\d.]+ steps a second, [\d.]+ images a second of 2 steps$"
    assert re.findall(pattern, printed, re.M) == list(speeds) == ["sdpa", "autoattn"]
    assert "the latents differ by" in printed
    assert calls == [(1, 1, 24, 128)] * (2 * 2 * 3), "rounds, steps, and blocks of 16 tokens of the image and 8 of text"


def test_other_latents_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers.models.attention_dispatch", reason="needs diffusers, which is not installed")
    before = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention",
        lambda query, key, value, *given, **words: before(query, key.flip(2), value, *given, **words),
    )  # fmt: skip
    with pytest.raises(SystemExit, match=r"latents must agree up to 0\.001 of their norm, got"):
        load("generate_images").main(IMAGE)


def test_pixels_that_no_token_divides_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers.models.attention_dispatch", reason="needs diffusers, which is not installed")
    with pytest.raises(SystemExit):
        load("generate_images").main(["--pixels", "100"])
    assert "--pixels must be a multiple of 16" in capsys.readouterr().err
