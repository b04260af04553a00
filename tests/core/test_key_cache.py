"""Caches of keys and values as facts of a problem."""

from __future__ import annotations

from typing import Any

import kernels
import pytest

from autoattn.core import kernel_kind
from autoattn.core.key_cache import KeyCache
from autoattn.core.problem import Bias, DType, Modifiers, Op
from autoattn.errors import ProblemError

TEXTS = (
    "contiguous",
    "contiguous,rows",
    "contiguous,leftpad,splits=4,split_length=64",
    "paged:1",
    "paged:256,splits=1",
    "paged:16,float8_e4m3",
    "contiguous,float8_e4m3,rows",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_as_what_writes_it(text: str) -> None:
    assert str(KeyCache.parse(text)) == text


@pytest.mark.parametrize("text", ["", "paged", "paged:0", "paged:-1", "rows", "contiguous,leftpad,rows", "paged:16 "])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ProblemError, match="contiguous or paged:KEYS"):
        KeyCache.parse(text)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"page": -1}, "from 1 to"),
        ({"page": True}, "from 1 to"),
        ({"page": 16, "rows": True}, "contiguous caches"),
        ({"page": 16, "leftpad": True}, "contiguous caches"),
        ({"splits": -1}, "splits must be"),
        ({"split_length": 96}, "power of two from 64"),
    ],
)
def test_facts_that_contradict_are_refused(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        KeyCache(**facts)


@pytest.mark.parametrize(
    "changes",
    [
        {"op": Op.BACKWARD},
        {"dtype": DType.FLOAT8},
        {"mask": "causal:top-left"},
        {"mask": "blocks:16x16,0.5"},
        {"modifiers": Modifiers(bias=Bias.KEYS)},
        {"modifiers": Modifiers(dropout=True)},
    ],
    ids=str,
)
def test_what_no_cache_takes_is_refused(changes: dict[str, Any]) -> None:
    assert kernels.problem(**changes)
    with pytest.raises(ProblemError, match="attention on a cache takes"):
        kernels.problem(**changes, cache=KeyCache())


def test_a_cache_of_float8_has_queries_of_16_bits_and_half_the_bytes() -> None:
    float8 = KeyCache(page=16, float8=True)
    with pytest.raises(ProblemError, match="float32 under a cache of float8"):
        kernels.problem(dtype=DType.FLOAT32, cache=float8)
    halved, whole = (kernels.problem(cache=cache, heads_q=2, heads_kv=2, seq_q=1) for cache in (float8, KeyCache()))
    keys = 2 * halved.batch * halved.heads_kv * halved.seq_kv * halved.head_dim
    assert whole.bytes() - halved.bytes() == keys


def test_names_and_kinds_tell_caches_apart() -> None:
    problems = [kernels.problem(cache=cache) for cache in (None, *map(KeyCache.parse, TEXTS))]
    for facts in (
        {one.key for one in problems},
        {str(one) for one in problems},
        {kernel_kind.of(one) for one in problems},
    ):
        assert len(facts) == len(problems)
    assert not set(":,= ") & set("".join(one.key for one in problems))
