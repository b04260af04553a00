"""Values in registers: blocks, scalars and pointers, with Triton's rules for types and integer division.

A block is held whole, whatever threads hold it on a card, so layouts of registers say nothing here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from autoattn.errors import InterpretationError, SynchronizationError

Number = bool | int | float
# In the order in which types give way to one another (triton/language/semantic.py, computation_type_impl).
_RANKS = {
    dtype: rank
    for rank, dtypes in enumerate(
        (
            *((torch.bool,), (torch.int8, torch.uint8), (torch.int16,), (torch.int32,), (torch.int64,)),
            *((torch.float8_e4m3fn,), (torch.float16, torch.bfloat16), (torch.float32,), (torch.float64,)),
        )
    )
    for dtype in dtypes
}


@dataclass(frozen=True, slots=True)
class PointerType:
    """The type of an address in global memory."""

    element_ty: torch.dtype


@dataclass(slots=True, eq=False, kw_only=True)
class Product:
    """A warpgroup product: under way until somebody waits for it, and spoilt if its factors change meanwhile."""

    event: int  # of its reads, one bit
    words: str  # which product it is
    before: Product | None = None  # what it adds to
    done: bool = False
    used: bool = False  # its result was read
    fault: str = ""  # why its result means nothing, in one sentence


class Tensor:
    """A block, a scalar or a pointer in registers."""

    __slots__ = ("_data", "element", "product")

    def __init__(self, data: torch.Tensor, element: torch.dtype | None = None, product: Product | None = None) -> None:
        self._data = data
        self.element = element  # what a pointer points to; None for other values
        self.product = product  # whose result it is

    @property
    def data(self) -> torch.Tensor:
        """The numbers; addresses in bytes where this is a pointer.

        Raises:
            SynchronizationError: they are the result of a product that nobody waited for, or that was spoilt.
        """
        product = self.product
        if product is not None and not product.done:
            raise SynchronizationError(f"the result of {product.words} is used before anybody waits for it")
        while product is not None and not product.used:
            if product.fault:
                raise SynchronizationError(product.fault)
            product.used = True
            product = product.before
        return self._data

    @property
    def under_way(self) -> torch.Tensor:
        """The numbers of a product that may be under way: what another product adds to."""
        return self._data

    @property
    def shape(self) -> list[int]:
        """Sizes of the axes."""
        return list(self._data.shape)

    @property
    def dtype(self) -> Any:
        """The type of an element."""
        return self._data.dtype if self.element is None else PointerType(self.element)

    @property
    def type(self) -> Any:
        """What kernels ask for a layout, which is nothing here."""
        return SimpleNamespace(layout=None, shape=self.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        """Converted, or with `bitcast` the same bits as another type."""
        if isinstance(dtype, PointerType):
            return Tensor(self.data, dtype.element_ty)
        if self.element is not None or not bitcast:
            return Tensor(converted(self.data, dtype))
        return Tensor(self.data.contiguous().view(dtype))

    def reshape(self, shape: Sequence[int]) -> Tensor:
        """The same elements in other axes."""
        return Tensor(self.data.reshape([int(size) for size in shape]), self.element)

    def permute(self, axes: Sequence[int]) -> Tensor:
        """The axes in another order."""
        return Tensor(self.data.permute(*axes), self.element)

    def __getitem__(self, places: Any) -> Tensor:
        return Tensor(self.data[places], self.element)

    def _scalar(self) -> Any:
        if self._data.numel() != 1:
            raise InterpretationError(f"a scalar must have one element, got the shape {self.shape}; reduce it first")
        return self.data.item()

    def __bool__(self) -> bool:
        return bool(self._scalar())

    def __int__(self) -> int:
        return int(self._scalar())

    __index__ = __int__

    def __neg__(self) -> Tensor:
        return Tensor(-self.data)

    def __invert__(self) -> Tensor:
        return Tensor(~self.data)

    def __add__(self, other: Any) -> Tensor:
        if self.element is not None:
            return Tensor(self.data + offset_of(other) * self.element.itemsize, self.element)
        return (
            other + self
            if isinstance(other, Tensor) and other.element is not None
            else _apply(operator.add, self, other)
        )

    def __sub__(self, other: Any) -> Tensor:
        return self + -other if self.element is not None else _apply(operator.sub, self, other)


def offset_of(value: Any) -> Any:
    """What is added to an address, as int64."""
    return value.data.to(torch.int64) if isinstance(value, Tensor) else int(value)


def converted(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to nearest even; float8 saturates at its largest number, as cvt.satfinite does, and NaN stays."""
    if dtype is torch.float8_e4m3fn and data.dtype is not dtype:
        largest = torch.finfo(dtype).max
        data = data.to(torch.float32).clamp(-largest, largest)
    return data.to(dtype)


