"""Kernels for PyTorch's FlashAttention operators, by `torch.nn.attention.register_flash_attention_impl`.

Four operators of aten stand behind `F.scaled_dot_product_attention` under SDPBackend.FLASH_ATTENTION, behind
`torch.nn.attention.varlen.varlen_attn`, and behind exported programs that hold them. Each is replaced on one dispatch
key. A call that no kernel of autoattn takes, or is believed slower with one, runs the kernel that was there before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoattn.core.problem import Layout
from autoattn.runtime.torch_op import attention_op_backward as attention_op_backward  # registers the backward pass
from autoattn.runtime.torch_op import attention_schema
from autoattn.runtime.torch_op.kernel_choices import KernelChoices

NAME = "autoattn"
_LEARNS = [True, True, True] + [False] * (len(attention_schema.LEARNING) - 3)


def register() -> str:
    """Adds autoattn to PyTorch's registry of FlashAttention implementations; nothing changes before it is activated.

    `torch.nn.attention.activate_flash_attention_impl("autoattn")` activates it for the process, and
    `restore_flash_attention_impl()` undoes that. After tuning in the same process, activate it again.

    Returns:
        The name, "autoattn".
    """
    from torch.nn.attention import register_flash_attention_impl

    register_flash_attention_impl(NAME, register_fn=activate)
    return NAME


def activate(dispatch_key: str = "CUDA") -> FlashKernels:
    """What PyTorch calls on activation; the handle's `remove` brings the kernels before back."""
    return FlashKernels(dispatch_key)


