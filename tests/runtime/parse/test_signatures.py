"""Types of the public API: a user's `mypy --strict` sees them, and the TypedDicts agree with the functions."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from checkout_paths import CHECKOUT

import autoattn
from autoattn.runtime.parse.signatures import Arguments, PackedArguments

USER = """\
import torch
import autoattn
from autoattn import Attention, attention, explain, packed_attention

q = torch.randn(1, 2, 8, 16)
starts = torch.tensor([0, 8], dtype=torch.int32)
module = Attention(causal=True, layout="bshd")
reveal_type(attention(q, q, q, causal=True))
reveal_type(attention(q, q, q, return_lse=True))
reveal_type(packed_attention(q[0], q[0], q[0], starts, starts, 8, 8))
reveal_type(autoattn.packed_attention(q[0], q[0], q[0], starts, starts, 8, 8, return_lse=True))
reveal_type(module(q, q, q))
reveal_type(explain(q, q, q, mask="causal").reason)
reveal_type(module.explain(q, q, q))
attention(q, q, q, caussal=True)
explain(q, q, q, layout=3)
Attention(causal=True, heads=2)
autoattn.atention
"""
TENSOR = "torch._tensor.Tensor"
REVEALED = {
    8: TENSOR,
    9: f"tuple[{TENSOR}, {TENSOR}]",
    10: TENSOR,
    11: f"tuple[{TENSOR}, {TENSOR}]",
    12: TENSOR,
    13: "str",
    14: "autoattn.runtime.plan.explanations.Explanation",
}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_users_strict_mypy_sees_real_types_and_mistakes(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    words = ("--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), "user.py")
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *words],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(CHECKOUT)},
    )  # fmt: skip
    notes = re.findall(r'^user\.py:(\d+): note: Revealed type is "(.*)"$', run.stdout, flags=re.MULTILINE)
    assert {int(line): name for line, name in notes} == REVEALED, run.stdout + run.stderr
    assert {int(line) for line in re.findall(r"^user\.py:(\d+): error", run.stdout, flags=re.MULTILINE)} == {
        15, 16, 17, 18,
    }  # fmt: skip


def test_the_package_says_that_it_is_typed() -> None:
    assert files("autoattn").joinpath("py.typed").is_file()


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(autoattn.attention, Arguments), (autoattn.packed_attention, PackedArguments)],
)
def test_overloads_take_the_keyword_arguments_of_the_function(function: Callable[..., Any], arguments: type) -> None:
    parameters = inspect.signature(function).parameters.values()
    keywords = {
        parameter.name: parameter.annotation
        for parameter in parameters
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert keywords.pop("return_lse") == "bool"
    assert keywords == {name: kind.__forward_arg__ for name, kind in arguments.__annotations__.items()}


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'atention'"):
        autoattn.atention  # type: ignore[attr-defined]  # noqa: B018
