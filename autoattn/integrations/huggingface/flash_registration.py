"""Adds FlashAttention's functions on autoattn to Transformers, under a name that its continuous batching takes.

Continuous batching (`generate_batch`) takes FlashAttention, whose functions read and write pages of a cache, and only
two other implementations of its own. It knows FlashAttention by "flash" in the name, and the version with pages by "2"
or "3" behind it. A kernel of the Hub comes to Transformers in the same way: its own wrapper and mask for FlashAttention
stand in the registries, and the functions come from a module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from autoattn.errors import HostError
from autoattn.integrations import flash_attention
from autoattn.integrations.huggingface.registration import check_contracts, installed

FLASH_NAME = "autoattn_flash_attention_2"
OF_TRANSFORMERS = "flash_attention_2"  # whose wrapper and mask are used


class FlashImports:
    """Stands in the place of the function with which Transformers imports FlashAttention's functions."""

    def __init__(self, modeling: Any) -> None:
        self._before: Callable[..., tuple[Any, ...]] = modeling._lazy_imports
        self._padding = modeling._pad_input, modeling._unpad_input

    def __call__(self, implementation: str | None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """(flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, pad_input, unpad_input)."""
        if implementation != FLASH_NAME:
            return self._before(implementation, *args, **kwargs)
        functions = flash_attention
        return (
            functions.flash_attn_func, functions.flash_attn_varlen_func, functions.flash_attn_with_kvcache,
            *self._padding,
        )  # fmt: skip


def register_flash() -> str:
    """Makes `attn_implementation="autoattn_flash_attention_2"` known to Transformers, for continuous batching.

    Transformers prepares the calls as for FlashAttention-2 and autoattn computes them: padding is taken out of a batch,
    and `generate_batch` decodes on the pages of its cache. Everything else runs better with `register`, whose mask has
    chunks and prompts of static caches too. Doing it again changes nothing. Other implementations are left as they are.

    Returns:
        The name, "autoattn_flash_attention_2".

    Raises:
        HostError: Transformers is not installed, or its release has other contracts. Nothing is registered then.
    """
    transformers = installed()
    check_contracts(transformers)
    modeling: Any = import_module("transformers.modeling_flash_attention_utils")
    attention, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    forward = getattr(modeling, "_flash_attention_forward", None)
    takes_pages = callable(forward) and "block_table" in inspect.signature(forward).parameters
    known = all(hasattr(modeling, name) for name in ("_lazy_imports", "_pad_input", "_unpad_input"))
    if not (takes_pages and known and OF_TRANSFORMERS in attention() and OF_TRANSFORMERS in masks()):
        raise HostError(
            f"attn_implementation='{FLASH_NAME}' needs a Transformers that gives FlashAttention a block_table, as 5.20 "
            f"and 5.24 do, got {transformers.__version__}, which does not; install transformers>=5.20, or keep "
            "attn_implementation='sdpa'"
        )
    if not isinstance(modeling._lazy_imports, FlashImports):
        modeling._lazy_imports = FlashImports(modeling)
    attention.register(FLASH_NAME, attention()[OF_TRANSFORMERS])
    masks.register(FLASH_NAME, masks()[OF_TRANSFORMERS])
    return FLASH_NAME
