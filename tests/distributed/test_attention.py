"""context_attention over gloo ranks: every method, sharding, mask and gradient, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import context_calls
import pytest
import rank_calls
from context_calls import METHODS, ContextCall
from process_groups import Ranks
from rarely import rarely

SHAPE = (1, 2, 4, 8)  # [batch, heads, seq, head_dim] on each rank


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@pytest.mark.parametrize("size", rarely([2, 3, 4], lambda size: size < 4))
def test_all_ranks_together_compute_what_one_process_computes(ranks: Ranks, size: int) -> None:
    calls = [ContextCall.draw(seed, size) for seed in range(24)]
    assert ranks.run(size, context_calls.faults, calls) == [[]] * size


@pytest.mark.parametrize("size", rarely([2, 3, 4], lambda size: size == 3))
def test_kernels_that_merge_make_the_same_of_it(ranks: Ranks, size: int) -> None:
    calls = [ContextCall.draw(seed, size) for seed in range(24) if METHODS[seed % 4] in ("ring", "allgather")]
    answers = ranks.run(size, context_calls.faults_of_merging_kernels, calls)
    assert [wrong for wrong, _ in answers] == [[]] * size
    assert all(merges > 0 for _, merges in answers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 3, 4])
def test_more_calls_compute_what_one_process_computes(ranks: Ranks, size: int) -> None:
    calls = [ContextCall.draw(seed, size) for seed in range(24, 200)]
    assert ranks.run(size, context_calls.faults, calls) == [[]] * size


@pytest.mark.exhaustive
def test_tuning_measures_the_link_and_every_method_that_takes_a_call(ranks: Ranks) -> None:
    rank_calls.assert_measured(ranks.run(2, rank_calls.measured)[0])


def test_one_rank_is_the_plain_call(ranks: Ranks) -> None:
    assert ranks.run(1, context_calls.plain) == [True]


def test_calls_that_differ_in_numbers_alone_are_read_once(ranks: Ranks) -> None:
    calls = [{"causal": True}, {"causal": True}, {"window": (2, 1)}, {"window": (2, 1)}, {"causal": True, "scale": 2.0}]
    assert ranks.run(2, context_calls.readings, calls) == [[1, 0, 1, 0, 1]] * 2
    error = "TensorError: deterministic must be True or False, got 1"
    for deterministic, expected in ((True, ""), (1, error), (True, "")):  # equal, but not the same argument
        words = {"causal": True, "deterministic": deterministic}
        errors = ranks.run(2, context_calls.refusal, dict.fromkeys(range(2), SHAPE), words)
        assert all(message.startswith(expected) and bool(message) == bool(expected) for message in errors), errors


def test_a_tensor_is_divided_and_put_together_again(ranks: Ranks) -> None:
    assert ranks.run(3, context_calls.divided) == [[]] * 3


def test_an_axis_of_a_mesh_is_a_group(ranks: Ranks) -> None:
    errors = ranks.run(4, context_calls.by_mesh)
    assert errors == ["group must be a DeviceMesh with one axis, got one with 2; give mesh['name'] of the axis"] * 4


def test_pytorchs_ring_runs_over_the_operator(ranks: Ranks) -> None:
    assert max(ranks.run(4, context_calls.by_pytorchs_ring)) < 1e-5


def test_a_dtensor_is_refused_with_the_way_to_its_part(ranks: Ranks) -> None:
    errors = ranks.run(2, context_calls.of_dtensors)
    assert errors == ["query must be this rank's plain tensor, got DTensor; give its to_local()"] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"sharding": "zig"}, "UsageError: sharding must be zigzag, contiguous or stripe, got 'zig'; correct it"),
        ({"method": "tree"}, "UsageError: method must be ring, allgather, ulysses or auto, got 'tree'; correct it"),
        ({"layout": "sbhd"}, "TensorError: layout must be bhsd or bshd, got 'sbhd'; correct it"),
        ({"seq_len": 11}, r"TensorError: rank 0 must have 6 of 11 tokens on 2 ranks, got 4; divide them with .*shard"),
        ({"seq_len": 8, "cu_seqlens": [0, 8]}, "TensorError: query must be .tokens, heads, head_dim., got shape"),
        (
            {"method": "ring", "alibi_slopes": "of heads", "causal": True},
            "UsageError: alibi_slopes need method ulysses",
        ),
        ({"method": "allgather", "alibi_slopes": "of heads"}, "UsageError: alibi_slopes need method ulysses"),
        ({"window": (1,)}, r"TensorError: window must be two whole numbers \(left, right\)"),
        ({"softcap": -1.0}, "TensorError: softcap must be a finite number from 0"),
        ({"deterministic": 1}, "TensorError: deterministic must be True or False"),
        ({"group": None}, "UsageError: group must be a ProcessGroup or a DeviceMesh with one axis, got NoneType; give"),
    ],
)
def test_a_call_that_is_none_is_refused_on_every_rank(ranks: Ranks, words: dict[str, Any], message: str) -> None:
    for error in ranks.run(2, context_calls.refusal, dict.fromkeys(range(2), SHAPE), words):
        assert re.match(message.replace("rank 0 must have 6", r"rank \d must have \d"), error), error


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ((1, 2, 4, 16), r"got query \(1, 2, 8\) beside tokens and query \(1, 2, 16\) beside tokens on ranks 0 and 1;"),
        ((1, 2, 5, 8), r"got 8 tokens in 1 documents .* and 10 tokens in 1 documents .* on ranks 0 and 1;"),
    ],
)
def test_shapes_that_differ_are_found_before_anything_is_sent(
    ranks: Ranks, other: tuple[int, ...], message: str
) -> None:
    errors = ranks.run(2, context_calls.refusal, {0: SHAPE, 1: other}, {})
    assert re.search(f"UsageError: all ranks must make the same call, {message}", errors[0]), errors[0]
    assert "on ranks 1 and 0; give each rank its part of the same sequences" in errors[1]


def test_what_one_rank_refuses_is_told_to_the_others(ranks: Ranks) -> None:
    errors = ranks.run(2, context_calls.refusal, {0: SHAPE, 1: (2, 4, 8)}, {})
    assert errors[0].startswith("UsageError: rank 1 of the group refused the call: query must be [batch, heads, seq, ")
    assert errors[1].startswith("TensorError: query must be [batch, heads, seq, head_dim], got shape (2, 4, 8)")


def test_documents_over_ranks_have_the_same_slopes(ranks: Ranks) -> None:
    words = {"cu_seqlens": [0, 3, 8], "causal": True, "alibi_slopes": "of documents and heads"}
    errors = ranks.run(2, context_calls.refusal, dict.fromkeys(range(2), (4, 2, 8)), words)
    assert all("alibi_slopes must be [heads_q] for packed documents over ranks, got shape (2, 2)" in e for e in errors)


def test_heads_that_ranks_cannot_share_are_refused_by_ulysses(ranks: Ranks) -> None:
    errors = ranks.run(3, context_calls.refusal, dict.fromkeys(range(3), SHAPE), {"method": "ulysses"})
    assert all("got 2 and 2 heads on 3 ranks; use method ring or allgather" in error for error in errors)


def test_a_rank_that_dies_ends_the_others_with_a_sentence(tmp_path: Path) -> None:
    started = Ranks(tmp_path, 2)
    error, nothing = started.run(2, context_calls.after_a_death, 1)
    started.close()
    assert nothing is None
    assert re.fullmatch(
        r"GroupError: all 2 ranks of the group must take part in a call, but rank 0 lost one \(.*\); look for the "
        r"first error among the ranks and start them again",
        error,
    )
