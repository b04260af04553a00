"""Whether torch.compile, a dispatch mode, FakeTensors or torch.vmap would miss a kernel's launch."""

from __future__ import annotations

from typing import Any

import torch

from autoattn import torch_private

VMAP = "Vmap"  # PyTorch's name of the one transform that takes no derivative


def is_watched(*tensors: Any) -> bool:
    """Whether somebody would not see a kernel's launch: torch.compile, a dispatch mode, FakeTensors, torch.vmap.

    Transforms of torch.func that differentiate are left to PyTorch's own attention, whose derivatives they can take.
    """
    if torch.compiler.is_compiling() or torch_private.count_dispatch_modes():
        return True
    # By name: most programs do not load its module.
    if any(type(tensor).__name__ == "FakeTensor" for tensor in tensors):
        return True
    return torch_private.transforms() == (VMAP,)
