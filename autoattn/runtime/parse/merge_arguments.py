"""Parses two partial outputs of attention; a caller's mistake is one sentence here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoattn.core.problem import Layout
from autoattn.errors import TensorError
from autoattn.kernels.forward import DTYPE
from autoattn.runtime.parse import arguments
from autoattn.runtime.parse.arguments import AXES
from autoattn.runtime.parse.modifier_arguments import check_tensor
from autoattn.tensors import operands
from autoattn.tensors.partial_outputs import PartialOutputs


def layout_of(output: Any, layout: Any) -> Layout:
    """How an output is laid out: as the caller says, or packed where it has three axes."""
    return Layout.PACKED if isinstance(output, Tensor) and output.dim() == 3 else arguments.layout_of(layout)


def read(first: Any, first_lse: Any, second: Any, second_lse: Any, layout: Layout) -> PartialOutputs:
    """The outputs as [batch, heads, seq, head_dim] views, of batch 1 when packed.

    Raises:
        TensorError: they are not two outputs of the same queries with their LSE.
    """
    axes = AXES[layout]
    for name, output in (("output", first), ("other_output", second)):
        _check_output(name, output, first, axes)
    views = operands.viewed(first, layout), operands.viewed(second, layout)
    wanted = views[0].shape[1:3] if layout is Layout.PACKED else views[0].shape[:3]
    kind = torch.float64 if first.dtype is torch.float64 else torch.float32
    sums = []
    for name, lse in (("lse", first_lse), ("other_lse", second_lse)):
        check_tensor(name, lse, first.device)
        if lse.shape != wanted or lse.dtype is not kind:
            words = "[heads, tokens]" if layout is Layout.PACKED else "[batch, heads, seq]"
            raise TensorError(
                f"{name} must be {kind} {words} = {tuple(wanted)}, got {lse.dtype} of shape {tuple(lse.shape)}; give "
                "the one that came with the output"
            )
        sums.append(lse[None] if layout is Layout.PACKED else lse)
    return PartialOutputs(first=views[0], second=views[1], first_lse=sums[0], second_lse=sums[1])


def _check_output(name: str, output: Any, first: Any, axes: tuple[str, ...]) -> None:
    if not isinstance(output, Tensor) or output.is_nested or output.layout is not torch.strided:
        raise TensorError(f"{name} must be a dense torch.Tensor, got {type(output).__name__}; convert it first")
    if output.dim() != len(axes) or output.shape != first.shape:
        raise TensorError(
            f"{name} must be [{', '.join(axes)}], of one shape with the other output, got {tuple(output.shape)} beside "
            f"{tuple(first.shape)}; give outputs of the same queries"
        )
    if output.dtype is not first.dtype or output.device != first.device:
        raise TensorError(
            f"{name} must have the dtype and device of the other output, {first.dtype} on {first.device}, got "
            f"{output.dtype} on {output.device}; cast or move it"
        )
    if output.dtype not in DTYPE and output.dtype is not torch.float64:
        raise TensorError(f"{name} must be float16, bfloat16, float32 or float64, got {output.dtype}; cast it")
