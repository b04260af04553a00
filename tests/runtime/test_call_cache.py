"""Which calls guards find, and which they tell apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from call_lookups import found_among_recent, shifted
from noted_launches import nothing_prepared, three  # noqa: F401 - fixtures
from torch import Tensor

from autoattn import functional
from autoattn.baselines import deterministic_sdpa
from autoattn.errors import AutoattnError
from autoattn.runtime import call_cache


def test_the_same_call_is_found_among_recent_ones() -> None:
    call_cache.clear()
    for causal, known in ((True, False), (False, False), (True, True), (False, True)):
        assert found_among_recent(*three(), causal=causal) is known
        assert found_among_recent(*three(), causal=causal)
    query, key, value = three()
    assert not found_among_recent(query, query, query)
    assert found_among_recent(key, key, key), "one object in three places is a kind of its own"
    assert not found_among_recent(shifted(query, 1), key, value), "a kernel would read it by wider steps"
    with torch.no_grad():
        assert not found_among_recent(*three())
    for words in ({"causal": 0}, {"softcap": False}, {"return_lse": True}):
        assert not found_among_recent(*three(), **words)
    assert not found_among_recent(*three(dtype=torch.float32))
    assert not found_among_recent(*three(dtype=torch.float32)), "how its products are formed is no switch that is seen"


SCALES = [0.01 * number for number in range(1, call_cache.GUARDED_FIRST + 1)]  # of as many kinds as are asked first
WORDS = False, 0.0, 0.0, None, "bhsd", False, False


def test_calls_of_the_same_shapes_are_found_where_they_take_turns() -> None:
    """A model may ask for the LSE in some layers, and attend by our module and our function in turn."""
    call_cache.clear()
    kinds: list[dict[str, Any]] = [{}, {"return_lse": True}, {"causal": "top-left"}, {"scale": 0.5}]
    for known in (False, True, True):
        for words in kinds:
            assert found_among_recent(*three(), **words) is known, words
    for scale in SCALES:
        assert not found_among_recent(*three(), scale=scale)
    for words in kinds:
        assert not found_among_recent(*three(), **words), "the oldest made room"


def test_words_that_each_call_makes_anew_are_the_same_words_and_equal_ones_of_other_types_are_not() -> None:
    call_cache.clear()
    for known in (False, True, True):
        assert found_among_recent(*three(), scale=float("0.5"), layout="".join(("b", "hsd"))) is known
    for known in (False, True):
        assert found_among_recent(*three(), scale=float("0.5"), softcap=float("3")) is known
    others = {"scale": np.float64(0.5)}, {"softcap": 3}, {"dropout": 0}, {"dropout": False}, {"causal": 0}
    for other in others:
        assert not found_among_recent(*three(), **{"scale": 0.5, "softcap": 3.0, **other}), other


def test_kinds_that_are_asked_last_are_found_too_and_are_asked_first_from_then_on() -> None:
    """Shapes that take turns by the hundred steps, as in training by lengths that grow."""
    call_cache.clear()
    lengths = range(1, call_cache.GUARDED_FIRST + 3)
    for known in (False, True):
        for seq in lengths:
            assert found_among_recent(*three(seq=seq)) is known, seq
            assert call_cache.latest[0].is_alike(*three(seq=seq)), seq


def test_what_is_forgotten_while_it_is_found_is_not_found_again() -> None:
    call_cache.clear()
    for seq in range(1, call_cache.GUARDED_FIRST + 3):
        assert not found_among_recent(*three(seq=seq))
    put_first = call_cache.put_first

    def late(*given: Any) -> None:
        call_cache.clear()
        put_first(*given)

    with mock.patch.object(call_cache, "put_first", late):
        assert found_among_recent(*three(seq=1))
    assert not found_among_recent(*three(seq=1))


@dataclass(frozen=True, kw_only=True)
class StubCall:
    """A prepared call that answers nothing."""

    sees_switches: bool

    @property
    def guarded(self) -> StubCall:
        return self

    def __call__(self, *tensors: Tensor) -> None:
        return None


@pytest.mark.parametrize("exact", [True, False])
def test_kinds_differ_by_whether_gradients_are_wanted_and_must_repeat(exact: bool) -> None:
    """Also where PyTorch's attention is the answer, which sees all else by itself."""

    def is_found(*, gradient: bool) -> bool:
        query, key, value = (tensor.requires_grad_(gradient) for tensor in three())
        return call_cache.find_guarded(query, key, value, WORDS) is not None

    for gradient in (False, True):
        call_cache.clear()
        query, key, value = (tensor.requires_grad_(gradient) for tensor in three())
        call_cache.guard(query, key, value, WORDS, StubCall(sees_switches=not exact))
        assert is_found(gradient=gradient)
        assert not is_found(gradient=not gradient)
        with deterministic_sdpa.switched_on(True):
            assert not is_found(gradient=gradient)
        with torch.no_grad():
            assert not is_found(gradient=gradient)


def test_words_that_cannot_be_compared_go_the_ordinary_way() -> None:
    call_cache.clear()
    assert not found_among_recent(*three(), scale=0.5)
    for scale in (torch.ones(3), np.ones(3)):
        with pytest.raises(AutoattnError, match="scale must be"):
            functional.attention(*three(), scale=scale)  # type: ignore[arg-type]
