"""Multi-head attention with its projections: a torch.nn.MultiheadAttention whose attention is `autoattn.attention`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from autoattn import functional
from autoattn.errors import ProblemError, SdpaError, TensorError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from autoattn.core.mask import Mask
    from autoattn.masks import BlockSparse

_COPIED = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v")


class MultiheadAttention(torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with the same arguments, parameters, state dict and results.

    A call with need_weights=False runs `autoattn.attention`. With need_weights=True, PyTorch's default, the call is
    PyTorch's, because the weights need the whole matrix of scores in memory.

    The layers of torch.nn (TransformerEncoderLayer, TransformerDecoderLayer) give need_weights=False. While it
    evaluates without gradients, TransformerEncoderLayer has a fast path that reads the weights of this module and does
    not call it: the results are the same, by PyTorch's kernels. `torch.backends.mha.set_fastpath_enabled(False)` makes
    the layer call this module. A module with num_kv_heads, head_dim, causal, mask or window is always called.

    Boolean masks of a call follow torch.nn.MultiheadAttention: True HIDES. (In `autoattn.attention` and
    F.scaled_dot_product_attention True keeps.)

    Args:
        embed_dim: features of query and output.
        num_heads: any number of query heads.
        dropout: share of the weights that is dropped while training.
        bias: whether the four projections add one.
        add_bias_kv: whether a learned key and a learned value follow those of each sequence.
        add_zero_attn: whether a key and a value of zeros follow those of each sequence.
        kdim, vdim: features of key and value; embed_dim when None.
        batch_first: tensors are [batch, seq, features] when True, [seq, batch, features] when False.
        device, dtype: of the weights.
        num_kv_heads: key heads, a divisor of num_heads (grouped-query attention); num_heads when None.
        head_dim: features of a head; embed_dim / num_heads when None.
        causal: True or "bottom-right", "top-left" or False, in every call; see `autoattn.attention`.
        mask: words, a Mask, a BlockSparse or a BlockMask, in every call.
        window: (left, right), in every call.
        numerics: "any", "online" or None, in every call with need_weights=False; see `autoattn.attention`.

    A module whose head_dim is not embed_dim / num_heads, or with fewer key heads, has q_proj_weight
    [num_heads * head_dim, embed_dim], k_proj_weight [num_kv_heads * head_dim, kdim] and v_proj_weight
    [num_kv_heads * head_dim, vdim] in place of in_proj_weight.

    Raises:
        ProblemError: the numbers do not fit one another.
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
        head_dim = _head_dim(embed_dim, num_heads, kv_heads, head_dim)
        own_shapes = kv_heads != num_heads or head_dim * num_heads != embed_dim
        own_mask = bool(causal) or mask is not None or window is not None
        if (add_bias_kv or add_zero_attn) and (own_shapes or own_mask):
            raise ProblemError(
                "add_bias_kv and add_zero_attn must be False in a module with num_kv_heads, head_dim, causal, mask or "
                "window, got True; leave one of them out"
            )
        super().__init__(
            embed_dim, 1 if own_shapes else num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim,
            batch_first, "meta" if own_shapes else device, dtype,
        )  # fmt: skip
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, kv_heads, head_dim
        self.causal, self.mask, self.window, self.numerics = causal, mask, window, numerics
        if own_shapes:
            self._separate_projections(bias, device, dtype)

    def _separate_projections(self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Puts projections for num_kv_heads and head_dim in the place of PyTorch's."""
        width, width_kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self._qkv_same_embed_dim = False
        self.in_proj_weight = None
        self.q_proj_weight = parameter(width, self.embed_dim)
        self.k_proj_weight = parameter(width_kv, self.kdim)
        self.v_proj_weight = parameter(width_kv, self.vdim)
        if bias:
            self.in_proj_bias = parameter(width + 2 * width_kv)
        self.out_proj = NonDynamicallyQuantizableLinear(width, self.embed_dim, bias=bias, device=device, dtype=dtype)
        self._reset_parameters()

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """Whether PyTorch's fast paths may compute with in_proj_weight in place of a call of this module."""
        return bool(self.__dict__.get("_packed_weight", True)) and not self._has_own_mask()

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, same: bool) -> None:
        self._packed_weight = same

    @classmethod
    def from_torch(cls, module: torch.nn.MultiheadAttention) -> MultiheadAttention:
        """The same module with copies of its weights."""
        if isinstance(module, MultiheadAttention):
            return copy.deepcopy(module)
        weight = module.out_proj.weight
        converted = cls(
            module.embed_dim, module.num_heads, module.dropout, module.in_proj_bias is not None,
            module.bias_k is not None, module.add_zero_attn, module.kdim, module.vdim, module.batch_first,
            weight.device, weight.dtype,
        )  # fmt: skip
        pairs = [(getattr(converted, name), getattr(module, name)) for name in _COPIED]
        pairs += [(converted.out_proj.weight, weight), (converted.out_proj.bias, module.out_proj.bias)]
        with torch.no_grad():
            for parameter, given in pairs:
                if given is not None:
                    parameter.copy_(given)
                    parameter.requires_grad_(given.requires_grad)
        converted.train(module.training)
        return converted

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
        """The output, and the weights or None.

        Args:
            query: [batch, seq_q, embed_dim] when batch_first, else [seq_q, batch, embed_dim]; or [seq_q, embed_dim].
            key: the same axes with seq_kv and kdim; the query when None.
            value: the same axes with seq_kv and vdim; the key when None.
            key_padding_mask: [batch, seq_kv] or, without a batch, [seq_kv]; bool: True HIDES the key from all queries;
                a floating mask is added.
            need_weights: whether the weights are wanted; False runs `autoattn.attention`.
            attn_mask: [seq_q, seq_kv], [batch * num_heads, seq_q, seq_kv] or [batch, 1 or num_heads, seq_q, seq_kv];
                bool: True HIDES the pair; a floating mask is added to the scores.
            average_attn_weights: whether the weights are the mean over the heads.
            is_causal: says that attn_mask, which must be there, hides keys behind the query's own index. As in
                PyTorch, attn_mask is then not read, unless there is a key_padding_mask or need_weights.

        Returns:
            The output has the query's axes. The weights are [batch, seq_q, seq_kv], and
            [batch, num_heads, seq_q, seq_kv] unless averaged, without the batch where the query has none; they are
            those after dropout. None where need_weights is False.

        A query that sees no key gives what out_proj makes of 0; where PyTorch computes the weights, it gives NaN.

        Raises:
            TensorError: the tensors do not make one attention call.
        """
        key = query if key is None else key
        value = key if value is None else value
        if is_causal and attn_mask is None:
            raise SdpaError("is_causal says that attn_mask is causal, so that it needs one, got None; give attn_mask")
        if self._is_pytorchs((query, key, value), attn_mask, need_weights):
            pytorchs: tuple[Tensor, Tensor | None] = super().forward(
                query, key, value, key_padding_mask=key_padding_mask, need_weights=need_weights, attn_mask=attn_mask,
                average_attn_weights=average_attn_weights, is_causal=is_causal,
            )  # fmt: skip
            return pytorchs
        _check_axes(query, key, value)
        is_hint = is_causal and not need_weights and key_padding_mask is None and not self._has_own_mask()
        heads, bias = self._operands(query, key, value, None if is_hint else attn_mask, key_padding_mask)
        weights = None
        if need_weights:
            output, weights = self._with_weights(*heads, bias)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if query.dim() == 3 else weights[0]
        else:
            output = self._attend(*heads, bias, "top-left" if is_hint else self.causal)
        return self.out_proj(self._caller_axes(output.flatten(2), query)), weights

    def extra_repr(self) -> str:
        """The facts that the projections do not show."""
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        numerics = "" if self.numerics is None else f", numerics={self.numerics!r}"
        own = f"causal={self.causal!r}, window={self.window!r}{numerics}"
        return f"{heads}, dropout={self.dropout}, batch_first={self.batch_first}, {own}"

    # --- Which calls are PyTorch's ------------------------------------------------------------------------------------

    def _has_own_mask(self) -> bool:
        own = self.__dict__  # PyTorch's constructor asks before they are there
        return bool(own.get("causal")) or own.get("mask") is not None or own.get("window") is not None

    def _is_pytorchs(self, tensors: tuple[Tensor, ...], attn_mask: Tensor | None, need_weights: bool) -> bool:
        """Whether PyTorch's module can compute the call and `autoattn.attention` cannot."""
        full_heads = self.num_kv_heads == self.num_heads and self.head_dim * self.num_heads == self.embed_dim
        if not full_heads or self._has_own_mask() or not all(isinstance(tensor, Tensor) for tensor in tensors):
            return False
        if any(tensor.is_nested for tensor in tensors):
            return True
        if need_weights:
            return attn_mask is None or attn_mask.dim() != 4
        return bool(self.training and self.dropout == 1.0)

    # --- Operands of `autoattn.attention` -----------------------------------------------------------------------------

    def _operands(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, padding: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Query, key and value as [batch, seq, heads, head_dim], and the two masks as one bias."""
        q, k, v = self._project(query, key, value)
        sizes = q.shape[0], q.shape[1], k.shape[1]
        padding = padding[None] if isinstance(padding, Tensor) and query.dim() == 2 else padding
        masks = [self._pair_mask(attn_mask, *sizes), _key_mask(padding, sizes[0], sizes[2])]
        added = []
        if self.bias_k is not None:
            added.append([bias.view(1, 1, self.num_heads, -1).expand(sizes[0], -1, -1, -1) for bias in self._biases()])
        if self.add_zero_attn:
            added.append([torch.zeros_like(heads[:, :1]) for heads in (k, v)])
        if added:
            k, v = (torch.cat([heads, *more], 1) for heads, more in zip((k, v), zip(*added, strict=True), strict=True))
            masks = [None if mask is None else torch.nn.functional.pad(mask, (0, len(added))) for mask in masks]
        return (q, k, v), _bias([mask for mask in masks if mask is not None], q.dtype)

    def _biases(self) -> tuple[Tensor, Tensor]:
        assert self.bias_k is not None
        assert self.bias_v is not None
        return self.bias_k, self.bias_v

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """[batch, seq, heads, head_dim] of query, key and value."""
        linear = torch.nn.functional.linear
        if self.in_proj_weight is not None and query is key and key is value:
            projected = linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            kv_width = self.num_kv_heads * self.head_dim
            widths = [self.num_heads * self.head_dim, kv_width, kv_width]
            if self.in_proj_weight is not None:
                weights = self.in_proj_weight.split(widths)
            else:
                weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.split(widths)
            projected = [linear(*operands) for operands in zip((query, key, value), weights, biases, strict=True)]
        heads = [tensor.unflatten(-1, (-1, self.head_dim)) for tensor in projected]
        if query.dim() == 2:
            return [tensor[None] for tensor in heads]
        return heads if self.batch_first else [tensor.transpose(0, 1) for tensor in heads]

    def _caller_axes(self, output: Tensor, query: Tensor) -> Tensor:
        """[batch, seq, features] -> the axes of the query."""
        if query.dim() == 2:
            return output[0]
        return output if self.batch_first else output.transpose(0, 1)

    def _pair_mask(self, mask: Tensor | None, batch: int, seq_q: int, seq_kv: int) -> Tensor | None:
        """[1 or batch, 1 or num_heads, seq_q, seq_kv]"""
        if mask is None:
            return None
        heads, pairs = self.num_heads, (seq_q, seq_kv)
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

    # --- Attention ----------------------------------------------------------------------------------------------------

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool | str) -> Tensor:
        """[batch, seq_q, num_heads, the value's head dim]"""
        output = functional.attention(
            query,
            key,
            value,
            mask=self.mask,
            causal=causal,
            window=self.window,
            bias=bias,
            dropout=self.dropout if self.training else 0.0,
            layout="bshd",
            numerics=self.numerics,
        )
        assert isinstance(output, Tensor)
        return output

    def _with_weights(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """[batch, seq_q, num_heads, head_dim] and the weights, [batch, num_heads, seq_q, seq_kv].

        The weights are the attention whose values are the rows of the identity, so that all masks act on them.
        """
        batch, seq_kv, kv_heads = key.shape[:3]
        rows = torch.eye(seq_kv, dtype=query.dtype, device=query.device)[None, :, None]
        rows = rows.expand(batch, seq_kv, kv_heads, seq_kv)
        weights = self._attend(query, key, rows, bias, self.causal).transpose(1, 2)
        values = value.transpose(1, 2).repeat_interleave(self.num_heads // kv_heads, 1)
        return (weights @ values).transpose(1, 2), weights


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


def _check_axes(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TensorError(f"{name} must be a tensor, got {type(tensor).__name__}; give one")
        if tensor.is_nested:
            raise TensorError(
                f"{name} must be no nested tensor where the module has its own mask or head sizes, got one; pad it and "
                "give key_padding_mask"
            )
        if tensor.dim() not in (2, 3) or tensor.dim() != query.dim():
            raise TensorError(
                f"{name} must have three axes with a batch and two without, as the query has, got "
                f"{tuple(tensor.shape)}; check the axes"
            )
    if key.shape[:-1] != value.shape[:-1]:
        raise TensorError(
            f"value must have the batch and the tokens of key, {tuple(key.shape[:-1])}, got "
            f"{tuple(value.shape[:-1])}; check the axes"
        )


def _key_mask(mask: Tensor | None, batch: int, seq_kv: int) -> Tensor | None:
    """[batch, 1, 1, seq_kv]"""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != (batch, seq_kv):
        came = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise TensorError(f"key_padding_mask must be [batch, seq_kv] = {(batch, seq_kv)}, got {came}; correct it")
    return mask[:, None, None]


def _bias(masks: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """What `autoattn.attention` takes: booleans where True keeps, or numbers to add; of the masks together."""
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
