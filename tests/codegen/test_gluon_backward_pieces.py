"""Hopper's backward template pays for head dims between powers of two by what they hold, where products allow it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hopper_gradients import problem, source
from rarely import rarely

from autoattn.core.mask import Mask
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import Layout
from autoattn.kernels.compiler import build, inspect

pytestmark = [pytest.mark.usefixtures("nothing_compiled_before"), pytest.mark.exhaustive]

# Of head dims between powers of two, the columns of the first and of the second consumer, of the gradients of queries;
# and in wide heads the columns of the products for the gradients of keys, and of values. In front of them: products of
# a step that are summed over a head dim, 16 deep each, of scores and of weights' gradients.
BETWEEN: dict[tuple[int, int], tuple[tuple[int, int], tuple[tuple[int, ...], ...]]] = {
    (72, 72): ((5, 5), ((64, 16),)),
    (80, 128): ((5, 8), ((64, 16),)),
    (96, 96): ((6, 6), ((64, 32),)),
    (112, 112): ((7, 7), ((64, 64),)),
    (160, 160): ((10, 10), ((128, 32), (128, 32), (128, 32))),
    (192, 128): ((12, 8), ((128, 64), (128, 64), (128,))),
}


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), rarely(list(BETWEEN), lambda head_dims: head_dims in ((96, 96), (192, 128)))
)
def test_products_of_head_dims_between_powers_of_two_leave_padding_out(head_dim: int, head_dim_v: int) -> None:
    depths, (queries, *pairs) = BETWEEN[head_dim, head_dim_v]
    call = problem(head_dim=head_dim, head_dim_v=head_dim_v)
    # Each product is once in the text.
    chosen: dict[str, Any] = {"mask_loop": "branch", "schedule": "one_tile", "next_scores": "own_step"}
    ptx = build(source(call, **chosen), 90, "backward_keys").asm["ptx"]
    expected: Counter[int] = Counter()
    for c in range(2):
        expected[64] += depths[c] if pairs else sum(depths)  # wide heads have one of the two products each
        expected[queries[c]] += 4 if pairs else 2 * 4  # of 64 keys, or of those of both
        for count in pairs[c] if pairs else (128, 128):
            expected[count] += 4
    assert Counter(int(columns) for columns in re.findall(r"wgmma\.mma_async\S*m64n(\d+)k16", ptx)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", rarely((72, 96, 112, 160, 192), lambda head_dim: head_dim == 112))
def test_more_products_of_fewer_columns_neither_wait_for_one_another_nor_fill_registers(head_dim: int) -> None:
    report = inspect(source(problem(head_dim=head_dim, mask="causal")), 90)
    assert report.spilled_bytes <= 80
    for loop in (report.loop, report.masked_loop):
        assert not [name for name in loop if name.startswith(("LDL", "STL"))]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_head_dims_that_fill_their_tiles_have_one_product_for_all_columns(head_dim: int) -> None:
    text = source(problem(head_dim=head_dim)).text
    product = text[text.index("def multiply_queries(") : text.index("def multiply_keys(")]
    assert ".slice(" not in product
    assert product.count("warpgroup_mma(") == 1
    assert "_REST" not in text


WIDE: dict[str, dict[str, Any]] = {
    "causal 256": {"mask": "causal", "head_dim": 256},
    "softcap and slopes": {"mask": "causal", "head_dim": 192, "modifiers": Modifiers(softcap=True, alibi=True)},
    "slopes 256": {"head_dim": 256, "modifiers": Modifiers(alibi=True)},
    "positions": {"head_dim": 256, "modifiers": Modifiers(score_mod="score + 0.01 * (kv_idx - q_idx)")},
    "tanh": {"mask": "causal", "head_dim": 192, "modifiers": Modifiers(score_mod="20.0 * tanh(score / 20.0)")},
    "window": {"mask": "window:600,64", "head_dim": 256},
    "packed": {"mask": "causal", "layout": Layout.PACKED, "head_dim": 160, "head_dim_v": 112},
    "table": {"mask": Mask.blocks(128, 128, 0.5), "head_dim": 256},
    "in turns": {"mask": "causal", "head_dim": 256, "deterministic": True},
    "window, in turns": {"mask": "window:600,64", "head_dim": 256, "deterministic": True},
    "narrow keys": {"mask": "causal", "head_dim": 56, "head_dim_v": 256},
}


@pytest.mark.parametrize("kind", rarely(WIDE, lambda kind: kind == "in turns"))
def test_consumers_of_wide_heads_keep_a_step_in_registers(kind: str) -> None:
    report = inspect(source(problem(**WIDE[kind])), 90)
    assert report.spilled_bytes <= 32
    for loop in (report.loop, report.masked_loop):
        assert not [name for name in loop if name.startswith(("LDL", "STL"))]
