"""The functions of PyTorch and FlashAttention: their signatures, what they mean, and the pitfalls between them."""

from __future__ import annotations

import inspect
import math
from typing import Any

import formula
import pytest
import torch
from torch import Tensor

import autoattn
from autoattn import functional
from autoattn.errors import AutoattnError, TensorError

theirs = torch.nn.functional.scaled_dot_product_attention
BHSD = (1, 2)  # axes to swap between [batch, heads, seq, head_dim] and [batch, seq, heads, head_dim]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def three(
    seq_q: int, seq_kv: int, heads_q: int = 4, heads_kv: int = 2, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        noise(batch, heads_q, seq_q, 16, seed=1),
        noise(batch, heads_kv, seq_kv, 16, seed=2),
        noise(batch, heads_kv, seq_kv, 16, seed=3),
    )


def close(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=1e-5, atol=1e-5)


def names_of(function: Any) -> list[tuple[str, Any, bool]]:
    """(name, default, whether it is keyword-only) of each parameter."""
    kinds = inspect.signature(function).parameters.values()
    return [
        (parameter.name, parameter.default, parameter.kind is inspect.Parameter.KEYWORD_ONLY) for parameter in kinds
    ]


# --- signatures -------------------------------------------------------------------------------------------------------

NEEDED = inspect.Parameter.empty
FLASH = [
    ("dropout_p", 0.0, False), ("softmax_scale", None, False), ("causal", False, False),
    ("window_size", (-1, -1), False), ("softcap", 0.0, False), ("alibi_slopes", None, False),
    ("deterministic", False, False), ("return_attn_probs", False, False),
]  # fmt: skip


def test_signatures_are_those_of_pytorch_and_flashattention() -> None:
    """torch 2.13 and flash_attn 2.8; PyTorch's own is a builtin that hides its signature."""
    assert names_of(functional.scaled_dot_product_attention) == [
        ("query", NEEDED, False), ("key", NEEDED, False), ("value", NEEDED, False), ("attn_mask", None, False),
        ("dropout_p", 0.0, False), ("is_causal", False, False), ("scale", None, True), ("enable_gqa", False, True),
    ]  # fmt: skip
    tensors = [(name, NEEDED, False) for name in "qkv"]
    assert names_of(functional.flash_attn_func) == [*tensors, *FLASH, ("s_aux", None, True)]
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    assert names_of(functional.flash_attn_varlen_func) == [
        *tensors, *((name, NEEDED, False) for name in lengths), *FLASH, ("block_table", None, False),
        ("seqused_k", None, True), ("num_splits", 0, True),
        ("k_descale", None, True), ("v_descale", None, True),
        ("s_aux", None, True),
    ]  # fmt: skip


# --- F.scaled_dot_product_attention -----------------------------------------------------------------------------------

SAME = three(5, 7, 4, 4)


