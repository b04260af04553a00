"""Kernels without a search space on a card: one for each text, compiled when it is first asked for."""

from __future__ import annotations

import torch

from autoattn.core.variant import Source
from autoattn.errors import TensorError
from autoattn.kernels.compiler import Kernel
from autoattn.runtime.plan import planner


def find(source: Source, index: int, purpose: str) -> Kernel:
    """The kernel of a text on the card with this number.

    Args:
        purpose: what it does, for an error: "an append".

    Raises:
        TensorError: it would have to be compiled while a CUDA graph is captured.
    """
    if (source.digest, index) not in _loaded and torch.cuda.is_current_stream_capturing():
        raise TensorError(f"{purpose} in a CUDA graph must have its kernel, which is not loaded; call it once before")
    kernel = planner.load_once(source, index)
    _loaded.add((source.digest, index))
    return kernel


_loaded: set[tuple[str, int]] = set()
