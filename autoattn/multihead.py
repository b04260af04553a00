"""torch.nn.MultiheadAttention with its scores and weights left to `autoattn.attention`, for models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import Parameter

from autoattn import functional
from autoattn.errors import ProblemError, TensorError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from autoattn.mask import Mask
    from autoattn.masks import BlockSparse


class MultiheadAttention(torch.nn.MultiheadAttention):
    """A torch.nn.MultiheadAttention: arguments, parameters, state dict, masks and what a call returns are PyTorch's.

    Boolean masks of a call follow PyTorch's module: True HIDES. (In `autoattn.attention` and
    F.scaled_dot_product_attention True keeps.) A query that sees no key gives what out_proj makes of 0, where
    PyTorch's gives NaN.

    Calls with need_weights=False run `autoattn.attention`. With need_weights=True, the default as in PyTorch's, the
    weights must be in memory, so that PyTorch's own code computes them. In eval mode, PyTorch's TransformerEncoderLayer
    takes the parameters and computes the whole layer by itself (its fast path), except for modules with what is
    keyword-only here.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as of
            torch.nn.MultiheadAttention.
        num_kv_heads: key heads, a divisor of num_heads (grouped-query attention); num_heads when None.
        head_dim: features of a head; embed_dim / num_heads when None.
        causal: True or "bottom-right", "top-left" or False, in every call; see `autoattn.attention`.
        mask: words, a Mask, a BlockSparse or a BlockMask, in every call.
        window: (left, right), in every call.
        numerics: "any", "online" or None, in every call; see `autoattn.attention`.

    Raises:
        ProblemError: the numbers do not fit one another, or add_bias_kv or add_zero_attn meets what is keyword-only.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool | str = False,
        mask: str | Mask | BlockSparse | BlockMask | None = None,
        window: tuple[int, int] | None = None,
        numerics: str | None = None,
    ) -> None:
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        width = _head_dim(embed_dim, num_heads, kv_heads, head_dim)
        of_its_own = (kv_heads, width * num_heads) != (num_heads, embed_dim)
        masked = bool(causal) or mask is not None or window is not None  # in every call
        if (of_its_own or masked) and (add_bias_kv or add_zero_attn):
            raise ProblemError(
                "add_bias_kv and add_zero_attn must be False beside num_kv_heads, head_dim, causal, mask and window, "
                "got one that is True; leave it out"
            )
        # PyTorch draws the parameters of a module like its own; the others are replaced below.
        super().__init__(
            embed_dim if not of_its_own else num_heads, num_heads, dropout, bias, add_bias_kv, add_zero_attn,
            kdim if not of_its_own else None, vdim if not of_its_own else None, batch_first, device, dtype,
        )  # fmt: skip
        self.num_kv_heads, self.head_dim = kv_heads, width
        self.causal, self.mask, self.window, self.numerics = causal, mask, window, numerics
        self._of_its_own = of_its_own
        if of_its_own:
            self._make_parameters(embed_dim, kdim or embed_dim, vdim or embed_dim, bias, device, dtype)
        if masked or of_its_own:
            self._qkv_same_embed_dim = False  # by which TransformerEncoderLayer leaves the call to `forward`

    def _make_parameters(
        self, embed_dim: int, kdim: int, vdim: int, bias: bool, device: Any, dtype: torch.dtype | None
    ) -> None:
        """Parameters for other numbers of heads and features, under PyTorch's names for projections that differ."""
        self.embed_dim, self.kdim, self.vdim = embed_dim, kdim, vdim
        widths = [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        self.register_parameter("in_proj_weight", None)
        for name, rows, columns in zip("qkv", widths, (embed_dim, kdim, vdim), strict=True):
            weight = Parameter(torch.empty(rows, columns, device=device, dtype=dtype))
            torch.nn.init.xavier_uniform_(weight)
            setattr(self, f"{name}_proj_weight", weight)
        if bias:
            self.in_proj_bias = Parameter(torch.zeros(sum(widths), device=device, dtype=dtype))
        self.out_proj = NonDynamicallyQuantizableLinear(widths[0], embed_dim, bias=bias, device=device, dtype=dtype)
        if bias:
            torch.nn.init.zeros_(self.out_proj.bias)

    @classmethod
    def from_torch(cls, module: torch.nn.MultiheadAttention) -> MultiheadAttention:
        """The same module with copies of its parameters; what is batch-first there is so here."""
        made = cls(
            module.embed_dim, module.num_heads, module.dropout, module.in_proj_bias is not None,
            module.bias_k is not None, module.add_zero_attn, module.kdim, module.vdim, module.batch_first,
            module.out_proj.weight.device, module.out_proj.weight.dtype,
        )  # fmt: skip
        made.load_state_dict(module.state_dict())
        made.train(module.training)
        return made

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights), as of torch.nn.MultiheadAttention; weights are None where need_weights is False.

        Args:
            query: [seq_q, batch, embed_dim], [batch, seq_q, embed_dim] if batch_first, or [seq_q, embed_dim].
            key: likewise with kdim; the query when None.
            value: likewise with vdim; the key when None.
            key_padding_mask: [batch, seq_kv] or [seq_kv]; bool: True HIDES the key; a floating mask is added.
            attn_mask: [seq_q, seq_kv] or [batch * num_heads, seq_q, seq_kv]; bool: True HIDES; floating: added.
            is_causal: that attn_mask hides keys behind the query's own index, which then need not be read.
            average_attn_weights: whether weights are [batch, seq_q, seq_kv], or of each head.

        Raises:
            TensorError: the tensors do not make one attention call.
            RuntimeError, AssertionError: PyTorch's own, of calls that it computes.
        """
        key = query if key is None else key
        value = key if value is None else value
        masked = bool(self.causal) or self.mask is not None or self.window is not None
        mine = masked or self._of_its_own
        if not mine and (need_weights or not _is_plain(query, key, value, attn_mask, key_padding_mask)):
            return self._by_pytorch(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and masked:
            raise TensorError("is_causal must be False where the module has a mask of its own, got True; leave it out")
        if is_causal and attn_mask is None and self._of_its_own:
            raise TensorError("is_causal must come with the attn_mask that it speaks of, got none; pass it")
        if is_causal and not mine and (attn_mask is None or self.bias_k is not None or self.add_zero_attn):
            return self._by_pytorch(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        batched = query.dim() == 3
        three = [self._batch_first(tensor, batched) for tensor in (query, key, value)]
        self._check(three)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask[None]
        hinted = is_causal and key_padding_mask is None
        output, weights = self._attend(three, None if hinted else attn_mask, key_padding_mask, hinted, need_weights)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def _batch_first(self, tensor: Tensor, batched: bool) -> Tensor:
        """[batch, seq, features]"""
        if not batched:
            return tensor[None]
        return tensor if self.batch_first or tensor.dim() != 3 else tensor.transpose(0, 1)

    def _by_pytorch(self, *given: Any) -> tuple[Tensor, Tensor | None]:
        query, key, value, key_padding_mask, need_weights, attn_mask, average, is_causal = given
        found: tuple[Tensor, Tensor | None] = super().forward(
            query, key, value, key_padding_mask=key_padding_mask, need_weights=need_weights, attn_mask=attn_mask,
            average_attn_weights=average, is_causal=is_causal,
        )  # fmt: skip
        return found

    def _attend(
        self, three: list[Tensor], attn_mask: Tensor | None, padding: Tensor | None, hinted: bool, weighed: bool
    ) -> tuple[Tensor, Tensor | None]:
        """[batch, seq_q, embed_dim] and, when wanted, the weights [batch, num_heads, seq_q, seq_kv]."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        query, key, value = (
            tensor.unflatten(2, (count, self.head_dim))
            for tensor, count in zip(self._projected(three), heads, strict=True)
        )
        bias = _bias(self._attn_mask(attn_mask, query, key), _padding(padding, key), query.dtype)
        key, value, bias = self._with_more_keys(key, value, bias)
        if weighed:  # each key's value is also a unit vector of its own, so that the output holds the weights
            units = torch.eye(key.shape[1], device=key.device, dtype=key.dtype)[None, :, None]
            value = torch.cat([value, units.expand(*value.shape[:3], -1)], 3)
        output = functional.attention(
            query, key, value, mask=self.mask, causal="top-left" if hinted else self.causal, window=self.window,
            bias=bias, dropout=self.dropout if self.training else 0.0, layout="bshd", numerics=self.numerics,
        )  # fmt: skip
        mixed = output[..., : self.head_dim].flatten(2)
        projected: Tensor = self.out_proj(mixed)
        return projected, output[..., self.head_dim :].transpose(1, 2) if weighed else None

    def _projected(self, three: list[Tensor]) -> list[Tensor]:
        if self.in_proj_weight is not None:
            weights = list(self.in_proj_weight.chunk(3))
        else:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        biases: list[Tensor | None] = [None] * 3
        if self.in_proj_bias is not None:
            biases = list(self.in_proj_bias.split([len(weight) for weight in weights]))
        return [
            torch.nn.functional.linear(tensor, weight, bias)
            for tensor, weight, bias in zip(three, weights, biases, strict=True)
        ]

    def _with_more_keys(self, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values, with the learned one and the zeros that PyTorch's module may add; no mask hides these."""
        one = (key.shape[0], 1, *key.shape[2:])
        more: list[tuple[Tensor, Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            more.append((self.bias_k.reshape(one[1:]).expand(one), self.bias_v.reshape(one[1:]).expand(one)))
        if self.add_zero_attn:
            more.append((key.new_zeros(one), value.new_zeros(one)))
        for more_key, more_value in more:
            key, value = torch.cat([key, more_key], 1), torch.cat([value, more_value], 1)
            if bias is not None:
                seen = torch.ones_like if bias.dtype is torch.bool else torch.zeros_like
                bias = torch.cat([bias, seen(bias[..., :1])], -1)
        return key, value, bias

    def extra_repr(self) -> str:
        """The facts that the projections do not show."""
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        numerics = "" if self.numerics is None else f", numerics={self.numerics!r}"
        return f"{heads}, dropout={self.dropout}, causal={self.causal!r}, window={self.window!r}{numerics}"

    def _check(self, three: list[Tensor]) -> None:
        for name, tensor in zip(("query", "key", "value"), three, strict=True):
            if tensor.dim() != 3:
                raise TensorError(
                    f"{name} must be [batch, seq, features] or [seq, features] as the query is, got another number of "
                    "axes; correct it"
                )

    def _attn_mask(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """[1 or batch, 1 or num_heads, seq_q, seq_kv]"""
        if mask is None:
            return None
        batch, heads = query.shape[0], self.num_heads
        pairs = query.shape[1], key.shape[1]
        shapes = {(*pairs,), (batch * heads, *pairs), (batch, 1, *pairs), (batch, heads, *pairs), (1, 1, *pairs)}
        if not isinstance(mask, Tensor) or tuple(mask.shape) not in shapes:
            came = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise TensorError(
                f"attn_mask must be {pairs}, {(batch * heads, *pairs)} or [batch, 1 or heads, seq_q, seq_kv], got "
                f"{came}; expand it"
            )
        if mask.dim() == 3:
            return mask.unflatten(0, (batch, heads))
        return mask[None, None] if mask.dim() == 2 else mask


def _is_plain(*tensors: Any) -> bool:
    """Whether all are ordinary tensors: nested ones and those of torch.fx are left to PyTorch."""
    return all(
        tensor is None or (isinstance(tensor, Tensor) and not tensor.is_nested and tensor.dim() > 0)
        for tensor in tensors
    )


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
