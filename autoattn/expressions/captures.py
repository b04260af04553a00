"""What a function captures, and whether tensors are what an expression declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from autoattn.errors import TensorError
from autoattn.expressions import language

STEADY = ("torch", "math", "operator")  # packages whose own functions do not change


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traced:
    """A function that was traced before: its text, and the tensors that it reads."""

    text: str
    captures: tuple[Tensor, ...]


class UnknownError(Exception):
    """A function captures something of which nobody can tell whether it changed."""


def fingerprint(function: Any) -> Any:
    """A value that is equal as long as tracing a function would give the same text over the same tensors.

    Raises:
        UnknownError: what it captures is more than numbers, names, tensors, and functions and tuples of such.
    """
    return _fingerprint(function, set())


def is_fixed(function: Any) -> bool:
    """Whether a function's code alone says what it does: it captures nothing, and reads no numbers from elsewhere."""
    if (
        not isinstance(function, FunctionType)
        or function.__closure__
        or function.__defaults__
        or function.__kwdefaults__
    ):
        return False
    known = function.__globals__
    values = [known[name] for name in _names(function.__code__) if name in known]
    return all(isinstance(value, ModuleType) and _steady(value.__name__) for value in values)


def check(text: str, names: tuple[str, ...], captures: Sequence[Tensor], sizes: Mapping[str, int]) -> None:
    """Checks that tensors are what a text declares, and long enough where a name indexes them.

    Args:
        captures: [any of 1 to 4 axes] tensors, in the order of their declarations.
        sizes: how many values each of b, h, q_idx and kv_idx takes in the call.

    Raises:
        TensorError: they are not.
    """
    read = language.parse(text, names)
    kinds = [f"{_word(tensor.dtype)}[{tensor.dim()}]" for tensor in captures]
    declared = [f"{capture.dtype}[{capture.axes}]" for capture in read.captures]
    if kinds != declared:
        raise TensorError(
            f"an expression must get the tensors that it declares, {', '.join(declared) or 'none'}, got "
            f"{', '.join(kinds) or 'none'}; correct one of them"
        )
    for name, axis, index in read.indexed():
        have, wanted = captures[int(name.removeprefix("captured"))].shape[axis], sizes.get(index, 1)
        if have < wanted:
            raise TensorError(
                f"axis {axis} of {name} must hold the {wanted} values of {index} that index it, got {have}; give a "
                "longer tensor"
            )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fingerprint(captured: Any, seen: set[int]) -> Any:
    if captured is None or isinstance(captured, bool | int | float | str | torch.dtype | torch.device | torch.Size):
        return type(captured), captured
    if isinstance(captured, Tensor):
        return (
            id(captured),
            captured.data_ptr(),
            captured.dtype,
            captured.device,
            tuple(captured.shape),
            captured.stride(),
        )
    if isinstance(captured, tuple | list):
        return tuple(_fingerprint(part, seen) for part in captured)
    if isinstance(captured, ModuleType) and _steady(captured.__name__):
        return captured.__name__
    if isinstance(captured, FunctionType):
        if id(captured) in seen:
            return "again"
        seen.add(id(captured))
        return captured.__code__, tuple(_fingerprint(part, seen) for part in _inside(captured))
    raise UnknownError(repr(type(captured)))


def _inside(function: FunctionType) -> list[Any]:
    """What a function reaches beside its arguments."""
    values: list[Any] = [function.__defaults__ or (), *(function.__kwdefaults__ or {}).values()]
    try:
        values += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is still empty
        raise UnknownError("an empty cell") from None
    if not _steady(function.__module__):
        known = function.__globals__
        values += [known[name] for name in sorted(_names(function.__code__)) if name in known]
    return values


def _names(code: CodeType) -> set[str]:
    """Global names that a function and those inside it may ask for."""
    return {*code.co_names}.union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _steady(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in STEADY
