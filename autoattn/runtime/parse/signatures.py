"""Keyword arguments of the public functions as TypedDicts, for type checkers.

`attention` and `packed_attention` return a tensor, or with `return_lse` a pair: each has an overload for either, and
`explain` and `explain_packed` take the same arguments. The meaning of each argument stands in `functional`;
`tests/runtime/parse/test_signatures.py` compares names and types with the functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from autoattn.core.mask import Mask
    from autoattn.expressions.captures import Traced
    from autoattn.masks import BlockSparse


class PackedArguments(TypedDict, total=False):
    """What `packed_attention` takes beside the tensors, their lengths and `return_lse`."""

    causal: bool | str
    window: tuple[int, int] | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    score_mod: str | Callable[..., Tensor] | Traced | None
    dropout: float
    seed: int | None
    scale: float | None
    precision: str | None
    numerics: str | None
    deterministic: bool
    query_scale: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None


class CacheArguments(TypedDict, total=False):
    """What `cached_attention` takes beside query, cache, lengths and `return_lse`."""

    block_table: Tensor | None
    cache_rows: Tensor | None
    leftpad: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    max_length: int | None
    shared_prefix: int
    causal: bool | str
    window: tuple[int, int] | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    scale: float | None
    splits: int
    split_length: int
    deterministic: bool
    precision: str | None
    numerics: str | None


class Arguments(PackedArguments, total=False):
    """What `attention` takes beside query, key, value and `return_lse`."""

    mask: str | Mask | Tensor | BlockSparse | BlockMask | None
    bias: Tensor | None
    layout: str
