"""The command line as tests run it: in this process, without a GPU, on small files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import samples
from checkout_paths import CHECKOUT
from fake_device import set_device

from autoattn.cache import store
from autoattn.cli.app import run
from autoattn.codegen import resources
from autoattn.core.mask import Mask
from autoattn.core.problem import Op

ROOT = CHECKOUT
COMMANDS = (
    "init", "tune", "warm", "show", "explain", "render", "verify", "report", "bench", "ablate", "devices", "cache",
)  # fmt: skip
CALL = ("--dtype", "bf16", "--batch", "4", "--heads", "32", "--heads-kv", "8", "--seq-q", "1024", "--seq-kv", "4096",
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
    set_device(monkeypatch, None)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(resources, "shipped_cache", lambda: tmp_path / "shipped")


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
    entries = [
        samples.current(entry) for entry in (samples.measured(), samples.predicted(samples.problem(mask=Mask())))
    ]
    store.merge(folder, samples.H200, Op.FORWARD, entries)
    return folder


def assert_one_sentence(error: str) -> None:
    assert error.startswith("autoattn: ")
    assert error.count("\n") == 1
    assert error.endswith("\n")
