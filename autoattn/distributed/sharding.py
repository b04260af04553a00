"""Which tokens of a sequence each rank holds, as arithmetic on whole numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate, pairwise

from autoattn.errors import UsageError


class Sharding(str, Enum):
    """How each document is divided among the ranks.

    The sizes of what two ranks hold differ by at most one token, whatever the lengths of the documents.
    """

    ZIGZAG = "zigzag"  # 2 * ranks chunks, of which rank r holds r and 2 * ranks - 1 - r: equal shares of a causal mask
    CONTIGUOUS = "contiguous"  # one chunk a rank
    STRIPE = "stripe"  # every ranks-th token


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens of a document that lie side by side on a rank, at positions start, start + step, ... of the document."""

    document: int
    begin: int  # where they begin among the rank's tokens
    start: int
    length: int
    step: int = 1

    @property
    def end(self) -> int:
        """Where they end among the rank's tokens."""
        return self.begin + self.length


def parse(sharding: object) -> Sharding:
    """The caller's choice.

    Raises:
        UsageError: it is none.
    """
    if isinstance(sharding, str) and sharding in tuple(Sharding):
        return Sharding(sharding)
    raise UsageError(f"sharding must be zigzag, contiguous or stripe, got {sharding!r:.60}; correct it")


@lru_cache(maxsize=64)
def layout(offsets: tuple[int, ...], ranks: int, sharding: Sharding) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each rank in the order of its tokens; empty pieces are left out.

    Args:
        offsets: document d has the tokens from offsets[d] up to offsets[d + 1]; the first is 0.
    """
    held: list[list[Piece]] = [[] for _ in range(ranks)]
    ends = [0] * ranks
    for document, (begin, end) in enumerate(pairwise(offsets)):
        # What does not divide goes to the ranks after those that got the last document's rest.
        turns = [(rank - begin) % ranks for rank in range(ranks)]
        for rank, start, length, step in _DIVISIONS[sharding](end - begin, turns):
            if length:
                held[rank].append(Piece(document=document, begin=ends[rank], start=start, length=length, step=step))
                ends[rank] += length
    return tuple(map(tuple, held))


def lengths(held: Sequence[Sequence[Piece]]) -> tuple[int, ...]:
    """How many tokens each rank holds."""
    return tuple(pieces[-1].end if pieces else 0 for pieces in held)


def by_document(pieces: Sequence[Piece]) -> Mapping[int, list[Piece]]:
    """The pieces of each document."""
    sorted_pieces: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        sorted_pieces[piece.document].append(piece)
    return sorted_pieces


def _contiguous(length: int, turns: list[int]) -> list[tuple[int, int, int, int]]:
    """(rank, start, length, step) of each chunk."""
    base, rest = divmod(length, len(turns))
    sizes = [base + (turn < rest) for turn in turns]
    return [
        (rank, start, size, 1) for rank, (start, size) in enumerate(zip(accumulate([0, *sizes]), sizes, strict=False))
    ]


def _zigzag(length: int, turns: list[int]) -> list[tuple[int, int, int, int]]:
    ranks = len(turns)
    base, rest = divmod(length, 2 * ranks)
    early = [base + (turn < rest) for turn in turns]
    late = [base + (turn < rest - ranks) for turn in turns]
    sizes = early + late[::-1]
    starts = list(accumulate([0, *sizes]))
    chunks = [(rank, starts[rank], early[rank], 1) for rank in range(ranks)]
    return chunks + [(rank, starts[2 * ranks - 1 - rank], late[rank], 1) for rank in range(ranks)]


def _stripe(length: int, turns: list[int]) -> list[tuple[int, int, int, int]]:
    ranks = len(turns)
    return [(rank, turn, -((turn - length) // ranks) if turn < length else 0, ranks) for rank, turn in enumerate(turns)]


_DIVISIONS = {Sharding.ZIGZAG: _zigzag, Sharding.CONTIGUOUS: _contiguous, Sharding.STRIPE: _stripe}
