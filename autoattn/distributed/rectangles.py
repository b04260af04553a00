"""Which keys the queries of a piece see: rectangles of the score matrix, each one attention call or a part of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autoattn.distributed.sharding import Piece

Span: TypeAlias = tuple[int, int]  # from the first token up to the second


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a query at position p of its document sees: positions p - left to p + right; None is no bound."""

    left: int | None = None
    right: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """Queries and keys of which each query sees one, and each key is seen.

    Query i sees the keys i + first to i + last of those in the rectangle; None where no query meets that bound. i and
    the keys count among the tokens of the ranks that hold them.
    """

    queries: Span
    keys: Span
    first: int | None = None
    last: int | None = None

    @property
    def window(self) -> tuple[int, int]:
        """(left, right) of an attention call on the rectangle, which is aligned bottom-right; -1 is no bound."""
        aligned = self.keys[1] - self.queries[1]
        return (
            -1 if self.first is None else aligned - self.first,
            -1 if self.last is None else self.last - aligned,
        )

    def moved(self, keys: int) -> Rectangle:
        """The same with other places of the keys, that many tokens further on."""
        if not keys:
            return self
        return replace(
            self,
            keys=(self.keys[0] + keys, self.keys[1] + keys),
            first=None if self.first is None else self.first + keys,
            last=None if self.last is None else self.last + keys,
        )


def seen(query: Piece, key: Piece, reach: Reach) -> Rectangle | None:
    """What queries of a piece see of the keys of one of the same document and step; None where it is nothing."""
    apart, moved = query.start - key.start, key.begin - query.begin
    first = None if reach.left is None else -((reach.left - apart) // query.step) + moved
    last = None if reach.right is None else (apart + reach.right) // query.step + moved
    top, bottom, begin, end = query.begin, query.end, key.begin, key.end
    if first is not None and last is not None and first > last:  # a narrow window between the tokens of a stripe
        return None
    if last is not None:
        top, end = max(top, begin - last), min(end, bottom + last)
    if first is not None:
        bottom, begin = min(bottom, end - first), max(begin, top + first)
    if top >= bottom or begin >= end:
        return None
    if first is not None and bottom - 1 + first <= begin:
        first = None
    if last is not None and top + last >= end - 1:
        last = None
    return Rectangle(queries=(top, bottom), keys=(begin, end), first=first, last=last)


def between(queries: Sequence[Piece], keys: Sequence[Piece], reach: Reach) -> list[Rectangle]:
    """What pieces of a document see of pieces of it, in as few rectangles as `joined` makes of them."""
    rectangles = (seen(query, key, reach) for query in queries for key in keys)
    return joined(rectangle for rectangle in rectangles if rectangle is not None)


def joined(rectangles: Iterable[Rectangle]) -> list[Rectangle]:
    """The same pairs of queries and keys, with neighbours made one rectangle where one attention call can say it."""
    joined_keys: list[Rectangle] = []
    for rectangle in sorted(rectangles, key=lambda each: (each.queries, each.keys)):
        before = joined_keys.pop() if joined_keys else None
        joined_keys += [rectangle] if before is None else _beside(before, rectangle)
    joined_queries: list[Rectangle] = []
    for rectangle in joined_keys:
        before = joined_queries.pop() if joined_queries else None
        joined_queries += [rectangle] if before is None else _below(before, rectangle)
    return joined_queries


def _beside(left: Rectangle, right: Rectangle) -> list[Rectangle]:
    """Keys that all queries see, and keys of the same queries behind them that a bound on the right may hide."""
    whole = left.first is left.last is right.first is None
    if whole and left.queries == right.queries and left.keys[1] == right.keys[0]:
        return [replace(right, keys=(left.keys[0], right.keys[1]))]
    return [left, right]


def _below(upper: Rectangle, lower: Rectangle) -> list[Rectangle]:
    """Queries and those behind them, which see the same keys, or more by the same bound."""
    alike = upper.first is lower.first is None and upper.last == lower.last
    adjacent = upper.queries[1] == lower.queries[0] and upper.keys[0] == lower.keys[0]
    if alike and adjacent:
        bounded = upper.last is not None and upper.queries[1] + upper.last <= upper.keys[1] <= lower.keys[1]
        if bounded or upper.keys == lower.keys:
            return [replace(lower, queries=(upper.queries[0], lower.queries[1]))]
    return [upper, lower]


def grouped(rectangles: Iterable[Rectangle]) -> tuple[tuple[Rectangle, ...], ...]:
    """The rectangles in groups of one window each, in which queries and keys only move on: packed sequences."""
    groups: list[list[Rectangle]] = []
    for rectangle in sorted(rectangles, key=lambda each: (each.window, each.queries, each.keys)):
        for group in groups:
            before = group[-1]
            follows = before.queries[1] <= rectangle.queries[0] and before.keys[1] <= rectangle.keys[0]
            if before.window == rectangle.window and follows:
                group.append(rectangle)
                break
        else:
            groups.append([rectangle])
    return tuple(map(tuple, groups))


def united(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The tokens of all spans, as spans with gaps between them."""
    together: list[Span] = []
    for begin, end in sorted(spans):
        if together and begin <= together[-1][1]:
            together[-1] = together[-1][0], max(end, together[-1][1])
        else:
            together.append((begin, end))
    return tuple(together)
