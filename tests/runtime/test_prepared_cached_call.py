"""Calls on caches that were prepared: a cache that grows is the same call at each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_device import Launches
from noted_launches import card, hopper, nothing_prepared, same  # noqa: F401 - fixtures
from torch import Tensor

import autoattn
from autoattn.runtime import call_cache

HALF = torch.float16
PAGED, ROWS, PADDED, FLOAT8 = "paged", "rows", "leftpad", "float8"


def step(
    length: int, kind: str = PAGED, *, tokens: int = 1, packed: bool = False
) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors of one step, all of them new."""
    numbers = torch.full((2,), length, dtype=torch.int32)
    shape = (8, 16, 2, 16) if kind in (PAGED, FLOAT8) else (2, 64, 2, 16)
    dtype = torch.float8_e4m3fn if kind == FLOAT8 else HALF
    query = torch.randn((2 * tokens, 4, 16) if packed else (2, tokens, 4, 16)).to(HALF)
    words: dict[str, Any] = {
        PAGED: {"block_table": torch.arange(8, dtype=torch.int32).view(2, 4)},
        ROWS: {"cache_rows": torch.arange(2, dtype=torch.int32)},
        PADDED: {"leftpad": torch.zeros(2, dtype=torch.int32)},
        FLOAT8: {
            "block_table": torch.arange(8, dtype=torch.int32).view(2, 4),
            "key_scale": torch.rand(2),
            "value_scale": torch.rand(2, 2),
        },
    }[kind]
    if packed:
        words |= {"cu_seqlens_q": torch.arange(0, 2 * tokens + 1, tokens, dtype=torch.int32), "max_seqlen_q": tokens}
    return [query, torch.zeros(shape).to(dtype), torch.zeros(shape).to(dtype), numbers], words


@pytest.mark.parametrize("kind", [PAGED, ROWS, PADDED])
@pytest.mark.parametrize("packed", [False, True])
def test_a_prepared_call_launches_what_the_ordinary_one_does(kind: str, packed: bool, card: Launches) -> None:
    check_prepared(kind, packed, card)


@pytest.mark.parametrize("packed", [False, True])
def test_a_prepared_call_on_a_float8_cache_reads_the_scales_of_the_caller(packed: bool, hopper: Launches) -> None:
    check_prepared(FLOAT8, packed, hopper)


def check_prepared(kind: str, packed: bool, card: Launches) -> None:
    """Compares the second call with the first."""
    (first, words), (second, other_words) = step(5, kind, packed=packed), step(6, kind, packed=packed)
    autoattn.cached_attention(*first, **words, return_lse=True)
    output, lse = autoattn.cached_attention(*second, **other_words, return_lse=True)
    assert (len(card.ordinary), len(card.prepared)) == (1, 1)
    same(card.ordinary[0], card.prepared[0])
    tensors = [*second, output, lse, *(word for word in other_words.values() if isinstance(word, Tensor))]
    assert {tensor.data_ptr() for tensor in tensors} <= {*card.prepared[0][1]}


@pytest.mark.parametrize("packed", [False, True])
def test_a_prepared_call_with_slopes_and_sinks_launches_what_the_ordinary_one_does(
    packed: bool, card: Launches
) -> None:
    scores: list[dict[str, Tensor]] = []
    for length in (5, 6):
        tensors, words = step(length, packed=packed)
        scores.append({"alibi_slopes": torch.rand(4), "sinks": torch.rand(4)})
        autoattn.cached_attention(*tensors, **words, **scores[-1])
    assert (len(card.ordinary), len(card.prepared)) == (1, 1)
    same(card.ordinary[0], card.prepared[0])
    assert {tensor.data_ptr() for tensor in scores[1].values()} <= {*card.prepared[0][1]}, "the caller's own"


def test_lengths_that_grow_are_one_prepared_call(card: Launches) -> None:
    for length in range(1, 20):
        tensors, words = step(length)
        autoattn.cached_attention(*tensors, **words, max_length=64)
    assert (len(card.ordinary), len(card.prepared)) == (1, 18)
    assert call_cache.info().calls == 1


def test_scales_of_one_are_one_prepared_call(hopper: Launches) -> None:
    for length in (5, 6):
        tensors, words = step(length, FLOAT8)
        autoattn.cached_attention(*tensors, block_table=words["block_table"])
    assert (len(hopper.ordinary), len(hopper.prepared)) == (1, 1)
    same(hopper.ordinary[0], hopper.prepared[0])


INVARIANT: tuple[dict[str, Any], ...] = ({"deterministic": True}, {"splits": 1}, {"split_length": 1024})


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("words", INVARIANT, ids=str)
def test_batches_of_all_sizes_get_the_kernel_of_one_where_bits_must_not_depend_on_the_batch(
    words: dict[str, Any],
) -> None:
    def variant(batch: int, **words: Any) -> object:
        key = torch.zeros(batch, 4096, 2, 16, dtype=HALF)
        lengths = torch.zeros(batch, dtype=torch.int32)
        query = torch.zeros(batch, 1, 4, 16, dtype=HALF)
        return autoattn.explain_cached(query, key, key, lengths, **words).variant

    assert variant(1, **words) == variant(200, **words)
    assert variant(1) != variant(200)


def test_a_bound_of_lengths_is_rounded_up_so_that_it_changes_rarely(card: Launches) -> None:
    for bound in (33, 40, 64):
        tensors, words = step(5)
        autoattn.cached_attention(*tensors, **words, max_length=bound)
    assert call_cache.info().calls == 1


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    "changes",
    [{"causal": True}, {"splits": 1}, {"scale": 0.5}, {"window": (7, 0)}, {"return_lse": True}],
    ids=str,
)
def test_calls_that_ask_for_something_else_are_prepared_apart(changes: dict[str, Any]) -> None:
    for given in ({}, changes):
        tensors, words = step(5, tokens=2)
        autoattn.cached_attention(*tensors, **words, **given)
    assert call_cache.info().calls == 2


@pytest.mark.usefixtures("card")
def test_explain_says_what_runs() -> None:
    tensors, words = step(5)
    explanation = autoattn.explain_cached(*tensors, **words)
    assert explanation.variant is not None
    assert str(explanation).startswith("kernel (default)")
    assert str(explanation.problem).endswith("cache paged:16")
    without = autoattn.explain_cached(*tensors, **words, splits=1)
    assert without.variant is not None
    assert without.variant.as_dict().get("SPLITS", 1) == 1


def test_guards_find_the_same_call_and_no_other(card: Launches) -> None:
    for _ in range(3):
        tensors, words = step(5)
        autoattn.cached_attention(*tensors, **words)
    (guarded,) = call_cache.latest_on_caches
    assert len(card.prepared) == 2
    tensors, words = step(5)
    offsets = tensors[3], words["block_table"]
    assert guarded.matches(*tensors[:3], *offsets)
    assert not guarded.matches(*tensors[:3], tensors[3], words["block_table"][:, :3])
    assert not guarded.matches(tensors[0].float(), *tensors[1:3], *offsets)
    assert call_cache.find_guarded_on_cache((*tensors[:3], *offsets), guarded.words) is not None
    assert call_cache.find_guarded_on_cache((*tensors[:3], *offsets), (*guarded.words[:-1], 64)) is None
    assert call_cache.find_guarded_on_cache((*tensors[:3], None, None), guarded.words) is None
    call_cache.clear()
    assert call_cache.latest_on_caches == ()
