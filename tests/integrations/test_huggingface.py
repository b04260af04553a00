"""`attn_implementation="autoattn"`: what a model says reaches kernels as structure, and mistakes are one sentence."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from tiny_models import CHUNK, WINDOW, model, padded, tokens, transformers
from torch import Tensor

from autoattn import functional
from autoattn.errors import HostError
from autoattn.integrations import once
from autoattn.integrations.huggingface import NAME, register

LEFT, RIGHT = padded(2, 20, left=5), padded(2, 20, right=3)
PACKED = torch.cat([torch.arange(9), torch.arange(11)])[None]
masking_utils = import_module("transformers.masking_utils")
# Chunks of packed sequences count from each sequence's begin, and in older releases through the row.
REMAPPED = hasattr(masking_utils, "remap_positions_for_packed_sequence")
CHUNKS_OF_PACKED = [0, 8, 9, 17, 20] if REMAPPED else [0, 8, 9, 16, 20]
INPUTS: dict[str, dict[str, Any]] = {
    "plain": {"input_ids": tokens(2, 20)},
    "left": {"input_ids": tokens(2, 20), "attention_mask": LEFT},
    "right": {"input_ids": tokens(2, 20), "attention_mask": RIGHT},
    "packed": {"input_ids": tokens(1, 20), "position_ids": PACKED, "use_cache": False},
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PyTorch's attention computes", RuntimeWarning)  # there is no GPU
        yield
    once.forget()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is said to `attention` and `packed_attention`, in order; offsets as lists."""
    noted: list[dict[str, Any]] = []

    def noting(function: Any, packed: bool) -> Any:
        def call(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **words: Any) -> Any:
            noted.append({**words, "seq_kv": key.shape[-2], "offsets": rest[0].tolist() if packed else None})
            return function(query, key, value, *rest, **words)

        return call

    monkeypatch.setattr(functional, "attention", noting(functional.attention, False))
    monkeypatch.setattr(functional, "packed_attention", noting(functional.packed_attention, True))
    return noted


def logits(name: str, implementation: str, given: dict[str, Any]) -> Tensor:
    """Those of tokens that are no padding, [tokens, vocabulary]."""
    net = model(name)
    net.set_attn_implementation(implementation)
    with torch.no_grad():
        output: Tensor = net(**given).logits
    kept = given.get("attention_mask")
    return output.flatten(0, -2) if kept is None or kept.shape != output.shape[:2] else output[kept.bool()]


@pytest.mark.parametrize(
    ("name", "inputs", "said"),
    [
        ("llama", "plain", [{"causal": True}, {"causal": True}]),
        ("llama", "left", [{"causal": True, "window": None}] * 2),
        ("llama", "packed", [{"causal": True, "offsets": [0, 9, 20]}] * 2),
        ("mistral", "right", [{"causal": True, "window": (WINDOW - 1, 0)}] * 2),
        ("mistral", "packed", [{"causal": True, "window": (WINDOW - 1, 0), "offsets": [0, 9, 20]}] * 2),
        ("gemma2", "plain", [{"causal": True, "window": (WINDOW - 1, 0), "softcap": 2.0}, {"softcap": 2.0}]),
        ("gemma3", "left", [{"causal": True, "window": (WINDOW - 1, 0)}, {"causal": True, "window": None}]),
        ("gpt_oss", "right", [{"causal": True, "window": (WINDOW - 1, 0)}, {"causal": True, "window": None}]),
        ("phi3", "packed", [{"causal": True, "window": (WINDOW - 1, 0), "offsets": [0, 9, 20]}] * 2),
        ("bert", "right", [{"causal": False, "window": None}] * 2),
        ("llama4", "plain", [{"offsets": [0, CHUNK, 16, 20, 28, 36, 40]}, {"causal": True, "offsets": None}]),
        ("llama4", "left", [{"offsets": [0, 5, 13, 20, 28, 36, 40]}, {"causal": True, "offsets": None}]),
        ("llama4", "packed", [{"offsets": CHUNKS_OF_PACKED}, {"offsets": [0, 9, 20]}]),
    ],
)
def test_structure_reaches_the_kernels_as_structure(
    name: str, inputs: str, said: list[dict[str, Any]], calls: list[dict[str, Any]]
) -> None:
    logits(name, NAME, INPUTS[inputs])
    assert len(calls) == 2
    if name == "llama4" and calls[0]["offsets"] is None:
        calls.reverse()  # which layers have chunks is the config's
    for call, expected in zip(calls, said, strict=True):
        assert {word: call.get(word) for word in expected} == expected
        mask = call.get("mask")
        assert (mask is None) if inputs in ("plain", "packed") else mask is None or mask.shape == (2, 1, 1, 20)


