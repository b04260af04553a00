"""Stands in for the part of the CuTe DSL that changes scores: vectors over torch, as strict as CuTe's own.

Kinds do not mix, where() and min() want one dtype, % cuts as C's does, there is no ~, and reads outside raise.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

FLOAT, INT, BOOL = torch.float32, torch.int32, torch.bool
MATH = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "tanh")


@dataclass(frozen=True, eq=False)
class Vector:
    """A TensorSSA of one axis."""

    numbers: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    def to(self, dtype: torch.dtype) -> Vector:
        assert self.numbers.dtype is not BOOL
        return Vector(self.numbers.to(dtype))

    def __getitem__(self, place: int) -> int:
        assert self.numbers.dtype is INT
        return int(self.numbers[place])

    def __bool__(self) -> bool:
        raise TypeError("a vector has no truth while a kernel is traced")

    def __neg__(self) -> Vector:
        assert self.numbers.dtype is not BOOL
        return Vector(-self.numbers)


def _whole(left: Tensor, right: Tensor) -> Tensor:
    return torch.div(left, right, rounding_mode="floor")


OPERATORS: dict[str, tuple[Callable[..., Tensor], tuple[torch.dtype, ...]]] = {
    "add": (operator.add, (FLOAT, INT)),
    "sub": (operator.sub, (FLOAT, INT)),
    "mul": (operator.mul, (FLOAT, INT)),
    "truediv": (operator.truediv, (FLOAT,)),
    "floordiv": (_whole, (INT,)),
    "mod": (torch.fmod, (INT,)),
    "and": (operator.and_, (INT, BOOL)),
    "or": (operator.or_, (INT, BOOL)),
    "xor": (operator.xor, (INT, BOOL)),
    **{name: (getattr(operator, name), (FLOAT, INT)) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
}


def _method(name: str, flip: bool) -> Callable[[Vector, Any], Vector]:
    act, dtypes = OPERATORS[name]

    def method(self: Vector, other: Any) -> Vector:
        mine = self.numbers
        theirs = other.numbers if isinstance(other, Vector) else torch.full_like(mine, other)
        assert mine.dtype is theirs.dtype, (name, mine.dtype, theirs.dtype)
        assert mine.dtype in dtypes, (name, mine.dtype)
        assert isinstance(other, Vector) or isinstance(other, float) is (mine.dtype is FLOAT), (name, other)
        return Vector(act(theirs, mine) if flip else act(mine, theirs))

    return method


for _name in OPERATORS:
    setattr(Vector, f"__{_name}__", _method(_name, flip=False))
    setattr(Vector, f"__r{_name}__", _method(_name, flip=True))


@dataclass(frozen=True, eq=False)
class Memory:
    """A tensor on the card: no index counts from its end, and none may lie outside."""

    numbers: Tensor

    @property
    def element_type(self) -> torch.dtype:
        return self.numbers.dtype

    def __getitem__(self, place: Any) -> Tensor:
        places = place if isinstance(place, tuple) else (place,)
        assert len(places) == self.numbers.dim()
        assert all(0 <= index < size for index, size in zip(places, self.numbers.shape, strict=True)), places
        return self.numbers[places]


class Registers:
    """What make_rmem_tensor gives: it is filled element by element, and loaded as a vector."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.numbers = torch.zeros(size, dtype=dtype)

    def __setitem__(self, place: int, number: Tensor) -> None:
        assert number.dtype is self.numbers.dtype
        self.numbers[place] = number

    def load(self) -> Vector:
        return Vector(self.numbers)


def _where(condition: Vector, first: Vector, second: Vector) -> Vector:
    assert condition.numbers.dtype is BOOL
    assert first.numbers.dtype is second.numbers.dtype
    return Vector(torch.where(condition.numbers, first.numbers, second.numbers))


def _full_like(like: Vector, number: Any, dtype: torch.dtype | None = None) -> Vector:
    dtype = dtype or like.numbers.dtype
    assert isinstance(number, bool) is (dtype is BOOL)
    return Vector(torch.full_like(like.numbers, number, dtype=dtype))


def _extreme(act: Callable[..., Tensor], inner: Callable[..., Tensor]) -> Callable[..., Vector]:
    def extreme(first: Vector, second: Vector, propagate_nan: bool = False) -> Vector:
        assert first.numbers.dtype is second.numbers.dtype
        return Vector((act if propagate_nan or first.numbers.dtype is INT else inner)(first.numbers, second.numbers))

    return extreme


def _fused(first: Tensor, second: Tensor, added: Tensor) -> Vector:
    assert {first.dtype, second.dtype, added.dtype} == {FLOAT}
    return Vector((first.double() * second.double() + added.double()).float())


def _of_numbers(act: Callable[[Tensor], Tensor]) -> Callable[..., Vector]:
    def called(value: Vector, fastmath: bool = False) -> Vector:
        assert value.numbers.dtype is FLOAT
        return Vector(act(value.numbers))

    return called


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `import cutlass` and `import cutlass.cute` give it."""
    package, cute = ModuleType("cutlass"), ModuleType("cutlass.cute")
    package.Float32, package.Int32, package.Boolean, package.cute = FLOAT, INT, BOOL, cute  # type: ignore[attr-defined]
    functions: dict[str, Any] = {
        "where": _where,
        "full_like": _full_like,
        "size": lambda shape: shape[0],
        "make_rmem_tensor": Registers,
        "math": SimpleNamespace(
            **{name: _of_numbers(getattr(torch, name)) for name in MATH},
            fma=lambda *three: _fused(*(value.numbers for value in three)),
            abs=lambda value: Vector(value.numbers.abs()),
            min=_extreme(torch.minimum, torch.fmin),
            max=_extreme(torch.maximum, torch.fmax),
        ),
    }
    for name, function in functions.items():
        setattr(cute, name, function)
    monkeypatch.setitem(sys.modules, "cutlass", package)
    monkeypatch.setitem(sys.modules, "cutlass.cute", cute)
