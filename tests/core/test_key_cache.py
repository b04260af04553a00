"""Caches of keys and values as facts of a problem."""

from __future__ import annotations

from typing import Any

import kernels
import pytest

from autoattn.core import kernel_kind
from autoattn.core.key_cache import KeyCache, are_latent_dims
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Op
from autoattn.errors import ProblemError

TEXTS = (
    "contiguous",
    "contiguous,rows",
    "contiguous,leftpad,splits=4,split_length=64",
    "paged:1",
    "paged:256,splits=1",
    "paged:16,float8_e4m3",
    "contiguous,float8_e4m3,rows",
    "paged:64,latent",
    "contiguous,float8_e4m3,latent,rows,splits=4",
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
    problems = [
        kernels.problem(cache=cache, head_dim=48, head_dim_v=32) for cache in (None, *map(KeyCache.parse, TEXTS))
    ]
    for facts in (
        {problem.key for problem in problems},
        {str(problem) for problem in problems},
        {kernel_kind.of(problem) for problem in problems},
    ):
        assert len(facts) == len(problems)
    assert not set(":,= ") & set("".join(problem.key for problem in problems))


# --- latents ----------------------------------------------------------------------------------------------------------

LATENT = {"cache": KeyCache(page=64, latent=True), "dtype": DType.BFLOAT16, "head_dim": 576, "head_dim_v": 512}


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "latent"),
    [
        *((576, 512, True), (560, 512, True), (513, 512, True), (288, 256, True), (96, 64, True), (48, 32, True)),
        *(
            (576, 576, False),
            (576, 256, False),
            (640, 512, False),
            (112, 64, False),
            (512, 256, False),
            (80, 72, False),
        ),
    ],
)
def test_values_fill_the_first_of_two_powers_of_two_that_hold_a_latent(
    head_dim: int, head_dim_v: int, latent: bool
) -> None:
    assert are_latent_dims(head_dim, head_dim_v) is latent


def test_a_latent_is_read_once() -> None:
    problem = kernels.problem(**LATENT | {"batch": 2, "heads_q": 16, "heads_kv": 1, "seq_q": 1, "seq_kv": 100})
    assert problem.elements_per_key == 576
    assert problem.bytes() == 2 * 100 * 576 * 2 + 2 * 16 * (576 + 512) * 2
    assert problem.key.endswith("paged-64-latent")
    assert kernel_kind.of(problem) != kernel_kind.of(kernels.problem(**LATENT | {"cache": KeyCache(latent=True)}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cache": KeyCache(page=64)}, "head_dim must be at most 256, got 576; say that the cache is latent"),
        ({"cache": None}, "head_dim must be at most 256, got 576; use F.scaled_dot_product_attention"),
        ({"dtype": DType.FLOAT32}, "a latent cache takes queries of 16 bits"),
        ({"head_dim_v": 256}, "as 512 and 576, got bfloat16, 256 and 576; leave latent out"),
        ({"head_dim": 640}, "head_dim must be at most 576, got 640"),
    ],
)
def test_other_head_dims_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        kernels.problem(**LATENT | changes)
