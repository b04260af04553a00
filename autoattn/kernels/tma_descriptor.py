"""TMA descriptors of tensors, as Triton's launcher takes them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # compilers start sooner without torch
    from autoattn.tensors.operands import View

Axes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of a descriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """What Triton's launcher asks of a tensor to make a TMA descriptor of it."""

    address: int  # a multiple of 16
    shape: tuple[int, ...]  # [batch, heads, seq, head_dim], or [batch, heads_kv, heads of one key, seq, head_dim]
    strides: tuple[int, ...]  # in elements; multiples of 16 bytes, but the last, which is 1
    padding: str = "zero"
    round_f32_to_tf32: bool = False  # asked for since Triton 3.7

    @classmethod
    def of(cls, view: View, address: int = 0) -> Descriptor:
        """Of such a view at an address."""
        shape, strides = box_axes(view)
        return cls(address=address, shape=shape, strides=strides)

    @classmethod
    def at(cls, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Descriptor:
        """One that reads zeros beyond the end; a third of what the dataclass's own way takes, for each new address."""
        descriptor = object.__new__(cls)
        for write, value in zip(_WRITE, (address, shape, strides, "zero", False), strict=True):
            write(descriptor, value)
        return descriptor

    @property
    def base(self) -> Descriptor:
        """Where Triton looks for the address."""
        return self

    def data_ptr(self) -> int:
        """The address."""
        return self.address


_WRITE = tuple(getattr(Descriptor, field.name).__set__ for field in fields(Descriptor))


def box_axes(view: View) -> Axes:
    """Shape and strides of the descriptor of a view."""
    shape, (*steps, _) = view
    if 1 in shape:  # such an axis may step by anything, which the TMA unit would refuse
        for axis in range(len(steps)):
            if shape[axis] == 1:
                steps[axis] = -(-shape[-1] // 8) * 8
    return tuple(shape), (*steps, 1)
