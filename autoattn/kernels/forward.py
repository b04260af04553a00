"""The host side of the forward kernel: what memory asks of its code, and what it is launched with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from autoattn.codegen.argument_names import ELEMENT, strides
from autoattn.core.call_arguments import NUMBERS
from autoattn.core.problem import Problem
from autoattn.core.variant import Traits
from autoattn.errors import TensorError
from autoattn.kernels import bound_launch
from autoattn.kernels.bound_launch import Bound
from autoattn.kernels.compiler import Kernel
from autoattn.kernels.manifest import DealtSizes, described
from autoattn.kernels.tma_descriptor import Axes, Descriptor, box_axes
from autoattn.kernels.zeroed_scratch import POOLS
from autoattn.reference.attention_formula import TORCH_DTYPE, drop_below
from autoattn.tensors.operands import BlockTable, CachedKeys, Operands, View, empty_as
from autoattn.tensors.score_tensors import UNCHANGED, ScoreViews

DTYPE = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPE.items()}
_FLOATS = torch.float16, torch.bfloat16, torch.float32
# Triton's names of what a bias may hold; booleans lie in bytes.
BIAS_ELEMENT = {torch.bool: "u8", **{kind: ELEMENT[DTYPE[kind]] for kind in _FLOATS}}
# Of a call on a cache: names of addresses, and the fields of CachedKeys
CACHE_POINTERS = {"lengths_ptr": "lengths", "pages_ptr": "pages", "cache_rows_ptr": "rows", "leftpad_ptr": "leftpad"}
# The order in which a bound launch takes the addresses of a call's tensors; 0 for one that is not there.
POINTERS = (
    *("query_ptr", "key_ptr", "value_ptr", "output_ptr", "lse_ptr"),
    *("scratch_ptr", "arrivals_ptr", "partial_ptr", "cu_seqlens_q_ptr", "cu_seqlens_kv_ptr"),
    *("bias_ptr", "slopes_ptr", "sinks_ptr"),
    *CACHE_POINTERS,
    *("key_scale_ptr", "value_scale_ptr"),  # of a float8 cache
)
# The numbers of a signature that sizes decide: what calls that differ in sizes alone are launched with.
SIZED = (
    *("batch", "tokens_q", "tokens_kv", "batch_heads", "seq_q", "seq_kv"),
    *(stride for name in "qkvobs" for stride in strides(name)),
)
_VIEWS = "query", "key", "value", "output"
_LSE_STRIDES = strides("l")
FLAGS = 2  # numbers of a scratch in front of those that say of each tile whether it was computed again
TILE_ROWS = 256  # that a tile may reach past the last row before its mask cuts it off
MAX_TILES = 2**31 - 1  # programs of a one-dimensional CUDA grid
MAX_DEALT = 256  # sizes for which a kernel keeps how they are dealt out
ALIGNED = 15  # of an address: what kernels may be made for is that 16 or less divides it, see traits_of


def traits_of(*tensors: Tensor, lse: bool = False, bias: Tensor | None = None) -> Traits:
    """What the memory of query, key, value and output, as [batch, heads, seq, head_dim] views, asks of the code."""
    element, addresses = tensors[0].element_size(), 0
    for tensor in tensors:
        address = tensor.data_ptr()
        if address % element:
            raise TensorError(f"tensors must start at a multiple of their element size, {element} bytes; clone them")
        addresses |= address
    alignment, wide = memory_of_views(map(View.of, tensors), addresses, element)
    if len(tensors) > 1 and tensors[1].element_size() < element:  # a cache of float8, whose rows have fewer bytes
        narrow = tensors[1].element_size()
        steps, _ = memory_of_views(map(View.of, tensors[1:3]), 0, narrow)
        alignment = min(alignment, max(1, steps * narrow // element))
    if bias is None:
        return Traits(alignment=alignment, wide=wide, lse=lse)
    view, element = View.of(bias), BIAS_ELEMENT[bias.dtype]
    aligned, shared = bias_alignment(view, bias.data_ptr(), bias.dtype), is_shared_by_queries(view)
    return Traits(alignment=alignment, wide=wide, lse=lse, bias=element, bias_alignment=aligned, bias_shared=shared)


def merging(traits: Traits, output: Tensor, element: int) -> Traits:
    """The traits of a kernel that merges its output and LSE into those of other keys.

    Args:
        traits: of the call without them.
        output: [batch, heads, seq, head_dim_v] view of what is there, float32 or as the call's own output.
        element: bytes of an element of the query, which the alignment counts.
    """
    alignment, wide = memory_of_views([View.of(output)], output.data_ptr(), element)
    return replace(
        traits, alignment=math.gcd(traits.alignment, alignment), wide=traits.wide or wide, lse=True,
        merged=ELEMENT[DTYPE[output.dtype]],
    )  # fmt: skip


def bias_alignment(bias: View, address: int, dtype: torch.dtype) -> int:
    """What a bias asks of the code that loads it (Traits.bias_alignment): 0, 1 or the elements of 16 bytes.

    No step between them is told apart, since each takes a kernel of its own.

    Args:
        bias: [batch, heads, queries, keys], expanded; booleans of 1 query are those of keys alone.
        address: in bytes; of the 16 that it may be a multiple of.
    """
    *steps, step = bias.strides
    if step != 1 or (dtype is torch.bool and bias.shape[2] == 1):
        return 0
    widest = 16 // dtype.itemsize
    return 1 if address & ALIGNED or any(size % widest for size in (*steps, bias.shape[3])) else widest


def is_shared_by_queries(bias: View) -> bool:
    """Whether all queries share the row of a bias (Traits.bias_shared), [batch, heads, queries, keys], expanded."""
    return bias.shape[2] > 1 and bias.strides[2] == 0


def memory_of_views(views: Iterable[View], addresses: int, element: int) -> tuple[int, bool]:
    """The alignment and the width of these traits."""
    steps, anything, wide = 16 // element | addresses // element, False, False
    for (_, _, seq, head_dim), (stride_b, stride_h, stride_s, stride_d) in views:
        steps |= stride_b | stride_h | stride_s
        anything = anything or stride_d != 1
        wide = wide or (seq - 1 + TILE_ROWS) * stride_s + (head_dim - 1 or 1) * stride_d >= 2**31
    return 1 if anything else steps & -steps, wide  # the lowest bit: what divides all of them


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the output for query, key and value of a dtype."""
    return dtype if dtype is torch.float64 else TORCH_DTYPE[DTYPE[dtype].output]


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the LSE for query, key and value of a dtype."""
    return dtype if dtype is torch.float64 else torch.float32


def reaches_far(query: View, head_dim_v: int) -> bool:
    """Whether offsets inside one head of one sequence of the output can pass 2**31 elements."""
    return (query.shape[2] + TILE_ROWS) * query.without_gaps(head_dim_v).strides[2] >= 2**31


def may_reach_far(problem: Problem) -> bool:
    """Whether offsets inside one sequence of a tensor without gaps may pass 2**31 elements."""
    rows = max(problem.seq_q, problem.seq_kv, problem.tokens_q, problem.tokens_kv) + TILE_ROWS
    return rows * problem.heads_q * max(problem.head_dim, problem.head_dim_v) >= 2**31


def empty_output(problem: Problem, query: Tensor) -> Tensor:
    """A new output that lies in memory as the query does, as a [batch, heads, seq, head_dim_v] view."""
    return empty_as(query, problem.head_dim_v, TORCH_DTYPE[problem.dtype.output])


def launch(
    kernel: Kernel,
    problem: Problem,
    operands: Operands,
    output: Tensor,
    lse: Tensor | None,
    *,
    counting: bool = False,
) -> Tensor | None:
    """Runs the kernel on the current stream of the tensors' device.

    Args:
        output: [batch, heads_q, seq_q, head_dim_v] view
        lse: [batch, heads_q, seq_q] float32, contiguous ([1, heads_q, tokens_q] when packed); None when not wanted.
            A kernel that merges finds output and LSE of other keys there: 0 and -inf where there are none, and of the
            LSE only queries lie side by side.
        counting: give the launch a scratch that nobody else writes to later.

    Returns:
        [tiles] int32, 1 where a tile was computed again; None where a kernel does not say, or nobody counts.
    """
    columns, manifest = None, kernel.manifest
    if manifest.turned is not None:  # room for the values, of which they are copied for each launch
        columns = operands.value.new_empty(manifest.turned(problem.batch, problem.heads_kv, operands.key.shape[2]))
    arguments = launch_arguments(kernel, problem, operands, output, lse, columns)
    scratch = None
    if (needed := zeros(kernel, problem, operands.query)) is not None:
        name, size = needed
        if counting or kernel.device.type != "cuda":
            scratch = operands.query.new_zeros(size, dtype=torch.int32)
        else:
            scratch = POOLS[name].here(kernel.device, size)
        arguments[name] = scratch
    if size := partials(kernel, problem, operands.query):
        arguments["partial_ptr"] = operands.query.new_empty(size, dtype=torch.float32)
    if kernel.before is not None and manifest.grid_before is not None:
        grid = manifest.grid_before(problem.batch, problem.heads_kv, operands.key.shape[2])
        kernel.before.launch(grid, arguments)
    kernel.launch(launch_grid(kernel, problem, operands.query), arguments)
    number = tiles(kernel, problem, operands.query)
    return scratch[FLAGS : FLAGS + number] if counting and scratch is not None and number else None


def bind(kernel: Kernel, problem: Problem, operands: Operands, output: Tensor, lse: Tensor | None) -> Bound:
    """The same launch, for calls that differ from this one in addresses alone, which it takes in the order of POINTERS.

    The call must have no other tensors, booleans of a bias go as bytes, and its kernel has none that runs before it.
    """
    arguments = launch_arguments(kernel, problem, operands, output, lse)
    grid, needed = launch_grid(kernel, problem, operands.query), zeros(kernel, problem, operands.query)
    return bound_launch.bind(kernel, grid, arguments, POINTERS, needed, SIZED)


def resize(
    bound: Bound, kernel: Kernel, problem: Problem, views: tuple[View, View, View, View], scores: ScoreViews = UNCHANGED
) -> Bound:
    """A launch that `bind` made, for a problem of other sizes.

    Args:
        views: of query, key, value and output.
        scores: of bias and slopes.
    """
    boxes = {}
    if kernel.manifest.described:
        boxes = _boxes(kernel, problem, dict(zip(_VIEWS, views, strict=True)))
    needed = zeros(kernel, problem, views[0])
    return bound_launch.resize(
        bound,
        launch_grid(kernel, problem, views[0]),
        sized_arguments(problem, *views, scores=scores),
        boxes,
        0 if needed is None else needed[1],
    )


def zeros(kernel: Kernel, problem: Problem, query: Tensor | View) -> tuple[str, int] | None:
    """The argument for int32 zeros that a launch has to itself while it runs, and how many; None where it needs none.

    scratch_ptr is a launch's own memory, arrivals_ptr the counters of tiles that programs share; no kernel has both.
    """
    return _dealt(kernel, _sizes(kernel, problem, query)).zeros


def tiles(kernel: Kernel, problem: Problem, query: Tensor | View) -> int:
    """Tiles of which a launch's scratch says, from FLAGS on, whether they were computed again; 0 where it does not."""
    return _dealt(kernel, _sizes(kernel, problem, query)).tiles


