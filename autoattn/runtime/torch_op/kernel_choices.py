"""Whether kernels answer a call of torch.ops.autoattn.attention, for callers that have another way where none does."""

from __future__ import annotations

from typing import Any

import torch

from autoattn.core.cache_entry import KERNEL
from autoattn.errors import UsageError
from autoattn.runtime.plan import planner
from autoattn.runtime.torch_op import attention_op, attention_schema

_REMEMBERED = 4096  # calls whose choice is kept


def takes(tensors: tuple[Any, ...], words: dict[str, Any], *, learns: bool) -> bool:
    """Whether a kernel of autoattn answers a call of torch.ops.autoattn.attention.

    Args:
        tensors: query, key, value and the other tensors of the operator, in its order.
        words: its keyword arguments.
        learns: whether both passes must be kernels.
    """
    given = attention_schema.named(tensors, words)
    try:
        parsed = attention_op.read(given)
        if learns:
            return attention_op.plan_both(parsed, given).passes(parsed.problem) is not None
        return planner.plan(parsed, lse=True, learns=False).explanation.route == KERNEL
    except UsageError:  # whoever answers in place of the kernel says whether it is a mistake
        return False


class KernelChoices:
    """`takes`, remembered for sizes, strides and words."""

    def __init__(self) -> None:
        self._choices: dict[Any, bool] = {}

    def takes(self, tensors: tuple[Any, ...], words: dict[str, Any], *, learns: bool) -> bool:
        """As the function of this name."""
        views = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors if tensor is not None)
        key = views, tuple(words.items()), learns, tensors[0].device, torch.are_deterministic_algorithms_enabled()
        choice = self._choices.get(key)
        if choice is None:
            if len(self._choices) >= _REMEMBERED:
                self._choices.clear()
            choice = self._choices[key] = takes(tensors, words, learns=learns)
        return choice
