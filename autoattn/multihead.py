"""Multi-head attention with its projections, for models; a drop-in for batch-first torch.nn.MultiheadAttention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autoattn import functional
from autoattn.errors import ProblemError, TensorError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from autoattn.mask import Mask
    from autoattn.masks import BlockSparse


class MultiheadAttention(torch.nn.Module):
    """Projections of query, key and value, attention, and a projection of what it gives.

    Boolean masks of a call follow torch.nn.MultiheadAttention: True HIDES. (In `autoattn.attention` and
    F.scaled_dot_product_attention True keeps.)

    Args:
        embed_dim: features of query and output.
        num_heads: any number of query heads.
        num_kv_heads: key heads, a divisor of num_heads (grouped-query attention); num_heads when None.
        head_dim: features of a head; embed_dim / num_heads when None.
        bias: whether the four projections add one.
        kdim, vdim: features of key and value; embed_dim when None.
        dropout: share of the weights that is dropped while training.
        causal: True or "bottom-right", "top-left" or False, in every call; see `autoattn.attention`.
        mask: words, a Mask, a BlockSparse or a BlockMask, in every call.
        window: (left, right), in every call.
        numerics: "any", "online" or None, in every call; see `autoattn.attention`.
        device, dtype: of the weights.

    Raises:
        ProblemError: the numbers do not fit one another.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        dropout: float = 0.0,
        causal: bool | str = False,
        mask: str | Mask | BlockSparse | BlockMask | None = None,
        window: tuple[int, int] | None = None,
        numerics: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = _head_dim(embed_dim, num_heads, self.num_kv_heads, head_dim)
        self.dropout, self.causal, self.mask, self.window = dropout, causal, mask, window
        self.numerics = numerics
        width, width_kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = torch.nn.Linear(embed_dim, width, bias=bias, device=device, dtype=dtype)
        self.k_proj = torch.nn.Linear(kdim or embed_dim, width_kv, bias=bias, device=device, dtype=dtype)
        self.v_proj = torch.nn.Linear(vdim or embed_dim, width_kv, bias=bias, device=device, dtype=dtype)
        self.out_proj = torch.nn.Linear(width, embed_dim, bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_torch(cls, module: torch.nn.MultiheadAttention) -> MultiheadAttention:
        """The same module with copies of its weights; inputs and outputs are batch-first, whatever the module's were.

        Raises:
            ProblemError: it has add_bias_kv or add_zero_attn, which this one has not.
        """
        if module.bias_k is not None or module.add_zero_attn:
            raise ProblemError(
                "a torch.nn.MultiheadAttention must have neither add_bias_kv nor add_zero_attn, got one that has; use "
                "it as it is"
            )
        weight = module.out_proj.weight
        made = cls(
            module.embed_dim, module.num_heads, bias=module.in_proj_bias is not None, kdim=module.kdim,
            vdim=module.vdim, dropout=module.dropout, device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        projections = (made.q_proj, made.k_proj, made.v_proj)
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        with torch.no_grad():
            for projection, given in zip(projections, weights, strict=True):
                projection.weight.copy_(given)
            made.out_proj.weight.copy_(weight)
            if module.in_proj_bias is not None:
                for projection, given in zip(projections, module.in_proj_bias.chunk(3), strict=True):
                    projection.bias.copy_(given)
                made.out_proj.bias.copy_(module.out_proj.bias)
        made.train(module.training)
        return made

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
    ) -> Tensor:
        """[batch, seq_q, embed_dim] -> [batch, seq_q, embed_dim].

        Args:
            query: [batch, seq_q, embed_dim]
            key: [batch, seq_kv, kdim]; the query when None.
            value: [batch, seq_kv, vdim]; the key when None.
            key_padding_mask: [batch, seq_kv]; bool: True HIDES the key from all queries; a floating mask is added.
            attn_mask: [seq_q, seq_kv], [batch * num_heads, seq_q, seq_kv] or [batch, 1 or num_heads, seq_q, seq_kv];
                bool: True HIDES the pair; a floating mask is added to the scores.
            is_causal: hide keys behind the query's own index (top-left), where the module itself has no mask.
            need_weights: must be False: the weights are never in memory.

        A query that sees no key gives what out_proj makes of 0 (torch.nn.MultiheadAttention: NaN).

        Raises:
            TensorError: the tensors do not make one attention call, or weights are wanted.
        """
        key = query if key is None else key
        value = key if value is None else value
        self._check((query, key, value), is_causal, need_weights)
        bias = _bias(self._attn_mask(attn_mask, query, key), _padding(key_padding_mask, key), query.dtype)
        output = functional.attention(
            self.q_proj(query).unflatten(2, (self.num_heads, self.head_dim)),
            self.k_proj(key).unflatten(2, (self.num_kv_heads, self.head_dim)),
            self.v_proj(value).unflatten(2, (self.num_kv_heads, self.head_dim)),
            mask=self.mask,
            causal="top-left" if is_causal else self.causal,
            window=self.window,
            bias=bias,
            dropout=self.dropout if self.training else 0.0,
            layout="bshd",
            numerics=self.numerics,
        )
        assert isinstance(output, Tensor)
        projected: Tensor = self.out_proj(output.flatten(2))
        return projected

    def extra_repr(self) -> str:
        """The facts that the projections do not show."""
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        numerics = "" if self.numerics is None else f", numerics={self.numerics!r}"
        return f"{heads}, dropout={self.dropout}, causal={self.causal!r}, window={self.window!r}{numerics}"

    def _check(self, tensors: tuple[Tensor, Tensor, Tensor], is_causal: bool, need_weights: bool) -> None:
        if need_weights:
            raise TensorError(
                "need_weights must be False, because the weights are never in memory, got True; use "
                "torch.nn.MultiheadAttention where they are wanted"
            )
        if is_causal and (self.causal or self.mask is not None or self.window is not None):
            raise TensorError("is_causal must be False where the module has a mask of its own, got True; leave it out")
        for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
            if not isinstance(tensor, Tensor) or tensor.dim() != 3:
                found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TensorError(f"{name} must be a [batch, seq, features] tensor, got {found}; add a batch axis")

    def _attn_mask(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """[1 or batch, 1 or num_heads, seq_q, seq_kv]"""
        if mask is None:
            return None
        batch, heads = query.shape[0], self.num_heads
        pairs = query.shape[1], key.shape[1]
        shapes = {(*pairs,), (batch * heads, *pairs), (batch, 1, *pairs), (batch, heads, *pairs), (1, 1, *pairs)}
        if not isinstance(mask, Tensor) or tuple(mask.shape) not in shapes:
            found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise TensorError(
                f"attn_mask must be {pairs}, {(batch * heads, *pairs)} or [batch, 1 or heads, seq_q, seq_kv], got "
                f"{found}; expand it"
            )
        if mask.dim() == 3:
            return mask.unflatten(0, (batch, heads))
        return mask[None, None] if mask.dim() == 2 else mask


def _head_dim(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> int:
    numbers = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name, number in (numbers | ({} if head_dim is None else {"head_dim": head_dim})).items():
        if type(number) is not int or number < 1:
            raise ProblemError(f"{name} must be a whole number from 1, got {number!r}; correct it")
    if num_heads % num_kv_heads:
        raise ProblemError(f"num_kv_heads must divide num_heads {num_heads}, got {num_kv_heads}; choose another")
    if head_dim is None and embed_dim % num_heads:
        raise ProblemError(f"num_heads must divide embed_dim {embed_dim}, got {num_heads}; give head_dim")
    return embed_dim // num_heads if head_dim is None else head_dim


def _padding(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """[batch, 1, 1, seq_kv]"""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != key.shape[:2]:
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise TensorError(f"key_padding_mask must be [batch, seq_kv] = {tuple(key.shape[:2])}, got {found}; correct it")
    return mask[:, None, None]


def _bias(attn_mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What `autoattn.attention` takes: booleans where True keeps, or numbers to add; of the two masks together."""
    masks = [mask for mask in (attn_mask, padding) if mask is not None]
    if all(mask.dtype is torch.bool for mask in masks):
        kept = [~mask for mask in masks]
        return None if not kept else kept[0] if len(kept) == 1 else kept[0] & kept[1]
    for mask in masks:
        if mask.dtype is not torch.bool and not mask.is_floating_point():
            raise TensorError(f"masks must be bool (True hides) or floating (added), got {mask.dtype}; cast them")
    added = [
        torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
        if mask.dtype is torch.bool
        else mask.to(dtype)
        for mask in masks
    ]
    return added[0] if len(added) == 1 else added[0] + added[1]