def test_sinks_reach_the_kernels(calls: list[dict[str, Any]]) -> None:
    logits("gpt_oss", NAME, INPUTS["plain"])
    layers = model("gpt_oss").model.layers
    assert [call["sinks"] is layer.self_attn.sinks for call, layer in zip(calls, layers, strict=True)] == [True, True]


@pytest.mark.skipif(
    not hasattr(import_module("transformers.models.t5.modeling_t5"), "ALL_ATTENTION_FUNCTIONS"),
    reason="the T5 of this release of Transformers has an attention of its own",
)
def test_a_position_bias_is_one_and_keeps_its_mask(calls: list[dict[str, Any]]) -> None:
    logits("t5", NAME, {"input_ids": tokens(2, 20), "decoder_input_ids": tokens(2, 7)})
    assert [(call["causal"], call["bias"].shape[-2:]) for call in calls] == [
        (False, (20, 20)), (False, (20, 20)), (True, (7, 7)), (False, (7, 20)), (True, (7, 7)), (False, (7, 20)),
    ]  # fmt: skip


def test_offsets_of_a_caller_say_the_sequences(calls: list[dict[str, Any]]) -> None:
    offsets = torch.tensor([0, 9, 20], dtype=torch.int32)
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 11, "max_length_k": 11}
    expected = logits("mistral", "eager", INPUTS["packed"])
    # Without a cache and with positions that go on, nothing but the offsets tells where the second one begins.
    torch.testing.assert_close(logits("mistral", NAME, {**INPUTS["packed"], **given}), expected, atol=2e-5, rtol=2e-5)
    without = {**INPUTS["packed"], **given, "position_ids": torch.arange(20)[None]}
    apart = logits("mistral", NAME, without)
    assert [call["offsets"] for call in calls[-2:]] == [[0, 9, 20]] * 2
    torch.testing.assert_close(apart[:9], expected[:9], atol=2e-5, rtol=2e-5)


def test_the_prompt_of_a_static_cache_reads_no_unfilled_slot(calls: list[dict[str, Any]]) -> None:
    net = model("llama")
    scores = {}
    for implementation in ("eager", NAME):
        net.set_attn_implementation(implementation)
        cache = transformers.StaticCache(config=net.config, max_cache_len=32)
        with torch.no_grad():
            scores[implementation] = net(input_ids=tokens(2, 20), past_key_values=cache).logits
    torch.testing.assert_close(scores[NAME], scores["eager"], atol=2e-5, rtol=2e-5)
    if REMAPPED:  # older releases want a tensor for a static cache
        assert [(call["causal"], call["seq_kv"]) for call in calls] == [(True, 20)] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "inputs"), [("mistral", "plain"), ("mistral", "left"), ("llama4", "left"), ("mistral", "packed")]
)
def test_a_compiled_model_is_one_graph_with_the_same_logits(name: str, inputs: str) -> None:
    given = {**INPUTS[inputs], "use_cache": False}
    expected = logits(name, "eager", given)
    torch.compiler.reset()
    net = model(name)
    net.set_attn_implementation(NAME)
    with torch.no_grad():
        output = torch.compile(net.forward, backend="aot_eager", fullgraph=True)(**given).logits
    kept = given.get("attention_mask", torch.ones(output.shape[:2])).bool()
    torch.testing.assert_close(output[kept], expected, atol=2e-5, rtol=2e-5)


@pytest.mark.exhaustive
def test_a_compiled_model_packs_what_a_caller_gives_offsets_of() -> None:
    offsets = torch.tensor([0, 9, 20], dtype=torch.int32)
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 11, "max_length_k": 11}
    expected = logits("mistral", "eager", INPUTS["packed"])
    graphs: list[Any] = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    net = model("mistral")
    net.set_attn_implementation(NAME)
    with torch.no_grad():
        output = torch.compile(net.forward, backend=note, fullgraph=True)(**INPUTS["packed"], **given).logits
    torch.testing.assert_close(output.flatten(0, 1), expected, atol=2e-5, rtol=2e-5)
    assert [str(node.target) for node in graphs[0].graph.nodes].count("autoattn.attention.default") == 2


