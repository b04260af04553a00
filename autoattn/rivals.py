"""The other ways to compute the same attention: what the user has without autoattn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoattn.problem import Mask, Problem

SDPA = "sdpa"  # as PyTorch itself chooses a backend: what the user had
BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def sdpa(query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, scale: float, backend: str = SDPA) -> Tensor:
    """F.scaled_dot_product_attention with the mask's own alignment.

    query is [batch, heads_q, seq_q, head_dim], key and value [batch, heads_kv, seq_kv, head_dim]. A query that sees no
    key gives 0, as everywhere in autoattn; PyTorch's backends disagree on it.

    Raises:
        RuntimeError: the named backend does not take these inputs.
    """
    if backend != SDPA:
        with sdpa_kernel(BACKENDS[backend]):
            return _sdpa(query, key, value, mask, scale)
    return _sdpa(query, key, value, mask, scale)


def calls(problem: Problem, query: Tensor, key: Tensor, value: Tensor, scale: float) -> dict[str, Callable[[], Tensor]]:
    """The rivals that take these inputs, ready to be timed: each was run once."""
    found: dict[str, Callable[[], Tensor]] = {}
    for name in (SDPA, *BACKENDS):

        def call(backend: str = name) -> Tensor:
            return sdpa(query, key, value, mask=problem.mask, scale=scale, backend=backend)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns why a backend does not take the inputs
                call()
            if query.is_cuda:
                torch.cuda.synchronize(query.device)
        except RuntimeError:  # no kernel of this backend for these inputs, or out of memory
            if query.is_cuda:
                torch.cuda.empty_cache()
            continue
        found[name] = call
    return found


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float) -> Tensor:
    attend = torch.nn.functional.scaled_dot_product_attention
    if query.shape[1] != key.shape[1]:  # decided here: traced with symbolic sizes, the comparison itself is no bool
        attend = partial(attend, enable_gqa=True)
    seq_q, seq_kv = query.shape[2], key.shape[2]
    if not mask.causal:
        return attend(query, key, value, scale=scale)
    if seq_q == seq_kv or mask.alignment.value == "top-left":
        return attend(query, key, value, is_causal=True, scale=scale)
    blind = max(0, seq_q - seq_kv)  # aligned bottom-right, the first rows see no key
    if blind == 0:
        return attend(query, key, value, attn_mask=_lower_right(query, seq_kv), scale=scale)
    seen = attend(query[:, :, blind:], key, value, is_causal=True, scale=scale)
    return torch.cat((torch.zeros_like(query[:, :, :blind]), seen), dim=2)


def _lower_right(query: Tensor, seq_kv: int) -> Tensor:
    """A causal mask aligned bottom-right, as PyTorch's fused backends know it, unless Dynamo would have to trace it."""
    seq_q = query.shape[2]
    if torch.compiler.is_compiling():
        return torch.ones(seq_q, seq_kv, dtype=torch.bool, device=query.device).tril(seq_kv - seq_q)
    # Imported here because it pulls in all of torch._dynamo, a second that most programs need not spend.
    from torch.nn.attention.bias import causal_lower_right

    bias: Tensor = causal_lower_right(seq_q, seq_kv)
    return bias
