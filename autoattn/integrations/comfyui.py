"""ComfyUI: attention with the arguments of its own functions, and an override for one model.

A custom node sets `model_options["transformer_options"]["optimized_attention_override"] = comfyui.override` on a clone
of its model. `register` adds the function to ComfyUI's own table instead, under the name "autoattn".
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from autoattn import functional
from autoattn.errors import HostError

NAME = "autoattn"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **others: Any,
) -> Tensor:
    """Attention with the arguments of comfy.ldm.modules.attention.attention_pytorch.

    Args:
        q, k, v: [batch, seq, heads * head_dim], or [batch, heads, seq, head_dim] with skip_reshape; there may be fewer
            key heads.
        heads: query heads.
        mask: broadcasts to [seq_q, seq_kv], [batch, seq_q, seq_kv] or [batch, heads, seq_q, seq_kv], by its number of
            axes; bool (True attends) or numbers to add.
        attn_precision: of the scores, which are float32 whatever is said.
        skip_output_reshape: returns [batch, heads, seq, head_dim].
        others: `scale` counts; the rest is for other functions.

    Returns:
        [batch, seq_q, heads * head_dim]
    """
    if not skip_reshape:
        head_dim = q.shape[-1] // heads
        q, k, v = (tensor.unflatten(-1, (-1, head_dim)).transpose(1, 2) for tensor in (q, k, v))
    if mask is not None:
        if mask.dim() == 2:
            mask = mask[None]
        if mask.dim() == 3:
            mask = mask[:, None]
        if mask.dtype is not torch.bool and mask.dtype is not torch.float32:
            mask = mask.to(q.dtype)
    output = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=others.get("scale"), enable_gqa=k.shape[1] != q.shape[1]
    )
    return output if skip_output_reshape else output.transpose(1, 2).flatten(2)


def override(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """For `transformer_options["optimized_attention_override"]`; `original`, which ComfyUI chose, is not called."""
    return attention(*args, **kwargs)


def register() -> str:
    """Adds `attention` to ComfyUI's table of attention functions.

    Returns:
        The name, "autoattn".

    Raises:
        HostError: ComfyUI is not on the path, or has no such table.
    """
    try:
        module: Any = import_module("comfy.ldm.modules.attention")
    except ImportError as error:
        raise HostError(
            f"the ComfyUI function needs ComfyUI on sys.path, which cannot be imported ({error}); call register in a "
            "custom node of it"
        ) from None
    if not hasattr(module, "register_attention_function"):
        raise HostError(
            "the ComfyUI function needs a ComfyUI with register_attention_function, got one without; update ComfyUI, "
            "or set transformer_options['optimized_attention_override'] = comfyui.override"
        )
    module.register_attention_function(NAME, attention)
    return NAME
