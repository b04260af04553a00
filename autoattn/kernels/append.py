"""The host side of the kernel that appends keys and values to a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from autoattn.codegen.argument_names import strides
from autoattn.core.kernel_kind import AppendKind
from autoattn.core.problem import DType
from autoattn.kernels import bound_launch
from autoattn.kernels.bound_launch import Bound
from autoattn.kernels.compiler import Kernel
from autoattn.kernels.forward import DTYPE, cached, key_factors
from autoattn.tensors.appended import Append
from autoattn.tensors.operands import View, empty_as

# The addresses that a bound launch takes, in its order, of what there is
POINTERS = (
    *("query_ptr", "key_ptr", "value_ptr", "lengths_ptr", "pages_ptr", "cache_rows_ptr", "new_key_ptr"),
    *("new_value_ptr", "key_scale_ptr", "value_scale_ptr", "cos_ptr", "sin_ptr", "total_lengths_ptr", "output_ptr"),
)


def kind_of(given: Append) -> AppendKind:
    """The kind of kernel that an append needs."""
    rotation, page = given.rotation, given.key.shape[2] if given.cache.pages is not None else 0
    return AppendKind(
        dtype=DTYPE[given.new_key.dtype],
        head_dim=given.key.shape[3],
        head_dim_v=given.value.shape[3],
        page=page,
        rows=given.cache.rows is not None,
        float8=given.key_scale is not None,
        latent=given.latent,
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
    query, total = outputs(given)
    kernel.launch(_grid(kernel, given), _arguments(given, query, total))
    return query, total


def bind(kernel: Kernel, given: Append) -> Bound:
    """The same launch, for appends that differ from this one in addresses alone, which it takes in the order of
    POINTERS without those that the append has not."""
    query, total = outputs(given)
    arguments = _arguments(given, query, total)
    # Every call has a query, whether or not the kernel reads it.
    order = tuple(name for name in POINTERS if name == "query_ptr" or isinstance(arguments.get(name), Tensor))
    return bound_launch.bind(kernel, _grid(kernel, given), arguments, order, None)


def outputs(given: Append) -> tuple[Tensor | None, Tensor]:
    """Room for the rotated query, where there is a rotation, and for the lengths after the append."""
    rotation = given.rotation
    query = None if rotation is None else empty_as(rotation.query, rotation.query.shape[3])
    return query, torch.empty_like(given.cache.lengths)


def _grid(kernel: Kernel, given: Append) -> tuple[int]:
    assert kernel.manifest.grid is not None
    batch, heads_kv, seq_new, _ = given.new_key.shape
    seq_q, heads_q = (
        (0, 0) if given.rotation is None else (given.rotation.query.shape[2], given.rotation.query.shape[1])
    )
    return kernel.manifest.grid(batch, seq_new, heads_kv, seq_q, heads_q)


def _arguments(given: Append, query: Tensor | None, total: Tensor) -> dict[str, object]:
    """All that a signature may name."""
    rotation = given.rotation
    arguments: dict[str, object] = {
        "new_key_ptr": given.new_key,
        "new_value_ptr": given.new_value,
        "key_ptr": given.key,
        "value_ptr": given.value,
        "total_lengths_ptr": total,
        **cached(given.cache),
        **key_factors(given.key_scale, given.value_scale),
        "seq_new": given.new_key.shape[2],
        "heads_kv": given.new_key.shape[1],
    }
    views = {"nk": given.new_key, "nv": given.new_value, "k": given.key, "v": given.value}
    if rotation is not None and query is not None:
        views |= {"q": rotation.query, "o": query}
        arguments |= {
            "query_ptr": rotation.query,
            "output_ptr": query,
            "cos_ptr": rotation.cos,
            "sin_ptr": rotation.sin,
            "stride_c": rotation.cos.stride(0),
            "places": rotation.cos.shape[0],
            "seq_q": rotation.query.shape[2],
            "heads_q": rotation.query.shape[1],
            "moving": int(rotation.moving),
        }
    for name, tensor in views.items():
        arguments |= dict(zip(strides(name), View.of(tensor).strides, strict=True))
    return arguments
