"""The powers of two in which a head dim is held, or summed over."""

from __future__ import annotations

import pytest

from autoattn.core.tile_widths import depths, filled, halves, padded

HEAD_DIMS = [*range(8, 257, 8), 1, 111, 255]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_depths_sum_up_to_the_next_multiple_of_16_and_begin_at_multiples_of_themselves(head_dim: int) -> None:
    widths = depths(head_dim)
    rounded = -(-head_dim // 16) * 16
    assert sum(widths) == (padded(head_dim) if rounded == 240 else rounded)
    assert list(widths) == sorted(widths, reverse=True)
    assert all(width >= 16 and sum(widths[:place]) % width == 0 for place, width in enumerate(widths))


@pytest.mark.parametrize(
    ("head_dim", "widths"),
    [(64, (64,)), (72, (64, 16)), (96, (64, 32)), (112, (64, 32, 16)), (120, (128,)), (192, (128, 64)), (240, (256,))],
)
def test_a_head_dim_is_summed_over_in_at_most_three_products(head_dim: int, widths: tuple[int, ...]) -> None:
    assert depths(head_dim) == widths


@pytest.mark.parametrize(
    ("head_dim", "width", "least", "parts"),
    [
        (112, 128, 16, (64, 32, 16)),
        (40, 64, 16, (32, 16)),
        (96, 128, 32, (64, 32)),
        (80, 128, 32, (128,)),
        (64, 64, 16, (64,)),
    ],
)
def test_products_sum_over_what_is_filled_of_a_tile_if_its_parts_are_wide_enough(
    head_dim: int, width: int, least: int, parts: tuple[int, ...]
) -> None:
    assert filled(head_dim, width, least) == parts


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_halves_hold_the_head_dim_and_the_second_is_no_wider_than_the_rest_needs(head_dim: int) -> None:
    width = max(64, padded(head_dim))
    first, second = halves(head_dim, width)
    assert (first, second) == (width // 2, padded(max(1, head_dim - width // 2)))
    assert first + second >= head_dim


def test_no_half_is_narrower_than_16() -> None:
    assert halves(16, 16) == halves(8, 16) == (16, 16)
