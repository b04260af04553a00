"""One attention call on a part of the keys: its output and LSE, and its gradients from the output and LSE of all keys.

Tensors are [batch, seq, heads, head_dim], or packed [tokens, heads, head_dim]; LSEs are [batch, heads, seq] or [heads,
tokens].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoattn import functional
from autoattn.core.mask import Mask
from autoattn.core.problem import Layout
from autoattn.distributed.rectangles import Rectangle
from autoattn.runtime import merging_call
from autoattn.runtime.torch_op import attention_op, attention_op_backward, attention_schema
from autoattn.runtime.torch_op.kernel_choices import KernelChoices
from autoattn.tensors import cu_seqlens

_choices = KernelChoices()
_LEARNING = attention_schema.LEARNING
_LEARNS = [name in _LEARNING[:3] for name in _LEARNING]
_LEARNS_SLOPES = [name in (*_LEARNING[:3], "alibi_slopes") for name in _LEARNING]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """What the calls of one attention have in common."""

    scale: float | None
    softcap: float
    deterministic: bool
    learns: bool  # whether somebody wants gradients
    slopes: Tensor | None = None  # [heads_q] or [batch, heads_q]
    learns_slopes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Rectangles as packed sequences; tokens in none of them stand in sequences without keys or without queries."""

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int

    @classmethod
    def of(cls, rectangles: Sequence[Rectangle], device: torch.device) -> Packing:
        """Of rectangles in which queries and keys only move on."""
        ends_q, ends_kv = [0], [0]
        for rectangle in rectangles:
            for end_q, end_kv in (
                (rectangle.queries[0], ends_kv[-1]),  # queries that see nothing
                (rectangle.queries[0], rectangle.keys[0]),  # keys that nobody sees
                (rectangle.queries[1], rectangle.keys[1]),
            ):
                if (end_q, end_kv) != (ends_q[-1], ends_kv[-1]):
                    ends_q.append(end_q)
                    ends_kv.append(end_kv)
        return cls(
            cu_seqlens_q=cu_seqlens.of_numbers(ends_q, device),
            cu_seqlens_kv=cu_seqlens.of_numbers(ends_kv, device),
            max_seqlen_q=max(end - begin for begin, end in pairwise(ends_q)),
            max_seqlen_kv=max(end - begin for begin, end in pairwise(ends_kv)),
        )


class Gradients(NamedTuple):
    """Of the tensors of the same names; slopes None where they learn nothing."""

    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor | None


