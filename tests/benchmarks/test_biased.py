"""The benchmark of calls beside a bias: which biases it adds, and what it compares answers with."""

from __future__ import annotations

from dataclasses import replace

import biased
import pytest
import torch

SMALL = biased.Row(dtype=torch.float32, batch=2, heads=(4, 2), lengths=(5, 7), head_dim=8, sharing="1HS")


@pytest.mark.parametrize(
    ("sharing", "shape"),
    [("1HS", (1, 4, 5, 7)), ("11S", (1, 1, 5, 7)), ("B1S", (2, 1, 5, 7)), ("1H1", (1, 4, 1, 7)), ("BHS", (2, 4, 5, 7))],
)
def test_an_axis_that_shares_the_bias_is_one_long(sharing: str, shape: tuple[int, ...]) -> None:
    assert replace(SMALL, sharing=sharing).bias_shape == shape


def test_each_row_has_a_name_of_its_own() -> None:
    assert len({str(row) for row in biased.ROWS}) == len(biased.ROWS)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_answers_are_compared_with_the_same_call_in_float32(
    monkeypatch: pytest.MonkeyPatch, training: bool, learns: bool
) -> None:
    monkeypatch.setattr(biased, "DEVICE", torch.device("cpu"))
    row = replace(SMALL, learns=learns)
    tensors = biased.tensors_of(row, training)
    right = biased.expected(row, tensors)
    assert len(right) == 1 + training * (3 + learns)
    answer = biased.contestants(row, tensors)["SDPA"]()
    assert biased.error_of(answer, right) < 1e-5
    wrong = biased.contestants(row, replace(tensors, bias=tensors.bias.detach().flip(3)))["SDPA"]()
    assert biased.error_of(wrong[:1], right[:1]) > 1e-2
