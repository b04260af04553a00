"""The multi-head module in the place of torch.nn.MultiheadAttention, with the same weights."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autoattn import MultiheadAttention, functional
from autoattn.errors import ProblemError, TensorError

TORCH = torch.nn.MultiheadAttention


def pair(embed_dim: int, heads: int, **facts: Any) -> tuple[torch.nn.MultiheadAttention, MultiheadAttention]:
    torch.manual_seed(0)
    theirs = TORCH(embed_dim, heads, **{"batch_first": True, **facts})
    shake(theirs)
    return theirs, MultiheadAttention.from_torch(theirs)


def shake(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)


def close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert (actual is None) == (expected is None)
    if actual is not None:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def inputs(embed_dim: int, seq: int = 9, features: int | None = None) -> Tensor:
    return torch.randn(2, seq, features or embed_dim, generator=torch.Generator().manual_seed(seq))


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of `autoattn.attention`, by what they were given."""
    calls: list[dict[str, Any]] = []
    attention = functional.attention

    def noted(*tensors: Tensor, **given: Any) -> Any:
        calls.append(given)
        return attention(*tensors, **given)

    monkeypatch.setattr(functional, "attention", noted)
    return calls


PAIRS = torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) < 0.4
PAIRS.fill_diagonal_(False)
EACH = torch.rand(6, 9, 9, generator=torch.Generator().manual_seed(2)) < 0.3
EACH[:, :, 0] = False
PADDING = torch.arange(9)[None] >= torch.tensor([[9], [6]])
CAUSAL = torch.ones(9, 9, dtype=torch.bool).triu(1)
MASKS: list[dict[str, Any]] = [
    {},
    {"key_padding_mask": PADDING},
    {"attn_mask": PAIRS},
    {"attn_mask": EACH, "key_padding_mask": PADDING},
    {"attn_mask": PAIRS.float() * -2.5, "key_padding_mask": PADDING.float() * -3.0},
    {"attn_mask": CAUSAL, "is_causal": True},
    {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDING},
]