def partials(kernel: Kernel, problem: Problem, query: Tensor | View) -> int:
    """float32 numbers that programs which share a tile leave for one another; 0 where they share none."""
    return _dealt(kernel, _sizes(kernel, problem, query)).partials


def launch_grid(kernel: Kernel, problem: Problem, query: Tensor | View) -> tuple[int]:
    """How many programs a kernel is launched with."""
    grid = _dealt(kernel, _sizes(kernel, problem, query)).grid
    assert grid is not None
    return grid


def _dealt(kernel: Kernel, sizes: tuple[int, int, int]) -> DealtSizes:
    """What the text of a kernel says of a launch, found out once for batch, heads and rows of each.

    While a key cache grows, these stay. The kernel keeps it, so that it goes when the kernel does.
    """
    dealt = kernel.dealt.get(sizes)
    if dealt is None:
        if len(kernel.dealt) >= MAX_DEALT:
            kernel.dealt.clear()
        dealt = kernel.dealt[sizes] = kernel.manifest.dealt(*sizes, kernel.sm_count)
    return dealt


def _sizes(kernel: Kernel, problem: Problem, query: Tensor | View) -> tuple[int, int, int]:
    """Batch, heads and rows of each, as a kernel deals them out: heads that share keys may be the rows of one."""
    seq = query.shape[2]
    if heads := kernel.manifest.packed_heads:
        return problem.batch, problem.heads_kv * -(-problem.group_size // heads), seq
    if kernel.manifest.packs_all_heads:
        return problem.batch, problem.heads_kv, seq * problem.group_size
    return problem.batch, problem.heads_q, seq


def launch_arguments(
    kernel: Kernel,
    problem: Problem,
    operands: Operands,
    output: Tensor,
    lse: Tensor | None,
    columns: Tensor | None = None,
) -> dict[str, object]:
    """All that a signature may name, but for zeros; `columns` is room for the values that a kernel turns first."""
    tensors = dict(zip(_VIEWS, (operands.query, operands.key, operands.value, output), strict=True))
    views = {name: View.of(tensor) for name, tensor in tensors.items()}
    arguments: dict[str, object] = {
        **_numbers(problem, operands),
        **dict(zip(SIZED, sized_arguments(problem, *views.values(), scores=ScoreViews.of(operands)), strict=True)),
        **{f"{name}_ptr": tensor for name, tensor in tensors.items()},
        "lse_ptr": lse,
    }
    if lse is not None:
        arguments |= dict(zip(_LSE_STRIDES, lse.stride(), strict=False))  # not that of queries, 1
    if problem.modifiers.on_scores or problem.modifiers.dropout or problem.mask.mod:
        arguments |= modifiers(operands)
    if operands.table is not None:
        arguments |= listed(operands.table)
    if operands.cache is not None:
        arguments |= cached(operands.cache) | key_factors(operands.key_scale, operands.value_scale)
    if kernel.manifest.descriptors:
        if columns is not None:
            tensors["value_columns"] = arguments["value_columns_ptr"] = columns
            views["value_columns"] = View.of(columns)
        boxes = _boxes(kernel, problem, views)
        for name in kernel.manifest.descriptors:
            tensor = described(name)
            shape, strides = boxes[tensor]
            arguments[name] = Descriptor(address=tensors[tensor].data_ptr(), shape=shape, strides=strides)
    return arguments


def sized_arguments(
    problem: Problem, query: View, key: View, value: View, output: View, *, scores: ScoreViews = UNCHANGED
) -> tuple[int, ...]:
    """What SIZED names."""
    seq_q, seq_kv, batch = query.shape[2], key.shape[2], problem.batch
    sizes = batch, seq_q, seq_kv, batch * problem.heads_q, seq_q, seq_kv
    of_tensors = *query.strides, *key.strides, *value.strides, *output.strides
    return (*sizes, *of_tensors, *scores.bias_strides, *scores.slope_strides)


def _boxes(kernel: Kernel, problem: Problem, views: dict[str, View]) -> dict[str, Axes]:
    """Shape and strides of the descriptors of a launch, by the names of their tensors."""
    if kernel.manifest.packed_heads:  # a tile has some of the heads that share keys, and none of the next ones
        for name in ("query", "output"):
            (batch, _, *rest), (sequence, head, *steps) = views[name]
            group = problem.group_size
            views[name] = View((batch, problem.heads_kv, group, *rest), (sequence, group * head, head, *steps))
    return {name: box_axes(views[name]) for name in kernel.manifest.described}


def _numbers(problem: Problem, operands: Operands) -> dict[str, Tensor | int | float | None]:
    """What a kernel without modifiers takes beside sizes and the tensors that every call has."""
    return {
        "cu_seqlens_q_ptr": operands.cu_seqlens_q,
        "cu_seqlens_kv_ptr": operands.cu_seqlens_kv,
        "heads_q": problem.heads_q,
        "group_size": problem.group_size,
        "scale": operands.scale,
        "scale_log2": operands.scale * math.log2(math.e),
        "window_left": problem.mask.left,
        "window_right": problem.mask.right,
        "query_scale_ptr": operands.query_scale,
        "key_scale_ptr": operands.key_scale,
        "value_scale_ptr": operands.value_scale,
        "sinks_ptr": operands.sinks,
    }


def modifiers(operands: Operands) -> dict[str, Tensor | int | float | None]:
    """What changes scores and weights, by the names of a signature."""
    arguments: dict[str, Tensor | int | float | None] = {
        **{number.name: getattr(operands, number.name) for number in NUMBERS},
        "slopes_ptr": operands.slopes,
        "seed": operands.seed,
        "drop_below": drop_below(operands.dropout),
        "keep_scale": 1.0 / (1.0 - operands.dropout),
    }
    if operands.bias is not None:
        arguments["bias_ptr"] = operands.bias.view(torch.uint8) if operands.bias.dtype is torch.bool else operands.bias
    for owner, captures in (("score", operands.score_captures), ("mask", operands.mask_captures)):
        for place, tensor in enumerate(captures):
            arguments[f"{owner}_captured{place}_ptr"] = tensor
            for number, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
                arguments[f"{owner}_captured{place}_stride{number}"] = stride
                arguments[f"{owner}_captured{place}_size{number}"] = size
    return arguments


def cached(cache: CachedKeys) -> dict[str, Tensor | int | None]:
    """Where a cache has its keys, by the names of a signature."""
    pages = cache.pages
    return {
        **{name: getattr(cache, field) for name, field in CACHE_POINTERS.items()},
        "capacity": cache.capacity,
        "stride_pb": 0 if pages is None else pages.stride(0),
    }


def key_factors(key_scale: Tensor | None, value_scale: Tensor | None) -> dict[str, Tensor | int | None]:
    """The scales of a float8 cache, [batch, heads_kv], by the names of a signature; empty without them."""
    arguments: dict[str, Tensor | int | None] = {}
    for name, axes, scale in (("key_scale_ptr", "kf", key_scale), ("value_scale_ptr", "vf", value_scale)):
        if scale is not None:
            arguments |= {name: scale, **dict(zip(strides(axes), scale.stride(), strict=True))}
    return arguments


def listed(table: BlockTable, prefix: str = "") -> dict[str, Tensor | int | float | None]:
    """A block table, by the names of a signature; its two lists have the same rows."""
    rows = zip(table.full_counts.shape[:2], table.full_counts.stride()[:2], strict=True)
    arguments: dict[str, Tensor | int | float | None] = {
        "full_counts_ptr": table.full_counts,
        "full_blocks_ptr": table.full_blocks,
        "partial_counts_ptr": table.partial_counts,
        "partial_blocks_ptr": table.partial_blocks,
        **dict(zip(strides("t"), (stride if size > 1 else 0 for size, stride in rows), strict=True)),
        "full_width": table.full_blocks.shape[3],
        "partial_width": table.partial_blocks.shape[3],
    }
    return {f"{prefix}{name}": value for name, value in arguments.items()}
