"""The names of Triton and Gluon that rendered kernels import, as functions that run at once."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from autoattn.errors import InterpretationError
from autoattn.kernels.gluon_interpreter import mbarriers, scheduler, shared_memory, tma, warpgroup_mma
from autoattn.kernels.gluon_interpreter.inline_assembly import inline_asm_elementwise
from autoattn.kernels.gluon_interpreter.scheduler import Partition
from autoattn.kernels.gluon_interpreter.tensors import (
    PointerType,
    Tensor,
    converted,
    extreme,
    row_max,
    row_sum,
    to_tensor,
    where,
)


class Namespace(SimpleNamespace):
    """A module of Triton's, with the names that the interpreter knows."""

    def __getattr__(self, name: str) -> Any:
        raise InterpretationError(f"the interpreter must know the names of a kernel, and {self.__name__} has no {name}")


class Layout:
    """A layout, which says nothing here."""

    def __init__(self, *args: object, **facts: object) -> None:
        self.facts = args, facts

    def __repr__(self) -> str:
        return "layout"


class MBarrierLayout(Layout):
    """The layout of mbarriers."""


class JitFunction:
    """A function of a kernel: called from others it runs, and with a grid it is launched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.arg_names = list(inspect.signature(function).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def jit(function: Callable[..., Any] | None = None, *, noinline: bool = False) -> Any:
    """The decorator of both languages, with or without arguments; a function that stays one runs like others."""
    return JitFunction(function) if function is not None else JitFunction


def builtin(function: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator of functions that build operations: an addition to memory by the TMA unit, and a call."""
    builder = SimpleNamespace(
        create_async_tma_reduce=lambda kind, box, place, tile: tma.store(box, place, tile, adds=True)
    )
    semantic = SimpleNamespace(builder=builder, _convert_to_ir_values=lambda values, require_i64: values)
    generator = SimpleNamespace(call_JitFunction=lambda called, args, named, context: called(*args, **named))
    inner = {"_semantic": semantic, "_generator": generator}
    wanted = {name: inner[name] for name in inspect.signature(function).parameters if name in inner}
    return lambda *args: function(*args, **wanted)


def loop_range(*bounds: Any) -> Any:
    """range() as kernels have it: of values in registers, it counts in such values."""
    if any(isinstance(bound, Tensor) for bound in bounds):
        return _counted(*map(int, bounds))
    return builtins.range(*bounds)


def _counted(*bounds: int) -> Iterator[Tensor]:
    return map(to_tensor, builtins.range(*bounds))


def cdiv(left: Any, right: Any) -> Any:
    """The quotient, rounded up, of numbers that are not negative."""
    return (left + right - 1) // right


def warp_specialize(
    roles: Sequence[tuple[JitFunction, tuple[Any, ...]]], warps: Sequence[int], registers: object
) -> None:
    """Runs each role as a partition; the first has the warps of the kernel."""
    whole = scheduler.current()
    partitions = []
    for (function, args), count in zip(roles, (whole.warps, *warps), strict=True):
        number = f"({args[0]})" if args and isinstance(args[0], int) else ""
        name = f"{function.__name__}{number}"
        partitions.append(
            Partition(
                name=name,
                warps=count,
                program=whole.program,
                knowledge=whole.knowledge.copy(),
                written=[*whole.written],
            )
        )
    bodies = [lambda role=role: role[0](*role[1]) for role in roles]
    whole.program.run(list(zip(partitions, bodies, strict=True)))
    for partition in partitions:
        whole.knowledge.learn(partition.knowledge)
        whole.written += partition.written
        whole.stores += partition.stores
    whole.program.check_idle()


def thread_barrier() -> None:
    """All threads of the partition meet."""
    scheduler.current().knowledge.settle()


def fence_async_shared(cluster: bool = False) -> None:
    """fence.proxy.async: what this partition knows to be written by threads, the async proxy may read."""
    partition = scheduler.current()
    partition.knowledge.fenced |= partition.knowledge.seen
    if partition.warps == 1:
        partition.knowledge.settle()


def allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: Layout) -> Any:
    """Room for data, or for barriers."""
    return mbarriers.allocate(shape) if isinstance(layout, MBarrierLayout) else shared_memory.allocate(dtype, shape)


def load(pointer: Tensor, mask: Any = None, other: Any = None, cache_modifier: str = "") -> Tensor:
    """Global memory at addresses; of caches there is no model."""
    return scheduler.current().program.memory.load(pointer, None if mask is None else to_tensor(mask), other)


def store(pointer: Tensor, value: Any, mask: Any = None) -> None:
    """The same, written."""
    scheduler.current().program.memory.store(pointer, to_tensor(value), None if mask is None else to_tensor(mask))


def atomic_add(pointer: Tensor, value: Any, sem: str = "acq_rel", scope: str = "gpu") -> Tensor:
    """Adds to global memory; gives what was there. Programs follow one another, so that no order is left open."""
    return scheduler.current().program.memory.add(pointer, to_tensor(value))


def full(shape: Sequence[int], value: Any, dtype: torch.dtype, layout: object = None) -> Tensor:
    """A block of one number."""
    number = converted(to_tensor(value).data, dtype)
    return Tensor(number.expand([int(size) for size in shape]).clone())


def arange(begin: Any, end: Any, layout: object = None) -> Tensor:
    """A row of int32."""
    return Tensor(torch.arange(int(begin), int(end), dtype=torch.int32))


