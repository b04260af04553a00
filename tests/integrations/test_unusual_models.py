"""Layers that say with more than a mask what a query sees: the numbers of eager attention, or an error."""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    TEXT,
    padded,
    registered,  # noqa: F401 - a fixture
    tokens,
    transformers,
)

from autoattn.errors import UsageError
from autoattn.integrations.huggingface import NAME, attention_function
from autoattn.integrations.huggingface.attention_function import attend
from autoattn.integrations.huggingface.structured_mask import StructuredMask

LATENT = {
    **TEXT, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1, "index_topk": 6,
    "index_head_dim": 16, "index_n_heads": 4,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "DeepseekV32Config": LATENT,  # layers select keys by index
    "GlmMoeDsaConfig": LATENT,
    "DeepseekV4Config": {  # layers add keys behind those of the mask
        **TEXT, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8,
        "q_lora_rank": 32, "o_lora_rank": 32, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "BigBirdPegasusConfig": {  # layers of a decoder that say is_causal=False
        "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "vocab_size": 97,
        "max_position_embeddings": 64,
    },
    "Gemma4TextConfig": {  # drops queries behind the layers whose keys others share
        **TEXT, "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 16, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": TEXT["vocab_size"],
        "hidden_size_per_layer_input": 8, "sliding_window": 64,
    },
}  # fmt: skip
# Arguments of attention functions that change no score: what a mask says too, and what others read.
HARMLESS = {
    "attention_mask", "cu_seqlens", "deterministic", "hidden_states", "output_attentions", "position_embeddings",
    "position_ids", "rotary_pos_emb", "query", "key", "value", "dim", "hidden_act", "hidden_dim",
}  # fmt: skip


@cache
def model(config: str) -> Any:
    if not hasattr(transformers, config):
        pytest.skip(f"this release of Transformers has no {config}")
    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**KINDS[config]))
    for weight in net.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    return net.eval()


def both(net: Any, other: str = NAME, **given: Any) -> list[torch.Tensor]:
    """Logits of eager attention, and of autoattn or another."""
    logits = []
    for implementation in ("eager", other):
        net.set_attn_implementation(implementation)
        with torch.no_grad():
            logits.append(net(**given).logits)
    return logits


@pytest.mark.parametrize("left", [0, 5])
@pytest.mark.parametrize("config", KINDS)
def test_the_numbers_are_those_of_eager(config: str, left: int) -> None:
    mask = padded(2, 40, left=left)
    net = model(config)
    if config == "GlmMoeDsaConfig":
        eager, sdpa = both(net, "sdpa", input_ids=tokens(2, 40), attention_mask=mask)
        if not torch.allclose(eager[mask.bool()], sdpa[mask.bool()], atol=1e-3):
            pytest.skip("this release adds a boolean mask to numbers: SDPA of Transformers is wrong too")
    eager, ours = both(net, input_ids=tokens(2, 40), attention_mask=mask)
    torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()], atol=2e-5, rtol=2e-4)


def test_a_layer_that_adds_its_mask_to_scores_adds_numbers() -> None:
    torch.manual_seed(0)
    config = transformers.BigBirdPegasusConfig(
        d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=TEXT["vocab_size"], max_position_embeddings=64,
    )  # fmt: skip
    net, ids = transformers.AutoModelForSeq2SeqLM.from_config(config).eval(), tokens(2, 20)
    given = {"input_ids": ids, "attention_mask": padded(2, 20, right=5), "decoder_input_ids": ids[:, :7]}
    eager, ours = both(net, **given)
    torch.testing.assert_close(ours, eager, atol=2e-5, rtol=2e-4)


def test_queries_may_leave_behind_the_mask() -> None:
    eager, ours = both(model("Gemma4TextConfig"), input_ids=tokens(2, 20), logits_to_keep=5)
    torch.testing.assert_close(ours, eager, atol=2e-5, rtol=2e-4)


def test_queries_may_leave_behind_the_mask_of_a_static_cache() -> None:
    net, ids = model("Gemma4TextConfig"), tokens(2, 20)
    scores = []
    for implementation in ("eager", NAME):
        net.set_attn_implementation(implementation)
        output = net.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, min_new_tokens=3, do_sample=False,
            cache_implementation="static", disable_compile=True, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        scores.append(output.logits)
    torch.testing.assert_close(scores[1], scores[0], atol=2e-5, rtol=2e-4)


def three(keys: int = 6, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A query [batch, 2, 6, 8], a key and a value [2, 2, keys, 8]."""
    torch.manual_seed(0)
    return torch.randn(batch, 2, 6, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)


@pytest.mark.parametrize("name", attention_function.UNKNOWN)
def test_what_no_call_has_is_one_sentence(name: str) -> None:
    call: Any = partial(attend, torch.nn.Module(), *three(), None)
    pattern = rf"^attn_implementation='autoattn' takes layers without '{name}', got a Module .* set attn_impl.*'eager'$"
    with pytest.raises(UsageError, match=pattern):
        call(**{name: torch.ones(1)})
    call(**{name: None})


def test_other_keys_than_the_mask_has_are_one_sentence() -> None:
    mask = StructuredMask(
        shape=(2, 1, 6, 6), keys=6, causal=True, window=None, padding=None, packing=None, packed=False,
        pairs=lambda: torch.ones(2, 1, 6, 6, dtype=torch.bool),
    )  # fmt: skip
    with pytest.raises(
        UsageError, match=r"takes layers whose keys are those of the mask, 6 of them, got a Module with 9;"
    ):
        attend(torch.nn.Module(), *three(keys=9), mask)


@pytest.mark.parametrize("masked", [False, True])
def test_selected_keys_are_those_of_the_mask_too(masked: bool) -> None:
    query, key, value = three()
    indices = torch.tensor([0, 5]).expand(2, 6, 2)
    kept = torch.zeros(6, 6, dtype=torch.bool)
    kept[:, [0, 5]] = True
    kept = kept.tril() if masked else kept
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril() if masked else None
    output, _ = attend(torch.nn.Module(), query, key, value, mask, is_causal=False, indices=indices)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=kept)
    torch.testing.assert_close(output.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)


def test_learnt_queries_are_those_of_each_row() -> None:
    query, key, value = three(batch=1)
    output, _ = attend(torch.nn.Module(), query, key, value, None, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(query.expand(2, -1, -1, -1), key, value)
    torch.testing.assert_close(output.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)


def test_no_model_of_this_release_says_anything_unknown_to_its_attention() -> None:
    """A new release may have layers with another argument, which `attend` must read or refuse."""
    said: set[str] = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for call in re.findall(
            r"attention_interface\(\s*\n(.*?)\n\s*\)\n", path.read_text(encoding="utf-8"), re.DOTALL
        ):
            said |= set(re.findall(r"^\s*(\w+)=", call, re.MULTILINE))
    assert said, "calls are written in another way"
    known = set(attend.__annotations__) | HARMLESS | set(attention_function.UNKNOWN)
    assert said <= known, sorted(said - known)