@pytest.mark.parametrize("given", [
    {"scale": 0.3}, {"attn_mask": noise(5, 7) > -0.5}, {"attn_mask": noise(5, 7)}, {"attn_mask": noise(4, 1, 7)},
    {"attn_mask": noise(2, 1, 5, 7) > -0.5}, {"attn_mask": noise(2, 1, 1, 7) > -0.5},
], ids=str)  # fmt: skip
def test_sdpa_agrees_with_pytorchs(given: dict[str, Any]) -> None:
    close(functional.scaled_dot_product_attention(*SAME, **given), theirs(*SAME, **given))


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 7), (7, 5), (6, 6), (1, 9), (9, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_agrees_with_pytorchs_whichever_side_is_longer(seq_q: int, seq_kv: int, is_causal: bool) -> None:
    tensors = three(seq_q, seq_kv, 4, 4)
    ours = functional.scaled_dot_product_attention(*tensors, None, 0.0, is_causal)
    close(ours, theirs(*tensors, None, 0.0, is_causal))


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(4, 2), (6, 1), (3, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_shares_key_heads_when_it_is_told_to(heads_q: int, heads_kv: int, is_causal: bool) -> None:
    tensors = three(5, 7, heads_q, heads_kv)
    given: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True}
    close(functional.scaled_dot_product_attention(*tensors, **given), theirs(*tensors, **given))


@pytest.mark.parametrize(
    ("query", "key", "mask", "gqa"),
    [
        ((5, 16), (7, 16), (5, 7), False),
        ((3, 5, 16), (3, 7, 16), (3, 5, 7), False),
        ((3, 5, 16), (1, 7, 16), (5, 7), False),
        ((3, 5, 16), (1, 7, 16), (3, 1, 7), True),
        ((2, 4, 5, 16), (1, 4, 7, 16), (2, 1, 1, 7), False),
        ((2, 4, 5, 16), (2, 1, 7, 16), (5, 7), False),
        ((4, 5, 16), (2, 4, 7, 16), (4, 5, 7), False),
        ((2, 3, 4, 5, 16), (2, 3, 4, 7, 16), (2, 1, 4, 5, 7), False),
        ((2, 3, 4, 5, 16), (2, 3, 2, 7, 16), (1, 7), True),
        ((2, 3, 4, 5, 16), (3, 4, 7, 16), (3, 1, 5, 7), False),
        ((2, 1, 3, 4, 5, 16), (2, 2, 3, 4, 7, 16), (3, 1, 1, 7), False),
    ],
)
def test_sdpa_takes_any_axes_in_front_that_broadcast(
    query: tuple[int, ...], key: tuple[int, ...], mask: tuple[int, ...], gqa: bool
) -> None:
    tensors = noise(*query), noise(*key, seed=1), noise(*key[:-1], 24, seed=2)
    for attn_mask in (None, noise(*mask), noise(*mask) > -1.0):
        output = functional.scaled_dot_product_attention(*tensors, attn_mask, enable_gqa=gqa)
        wanted = theirs(*tensors, attn_mask, enable_gqa=gqa)
        assert output.shape == wanted.shape
        close(output, wanted)


def test_sdpa_gives_gradients_as_pytorchs_does() -> None:
    ours, other = ([tensor.clone().requires_grad_() for tensor in SAME] for _ in range(2))
    functional.scaled_dot_product_attention(*ours, is_causal=True).square().sum().backward()
    theirs(*other, is_causal=True).square().sum().backward()
    for leaf, other_leaf in zip(ours, other, strict=True):
        close(leaf.grad, other_leaf.grad)


SDPA_MISTAKES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "heads": (three(5, 7), {}, "set enable_gqa if key heads are fewer"),
    "heads that do not divide": (
        three(5, 7, 4, 3),
        {"enable_gqa": True},
        "query heads must be a multiple of key heads",
    ),
    "mask shape": (SAME, {"attn_mask": torch.ones(7, 5)}, "mask must be broadcastable to"),
    "five axes of a mask": (SAME, {"attn_mask": torch.ones(3, 1, 1, 5, 7)}, "the axes in front of the last two must"),
    "integers": (SAME, {"attn_mask": torch.ones(5, 7).int()}, "mask must be bool (True attends), float32"),
    "one axis": ((noise(16), noise(7, 16), noise(7, 16)), {}, "query must be [..., seq, head_dim], got shape (16,)"),
    "list": ((SAME[0], [1.0], SAME[2]), {}, "key must be a torch.Tensor, got list; convert it first"),
    "mask list": (SAME, {"attn_mask": [[True]]}, "attn_mask must be a torch.Tensor, got list; convert it first"),
    "dropout": (SAME, {"dropout_p": 1.5}, "dropout must be a finite number from 0 and below 1, got 1.5"),
    "lengths": (
        (SAME[0], SAME[1], SAME[2][:, :, :3]),
        {},
        "value must have the key's 7 tokens, got 3 in shape (2, 4, 3, 16)",
    ),
}


@pytest.mark.parametrize("name", SDPA_MISTAKES)
def test_a_mistake_at_pytorchs_door_is_one_sentence(name: str) -> None:
    tensors, given, words = SDPA_MISTAKES[name]
    with pytest.raises(AutoattnError) as caught:
        functional.scaled_dot_product_attention(*tensors, **given)
    assert words in str(caught.value)


# --- flash_attn_func --------------------------------------------------------------------------------------------------


def flash(tensors: tuple[Tensor, ...], **given: Any) -> Any:
    return functional.flash_attn_func(*(tensor.transpose(*BHSD) for tensor in tensors), **given)


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 7), (7, 5), (6, 6), (1, 4)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (0, 2), (2, -1), (-1, 2), (1, 1), (0, 0), (9, 9)])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_windows_stand_bottom_right(seq_q: int, seq_kv: int, window: tuple[int, int], causal: bool) -> None:
    tensors = three(seq_q, seq_kv)
    left, right = window
    keep = formula.band(seq_q, seq_kv, left, 0 if causal else right)
    wanted, sums = formula.attention(*tensors, keep=keep)
    output, lse, nothing = flash(tensors, window_size=window, causal=causal, return_attn_probs=True)
    assert nothing is None
    close(output.transpose(*BHSD), wanted)
    close(lse, sums)
    close(flash(tensors, window_size=window, causal=causal), output)


