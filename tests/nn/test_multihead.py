"""The multi-head module against torch.nn.MultiheadAttention with the same weights."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autoattn import MultiheadAttention, functional
from autoattn.errors import ProblemError, SdpaError, TensorError

TORCH = torch.nn.MultiheadAttention


def pair(embed_dim: int, heads: int, **facts: Any) -> tuple[torch.nn.MultiheadAttention, MultiheadAttention]:
    torch.manual_seed(0)
    theirs = TORCH(embed_dim, heads, **{"batch_first": True, **facts})
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    return theirs, MultiheadAttention.from_torch(theirs)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def inputs(embed_dim: int, seq: int = 9, features: int | None = None) -> Tensor:
    return torch.randn(2, seq, features or embed_dim, generator=torch.Generator().manual_seed(seq))


@pytest.fixture
def attention_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of each call of autoattn.attention."""
    calls: list[dict[str, Any]] = []
    attention = functional.attention

    def noted(*tensors: Tensor, **given: Any) -> Any:
        calls.append(given)
        return attention(*tensors, **given)

    monkeypatch.setattr(functional, "attention", noted)
    return calls


# --- The module alone -------------------------------------------------------------------------------------------------

PAIRS = torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) < 0.4
PAIRS.fill_diagonal_(False)
EACH = torch.rand(6, 9, 9, generator=torch.Generator().manual_seed(2)) < 0.3
EACH[:, :, 0] = False
PADDING = torch.arange(9)[None] >= torch.tensor([[9], [6]])
LATER = torch.ones(9, 9, dtype=torch.bool).triu(1)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "pairs": {"attn_mask": PAIRS},
    "each head": {"attn_mask": EACH},
    "each head and padding": {"attn_mask": EACH, "key_padding_mask": PADDING},
    "floating": {"attn_mask": PAIRS.float() * -2.5},
    "floating and padding": {"attn_mask": PAIRS.float() * -2.5, "key_padding_mask": PADDING.float() * -3.0},
    "causal": {"attn_mask": LATER, "is_causal": True},
    "causal and padding": {"attn_mask": LATER, "is_causal": True, "key_padding_mask": PADDING},
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without biases": {"bias": False},
    "own features": {"kdim": 5, "vdim": 7},
    "bias_k and a zero key": {"add_bias_kv": True, "add_zero_attn": True},
}


def without_batch(masks: dict[str, Any]) -> dict[str, Any]:
    """The masks of the second sequence."""
    own: dict[str, Any] = dict(masks)
    if "key_padding_mask" in own:
        own["key_padding_mask"] = own["key_padding_mask"][1]
    if "attn_mask" in own and own["attn_mask"].dim() == 3:
        own["attn_mask"] = own["attn_mask"][3:]
    return own


