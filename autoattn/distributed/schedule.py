"""What a rank computes and sends, hop by hop: pure arithmetic, the same on every rank.

A hop brings keys and values of other ranks, no more of them than some query of the rank sees. The ring has a hop for
each rank; all-gather has one hop, whose keys are in the order of their positions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import TypeAlias

from autoattn.core.rank_choice import Method
from autoattn.distributed import rectangles, sharding
from autoattn.distributed.rectangles import Reach, Rectangle, Span
from autoattn.distributed.sharding import Piece, Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Tokens that are divided among ranks."""

    offsets: tuple[int, ...]  # document d has the tokens from offsets[d] up to offsets[d + 1]
    ranks: int
    sharding: Sharding

    @property
    def layout(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of each rank."""
        return sharding.layout(self.offsets, self.ranks, self.sharding)

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each rank holds."""
        return sharding.lengths(self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Tokens of a rank that another one needs."""

    rank: int  # the other one; the rank itself for what it needs of its own
    spans: tuple[Span, ...]  # among the tokens of the rank that sends them
    length: int = field(init=False)  # how many tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", sum(end - begin for begin, end in self.spans))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """Keys and values that come together, and the calls on them.

    The keys of the calls count among the tokens of all sources, one behind the other.
    """

    sources: tuple[Transfer, ...]
    targets: tuple[Transfer, ...]
    calls: tuple[tuple[Rectangle, ...], ...]  # of one window each
    order: tuple[Span, ...] = ()  # tokens of the sources in the order that calls read; (): as they are

    @property
    def length(self) -> int:
        """How many keys come."""
        return sum(source.length for source in self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The hops of a rank."""

    hops: tuple[Hop, ...]
    queries: int  # tokens of the rank
    coverage: int  # the most calls that have one query; 0 where no query sees a key
    settles_sinks: bool  # whether the calls of the first hop have each query once: they may count sinks


@lru_cache(maxsize=256)
def plan(split: Split, rank: int, reach: Reach, method: Method) -> Schedule:
    """The schedule of a rank; Ulysses has none."""
    hops = tuple(_ring(split, rank, reach) if method is Method.RING else _gathered(split, rank, reach))
    queries = split.lengths[rank]
    first = _spans_of(hops[:1])
    return Schedule(
        hops=hops,
        queries=queries,
        coverage=_coverage(_spans_of(hops)),
        settles_sinks=_coverage(first) == 1 and rectangles.united(first) == ((0, queries),),
    )


def _spans_of(hops: Iterable[Hop]) -> list[Span]:
    """The queries of each rectangle."""
    return [rectangle.queries for hop in hops for call in hop.calls for rectangle in call]


def _coverage(spans: list[Span]) -> int:
    """In how many spans the token is that is in most."""
    changes = Counter[int]()
    for begin, end in spans:
        changes[begin] += 1
        changes[end] -= 1
    return max(accumulate(change for _, change in sorted(changes.items())), default=0)


def _ring(split: Split, rank: int, reach: Reach) -> Iterable[Hop]:
    """The rank's own keys, then those of the ranks before it; a rank that is so far away sends straight to it.

    A hop is there even where the rank neither sends nor receives: all ranks then send in one order, so that no two wait
    for one another.
    """
    for away in range(split.ranks):
        source, target = (rank - away) % split.ranks, (rank + away) % split.ranks
        seen, spans = _seen_of(split, rank, source, reach)
        _, needed = _seen_of(split, target, rank, reach)
        yield Hop(
            sources=(Transfer(rank=source, spans=spans),) if spans else (),
            targets=(Transfer(rank=target, spans=needed),) if needed else (),
            calls=rectangles.grouped(seen),
        )


@lru_cache(maxsize=4096)
def _seen_of(split: Split, rank: int, source: int, reach: Reach) -> tuple[tuple[Rectangle, ...], tuple[Span, ...]]:
    """What a rank's queries see of a source's keys, and the spans of these; they count among those of the spans."""
    queries, keys = (sharding.by_document(split.layout[each]) for each in (rank, source))
    seen = [
        rectangle
        for document, pieces in queries.items()
        for rectangle in rectangles.between(pieces, keys.get(document, ()), reach)
    ]
    spans = rectangles.united(rectangle.keys for rectangle in seen)
    return tuple(rectangle.moved(-_left_out(spans, rectangle.keys[0])) for rectangle in seen), spans


def _left_out(spans: Iterable[Span], place: int) -> int:
    """How many tokens before a place that is in a span are in none."""
    left_out, before = 0, 0
    for begin, end in spans:
        left_out += begin - before
        before = end
        if place < end:
            break
    return left_out


def _gathered(split: Split, rank: int, reach: Reach) -> Iterable[Hop]:
    """All keys at once: in the order of their positions, but for stripes, whose queries have a step of their own."""
    if split.sharding is Sharding.STRIPE:
        hops = list(_ring(split, rank, reach))
        yield Hop(
            sources=tuple(source for hop in hops for source in hop.sources),
            targets=tuple(target for hop in hops for target in hop.targets),
            calls=rectangles.grouped(_one_behind_the_other(hops)),
        )
        return
    seen, spans = _seen_in_order(split, rank, reach)
    held = [(source, _shared(split, source, spans)) for source in range(split.ranks)]
    needed = [(target, _shared(split, rank, _seen_in_order(split, target, reach)[1])) for target in range(split.ranks)]
    yield Hop(
        sources=_transfers(held),
        targets=_transfers(needed),
        calls=rectangles.grouped(seen),
        order=_order([segment for _, segments in held for segment in segments]),
    )


def _one_behind_the_other(hops: Iterable[Hop]) -> Iterable[Rectangle]:
    """The rectangles of hops whose keys lie one behind the other."""
    begin = 0
    for hop in hops:
        for call in hop.calls:
            yield from (rectangle.moved(begin) for rectangle in call)
        begin += hop.length


@lru_cache(maxsize=1024)
def _seen_in_order(split: Split, rank: int, reach: Reach) -> tuple[tuple[Rectangle, ...], tuple[Span, ...]]:
    """What a rank's queries see of all keys in order, and the spans of these; rectangles count keys in the spans."""
    seen = []
    for piece in split.layout[rank]:
        begin, end = split.offsets[piece.document : piece.document + 2]
        whole = Piece(document=piece.document, begin=begin, start=0, length=end - begin)
        seen += rectangles.between([piece], [whole], reach)
    spans = rectangles.united(rectangle.keys for rectangle in seen)
    return tuple(rectangle.moved(-_left_out(spans, rectangle.keys[0])) for rectangle in seen), spans


Segment: TypeAlias = tuple[int, int, int]  # first token on its rank, the same among all tokens, tokens


def _shared(split: Split, rank: int, spans: tuple[Span, ...]) -> list[Segment]:
    """What a rank holds of spans of all tokens, in the order in which it holds it."""
    begins = [begin for begin, _ in spans]
    segments = []
    for piece in split.layout[rank]:
        first = split.offsets[piece.document] + piece.start
        for begin, end in spans[max(bisect_right(begins, first) - 1, 0) :]:
            if begin >= first + piece.length:
                break
            top, bottom = max(begin, first), min(end, first + piece.length)
            if top < bottom:
                segments.append((piece.begin + top - first, top, bottom - top))
    return segments


def _transfers(segments: Iterable[tuple[int, list[Segment]]]) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(rank=rank, spans=rectangles.united((begin, begin + length) for begin, _, length in each))
        for rank, each in segments
        if each
    )


def _order(segments: list[Segment]) -> tuple[Span, ...]:
    """Where the tokens of segments, one behind the other, stand in the order of all tokens; () if they are in it."""
    ends = accumulate(length for _, _, length in segments)
    placed = [(first, end - length, end) for end, (_, first, length) in zip(ends, segments, strict=True)]
    in_order = sorted(placed)
    return () if placed == in_order else tuple((begin, end) for _, begin, end in in_order)
