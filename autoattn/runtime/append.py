"""Appends keys and values to a cache: by a kernel on a GPU, by the formula elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from autoattn.codegen import render
from autoattn.kernels import append as append_kernel
from autoattn.kernels.bound_launch import Bound
from autoattn.reference import append_formula
from autoattn.runtime import call_cache, loaded_kernels
from autoattn.runtime.call_keys import Key
from autoattn.tensors.appended import Append
from autoattn.tensors.operands import View


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AppendCall:
    """An append by a kernel that is ready for calls that differ in addresses alone."""

    output: tuple[tuple[int, ...], tuple[int, ...]] | None  # sizes and strides of the rotated query, where there is one
    launch: Bound
    sees_switches: ClassVar[bool] = False

    @property
    def guarded(self) -> Callable[..., Any]:
        """The same for calls that guards know."""
        return self

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /, *offsets: Tensor) -> tuple[Tensor, Tensor]:
        """The query to attend with, rotated where it is asked, and the lengths after the append.

        Args:
            offsets: those of kernels.append.POINTERS from the lengths to the tables that the append has.
        """
        total = torch.empty_like(offsets[0])
        addresses = query.data_ptr(), key.data_ptr(), value.data_ptr(), *(tensor.data_ptr() for tensor in offsets)
        if self.output is None:
            self.launch((*addresses, total.data_ptr()))
            return query, total
        rotated = query.new_empty_strided(*self.output)
        self.launch((*addresses, total.data_ptr(), rotated.data_ptr()))
        return rotated, total


def append(call_key: Key | None, query: Tensor, given: Append) -> tuple[Tensor, Tensor]:
    """Appends, and keeps the launch for the next call with the key.

    Args:
        query: as the caller gave it.

    Returns:
        The query to attend with, [batch, seq_q, heads_q, head_dim] where it is rotated, and the lengths after the
        append, [batch] int32.
    """
    if given.key.device.type != "cuda" or given.key.dtype is torch.float64:
        rotated, total = append_formula.append(given)
    else:
        source = render.append_source(append_kernel.kind_of(given))
        kernel = loaded_kernels.find(source, given.key.device.index, "an append")
        rotated, total = append_kernel.launch(kernel, given)
        if call_key is not None:
            output = None if rotated is None else View.of(rotated.transpose(1, 2))
            shape = None if output is None else (tuple(output.shape), tuple(output.strides))
            call_cache.keep(call_key, AppendCall(output=shape, launch=append_kernel.bind(kernel, given)))
    return (query if rotated is None else rotated.transpose(1, 2)), total
