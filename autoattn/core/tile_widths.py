"""How many elements a tile has along the axis of the head dim."""

from __future__ import annotations


def padded(head_dim: int) -> int:
    """The power of two, at least 16, that a tile's axis of `head_dim` elements is padded to."""
    return max(16, 1 << (head_dim - 1).bit_length())


def pieces(head_dim: int) -> tuple[int, ...]:
    """The one or two powers of two that hold `head_dim` elements in the least room: 80 -> (64, 16), 56 -> (64,)."""
    whole = padded(head_dim)
    low = whole // 2
    if head_dim <= low or low < 16:
        return (whole,)
    high = padded(head_dim - low)
    return (low, high) if low + high < whole else (whole,)


def halves(head_dim: int, width: int) -> tuple[int, int]:
    """Two powers of two, at least 16, that hold `head_dim` of `width` elements, the first half of them.

    80 of 128 -> (64, 16).
    """
    low = max(16, width // 2)
    return low, padded(max(1, head_dim - low))


def depths(head_dim: int) -> tuple[int, ...]:
    """The powers of two, at least 16, whose sum is `head_dim` rounded up to 16, the largest first: 112 -> (64, 32, 16).

    Of four, as 240 would have, one product fewer is not worth three more: they are one.
    """
    rounded = -(-head_dim // 16) * 16
    widths = tuple(1 << bit for bit in range(rounded.bit_length() - 1, 3, -1) if rounded >> bit & 1)
    return widths if len(widths) <= 3 else (padded(head_dim),)


def filled(head_dim: int, width: int, least: int) -> tuple[int, ...]:
    """Of a tile of `width` columns, what products sum over one after the other: the parts that a head dim fills.

    The whole width where a part would be narrower than `least`: 112 of 128 -> (64, 32, 16), 80 of 128 by 32 -> (128,).
    """
    parts = depths(head_dim)
    return parts if min(parts) >= least and sum(parts) < width else (width,)