def test_a_mask_of_the_caller_counts_as_it_is(calls: list[dict[str, Any]]) -> None:
    kept = torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(1)) < 0.5
    kept |= torch.eye(20, dtype=torch.bool)
    expected = logits("llama", "sdpa", {"input_ids": tokens(2, 20), "attention_mask": kept})
    output = logits("llama", NAME, {"input_ids": tokens(2, 20), "attention_mask": kept})
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)
    assert calls[0]["mask"] is kept
    assert not calls[0].get("causal")


def test_dropout_applies_in_training_alone(calls: list[dict[str, Any]]) -> None:
    net = copy.deepcopy(model("llama"))
    for layer in net.model.layers:
        layer.self_attn.attention_dropout = 0.25
    net.set_attn_implementation(NAME)
    net.eval()(input_ids=tokens(2, 20))
    net.train()(input_ids=tokens(2, 20))
    assert [call["dropout"] for call in calls] == [0.0, 0.0, 0.25, 0.25]


def test_a_model_that_no_kernel_takes_says_why_once() -> None:
    net = copy.deepcopy(model("llama"))
    net.set_attn_implementation(NAME)
    sentence = "no kernel of autoattn does: the tensors are on the cpu"
    with pytest.warns(RuntimeWarning, match=sentence) as shown:
        net(input_ids=tokens(2, 20))
    assert len(shown) == 1
    with pytest.warns(RuntimeWarning, match="float64") as shown:
        net.double()(input_ids=tokens(2, 20))
    assert len(shown) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(input_ids=tokens(2, 20))


def test_weights_that_a_caller_wants_are_none_and_a_sentence() -> None:
    net = copy.deepcopy(model("whisper"))
    net.set_attn_implementation(NAME)
    given = {"input_features": torch.rand(1, 8, 60), "decoder_input_ids": tokens(1, 7), "output_attentions": True}
    with pytest.warns(RuntimeWarning, match="asked for attention weights"):
        net(**given)


def test_other_implementations_are_left_as_they_are() -> None:
    attention, masks = transformers.AttentionInterface(), transformers.AttentionMaskInterface()
    before = dict(attention), dict(masks)
    assert register() == NAME
    assert (dict(attention), dict(masks)) == before
    assert set(attention) - {NAME} >= {"sdpa", "flash_attention_2", "flex_attention"}


@pytest.mark.parametrize(
    ("release", "sentence"),
    [
        ({"__version__": "4.40.0"}, "AttentionInterface, got 4.40.0, which has none"),
        ({"__version__": "4.57.0", "AttentionInterface": 1, "AttentionMaskInterface": 1}, "take q_length, q_offset"),
    ],
)
def test_another_release_is_one_sentence(
    release: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old_mask(batch_size, cache_position, kv_length, kv_offset, mask_function, attention_mask):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    modules = {
        "transformers": types.SimpleNamespace(**release),
        "transformers.masking_utils": types.SimpleNamespace(sdpa_mask=old_mask),
    }
    registration = import_module("autoattn.integrations.huggingface.registration")
    monkeypatch.setattr(registration, "import_module", modules.__getitem__)
    with pytest.raises(HostError, match=sentence) as error:
        register()
    assert str(error.value).count(". ") == 0


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(import_module("autoattn.integrations.huggingface.registration"), "import_module", missing)
    with pytest.raises(HostError, match=r"pip install 'transformers>=5\.4'"):
        register()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["mistral", "llama4"])
def test_a_compiled_step_with_a_static_cache_is_one_graph(name: str) -> None:
    """As `generate` runs it on a GPU: the prompt eagerly, each further token by a graph, behind left padding."""
    net = model(name)
    scores = {}
    for implementation in ("eager", NAME):
        net.set_attn_implementation(implementation)
        cache = transformers.StaticCache(config=net.config, max_cache_len=32)
        torch.compiler.reset()
        step = torch.compile(net.forward, backend="aot_eager", fullgraph=True) if implementation == NAME else net
        mask = LEFT
        with torch.no_grad():
            net(input_ids=tokens(2, 20), attention_mask=mask, past_key_values=cache)
            outputs = []
            for token in tokens(2, 3).unbind(1):
                mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
                outputs.append(step(input_ids=token[:, None], attention_mask=mask, past_key_values=cache).logits)
        scores[implementation] = torch.cat(outputs, dim=1)
    torch.testing.assert_close(scores[NAME], scores["eager"], atol=2e-5, rtol=2e-5)
