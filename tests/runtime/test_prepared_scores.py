"""Calls with a bias, slopes or sinks that come again: neither parsed nor planned, and never answered by stale facts.

There is no card here. PyTorch computes what lies at the addresses that a prepared launch gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import noted_launches
import pytest
import torch
from computed_launches import card  # noqa: F401 - a fixture
from fake_device import Launches
from noted_launches import same
from torch import Tensor

import autoattn
from autoattn import functional
from autoattn.codegen import render
from autoattn.errors import TensorError
from autoattn.runtime import call_cache
from autoattn.runtime.parse import arguments
from autoattn.runtime.plan import planner

pytestmark = pytest.mark.sampled

noted = noted_launches.card
HALF = torch.float16
HEADS, KEYS = 4, 48


def numbers(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape).to(dtype)


def three(batch: int = 2, seq: int = 32, keys: int = KEYS, learns: bool = False) -> list[Tensor]:
    shapes = (batch, HEADS, seq, 16), (batch, 2, keys, 16), (batch, 2, keys, 16)
    return [numbers(*shape).requires_grad_(learns) for shape in shapes]


# Name -> what a call of (batch, queries, keys) has beside.
SCORES: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "bias of pairs": lambda batch, seq, keys: {"bias": numbers(seq, keys)},
    "bias of sequences": lambda batch, seq, keys: {"bias": numbers(batch, 1, seq, keys)},
    "bias of heads and keys": lambda batch, seq, keys: {"bias": numbers(1, HEADS, 1, keys)},
    "bias of queries": lambda batch, seq, keys: {"bias": numbers(1, 1, seq, 1)},
    "float32 bias": lambda batch, seq, keys: {"bias": numbers(HEADS, seq, keys, dtype=torch.float32)},
    "booleans of pairs": lambda batch, seq, keys: {"mask": torch.rand(batch, 1, seq, keys) > 0.3},
    "booleans of keys": lambda batch, seq, keys: {"mask": torch.rand(batch, 1, 1, keys) > 0.3},
    "slopes": lambda batch, seq, keys: {"alibi_slopes": torch.rand(HEADS)},
    "slopes of sequences": lambda batch, seq, keys: {"alibi_slopes": torch.rand(batch, HEADS)},
    # Alike in each call: a backward kernel never reads them, so that what computes in its place has the first ones.
    "sinks": lambda batch, seq, keys: {"sinks": torch.linspace(-1, 2, HEADS)},
    "sinks to be cast": lambda batch, seq, keys: {"sinks": torch.linspace(-1, 2, HEADS).bfloat16()},
    "all": lambda batch, seq, keys: {
        "bias": numbers(seq, keys), "alibi_slopes": torch.rand(HEADS), "causal": True,
        "sinks": torch.linspace(-1, 2, HEADS),
    },
}  # fmt: skip


def expected(tensors: list[Tensor], given: dict[str, Any]) -> Tensor:
    """The output in float32."""
    query, key, value = tensors
    queries, keys = query.shape[2], key.shape[2]
    key, value = (tensor.float().repeat_interleave(2, 1) for tensor in (key, value))
    scores = query.float() @ key.mT / 4
    if (slopes := given.get("alibi_slopes")) is not None:
        far = (torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)).abs()
        scores = scores - slopes[..., None, None] * far
    added = given.get("bias", given.get("mask"))
    if added is not None:
        scores = scores.masked_fill(~added, -torch.inf) if added.dtype is torch.bool else scores + added
    if given.get("causal"):
        scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries), -torch.inf)
    if (sinks := given.get("sinks")) is not None:
        sink = sinks.float()[:, None, None].expand(query.shape[0], HEADS, queries, 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1).nan_to_num(0.0) @ value


def check(tensors: list[Tensor], given: dict[str, Any]) -> None:
    """That a call is right, and its gradients where some tensor learns."""
    tensor_like = [*tensors, *(word for word in given.values() if isinstance(word, Tensor))]
    learners = [tensor for tensor in tensor_like if tensor.requires_grad and torch.is_grad_enabled()]
    output, right = autoattn.attention(*tensors, **given), expected(tensors, given)
    torch.testing.assert_close(output.float(), right, rtol=1e-2, atol=1e-2)
    if learners:
        push = numbers(*output.shape)
        ours = torch.autograd.grad(output, learners, push)
        theirs = torch.autograd.grad(right, learners, push.float())
        for learner, gradient, wanted in zip(learners, ours, theirs, strict=True):
            assert (gradient.shape, gradient.dtype) == (learner.shape, learner.dtype)
            torch.testing.assert_close(gradient.float(), wanted.float(), rtol=2e-2, atol=2e-2)


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where anything is parsed, planned or rendered."""
    functions = ((arguments, "read"), (arguments, "read_packed"), (planner, "plan"), (render, "render"))
    for module, name in (*functions, (planner, "prepare"), (planner, "load_once")):
        monkeypatch.setattr(module, name, lambda *given, name=name, **words: pytest.fail(f"{name} was asked"))


