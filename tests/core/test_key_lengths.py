"""Lengths of the sequences in a cache, as a distribution."""

from __future__ import annotations

from typing import Any

import kernels
import pytest

from autoattn.core import kernel_kind
from autoattn.core.key_cache import KeyCache
from autoattn.core.sequence_lengths import KeyLengths
from autoattn.errors import ProblemError

TEXTS = ("uniform:100-4000", "100000,uniform:0-7", "5,9,uniform:3-3")


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_as_what_writes_it(text: str) -> None:
    assert str(KeyLengths.parse(text)) == text


@pytest.mark.parametrize("text", ["", "100", "uniform", "uniform:5", "uniform:9-5", "uniform:1-2,3", "a,uniform:1-2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ProblemError, match="lengths must"):
        KeyLengths.parse(text)


def test_lengths_are_drawn_between_their_bounds_and_are_the_same_each_time() -> None:
    lengths = KeyLengths.parse("100000,uniform:100-4000")
    drawn = lengths.drawn(400)
    assert drawn == lengths.drawn(400)
    assert drawn[:3] == lengths.drawn(3)
    assert drawn[0] == 100000
    assert 100 <= min(drawn[1:]) < 200 < 3900 < max(drawn[1:]) <= 4000


def test_a_problem_counts_the_keys_that_are_there_and_runs_the_same_kernels() -> None:
    facts: dict[str, Any] = {"batch": 5, "seq_q": 1, "seq_kv": 4096, "cache": KeyCache(page=16)}
    whole, uneven = (
        kernels.problem(**facts, key_lengths=lengths) for lengths in (None, KeyLengths.parse("0,uniform:5-90"))
    )
    keys = [keys for _, keys in uneven.lengths()]
    assert keys[0] == 0 < min(keys[1:]) <= max(keys) <= 90
    assert uneven.kept_pairs() == sum(keys)
    assert whole.bytes() - uneven.bytes() == 4 * (5 * 4096 - sum(keys)) * whole.heads_kv * whole.head_dim
    assert kernel_kind.of(whole) == kernel_kind.of(uneven)
    assert len({whole.key, uneven.key, str(whole), str(uneven)}) == 4
    assert not set(":,") & set(uneven.key)


@pytest.mark.parametrize("facts", [{"seq_kv": 50, "cache": KeyCache()}, {"seq_kv": 500}], ids=str)
def test_lengths_without_room_or_without_a_cache_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(ProblemError, match="lengths belong to"):
        kernels.problem(**facts, key_lengths=KeyLengths(least=1, most=90))
