"""autoattn: attention kernels that are generated, searched, validated and measured for your shapes and your GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoattn import masks
    from autoattn.core.mask import Mask
    from autoattn.errors import AutoattnError
    from autoattn.functional import (
        attention,
        cached_attention,
        explain,
        explain_cached,
        explain_packed,
        explain_sdpa,
        merge_states,
        packed_attention,
    )
    from autoattn.integrations.torch import use
    from autoattn.nn.attention import Attention
    from autoattn.nn.dilated import dilated_attention
    from autoattn.nn.multihead import MultiheadAttention
    from autoattn.runtime.parse.cache_arguments import CacheTensors
    from autoattn.runtime.plan.explanations import Explanation
    from autoattn.runtime.run.recompute_counter import counting_redone
    from autoattn.runtime.warm_up import warm

__version__ = "0.2.0"  # the only place of the number: pyproject.toml reads it
__all__ = [
    "Attention",
    "AutoattnError",
    "CacheTensors",
    "Explanation",
    "Mask",
    "MultiheadAttention",
    "attention",
    "cached_attention",
    "counting_redone",
    "dilated_attention",
    "explain",
    "explain_cached",
    "explain_packed",
    "explain_sdpa",
    "masks",
    "merge_states",
    "packed_attention",
    "use",
    "warm",
]
# Loaded when first used, so that the command line's --help does not wait for torch.
_HOMES = {
    "Attention": "autoattn.nn.attention",
    "AutoattnError": "autoattn.errors",
    "CacheTensors": "autoattn.runtime.parse.cache_arguments",
    "Explanation": "autoattn.runtime.plan.explanations",
    "Mask": "autoattn.core.mask",
    "MultiheadAttention": "autoattn.nn.multihead",
    "attention": "autoattn.functional",
    "cached_attention": "autoattn.decoding",
    "counting_redone": "autoattn.runtime.run.recompute_counter",
    "dilated_attention": "autoattn.nn.dilated",
    "explain": "autoattn.functional",
    "explain_cached": "autoattn.decoding",
    "explain_packed": "autoattn.functional",
    "explain_sdpa": "autoattn.functional",
    "merge_states": "autoattn.decoding",
    "packed_attention": "autoattn.functional",
    "use": "autoattn.integrations.torch",
    "warm": "autoattn.runtime.warm_up",
}


if not TYPE_CHECKING:  # a type checker takes the names from the imports above, and refuses any other

    def __getattr__(name: str) -> object:
        if name == "masks":
            return import_module("autoattn.masks")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        member: object = getattr(import_module(_HOMES[name]), name)
        globals()[name] = member  # the next look-up does not come here
        return member