def associative_scan(value: Tensor, axis: int, combine: Callable[[Any, Any], Any]) -> Tensor:
    """What `combine` makes of all elements up to each, along an axis."""
    rows = [Tensor(row) for row in value.data.unbind(axis)]
    for place in range(1, len(rows)):
        rows[place] = combine(rows[place - 1], rows[place])
    return Tensor(torch.stack([row.data for row in rows], axis))


def _extreme(largest: bool) -> Callable[[Any, Any], Any]:
    return lambda left, right: extreme(left, right, largest=largest)


def _elementwise(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Tensor]:
    return lambda value: Tensor(function(to_tensor(value).data))


_MATHS: Mapping[str, Any] = {
    "cdiv": cdiv,
    "where": where,
    "maximum": _extreme(True),
    "minimum": _extreme(False),
    "max": row_max,
    "sum": row_sum,
    "associative_scan": associative_scan,
    **{name: _elementwise(getattr(torch, name)) for name in ("exp2", "exp", "log2", "log", "abs", "floor")},
    **{name: _elementwise(getattr(torch, name)) for name in ("sqrt", "rsqrt", "cos", "sin")},
    "split": lambda pairs: (pairs[..., 0], pairs[..., 1]),
    "join": lambda left, right: Tensor(torch.stack((left.data, right.data), -1)),
    "reshape": lambda value, shape: value.reshape(shape),
    "permute": lambda value, axes: value.permute(axes),
    "convert_layout": lambda value, layout, assert_trivial=False: value,
    "to_tensor": to_tensor,
    "full": full,
    "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype),
    "arange": arange,
}
_DTYPES: Mapping[str, Any] = {
    "int1": torch.bool,
    **{name: getattr(torch, name) for name in ("int8", "uint8", "int16", "int32", "int64")},
    "uint32": torch.int32,
    "uint64": torch.int64,  # of addresses, whose sign no kernel asks for
    **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")},
    "float8e4nv": torch.float8_e4m3fn,
    "pointer_type": PointerType,
}
_LAYOUTS = (
    "NVMMASharedLayout",
    "SwizzledSharedLayout",
    "NVMMADistributedLayout",
    "DotOperandLayout",
    "SliceLayout",
    "BlockedLayout",
)
_LANGUAGE: Mapping[str, Any] = {
    **_MATHS,
    **_DTYPES,
    **dict.fromkeys(_LAYOUTS, Layout),
    "constexpr": lambda value: value,
    "static_range": builtins.range,
    "program_id": lambda axis: to_tensor(scheduler.current().program.number if axis == 0 else 0),
    "num_programs": lambda axis: to_tensor(scheduler.current().program.count if axis == 0 else 1),
    "load": load,
    "store": store,
    "atomic_add": atomic_add,
    "inline_asm_elementwise": inline_asm_elementwise,
    "warp_specialize": warp_specialize,
    "allocate_shared_memory": allocate_shared_memory,
    "thread_barrier": thread_barrier,  # until Triton 3.6
    "barrier": thread_barrier,
}
_HOPPER: Mapping[str, Any] = {
    "fence_async_shared": fence_async_shared,
    "mbarrier": Namespace(
        __name__="mbarrier",
        MBarrierLayout=MBarrierLayout,
        **{name: getattr(mbarriers, name) for name in ("init", "invalidate", "expect", "arrive", "wait")},
    ),
    "tma": Namespace(
        __name__="tma",
        async_copy_global_to_shared=tma.load,  # until Triton 3.8
        async_load=tma.load,
        async_copy_shared_to_global=tma.store,
        async_store=tma.store,
        store_wait=tma.store_wait,
    ),
    "warpgroup_mma": warpgroup_mma.warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma.warpgroup_mma_wait,
}


def _modules() -> dict[str, Namespace]:
    gluon_language = Namespace(__name__="triton.experimental.gluon.language", **_LANGUAGE)
    gluon = Namespace(__name__="triton.experimental.gluon", jit=jit, language=gluon_language)
    language = Namespace(__name__="triton.language", **_LANGUAGE)
    return {
        "triton": Namespace(__name__="triton", jit=jit, cdiv=cdiv, language=language),
        "triton.language": language,
        "triton.experimental": Namespace(__name__="triton.experimental", gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language._core": Namespace(__name__="gluon._core", builtin=builtin),
        "triton.experimental.gluon.language._semantic": Namespace(
            __name__="gluon._semantic", GluonCallerContext=lambda num_warps: None
        ),
        "triton.experimental.gluon.language.nvidia.hopper": Namespace(__name__="gluon.nvidia.hopper", **_HOPPER),
        "triton._C.libtriton": Namespace(
            __name__="triton._C.libtriton", ir=SimpleNamespace(DESCRIPTOR_REDUCE_KIND=SimpleNamespace(ADD="add"))
        ),
    }


_MODULES = _modules()


def import_module(name: str, *scope: object, **named: object) -> Any:
    """What an import of a rendered kernel gives; it is called as Python's own __import__."""
    fromlist = named.get("fromlist", scope[2] if len(scope) > 2 else ())
    if name not in _MODULES:
        raise InterpretationError(f"a rendered kernel must import what the interpreter knows, got {name}")
    return _MODULES[name if fromlist else name.split(".")[0]]


BUILTINS: Mapping[str, Any] = {**vars(builtins), "__import__": import_module, "range": loop_range}
