"""The host side of the kernel that appends keys and values to a cache."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from autoattn.codegen import render
from autoattn.codegen.argument_names import strides
from autoattn.core.kernel_kind import AppendKind
from autoattn.core.problem import DType
from autoattn.kernels import bound_launch, compiler
from autoattn.kernels.bound_launch import Bound
from autoattn.kernels.compiler import Kernel
from autoattn.kernels.forward import CACHE_POINTERS, DTYPE
from autoattn.tensors.appended import Append
from autoattn.tensors.operands import View, empty_as

# The order in which a bound launch takes addresses; 0 for a tensor that is not there
POINTERS = (
    *("new_key_ptr", "new_value_ptr", "key_ptr", "value_ptr", "lengths_ptr", "total_lengths_ptr", "pages_ptr"),
    *("cache_rows_ptr", "query_ptr", "output_ptr", "cos_ptr", "sin_ptr"),
)
MAX_LAUNCHES = 256  # that are kept


def kind_of(given: Append) -> AppendKind:
    """The kind of kernel that an append needs."""
    rotation, page = given.rotation, given.key.shape[2] if given.cache.pages is not None else 0
    return AppendKind(
        dtype=DTYPE[given.key.dtype],
        head_dim=given.key.shape[3],
        head_dim_v=given.value.shape[3],
        page=page,
        rows=given.cache.rows is not None,
        rotary_dim=0 if rotation is None else rotation.rotary_dim,
        interleaved=rotation is not None and rotation.interleaved,
        tables=DType.FLOAT32 if rotation is None else DTYPE[rotation.cos.dtype],
        wide=any(_reaches_far(tensor) for tensor in (given.new_key, given.new_value, given.key, given.value)),
    )


def _reaches_far(tensor: Tensor) -> bool:
    """Whether offsets inside one row of the cache, or one page, can pass 2**31 elements."""
    (_, _, seq, head_dim), (_, _, step, last) = tensor.shape, tensor.stride()
    return bool(seq * step + head_dim * last >= 2**31)


def launch(kernel: Kernel, given: Append) -> tuple[Tensor | None, Tensor]:
    """Appends on the current stream; the same result as `reference.append_formula.append`."""
    query, total = _outputs(given)
    kernel.launch(_grid(kernel, given), _arguments(given, query, total))
    return query, total


def run(given: Append) -> tuple[Tensor | None, Tensor]:
    """The same on a card, by a launch that is kept for appends of the same shapes and strides."""
    query, total = _outputs(given)
    bound = _launches(_shapes(given, query), given.key.device.index)
    if not bound:
        kernel = load_once(kind_of(given), given.key.device.index)
        bound.append(
            bound_launch.bind(kernel, _grid(kernel, given), _arguments(given, query, total), POINTERS, None)
        )
    bound[0](tuple(0 if tensor is None else tensor.data_ptr() for tensor in _tensors(given, query, total)))
    return query, total


@cache
def load_once(kind: AppendKind, index: int) -> Kernel:
    """A kernel on a card, compiled when it is first asked for."""
    return compiler.load(render.append_source(kind), torch.device("cuda", index))


@lru_cache(maxsize=MAX_LAUNCHES)
def _launches(shapes: tuple[object, ...], index: int) -> list[Bound]:
    """The launch of appends of these shapes, once there is one."""
    return []


def _outputs(given: Append) -> tuple[Tensor | None, Tensor]:
    """Room for the rotated query, and for the lengths after the append."""
    rotation = given.rotation
    query = None if rotation is None else empty_as(rotation.query, rotation.query.shape[3])
    return query, torch.empty_like(given.cache.lengths)


def _grid(kernel: Kernel, given: Append) -> tuple[int]:
    assert kernel.manifest.grid is not None
    batch, heads_kv, seq_new, _ = given.new_key.shape
    seq_q, heads_q = (0, 0) if given.rotation is None else (given.rotation.query.shape[2], given.rotation.query.shape[1])
    return kernel.manifest.grid(batch, seq_new, heads_kv, seq_q, heads_q)


def _tensors(given: Append, query: Tensor | None, total: Tensor) -> tuple[Tensor | None, ...]:
    """Those of POINTERS."""
    cache, rotation = given.cache, given.rotation
    rotary = (None, None, None, None)
    if rotation is not None:
        rotary = rotation.query, query, rotation.cos, rotation.sin
    new = given.new_key, given.new_value, given.key, given.value
    return (*new, cache.lengths, total, cache.pages, cache.rows, *rotary)


def _shapes(given: Append, query: Tensor | None) -> tuple[object, ...]:
    """All of an append that a launch is made for, but the addresses."""
    rotation = given.rotation
    tensors = (tensor for tensor in _tensors(given, query, given.cache.lengths) if tensor is not None)
    choices = rotation is not None and (rotation.interleaved, rotation.moving)
    present = given.cache.pages is None, given.cache.rows is None
    return (*((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors), choices, present, given.cache.capacity)


def _arguments(given: Append, query: Tensor | None, total: Tensor) -> dict[str, object]:
    """All that a signature may name."""
    rotation, cache = given.rotation, given.cache
    arguments: dict[str, object] = {
        **dict(zip(POINTERS, _tensors(given, query, total), strict=True)),
        **{name: getattr(cache, field) for name, field in CACHE_POINTERS.items()},
        "stride_pb": 0 if cache.pages is None else cache.pages.stride(0),
        "seq_new": given.new_key.shape[2],
        "capacity": cache.capacity,
        "heads_kv": given.new_key.shape[1],
    }
    views = {"nk": given.new_key, "nv": given.new_value, "k": given.key, "v": given.value}
    if rotation is not None and query is not None:
        views |= {"q": rotation.query, "o": query}
        arguments |= {
            "stride_c": rotation.cos.stride(0),
            "places": rotation.cos.shape[0],
            "seq_q": rotation.query.shape[2],
            "heads_q": rotation.query.shape[1],
            "moving": int(rotation.moving),
        }
    for name, tensor in views.items():
        arguments |= dict(zip(strides(name), View.of(tensor).strides, strict=True))
    return arguments
