"""`autoattn.use`: calls of F.scaled_dot_product_attention within a block of code go to autoattn."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that PyTorch's own documentation uses

from autoattn import functional, torch_private
from autoattn.errors import AutoattnError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replaced:
    """What a block of `use` replaced so far.

    Attributes:
        calls: for each way in which calls were answered, how often: "kernel: why", "sdpa: why". A block within this
            one counts its own. Calls of compiled code are not counted.
    """

    calls: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{count} calls by {way}" for way, count in self.calls.most_common()]
        return "\n".join(lines) or "no calls of F.scaled_dot_product_attention"


_blocks: list[tuple[Replaced, dict[Any, str]]] = []  # with the way of each kind of call, the innermost block last
_turn = threading.Lock()
_before: list[Any] = []  # what stood in PyTorch's module in front of the first block


def replacement(*args: Any, **kwargs: Any) -> Tensor:
    """Stands in the place of F.scaled_dot_product_attention within a block, with its arguments."""
    if not torch.compiler.is_compiling():
        if not _blocks:  # somebody kept it longer than the block
            return torch_private.sdpa(*args, **kwargs)
        _note(args, kwargs)
    return functional.scaled_dot_product_attention(*args, **kwargs)


def _note(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Counts a call for the innermost block; the first of its kind is asked why."""
    kind = (
        *map(_kind, args), *((name, _kind(argument)) for name, argument in sorted(kwargs.items())),
        torch.is_grad_enabled(),
    )  # fmt: skip
    replaced, ways = _blocks[-1]
    if kind not in ways:
        try:
            explanation = functional.explain_sdpa(*args, **kwargs)
        except (AutoattnError, TypeError):  # the call raises it
            return
        ways[kind] = f"{explanation.route}: {explanation.reason}"
    with _turn:
        replaced.calls[ways[kind]] += 1


def _kind(argument: Any) -> Any:
    """What of an argument decides who answers."""
    if not isinstance(argument, Tensor):
        return argument
    return tuple(argument.shape), argument.dtype, argument.device, argument.requires_grad


@contextmanager
def use() -> Iterator[Replaced]:
    """F.scaled_dot_product_attention runs `autoattn.functional.scaled_dot_product_attention` in this block.

    The block holds for the process, like PyTorch's own `sdpa_kernel`: autograd computes checkpoints again in threads of
    its own. Blocks may be nested, and overlap in several threads. When the last one ends, also by an exception,
    `torch.nn.functional` has the very function that it had before. Code that torch.compile compiles in the block is
    compiled for autoattn, and anew outside of it. What holds the function under a name of its own, imported before the
    block, and calls from C++, such as the fast path of `nn.TransformerEncoder`, are not replaced.

    Yields:
        Which calls were replaced so far.
    """
    replaced = Replaced()
    block = (replaced, dict[Any, str]())
    with _turn:
        if not _blocks:
            _before.append(F.scaled_dot_product_attention)
            F.scaled_dot_product_attention = replacement
        _blocks.append(block)
    try:
        yield replaced
    finally:
        with _turn:
            _blocks.remove(block)
            if not _blocks:
                before = _before.pop()
                if F.scaled_dot_product_attention is replacement:  # or else somebody replaced it once more
                    F.scaled_dot_product_attention = before
