"""Attention as a module, for models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from autoattn import decoding, functional
from autoattn.core.call_arguments import ARGUMENTS
from autoattn.core.mask import Mask
from autoattn.errors import TensorError
from autoattn.runtime.parse import arguments
from autoattn.runtime.parse.cache_arguments import CacheTensors
from autoattn.runtime.plan.explanations import Explanation
from autoattn.tensors import operands

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from autoattn.expressions.captures import Traced
    from autoattn.masks import BlockSparse

KEPT = tuple(argument.name for argument in ARGUMENTS if argument.module)
_ON_CACHE = "causal", "window", "softcap", "scale", "precision", "numerics", "deterministic"


class Attention(torch.nn.Module):
    """The attention between projections: it has no weights and takes query, key and value.

    The arguments are those of `autoattn.attention`, except that dropout acts only while the module trains. The heads
    are the tensors', and key heads may be fewer (grouped-query attention). A tensor as mask moves with the module. With
    a cache, key and value are those of new tokens: they are written into it first.
    """

    def __init__(
        self,
        *,
        mask: str | Mask | Tensor | BlockSparse | BlockMask | None = None,
        causal: bool | str = False,
        window: tuple[int, int] | None = None,
        softcap: float = 0.0,
        score_mod: str | Callable[..., Tensor] | Traced | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        layout: str = "bhsd",
        precision: str | None = None,
        numerics: str | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(mask, Tensor):
            self.register_buffer("mask", mask, persistent=False)
        else:
            self.mask = mask
        self.causal, self.window = causal, window
        self.softcap, self.score_mod, self.dropout = softcap, score_mod, dropout
        self.scale, self.layout, self.precision, self.numerics = scale, layout, precision, numerics
        self.deterministic = deterministic

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        mask: str | Mask | Tensor | BlockSparse | BlockMask | None = None,
        cache: CacheTensors | None = None,
    ) -> Tensor:
        """[batch, heads_q, seq_q, head_dim] (or BSHD) -> the same with the value's head dim.

        Args:
            mask: replaces the module's own.
            cache: key and value are written into it, in place, behind its lengths, and the queries attend to all keys
                up to there; the lengths stay the caller's to advance. There are no gradients, and no masks, biases,
                score_mods and dropout with it.
        """
        if cache is not None and not isinstance(cache, torch.fx.Proxy):  # torch.fx gives all arguments when it traces
            return self._with_cache(query, key, value, cache, mask, bias, alibi_slopes, sinks)
        # Not by _own: to make its dictionary costs the host as much as to find a prepared call.
        output = functional.attention(
            query, key, value, mask=self.mask if mask is None else mask, causal=self.causal, window=self.window,
            bias=bias, softcap=self.softcap, alibi_slopes=alibi_slopes, sinks=sinks, score_mod=self.score_mod,
            dropout=self.dropout if self.training else 0.0, scale=self.scale, layout=self.layout,
            precision=self.precision, numerics=self.numerics, deterministic=self.deterministic,
        )  # fmt: skip
        return cast(Tensor, output)  # torch.fx's is none

    if TYPE_CHECKING:
        __call__ = forward  # torch.nn.Module declares that a call returns Any

    def explain(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Any = None, **given: Any) -> Explanation:
        """What `forward` does with the same arguments, and why."""
        return functional.explain(query, key, value, **given, **self._own(mask))

    def _with_cache(
        self, query: Tensor, key: Tensor, value: Tensor, cache: CacheTensors, mask: Any, bias: Tensor | None,
        alibi_slopes: Tensor | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        own = self._own(mask)
        refused = {"mask": own["mask"], "bias": bias, "score_mod": self.score_mod, "dropout": own["dropout"] or None}
        if came := next((name for name, given in refused.items() if given is not None), ""):
            raise TensorError(f"attention on a cache takes causal masks and windows, got {came}; leave it out")
        layout = arguments.layout_of(self.layout)
        query, key, value = (operands.viewed(tensor, layout).transpose(1, 2) for tensor in (query, key, value))
        output = decoding.append_and_attend(
            query, key, value, cache, alibi_slopes=alibi_slopes, sinks=sinks,
            **{name: getattr(self, name) for name in _ON_CACHE},
        )  # fmt: skip
        return operands.as_given(cast(Tensor, output).transpose(1, 2), layout)

    def extra_repr(self) -> str:
        """The arguments that are not the defaults."""
        usual = inspect.signature(Attention).parameters
        given = {name: _word(getattr(self, name)) for name in usual}
        return ", ".join(f"{name}={word}" for name, word in given.items() if word != repr(usual[name].default))

    def _own(self, mask: Any) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in KEPT}
        own["mask"] = mask if mask is not None else self.mask
        own["dropout"] = self.dropout if self.training else 0.0
        return own


def _word(given: Any) -> str:
    """An argument on one line."""
    plain = given is None or isinstance(given, str | int | float | tuple)
    return repr(given) if plain else str(given) if isinstance(given, Mask) else type(given).__name__
