"""Products of queries and keys sum over what a head fills of its tiles, and not over their padding."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from gluon_kernels import problem, source

from autoattn.core.problem import DType
from autoattn.kernels.compiler import inspect

# Columns that each product takes of a tile that holds a head dim whole.
FILLED: dict[int, tuple[int, ...]] = {
    40: (32, 16),
    72: (64, 16),
    96: (64, 32),
    104: (64, 32, 16),
    112: (64, 32, 16),
    160: (128, 32),
    192: (128, 64),
    224: (128, 64, 32),
}
WHOLE: dict[str, Any] = {"HEAD_SPLIT": 0, "BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 2, "output_buffer": "shared"}


def product(text: str) -> str:
    """The function of a kernel's text that multiplies queries and keys."""
    return text[text.index("def multiply_keys(") : text.index("def multiply_values(")]


@pytest.mark.parametrize("head_dim", FILLED)
def test_queries_and_keys_are_multiplied_as_far_as_a_head_fills_their_tiles(head_dim: int) -> None:
    text = product(source(problem(head_dim=head_dim), **WHOLE).text)
    begins = itertools.accumulate(FILLED[head_dim], initial=0)
    columns = [(str(begin), str(width)) for begin, width in zip(begins, FILLED[head_dim], strict=False)]
    assert re.findall(r"query_tile\.slice\((\d+), (\d+), dim=1\)", text) == columns
    assert re.findall(r"key_tile\.slice\((\d+), (\d+)\)", text) == columns
    assert text.count("use_acc=False") == 1, "all but the first add to the scores of those before"


@pytest.mark.parametrize(
    ("facts", "chosen"),
    [
        ({"head_dim": 64}, {}),
        ({"head_dim": 56}, {}),
        ({"head_dim": 120}, {}),
        ({"head_dim": 240}, {}),  # four parts would save one instruction of 16
        ({"head_dim": 80, "dtype": DType.FLOAT8}, {"output_buffer": "own"}),  # its products sum over 32 at least
        ({"head_dim": 80}, {"queries_in": "registers"}),
        ({"head_dim": 80}, {"HEAD_SPLIT": 1}),
    ],
    ids=str,
)
def test_other_tiles_are_multiplied_whole(facts: dict[str, Any], chosen: dict[str, Any]) -> None:
    assert ".slice(" not in product(source(problem(**facts), **{**WHOLE, **chosen}).text)


def test_float8_heads_are_multiplied_in_parts_of_32_and_more() -> None:
    call = problem(head_dim=96, dtype=DType.FLOAT8)
    assert product(source(call, **{**WHOLE, "output_buffer": "own"}).text).count(".slice(64, 32") == 2


def test_a_second_tile_of_keys_is_multiplied_in_the_same_parts() -> None:
    text = product(source(problem(head_dim=112), **{**WHOLE, "BLOCK_N": 96}).text)
    assert re.findall(r"key_tile\.slice\((\d+), (\d+)\)", text) == [("0", "64"), ("64", "32"), ("96", "16")] * 2
    assert text.count("use_acc=False") == 2


def test_the_second_piece_of_a_head_is_multiplied_as_far_as_it_is_filled() -> None:
    text = product(source(problem(head_dim=168), **{**WHOLE, "HEAD_SPLIT": 1}).text)
    assert re.findall(r"query_tile(\[\d\]), key_tile, scores, use_acc=False", text) == ["[0]"]
    assert re.findall(r"query_tile\[(\d)\]\.slice\((\d+), (\d+)", text) == [("1", "0", "32"), ("1", "32", "16")]
    assert text.count("use_acc=False") == 1


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("nothing_compiled_before")
@pytest.mark.parametrize("head_dim", FILLED)
def test_the_machine_has_no_product_of_padding_and_none_waits_for_another(head_dim: int) -> None:
    loop = inspect(source(problem(head_dim=head_dim), **{**WHOLE, "softmax": "first_max"}), 90).loop
    products = sum(count for name, count in loop.items() if name.startswith("HGMMA"))
    assert products == sum(FILLED[head_dim]) // 16 + 64 // 16
    assert loop["WARPGROUP.ARRIVE"] == len(FILLED[head_dim]) + 1, "the compiler would add one to each that waits"
