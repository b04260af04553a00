"""The shapes file that `autoattn init` writes."""

from __future__ import annotations

import re
from pathlib import Path

import model_configs
import pytest
import yaml

from autoattn.core.problem import Op
from autoattn.shapes import model_config, shapes_file, starter_file


def test_the_starter_is_read_back_as_what_was_written(tmp_path: Path) -> None:
    text = starter_file.write(starter_file.STARTER)
    assert yaml.safe_load(text) == starter_file.STARTER
    (tmp_path / "shapes.yaml").write_text(text)
    named = shapes_file.load(tmp_path / "shapes.yaml")
    assert len(named) == 5
    assert {entry.problem.op for entry in named} == {Op.FORWARD}, "gradients need the card"


def test_every_key_of_the_format_is_explained() -> None:
    keys = set(re.findall(r"[a-z_]+", starter_file.KEYS))
    assert set(shapes_file.PARSERS) | {"version", "defaults", "groups", "published", "problems", "description"} <= keys


def test_the_file_is_small_enough_to_read() -> None:
    lines = starter_file.write(starter_file.STARTER).splitlines()
    assert len(lines) < 70
    assert max(map(len, lines)) <= starter_file.WIDTH


@pytest.mark.parametrize("name", ["LLAMA", "MISTRAL", "GEMMA_2", "GEMMA_3", "DEEPSEEK", "BERT", "GPT_2", "GPT_OSS"])
def test_the_problems_of_a_model_are_read_back_as_what_was_written(name: str) -> None:
    config = model_config.read(getattr(model_configs, name), name)
    document = model_config.document(config, dtype="float32:tf32")
    read = yaml.safe_load(starter_file.write(document))
    assert read == document
    assert shapes_file.parse(read, name) == shapes_file.parse(document, name)


@pytest.mark.parametrize(
    "value",
    ["on", "null", "1e3", "a: b", "window:1,0", "-", "#x", "a #b", "", " a", "ends:", "a,b", "0x10", "1x4096", "a - b",
     "causal:top-left", "a; b", "it's", "?", "~"],
)  # fmt: skip
def test_texts_that_yaml_would_read_as_something_else_are_quoted(value: str) -> None:
    document = {
        "version": 1,
        "defaults": {"key": value, "list": [value]},
        "groups": {"g": {"description": value, "problems": [{"key": value}]}},
    }
    assert yaml.safe_load(starter_file.write(document)) == document