@pytest.mark.parametrize("masks", MASKS, ids=lambda masks: "+".join(masks) or "none")
@pytest.mark.parametrize("facts", [{}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_a_call_returns_what_pytorchs_returns(masks: dict[str, Any], facts: dict[str, Any]) -> None:
    for batch_first, need_weights, average in itertools.product((True, False), repeat=3):
        theirs, ours = pair(12, 3, batch_first=batch_first, **facts)
        tokens = inputs(12) if batch_first else inputs(12).transpose(0, 1)
        given = {**masks, "need_weights": need_weights, "average_attn_weights": average}
        (output, weights), (wanted, wanted_weights) = (each(tokens, tokens, tokens, **given) for each in (ours, theirs))
        close(output, wanted)
        close(weights, wanted_weights)
        gradients = [
            torch.autograd.grad(result.square().sum(), list(module.parameters()), allow_unused=True)
            for result, module in ((output, ours), (wanted, theirs))
        ]
        for actual, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_the_defaults_of_constructor_and_call_are_pytorchs(attended: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    theirs, ours = TORCH(12, 3, 0.0, True), MultiheadAttention(12, 3, 0.0, True)
    assert not ours.batch_first
    ours.load_state_dict(theirs.state_dict())
    tokens = inputs(12)
    output, weights = ours(tokens, tokens, tokens)
    wanted, wanted_weights = theirs(tokens, tokens, tokens)
    close(output, wanted)
    close(weights, wanted_weights)
    assert attended == [], "weights are PyTorch's to compute"
    ours(tokens, tokens, tokens, None, False)
    assert len(attended) == 1


def test_a_call_without_weights_runs_autoattn(attended: list[dict[str, Any]]) -> None:
    _, ours = pair(12, 3)
    for masks in MASKS:
        ours(*[inputs(12)] * 3, need_weights=False, **masks)
    assert len(attended) == len(MASKS)
    assert [call["causal"] for call in attended[-2:]] == ["top-left", False]
    assert attended[-2]["bias"] is None, "the hint is enough"


def test_one_sequence_needs_no_batch() -> None:
    for batch_first in (True, False):
        theirs, ours = pair(12, 3, batch_first=batch_first)
        tokens = inputs(12)[0]
        for given in ({"attn_mask": EACH[:3]}, {"key_padding_mask": PADDING[1]}):
            for need_weights in (True, False):
                actual, expected = (
                    each(tokens, tokens, tokens, need_weights=need_weights, **given) for each in (ours, theirs)
                )
                for mine, other in zip(actual, expected, strict=True):
                    close(mine, other)


def test_keys_and_values_may_have_features_and_a_length_of_their_own() -> None:
    theirs, ours = pair(12, 3, kdim=5, vdim=7)
    query, key, value = inputs(12), inputs(12, 11, 5), inputs(12, 11, 7)
    for need_weights in (True, False):
        for mine, other in zip(
            ours(query, key, value, need_weights=need_weights),
            theirs(query, key, value, need_weights=need_weights),
            strict=True,
        ):
            close(mine, other)


# --- PyTorch's modules ------------------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["fast path", "no fast path"])
def fast_path(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(request.param)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def with_ours(module: torch.nn.Module) -> torch.nn.Module:
    """A copy in which each multi-head attention is ours."""
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is TORCH:
                setattr(parent, name, MultiheadAttention.from_torch(child))
    return module


LATER = torch.nn.Transformer.generate_square_subsequent_mask(9)


@pytest.mark.filterwarnings("ignore:.*nested tensor.*:UserWarning")
@pytest.mark.usefixtures("fast_path")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_layers_of_pytorchs_transformer_give_the_same_numbers(batch_first: bool, training: bool) -> None:
    torch.manual_seed(0)
    facts: dict[str, Any] = {"batch_first": batch_first, "dropout": 0.0}
    tokens = inputs(16) if batch_first else inputs(16).transpose(0, 1)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, **facts)
    decoder = torch.nn.TransformerDecoderLayer(16, 4, 32, **facts)
    calls: list[tuple[torch.nn.Module, tuple[Tensor, ...], dict[str, Any]]] = [
        (layer, (tokens,), {}),
        (layer, (tokens,), {"src_key_padding_mask": PADDING}),
        (layer, (tokens,), {"src_mask": LATER, "is_causal": True}),
        (torch.nn.TransformerEncoder(layer, 2), (tokens,), {"src_key_padding_mask": PADDING}),
        (decoder, (tokens, tokens), {"tgt_mask": LATER, "tgt_is_causal": True}),
        (decoder, (tokens, tokens), {"memory_key_padding_mask": PADDING, "tgt_key_padding_mask": PADDING}),
        (torch.nn.Transformer(16, 4, 1, 1, 32, **facts), (tokens, tokens), {"tgt_mask": LATER}),
    ]
    for module, given, words in calls:
        shake(module)
        module.train(training)
        ours = with_ours(module)
        assert any(isinstance(part, MultiheadAttention) for part in ours.modules())
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                actual, expected = ours(*given, **words), module(*given, **words)
            shown = ~PADDING if "src_key_padding_mask" in words else torch.ones_like(PADDING)
            pick = shown if batch_first else shown.t()
            torch.testing.assert_close(actual[pick], expected[pick], rtol=1e-4, atol=1e-4)


def test_an_encoder_layer_runs_autoattn_while_it_trains(attended: list[dict[str, Any]]) -> None:
    layer = with_ours(torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True))
    layer(inputs(16)).sum().backward()
    assert len(attended) == 1


@pytest.mark.usefixtures("fast_path")
def test_the_fast_path_never_forgets_a_modules_own_mask() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0).eval()
    layer.self_attn = MultiheadAttention(16, 4, batch_first=True, causal=True)
    tokens = inputs(16)
    with torch.no_grad():
        whole, beginning = layer(tokens), layer(tokens[:, :4])
    close(whole[:, :4], beginning)


def test_state_dicts_go_both_ways_and_modules_are_copied_and_pickled() -> None:
    for facts in ({}, {"kdim": 5, "vdim": 7}, {"add_bias_kv": True}, {"bias": False}):
        theirs, ours = pair(12, 3, **facts)
        theirs.load_state_dict(ours.state_dict(), strict=True)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert isinstance(other, torch.nn.MultiheadAttention)
            assert other.state_dict().keys() == ours.state_dict().keys()
    grouped = MultiheadAttention(24, 6, num_kv_heads=2, batch_first=True)
    other = pickle.loads(pickle.dumps(grouped))
    close(other(inputs(24))[0], grouped(inputs(24))[0])


# --- what PyTorch's module has not ------------------------------------------------------------------------------------


def test_a_causal_module_hides_later_keys_and_gives_its_weights() -> None:
    theirs, ours = pair(12, 3)
    tokens = inputs(12)
    wanted, weights = theirs(tokens, tokens, tokens, attn_mask=CAUSAL)
    ours.causal = True
    output, mine = ours(tokens)
    close(output, wanted)
    close(mine, weights)
    close(ours(tokens, need_weights=False)[0], wanted)


def test_grouped_queries_equal_a_module_with_repeated_key_heads() -> None:
    torch.manual_seed(0)
    grouped = MultiheadAttention(24, 6, num_kv_heads=2, head_dim=8, batch_first=True)
    repeated = MultiheadAttention(24, 6, head_dim=8, batch_first=True)
    state = grouped.state_dict()
    biases = state["in_proj_bias"].split([48, 16, 16])
    for place, name in enumerate(("k_proj_weight", "v_proj_weight"), start=1):
        state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(3, 0).flatten(0, 1)
        biases = (*biases[:place], biases[place].view(2, 8).repeat_interleave(3, 0).flatten(), *biases[place + 1 :])
    state["in_proj_bias"] = torch.cat(biases)
    repeated.load_state_dict(state)
    tokens = inputs(24)
    for actual, expected in zip(grouped(tokens), repeated(tokens), strict=True):
        close(actual, expected)


def test_a_query_that_sees_no_key_gives_the_bias_of_the_last_projection() -> None:
    _, ours = pair(12, 3)
    hidden = torch.ones(2, 9, dtype=torch.bool)
    output, _ = ours(inputs(12), key_padding_mask=hidden, need_weights=False)
    close(output, ours.out_proj.bias.expand(2, 9, 12))


def test_dropout_is_for_training_alone() -> None:
    _, ours = pair(12, 3)
    ours.dropout = 0.5
    tokens = inputs(12)
    eval_output = ours.eval()(tokens, need_weights=False)[0]
    assert torch.equal(eval_output, ours(tokens, need_weights=False)[0])
    assert not torch.equal(ours.train()(tokens, need_weights=False)[0], eval_output)


def test_what_cannot_be_is_refused_in_words() -> None:
    ours = MultiheadAttention(12, 3, causal=True, batch_first=True)
    tokens = inputs(12)
    refused = [
        (lambda: ours(tokens, attn_mask=CAUSAL, is_causal=True), TensorError, "is_causal"),
        (lambda: ours(tokens[None]), TensorError, "axes"),
        (lambda: ours(tokens, attn_mask=PAIRS[:4]), TensorError, "attn_mask"),
        (lambda: ours(tokens, key_padding_mask=PADDING[:1]), TensorError, "key_padding_mask"),
        (lambda: ours(tokens, attn_mask=PAIRS.int()), TensorError, "bool"),
        (lambda: MultiheadAttention(10, 3), ProblemError, "divide"),
        (lambda: MultiheadAttention(12, 3, num_kv_heads=2), ProblemError, "num_kv_heads"),
        (lambda: MultiheadAttention(12, 0), ProblemError, "num_heads"),
        (lambda: MultiheadAttention(12, 3, add_zero_attn=True, causal=True), ProblemError, "add_zero_attn"),
    ]
    for call, error, word in refused:
        with pytest.raises(error, match=word):
            call()


def test_pytorchs_errors_of_calls_that_its_module_refuses_stay() -> None:
    theirs, ours = pair(12, 3)
    tokens = inputs(12)
    for module in (theirs, ours):
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            module(tokens, tokens, tokens, is_causal=True, need_weights=False)
