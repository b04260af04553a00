"""The tensors of an append: new keys and values, the cache that takes them, and the tables of a rotation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from autoattn.tensors.operands import CachedKeys


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rotation:
    """A rotary embedding of new keys and of queries."""

    query: Tensor  # [batch, heads_q, seq_q, head_dim] view
    cos: Tensor  # [positions, rotary_dim / 2], the last axis contiguous
    sin: Tensor  # the same
    interleaved: bool  # whether pairs are neighbours, or halves of the rotated elements
    moving: bool  # whether query i stands i behind the first new key; else all stand there

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return 2 * int(self.cos.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Append:
    """New keys and values, and where they go: behind the keys that the cache has of each sequence."""

    new_key: Tensor  # [batch, heads_kv, seq_new, head_dim] view
    new_value: Tensor  # [batch, heads_kv, seq_new, head_dim_v] view
    key: Tensor  # the cache's, as of Operands
    value: Tensor
    cache: CachedKeys  # its lengths are those before the append
    key_scale: Tensor | None = None  # [batch, heads_kv] float32, expanded: by which new keys are divided, in float8
    value_scale: Tensor | None = None  # the same of new values
    rotation: Rotation | None = None
    latent: bool = False  # whether values are the first elements of keys, in the cache and among what is new
