"""What names a kernel's machine code: the texts that share it need not be measured twice."""

from __future__ import annotations

from dataclasses import replace

import kernels
import pytest

from autoattn.codegen import render
from autoattn.core.variant import Source
from autoattn.kernels import compiler

SOURCE = render.render(kernels.problem(), kernels.variant())


def code(source: Source) -> str:
    return compiler.inspect(source, 80).code


def test_a_comment_changes_the_text_and_not_the_code() -> None:
    other = replace(SOURCE, text=SOURCE.text + "\n# the same kernel\n")
    assert other.digest != SOURCE.digest
    assert code(other) == code(SOURCE)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("return (", "return (2 * "),  # other programs are launched
        ("tl.exp2(", "1.0 * 1.5 * tl.exp2("),  # other instructions
        ('"num_warps": 1', '"num_warps": 2'),
    ],
)
def test_what_is_launched_otherwise_or_computes_otherwise_is_another_kernel(here: str, there: str) -> None:
    assert here in SOURCE.text
    assert code(replace(SOURCE, text=SOURCE.text.replace(here, there))) != code(SOURCE)
