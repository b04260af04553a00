"""Variants, traits and sources: equal points are equal values with equal names."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoattn.core.variant import Source, Traits, Value, Variant, digest_of

PARAMS: dict[str, Value] = {"num_warps": 4, "BLOCK_M": 64, "softmax": "online"}
values = st.integers() | st.booleans() | st.text(max_size=5)


def test_the_order_of_parameters_leaves_no_trace() -> None:
    variants = {Variant.of("triton/forward", dict(order)) for order in itertools.permutations(PARAMS.items())}
    (variant,) = variants
    assert variant.params == (("BLOCK_M", 64), ("num_warps", 4), ("softmax", "online"))
    assert Variant(template="triton/forward", params=tuple(reversed(variant.params))) == variant


@given(st.dictionaries(st.text(max_size=5), values, max_size=5))
def test_a_variant_gives_back_what_it_was_made_of(params: dict[str, Value]) -> None:
    variant = Variant.of("t/u", params)
    assert variant.as_dict() == params
    assert list(variant.as_dict()) == sorted(params)
    assert {name: variant[name] for name in params} == params


def test_a_parameter_that_is_not_there_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="BLOCK_N"):
        Variant.of("triton/forward", PARAMS)["BLOCK_N"]


def test_its_dictionary_is_the_callers_own() -> None:
    variant = Variant.of("triton/forward", PARAMS)
    variant.as_dict()["BLOCK_M"] = 16
    assert variant["BLOCK_M"] == 64


def test_digests_tell_variants_apart() -> None:
    changes: list[dict[str, Value]] = [{}, {"BLOCK_M": 128}, {"softmax": "lazy"}, {"BLOCK_M": "64"}, {"extra": 1}]
    variants = [Variant.of("triton/forward", {**PARAMS, **change}) for change in changes]
    variants.append(Variant.of("gluon/forward", PARAMS))
    assert len({variant.digest for variant in variants}) == len(set(variants)) == 6
    assert variants[0].digest == Variant.of("triton/forward", dict(reversed(PARAMS.items()))).digest


def test_a_digest_is_16_hexadecimal_digits_of_sha_256() -> None:
    assert digest_of("abc") == "ba7816bf8f01cfea"  # FIPS 180-2, appendix B.1


def test_a_variant_reads_as_its_parameters() -> None:
    assert str(Variant.of("triton/forward", PARAMS)) == "BLOCK_M=64 num_warps=4 softmax=online"


@pytest.mark.parametrize(
    "value",
    [
        Variant.of("triton/forward", PARAMS),
        Traits(),
        Source(name="f", text="x", variant=Variant.of("triton/forward", PARAMS), traits=Traits()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_are_frozen_hashable_and_slotted(value: object) -> None:
    assert dataclasses.is_dataclass(value)
    assert len({value, dataclasses.replace(value)}) == 1  # type: ignore[type-var]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, "other")
    assert not hasattr(value, "__dict__")


def test_tuning_runs_on_the_easy_traits() -> None:
    assert Traits() == Traits(alignment=8, wide=False, lse=False)


def test_a_source_is_named_by_its_text_alone() -> None:
    source = Source(name="f", text="text", variant=Variant.of("t/u", {}), traits=Traits())
    assert source.digest == digest_of("text")
    assert (
        dataclasses.replace(source, variant=Variant.of("t/u", {"a": 1}), traits=Traits(lse=True)).digest
        == source.digest
    )
    assert dataclasses.replace(source, text="text ").digest != source.digest
