"""Which tokens a rank holds, which keys come to it at which hop, and which calls it makes: against all pairs."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoattn.core.rank_choice import Method
from autoattn.distributed import rectangles, schedule, sharding
from autoattn.distributed.rectangles import Reach, Rectangle
from autoattn.distributed.schedule import Schedule, Split
from autoattn.distributed.sharding import Sharding

Token = tuple[int, int]  # document and position

SPLITS = st.builds(
    lambda documents, ranks, chosen: Split(
        offsets=tuple(accumulate([0, *documents])), ranks=ranks, sharding=chosen
    ),
    st.lists(st.integers(0, 11), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from(Sharding),
)  # fmt: skip
REACHES = st.builds(Reach, left=st.sampled_from([None, 0, 1, 3, 7]), right=st.sampled_from([None, 0, 0, 2]))


def tokens(split: Split, rank: int) -> list[Token]:
    return [
        (piece.document, piece.start + number * piece.step)
        for piece in split.layout[rank]
        for number in range(piece.length)
    ]


def sees(query: Token, key: Token, reach: Reach) -> bool:
    after = key[1] - query[1]
    bounded = (reach.left is None or after >= -reach.left) and (reach.right is None or after <= reach.right)
    return query[0] == key[0] and bounded


def pairs(rectangle: Rectangle) -> list[tuple[int, int]]:
    """What an attention call on a rectangle sees, which is aligned bottom-right."""
    (top, bottom), (begin, end) = rectangle.queries, rectangle.keys
    left, right = rectangle.window
    assert left >= -1
    assert right >= -1
    return [
        (query, key)
        for query in range(top, bottom)
        for key in range(begin, end)
        if (left < 0 or key >= query + end - bottom - left) and (right < 0 or key <= query + end - bottom + right)
    ]


def computed(split: Split, rank: int, plan: Schedule) -> Counter[tuple[Token, Token]]:
    """How often a rank's calls have each pair of a query and a key."""
    counts: Counter[tuple[Token, Token]] = Counter()
    queries = tokens(split, rank)
    for hop in plan.hops:
        keys = [
            token
            for source in hop.sources
            for begin, end in source.spans
            for token in tokens(split, source.rank)[begin:end]
        ]
        keys = [keys[place] for begin, end in hop.order for place in range(begin, end)] if hop.order else keys
        for call in hop.calls:
            counts.update((queries[query], keys[key]) for each in call for query, key in pairs(each))
    return counts


@settings(max_examples=60)
@given(split=SPLITS, reach=REACHES, method=st.sampled_from([Method.RING, Method.ALLGATHER]))
def test_the_calls_of_a_rank_have_each_pair_that_a_query_sees_once(split: Split, reach: Reach, method: Method) -> None:
    everything = [token for rank in range(split.ranks) for token in tokens(split, rank)]
    for rank in range(split.ranks):
        expected = {(q, k) for q in tokens(split, rank) for k in everything if sees(q, k, reach)}
        assert computed(split, rank, schedule.plan(split, rank, reach, method)) == Counter(expected)


@settings(max_examples=60)
@given(split=SPLITS)
def test_the_ranks_hold_each_token_once_and_one_more_than_others_at_most(split: Split) -> None:
    held = Counter(token for rank in range(split.ranks) for token in tokens(split, rank))
    lengths = [end - begin for begin, end in pairwise(split.offsets)]
    assert held == Counter((document, place) for document, length in enumerate(lengths) for place in range(length))
    assert max(split.lengths) - min(split.lengths) <= 1


@settings(max_examples=60)
@given(split=SPLITS, reach=REACHES, method=st.sampled_from([Method.RING, Method.ALLGATHER]))
def test_what_a_rank_receives_is_what_the_other_one_sends(split: Split, reach: Reach, method: Method) -> None:
    plans = [schedule.plan(split, rank, reach, method) for rank in range(split.ranks)]
    received, sent = (
        Counter(
            (rank, transfer.rank, transfer.spans) if way == "sources" else (transfer.rank, rank, transfer.spans)
            for rank, plan in enumerate(plans)
            for hop in plan.hops
            for transfer in getattr(hop, way)
        )
        for way in ("sources", "targets")
    )
    assert received == sent


@settings(max_examples=60)
@given(split=SPLITS, reach=REACHES, method=st.sampled_from([Method.RING, Method.ALLGATHER]))
def test_the_rectangles_of_a_call_are_packed_sequences_of_one_window(
    split: Split, reach: Reach, method: Method
) -> None:
    for rank in range(split.ranks):
        for hop in schedule.plan(split, rank, reach, method).hops:
            for call in hop.calls:
                assert len({each.window for each in call}) == 1
                for before, after in pairwise(call):
                    assert before.queries[1] <= after.queries[0]
                    assert before.keys[1] <= after.keys[0]


def plan_of(ranks: int, rank: int, reach: Reach, method: Method, chosen: Sharding = Sharding.ZIGZAG) -> Schedule:
    return schedule.plan(Split(offsets=(0, 16 * ranks), ranks=ranks, sharding=chosen), rank, reach, method)


def test_a_causal_zigzag_has_one_call_a_hop_and_a_half_of_the_pairs_in_each() -> None:
    for rank in range(4):
        hops = plan_of(4, rank, Reach(right=0), Method.RING).hops
        assert [len(hop.calls) for hop in hops] == [1, 1, 1, 1]
        assert [len(pairs(hop.calls[0][0])) for hop in hops] == [136, 128, 128, 128]


def test_a_window_brings_only_the_keys_that_it_reaches() -> None:
    ring = plan_of(8, 2, Reach(left=4, right=0), Method.RING)
    assert [source.rank for hop in ring.hops for source in hop.sources] == [2, 1, 3]
    assert len(ring.hops) == 8  # all ranks send in one order
    gathered = plan_of(8, 2, Reach(left=4, right=0), Method.ALLGATHER)
    assert [source.length for source in gathered.hops[0].sources] == [4, 16, 4]
    assert gathered.coverage == 1


def test_later_keys_do_not_come_to_a_contiguous_rank() -> None:
    hops = plan_of(4, 1, Reach(right=0), Method.RING, Sharding.CONTIGUOUS).hops
    assert [[source.rank for source in hop.sources] for hop in hops] == [[1], [0], [], []]


def test_documents_of_packed_sequences_are_one_call_a_hop() -> None:
    split = Split(offsets=(0, 100, 500, 1600), ranks=4, sharding=Sharding.ZIGZAG)
    for method, calls in ((Method.RING, [1, 1, 1, 1]), (Method.ALLGATHER, [2])):
        plan = schedule.plan(split, 2, Reach(right=0), method)
        assert [len(hop.calls) for hop in plan.hops] == calls


def test_neighbours_are_joined_only_where_one_call_says_the_same() -> None:
    whole = Rectangle(queries=(0, 4), keys=(0, 4))
    assert rectangles.joined([whole, Rectangle(queries=(0, 4), keys=(4, 8), last=4)]) == [
        Rectangle(queries=(0, 4), keys=(0, 8), last=4)
    ]
    apart = [whole, Rectangle(queries=(0, 4), keys=(5, 8))]
    assert rectangles.joined(apart) == apart


@pytest.mark.parametrize("given", ["ZIGZAG", None, 3])
def test_another_sharding_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"sharding must be zigzag, contiguous or stripe, got .*; correct it"):
        sharding.parse(given)
