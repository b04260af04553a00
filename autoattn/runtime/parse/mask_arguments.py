"""Parses mask, causal, window and bias into one Mask."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoattn.core.mask import Alignment, Mask, MaskKind
from autoattn.core.modifiers import Bias
from autoattn.errors import TensorError
from autoattn.runtime.parse.modifier_arguments import check_tensor
from autoattn.tensors.operands import BlockTable

if TYPE_CHECKING:
    from autoattn.masks import BlockSparse

_FULL = Mask()
_CAUSAL = {
    True: Mask(kind=MaskKind.CAUSAL),
    "bottom-right": Mask(kind=MaskKind.CAUSAL),
    "top-left": Mask(kind=MaskKind.CAUSAL, alignment=Alignment.TOP_LEFT),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """A mask, and the tensors that belong to it."""

    mask: Mask = _FULL
    kind: Bias = Bias.NONE
    bias: Tensor | None = None
    narrow_bias: Tensor | None = None
    table: BlockTable | None = None
    captures: tuple[Tensor, ...] = ()


_PLAIN = {mask: Seen(mask=mask) for mask in (_FULL, *_CAUSAL.values())}


def read(mask: Any, causal: Any, window: Any, bias: Any, query: Tensor, seq_kv: int, output: torch.dtype) -> Seen:
    """What the arguments `mask`, `causal`, `window` and `bias` of a call say together.

    Args:
        query: [batch, heads_q, seq_q, head_dim]
        output: what an additive bias may be, beside float32

    Raises:
        TensorError: they contradict one another, or a tensor does not fit the scores.
        ProblemError: a window or the words of a mask are none.
    """
    shape = band(causal, window)
    if mask is None and bias is None:
        return _PLAIN.get(shape) or Seen(mask=shape)
    table, captures, name = None, (), "bias"
    if isinstance(mask, Tensor):
        if bias is not None:
            raise two_tensors()
        bias, name = mask, "mask"
    elif mask is not None:
        said = _words(mask)
        sparse = _block_sparse(mask, query, seq_kv) if said is None else None
        if shape != _FULL:
            raise contradiction(None if said is None else str(mask), causal, window)
        if sparse is not None:
            said, table, captures = sparse.mask, sparse.table, sparse.captures
        shape = said or _FULL
    if bias is None:
        return Seen(mask=shape, table=table, captures=captures)
    kind, bias, narrow = _bias(name, bias, query, seq_kv, output)
    return Seen(mask=shape, kind=kind, bias=bias, narrow_bias=narrow, table=table, captures=captures)


def band(causal: Any, window: Any) -> Mask:
    """The mask that `causal` and a window (left, right) say together; causal makes the window's right side 0."""
    if not isinstance(causal, bool) and (not isinstance(causal, str) or causal not in _CAUSAL):
        raise TensorError(f"causal must be True, False, bottom-right or top-left, got {causal!r}; correct it")
    if window is None:
        return _CAUSAL[causal] if causal else _FULL
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TensorError(f"window must be two whole numbers (left, right), got {window!r}; -1 is no bound on a side")
    mask = Mask.window(*window, causal=bool(causal))
    if causal == "top-left":
        if tuple(window) != (-1, -1):
            raise TensorError(
                f"windows are aligned bottom-right, got window={tuple(window)} with causal='top-left'; leave one out"
            )
        return _CAUSAL[causal]
    return mask


def _words(mask: Any) -> Mask | None:
    """A mask that needs no tensor; None when it is something else."""
    if isinstance(mask, str):
        mask = Mask.parse(mask)
    if not isinstance(mask, Mask):
        return None
    if mask.sparse:
        raise TensorError(f"a mask of blocks needs its table, got {mask}; build one with autoattn.masks")
    return mask


def two_tensors() -> TensorError:
    """The error of a call with a tensor as mask and another as bias."""
    return TensorError(
        "mask and bias must not both be tensors, got two; make them one with bias.masked_fill(~mask, -inf)"
    )


def contradiction(words: str | None, causal: Any, window: Any) -> TensorError:
    """The error of a call that says what is seen by a mask's words (None: a table) and by causal or window."""
    name, given = ("causal", causal) if causal is not False else ("window", window)
    if words is None:
        return TensorError(
            f"a block table and {name} must not come together, got {name}={given!r}; say it in the mask's function"
        )
    return TensorError(
        f"mask and {name} must not both say which keys a query sees, got mask={words!r} and {name}={given!r}; "
        "give one of them"
    )


def _block_sparse(mask: Any, query: Tensor, seq_kv: int) -> BlockSparse:
    """A block table of ours, or FlexAttention's made into one, that fits the call."""
    from autoattn import masks  # only who gives a table needs it

    flex = sys.modules.get("torch.nn.attention.flex_attention")  # who has a BlockMask has loaded it
    if flex is not None and isinstance(mask, flex.BlockMask):
        mask = masks.from_block_mask(mask)
    if not isinstance(mask, masks.BlockSparse):
        raise TensorError(
            "mask must be words such as causal or window:128,0, a Mask, a tensor, a BlockSparse or a BlockMask, got "
            f"{type(mask).__name__}; convert it first"
        )
    batch, heads, seq_q, _ = query.shape
    masks.check(mask, batch=batch, heads=heads, seq_q=seq_q, seq_kv=seq_kv, device=query.device)
    return mask


def _bias(name: str, bias: Any, query: Tensor, seq_kv: int, output: torch.dtype) -> tuple[Bias, Tensor, Tensor | None]:
    """A bias's kind, and the bias as [batch, heads_q, seq_q, seq_kv], or [batch, heads_q, 1, seq_kv] for keys alone.

    The last is one that is added, with four axes but not expanded.
    """
    check_tensor(name, bias, query.device)
    shape = (*query.shape[:3], seq_kv)
    if bias.dim() > 4 or any(
        size not in (1, whole) for size, whole in zip(reversed(bias.shape), reversed(shape), strict=False)
    ):
        raise TensorError(
            f"{name} must be broadcastable to [batch, heads_q, seq_q, seq_kv] = {shape}, got shape "
            f"{tuple(bias.shape)}; check the axes"
        )
    whole = bias.expand(shape)
    if bias.dtype is torch.bool:
        keys = whole.stride(2) == 0 or shape[2] == 1
        return (Bias.KEYS, whole[:, :, :1], None) if keys else (Bias.BOOLEAN, whole, None)
    if bias.dtype not in (torch.float32, output):
        raise TensorError(
            f"{name} must be bool (True attends), float32 or {output} (added to the scores), got {bias.dtype}; cast it"
        )
    return Bias.ADDITIVE, whole, bias[(None,) * (4 - bias.dim())]