def test_flash_scales_caps_and_slopes_as_flashattention() -> None:
    tensors, slopes = three(5, 7), torch.tensor([0.5, 0.25, 0.125, 0.0625])
    wanted, _ = formula.attention(
        *tensors,
        scale=0.7,
        change=lambda scores: 3.0 * torch.tanh(scores / 3.0),
        add=-slopes[:, None, None] * formula.distance(5, 7),
        keep=formula.band(5, 7, -1, 0),
    )
    output = flash(tensors, softmax_scale=0.7, softcap=3.0, alibi_slopes=slopes, causal=True, deterministic=True)
    close(output.transpose(*BHSD), wanted)


def test_s_aux_is_the_sink_of_each_flash_function() -> None:
    query, key, value = (tensor.transpose(*BHSD).contiguous() for tensor in three(5, 7))
    sinks = noise(4, seed=4)
    wanted = autoattn.attention(query, key, value, causal=True, sinks=sinks, layout="bshd")
    close(functional.flash_attn_func(query, key, value, causal=True, s_aux=sinks), wanted)
    offsets = torch.tensor([0, 5, 10]).int(), torch.tensor([0, 7, 14]).int()
    rows = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    packed = functional.flash_attn_varlen_func(*rows, *offsets, 5, 7, causal=True, s_aux=sinks)
    close(packed, wanted.flatten(0, 1))  # type: ignore[arg-type]
    cache = [torch.cat((tensor[:, :6], torch.zeros(2, 4, 2, 16)), 1) for tensor in (key, value)]
    last = query[:, -1:], *cache, key[:, 6:], value[:, 6:]
    close(functional.flash_attn_with_kvcache(*last, cache_seqlens=6, s_aux=sinks), wanted[:, -1:])  # type: ignore[arg-type]


def test_flash_dropout_follows_pytorchs_seed() -> None:
    tensors = three(5, 7)
    torch.manual_seed(1)
    first = flash(tensors, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(flash(tensors, dropout_p=0.5), first)
    assert not torch.equal(flash(tensors, dropout_p=0.5), first)


# --- flash_attn_varlen_func -------------------------------------------------------------------------------------------

QUERIES, KEYS = (3, 0, 5, 1), (4, 6, 2, 0)


@pytest.mark.parametrize("given", [
    {}, {"causal": True}, {"window_size": (2, 1)}, {"window_size": (1, -1), "causal": True}, {"softcap": 2.0},
    {"softmax_scale": 0.3},
], ids=str)  # fmt: skip
def test_varlen_sequences_are_as_many_flash_calls(given: dict[str, Any]) -> None:
    query, key, value = noise(9, 4, 16, seed=1), noise(12, 2, 16, seed=2), noise(12, 2, 16, seed=3)
    offsets = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (QUERIES, KEYS)]
    call = (query, key, value, *offsets, max(QUERIES), max(KEYS))
    output, lse, nothing = functional.flash_attn_varlen_func(*call, return_attn_probs=True, **given)
    assert (output.shape, lse.shape, nothing) == ((9, 4, 16), (4, 9), None)
    assert torch.equal(functional.flash_attn_varlen_func(*call, **given), output)
    for place, (queries, keys) in enumerate(zip(QUERIES, KEYS, strict=True)):
        rows = slice(int(offsets[0][place]), int(offsets[0][place]) + queries)
        columns = slice(int(offsets[1][place]), int(offsets[1][place]) + keys)
        alone = functional.flash_attn_func(
            query[None, rows], key[None, columns], value[None, columns], return_attn_probs=True, **given
        )
        close(output[rows], alone[0][0])
        close(lse[:, rows], alone[1][0])


def test_varlen_takes_what_belongs_to_pages_with_pages_alone() -> None:
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    tokens = noise(4, 2, 16)
    cases: tuple[dict[str, Any], ...] = ({"seqused_k": offsets[1:]}, {"num_splits": 2})
    for given in cases:
        with pytest.raises(TensorError, match=f"{next(iter(given))} belongs to paged keys"):
            functional.flash_attn_varlen_func(tokens, tokens, tokens, offsets, offsets, 4, 4, **given)


