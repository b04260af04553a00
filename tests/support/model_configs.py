"""Configs of models as Hugging Face keeps them, cut to what attention needs."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip


DEEPSEEK = {
    **LLAMA, "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512,
}  # fmt: skip


BERT = {"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 512}
MISTRAL = {**LLAMA, "model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 4096}
GEMMA_2 = {
    **LLAMA, "model_type": "gemma2", "hidden_size": 3584, "num_attention_heads": 16, "head_dim": 256,
    "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
GEMMA_3 = {
    "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"num_attention_heads": 16},
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "sliding_window": 1024, "max_position_embeddings": 131072, "attn_logit_softcapping": None,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
}  # fmt: skip
QWEN_2 = {**LLAMA, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}
GPT_2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_positions": 1024, "n_ctx": 1024}
T5 = {"model_type": "t5", "d_model": 512, "num_heads": 8, "d_kv": 64, "relative_attention_num_buckets": 32,
      "is_encoder_decoder": True}  # fmt: skip
GPT_OSS = {**LLAMA, "model_type": "gpt_oss", "head_dim": 64, "num_attention_heads": 64, "sliding_window": 128,
           "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
