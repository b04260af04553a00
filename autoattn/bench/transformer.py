"""Five language models in plain PyTorch, and whose attention runs in them.

The seed tells models by letters, heads and batch. Their other sizes are those of the course assignment that it reports
on (CS336, second assignment, table 1), and so is the architecture: RMSNorm before each part, rotary positions, SwiGLU,
no biases, a vocabulary of 10,000 and a head of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from autoattn import functional, torch_private
from autoattn.baselines.pytorch_sdpa import SDPA
from autoattn.bench.training_results import Mode, Whose
from autoattn.core.cache_entry import KERNEL
from autoattn.runtime.plan.explanations import Explanation, Level

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]  # of [batch, heads, seq, head_dim], causal
VOCABULARY = 10_000
BASE = 10_000.0  # of the rotary frequencies
EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What tells one model from another."""

    name: str
    width: int  # of the residual stream
    hidden: int  # between the two halves of an MLP
    layers: int
    heads: int
    vocabulary: int = VOCABULARY

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """How many numbers are learnt."""
        layer = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        return 2 * self.vocabulary * self.width + self.layers * layer + self.width


SIZES = {
    size.name: size
    for size in (
        Size(name="S", width=768, hidden=3072, layers=12, heads=12),
        Size(name="M", width=1024, hidden=4096, layers=24, heads=16),
        Size(name="L", width=1280, hidden=5120, layers=36, heads=20),
        Size(name="XL", width=1600, hidden=6400, layers=48, heads=25),
        Size(name="2.7B", width=2560, hidden=10240, layers=32, heads=32),
    )
}


class Transformer(nn.Module):
    """A causal language model that gives its loss; whose attention it runs can be changed at any time."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, size: Size, context: int) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(_Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=EPSILON)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        frequencies = BASE ** (-torch.arange(0, size.head_dim, 2, dtype=torch.float32) / size.head_dim)
        angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def attend_by(self, attend: Attend) -> None:
        """Makes all layers run this attention from the next step on."""
        for layer in self.layers:
            layer.attend = attend

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy.

        Args:
            tokens, targets: [batch, seq] int64; seq is at most the context.
        """
        length = tokens.shape[1]
        cosines, sines = self.cosines[:length], self.sines[:length]
        stream = self.embedding(tokens)
        for layer in self.layers:
            stream = layer(stream, cosines, sines)
        logits = self.head(self.norm(stream))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class _Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attend: Attend = naive
        self.attention_norm = nn.RMSNorm(size.width, eps=EPSILON)
        self.query, self.key, self.value, self.output = (
            nn.Linear(size.width, size.width, bias=False) for _ in range(4)
        )
        self.mlp_norm = nn.RMSNorm(size.width, eps=EPSILON)
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, stream: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        normed = self.attention_norm(stream)
        query, key, value = (
            part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = self.attend(rotate(query, cosines, sines), rotate(key, cosines, sines), value)
        stream = stream + self.output(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(stream)
        return stream + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions, in float32, returned in the heads' own dtype."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)
    return turned.to(heads.dtype)


# --- whose attention --------------------------------------------------------------------------------------------------


def naive(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True) -> Tensor:
    """The formula: scores and weights are written out."""
    length = query.shape[-2]
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if causal:
        hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, dim=-1).to(value.dtype) @ value


def sdpa(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True) -> Tensor:
    """F.scaled_dot_product_attention, which chooses its backend itself."""
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)


def ours(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True) -> Tensor:
    """What a user of autoattn calls."""
    output = functional.attention(query, key, value, causal=causal)
    assert isinstance(output, Tensor)
    return output


def flex(length: int, device: torch.device, *, causal: bool = True) -> Attend:
    """FlexAttention with its block table made before; compiled, also in an eager model, as its documentation asks.

    On the CPU, where it has no gradients and nothing is timed, it is not compiled.
    """
    table = create_block_mask(_causal, None, None, length, length, device=str(device)) if causal else None
    call: Any = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = call(query, key, value, block_mask=table)
        return output

    return attend


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def attention_of(whose: Whose, length: int, device: torch.device, *, causal: bool = True) -> Attend:
    """One of the four for a context of `length` tokens."""
    if whose is Whose.FLEX:
        return flex(length, device, causal=causal)
    attend = {Whose.NAIVE: naive, Whose.SDPA: sdpa, Whose.OURS: ours}[whose]
    return attend if causal else partial(attend, causal=False)


def ran(whose: Whose, mode: Mode, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True) -> str:
    """What really runs for these tensors, in words; SDPA's backend is read from the operators that PyTorch dispatches.

    Raises:
        RuntimeError: nothing does.
    """
    if whose is Whose.NAIVE:
        return "the formula"
    if whose is Whose.FLEX:
        return "flex_attention, compiled"
    backend = _backend(query, key, value, causal)
    if whose is Whose.SDPA:
        return backend
    explanation = functional.explain(query, key, value, causal=causal)
    if mode is Mode.EAGER or explanation.route == KERNEL:
        return _words(explanation, backend)
    if (traced := traced_backend(query, key, value)) is not None:
        return f"sdpa {traced}, traced"
    with torch.no_grad():
        explanation = functional.explain(query, key, value, causal=causal)
    return f"{_words(explanation, backend)}; gradients by PyTorch"


def _words(explanation: Explanation, backend: str) -> str:
    if explanation.route == KERNEL and explanation.variant is not None:
        return f"{explanation.variant.template}, {explanation.level.value}"
    if explanation.route == SDPA:
        return f"{explanation.route} {backend}"
    if explanation.level is Level.SDPA:
        return explanation.route.replace("-", " ")
    return f"{explanation.route}, {explanation.level.value}"


def traced_backend(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """The backend of PyTorch's attention in the graph of a compiled call; None where an operator of ours is there."""
    names: list[str] = []

    def note(module: torch.fx.GraphModule) -> None:
        names.extend(str(node.target) for node in module.graph.nodes)

    torch_private.compile_noting(ours, note)(query, key, value)
    return None if any(name.startswith("autoattn") for name in names) else _named(names)


def _backend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> str:
    with _Watch() as watch:
        sdpa(query, key, value, causal=causal)
    return _named(watch.names)


class _Watch(torch_private.TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _named(operators: list[str]) -> str:
    """The backend of PyTorch's attention whose operator is among these; its plain formula has none of its own."""
    match = re.search(r"\b_scaled_dot_product_(?:fused_)?(\w+?)_attention", " ".join(operators))
    return str(match[1]) if match else "math"
