"""Attention on caches of keys and values: what the functions mean, on the CPU, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from checkout_paths import CHECKOUT
from torch import Tensor

import autoattn
from autoattn import functional
from autoattn.errors import ProblemError, TensorError

BATCH, HEADS_Q, HEADS_KV, HEAD_DIM, PAGE, CAPACITY = 3, 4, 2, 16, 4, 12
LENGTHS = torch.tensor([0, 5, 11], dtype=torch.int32)
FLOAT8 = torch.float8_e4m3fn


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def paged() -> tuple[Tensor, Tensor, Tensor]:
    """(keys, values, block table)"""
    key, value = (numbers(10, PAGE, HEADS_KV, HEAD_DIM, seed=seed) for seed in (1, 2))
    return key, value, torch.tensor([[9, 8, 7], [1, 0, 3], [6, 2, 5]], dtype=torch.int32)


def gathered(cache: Tensor, table: Tensor) -> Tensor:
    """[batch, capacity, heads, head_dim]"""
    return cache[table.long()].flatten(1, 2)


def by_sdpa(query: Tensor, key: Tensor, value: Tensor, length: int, *, causal: bool = False) -> Tensor:
    """One sequence, [seq, heads, head_dim]."""
    three = (tensor.transpose(0, 1)[None] for tensor in (query, key[:length], value[:length]))
    seq_q = query.shape[0]
    mask = torch.ones(seq_q, length, dtype=torch.bool).tril(length - seq_q) if causal else None
    output = torch.nn.functional.scaled_dot_product_attention(*three, attn_mask=mask, enable_gqa=True)
    return output[0].transpose(0, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_each_sequence_attends_to_its_own_keys(causal: bool) -> None:
    key, value, table = paged()
    query = numbers(BATCH, 2, HEADS_Q, HEAD_DIM)
    output, lse = autoattn.cached_attention(
        query, key, value, LENGTHS, block_table=table, causal=causal, return_lse=True
    )
    assert bool((output[0] == 0.0).all())
    assert bool((lse[0] == -torch.inf).all())
    for sequence in (1, 2):
        keys, values = gathered(key, table)[sequence], gathered(value, table)[sequence]
        expected = by_sdpa(query[sequence], keys, values, int(LENGTHS[sequence]), causal=causal)
        torch.testing.assert_close(output[sequence], expected)


def test_packed_queries_and_contiguous_caches_give_the_same() -> None:
    key, value, table = paged()
    query = numbers(BATCH, 1, HEADS_Q, HEAD_DIM)
    expected = autoattn.cached_attention(query, key, value, LENGTHS, block_table=table, causal=True)
    offsets = torch.arange(BATCH + 1, dtype=torch.int32)
    packed = autoattn.cached_attention(
        query[:, 0], key, value, LENGTHS, block_table=table, cu_seqlens_q=offsets, max_seqlen_q=1, causal=True
    )
    keys, values = gathered(key, table), gathered(value, table)
    rows = torch.tensor([2, 0, 1], dtype=torch.int32)
    by_rows = autoattn.cached_attention(query, keys[[1, 2, 0]], values[[1, 2, 0]], LENGTHS, cache_rows=rows)
    torch.testing.assert_close(packed[:, None], expected)
    torch.testing.assert_close(by_rows, expected)
    torch.testing.assert_close(autoattn.cached_attention(query, keys, values, LENGTHS), expected)


def test_paged_varlen_takes_lengths_or_offsets() -> None:
    key, value, table = paged()
    query, offsets = numbers(BATCH, HEADS_Q, HEAD_DIM), torch.arange(BATCH + 1, dtype=torch.int32)
    expected = autoattn.cached_attention(query[:, None], key, value, LENGTHS, block_table=table)[:, 0]
    cu_seqlens_k = torch.tensor([0, 0, 5, 16], dtype=torch.int32)
    for keys in ({"seqused_k": LENGTHS}, {}):
        output = functional.flash_attn_varlen_func(
            query, key, value, offsets, None if keys else cu_seqlens_k, 1, 11, causal=True, block_table=table, **keys
        )
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("words", [{"deterministic": True}, {"splits": 1}, {"split_length": 64}], ids=str)
def test_how_sequences_are_cut_changes_no_result(words: dict[str, Any]) -> None:
    key, value, table = paged()
    query = numbers(BATCH, 1, HEADS_Q, HEAD_DIM)
    expected = autoattn.cached_attention(query, key, value, LENGTHS, block_table=table)
    torch.testing.assert_close(
        autoattn.cached_attention(query, key, value, LENGTHS, block_table=table, **words), expected
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"deterministic": 1}, "True or False"),
        ({"split_length": 100}, "power of two"),
        ({"split_length": 64.0}, "whole number of keys"),
        ({"deterministic": True, "cu_seqlens_q": torch.arange(BATCH + 1, dtype=torch.int32)}, "max_seqlen_q"),
    ],
)
def test_a_way_to_cut_sequences_that_is_none_is_refused(words: dict[str, Any], message: str) -> None:
    key, value, table = paged()
    query = numbers(BATCH, *([] if "cu_seqlens_q" in words else [1]), HEADS_Q, HEAD_DIM)
    with pytest.raises((TensorError, ProblemError), match=message):
        autoattn.cached_attention(query, key, value, LENGTHS, block_table=table, **words)


# --- caches of float8 -------------------------------------------------------------------------------------------------

HALF_QUERY = numbers(BATCH, 1, HEADS_Q, HEAD_DIM).half()
SCALES = {
    "for all": (torch.tensor(0.5), torch.tensor([2.0])),
    "for each head": (torch.tensor([0.5, 0.25]), None),
    "for each sequence and head": (torch.rand(BATCH, 2) + 0.5, torch.rand(BATCH, 2) + 0.5),
}


@pytest.mark.parametrize("name", SCALES)
def test_numbers_of_a_float8_cache_are_multiplied_by_their_scales(name: str) -> None:
    key, value, table = paged()
    key, value = key.to(torch.float8_e4m3fn), value.to(torch.float8_e4m3fn)
    key_scale, value_scale = SCALES[name]
    output, lse = autoattn.cached_attention(
        HALF_QUERY, key, value, LENGTHS, block_table=table, key_scale=key_scale, value_scale=value_scale,
        return_lse=True,
    )  # fmt: skip
    assert output.dtype is torch.float16
    whole = [
        gathered(tensor.float(), table) * (1.0 if scale is None else scale.expand(BATCH, 2)[:, None, :, None])
        for tensor, scale in ((key, key_scale), (value, value_scale))
    ]
    expected, expected_lse = autoattn.cached_attention(HALF_QUERY.float(), *whole, LENGTHS, return_lse=True)
    torch.testing.assert_close(output.float(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=2e-3, atol=2e-3)


def test_new_keys_are_divided_by_the_scale_of_a_float8_cache_and_saturate() -> None:
    keys, values = (torch.zeros(1, CAPACITY, HEADS_KV, HEAD_DIM, dtype=torch.float8_e4m3fn) for _ in range(2))
    new = torch.linspace(-3.0, 3.0, 2 * HEAD_DIM).view(1, 1, 2, HEAD_DIM).half()
    functional.flash_attn_with_kvcache(
        HALF_QUERY[:1], keys, values, new, new, cache_seqlens=3, k_descale=torch.full((1, 2), 0.5),
        v_descale=torch.full((1, 2), 1e-3),
    )  # fmt: skip
    assert torch.equal(keys[0, 3].float(), (2.0 * new[0, 0].float()).to(torch.float8_e4m3fn).float())
    assert values.float().abs().max() == 448.0
    assert not keys[0, 4:].float().any()


# --- parts that are merged --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
def test_outputs_of_some_keys_merge_into_the_output_of_all(layout: str) -> None:
    key, value = (numbers(BATCH, CAPACITY, HEADS_KV, HEAD_DIM, seed=seed) for seed in (1, 2))
    query, lengths = numbers(BATCH, 2, HEADS_Q, HEAD_DIM), torch.full((BATCH,), 5, dtype=torch.int32)
    parts = [
        autoattn.cached_attention(query, key[:, begin:], value[:, begin:], held, return_lse=True)
        for begin, held in ((0, lengths), (5, LENGTHS - 5), (5, 0 * lengths))
    ]
    views = {
        "bshd": lambda tensor: tensor,
        "bhsd": lambda tensor: tensor.transpose(1, 2),
        "packed": lambda tensor: tensor[0],
    }
    first, second, none = ((views[layout](output), lse[0] if layout == "packed" else lse) for output, lse in parts)
    words = {"layout": layout} if layout != "packed" else {}
    merged, lse = autoattn.merge_states(*first, *second, **words)
    expected, expected_lse = autoattn.cached_attention(query, key, value, LENGTHS.clamp_min(5), return_lse=True)
    torch.testing.assert_close(merged, views[layout](expected))
    torch.testing.assert_close(lse, expected_lse[0] if layout == "packed" else expected_lse)
    torch.testing.assert_close(autoattn.merge_states(*none, *first, **words), first)
    nothing, lse = autoattn.merge_states(*none, *none, **words)
    assert not nothing.any()
    assert bool((lse == -torch.inf).all())


def test_what_are_no_two_outputs_of_the_same_queries_is_refused() -> None:
    output, lse = numbers(2, 3, 4, 8), numbers(2, 4, 3)
    for changed, words in (
        ((output, lse, output[:1], lse), "one shape"),
        ((output, lse, output.half(), lse), "dtype and device"),
        ((output, lse, output, lse[:, :2]), "other_lse must be"),
        ((output, lse.double(), output, lse), "lse must be"),
    ):
        with pytest.raises(TensorError, match=words):
            autoattn.merge_states(*changed)


PREFIX_WORDS: dict[str, dict[str, Any]] = {
    "several queries": {"causal": True},
    "softcap and sinks": {"softcap": 3.0, "sinks": numbers(HEADS_Q, seed=8)},
    "one query packed": {"cu_seqlens_q": torch.arange(BATCH + 1, dtype=torch.int32), "max_seqlen_q": 1},
}


@pytest.mark.parametrize("cache", ["pages", "rows"])
@pytest.mark.parametrize("name", PREFIX_WORDS)
def test_a_shared_prefix_changes_no_result(name: str, cache: str) -> None:
    key, value, table = paged()
    table[:, :2] = table[0, :2]
    prefix, lengths, words = 2 * PAGE, torch.tensor([12, 10, 9], dtype=torch.int32), PREFIX_WORDS[name]
    query = numbers(BATCH, 2, HEADS_Q, HEAD_DIM)
    query = query[:, 0] if "cu_seqlens_q" in words else query
    if cache == "pages":
        three, place = (query, key, value), {"block_table": table}
    else:
        rows = torch.tensor([2, 0, 1], dtype=torch.int32)
        three, place = (query, *(gathered(tensor, table)[[1, 2, 0]] for tensor in (key, value))), {"cache_rows": rows}
    given = {**place, **words, "return_lse": True}
    expected = autoattn.cached_attention(*three, lengths, **given)
    torch.testing.assert_close(autoattn.cached_attention(*three, lengths, shared_prefix=prefix, **given), expected)
    assert any("shared prefix" in step for step in autoattn.explain_cached(
        *three, lengths, shared_prefix=prefix, **given
    ).steps)  # fmt: skip


def test_a_shared_prefix_is_read_where_the_first_sequence_has_it() -> None:
    key, value, table = paged()
    table[:, :2] = table[0, :2]
    query, lengths = numbers(BATCH, 1, HEADS_Q, HEAD_DIM), torch.tensor([12, 10, 9], dtype=torch.int32)
    expected = autoattn.cached_attention(query, key, value, lengths, block_table=table)
    table[1:, :2] = 2**30
    shared = autoattn.cached_attention(query, key, value, lengths, block_table=table, shared_prefix=2 * PAGE)
    torch.testing.assert_close(shared, expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shared_prefix": 5}, "whole number of pages"),
        ({"shared_prefix": 12}, "less than the 12 keys"),
        ({"shared_prefix": True}, "whole number of pages"),
        ({"window": (3, 0)}, "leave one of them out"),
        ({"alibi_slopes": torch.ones(HEADS_Q)}, "leave one of them out"),
        ({"deterministic": True}, "leave one of them out"),
    ],
)
def test_a_prefix_that_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    key, value, table = paged()
    query = numbers(BATCH, 1, HEADS_Q, HEAD_DIM)
    with pytest.raises(TensorError, match=words):
        autoattn.cached_attention(query, key, value, LENGTHS, block_table=table, **{"shared_prefix": 4, **changes})


# --- flash_attn_with_kvcache ------------------------------------------------------------------------------------------


def test_new_keys_stand_behind_the_cache_before_the_attention() -> None:
    key, value, table = paged()
    new_key, new_value = (numbers(BATCH, 1, HEADS_KV, HEAD_DIM, seed=seed) for seed in (3, 4))
    query, keys, values = numbers(BATCH, 1, HEADS_Q, HEAD_DIM), key.clone(), value.clone()
    output, lse = functional.flash_attn_with_kvcache(
        query, keys, values, new_key, new_value, cache_seqlens=LENGTHS, block_table=table, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    written = gathered(keys, table)
    assert lse.shape == (BATCH, HEADS_Q, 1)
    for sequence, length in enumerate(LENGTHS.tolist()):
        assert torch.equal(written[sequence, length], new_key[sequence, 0])
        assert torch.equal(written[sequence, :length], gathered(key, table)[sequence, :length])
        expected = by_sdpa(query[sequence], written[sequence], gathered(values, table)[sequence], length + 1)
        torch.testing.assert_close(output[sequence], expected)
    assert int((keys != key).any(-1).sum()) == BATCH * HEADS_KV, "nothing else was written"


@pytest.mark.parametrize("causal", [False, True])
def test_queries_are_rotated_where_they_stand(causal: bool) -> None:
    cos, sin = numbers(CAPACITY, 4, seed=5), numbers(CAPACITY, 4, seed=6)
    keys, values = (numbers(1, CAPACITY, HEADS_KV, HEAD_DIM, seed=seed) for seed in (1, 2))
    new = numbers(1, 2, HEADS_KV, HEAD_DIM, seed=3)
    query = numbers(1, 2, HEADS_Q, HEAD_DIM)

    def rotated(tensor: Tensor, positions: list[int]) -> Tensor:
        first, second = tensor[..., 0:8:2], tensor[..., 1:8:2]
        at_cos, at_sin = cos[positions][:, None], sin[positions][:, None]
        pairs = torch.stack((first * at_cos - second * at_sin, second * at_cos + first * at_sin), -1).flatten(-2)
        return torch.cat((pairs, tensor[..., 8:]), -1)

    output = functional.flash_attn_with_kvcache(
        query, keys, values, new, new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=5, causal=causal
    )
    torch.testing.assert_close(keys[0, 5:7], rotated(new[0], [5, 6]))
    turned = rotated(query[0], [5, 6] if causal else [5, 5])
    torch.testing.assert_close(output[0], by_sdpa(turned, keys[0], values[0], 7, causal=causal))


def test_a_number_or_nothing_stands_for_lengths() -> None:
    keys, values = (numbers(2, CAPACITY, HEADS_KV, HEAD_DIM, seed=seed) for seed in (1, 2))
    query = numbers(2, 1, HEADS_Q, HEAD_DIM)
    for given, length in ((7, 7), (None, CAPACITY)):
        output = functional.flash_attn_with_kvcache(query, keys, values, cache_seqlens=given)
        torch.testing.assert_close(output[1], by_sdpa(query[1], keys[1], values[1], length))


def test_torch_compile_calls_them_between_graphs() -> None:
    keys, values = (numbers(2, CAPACITY, HEADS_KV, HEAD_DIM, seed=seed) for seed in (1, 2))
    query, lengths = numbers(2, 1, HEADS_Q, HEAD_DIM), torch.tensor([3, 12], dtype=torch.int32)

    def twice(query: Tensor) -> Tensor:
        return 2.0 * autoattn.cached_attention(2.0 * query, keys, values, lengths)

    with torch.no_grad():
        compiled: Any = torch.compile(twice, backend="eager")
        torch.testing.assert_close(compiled(query), twice(query))


# --- mistakes ---------------------------------------------------------------------------------------------------------

LONG = torch.tensor([12, 0, 0], dtype=torch.int32)
EIGHT = torch.zeros(10, 4, 2, 16).to(FLOAT8)
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a table that is too short": ({"cache_seqlens": LONG + 1, "k": None, "v": None}, "at most the 12 keys"),
    "a cache that is too small": ({"cache_seqlens": LONG}, "room for the appended keys"),
    "more new keys than a cache holds": ({"k": numbers(3, 13, 2, 16), "v": numbers(3, 13, 2, 16)}, "room for"),
    "pages of mixed dtypes": ({"v_cache": torch.zeros(10, 4, 2, 16).half()}, "the query's dtype"),
    "float8 values beside keys of another dtype": (
        {"q": HALF_QUERY, "k_cache": torch.zeros(10, 4, 2, 16).half(), "v_cache": EIGHT},
        "the key_cache's dtype",
    ),
    "new keys of another dtype for a float8 cache": (
        {"q": HALF_QUERY, "k_cache": EIGHT, "v_cache": EIGHT},
        "k must have the query's dtype",
    ),
    "scales of other heads": (
        {"q": HALF_QUERY, "k_cache": EIGHT, "v_cache": EIGHT, "k_descale": torch.ones(3, 4)},
        "key_scale must be float32",
    ),
    "lengths of another dtype": ({"cache_seqlens": LENGTHS.long()}, "must be int32"),
    "lengths on another device": ({"cache_seqlens": LENGTHS.to("meta")}, "on the query's device"),
    "rotary tables that are too short": (
        {"rotary_cos": numbers(11, 4), "rotary_sin": numbers(11, 4)},
        "reach to the 12",
    ),
    "rotary tables that differ": ({"rotary_cos": numbers(12, 4), "rotary_sin": numbers(12, 3)}, "alike for"),
    "rotary tables without new keys": ({"k": None, "v": None, "rotary_cos": numbers(12, 4)}, "come with k and v"),
    "new keys without values": ({"v": None}, "v must be a torch.Tensor"),
    "new keys without lengths": ({"cache_seqlens": None}, "come with cache_seqlens"),
    "new keys of other heads": ({"k": numbers(3, 1, 4, 16)}, "batch, heads and head_dim"),
    "a table that is no matrix": ({"block_table": LENGTHS}, "block_table must be int32"),
    "rows with pages": ({"cache_batch_idx": LENGTHS}, "contiguous caches"),
    "a query that needs a gradient": ({"q": numbers(3, 1, 4, 16).requires_grad_()}, "gives no gradients"),
    "an argument that nobody has": ({"qv": numbers(3, 1, 4, 16)}, "qv must be left out"),
    "two tables": ({"page_table": LENGTHS}, "one argument"),
    "splits below 0": ({"num_splits": -1}, "splits must be"),
    "scales of a cache that has none": ({"k_descale": torch.ones(3, 2)}, "belongs to caches of float8"),
    "float8 under queries of 32 bits": ({"k_cache": torch.zeros(10, 4, 2, 16).to(torch.float8_e4m3fn)}, "float16 or"),
    "a causal mask at the top": ({"q": numbers(3, 2, 4, 16), "causal": "top-left"}, "top-left"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_and_writes_nothing(name: str) -> None:
    changes, words = MISTAKES[name]
    key, value, table = paged()
    new = numbers(BATCH, 1, HEADS_KV, HEAD_DIM, seed=3)
    query = numbers(BATCH, 1, HEADS_Q, HEAD_DIM)
    given: dict[str, Any] = {
        "q": query, "k_cache": key.clone(), "v_cache": value.clone(), "k": new, "v": new, "cache_seqlens": LENGTHS,
        "block_table": table,
    }  # fmt: skip
    given |= changes
    with pytest.raises((TensorError, ProblemError), match=words) as raised:
        functional.flash_attn_with_kvcache(**given)
    assert "\n" not in str(raised.value)
    assert "k_cache" in changes or torch.equal(given["k_cache"], key)
    assert "v_cache" in changes or torch.equal(given["v_cache"], value)
    assert "v_cache" not in changes or not given["v_cache"].float().any()


def test_rows_that_are_named_twice_are_refused_with_an_append() -> None:
    keys, new = torch.zeros(2, CAPACITY, HEADS_KV, HEAD_DIM), numbers(2, 1, HEADS_KV, HEAD_DIM)
    rows = torch.zeros(2, dtype=torch.int32)
    query = numbers(2, 1, HEADS_Q, HEAD_DIM)
    assert (
        functional.flash_attn_with_kvcache(query, keys, keys, cache_seqlens=3, cache_batch_idx=rows).shape
        == query.shape
    )
    with pytest.raises(TensorError, match="name a row once"):
        functional.flash_attn_with_kvcache(query, keys, keys, new, new, cache_seqlens=3, cache_batch_idx=rows)
    assert not keys.any()


# --- the page that describes them -------------------------------------------------------------------------------------


def test_the_examples_of_the_documentation_run() -> None:
    page = (CHECKOUT / "docs" / "kv-cache.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(examples) > 3
    exec("\n".join(examples), {})
