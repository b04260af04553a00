"""Bias, slopes and sinks: the tensors of a call that change its scores, and how they lie in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autoattn.core.modifiers import Bias
from autoattn.core.problem import Problem
from autoattn.tensors.operands import Operands, View

NAMES = "bias", "slopes", "sinks"  # fields of Operands, in the order in which all functions take these tensors
NOT_THERE = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreViews:
    """How bias and slopes lie in memory; zeros where a call has none."""

    bias_strides: tuple[int, ...] = NOT_THERE  # of [batch, heads_q, seq_q or 1 for keys alone, seq_kv], expanded
    bias_sizes: tuple[int, int, int, int] = NOT_THERE  # of one that is added, before it was expanded
    slope_strides: tuple[int, ...] = (0, 0)  # of [batch, heads_q], expanded

    @classmethod
    def of(cls, operands: Operands) -> ScoreViews:
        """Of a call's tensors."""
        bias, narrow, slopes = operands.bias, operands.narrow_bias, operands.slopes
        if bias is None and slopes is None:
            return UNCHANGED
        return cls(
            bias_strides=NOT_THERE if bias is None else bias.stride(),
            bias_sizes=NOT_THERE if narrow is None else four(narrow.shape),
            slope_strides=(0, 0) if slopes is None else slopes.stride(),
        )


UNCHANGED = ScoreViews()


def four(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """The sizes of a bias with four axes, of which those that are missing are 1 long."""
    batch, heads, queries, keys = (1,) * (4 - len(shape)) + tuple(shape)
    return batch, heads, queries, keys


def expanded(shape: tuple[int, ...], strides: tuple[int, ...], whole: tuple[int, ...]) -> View | None:
    """How a tensor lies once it is expanded; None where it cannot be."""
    missing = len(whole) - len(shape)
    if missing < 0:
        return None
    steps = [0] * missing
    for size, step, wanted in zip(shape, strides, whole[missing:], strict=True):
        if size not in (1, wanted):
            return None
        steps.append(step if size == wanted else 0)
    return View(whole, tuple(steps))


def as_read(names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tensors of a caller by the names of fields of Operands, with sinks as kernels read them."""
    if names[-1] != "sinks" or (tensors[-1].dtype is torch.float32 and tensors[-1].is_contiguous()):
        return tensors
    return (*tensors[:-1], tensors[-1].float().contiguous())


def with_scores(operands: Operands, problem: Problem, given: dict[str, Tensor]) -> Operands:
    """The operands of a call with bias, slopes and sinks as the caller gave them, by the names of their fields."""
    batch, heads = problem.batch, problem.heads_q
    changes: dict[str, Any] = {}
    if (bias := given.get("bias")) is not None:
        whole = bias.expand(batch, heads, problem.seq_q, problem.seq_kv)
        kind = problem.modifiers.bias
        changes["bias"] = whole[:, :, :1] if kind is Bias.KEYS else whole
        if kind not in (Bias.KEYS, Bias.BOOLEAN):
            changes["narrow_bias"] = bias[(None,) * (4 - bias.dim())]
    if (slopes := given.get("slopes")) is not None:
        changes["slopes"] = slopes.expand(batch, heads)
    if (sinks := given.get("sinks")) is not None:
        changes["sinks"] = sinks.float().contiguous()
    return replace(operands, **changes)
