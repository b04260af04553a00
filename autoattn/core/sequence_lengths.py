"""Lengths of sequences that a problem stands for, packed or in a cache, and the pairs of queries and keys in a band."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from autoattn.errors import ProblemError

SEED = 0  # of the lengths that are drawn
_TEXT = re.compile(r"(?P<first>(?:[0-9]{1,10},){0,64})uniform:(?P<least>[0-9]{1,10})-(?P<most>[0-9]{1,10})")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLengths:
    """How the keys of sequences in a cache are distributed.

    Raises:
        ProblemError: the numbers are no lengths.
    """

    least: int  # of the lengths that are drawn, each as likely as the others
    most: int
    first: tuple[int, ...] = ()  # of the first sequences; those of the others are drawn

    def __post_init__(self) -> None:
        numbers = (self.least, self.most, *self.first)
        if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers):
            raise ProblemError(f"lengths must be whole numbers from 0, got {numbers!r:.60}; correct them")
        if self.least > self.most:
            raise ProblemError(f"lengths must lie between a least and a most, got {self.least}-{self.most}; swap them")

    @classmethod
    def parse(cls, text: str) -> KeyLengths:
        """Reads `uniform:100-4000`, or `100000,uniform:100-4000` where the first sequences have lengths of their own.

        Raises:
            ProblemError: the text is neither.
        """
        match = _TEXT.fullmatch(str(text))
        if match is None:
            raise ProblemError(
                "lengths must be uniform:LEAST-MOST, maybe with lengths of the first sequences and commas in front, as "
                f"100000,uniform:100-4000, got {text!r:.60}; correct it"
            )
        first = tuple(map(int, match["first"].split(",")[:-1]))
        return cls(first=first, least=int(match["least"]), most=int(match["most"]))

    @property
    def longest(self) -> int:
        """That may occur."""
        return max(self.most, *self.first) if self.first else self.most

    def drawn(self, count: int) -> tuple[int, ...]:
        """The lengths of so many sequences, the same at each call: the numbers are those of SEED."""
        generator = random.Random(SEED)
        spread = self.most - self.least + 1
        others = (self.least + int(generator.random() * spread) for _ in range(count - len(self.first)))
        return (*self.first[:count], *others)

    def __str__(self) -> str:
        return ",".join([*map(str, self.first), f"uniform:{self.least}-{self.most}"])


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
