"""The table of call arguments says what the functions, the module, the operator and the keys of prepared calls have."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from checkout_paths import CHECKOUT

import autoattn
from autoattn import functional
from autoattn.core import call_arguments
from autoattn.core.call_arguments import ARGUMENTS, BY_NAME, NUMBERS, CallArgument
from autoattn.core.modifiers import Modifiers
from autoattn.runtime import call, call_keys
from autoattn.runtime.torch_op import attention_schema
from autoattn.tensors.operands import Operands

QUERY, KEY = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
TOKENS = torch.randn(3, 4, 8)
OFFSETS = torch.tensor([0, 1, 3], dtype=torch.int32)


def declared(function: Callable[..., Any]) -> dict[str, tuple[str, object]]:
    """Keyword-only argument -> (annotation, default)."""
    parameters = inspect.signature(function).parameters.values()
    return {
        parameter.name: (parameter.annotation, parameter.default)
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def of_table(arguments: tuple[CallArgument, ...]) -> dict[str, tuple[str, object]]:
    return {argument.name: (argument.type, argument.default) for argument in arguments}


def test_the_functions_take_the_arguments_of_the_table() -> None:
    assert declared(functional.attention) == of_table(ARGUMENTS)
    assert declared(functional.packed_attention) == of_table(call_arguments.PACKED_ARGUMENTS)


def test_the_module_keeps_the_arguments_that_the_table_says() -> None:
    kept = tuple(argument for argument in ARGUMENTS if argument.module)
    assert declared(autoattn.Attention.__init__) == of_table(kept)
    module = autoattn.Attention()
    assert {argument.name: getattr(module, argument.name) for argument in kept} == {
        argument.name: argument.default for argument in kept
    }


def test_the_operator_has_the_arguments_that_the_table_gives_a_type() -> None:
    schema = {argument.name: argument for argument in attention_schema.operator._schema.arguments}
    for argument in ARGUMENTS:
        if argument.schema and not argument.learned:
            assert schema[argument.name].default_value == argument.default
    assert {argument.name for argument in ARGUMENTS if argument.learned} <= schema.keys()


def test_numbers_are_operands_and_ask_for_a_modifier() -> None:
    assert {number.name for number in NUMBERS} <= {field.name for field in fields(Operands)}
    assert {argument.modifier for argument in ARGUMENTS} - {""} <= {field.name for field in fields(Modifiers)}
    assert all(BY_NAME[number.name].example > 0.0 for number in NUMBERS)


@pytest.mark.parametrize("given", [
    {}, {"causal": True, "softcap": 2.0}, {"window": (2, 1)}, {"mask": "causal", "precision": "ieee"},
    {"alibi_slopes": torch.ones(4), "return_lse": True}, {"numerics": "online", "scale": 0.5, "layout": "bhsd"},
], ids=str)  # fmt: skip
def test_functions_and_pipeline_form_the_same_key(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []
    plain = call_keys.of
    monkeypatch.setattr(call_keys, "of", lambda *facts: keys.append(facts[3:]) or plain(*facts))
    functional.forget()
    for attention in (functional.attention, call.attention):
        attention(QUERY, KEY, KEY, **given)
    packed = {name: word for name, word in given.items() if BY_NAME[name].packed}
    for packed_attention in (functional.packed_attention, call.packed_attention):
        packed_attention(TOKENS, TOKENS, TOKENS, OFFSETS, OFFSETS, 3, 3, **packed)
    assert len(keys) == 4
    for ours, theirs in (keys[:2], keys[2:]):
        assert str(ours) == str(theirs)


@pytest.mark.parametrize("explain", [functional.explain, functional.explain_packed])
def test_an_unknown_argument_is_refused(explain: Callable[..., Any]) -> None:
    tensors = (QUERY, KEY, KEY) if explain is functional.explain else (TOKENS, TOKENS, TOKENS, OFFSETS, OFFSETS, 3, 3)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'causel'"):
        explain(*tensors, causel=True)


def test_the_page_names_at_most_eight_files_to_touch_and_all_exist() -> None:
    page = (CHECKOUT / "docs" / "call-arguments.md").read_text(encoding="utf-8")
    touched = re.findall(r"^\| `([\w/.]+)` \|", page, re.M)
    assert 0 < len(touched) <= 8
    assert all((CHECKOUT / path).exists() for path in re.findall(r"`((?:autoattn|tests)/[\w/.]+)`", page))
