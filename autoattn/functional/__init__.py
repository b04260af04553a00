"""Attention as functions: autoattn's own, and those of PyTorch and FlashAttention with their exact signatures."""

from autoattn.decoding import cached_attention as cached_attention
from autoattn.decoding import explain_cached as explain_cached
from autoattn.decoding import flash_attn_with_kvcache as flash_attn_with_kvcache
from autoattn.decoding import merge_states as merge_states
from autoattn.functional.attention_functions import attention as attention
from autoattn.functional.attention_functions import explain as explain
from autoattn.functional.attention_functions import explain_packed as explain_packed
from autoattn.functional.attention_functions import forget as forget
from autoattn.functional.attention_functions import packed_attention as packed_attention
from autoattn.functional.flash_attention import flash_attn_func as flash_attn_func
from autoattn.functional.flash_attention import flash_attn_varlen_func as flash_attn_varlen_func
from autoattn.functional.sdpa import explain_sdpa as explain_sdpa
from autoattn.functional.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
