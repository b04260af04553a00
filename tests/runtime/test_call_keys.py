"""The key of a call: all that its answer is decided by, and nothing less."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fake_device
import pytest
import samples
import torch
from call_lookups import found_among_recent, key_of, shifted, strided
from hypothesis import given, settings
from hypothesis import strategies as st
from noted_launches import HALF, nothing_prepared, three  # noqa: F401 - fixtures
from torch import Tensor

from autoattn.cache import store
from autoattn.codegen import render
from autoattn.core.mask import Mask
from autoattn.core.problem import Problem
from autoattn.core.variant import Traits, Variant
from autoattn.errors import AutoattnError
from autoattn.runtime.parse import arguments
from autoattn.runtime.plan import gradient_problem, planner

shapes = st.sampled_from([(2, 4, 8, 16), (2, 8, 4, 16), (1, 4, 8, 16), (2, 4, 8, 20), (2, 2, 8, 16)])
words = {
    "mask": st.sampled_from([None, "causal", "full", "window:2,2", Mask.window(2, 2), Mask(), "nonsense", 1]),
    "causal": st.sampled_from([False, True, 0, 1, 1.0, "bottom-right", "top-left", None]),
    "window": st.sampled_from([None, (2, 2), (2.0, 2), (2, True), (2, 1), (-1, 0), [2, 2], (2,)]),
    "softcap": st.sampled_from([0.0, 0, False, 1.0, 1, True, 2.5, None]),
    "score_mod": st.sampled_from([None, "score + 1.0", "score * 2.0", ""]),
    "dropout": st.sampled_from([0.0, 0, False, 0.5, True]),
    "scale": st.sampled_from([None, 1.0, 1, True, 0.0, -1.0, float("nan"), "1"]),
    "layout": st.sampled_from(["bhsd", "bshd", "sbhd", None]),
    "precision": st.sampled_from([None, "ieee", "tf32", "tf32x3", "exact"]),
    "numerics": st.sampled_from([None, "any", "online", "lazy", ""]),
    "return_lse": st.sampled_from([False, True, 0, 1]),
    "deterministic": st.sampled_from([False, True, 0, 1]),
}
tensor_facts = st.fixed_dictionaries(
    {
        "shapes": st.one_of(shapes.map(lambda shape: (shape, shape)), st.tuples(shapes, shapes)),
        "dtype": st.sampled_from([HALF, torch.bfloat16, torch.float32]),
        "place": st.integers(0, 2),  # of the tensor that the next three speak of
        "by": st.sampled_from([0, 1, 4, 8, 9]),
        "pad": st.sampled_from([0, 1, 8]),
        "other_dtype": st.sampled_from([False] * 4 + [True]),
        "gradient": st.sampled_from([None, 0, 1, 2]),
        "grad": st.booleans(),
        "autocast": st.sampled_from([None, HALF, torch.bfloat16]),
        "matmul": st.sampled_from(["highest", "high"]),
        "environment": st.sampled_from(["", "any", "online", "lazy"]),
    }
)
few_words = st.lists(st.sampled_from([*words]), max_size=2, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: words[name] for name in names})  # more are seldom one valid call
)
calls = st.tuples(tensor_facts, few_words)


def posed(call: tuple[dict[str, Any], dict[str, Any]], ask: Callable[..., Any]) -> tuple[Any, Any]:
    """What `ask` says of a call, and all that the ordinary way decides of it; an error is a decision too."""
    facts, keywords = call
    tensors = [torch.zeros(shape, dtype=facts["dtype"]) for shape in (facts["shapes"][0], *facts["shapes"][1:] * 2)]
    changed = facts["place"]
    moved = shifted(tensors[changed], facts["by"])
    tensors[changed] = strided(moved, facts["pad"]) if facts["pad"] else moved
    if facts["other_dtype"]:
        tensors[changed] = tensors[changed].to(torch.bfloat16)
    if facts["gradient"] is not None:
        tensors[facts["gradient"]].requires_grad_()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(facts["matmul"])
    kind = facts["autocast"]
    environment = mock.patch.dict(os.environ, AUTOATTN_NUMERICS=facts["environment"])
    try:
        with (
            environment,
            torch.set_grad_enabled(facts["grad"]),
            torch.autocast("cpu", dtype=kind, enabled=kind is not None),
        ):
            return ask(*tensors, **keywords), decided(tensors, keywords)
    finally:
        torch.set_float32_matmul_precision(before)


def decided(tensors: list[Tensor], keywords: dict[str, Any]) -> Any:
    given = {name: word for name, word in keywords.items() if name != "return_lse"}
    lse = keywords.get("return_lse", False)
    try:
        call = arguments.read(*tensors, **given, seed=1)  # type: ignore[arg-type]
        plan = planner.plan(call, lse=lse)
        traits = gradient_problem.traits_of(call.problem, call.operands, lse=lse) if plan.kernel is not None else None
    except AutoattnError:
        return "an error"
    numbers = repr(call.operands.scale), call.operands.softcap, call.operands.dropout
    strides = [tensor.stride() for tensor in (call.operands.query, call.operands.key, call.operands.value)]
    return call.problem, numbers, strides, traits, plan.explanation.route, call.empty, call.operands.query.dtype


FACTS = ["shapes", "dtype", "by", "pad", "gradient", "grad", "autocast", "matmul", "environment", *words]


@settings(max_examples=150)
@given(calls, st.sampled_from(FACTS), st.tuples(tensor_facts, st.fixed_dictionaries(words)))
def test_calls_with_one_key_are_decided_alike(call: Any, change: str, donor: Any) -> None:
    """The second call is the first one but for a fact, so that keys that forget it meet."""
    facts, keywords = ({**mine, **{change: given[change]}} if change in given else mine
                       for mine, given in zip(call, donor, strict=True))  # fmt: skip
    with planned_for_a_card():
        (key, plan), (other_key, other_plan) = posed(call, key_of), posed((facts, keywords), key_of)
        (_, again), (is_recent, same) = posed(call, found_among_recent), posed((facts, keywords), found_among_recent)
    if key is not None and key == other_key:
        assert plan == other_plan
    if is_recent:  # PyTorch's guards see as much as the key
        assert again == same


@dataclass(frozen=True)
class Rendered:
    """In place of a source: one for each problem, and not for each kind."""

    problem: Problem
    traits: Traits
    variant: Variant
    digest: str = "0"


@contextmanager
def planned_for_a_card() -> Iterator[None]:
    """The fixture's plans, for a test that hypothesis runs many times."""
    with (
        pytest.MonkeyPatch.context() as patch,
        fake_device.plan_on(patch, samples.H200, lambda *facts: SimpleNamespace(compiled=None, precompiled="")),
    ):
        patch.setattr(render, "render", lambda problem, variant, traits: Rendered(problem, traits, variant))
        patch.setattr(store, "why_stale", lambda entry: None)  # it renders entries too
        yield


