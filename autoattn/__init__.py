"""autoattn: attention kernels that are generated, searched, validated and measured for your shapes and your GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoattn.dispatch import Explanation
    from autoattn.errors import AutoattnError
    from autoattn.functional import attention, explain, explain_packed, packed_attention
    from autoattn.mask import Mask
    from autoattn.module import Attention

__version__ = "0.1.0"
__all__ = [
    "Attention",
    "AutoattnError",
    "Explanation",
    "Mask",
    "attention",
    "explain",
    "explain_packed",
    "packed_attention",
]
# Loaded when first used, so that the command line's --help does not wait for torch.
_HOMES = {
    "Attention": "autoattn.module",
    "AutoattnError": "autoattn.errors",
    "Explanation": "autoattn.dispatch",
    "Mask": "autoattn.mask",
    "attention": "autoattn.functional",
    "explain": "autoattn.functional",
    "explain_packed": "autoattn.functional",
    "packed_attention": "autoattn.functional",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
