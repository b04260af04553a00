"""Hugging Face diffusers: its default attention backend on autoattn.

diffusers takes no backend of a new name from outside, so that `register` puts a function in the place of the backend
"native", which every model has that asks for no other. Old processors (`AttnProcessor2_0`) call SDPA themselves; run
them in a block of `autoattn.use`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from autoattn import functional
from autoattn.errors import HostError

BACKEND = "native"
ARGUMENTS = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}


class Registration:
    """A backend that was replaced, until `remove`."""

    def __init__(self, backends: dict[Any, Any], backend: Any) -> None:
        self._backends, self._backend, self._before = backends, backend, backends[backend]
        backends[backend] = self._attend

    def remove(self) -> None:
        """Brings back the function that was there before, unless somebody replaced it since."""
        if self._backends[self._backend] == self._attend:
            self._backends[self._backend] = self._before

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, **others: Any,
    ) -> Tensor:  # fmt: skip
        """Attention of [batch, seq, heads, head_dim].

        A mask is [batch, seq_kv], or broadcasts to [batch, heads, seq_q, seq_kv]; bool (True attends) or added. Calls
        with another argument, such as those of context parallelism, go to the function before.
        """
        if any(argument is not None and argument is not False for argument in others.values()):
            words = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
            answer: Tensor = self._before(query, key, value, **words, enable_gqa=enable_gqa, **others)
            return answer
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None, :]
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output = functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return output.transpose(1, 2)


def register() -> Registration:
    """Puts autoattn in the place of diffusers' backend "native".

    Returns:
        What brings the backend back.

    Raises:
        HostError: diffusers is not installed, or its release dispatches attention in another way.
    """
    try:
        dispatch = import_module("diffusers.models.attention_dispatch")
    except ImportError as error:
        raise HostError(
            f"the diffusers backend needs diffusers 0.35 or newer, whose attention_dispatch cannot be imported "
            f"({error}); install it with pip install 'diffusers>=0.35'"
        ) from None
    registry: Any = getattr(dispatch, "_AttentionBackendRegistry", None)
    backends, names = getattr(registry, "_backends", {}), getattr(registry, "_supported_arg_names", {})
    native = [backend for backend in backends if getattr(backend, "value", backend) == BACKEND]
    if not native or not ARGUMENTS.issubset(names.get(native[0], ())):
        raise HostError(
            f"the diffusers backend needs a release whose backend {BACKEND!r} takes {', '.join(sorted(ARGUMENTS))}, "
            "got one that does not; install diffusers 0.35 or newer, or run the model in a block of autoattn.use()"
        )
    return Registration(backends, native[0])