def to_tensor(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A scalar of a Python number: int32, int64 where that is too narrow, or float32."""
    if isinstance(value, Tensor):
        return value
    if dtype is None:
        wide = torch.int64 if isinstance(value, int) and not -(2**31) <= value < 2**31 else torch.int32
        dtype = torch.bool if isinstance(value, bool) else wide if isinstance(value, int) else torch.float32
    return Tensor(torch.tensor(value, dtype=dtype))


def _common(left: torch.dtype, right: torch.dtype) -> torch.dtype:
    if left is right:
        return left
    if _RANKS[left] == _RANKS[right]:  # float16 and bfloat16
        return torch.float32
    return max(left, right, key=_RANKS.__getitem__)


def pair(left: Any, right: Any) -> tuple[Any, Any]:
    """Two operands in the type in which they are computed; a Python number takes the other's where it fits."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        first, second = left.data, right.data
        if first.dtype is not second.dtype:
            dtype = _common(first.dtype, second.dtype)
            first, second = first.to(dtype), second.to(dtype)
        return first, second
    if not isinstance(left, Tensor):
        return pair(right, left)[::-1]
    data = left.data
    if data.dtype is torch.bool and not isinstance(right, bool):
        data = data.to(torch.int32)
    if isinstance(right, float) and not data.dtype.is_floating_point:
        data = data.to(torch.float32)
    elif isinstance(right, int) and data.dtype is torch.int32 and not -(2**31) <= right < 2**31:
        data = data.to(torch.int64)
    return data, _constant(right, data.dtype)


@lru_cache(maxsize=4096)
def _constant(value: Number, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def _apply(function: Callable[[Any, Any], torch.Tensor], left: Any, right: Any) -> Tensor:
    return Tensor(function(*pair(left, right)))


def _true_divide(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left / right if left.dtype.is_floating_point else left.to(torch.float32) / right.to(torch.float32)


def _floor_divide(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Toward 0, as in C and in Triton; by 0, of what lies behind the last tile, some number, as on the card."""
    nought = right == 0
    return torch.div(left, right + nought, rounding_mode="trunc").masked_fill(nought, -1)


def _remainder(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """With the sign of the dividend."""
    nought = right == 0
    return torch.where(nought, left, torch.fmod(left, right + nought))


_OPERATORS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "mul": operator.mul,
    "truediv": _true_divide,
    "floordiv": _floor_divide,
    "mod": _remainder,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
}
_REFLECTED = ("mul", "truediv", "floordiv", "mod", "and", "or", "xor")


def _operator(function: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda left, right: _apply(function, left, right)


def _reflected(function: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda right, left: _apply(function, left, right)


for _name, _function in _OPERATORS.items():
    setattr(Tensor, f"__{_name}__", _operator(_function))
for _name in _REFLECTED:
    setattr(Tensor, f"__r{_name}__", _reflected(_OPERATORS[_name]))
Tensor.__radd__ = Tensor.__add__  # type: ignore[attr-defined]
Tensor.__rsub__ = _reflected(operator.sub)  # type: ignore[attr-defined]


def where(condition: Any, left: Any, right: Any) -> Tensor:
    """Element by element; both numbers may be Python's."""
    if not isinstance(left, Tensor) and not isinstance(right, Tensor):
        left = to_tensor(left) if not isinstance(right, float) else to_tensor(float(left))
    return Tensor(torch.where(to_tensor(condition).data, *pair(left, right)))


def extreme(left: Any, right: Any, *, largest: bool) -> Any:
    """The larger or smaller of two; of a number and NaN, the number."""
    if not isinstance(left, Tensor) and not isinstance(right, Tensor):
        return max(left, right) if largest else min(left, right)
    first, second = pair(left, right)
    if not first.dtype.is_floating_point:
        return Tensor(torch.maximum(first, second) if largest else torch.minimum(first, second))
    return Tensor(torch.fmax(first, second) if largest else torch.fmin(first, second))


def row_max(value: Tensor, axis: int) -> Tensor:
    """The largest along an axis; NaN only where all are."""
    data = value.data
    if data.dtype.is_floating_point and bool(data.isnan().any()):
        return Tensor(
            torch.where(data.isnan().all(axis), math.nan, data.nan_to_num(-math.inf, math.inf, -math.inf).amax(axis))
        )
    return Tensor(data.amax(axis))


def row_sum(value: Tensor, axis: int) -> Tensor:
    """The sum along an axis, in the type of the elements; of narrow integers in int32."""
    dtype = value.data.dtype
    return Tensor(value.data.sum(axis, dtype=dtype if _RANKS[dtype] >= _RANKS[torch.int32] else torch.int32))
