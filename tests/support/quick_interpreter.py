"""Triton's interpreter in a third of the time, with the same numbers. Children import this file in place of
`autoattn.search.gpu_jobs`.

Triton 3.6 computes again and again what cannot change, and most of the time of our small kernels went into that:

- whenever a kernel calls another function, it patches its whole language, and finds all of it patched;
- it repeats each sum and product of integers in 64 bits to look for an overflow, and then says nothing of it, since the
  interpreter's `debug` is off;
- it builds the shape of each value anew, with a list of the values' types and a name, and so NumPy's type for each.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton
from triton.language import core
from triton.runtime import interpreter

from autoattn.search import gpu_jobs  # noqa: F401 - what workers import before their first job

_patch, _launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
_patched: set[int] = set()  # globals whose language was patched since the launch began


def _patch_once(fn: FunctionType) -> Any:
    if id(fn.__globals__) in _patched:
        return interpreter._LangPatchScope()  # nothing to restore
    _patched.add(id(fn.__globals__))
    return _patch(fn)


def _launch_anew(self: Any, *arguments: Any, **named: Any) -> Any:
    _patched.clear()  # the end of the launch before restored what it had patched
    return _launch(self, *arguments, **named)


interpreter._patch_lang = _patch_once
interpreter.GridExecutor.__call__ = _launch_anew

assert not interpreter.interpreter_builder.options.debug
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


_numpy_of = interpreter._get_np_dtype
_numpy_types: dict[str, Any] = {}  # by the name of a Triton type


def _numpy_of_once(kind: Any) -> Any:
    known = _numpy_types.get(kind.name)
    if known is None:
        known = _numpy_types[kind.name] = _numpy_of(kind)
    return known


interpreter._get_np_dtype = _numpy_of_once


_block_of = core.block_type.__init__
_blocks: dict[tuple[str, tuple[int, ...]], tuple[Any, ...]] = {}  # by the elements' name and the sizes
_NO_SHAPE = core.constexpr(1), core.tuple([])


def _block_once(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
    known = _blocks.get((element_ty.name, sizes))
    if known is None:
        _block_of(self, element_ty, shape)  # which refuses sizes that cannot be
        self.of_values = core.constexpr(self.numel), core.tuple([core.constexpr(size) for size in sizes])
        _blocks[element_ty.name, sizes] = self.shape, self.numel, self.name, self.of_values
    else:
        self.element_ty = element_ty
        self.shape, self.numel, self.name, self.of_values = known


def _value(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - callers name it
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.of_values if type.is_block() else _NO_SHAPE


if triton.__version__.startswith("3.6."):  # another release may keep more of a value
    core.block_type.__init__ = _block_once
    core.tensor.__init__ = _value