class FlashKernels:
    """Kernels of four operators, as long as `remove` was not called.

    Attributes:
        dispatch_key: "CUDA"; tests use "CPU".
    """

    def __init__(self, dispatch_key: str) -> None:
        self.dispatch_key = dispatch_key
        self._choices = KernelChoices()
        kernels: dict[str, Callable[..., Any]] = {
            "_scaled_dot_product_flash_attention": self._sdpa,
            "_scaled_dot_product_flash_attention_backward": self._sdpa_backward,
            "_flash_attention_forward": self._flash,
            "_flash_attention_backward": self._flash_backward,
        }
        self._before = {name: torch.library.get_kernel(f"aten::{name}", dispatch_key) for name in kernels}
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for name, kernel in kernels.items():
            self._library.impl(name, kernel, dispatch_key, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        """Brings back the kernels that were there before."""
        self._library = None  # PyTorch drops what a library registered together with it

    def _forward(self, tensors: tuple[Any, ...], words: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """Output and LSE; None where the kernel before is to run."""
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors[:3])
        words = {**words, ("keep_lse" if learns else "return_lse"): True}
        if not self._choices.takes(tensors, words, learns=learns):
            return None
        output, lse = torch.ops.autoattn.attention.default(*tensors, **words)
        return output, lse

    def _backward(
        self, pull: Tensor, output: Tensor, lse: Tensor, tensors: tuple[Any, ...], words: dict[str, Any]
    ) -> list[Tensor] | None:
        """Gradients of query, key and value; None where the kernel before is to run."""
        words = {**words, "keep_lse": True}
        if not self._choices.takes(tensors, words, learns=True):
            return None
        gradients: list[Tensor] = torch.ops.autoattn.attention_backward.default(
            pull, None, output, lse, *tensors, learns=_LEARNS, **words
        )
        return gradients

    def _sdpa(
        self, keys: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
        return_debug_mask: bool = False, **others: Any,
    ) -> Any:  # fmt: skip
        """aten::_scaled_dot_product_flash_attention; [batch, heads, seq, head_dim]."""
        answer = None
        if dropout_p == 0.0 and not return_debug_mask:
            answer = self._forward((query, key, value), dense_words(Layout.BHSD, is_causal, others.get("scale")))
        if answer is None:
            return self._run_before(
                "_scaled_dot_product_flash_attention", keys, query, key, value, dropout_p, is_causal,
                return_debug_mask, **others,
            )  # fmt: skip
        output, lse = answer
        seed, offset, debug_mask = unused_of(query)
        return output, lse, None, None, query.shape[2], key.shape[2], seed, offset, debug_mask

    def _sdpa_backward(
        self, keys: Any, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *rest: Any,
        **others: Any,
    ) -> Any:  # fmt: skip
        """aten::_scaled_dot_product_flash_attention_backward"""
        gradients = None
        if dropout_p == 0.0:
            words = dense_words(Layout.BHSD, is_causal, others.get("scale"))
            gradients = self._backward(grad_out, out, logsumexp, (query, key, value), words)
        if gradients is None:
            return self._run_before(
                "_scaled_dot_product_flash_attention_backward", keys, grad_out, query, key, value, out, logsumexp,
                cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *rest, **others,
            )  # fmt: skip
        return tuple(gradients)

    def _flash(
        self, keys: Any, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
        max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, **others: Any,
    ) -> Any:  # fmt: skip
        """aten::_flash_attention_forward; [batch, seq, heads, head_dim], or packed [tokens, heads, head_dim]."""
        answer = None
        if dropout_p == 0.0 and not return_debug_mask and is_plain(others):
            tensors, words = flash_call(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, others)
            answer = self._forward(tensors, words)
        if answer is None:
            return self._run_before(
                "_flash_attention_forward", keys, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                is_causal, return_debug_mask, **others,
            )  # fmt: skip
        return *answer, *unused_of(query)

    def _flash_backward(
        self, keys: Any, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *rest: Any,
        **others: Any,
    ) -> Any:  # fmt: skip
        """aten::_flash_attention_backward"""
        gradients = None
        if dropout_p == 0.0 and is_plain(others):
            tensors, words = flash_call(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, others)
            gradients = self._backward(grad_out, out, logsumexp, tensors, words)
        if gradients is None:
            return self._run_before(
                "_flash_attention_backward", keys, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k,
                max_q, max_k, dropout_p, is_causal, *rest, **others,
            )  # fmt: skip
        return tuple(gradients)

    def _run_before(self, name: str, keys: Any, *given: Any, **others: Any) -> Any:
        """The kernel that was there before."""
        return self._before[name].call_boxed(keys, *given, **others)


def dense_words(layout: Layout, is_causal: bool, scale: float | None) -> dict[str, Any]:
    """Keyword arguments of torch.ops.autoattn.attention. PyTorch's operators align a causal mask bottom-right."""
    return {"mask": "causal" if is_causal else "full", "scale": scale, "layout": layout.value}


def flash_call(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, is_causal: bool, others: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Tensors and keyword arguments of torch.ops.autoattn.attention for one of aten::_flash_attention_forward."""
    packed = cum_seq_q is not None
    words = dense_words(Layout.PACKED if packed else Layout.BSHD, is_causal, others.get("scale"))
    bounds = [-1 if width is None else width for width in map(others.get, ("window_size_left", "window_size_right"))]
    if is_causal and bounds[0] >= 0:
        words["mask"] = f"window:{bounds[0]},0"
    elif not is_causal and max(bounds) >= 0:
        words["mask"] = f"window:{bounds[0]},{bounds[1]}"
    if not packed:
        return (query, key, value), words
    words |= {"max_seqlen_q": max_q, "max_seqlen_kv": max_k}
    learned = [None] * (len(attention_schema.LEARNING) - 3)
    return (query, key, value, *learned, cum_seq_q, cum_seq_k), words


def is_plain(others: dict[str, Any]) -> bool:
    """Whether a call of aten::_flash_attention_forward has neither slopes nor paged keys."""
    return all(others.get(name) is None for name in ("seqused_k", "alibi_slopes", "block_table"))


def unused_of(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Seed, offset and debug mask, which a call without dropout returns and nobody reads."""
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)
    offset = torch.empty((), dtype=torch.uint64, device=query.device)
    return seed, offset, query.new_empty(0)
