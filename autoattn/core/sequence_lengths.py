"""Lengths of packed sequences that a problem stands for, and the pairs of queries and keys in a band of them."""

from __future__ import annotations


def ramp(count: int, longest: int, total: int) -> tuple[int, ...]:
    """`count` lengths that sum to `total`, none above `longest`, the first one equal to it, the others rising.

    Where so many cannot fill `total`, all are as long as they may be.
    """
    others = count - 1
    rest = min(total - longest, others * longest)
    lengths = [min(longest, 2 * rest * place // (others * (others + 1))) for place in range(1, others + 1)]
    missing = rest - sum(lengths)
    for place in reversed(range(others)):
        if not missing:
            break
        more = min(longest - lengths[place], missing)
        lengths[place] += more
        missing -= more
    return (longest, *lengths)


def pairs_in_band(first: int | None, last: int | None, seq_q: int, seq_kv: int) -> int:
    """(query, key) pairs of a sequence whose query i sees the keys i + first..i + last."""
    seen = seq_q * seq_kv if last is None else _ramp_sum(last + 1, seq_q, seq_kv)
    return seen if first is None else seen - _ramp_sum(first, seq_q, seq_kv)


def _ramp_sum(offset: int, rows: int, most: int) -> int:
    """The sum of min(max(row + offset, 0), most) over all rows from 0."""
    first = min(max(0, -offset), rows)  # first row that counts
    growing = min(max(first, most - offset), rows)  # first row that counts in full
    steps = growing - first
    return steps * (first + offset) + steps * (steps - 1) // 2 + (rows - growing) * most
