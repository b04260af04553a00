"""Every text model of the installed Transformers that can be built small: eager's numbers, or an error of one sentence.

A model that no small sizes make small, or whose eager attention fails, is skipped with the reason.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, padded, tokens, transformers
from torch import Tensor

from autoattn.errors import UsageError
from autoattn.integrations import once
from autoattn.integrations.huggingface import NAME, register

pytestmark = pytest.mark.exhaustive
AUTO = import_module("transformers.models.auto.modeling_auto")
MAPPINGS = {
    "causal": AUTO.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": AUTO.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence": AUTO.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim",
          "ffn_dim")  # fmt: skip
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
         "index_n_heads")  # fmt: skip
SMALL = {
    **dict.fromkeys(WIDTHS, 64), **dict.fromkeys(LAYERS, 2), **dict.fromkeys(HEADS, 4), "num_key_value_heads": 2,
    "d_kv": 16, "head_dim": 16, "global_head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
    "n_positions": 128, "embedding_size": 32, "sliding_window": 7, "attention_chunk_size": 8, "num_local_experts": 2,
    "num_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
    "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "index_topk": 6,
    "index_head_dim": 16, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LARGEST = 8_000_000  # parameters; what stays larger has sizes of other names


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    once.forget()


def has(config: Any, name: str) -> bool:
    """Whether a config has a value of that name; some raise an error where layers differ in it."""
    try:
        return getattr(config, name, None) is not None
    except Exception:
        return False


def build(kind: str, architecture: Any) -> Any:
    """The model, in evaluation; skips what cannot be built small."""
    try:
        config = transformers.AutoConfig.for_model(kind)
    except Exception as error:
        pytest.skip(f"has no usual config: {type(error).__name__}")
    said = {name: size for name, size in SMALL.items() if has(config, name)} | MARKS
    reason: Exception | None = None
    for changes in ({}, {"head_dim": None}, {"num_key_value_heads": 4}):
        given = {name: size for name, size in {**said, **changes}.items() if size is not None}
        try:
            with torch.device("meta"):
                size = sum(weight.numel() for weight in architecture(type(config)(**given)).parameters())
            if size > LARGEST:
                pytest.skip(f"more than {LARGEST:,} parameters with every size that is known")
            torch.manual_seed(0)
            net = architecture(type(config)(**given)).eval()
        except Exception as error:
            reason = error
            continue
        for weight in net.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.1)
        return net
    return pytest.skip(f"cannot be built small: {type(reason).__name__}")


def logits(net: Any, implementation: str, given: dict[str, Any]) -> Tensor:
    """Those of tokens that are no padding."""
    net.set_attn_implementation(implementation)
    torch.manual_seed(0)  # layers of random patterns
    with torch.no_grad():
        output: Tensor = net(**given).logits
    kept = given.get("attention_mask")
    return output if kept is None or output.shape[:2] != kept.shape else output[kept.bool()]


@pytest.mark.parametrize("padding", [{}, {"left": 5}, {"right": 5}], ids=["plain", "left", "right"])
@pytest.mark.parametrize(
    ("task", "kind"), [(task, kind) for task, names in MAPPINGS.items() for kind in names], ids=lambda part: str(part)
)
def test_a_model_has_the_numbers_of_eager_or_says_that_it_cannot(task: str, kind: str, padding: dict[str, int]) -> None:
    name = MAPPINGS[task][kind]
    architecture = getattr(transformers, name if isinstance(name, str) else name[0], None)
    if architecture is None:
        pytest.skip("needs a package that is not installed")
    net = build(kind, architecture)
    given: dict[str, Any] = {"input_ids": tokens(2, 20)}
    if padding:
        given["attention_mask"] = padded(2, 20, **padding)
    if task == "sequence":
        given["decoder_input_ids"] = tokens(2, 7)
    try:
        eager = logits(net, "eager", given)
    except Exception as error:
        pytest.skip(f"eager attention fails: {type(error).__name__}")
    with contextlib.suppress(UsageError):  # tests/integrations/test_unusual_models.py reads its sentence
        ours = logits(net, NAME, given)
        torch.testing.assert_close(ours, eager, atol=1e-3, rtol=1e-3, equal_nan=True)
