"""Hugging Face Transformers: `attn_implementation="autoattn"` for every model that asks its attention registry.

`register` adds two functions under that name: `attention_function` computes attention, and `mask_function` says which
keys a query sees. A mask goes from the second to the first as a `StructuredMask` (causal, window, padding, packed
sequences), because a tensor of all pairs would hide the structure from the kernels. `register_flash` adds
FlashAttention's functions under another name, for continuous batching.
"""

from autoattn.integrations.huggingface.flash_registration import FLASH_NAME as FLASH_NAME
from autoattn.integrations.huggingface.flash_registration import register_flash as register_flash
from autoattn.integrations.huggingface.registration import NAME as NAME
from autoattn.integrations.huggingface.registration import register as register
