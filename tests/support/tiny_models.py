"""Random Transformers models of two layers and a width of 64, without dropout, one of each name for a whole run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from autoattn.integrations import once
from autoattn.integrations.huggingface import register

transformers: Any = pytest.importorskip(
    "transformers", reason="needs Hugging Face Transformers, which is not installed"
)

VOCABULARY = 97
WINDOW, CHUNK = 7, 8  # fewer than the tokens of a test
TEXT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
ENCODER = {
    name: TEXT[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
}
# Name -> class of the config, class of the model, what the config says
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "AutoModelForCausalLM", TEXT),
    "mistral": ("MistralConfig", "AutoModelForCausalLM", {**TEXT, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        "AutoModelForCausalLM",
        {**TEXT, "head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "AutoModelForCausalLM",
        {**TEXT, "head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "AutoModelForCausalLM",
        {**TEXT, **EXPERTS, "head_dim": 16, "sliding_window": WINDOW, "rope_parameters": {"rope_type": "default"}},
    ),
    "llama4": (
        "Llama4TextConfig",
        "AutoModelForCausalLM",
        {
            **TEXT, **EXPERTS, "head_dim": 16, "attention_chunk_size": CHUNK, "intermediate_size_mlp": 64,
            "no_rope_layers": [1, 0],
        },
    ),
    "qwen2": ("Qwen2Config", "AutoModelForCausalLM", TEXT),
    "qwen3": ("Qwen3Config", "AutoModelForCausalLM", {**TEXT, "head_dim": 16}),
    "phi": ("PhiConfig", "AutoModelForCausalLM", {**TEXT, "resid_pdrop": 0.0}),
    "phi3": ("Phi3Config", "AutoModelForCausalLM", {**TEXT, "sliding_window": WINDOW}),
    "bert": (
        "BertConfig",
        "AutoModelForMaskedLM",
        {**ENCODER, "vocab_size": VOCABULARY, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "vit": ("ViTConfig", "AutoModelForImageClassification", {**ENCODER, "image_size": 32, "patch_size": 8}),
    "t5": (
        "T5Config",
        "AutoModelForSeq2SeqLM",
        {
            "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY,
            "decoder_start_token_id": 0, "dropout_rate": 0.0,
        },
    ),
    "whisper": (
        "WhisperConfig",
        "AutoModelForSpeechSeq2Seq",
        {
            "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": VOCABULARY,
            "num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 40, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0,
        },
    ),
}  # fmt: skip


@cache
def model(name: str) -> Any:
    """The model of a name, in evaluation; its weights are large enough that attention changes the logits."""
    transformers.logging.set_verbosity_error()
    config, kind, said = KINDS[name]
    torch.manual_seed(0)
    built = getattr(transformers, kind).from_config(getattr(transformers, config)(**said))
    for parameter in built.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return built.eval()


def tokens(batch: int, seq: int) -> torch.Tensor:
    """[batch, seq] token ids, the same each time."""
    return torch.randint(3, VOCABULARY, (batch, seq), generator=torch.Generator().manual_seed(seq))


def padded(batch: int, seq: int, *, left: int = 0, right: int = 0) -> torch.Tensor:
    """[batch, seq] attention mask: `left` padding tokens in the first row, `right` in the last."""
    mask = torch.ones(batch, seq, dtype=torch.long)
    mask[0, :left] = 0
    mask[-1, seq - right :] = 0
    return mask


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """autoattn among the attentions of Transformers, without a word; for the modules that import it."""
    register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    once.forget()
