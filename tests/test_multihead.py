"""The multi-head module against torch.nn.MultiheadAttention with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoattn import MultiheadAttention
from autoattn.errors import ProblemError, TensorError

TORCH = torch.nn.MultiheadAttention


def pair(embed_dim: int, heads: int, **facts: Any) -> tuple[torch.nn.MultiheadAttention, MultiheadAttention]:
    torch.manual_seed(0)
    theirs = TORCH(embed_dim, heads, batch_first=True, **facts)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    return theirs, MultiheadAttention.from_torch(theirs)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def inputs(embed_dim: int, seq: int = 9, features: int | None = None) -> Tensor:
    return torch.randn(2, seq, features or embed_dim, generator=torch.Generator().manual_seed(seq))


@pytest.mark.parametrize("heads", [1, 8, 16, 25])
@pytest.mark.parametrize("bias", [True, False])
def test_it_equals_pytorchs_with_the_same_weights(heads: int, bias: bool) -> None:
    theirs, ours = pair(4 * heads, heads, bias=bias)
    tokens = inputs(4 * heads)
    close(ours(tokens), theirs(tokens, tokens, tokens, need_weights=False)[0])


def test_keys_and_values_may_have_features_and_a_length_of_their_own() -> None:
    theirs, ours = pair(12, 3, kdim=5, vdim=7)
    query, key, value = inputs(12), inputs(12, 11, 5), inputs(12, 11, 7)
    close(ours(query, key, value), theirs(query, key, value, need_weights=False)[0])


PAIRS = torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) < 0.4
PAIRS.fill_diagonal_(False)
EACH = torch.rand(6, 9, 9, generator=torch.Generator().manual_seed(2)) < 0.3
EACH[:, :, 0] = False
PADDING = torch.arange(9)[None] >= torch.tensor([[9], [6]])


@pytest.mark.parametrize(
    "masks",
    [
        {"key_padding_mask": PADDING},
        {"attn_mask": PAIRS},
        {"attn_mask": EACH},
        {"attn_mask": EACH, "key_padding_mask": PADDING},
        {"attn_mask": PAIRS.float() * -2.5},
        {"attn_mask": PAIRS.float() * -2.5, "key_padding_mask": PADDING.float() * -3.0},
    ],
)
def test_masks_mean_what_they_mean_to_pytorch_where_true_hides(masks: dict[str, Tensor]) -> None:
    theirs, ours = pair(12, 3)
    tokens = inputs(12)
    close(ours(tokens, **masks), theirs(tokens, tokens, tokens, need_weights=False, **masks)[0])


def test_a_boolean_and_a_floating_mask_act_together() -> None:
    theirs, ours = pair(12, 3)
    tokens = inputs(12)
    shift = PAIRS.float() * -2.5
    hidden = torch.zeros(2, 9).masked_fill(PADDING, -torch.inf)
    expected = theirs(tokens, tokens, tokens, need_weights=False, attn_mask=shift, key_padding_mask=hidden)[0]
    close(ours(tokens, attn_mask=shift, key_padding_mask=PADDING), expected)


def test_is_causal_and_a_causal_module_hide_later_keys() -> None:
    theirs, ours = pair(12, 3)
    tokens = inputs(12)
    later = torch.ones(9, 9, dtype=torch.bool).triu(1)
    expected = theirs(tokens, tokens, tokens, need_weights=False, attn_mask=later)[0]
    close(ours(tokens, is_causal=True), expected)
    ours.causal = True
    close(ours(tokens), expected)


def test_grouped_queries_equal_a_module_with_repeated_key_heads() -> None:
    torch.manual_seed(0)
    grouped = MultiheadAttention(24, 6, num_kv_heads=2, head_dim=8)
    repeated = MultiheadAttention(24, 6, head_dim=8)
    with torch.no_grad():
        for name in ("q_proj", "out_proj"):
            getattr(repeated, name).load_state_dict(getattr(grouped, name).state_dict())
        for name in ("k_proj", "v_proj"):
            few, many = getattr(grouped, name), getattr(repeated, name)
            many.weight.copy_(few.weight.unflatten(0, (2, 8)).repeat_interleave(3, 0).flatten(0, 1))
            many.bias.copy_(few.bias.unflatten(0, (2, 8)).repeat_interleave(3, 0).flatten(0, 1))
    tokens = inputs(24)
    close(grouped(tokens), repeated(tokens))


def test_a_query_that_sees_no_key_gives_the_bias_of_the_last_projection() -> None:
    _, ours = pair(12, 3)
    hidden = torch.ones(2, 9, dtype=torch.bool)
    close(ours(inputs(12), key_padding_mask=hidden), ours.out_proj.bias.expand(2, 9, 12))


def test_gradients_reach_all_weights() -> None:
    theirs, ours = pair(12, 3)
    tokens = inputs(12)
    ours(tokens).square().sum().backward()
    theirs(tokens, tokens, tokens, need_weights=False)[0].square().sum().backward()
    assert theirs.in_proj_weight.grad is not None
    expected = theirs.in_proj_weight.grad.chunk(3)
    for projection, gradient in zip((ours.q_proj, ours.k_proj, ours.v_proj), expected, strict=True):
        torch.testing.assert_close(projection.weight.grad, gradient, rtol=1e-4, atol=1e-4)


def test_dropout_is_for_training_alone() -> None:
    _, ours = pair(12, 3)
    ours.dropout = 0.5
    tokens = inputs(12)
    assert torch.equal(ours.eval()(tokens), ours(tokens))
    assert not torch.equal(ours.train()(tokens), ours.eval()(tokens))


def test_what_cannot_be_is_refused_in_words() -> None:
    ours = MultiheadAttention(12, 3, causal=True)
    tokens = inputs(12)
    refused = [
        (lambda: ours(tokens, need_weights=True), TensorError, "need_weights"),
        (lambda: ours(tokens, is_causal=True), TensorError, "is_causal"),
        (lambda: ours(tokens[0]), TensorError, "batch"),
        (lambda: ours(tokens, attn_mask=PAIRS[:4]), TensorError, "attn_mask"),
        (lambda: ours(tokens, key_padding_mask=PADDING[:1]), TensorError, "key_padding_mask"),
        (lambda: ours(tokens, attn_mask=PAIRS.int()), TensorError, "bool"),
        (lambda: MultiheadAttention(10, 3), ProblemError, "divide"),
        (lambda: MultiheadAttention(12, 3, num_kv_heads=2), ProblemError, "num_kv_heads"),
        (lambda: MultiheadAttention(12, 0), ProblemError, "num_heads"),
        (lambda: MultiheadAttention.from_torch(TORCH(12, 3, add_bias_kv=True)), ProblemError, "add_bias_kv"),
    ]
    for call, error, word in refused:
        with pytest.raises(error, match=word):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 25])
def test_on_a_gpu_it_runs_a_kernel_and_equals_pytorchs(heads: int) -> None:
    from autoattn import explain

    theirs, ours = pair(64 * heads, heads)
    theirs, ours = theirs.cuda().half().eval(), ours.cuda().half().eval()
    tokens = inputs(64 * heads, 300).cuda().half() * 0.1
    with torch.no_grad():
        actual = ours(tokens)
        expected = theirs.float()(*[tokens.float()] * 3, need_weights=False)[0]
        query = ours.q_proj(tokens).unflatten(2, (heads, 64))
        assert explain(query, query, query, layout="bshd").variant is not None
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
