"""Parses what changes scores and weights: softcap, ALiBi, sinks, score_mod, dropout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoattn.core.call_arguments import NUMBERS, CallArgument
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.errors import TensorError
from autoattn.expressions import captures
from autoattn.expressions.language import SCORE_NAMES
from autoattn.kernels.forward import lse_dtype

MAX_SEED = 2**63 - 1  # seeds travel to the GPU as int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changed:
    """Modifiers, and the fields of Operands that belong to them."""

    modifiers: Modifiers
    operands: dict[str, Any] = field(default_factory=dict)


# Of each number, what switches it off: None only where that is the default.
_OFF = tuple((number.name, (0.0,) if number.default is not None else (None, 0.0)) for number in NUMBERS)
_BIAS_ALONE = {bias: Changed(modifiers=Modifiers(bias=bias)) for bias in Bias}


def read(
    query: Tensor, batch: int, seq_q: int, seq_kv: int, given: Mapping[str, Any], *, bias: Bias = Bias.NONE
) -> Changed:
    """The modifiers that the arguments of a call ask for.

    Args:
        query: [batch, heads_q, seq_q, head_dim], or [1, heads_q, tokens, head_dim] of `batch` packed sequences
        seq_q, seq_kv: queries and keys of a sequence, the most where they differ
        given: the call's arguments; those that are missing are the defaults.

    Raises:
        TensorError: a number is out of range, or a tensor does not fit the heads.
        ProblemError: a score_mod is more than its language.
    """
    alibi_slopes, sinks, score_mod = (given.get(name) for name in ("alibi_slopes", "sinks", "score_mod"))
    none = alibi_slopes is None and sinks is None and score_mod is None
    if none and all(given.get(name, 0.0) in off for name, off in _OFF):
        return _BIAS_ALONE[bias]
    heads = query.shape[1]
    operands: dict[str, Any] = {
        number.name: number_of(number, given.get(number.name, number.default)) for number in NUMBERS
    }
    text = ""
    if score_mod is not None:
        sizes = {"b": batch, "h": heads, "q_idx": seq_q, "kv_idx": seq_kv}
        text, operands["score_captures"] = _score_mod(score_mod, sizes, query.device)
    if alibi_slopes is not None:
        operands["slopes"] = _slopes(alibi_slopes, batch, heads, query)
    if sinks is not None:
        operands["sinks"] = _sinks(sinks, heads, query)
    if operands["dropout"] > 0.0:
        operands["seed"] = choose_seed(given.get("seed"), query.device)
    modifiers = Modifiers(
        score_mod=text,
        alibi=alibi_slopes is not None,
        bias=bias,
        sinks=sinks is not None,
        **{number.modifier: operands[number.name] > 0.0 for number in NUMBERS},
    )
    return Changed(modifiers=modifiers, operands=operands)


def check_tensor(name: str, tensor: Any, device: torch.device) -> None:
    """Refuses what is no tensor on the query's device."""
    if not isinstance(tensor, Tensor):
        raise TensorError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it first")
    if tensor.device != device:
        raise TensorError(f"{name} must be on the query's device {device}, got {tensor.device}; move it")


def number_of(argument: CallArgument, given: Any) -> float:
    """A number of the caller's; 0 stands for none, and so does None where that is the default.

    Raises:
        TensorError: it is none, or out of the argument's range.
    """
    if given is None and argument.default is None:
        return 0.0
    below = math.inf if argument.below is None else argument.below
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0.0 <= given < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise TensorError(f"{argument.name} must be a finite number from 0{limit}, got {given!r}; {argument.absent}")
    return float(given)


def seed_of(seed: Any) -> int:
    """The caller's seed."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise TensorError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}; correct it")
    return seed


def draw() -> Tensor:
    """[1] int64: a new seed from PyTorch's generator of the CPU, which torch.manual_seed sets."""
    return torch.randint(2**62, (1,), device="cpu")


def _slopes(slopes: Any, batch: int, heads: int, query: Tensor) -> Tensor:
    check_tensor("alibi_slopes", slopes, query.device)
    dtypes = torch.float32, lse_dtype(query.dtype)
    if slopes.dtype not in dtypes or tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise TensorError(
            f"alibi_slopes must be float32 [heads_q] or [batch, heads_q] = ({batch}, {heads}), got {slopes.dtype} of "
            f"shape {tuple(slopes.shape)}; cast or expand them"
        )
    return slopes.expand(batch, heads)


def _sinks(sinks: Any, heads: int, query: Tensor) -> Tensor:
    check_tensor("sinks", sinks, query.device)
    if not sinks.is_floating_point() or tuple(sinks.shape) != (heads,):
        raise TensorError(
            f"sinks must be floating [heads_q] = ({heads},), got {sinks.dtype} of shape {tuple(sinks.shape)}; "
            "give one number for each query head"
        )
    return sinks.to(lse_dtype(query.dtype)).contiguous()


def _score_mod(score_mod: Any, sizes: Mapping[str, int], device: torch.device) -> tuple[str, tuple[Tensor, ...]]:
    """The text of a score_mod, and the tensors that it reads."""
    captured: tuple[Tensor, ...] = ()
    if isinstance(score_mod, captures.Traced):
        score_mod, captured = score_mod.text, score_mod.captures
    elif not isinstance(score_mod, str):
        from autoattn.expressions.fx_tracing import trace  # only who gives a function needs PyTorch's tracer

        score_mod, captured = trace(score_mod, SCORE_NAMES, device)
    captures.check(score_mod, SCORE_NAMES, captured, sizes)
    return score_mod, captured


def choose_seed(seed: Any, device: torch.device) -> int:
    """The caller's seed, or a new one."""
    if seed is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise TensorError(
                "dropout in a CUDA graph must have a seed, got None, which would be drawn once and kept; give seed="
            )
        return int(draw())
    return seed_of(seed)
