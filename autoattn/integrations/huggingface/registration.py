"""Adds autoattn to the registries of an installed Transformers whose contracts are as known."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from autoattn.errors import HostError
from autoattn.integrations.huggingface import attention_function, mask_function

NAME = "autoattn"
# What a mask function is given; Transformers before 5.4 gives cache_position in place of q_length and q_offset.
MASK_ARGUMENTS = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask")


def register() -> str:
    """Makes `attn_implementation="autoattn"` known to Transformers; doing it again changes nothing.

    Select it with `from_pretrained(..., attn_implementation="autoattn")`, `from_config` alike, or
    `model.set_attn_implementation("autoattn")`. Models that ask for another implementation are left as they are.

    Returns:
        The name, "autoattn".

    Raises:
        HostError: Transformers is not installed, or its release has other contracts. Nothing is registered then.
    """
    transformers = installed()
    check_contracts(transformers)
    transformers.AttentionInterface.register(NAME, attention_function.attend)
    transformers.AttentionMaskInterface.register(NAME, mask_function.create_mask)
    return NAME


def installed() -> Any:
    """The module transformers."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise HostError(
            f"attn_implementation='{NAME}' needs Hugging Face Transformers 5.4 or newer, which cannot be imported "
            f"({error}); install it with pip install 'transformers>=5.4'"
        ) from None


def check_contracts(transformers: Any) -> None:
    """Refuses a release whose attention or mask functions are called in another way than known."""
    release = getattr(transformers, "__version__", "of an unknown release")
    for name in ("AttentionInterface", "AttentionMaskInterface"):
        if not hasattr(transformers, name):
            raise HostError(
                f"attn_implementation='{NAME}' needs Transformers 5.4 with {name}, got {release}, which has none; "
                "install transformers>=5.4, or keep attn_implementation='sdpa'"
            )
    masks = import_module("transformers.masking_utils")
    arguments = inspect.signature(masks.sdpa_mask).parameters if hasattr(masks, "sdpa_mask") else {}
    missing = [name for name in MASK_ARGUMENTS if name not in arguments]
    if missing:
        raise HostError(
            f"attn_implementation='{NAME}' needs Transformers 5.4, whose mask functions take {', '.join(missing)}, got "
            f"{release}, whose do not; install transformers>=5.4, or keep attn_implementation='sdpa'"
        )
