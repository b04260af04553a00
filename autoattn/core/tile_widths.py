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
