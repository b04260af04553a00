"""Triton's interpreter: repairs known faults of its releases, and says in words what an exception of it was.

Three repairs are of what it computes again and again: rehearsals take a third of the time with them, and give the same
numbers.

The only module that touches `triton.runtime.interpreter`. A repair names the releases that have the fault. It is
applied only where a probe shows the fault, so another release, or another NumPy, is left as it is; and only in
processes where Triton interprets kernels (TRITON_INTERPRET=1). No kernel's text changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

__all__ = ["REPAIRS", "InterpreterError", "Repair", "interprets", "repair", "words"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One fault of Triton's interpreter and what mends it."""

    name: str
    releases: str  # that have the fault, as far as is known
    reason: str  # what goes wrong, and where
    is_needed: Callable[[], bool]  # a probe without side effects
    apply: Callable[[], None]


def interprets() -> bool:
    """Whether this process was started with TRITON_INTERPRET=1."""
    return bool(triton.knobs.runtime.interpret)


@cache
def repair() -> tuple[str, ...]:
    """Applies the repairs that this release needs, once in a process; returns their names, none outside of one.

    Call it before the first launch of an interpreted kernel.
    """
    if not interprets():
        return ()
    needed = [fault for fault in REPAIRS if fault.is_needed()]
    for fault in needed:
        fault.apply()
    return tuple(fault.name for fault in needed)


def words(error: BaseException) -> str:
    """The exception below the interpreter's own wrappers, on one line: `TypeError: only 0-dimensional ...`."""
    while isinstance(error, InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# --- a value of one element as an index -------------------------------------------------------------------------------


def _index_fails() -> bool:
    from triton.runtime import interpreter

    class Probe:
        pass

    interpreter._patch_lang_tensor(Probe, interpreter._LangPatchScope())
    probe: Any = Probe()
    probe.handle = interpreter.TensorHandle(np.array([1], dtype=np.int32), tl.int32)
    try:
        return int(probe.__index__()) != 1
    except TypeError:
        return True


def _mend_index() -> None:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


# --- the type of a comparison -----------------------------------------------------------------------------------------


def _comparison_spoils_masks() -> bool:
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    number = builder.get_int32(1)
    mask = builder.create_splat(tl.block_type(tl.int1, [1]), builder.create_icmpEQ(number, number))
    return mask.data.dtype != np.bool_ and _store_refuses(mask.data)


def _store_refuses(mask: Any) -> bool:
    """Whether the interpreter's native part takes no mask of this NumPy type; nothing is written."""
    from triton.runtime import interpreter

    memory = np.zeros(1, dtype=np.int32)
    address = np.array([memory.ctypes.data], dtype=np.uint64)
    try:
        interpreter._interpreter.store(address, memory.copy(), np.zeros_like(mask))
    except (TypeError, ValueError):
        return True
    return False


def _mend_comparisons() -> None:
    from triton.runtime import interpreter

    for name in dir(interpreter.InterpreterBuilder):
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(interpreter.InterpreterBuilder, name, _of_truths(getattr(interpreter.InterpreterBuilder, name)))


def _of_truths(compare: Callable[..., Any]) -> Callable[..., Any]:
    from triton.runtime.interpreter import TensorHandle

    def compared(self: Any, lhs: Any, rhs: Any) -> Any:
        return TensorHandle(compare(self, lhs, rhs).data, tl.int1)

    return compared


# --- the language is patched once in a launch -------------------------------------------------------------------------


def _patches_each_call() -> bool:
    """Whether calls of device functions patch, and patches are not remembered."""
    from triton.runtime import interpreter

    calls = "_patch_lang" in interpreter.InterpretedFunction.__call__.__code__.co_names
    return calls and hasattr(interpreter, "GridExecutor") and interpreter._patch_lang.__module__ != __name__


def _patch_once() -> None:
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: list[dict[int, Any]] = []  # of each launch that goes on: by id, the namespaces whose language is patched

    def patch_new(fn: Any) -> Any:
        known = patched[-1] if patched else {}
        if id(fn.__globals__) in known:
            return None  # of a device function, which drops it
        known[id(fn.__globals__)] = fn.__globals__
        return patch(fn)

    def launch_patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.append({})
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.pop()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_patched


# --- sums of integers are not repeated in 64 bits ---------------------------------------------------------------------


def _repeats_sums() -> bool:
    """Whether sums are repeated to look for an overflow that nothing is said of."""
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    return getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True)


def _sum_once() -> None:
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


# --- the facts of a shape are made once -------------------------------------------------------------------------------


_TENSOR, _BLOCK = {"handle", "shape", "numel", "type", "dtype"}, {"element_ty", "shape", "numel", "name"}


def _makes_shapes_anew() -> bool:
    """Whether each value makes its own objects of one shape, and values and types are as this module knows them."""
    kind = tl.block_type(tl.int32, [1])
    first, second = tl.tensor(None, kind), tl.tensor(None, kind)
    return first.shape is not second.shape and vars(first).keys() == _TENSOR and vars(kind).keys() == _BLOCK


