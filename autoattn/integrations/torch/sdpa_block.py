"""`autoattn.use`: calls of F.scaled_dot_product_attention within a block of code go to autoattn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoattn import functional

SDPA = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class Replaced:
    """What a block of `use` replaced so far.

    Attributes:
        calls: for each way in which calls were answered, how often: "kernel: why", "sdpa: why". Calls of compiled code
            are not counted.
    """

    calls: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{count} calls by {way}" for way, count in self.calls.most_common()]
        return "\n".join(lines) or "no calls of F.scaled_dot_product_attention"


class _Mode(TorchFunctionMode):
    """Sees every function of PyTorch that this thread calls, and answers one of them."""

    def __init__(self, replaced: Replaced) -> None:
        super().__init__()
        self.replaced = replaced
        self.ways: dict[Any, str] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not SDPA:
            return function(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self.note(args, kwargs)
        return functional.scaled_dot_product_attention(*args, **kwargs)

    def note(self, args: Any, kwargs: Any) -> None:
        """Counts a call; the first of its kind is asked why."""
        given = (*args, *(kwargs[name] for name in sorted(kwargs)))
        kind = (*(_kind(argument) for argument in given), *sorted(kwargs), torch.is_grad_enabled())
        if kind not in self.ways:
            explanation = functional.explain_sdpa(*args, **kwargs)
            self.ways[kind] = f"{explanation.route}: {explanation.reason}"
        self.replaced.calls[self.ways[kind]] += 1


def _kind(argument: Any) -> Any:
    """What of an argument decides who answers."""
    if not isinstance(argument, Tensor):
        return argument
    return tuple(argument.shape), argument.dtype, argument.device, argument.requires_grad


@contextmanager
def use() -> Iterator[Replaced]:
    """Calls of F.scaled_dot_product_attention in this block run `autoattn.functional.scaled_dot_product_attention`.

    The block holds for the thread that entered it, and for backward passes that it starts. Blocks may be nested. At the
    end, also after an exception, PyTorch's own choice is as it was before. Code that torch.compile compiles in the block
    is compiled for autoattn, and compiled anew outside of it. Calls from C++, such as those of the fast path of
    `nn.TransformerEncoder`, are not seen.

    Yields:
        Which calls were replaced so far.
    """
    replaced = Replaced()
    with _Mode(replaced):
        yield replaced