def result(
    module: torch.nn.MultiheadAttention, tokens: tuple[Tensor, ...], **given: Any
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Output, weights, and the gradients of the tokens and the parameters."""
    three = [tensor.clone().requires_grad_() for tensor in tokens]
    output, weights = module(*three, **given)
    loss = output.sin().sum() if weights is None else output.sin().sum() + weights.square().sum()
    _, parameters = zip(*sorted(module.named_parameters()), strict=True)
    return output, weights, list(torch.autograd.grad(loss, [*three, *parameters], allow_unused=True))


@pytest.mark.parametrize("axes", ["batch first", "batch second", "no batch"])
@pytest.mark.parametrize("weights", ["none", "mean", "each"])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_output_weights_and_gradients_are_pytorchs(kind: str, masks: str, weights: str, axes: str) -> None:
    theirs, ours = pair(12, 3, batch_first=axes == "batch first", **KINDS[kind])
    tokens = (inputs(12), inputs(12, 9, KINDS[kind].get("kdim")), inputs(12, 9, KINDS[kind].get("vdim")))
    given = {**MASKS[masks], "need_weights": weights != "none", "average_attn_weights": weights == "mean"}
    if axes == "no batch":
        tokens, given = (tokens[0][1], tokens[1][1], tokens[2][1]), without_batch(given)
    elif axes == "batch second":
        tokens = (tokens[0].transpose(0, 1), tokens[1].transpose(0, 1), tokens[2].transpose(0, 1))
    actual, expected = result(ours, tokens, **given), result(theirs, tokens, **given)
    assert (actual[1] is None) == (expected[1] is None) == (weights == "none")
    assert actual[0].shape == expected[0].shape
    for mine, other in zip((*actual[:2], *actual[2]), (*expected[:2], *expected[2]), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [1, 8, 16, 25])
def test_self_attention_with_any_number_of_heads_equals_pytorchs(heads: int) -> None:
    theirs, ours = pair(4 * heads, heads)
    tokens = inputs(4 * heads)
    close(ours(tokens, tokens, tokens, need_weights=False)[0], theirs(tokens, tokens, tokens, need_weights=False)[0])
    close(ours(tokens)[0], theirs(tokens, tokens, tokens)[0])


@pytest.mark.parametrize("evaluates", [False, True])
def test_calls_without_weights_run_autoattn_and_those_with_weights_do_not(
    evaluates: bool, attention_calls: list[dict[str, Any]]
) -> None:
    _, ours = pair(12, 2)
    tokens = inputs(12)
    with torch.inference_mode(evaluates):
        ours.train(not evaluates)(tokens, tokens, tokens)
        assert not attention_calls
        ours(tokens, tokens, tokens, need_weights=False)
        assert len(attention_calls) == 1
        ours(tokens, tokens, tokens, None, False, LATER, True, True)
    assert [call["causal"] for call in attention_calls] == [False, "top-left"]
    assert attention_calls[1]["bias"] is None


def test_a_boolean_and_a_floating_mask_act_together() -> None:
    theirs, ours = pair(12, 3)
    tokens = inputs(12)
    shift = PAIRS.float() * -2.5
    hidden = torch.zeros(2, 9).masked_fill(PADDING, -torch.inf)
    expected = theirs(tokens, tokens, tokens, need_weights=False, attn_mask=shift, key_padding_mask=hidden)[0]
    close(ours(tokens, attn_mask=shift, key_padding_mask=PADDING, need_weights=False)[0], expected)


@pytest.mark.parametrize("axes", ["batch first", "no batch"])
def test_a_mask_of_the_module_acts_with_and_without_weights(axes: str) -> None:
    theirs, ours = pair(12, 3)
    tokens = inputs(12) if axes == "batch first" else inputs(12)[0]
    ours.causal = True
    expected, weights = theirs(tokens, tokens, tokens, attn_mask=LATER)
    for need_weights in (False, True):
        close(ours(tokens, need_weights=need_weights)[0], expected)
    close(ours(tokens)[1], weights)
    every = theirs(tokens, tokens, tokens, attn_mask=LATER | PAIRS, average_attn_weights=False)
    for mine, other in zip(ours(tokens, attn_mask=PAIRS, average_attn_weights=False), every, strict=True):
        close(mine, other)


def grouped_and_repeated() -> tuple[MultiheadAttention, MultiheadAttention]:
    torch.manual_seed(0)
    grouped = MultiheadAttention(24, 6, batch_first=True, num_kv_heads=2, head_dim=8)
    repeated = MultiheadAttention(24, 6, batch_first=True, head_dim=8)
    torch.nn.init.normal_(grouped.in_proj_bias)
    query, *few = grouped.in_proj_bias.split([48, 16, 16])
    with torch.no_grad():
        repeated.q_proj_weight.copy_(grouped.q_proj_weight)
        for name in ("k_proj_weight", "v_proj_weight"):
            weight = getattr(grouped, name).unflatten(0, (2, 8))
            getattr(repeated, name).copy_(weight.repeat_interleave(3, 0).flatten(0, 1))
        many = [bias.unflatten(0, (2, 8)).repeat_interleave(3, 0).flatten() for bias in few]
        repeated.in_proj_bias.copy_(torch.cat([query, *many]))
    repeated.out_proj.load_state_dict(grouped.out_proj.state_dict())
    return grouped, repeated


def test_grouped_queries_equal_a_module_with_repeated_key_heads() -> None:
    grouped, repeated = grouped_and_repeated()
    tokens = inputs(24)
    output, weights = grouped(tokens, average_attn_weights=False)
    close(grouped(tokens, need_weights=False)[0], repeated(tokens, need_weights=False)[0])
    close(output, grouped(tokens, need_weights=False)[0])
    close(weights, repeated(tokens, average_attn_weights=False)[1])
    assert weights.shape == (2, 6, 9, 9)
    for need_weights in (False, True):
        hinted = grouped(tokens, attn_mask=LATER, is_causal=True, need_weights=need_weights)[0]
        close(hinted, repeated(tokens, attn_mask=LATER, need_weights=False)[0])


def test_a_query_that_sees_no_key_gives_the_bias_of_the_last_projection() -> None:
    _, ours = pair(12, 3)
    hidden = torch.ones(2, 9, dtype=torch.bool)
    output, _ = ours(inputs(12), key_padding_mask=hidden, need_weights=False)
    close(output, ours.out_proj.bias.expand(2, 9, 12))


@pytest.mark.parametrize("own", [{}, {"causal": True}])
def test_dropout_is_for_training_alone(own: dict[str, Any]) -> None:
    ours = MultiheadAttention(12, 3, 0.5, batch_first=True, **own)
    tokens = inputs(12)
    for need_weights in (False, True):
        still = ours.eval()(tokens, need_weights=need_weights)[0]
        assert torch.equal(ours(tokens, need_weights=need_weights)[0], still)
        assert not torch.equal(ours.train()(tokens, need_weights=need_weights)[0], still)


def test_dropout_of_everything_and_axes_without_elements_are_pytorchs() -> None:
    theirs, ours = pair(12, 3, dropout=1.0)
    tokens = inputs(12)
    close(ours(tokens, need_weights=False)[0], theirs(tokens, tokens, tokens, need_weights=False)[0])
    for query, key in ((tokens[:0], tokens[:0]), (tokens[:, :0], tokens), (tokens, tokens[:, :0])):
        close(ours(query, key, key, need_weights=False)[0], theirs(query, key, key, need_weights=False)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_autocast_equal_pytorchs(dtype: torch.dtype) -> None:
    theirs, ours = pair(12, 3)
    tokens = inputs(12)
    if dtype is torch.float64:
        theirs, ours, tokens = theirs.double(), ours.double(), tokens.double()
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        for masks in ({}, {"key_padding_mask": PADDING}, {"attn_mask": PAIRS.to(tokens.dtype)}):
            actual = ours(tokens, need_weights=False, **masks)[0]
            expected = theirs(tokens, tokens, tokens, need_weights=False, **masks)[0]
            assert actual.dtype is expected.dtype
            torch.testing.assert_close(actual.double(), expected.double(), rtol=3e-2, atol=3e-2)


# --- The module as PyTorch's ------------------------------------------------------------------------------------------


def test_the_arguments_begin_with_pytorchs_in_their_order() -> None:
    for method in ("__init__", "forward"):
        expected = [*inspect.signature(getattr(TORCH, method)).parameters]
        actual = inspect.signature(getattr(MultiheadAttention, method)).parameters
        assert [*actual][: len(expected)] == expected
        assert all(actual[name].kind is inspect.Parameter.KEYWORD_ONLY for name in [*actual][len(expected) :])
    assert isinstance(MultiheadAttention(12, 3), TORCH)
    assert not MultiheadAttention(12, 3).batch_first
    assert inspect.signature(MultiheadAttention.forward).parameters["need_weights"].default is True


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_are_pytorchs_both_ways(kind: str) -> None:
    theirs, ours = pair(12, 3, **KINDS[kind])
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    names = {"embed_dim", "kdim", "vdim", "num_heads", "head_dim", "dropout", "batch_first", "add_zero_attn"}
    for name in names | {"_qkv_same_embed_dim", "training"}:
        assert getattr(ours, name) == getattr(theirs, name)


def test_from_torch_copies_weights_and_keeps_what_was_frozen_or_evaluating() -> None:
    theirs, _ = pair(12, 3, batch_first=False, dropout=0.25)
    theirs.out_proj.weight.requires_grad_(False)
    ours = MultiheadAttention.from_torch(theirs.double().eval())
    assert (ours.batch_first, ours.dropout, ours.training) == (False, 0.25, False)
    for (name, mine), (other_name, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(mine, other)
        assert mine.data_ptr() != other.data_ptr()
        assert mine.requires_grad == other.requires_grad
    assert MultiheadAttention.from_torch(MultiheadAttention(12, 3, num_kv_heads=1)).num_kv_heads == 1


@pytest.mark.parametrize("own", [{}, {"causal": True, "window": (3, 0)}, {"num_kv_heads": 1, "head_dim": 8}])
def test_copies_and_pickles_give_the_same(own: dict[str, Any]) -> None:
    ours = MultiheadAttention(12, 3, batch_first=True, **own)
    tokens = inputs(12)
    expected = ours(tokens, need_weights=False)[0]
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(tokens, need_weights=False)[0], expected)
        assert other._qkv_same_embed_dim == (not own)


@pytest.mark.parametrize("own", [{"num_kv_heads": 1}, {"head_dim": 8}, {"causal": True}, {"window": (3, 0)}])
def test_own_masks_and_heads_keep_pytorchs_fast_path_away(own: dict[str, Any]) -> None:
    assert MultiheadAttention(12, 2)._qkv_same_embed_dim
    assert not MultiheadAttention(12, 2, **own)._qkv_same_embed_dim
    layer = torch.nn.TransformerEncoderLayer(12, 2, 16, batch_first=True).eval()
    layer.self_attn = MultiheadAttention(12, 2, batch_first=True, **own).eval()
    tokens = inputs(12)
    with torch.no_grad():
        after = layer.norm1(tokens + layer.self_attn(tokens, need_weights=False)[0])
        feed = layer.linear2(torch.relu(layer.linear1(after)))
        close(layer(tokens), layer.norm2(after + feed))


# --- Inside PyTorch's layers ------------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["fast path", "no fast path"])
def fast_path(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(request.param)
    yield request.param
    torch.backends.mha.set_fastpath_enabled(before)


def converted(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model with our modules."""
    ours = copy.deepcopy(model)
    for module in [*ours.modules()]:
        for name, child in module.named_children():
            if type(child) is TORCH:
                setattr(module, name, MultiheadAttention.from_torch(child))
    assert not any(type(module) is TORCH for module in ours.modules())
    return ours


def model(name: str, batch_first: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    facts: dict[str, Any] = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": batch_first}
    if name == "Transformer":
        return torch.nn.Transformer(12, 2, 2, 2, **facts)
    if name == "decoder layer":
        return torch.nn.TransformerDecoderLayer(12, 2, **facts)
    layer = torch.nn.TransformerEncoderLayer(12, 2, **facts)
    return layer if name == "encoder layer" else torch.nn.TransformerEncoder(layer, 2)


CAUSAL = torch.nn.Transformer.generate_square_subsequent_mask(9)
SAID: dict[str, list[dict[str, Any]]] = {
    "encoder layer": [
        {},
        {"src_key_padding_mask": PADDING},
        {"src_mask": PAIRS},
        {"src_mask": CAUSAL, "is_causal": True},
        {"src_mask": LATER, "src_key_padding_mask": PADDING},
    ],
    "encoder": [{}, {"src_key_padding_mask": PADDING}, {"mask": CAUSAL}, {"mask": PAIRS}],
    "decoder layer": [
        {"tgt_mask": CAUSAL, "tgt_is_causal": True},
        {"tgt_mask": LATER, "memory_key_padding_mask": PADDING},
    ],
    "Transformer": [
        {"tgt_mask": CAUSAL, "tgt_is_causal": True},
        {"tgt_mask": LATER, "src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING},
    ],
}
CASES = [
    (name, said, batch_first, mode)
    for name, batch_first, mode in itertools.product(SAID, (True, False), ("train", "eval", "inference"))
    for said in range(len(SAID[name]))
]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("name", "said", "batch_first", "mode"), CASES)
def test_layers_of_pytorch_give_the_same_with_our_modules(
    name: str, said: int, batch_first: bool, mode: str, fast_path: bool, attention_calls: list[dict[str, Any]]
) -> None:
    theirs = model(name, batch_first).train(mode == "train")
    ours = converted(theirs)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    tokens = inputs(12) if batch_first else inputs(12).transpose(0, 1)
    given = (tokens,) if name.startswith("encoder") else (tokens, 0.5 * tokens)
    with torch.inference_mode(mode == "inference"):
        actual, expected = ours(*given, **SAID[name][said]), theirs(*given, **SAID[name][said])
    padding = SAID[name][said].get("src_key_padding_mask")
    if padding is not None and name == "encoder" and actual.shape == expected.shape:
        kept = ~padding if batch_first else ~padding.T  # a fast path leaves 0 where no token is
        close(actual[kept], expected[kept])
    else:
        close(actual, expected)
    if mode != "inference" or not fast_path:
        assert attention_calls
    if mode != "inference":
        for mine, other in zip(gradients(ours, actual), gradients(theirs, expected), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def gradients(module: torch.nn.Module, output: Tensor) -> list[Tensor]:
    named = dict(sorted(module.named_parameters()))
    return list(torch.autograd.grad(output.sin().sum(), list(named.values())))


def test_nested_tensors_are_pytorchs() -> None:
    theirs, ours = pair(12, 2)
    nested = torch.nested.nested_tensor([inputs(12)[0], inputs(12)[1, :6]])
    with torch.inference_mode():
        actual = ours.eval()(nested, nested, nested, need_weights=False)[0]
        expected = theirs.eval()(nested, nested, nested, need_weights=False)[0]
    for mine, other in zip(actual.unbind(), expected.unbind(), strict=True):
        close(mine, other)
    with pytest.raises(TensorError, match="nested"), torch.inference_mode():
        MultiheadAttention(12, 2, causal=True)(nested, need_weights=False)


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_in_words() -> None:
    ours = MultiheadAttention(12, 3, batch_first=True)
    tokens = inputs(12)
    few = {"need_weights": False}
    refused = [
        (lambda: ours(tokens, is_causal=True), SdpaError, "is_causal"),
        (lambda: ours(tokens[None], **few), TensorError, "axes"),
        (lambda: ours(tokens, tokens[0], **few), TensorError, "key"),
        (lambda: ours(tokens, tokens, tokens[:, 1:], **few), TensorError, "value"),
        (lambda: ours(tokens.tolist(), **few), TensorError, "list"),
        (lambda: ours(tokens, attn_mask=PAIRS[:4], **few), TensorError, "attn_mask"),
        (lambda: ours(tokens, key_padding_mask=PADDING[:1], **few), TensorError, "key_padding_mask"),
        (lambda: ours(tokens, attn_mask=PAIRS.int(), **few), TensorError, "bool"),
        (lambda: MultiheadAttention(10, 3), ProblemError, "divide"),
        (lambda: MultiheadAttention(12, 3, num_kv_heads=2), ProblemError, "num_kv_heads"),
        (lambda: MultiheadAttention(12, 0), ProblemError, "num_heads"),
        (lambda: MultiheadAttention(12, 3, add_bias_kv=True, causal=True), ProblemError, "add_bias_kv"),
        (lambda: MultiheadAttention(12, 3, add_zero_attn=True, num_kv_heads=1), ProblemError, "add_zero_attn"),
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
        actual = ours(tokens, need_weights=False)[0]
        expected = theirs.float()(*[tokens.float()] * 3, need_weights=False)[0]
        projected = torch.nn.functional.linear(tokens, ours.in_proj_weight, ours.in_proj_bias)
        query, key, value = (tensor.unflatten(-1, (heads, 64)) for tensor in projected.chunk(3, -1))
        assert explain(query, key, value, layout="bshd").variant is not None
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
