"""docs/integrations.md: its examples run, in the order of the page."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from checkout_paths import CHECKOUT

PAGE = (CHECKOUT / "docs" / "integrations.md").read_text(encoding="utf-8")
EXAMPLES = {
    title: re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
}


def run(title: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    torch.manual_seed(0)  # of a model's weights, which decide when a text ends
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # there may be no GPU
        for example in EXAMPLES[title]:
            exec(example, names)
    return names


def test_the_examples_of_transformers_run() -> None:
    pytest.importorskip("transformers", reason="needs Hugging Face Transformers, which is not installed")
    assert run("Hugging Face Transformers")["tokens"].shape == (1, 24)


def test_the_examples_of_pytorch_and_comfyui_run() -> None:
    assert str(run("PyTorch")["replaced"]).startswith("1 calls by ")
    assert run("ComfyUI")["output"].shape == (1, 4096, 512)


def test_the_examples_of_diffusers_run() -> None:
    pytest.importorskip("diffusers", reason="needs diffusers, which is not installed")
    assert run("diffusers")["registration"]


def test_every_example_of_the_page_is_run_and_every_script_is_there() -> None:
    ran = {"Hugging Face Transformers", "PyTorch", "diffusers", "ComfyUI"}
    assert {title for title, examples in EXAMPLES.items() if examples} == ran
    scripts = set(re.findall(r"^python (\S+)", PAGE, flags=re.MULTILINE))
    assert scripts == {f"examples/{path.name}" for path in (CHECKOUT / "examples").glob("*.py")}
