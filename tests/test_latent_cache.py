"""Attention on latent caches, whose values are a view of the keys: what they mean, and plans for a card not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_device import Launches
from noted_launches import hopper, nothing_prepared, same  # noqa: F401 - fixtures
from torch import Tensor

import autoattn
from autoattn import functional
from autoattn.errors import TensorError
from autoattn.runtime.parse import cache_arguments
from autoattn.runtime.parse.cache_arguments import CacheTensors

HEAD_DIM, HEAD_DIM_V, PAGE, HEADS = 576, 512, 4, 3
LENGTHS = torch.tensor([0, 5, 11], dtype=torch.int32)
TABLE = torch.tensor([[9, 8, 7], [1, 0, 3], [6, 2, 5]], dtype=torch.int32)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def latents(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Pages of latents, or rows of them: [.., keys, 1, 576]."""
    return numbers(*shape, 1, HEAD_DIM, seed=1, dtype=dtype)


def by_softmax(query: Tensor, keys: Tensor, *, causal: bool) -> Tensor:
    """[queries, heads, 512] of one sequence, in float64."""
    query, keys = query.double().transpose(0, 1), keys[:, 0].double()
    scores = query @ keys.mT * HEAD_DIM**-0.5
    seen = torch.ones(scores.shape[1:], dtype=torch.bool)
    seen = seen.tril(len(keys) - query.shape[1]) if causal else seen
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ keys[:, :HEAD_DIM_V]).transpose(0, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_sequence_attends_to_its_own_latents(dtype: torch.dtype, causal: bool) -> None:
    cache, query = latents(10, PAGE, dtype=dtype), numbers(3, 2, HEADS, HEAD_DIM, dtype=dtype)
    words: dict[str, Any] = {"block_table": TABLE, "causal": causal}
    output = autoattn.cached_attention(query, cache, cache[..., :HEAD_DIM_V], LENGTHS, **words)
    assert output.shape == (3, 2, HEADS, HEAD_DIM_V)
    assert bool((output[0] == 0.0).all())
    error = 1e-5 if dtype is not torch.bfloat16 else 2e-2
    for sequence in (1, 2):
        keys = cache[TABLE[sequence].long()].flatten(0, 1)[: LENGTHS[sequence]]
        expected = by_softmax(query[sequence], keys, causal=causal)
        torch.testing.assert_close(output[sequence].double(), expected, rtol=error, atol=error)


def test_a_contiguous_cache_packed_queries_and_flash_attention_s_function_give_the_same() -> None:
    pages, query = latents(10, PAGE), numbers(3, 1, HEADS, HEAD_DIM)
    rows = pages[TABLE.long()].flatten(1, 2)
    output = autoattn.cached_attention(query, pages, pages[..., :HEAD_DIM_V], LENGTHS, block_table=TABLE)
    others = (
        autoattn.cached_attention(query, rows, rows[..., :HEAD_DIM_V], LENGTHS),
        autoattn.cached_attention(
            query[:, 0], rows, rows[..., :HEAD_DIM_V], LENGTHS, cu_seqlens_q=torch.arange(4, dtype=torch.int32)
        )[:, None],
        functional.flash_attn_with_kvcache(
            query, pages, pages[..., :HEAD_DIM_V], cache_seqlens=LENGTHS, block_table=TABLE
        ),
    )
    for other in others:
        torch.testing.assert_close(other, output)


@pytest.mark.parametrize("paged", [False, True])
def test_a_shared_prefix_of_latents_changes_no_result(paged: bool) -> None:
    cache, query = latents(10, PAGE), numbers(3, 1, HEADS, HEAD_DIM)
    table, lengths = TABLE.clone(), torch.tensor([5, 9, 12], dtype=torch.int32)
    table[:, 0] = table[0, 0]
    words: dict[str, Any] = {"block_table": table}
    if not paged:
        cache, words = cache[table.long()].flatten(1, 2), {}
    three = query, cache, cache[..., :HEAD_DIM_V], lengths
    torch.testing.assert_close(
        autoattn.cached_attention(*three, shared_prefix=PAGE, **words), autoattn.cached_attention(*three, **words)
    )


def test_values_of_a_float8_latent_have_the_scale_of_the_keys() -> None:
    cache = latents(10, PAGE).to(torch.float8_e4m3fn)
    query, scale = numbers(3, 1, HEADS, HEAD_DIM, dtype=torch.float16), torch.tensor(0.5)
    three = query, cache, cache[..., :HEAD_DIM_V], LENGTHS
    output = autoattn.cached_attention(*three, block_table=TABLE, key_scale=scale)
    both = autoattn.cached_attention(*three, block_table=TABLE, key_scale=scale, value_scale=scale)
    other = autoattn.cached_attention(*three, block_table=TABLE, key_scale=scale, value_scale=torch.tensor(1.0))
    assert torch.equal(output, both)
    torch.testing.assert_close(other, 2 * output, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("key", "value", "latent"),
    [
        (latents(4, PAGE, dtype=torch.bfloat16), None, True),
        (latents(4, PAGE, dtype=torch.float8_e4m3fn), None, True),
        (latents(4, PAGE), None, False),  # float32
        (latents(4, PAGE, dtype=torch.half), latents(4, PAGE, dtype=torch.half)[..., :HEAD_DIM_V], False),  # elsewhere
        (numbers(4, PAGE, 1, 128, dtype=torch.half), None, False),  # values of all that a key has
        (numbers(4, PAGE, 1, 48, dtype=torch.half)[..., :40], None, False),  # ends in the second piece of a key
    ],
)
def test_values_are_those_of_a_latent_where_they_are_the_first_elements_of_keys(
    key: Tensor, value: Tensor | None, latent: bool
) -> None:
    head_dim_v = {576: 512, 128: 128, 40: 36}[key.shape[-1]]
    assert cache_arguments.is_latent(key, key[..., :head_dim_v] if value is None else value) is latent


def test_values_from_another_element_on_are_no_latent() -> None:
    key = latents(4, PAGE, dtype=torch.bfloat16)
    assert not cache_arguments.is_latent(key, key[..., 64:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_new_latents_are_written_once_and_attended_to(dtype: torch.dtype) -> None:
    wide = torch.bfloat16 if dtype.itemsize < 4 else dtype
    cache, query, new = latents(10, PAGE, dtype=dtype), numbers(3, 1, HEADS, HEAD_DIM).to(wide), latents(3, 1).to(wide)
    before, held = LENGTHS - 1, cache.clone()
    output = functional.flash_attn_with_kvcache(
        query, cache, cache[..., :HEAD_DIM_V], new, new[..., :HEAD_DIM_V], cache_seqlens=before, block_table=TABLE
    )
    for sequence, place in enumerate(before.tolist()):
        if place >= 0:
            held[TABLE[sequence, place // PAGE], place % PAGE] = new[sequence, 0].to(dtype)
    assert torch.equal(cache.float(), held.float())
    lengths = before.clamp_min(-1) + 1
    expected = autoattn.cached_attention(query, held, held[..., :HEAD_DIM_V], lengths, block_table=TABLE)
    assert torch.equal(output, expected)


def test_a_cache_without_keys_is_no_latent_and_takes_an_append_of_no_sequences() -> None:
    query, lengths = torch.zeros(0, 1, 4, 64), torch.zeros(0, dtype=torch.int32)
    key, value, new, new_value = (torch.zeros(0, keys, 2, dim) for keys in (8, 1) for dim in (64, 80))
    output = functional.flash_attn_with_kvcache(query, key, value, new, new_value, cache_seqlens=lengths)
    assert output.shape == (0, 1, 4, 80)


def test_a_module_appends_to_a_latent_cache() -> None:
    cache, query, new = latents(10, PAGE), numbers(3, 1, HEADS, HEAD_DIM), latents(3, 1)
    held = CacheTensors(key=cache, value=cache[..., :HEAD_DIM_V], lengths=LENGTHS - 1, block_table=TABLE)
    with torch.no_grad():
        output = autoattn.Attention(layout="bshd")(query, new, new[..., :HEAD_DIM_V], cache=held)
    assert torch.equal(output, autoattn.cached_attention(query, cache, held.value, LENGTHS, block_table=TABLE))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"v": latents(3, 1)[..., :HEAD_DIM_V].clone()}, "v must be a view of k's first elements"),
        ({"rotary_cos": torch.ones(99, 8), "rotary_sin": torch.ones(99, 8)}, "rotate the last ones before the call"),
    ],
    ids=["values of their own", "a rotation"],
)
def test_new_tokens_that_are_no_latents_are_refused_and_nothing_is_written(changes: Any, reason: str) -> None:
    cache, query, new = latents(10, PAGE), numbers(3, 1, HEADS, HEAD_DIM), latents(3, 1)
    before = cache.clone()
    given = {"k": new, "v": new[..., :HEAD_DIM_V], "cache_seqlens": LENGTHS - 1, "block_table": TABLE} | changes
    with pytest.raises(TensorError, match=reason):
        functional.flash_attn_with_kvcache(query, cache, cache[..., :HEAD_DIM_V], **given)
    assert torch.equal(cache, before)


# --- planned for a card that is not there -----------------------------------------------------------------------------


def step(
    dtype: torch.dtype, *, batch: int = 4, queries: int = 1, heads: int = 16
) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors of a step, all of them new."""
    cache = torch.zeros(batch * 4, 64, 1, HEAD_DIM).to(dtype)
    table = torch.arange(batch * 4, dtype=torch.int32).view(batch, 4)
    query = numbers(batch, queries, heads, HEAD_DIM, dtype=torch.bfloat16)
    lengths = torch.full((batch,), 100, dtype=torch.int32)
    return [query, cache, cache[..., :HEAD_DIM_V], lengths], {"block_table": table, "causal": True}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_prepared_call_launches_what_the_ordinary_one_does(dtype: torch.dtype, hopper: Launches) -> None:
    scale = {"key_scale": torch.ones(())} if dtype is torch.float8_e4m3fn else {}
    for _ in range(2):
        tensors, words = step(dtype)
        autoattn.cached_attention(*tensors, **words, **scale)
    assert (len(hopper.ordinary), len(hopper.prepared)) == (1, 1)
    same(hopper.ordinary[0], hopper.prepared[0])


def test_a_call_on_values_that_lie_elsewhere_is_not_answered_by_the_kernel_of_a_latent(hopper: Launches) -> None:
    narrow = 96, 64  # both a latent's and any other's
    key, other = (torch.zeros(16, 64, 1, narrow[0], dtype=torch.bfloat16) for _ in range(2))
    _, words = step(torch.bfloat16)
    query, lengths = numbers(4, 1, 16, narrow[0], dtype=torch.bfloat16), torch.full((4,), 100, dtype=torch.int32)
    for _ in range(3):
        autoattn.cached_attention(query, key, key[..., : narrow[1]], lengths, **words)
    autoattn.cached_attention(query, key, other[..., : narrow[1]], lengths, **words)
    assert (len(hopper.ordinary), len(hopper.prepared)) == (2, 2)


@pytest.mark.parametrize(("queries", "heads"), [(1, 16), (2, 16), (8, 16), (1, 128), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_explain_names_a_kernel_for_every_number_of_rows(
    dtype: torch.dtype, queries: int, heads: int, hopper: Launches
) -> None:
    tensors, words = step(dtype, queries=queries, heads=heads)
    explanation = autoattn.explain_cached(*tensors, **words)
    assert explanation.route == "kernel"
    assert "latent" in str(explanation.problem)


def test_values_of_their_own_beside_576_are_refused_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", True)
    (query, key, value, lengths), words = step(torch.bfloat16)
    with pytest.raises(TensorError, match=r"give key_cache\[\.\.\., :512\]"):
        autoattn.cached_attention(query, key, value.clone(), lengths, **words)