# --- pitfalls: where the systems differ, and which side each door is on -----------------------------------------------


def means(output: Tensor) -> list[float]:
    return [round(float(row), 4) for row in output[0, 0, :, 0]]


COUNTING = (
    torch.zeros(1, 1, 2, 16),
    torch.zeros(1, 1, 5, 16),
    torch.arange(5.0)[None, None, :, None].repeat(1, 1, 1, 16),
)


def test_pitfall_1_causal_is_top_left_for_pytorch_and_bottom_right_for_flashattention() -> None:
    assert means(functional.scaled_dot_product_attention(*COUNTING, is_causal=True)) == [0.0, 0.5]
    assert means(flash(COUNTING, causal=True).transpose(*BHSD)) == [1.5, 2.0]
    assert means(autoattn.attention(*COUNTING, causal=True)) == [1.5, 2.0]
    assert means(autoattn.attention(*COUNTING, causal="top-left")) == [0.0, 0.5]


def test_pitfall_2_causal_makes_the_right_side_of_any_window_zero() -> None:
    for window in ((1, 3), (1, -1), (1, 0)):
        assert means(flash(COUNTING, causal=True, window_size=window).transpose(*BHSD)) == [2.5, 3.5]


def test_pitfall_3_minus_one_is_no_bound_on_one_side_alone() -> None:
    tensors = three(6, 6)
    assert torch.equal(flash(tensors, window_size=(-1, 0)), flash(tensors, causal=True))
    far_left = flash(tensors, window_size=(2, -1))
    close(far_left.transpose(*BHSD), formula.attention(*tensors, keep=formula.band(6, 6, 2, -1))[0])
    assert not torch.allclose(far_left, flash(tensors, window_size=(2, 0))), "(2, -1) is not causal"


def test_pitfall_4_a_window_counts_the_keys_before_ones_own() -> None:
    assert means(flash(COUNTING, window_size=(1, 0)).transpose(*BHSD)) == [2.5, 3.5], (
        "two keys: one before, and one's own"
    )
    assert means(flash(COUNTING, window_size=(0, 0)).transpose(*BHSD)) == [3.0, 4.0]


@pytest.mark.parametrize("right", [2, 3, 4, 5, 6])
def test_pitfall_5_a_right_side_beyond_the_keys_still_binds_early_queries(right: int) -> None:
    """Dao-AILab/flash-attention issue 895: with seq_q > seq_kv, `right` counts against the queries."""
    tensors = three(8, 3)
    keep = formula.band(8, 3, -1, right)
    assert bool(keep.all()) is (right >= 7)
    output = flash(tensors, window_size=(-1, right)).transpose(*BHSD)
    close(output, formula.attention(*tensors, keep=keep)[0])


def test_pitfall_6_one_causal_query_sees_all_keys_bottom_right_and_one_top_left() -> None:
    tensors = three(1, 7)
    assert torch.allclose(flash(tensors, causal=True), flash(tensors))
    close(autoattn.attention(*tensors, causal="top-left"), tensors[2][:, :, :1].repeat_interleave(2, 1))


def test_pitfall_7_a_query_that_sees_no_key_gives_zero_and_an_lse_of_minus_infinity() -> None:
    output, lse, _ = flash(three(7, 3), causal=True, return_attn_probs=True)
    assert (output[:, :4] == 0.0).all()
    assert (lse[:, :, :4] == -math.inf).all()
    assert lse[:, :, 4:].isfinite().all()
    hidden = functional.scaled_dot_product_attention(*SAME, attn_mask=torch.zeros(5, 7, dtype=torch.bool))
    assert (hidden == 0.0).all()
    assert (functional.scaled_dot_product_attention(*SAME, attn_mask=torch.full((5, 7), -math.inf)) == 0.0).all()