EACH: dict[str, dict[str, Any]] = {
    "mask": {"mask": "causal"},
    "causal": {"causal": True},
    "causal, as a number": {"causal": 0},
    "window": {"window": (3, 3)},
    "window, as other numbers": {"window": (3.0, 3)},
    "softcap": {"softcap": 1.0},
    "score_mod": {"score_mod": "score + 1.0"},
    "numerics": {"numerics": "online"},
    "numerics, said": {"numerics": "any"},
    "dropout": {"dropout": 0.5},
    "scale": {"scale": 1.0},
    "layout": {"layout": "bshd"},
    "precision": {"precision": "tf32"},
    "return_lse": {"return_lse": True},
    "deterministic": {"deterministic": True},
}


def test_each_argument_makes_another_key() -> None:
    tensors = three(dtype=torch.float32)
    keys = [key_of(*tensors), *(key_of(*tensors, **keywords) for keywords in EACH.values())]
    assert None not in keys
    for first, second in itertools.combinations(keys, 2):
        assert first != second


def test_each_fact_of_a_tensor_makes_another_key() -> None:
    query, key, value = (shifted(tensor, 0) for tensor in three(dtype=torch.float32))
    keys = [
        key_of(query, key, value),
        key_of(query[:1], key, value),
        key_of(strided(query, 4), key, value),
        key_of(query, strided(key, 4), value),
        key_of(query, key, strided(value, 4)),
        key_of(shifted(query, 1), key, value),
        key_of(query, shifted(key, 2), value),
        key_of(*(tensor.half() for tensor in (query, key, value))),
        key_of(*(tensor.to("meta") for tensor in (query, key, value))),
        key_of(query, key, value.clone().requires_grad_()),
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys.append(key_of(query, key, value))
    with torch.autocast("cpu", dtype=HALF):
        keys.append(key_of(query, key, value))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    keys.append(key_of(query, key, value))
    torch.set_float32_matmul_precision(before)
    assert None not in keys
    for first, second in itertools.combinations(keys, 2):
        assert first != second


def test_equal_calls_on_other_tensors_have_one_key() -> None:
    first, second = ([shifted(tensor, 0) for tensor in three()] for _ in range(2))
    assert key_of(*first, window=(3, 0)) == key_of(*second, window=(3, 0))
    with torch.no_grad():
        learning = [tensor.requires_grad_() for tensor in second]
        assert key_of(*first) == key_of(*learning), "where no gradient is recorded, nobody needs one"


def test_where_more_than_a_look_is_needed_there_is_no_key() -> None:
    query, key, value = three()
    for keywords in ({"score_mod": lambda score, *place: score}, {"window": [3, 0]},
                     {"scale": torch.tensor(1.0)}, {"mask": object()}):  # fmt: skip
        assert key_of(query, key, value, **keywords) is None
    assert key_of(query, key.float(), value) is key_of(query, key, value.to("meta")) is None, "an error, or autocast's"
    for place in range(3):
        three_of = [query, key, value]
        three_of[place] = torch._neg_view(three_of[place])
        assert key_of(*three_of) is None, "in its memory lie other numbers"
    subclass = query.as_subclass(type("Own", (Tensor,), {}))
    for tensor in (subclass, query.to_sparse(), query.tolist(), None):
        assert key_of(tensor, key, value) is None
    keys: list[Any] = []
    torch.func.vmap(lambda tensor: keys.append(key_of(tensor, key, value)) or tensor)(query)
    assert keys == [None]
