"""What boxes of rows cost the TMA unit, by where rows begin."""

from __future__ import annotations

import pytest
from box_costs import CUT_SECTORS, OF_SECTORS, box_cost, boxes_of_row


@pytest.mark.parametrize(
    ("row_bytes", "cost"),
    [
        pytest.param(256, 1.0, id="rows-begin-with-lines"),
        pytest.param(64, 1.0, id="two-rows-fill-a-line"),
        pytest.param(192, OF_SECTORS, id="rows-begin-with-sectors"),
        pytest.param(96, OF_SECTORS, id="rows-begin-with-sectors-of-one-box"),
        pytest.param(240, CUT_SECTORS, id="rows-begin-within-sectors"),
        pytest.param(80, CUT_SECTORS, id="rows-begin-within-sectors-of-one-box"),
    ],
)
def test_a_box_costs_more_where_rows_do_not_begin_with_lines(row_bytes: int, cost: float) -> None:
    assert box_cost(row_bytes) == cost


def test_boxes_have_128_bytes_of_a_row_or_what_is_left() -> None:
    assert [boxes_of_row(row_bytes) for row_bytes in (64, 128, 144, 240, 256)] == [1, 1, 2, 2, 2]
