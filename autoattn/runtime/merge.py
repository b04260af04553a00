"""Merges two partial outputs of attention: by a kernel on a GPU, by the formula elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from autoattn.codegen import render
from autoattn.kernels import merge as merge_kernel
from autoattn.kernels.bound_launch import Bound
from autoattn.kernels.compiler import Kernel
from autoattn.kernels.forward import DTYPE
from autoattn.reference import merge_formula
from autoattn.runtime import call_cache, loaded_kernels
from autoattn.runtime.call_keys import Key
from autoattn.runtime.plan import planner
from autoattn.tensors.partial_outputs import PartialOutputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergeCall:
    """A merge by a kernel that is ready for outputs that differ in addresses alone."""

    output: tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides of a [batch, heads, seq, head_dim] view
    lse: tuple[int, ...]  # sizes
    launch: Bound
    sees_switches: ClassVar[bool] = False

    @property
    def guarded(self) -> Callable[..., Any]:
        """The same for calls that guards know."""
        return self

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /, *offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Output [batch, heads, seq, head_dim] and LSE [batch, heads, seq].

        Args:
            query, key, value: the first output, the second, and the first again.
            offsets: LSE of both.
        """
        output = query.new_empty_strided(*self.output)
        lse = offsets[0].new_empty(self.lse)
        inputs = query.data_ptr(), key.data_ptr(), output.data_ptr()
        self.launch((*inputs, offsets[0].data_ptr(), offsets[1].data_ptr(), lse.data_ptr()))
        return output, lse


@torch.compiler.disable  # type: ignore[untyped-decorator]
def merge(call_key: Key | None, parts: PartialOutputs) -> tuple[Tensor, Tensor]:
    """Merges, and keeps the launch for the next call with the key.

    Returns:
        Output [batch, heads, seq, head_dim] and LSE [batch, heads, seq].
    """
    tensors = parts.first, parts.second, parts.first_lse, parts.second_lse
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if learns or not _has_kernel(parts):
        return merge_formula.merge(parts)
    kernel = _kernel_of(parts)
    output, lse = merge_kernel.launch(kernel, parts)
    if call_key is not None:
        kept = (tuple(output.shape), output.stride())
        prepared = MergeCall(output=kept, lse=tuple(lse.shape), launch=merge_kernel.bind(kernel, parts))
        call_cache.keep(call_key, prepared)
    return output, lse


def merge_in_place(parts: PartialOutputs) -> None:
    """Merges over the first output and its LSE; autograd sees nothing of it."""
    if _has_kernel(parts):
        merge_kernel.launch_in_place(_kernel_of(parts), parts)
        return
    output, lse = merge_formula.merge(parts)
    parts.first.copy_(output)
    parts.first_lse.copy_(lse)


def _has_kernel(parts: PartialOutputs) -> bool:
    types = {parts.first.dtype, parts.second.dtype}
    return types <= DTYPE.keys() and planner.why_not_on(parts.first.device) is None


def _kernel_of(parts: PartialOutputs) -> Kernel:
    return loaded_kernels.find(render.merge_source(merge_kernel.kind_of(parts)), parts.first.device.index, "a merge")