def test_pitfall_7_two_parts_merge_by_their_lse_even_where_a_query_sees_neither() -> None:
    query, key, value = three(7, 6)
    keep = formula.band(7, 6, 1, 0)
    parts = [
        autoattn.attention(query, key[:, :, part], value[:, :, part], mask=keep[:, part], return_lse=True)
        for part in (slice(0, 3), slice(3, 6))
    ]
    merged = torch.logaddexp(parts[0][1], parts[1][1])
    shares = [torch.where(merged > -math.inf, torch.exp(lse - merged), 0.0)[..., None] for _, lse in parts]
    wanted, sums = formula.attention(query, key, value, keep=keep)
    close(sum(share * output for share, (output, _) in zip(shares, parts, strict=True)), wanted)  # type: ignore[arg-type]
    close(merged, sums)


def test_pitfall_9_true_attends() -> None:
    last = torch.tensor([False] * 4 + [True])
    assert means(functional.scaled_dot_product_attention(*COUNTING, attn_mask=last.expand(2, 5))) == [4.0, 4.0]
    assert means(autoattn.attention(*COUNTING, mask=last)) == [4.0, 4.0]


def test_pitfall_10_a_nan_in_a_hidden_value_does_not_reach_who_does_not_see_it() -> None:
    """PyTorch's own attention, which answers plain calls on the CPU, lets it through; the formula does not."""
    query, key, value = three(5, 7)
    value[:, :, 6] = math.nan
    output, _ = autoattn.attention(query, key, value, causal=True, return_lse=True)
    assert output[:, :, :4].isfinite().all()
    assert output[:, :, 4].isnan().all()


@pytest.mark.parametrize("head_dim", [56, 80, 111])
def test_pitfall_11_the_default_scale_is_that_of_the_head_dim_before_any_padding(head_dim: int) -> None:
    tensors = noise(1, 2, 5, head_dim), noise(1, 2, 7, head_dim, seed=1), noise(1, 2, 7, 24, seed=2)
    scale = 1.0 / math.sqrt(head_dim)
    close(autoattn.attention(*tensors, softcap=5.0), autoattn.attention(*tensors, softcap=5.0, scale=scale))
    close(flash(tensors), flash(tensors, softmax_scale=scale))


def test_pitfall_12_tokens_behind_the_last_sequence_give_zero_and_gradients_of_zero() -> None:
    tokens = [noise(9, 2, 16, seed=seed) for seed in range(3)]
    for tensor in tokens:
        tensor[6:] = math.nan  # what a padded buffer may hold
        tensor.requires_grad_()
    offsets = torch.tensor([0, 4, 6], dtype=torch.int32)
    output = functional.flash_attn_varlen_func(*tokens, offsets, offsets, 4, 4, causal=True)  # type: ignore[call-arg]
    assert output[:6].isfinite().all()
    assert (output[6:] == 0.0).all()
    output.sum().backward()
    for tensor in tokens:
        assert tensor.grad is not None
        assert tensor.grad[:6].isfinite().all()
        assert (tensor.grad[6:] == 0.0).all()


def test_pitfall_13_the_packed_lse_has_heads_first() -> None:
    tokens, offsets = noise(9, 2, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
    _, lse = autoattn.packed_attention(tokens, tokens, tokens, offsets, offsets, 5, 5, return_lse=True)
    assert lse.shape == (2, 9)


def test_pitfall_15_pytorchs_dropout_acts_whenever_it_is_asked_for_and_a_modules_only_in_training() -> None:
    assert not torch.equal(functional.scaled_dot_product_attention(*SAME, dropout_p=0.5), theirs(*SAME))
    module = autoattn.Attention(dropout=0.5).eval()
    assert torch.equal(module(*SAME), autoattn.attention(*SAME))


def test_pitfall_16_the_cap_comes_before_the_mask_and_slopes_count_from_the_bottom_right() -> None:
    tensors = three(5, 7)
    capped, _ = autoattn.attention(*tensors, softcap=0.5, causal=True, return_lse=True)
    keep = formula.band(5, 7, -1, 0)
    close(capped, formula.attention(*tensors, keep=keep, change=lambda scores: 0.5 * torch.tanh(scores / 0.5))[0])
    slopes = torch.full((4,), 1e4)
    nearest = flash(tensors, alibi_slopes=slopes).transpose(*BHSD)
    close(nearest, tensors[2][:, :, 2:].repeat_interleave(2, 1))


def test_pitfall_17_a_sequence_gives_the_same_bits_whatever_stands_beside_it() -> None:
    query, key, value = three(5, 7)
    alone = autoattn.attention(query[:1], key[:1], value[:1], softcap=3.0)
    assert torch.equal(autoattn.attention(query, key, value, softcap=3.0)[:1], alone)
