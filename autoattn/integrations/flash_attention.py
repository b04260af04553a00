"""FlashAttention's three functions on autoattn, for a library that takes a module of them.

The names, arguments and shapes are those of FlashAttention-2 and 3, and `s_aux` is that of vLLM's FlashAttention-3, so
that a library that looks at the signatures finds what it may give. Transformers does: see
`autoattn.integrations.huggingface.register_flash`.
"""

from autoattn.functional import flash_attn_func as flash_attn_func
from autoattn.functional import flash_attn_varlen_func as flash_attn_varlen_func
from autoattn.functional import flash_attn_with_kvcache as flash_attn_with_kvcache