def _share_shapes() -> None:
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    make_tensor, make_block, numpy_type = tl.tensor.__init__, tl.block_type.__init__, interpreter._get_np_dtype
    broadcast = TritonSemantic.broadcast_impl_value
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}
    of_blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_elements: dict[str, Any] = {}

    def make_tensor_once(self: Any, handle: Any, kind: Any) -> None:
        sizes = tuple(kind.shape) if kind.is_block() else ()
        if sizes not in of_tensors:
            make_tensor(self, handle, kind)
            of_tensors[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = of_tensors[sizes]

    def make_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if sizes not in of_blocks:
            make_block(self, element_ty, shape)
            of_blocks[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, words = of_blocks[sizes]
        self.name = f"<{words}, {element_ty}>"

    def numpy_type_once(kind: Any) -> Any:
        element = kind.scalar
        if element.name not in of_elements:
            of_elements[element.name] = numpy_type(element)
        return of_elements[element.name]

    def broadcast_unlike(self: Any, left: Any, right: Any) -> Any:
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    tl.tensor.__init__, tl.block_type.__init__ = make_tensor_once, make_block_once
    interpreter._get_np_dtype = numpy_type_once
    TritonSemantic.broadcast_impl_value = broadcast_unlike


# --- numbers of float8 ------------------------------------------------------------------------------------------------


_NAN = {"fp16": 0x7E00, "bf16": 0x7FC0, "fp32": 0x7FC00000}


def _spoils_float8() -> bool:
    """Whether a number that rounds up to the next power of two, one that is too large, or NaN becomes another one."""
    from triton.runtime import interpreter

    numbers = np.array([127.0, 1000.0], dtype=np.float32)
    rounded = interpreter._convert_float(numbers, tl.float32, tl.float8e4nv, interpreter._ir.ROUNDING_MODE.RTNE)
    nan = interpreter._convert_float(np.array([0x7F], dtype=np.uint8), tl.float8e4nv, tl.float32, None)
    return rounded.view(np.uint8).tolist() != [0x70, 0x7E] or not np.isnan(nan.view(np.float32)).all()


def _mend_float8() -> None:
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_as_cards_do(numbers: Any, kind: Any, wanted: Any, rounding: Any) -> Any:
        if kind == tl.float32 and wanted == tl.float8e4nv:
            exact = torch.from_numpy(numbers.view(np.float32)).clamp(-448.0, 448.0)
            return exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        converted = convert(numbers, kind, wanted, rounding)
        if kind == tl.float8e4nv and wanted.name in _NAN:
            nan = (numbers.view(np.uint8) & 0x7F) == 0x7F
            return np.where(nan, converted.dtype.type(_NAN[wanted.name]), converted)
        return converted

    interpreter._convert_float = convert_as_cards_do


REPAIRS = (
    Repair(
        name="index",
        releases="Triton 3.6 with NumPy 2.4 or newer",
        reason=(
            "bounds of loops are values of one element, of which __index__ makes an int by int(array); NumPy 2.4 takes "
            "only arrays without axes there (deprecated since 1.25). Triton 3.7 squeezes the array first"
        ),
        is_needed=_index_fails,
        apply=_mend_index,
    ),
    Repair(
        name="comparison",
        releases="Triton 3.9.0",
        reason=(
            "what a comparison gives carries the type of its operands, so a scalar one that is spread over a block "
            "becomes int32, and so does a mask that it is a part of. Up to Triton 3.8 the native store made booleans "
            "of such a mask; that of 3.9 takes none (mask has unsupported dtype)"
        ),
        is_needed=_comparison_spoils_masks,
        apply=_mend_comparisons,
    ),
    Repair(
        name="float8",
        releases="Triton 3.6 and newer, as far as is known",
        reason=(
            "float32 that rounds up to the next power of two loses its exponent's carry as float8, numbers that are "
            "too large become NaN or others, and NaN of float8 becomes 480. Cards round to nearest even, saturate and "
            "keep NaN (PTX ISA, cvt.satfinite)"
        ),
        is_needed=_spoils_float8,
        apply=_mend_float8,
    ),
    Repair(
        name="patches",
        releases="Triton 3.6 and newer, as far as is known",
        reason=(
            "every call of a device function patches the whole language anew, though the launch around it has done so: "
            "a third of a rehearsal's time"
        ),
        is_needed=_patches_each_call,
        apply=_patch_once,
    ),
    Repair(
        name="overflow",
        releases="Triton 3.6 and newer, as far as is known",
        reason=(
            "each sum and product of integers is repeated in 64 bits to look for an overflow, and nothing is said of "
            "one that is there, since the interpreter's own option `debug` is off: a third of a rehearsal's time"
        ),
        is_needed=_repeats_sums,
        apply=_sum_once,
    ),
    Repair(
        name="shapes",
        releases="Triton 3.6 and newer, as far as is known",
        reason=(
            "every value, and every type of a block, makes a tuple of its shape anew, with a type and a name of that "
            "tuple, every operator compares the two of its operands size by size, and every look-up of a NumPy type "
            "makes the whole table: more than a third of a rehearsal's time"
        ),
        is_needed=_makes_shapes_anew,
        apply=_share_shapes,
    ),
)
