"""FlashAttention's functions on autoattn in Transformers: continuous batching has pages, and the tokens of eager."""

from __future__ import annotations

import copy
import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import model, padded, tokens, transformers
from torch import Tensor

from autoattn import decoding
from autoattn.errors import HostError
from autoattn.functional import flash_attention as flash_functions
from autoattn.integrations import flash_attention
from autoattn.integrations.huggingface import FLASH_NAME, register_flash

modeling = import_module("transformers.modeling_flash_attention_utils")
batching = import_module("transformers.generation.continuous_batching.initialization")
PROMPTS = [tokens(1, count)[0].tolist() for count in (20, 5)]
NEW = 4


@pytest.fixture(autouse=True)
def registered() -> None:
    try:
        register_flash()
    except HostError as error:
        pytest.skip(str(error))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is said to `cached_attention` and `packed_attention`, in order; decoding takes pages as on a GPU."""
    noted: list[dict[str, Any]] = []

    def noting(function: Any, name: str) -> Any:
        def call(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **words: Any) -> Any:
            noted.append({**words, "function": name, "key": tuple(key.shape)})
            return function(query, key, value, *rest, **words)

        return call

    monkeypatch.setattr(decoding, "cached_attention", noting(decoding.cached_attention, "cached"))
    monkeypatch.setattr(flash_functions, "packed_attention", noting(flash_functions.packed_attention, "packed"))
    monkeypatch.setattr(batching, "ensure_decode_fast_path_is_available", lambda *facts: None)
    return noted


def by_batches(net: Any, pages: int | None) -> list[list[int]]:
    """New tokens of each prompt by continuous batching; `pages` a request where decoding reads pages."""
    settings = transformers.ContinuousBatchingConfig(
        page_size=16, num_blocks=16, max_batch_tokens=32, max_blocks_per_request=pages, auto_switch_to_flash=False,
        max_memory_percent=0.5,
    )  # fmt: skip
    config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = net.generate_batch(PROMPTS, generation_config=config, continuous_batching_config=settings, warmup=False)
    assert all(output.error is None for output in outputs.values())
    return [list(output.generated_tokens) for _, output in sorted(outputs.items())]


def by_generate(name: str) -> list[list[int]]:
    """New tokens of each prompt by eager attention."""
    net = model(name)
    net.set_attn_implementation("eager")
    outputs = (net.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0] for ids in PROMPTS)
    return [output[len(ids) :].tolist() for output, ids in zip(outputs, PROMPTS, strict=True)]


def test_continuous_batching_decodes_on_pages_and_gives_the_tokens_of_eager(calls: list[dict[str, Any]]) -> None:
    expected = by_generate("llama")
    net = model("llama")
    net.set_attn_implementation(FLASH_NAME)
    assert by_batches(net, 4) == expected
    on_pages = [call for call in calls if call["function"] == "cached"]
    assert [call["function"] for call in calls[:2]] == ["packed"] * 2  # the prompts, in both layers
    assert len(on_pages) == 2 * (NEW - 1)
    assert {(call["key"][1:], tuple(call["block_table"].shape)) for call in on_pages} == {((16, 2, 16), (2, 4))}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "qwen3", "phi3"])
def test_continuous_batching_gives_the_tokens_of_eager(name: str) -> None:
    expected = by_generate(name)
    net = copy.deepcopy(model(name))
    if net._compatible_flash_implementations:  # GPT-OSS takes what it names alone
        net._compatible_flash_implementations = [FLASH_NAME]
    net.set_attn_implementation(FLASH_NAME)
    assert by_batches(net, 0) == expected


def test_a_batch_with_padding_has_the_logits_of_eager() -> None:
    net = model("mistral")
    kept = padded(2, 20, left=5)
    logits = {}
    for implementation in ("eager", FLASH_NAME):
        net.set_attn_implementation(implementation)
        with torch.no_grad():
            logits[implementation] = net(input_ids=tokens(2, 20), attention_mask=kept).logits[kept.bool()]
    torch.testing.assert_close(logits[FLASH_NAME], logits["eager"], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "function",
    [flash_attention.flash_attn_func, flash_attention.flash_attn_varlen_func, flash_attention.flash_attn_with_kvcache],
)
def test_the_functions_take_what_transformers_looks_for(function: Any) -> None:
    """Transformers leaves out what a signature does not have, without a word."""
    wanted = {"window_size", "softcap", "s_aux"}
    if function is flash_attention.flash_attn_with_kvcache:
        wanted |= {"block_table", "cache_seqlens"}
    else:
        wanted |= {"dropout_p", "deterministic"}
    assert wanted <= set(inspect.signature(function).parameters)


def test_other_names_are_imported_as_before() -> None:
    before = modeling._lazy_imports
    assert register_flash() == FLASH_NAME
    assert modeling._lazy_imports is before

    def lazy_imports(name: str, *rest: Any, **words: Any) -> Any:
        return name, rest, words

    imports = type(before)(SimpleNamespace(_lazy_imports=lazy_imports, _pad_input=1, _unpad_input=2))
    assert imports("flash_attention_2", None, allow_all_kernels=True) == (
        "flash_attention_2", (None,), {"allow_all_kernels": True},
    )  # fmt: skip
    assert imports(FLASH_NAME)[3:] == (1, 2)


def test_a_release_without_pages_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling, "_flash_attention_forward", lambda query_states, key_states: None)
    before = modeling._lazy_imports
    with pytest.raises(HostError, match=r"gives FlashAttention a block_table.*install transformers>=5\.20") as raised:
        register_flash()
    assert "\n" not in str(raised.value)
    assert modeling._lazy_imports is before
