"""The kind of kernel that a problem needs: all that a kernel's text depends on, and no size.

Calls whose lengths never repeat are of few kinds. Text, its digest and what search rules say of a variant whatever the
sizes are found once for a kind; for new sizes there is arithmetic left.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoattn.core.key_cache import KeyCache
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Op, Precision, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelKind:
    """What one kernel's text serves.

    Batch, heads, lengths, tokens and the widths of a window are numbers of the launch; numerics and determinism choose
    among kernels.
    """

    op: Op
    dtype: DType
    precision: Precision
    head_dim: int
    head_dim_v: int
    mask: Mask  # its structure: a window's bounds are 0 or 1, and a table's density is 0
    modifiers: Modifiers
    packed: bool
    cache: KeyCache | None = None  # the size of its pages is a number of the text

    @property
    def key_dtype(self) -> DType:
        """Of keys and values."""
        return DType.FLOAT8 if self.cache is not None and self.cache.float8 else self.dtype

    @property
    def is_latent(self) -> bool:
        """Whether values are the first elements of keys, in a cache that holds them once."""
        return self.cache is not None and self.cache.latent


def of(problem: Problem) -> KernelKind:
    """The kind of kernel that a problem needs."""
    return KernelKind(
        op=problem.op,
        dtype=problem.dtype,
        precision=problem.precision,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        mask=problem.mask.structure,
        modifiers=problem.modifiers,
        packed=problem.packed,
        cache=problem.cache,
    )


def shares_kernels(problem: Problem, other: Problem) -> bool:
    """Whether one kernel's text serves both problems."""
    return of(problem) == of(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendKind:
    """What the text of a kernel serves that appends keys and values to a cache."""

    dtype: DType  # of new keys and values
    head_dim: int
    head_dim_v: int
    page: int = 0  # keys of a page; 0 is a contiguous cache
    rows: bool = False  # as of KeyCache
    float8: bool = False  # as of KeyCache
    latent: bool = False  # whether values are elements of keys, and are written with them
    rotary_dim: int = 0  # elements of a head that are rotated; 0 is none
    interleaved: bool = False  # pairs are neighbours: (0, 1), (2, 3); else halves of the rotated elements
    tables: DType = DType.FLOAT32  # of cosines and sines
    wide: bool = False  # offsets inside one row of the cache, or a page, can pass 2**31 elements


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeKind:
    """All that the text of a kernel that merges two partial outputs depends on."""

    first: DType  # of the first output, and of the merged one
    second: DType
    head_dim: int  # of a value
    dense: bool  # whether rows lie without gaps and begin at multiples of 16 bytes and of 16 elements
