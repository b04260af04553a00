"""A mask as what it is made of, in place of a tensor of all pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

ADDITIONS = ("add", "__add__", "__radd__", "add_", "__iadd__")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packing:
    """Sequences that lie one behind the other in the flattened tokens [batch * seq].

    Attributes:
        offsets: [sequences + 1] int32, where each begins, and the end.
        longest: tokens of the longest.
    """

    offsets: Tensor
    longest: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StructuredMask:
    """What `mask_function` hands to `attention_function`; a key counts if every part keeps it.

    A model passes a mask on without a look. One that indexes it, or gives it to a function of PyTorch, gets what the
    tensor of all pairs would give, because `pairs` makes that tensor. One that adds it to scores, as layers written for
    eager attention do, adds 0 where a query attends, and the least number where not.

    Attributes:
        shape: (batch, 1, seq_q, seq_kv) of the tensor of all pairs.
        keys: only the first so many of seq_kv are filled; the rest of a static cache is hidden.
        causal: keys up to the query, whose last one stands at the last filled key.
        window: (left, right) as in `autoattn.attention`; None for no bound.
        padding: [batch, 1, 1, keys] bool, True attends; None where every token counts.
        packing: sequences that do not see one another; None where there is one a row.
        packed: whether tokens are packed, or may be: where `packing` is None, a graph is traced, in which nobody can
            count sequences. The offsets of a caller count then, or else the tensor of all pairs.
        pairs: makes the mask [batch, 1, seq_q, seq_kv] bool.
    """

    shape: tuple[int, int, int, int]
    keys: int
    causal: bool
    window: tuple[int, int] | None
    padding: Tensor | None
    packing: Packing | None
    packed: bool
    pairs: Callable[[], Tensor]

    @property
    def ndim(self) -> int:
        """4, as the tensor of all pairs has."""
        return 4

    def __getattr__(self, name: str) -> Any:
        """What else a model asks of a tensor."""
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self.pairs(), name)

    def to(self, *args: Any, **kwargs: Any) -> StructuredMask | Tensor:
        """The same mask on another device; anything else makes the tensor of all pairs."""
        device = args[0] if args else kwargs.get("device")
        if kwargs.get("dtype") is not None or not isinstance(device, str | int | torch.device) or len(args) > 1:
            return self.pairs().to(*args, **kwargs)
        packing = self.packing
        return replace(
            self,
            padding=None if self.padding is None else self.padding.to(device),
            packing=None if packing is None else replace(packing, offsets=packing.offsets.to(device)),
            pairs=lambda: self.pairs().to(device),
        )

    def __getitem__(self, index: Any) -> Tensor:
        return self.pairs()[index]

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of PyTorch on the tensor of all pairs."""
        if function.__name__ in ADDITIONS and len(args) == 2 and not kwargs:
            return _sum(*args)
        return function(*_expanded(args), **_expanded(kwargs or {}))


def _sum(left: Any, right: Any) -> Tensor:
    """Scores and a mask, in either order; other sums are those of the tensors of all pairs."""
    mask, scores = (left, right) if isinstance(left, StructuredMask) else (right, left)
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        return _expanded(left) + _expanded(right)
    return scores.masked_fill(~mask.pairs(), torch.finfo(scores.dtype).min)


def _operator(name: str) -> Callable[..., Any]:
    if name in ADDITIONS:
        return _sum
    return lambda mask, *others: getattr(mask.pairs(), name)(*map(_expanded, others))


for _name in ("invert", "and", "or", "add", "radd", "sub", "rsub", "mul", "rmul"):
    setattr(StructuredMask, f"__{_name}__", _operator(f"__{_name}__"))


def _expanded(value: Any) -> Any:
    """The same with tensors of all pairs in place of masks, also within lists, tuples and dicts."""
    if isinstance(value, StructuredMask):
        return value.pairs()
    if isinstance(value, dict):
        return {name: _expanded(part) for name, part in value.items()}
    return type(value)(_expanded(part) for part in value) if type(value) in (list, tuple) else value