@pytest.mark.parametrize("learns", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", SCORES)
def test_a_call_that_comes_again_is_neither_parsed_nor_planned_nor_rendered(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, learns: bool
) -> None:
    check(three(learns=learns), SCORES[name](2, 32, KEYS))
    assert card["prepared"] == 0
    with monkeypatch.context() as patch:
        forbid(patch)
        for _ in range(2):
            check(three(learns=learns), SCORES[name](2, 32, KEYS))  # of other numbers, which lie elsewhere
    assert card["prepared"] == (4 if learns else 2)


@pytest.mark.parametrize("learns", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", SCORES)
def test_new_lengths_are_neither_parsed_nor_planned_nor_rendered(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, learns: bool
) -> None:
    for batch, keys in ((2, 1936), (3, 1936), (2, 1920)):  # another batch may be of another class
        check(three(batch, 16, keys, learns=learns), SCORES[name](batch, 16, keys))
    with monkeypatch.context() as patch:
        forbid(patch)
        for keys in (1952, 1968, 1984):
            check(three(2, 16, keys, learns=learns), SCORES[name](2, 16, keys))
    assert card["resized"] >= 3
    if learns:
        assert card["resized_gradients"] >= 3


LEARNERS = [name for name in SCORES if not name.startswith("booleans") and name not in ("all", "sinks to be cast")]


@pytest.mark.parametrize("name", [*LEARNERS, "sinks to be cast"])
def test_what_learns_has_its_gradient_from_prepared_calls_too(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def learning(keys: int = KEYS) -> dict[str, Any]:
        return {name_: tensor.requires_grad_() for name_, tensor in SCORES[name](2, 32, keys).items()}

    check(three(learns=True), learning())
    with monkeypatch.context() as patch:
        forbid(patch)
        check(three(learns=True), learning())
        check(three(), learning())
    assert card["prepared"] == 4


def changed_biases() -> dict[str, Tensor]:
    """Biases of which each looks like the first in some way."""
    wide = numbers(2, HEADS, 32, KEYS + 16)
    return {
        "first": numbers(2, HEADS, 32, KEYS),
        "another": numbers(2, HEADS, 32, KEYS),
        "other strides": wide[..., :KEYS],
        "keys apart": numbers(2, HEADS, KEYS, 32).mT,
        "shifted": numbers(2 * HEADS * 32 * KEYS + 1)[1:].view(2, HEADS, 32, KEYS),
        "shared by sequences": numbers(1, HEADS, 32, KEYS),
        "shared by all": numbers(32, KEYS),
        "shared by queries": numbers(2, HEADS, 1, KEYS),
        "shared by keys": numbers(2, HEADS, 32, 1),
        "expanded by the caller": numbers(1, 1, 32, KEYS).expand(2, HEADS, 32, KEYS),
        "float32": numbers(2, HEADS, 32, KEYS, dtype=torch.float32),
        "booleans": torch.rand(2, HEADS, 32, KEYS) > 0.3,
        "booleans of keys": torch.rand(2, 1, 1, KEYS) > 0.3,
        "learning": numbers(2, HEADS, 32, KEYS).requires_grad_(),
    }


@pytest.mark.parametrize("learns", [False, True], ids=["forward", "training"])
def test_another_bias_is_never_answered_by_facts_of_the_last_one(card: dict[str, Any], learns: bool) -> None:
    for _ in range(2):
        for bias in changed_biases().values():
            check(three(learns=learns), {"bias": bias})
            check(three(learns=learns), {"mask": bias})
    for batch in (1, 3, 2):
        check(three(batch, learns=learns), {"bias": numbers(batch, 1, 32, KEYS)})
        check(three(batch, learns=learns), {"bias": numbers(32, KEYS)})
    with torch.no_grad():
        check(three(learns=learns), {"bias": changed_biases()["learning"].detach()})


def test_a_bias_that_learns_in_one_call_and_not_in_the_next_has_its_gradient_where_it_does(
    card: dict[str, Any],
) -> None:
    bias, tensors = numbers(32, KEYS), three(learns=True)
    for learns in (False, True, False, True):
        output = autoattn.attention(*tensors, bias=bias.requires_grad_(learns))
        output.float().sum().backward()
        assert (bias.grad is not None) is learns
        bias.grad = None


@pytest.mark.parametrize("heads", [2, 4], ids=["shared heads", "equal heads"])
def test_the_door_of_pytorchs_function_finds_what_was_prepared(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, heads: int
) -> None:
    def attend() -> None:
        query, key, value = three()
        key, value = (tensor.repeat_interleave(heads // 2, 1) for tensor in (key, value))
        mask = numbers(32, KEYS)
        output = functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=heads == 2)
        right = expected([query, *(tensor[:, :: heads // 2] for tensor in (key, value))], {"bias": mask})
        torch.testing.assert_close(output.float(), right, rtol=1e-2, atol=1e-2)

    attend()
    with monkeypatch.context() as patch:
        forbid(patch)
        attend()
    query, key, value = three()
    with pytest.raises(RuntimeError):  # PyTorch refuses fewer key heads where nobody says so
        functional.scaled_dot_product_attention(query, key, value, numbers(32, KEYS))


def test_a_bias_of_a_wrong_shape_is_refused_though_calls_like_it_are_prepared(card: dict[str, Any]) -> None:
    for _ in range(2):
        check(three(), {"bias": numbers(32, KEYS)})
    for shape in ((31, KEYS), (32, KEYS + 1), (3, 1, 32, KEYS), (1, 1, 1, 32, KEYS)):
        with pytest.raises(TensorError, match="bias must be broadcastable"):
            autoattn.attention(*three(), bias=numbers(*shape))
    with pytest.raises(TensorError, match="alibi_slopes must be float32"):
        autoattn.attention(*three(), alibi_slopes=torch.rand(HEADS).half())


def test_second_derivatives_beside_a_learned_bias_are_those_of_the_formula(card: dict[str, Any]) -> None:
    def second(attend: Callable[..., Tensor], tensors: list[Tensor], bias: Tensor) -> tuple[Tensor, ...]:
        leaves = [*tensors, bias]
        first = torch.autograd.grad(attend(*tensors, bias).float().square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(gradient.float().square().sum() for gradient in first), leaves)

    given = [tensor.detach().requires_grad_() for tensor in three()]
    bias = numbers(HEADS, 32, KEYS).requires_grad_()
    right = second(lambda *all_: expected([*all_[:3]], {"bias": all_[3]}), given, bias)
    for _ in range(2):
        gradients = second(lambda *all_: autoattn.attention(*all_[:3], bias=all_[3]), given, bias)
        for ours, theirs in zip(gradients, right, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-1)
    assert card["prepared"] > 0


@pytest.mark.parametrize("name", SCORES)
def test_a_prepared_call_with_scores_launches_what_the_ordinary_one_does(name: str, noted: Launches) -> None:
    functional.forget()
    given = SCORES[name](2, 48, 48)
    tensors = noted_launches.three()
    for _ in range(2):
        autoattn.attention(*tensors, **given)
    assert (len(noted.ordinary), len(noted.prepared)) == (1, 1)
    same(noted.ordinary[0], noted.prepared[0])
    passed = noted.prepared[0][1]
    kept = [word for word in given.values() if isinstance(word, Tensor) and word.dtype is not torch.bfloat16]
    assert {tensor.data_ptr() for tensor in kept} <= {*passed}, "the caller's own"


@pytest.mark.parametrize("name", SCORES)
def test_a_new_length_with_scores_launches_what_a_call_of_its_own_would(name: str, noted: Launches) -> None:
    functional.forget()
    for seq in (1936, 1952, 1952):
        if seq == 1952 and noted.prepared:
            functional.forget()
        autoattn.attention(*noted_launches.three(seq=seq), **SCORES[name](2, seq, seq))
    assert (len(noted.ordinary), len(noted.prepared)) == (2, 1)
    same(noted.ordinary[-1], noted.prepared[0])


def test_nothing_that_is_kept_of_a_call_holds_its_bias(card: dict[str, Any]) -> None:
    tensors = three(learns=True)
    for _ in range(2):
        autoattn.attention(*tensors, bias=numbers(32, KEYS)).float().sum().backward()
    for prepared in call_cache.prepared_calls():
        held = [getattr(prepared, name) for name in getattr(type(prepared), "__slots__", ())]
        assert held
        assert not any(isinstance(each, Tensor) for each in held)
