"""The host side of the forward kernel: what it is launched with."""

from __future__ import annotations

import math

from torch import Tensor

from autoattn.compile import Kernel
from autoattn.errors import TensorError
from autoattn.problem import DType, Layout, Mask, Precision, Problem
from autoattn.reference import TORCH_DTYPE
from autoattn.variant import Traits

DTYPE = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPE.items()}
MAX_TILES = 2**31 - 1  # programs of a one-dimensional CUDA grid


def problem_of(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, layout: Layout, precision: Precision = Precision.IEEE
) -> Problem:
    """The problem that three tensors pose.

    Args:
        query: [batch, heads_q, seq_q, head_dim], or [batch, seq_q, heads_q, head_dim] when the layout is BSHD
        key, value: the same with heads_kv and seq_kv

    Raises:
        TensorError: the tensors do not make one attention call.
        ProblemError: they do, but a size is not supported.
    """
    _check_tensors(query, key, value, layout)
    heads, seq = (1, 2) if layout is Layout.BHSD else (2, 1)
    dtype = DTYPE[query.dtype]
    return Problem(
        dtype=dtype,
        batch=query.shape[0],
        heads_q=query.shape[heads],
        heads_kv=key.shape[heads],
        seq_q=query.shape[seq],
        seq_kv=key.shape[seq],
        head_dim=query.shape[3],
        mask=mask,
        layout=layout,
        precision=precision if dtype is DType.FLOAT32 else Precision.IEEE,
    )


def traits_of(*tensors: Tensor, lse: bool = False) -> Traits:
    """What the memory of query, key, value and output, as [batch, heads, seq, head_dim] views, asks of the code."""
    element = tensors[0].element_size()
    alignment = 16 // element
    wide = False
    for tensor in tensors:
        _, _, seq, head_dim = tensor.shape
        stride_b, stride_h, stride_s, stride_d = tensor.stride()
        reach = (seq - 1) * stride_s + max(head_dim - 1, 1) * stride_d
        # A tile reaches 256 rows past the last one before its mask cuts it off.
        wide = wide or reach + 256 * stride_s >= 2**31
        if stride_d != 1:
            alignment = 1
        for step in (stride_b, stride_h, stride_s, tensor.data_ptr() // element):
            alignment = math.gcd(alignment, step)
        if tensor.data_ptr() % element:
            raise TensorError(f"tensors must start at a multiple of their element size, {element} bytes; clone them")
    return Traits(alignment=alignment, wide=wide, lse=lse)


def empty_output(query: Tensor, layout: Layout) -> Tensor:
    """A new output, contiguous in `layout`, as a [batch, heads, seq, head_dim] view."""
    batch, heads, seq, head_dim = query.shape
    if layout is Layout.BSHD:
        return query.new_empty(batch, seq, heads, head_dim).transpose(1, 2)
    return query.new_empty(batch, heads, seq, head_dim)


def launch(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor | None, scale: float
) -> None:
    """Runs the kernel on [batch, heads, seq, head_dim] views, on the current stream of the tensors' device."""
    batch, heads_q, seq_q, _ = query.shape
    arguments: dict[str, Tensor | int | float | None] = {
        "query_ptr": query,
        "key_ptr": key,
        "value_ptr": value,
        "output_ptr": output,
        "lse_ptr": lse,
        "batch_heads": batch * heads_q,
        "heads_q": heads_q,
        "group_size": heads_q // key.shape[1],
        "seq_q": seq_q,
        "seq_kv": key.shape[2],
        "scale_log2": scale * math.log2(math.e),
    }
    for name, tensor in (("q", query), ("k", key), ("v", value), ("o", output)):
        for axis, stride in zip("bhsd", tensor.stride(), strict=True):
            arguments[f"stride_{name}{axis}"] = stride
    kernel.launch(kernel.module.grid(batch * heads_q, seq_q, kernel.sm_count), arguments)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> None:
    axes = "[batch, heads, seq, head_dim]" if layout is Layout.BHSD else "[batch, seq, heads, head_dim]"
    heads = 1 if layout is Layout.BHSD else 2
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TensorError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it first")
        if tensor.dim() != 4:
            raise TensorError(f"{name} must be {axes}, got shape {tuple(tensor.shape)}; add or merge axes")
        if tensor.dtype not in DTYPE:
            raise TensorError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}; cast it with .to()")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TensorError(f"{name} must have the query's dtype {query.dtype}, got {tensor.dtype}; cast one of them")
        if tensor.device != query.device:
            raise TensorError(f"{name} must be on the query's device {query.device}, got {tensor.device}; move it")
        if tensor.shape[0] != query.shape[0] or tensor.shape[3] != query.shape[3]:
            raise TensorError(
                f"{name} must be {axes} with the query's batch {query.shape[0]} and head_dim {query.shape[3]}, "
                f"got shape {tuple(tensor.shape)}; check the axes and the layout"
            )
    if key.shape != value.shape:
        raise TensorError(
            f"key and value must have one shape, got {tuple(key.shape)} and {tuple(value.shape)}; check the axes"
        )
    if 0 in query.shape or 0 in key.shape:
        raise TensorError(
            f"query and key must not be empty, got shapes {tuple(query.shape)} and {tuple(key.shape)}; skip the call"
        )
    if query.shape[heads] % key.shape[heads]:
        raise TensorError(
            f"query heads must be a multiple of key heads, got {query.shape[heads]} and {key.shape[heads]}; "
            "check the layout or repeat the key heads"
        )