def attend(
    three: tuple[Tensor, Tensor, Tensor], window: tuple[int, int], terms: Terms, packing: Packing | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and LSE of queries on some keys; autograd does not follow.

    Args:
        window: (left, right), aligned bottom-right in each sequence; -1 is no bound.
        sinks: where this call is the one that counts them.
    """
    if terms.learns:
        tensors, words = _posed(three, window, terms, packing, sinks)
        answer = attention_op.at_once_by_kernels(tensors, words)
        if answer is None and _choices.takes(tensors, words, learns=True):
            answer = attention_schema.operator(*tensors, **words)
        if answer is not None:
            return answer
    return _by_function(three, window, terms, packing, sinks, terms.slopes)


def attend_into(
    three: tuple[Tensor, Tensor, Tensor], window: tuple[int, int], terms: Terms, packing: Packing | None,
    sinks: Tensor | None, running: tuple[Tensor, Tensor],
) -> bool:  # fmt: skip
    """Has a kernel merge the call into output and LSE of the queries on other keys.

    Args:
        running: output, like the query with the value's head dim, and LSE; 0 and -inf where a query saw no key.

    Returns:
        Whether it was done; where no kernel does it, nothing is written.
    """
    return merging_call.attend(*_posed(three, window, terms, packing, sinks), *running)


def differentiate(
    three: tuple[Tensor, Tensor, Tensor], window: tuple[int, int], terms: Terms, packing: Packing | None,
    answer: tuple[Tensor, Tensor], pulls: tuple[Tensor, Tensor | None],
) -> Gradients:  # fmt: skip
    """The share of this call's keys in the gradients.

    Args:
        answer: output and LSE of the queries on all keys and sinks.
        pulls: the gradients of these; that of the LSE may be None.
    """
    tensors, words = _posed(three, window, terms, packing, None, return_lse=pulls[1] is not None)
    given = *pulls, answer[0], answer[1].contiguous(), *tensors
    learns = _LEARNS_SLOPES if terms.learns_slopes else _LEARNS
    gradients = attention_op_backward.at_once(given, learns, words)
    if gradients is None:
        if not _choices.takes(tensors, words, learns=True):
            return _by_formula(three, window, terms, packing, answer, pulls)
        gradients = torch.ops.autoattn.attention_backward.default(*given, learns=learns, **words)
    query, key, value, *slopes = gradients
    return Gradients(query, key, value, slopes[0] if slopes else None)


def _posed(
    three: tuple[Tensor, Tensor, Tensor], window: tuple[int, int], terms: Terms, packing: Packing | None,
    sinks: Tensor | None, *, return_lse: bool = False,
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:  # fmt: skip
    """Tensors and words of torch.ops.autoattn.attention."""
    others = {"alibi_slopes": terms.slopes, "sinks": sinks}
    tensors: tuple[Tensor | None, ...] = (*three, *map(others.get, _LEARNING[3:]))
    longest = None
    if packing is not None:
        tensors = (*tensors, packing.cu_seqlens_q, packing.cu_seqlens_kv)
        longest = packing.max_seqlen_q, packing.max_seqlen_kv
    facts = terms.scale, terms.softcap, terms.deterministic, terms.learns_slopes
    return tensors, _words(window, facts, longest, return_lse)


@lru_cache(maxsize=4096)
def _words(
    window: tuple[int, int], facts: tuple[float | None, float, bool, bool], longest: tuple[int, int] | None,
    return_lse: bool,
) -> dict[str, Any]:  # fmt: skip
    """The words, not to be changed.

    Args:
        facts: scale, softcap, deterministic and learns_slopes of the terms.
        longest: queries and keys of the longest packed sequences.
    """
    scale, softcap, deterministic, learns_slopes = facts
    words: dict[str, Any] = {
        "mask": str(Mask.window(*window)), "keep_lse": True, "learns_slopes": learns_slopes, "softcap": softcap,
        "scale": scale, "layout": Layout.BSHD.value, "deterministic": deterministic, "return_lse": return_lse,
    }  # fmt: skip
    if longest is not None:
        words |= {"layout": Layout.PACKED.value, "max_seqlen_q": longest[0], "max_seqlen_kv": longest[1]}
    return attention_schema.without_defaults(words)


def _by_function(
    three: tuple[Tensor, Tensor, Tensor], window: tuple[int, int], terms: Terms, packing: Packing | None,
    sinks: Tensor | None, slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same by the public functions, which run PyTorch's operations where no kernel runs."""
    words: dict[str, Any] = {
        "window": window, "softcap": terms.softcap, "scale": terms.scale, "deterministic": terms.deterministic,
        "sinks": sinks, "alibi_slopes": slopes,
    }  # fmt: skip
    if packing is None:
        answer: tuple[Tensor, Tensor] = functional.attention(*three, layout=Layout.BSHD.value, return_lse=True, **words)
        return answer
    lengths = packing.cu_seqlens_q, packing.cu_seqlens_kv, packing.max_seqlen_q, packing.max_seqlen_kv
    answer = functional.packed_attention(*three, *lengths, return_lse=True, **words)
    return answer[0], answer[1]


def _by_formula(
    three: tuple[Tensor, Tensor, Tensor], window: tuple[int, int], terms: Terms, packing: Packing | None,
    answer: tuple[Tensor, Tensor], pulls: tuple[Tensor, Tensor | None],
) -> Gradients:  # fmt: skip
    """PyTorch differentiates the call, of which output and LSE are computed once more.

    With weight w = exp(lse - LSE) of a query's row among all keys, the gradient of the call's output is w * dO, and
    that of its LSE is w * (dO . (o - O) + dLSE): O = sum(w o) and LSE = log(sum(exp(lse))) over the calls.
    """
    with torch.enable_grad():
        leaves = tuple(tensor.detach().requires_grad_() for tensor in three)
        slopes = terms.slopes if terms.slopes is None else terms.slopes.detach().requires_grad_(terms.learns_slopes)
        output, lse = _by_function((leaves[0], leaves[1], leaves[2]), window, terms, packing, None, slopes)
    pull, pull_lse = pulls
    weight = torch.exp(lse.detach() - answer[1]).nan_to_num(nan=0.0)  # both are -inf where a query sees nothing
    moved = ((output.detach() - answer[0]).to(lse.dtype) * pull).sum(-1).transpose(-1, -2)
    lse_grad = weight * (moved if pull_lse is None else moved + pull_lse)
    output_grad = (weight.transpose(-1, -2)[..., None] * pull).to(output.dtype)
    learners = [*leaves, slopes] if slopes is not None and terms.learns_slopes else [*leaves]
    lse_grad = torch.where(lse.detach() == -torch.inf, 0.0, lse_grad)
    gradients = torch.autograd.grad((output, lse), learners, (output_grad, lse_grad), materialize_grads=True)
    return Gradients(gradients[0], gradients[1], gradients[2], gradients[3] if terms.learns_slopes else None)
