"""The host side of the backward kernels: gradients of query, key and value, of sinks, learned slopes and biases."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from autoattn.codegen.argument_names import strides
from autoattn.core.modifiers import Bias
from autoattn.core.problem import DType, Problem
from autoattn.kernels import bound_launch, forward
from autoattn.kernels.bound_launch import Bound
from autoattn.kernels.compiler import Kernel
from autoattn.kernels.manifest import Language, described
from autoattn.kernels.tma_descriptor import Descriptor, box_axes
from autoattn.tensors import block_table
from autoattn.tensors.operands import Gradients, Operands, Saved, View, empty_as
from autoattn.tensors.score_tensors import UNCHANGED, ScoreViews

COPIES = ("query", "key", "output_grad")  # of which kernels make turned copies, where they do
# The order in which bound launches take the addresses of a call's tensors: 0 for one that is not there, and none of
# copies where there are none.
POINTERS = (
    *("query_ptr", "key_ptr", "value_ptr", "output_ptr", "lse_ptr", "output_grad_ptr", "lse_grad_ptr"),
    *("row_lse_ptr", "delta_ptr", "query_sums_ptr", "query_grad_ptr", "key_grad_ptr", "value_grad_ptr"),
    *("cu_seqlens_q_ptr", "cu_seqlens_kv_ptr", "turns_ptr", "bias_ptr", "slopes_ptr"),
    *("bias_grad_ptr", "bias_sums_ptr", "slope_rows_ptr", "slope_grad_ptr", "key_sums_ptr"),
    *(f"{name}_copy_ptr" for name in COPIES),
)
# The numbers of a signature that sizes decide: what calls that differ in sizes alone are launched with.
SIZED = (
    *("batch", "tokens_q", "tokens_kv", "seq_q", "seq_kv", "stride_r", "stride_c"),
    *(stride for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv", "b", "s", "g") for stride in strides(name)),
    *("bias_batch", "bias_heads", "bias_queries", "bias_keys"),
)
VIEWS = "query", "key", "value", "output", "output_grad", "query_grad", "key_grad", "value_grad"  # as SIZED has them
ROW_STEP = 128  # rows of a head's LSE and delta lie in a multiple of it, so that every tile of queries has room
EDGE = 1 << 30  # rows of a ragged descriptor; templates have the same
_WRAPS = 0x7FFF0000  # more than any coordinate of the first two axes, and an int32
SUMS_IN_LINE = 32  # of the queries' gradients, where the TMA unit adds them: a line of 128 bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scratch:
    """What the kernels of a launch leave for one another; all of it is written before it is read."""

    # [2 or 3, batch, heads_q, rows] float32: each query's LSE in powers of two, its delta, and what it gives to the
    # gradient of a learned slope.
    rows: Tensor
    sums: Tensor | None  # [numbers] float32, in which the queries' gradients are added up; None where none are
    turns: Tensor | None  # [counters] int32, of programs that have added; None where they add as they come
    # [numbers] float32, what programs leave of the gradients of keys and values that they share; None where none do
    key_sums: Tensor | None
    copies: dict[str, Tensor] = field(default_factory=dict)  # of COPIES -> [batch, heads, head_dim, rows]; maybe none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScratchShapes:
    """Of the tensors of a Scratch, by the same names; 0 for one that is not there."""

    rows: tuple[int, int, int, int]
    sums: int
    turns: int
    key_sums: int
    copies: dict[str, tuple[int, ...]]


def empty_gradients(problem: Problem, operands: Operands) -> Gradients:
    """New gradients, each in memory as its tensor lies, as [batch, heads, seq, head_dim] views.

    Args:
        problem: backward; it says whether a bias and slopes have gradients.
    """
    three = operands.query, operands.key, operands.value
    query, key, value = (empty_as(tensor, tensor.shape[3]) for tensor in three)
    sinks = torch.empty_like(operands.sinks) if operands.sinks is not None else None
    narrow = operands.narrow_bias
    bias = narrow.new_empty(narrow.shape) if narrow is not None and problem.modifiers.bias is Bias.LEARNED else None
    slopes = None
    if operands.slopes is not None and problem.modifiers.learned_slopes:
        slopes = operands.slopes.new_empty(operands.slopes.shape)
    return Gradients(query=query, key=key, value=value, sinks=sinks, bias=bias, slopes=slopes)


def launch(kernel: Kernel, problem: Problem, operands: Operands, saved: Saved, gradients: Gradients) -> None:
    """Runs the kernels on the current stream of the tensors' device."""
    scratch = empty_scratch(kernel, problem, operands.query, operands.key)
    bias_sums = _empty_bias_sums(kernel, problem, gradients)
    arguments = _arguments(kernel, problem, operands, saved, gradients, scratch, bias_sums)
    bias = () if gradients.bias is None else tuple(gradients.bias.shape[:2])
    grids = grids_of(kernel, problem, operands.query.shape[2], operands.key.shape[2], bias)
    for part in kernel.parts:
        part.launch(grids[part.name], arguments)
    _settle(kernel, operands, gradients, scratch, bias_sums)


def _settle(
    kernel: Kernel, operands: Operands, gradients: Gradients, scratch: Scratch, bias_sums: Tensor | None
) -> None:
    """Writes the gradients that are sums of what the launches left: of a shared bias, and of sinks."""
    if gradients.bias is not None and bias_sums is not None:
        add_bias_sums(gradients.bias, bias_sums)
    if operands.sinks is not None and gradients.sinks is not None:
        rows = rows_with_queries(kernel, scratch.rows, operands.query.shape[2])
        gradients.sinks.copy_(sink_gradient(operands.sinks, rows))


def bind(
    kernel: Kernel, problem: Problem, operands: Operands, saved: Saved, gradients: Gradients, scratch: Scratch
) -> tuple[Bound, ...]:
    """The same launches, for calls that differ from this one in addresses alone, which they take in the order of
    POINTERS; there must be no other tensors.
    """
    bias_sums = _empty_bias_sums(kernel, problem, gradients)
    arguments = _arguments(kernel, problem, operands, saved, gradients, scratch, bias_sums)
    bias = () if gradients.bias is None else tuple(gradients.bias.shape[:2])
    grids = grids_of(kernel, problem, operands.query.shape[2], operands.key.shape[2], bias)
    return tuple(bound_launch.bind(part, grids[part.name], arguments, POINTERS, None, SIZED) for part in kernel.parts)


def resize(
    launches: tuple[Bound, ...], kernel: Kernel, problem: Problem, views: Mapping[str, View], shapes: ScratchShapes,
    scores: ScoreViews = UNCHANGED,
) -> tuple[Bound, ...]:  # fmt: skip
    """Launches that `bind` made, for a problem of other sizes.

    Args:
        views: of VIEWS.
        shapes: the problem's `scratch_shapes`.
        scores: of bias and slopes.
    """
    query = views["query"]
    numbers = sized_arguments(problem, views, shapes, scores)
    read = _read(kernel, views, shapes)
    boxes = {name: box_axes(read[name]) for name in kernel.manifest.described}
    learned = problem.modifiers.bias is Bias.LEARNED
    grids = grids_of(kernel, problem, query.shape[2], views["key"].shape[2], scores.bias_sizes[:2] if learned else ())
    return tuple(
        bound_launch.resize(bound, grids[part.name], numbers, boxes, 0)
        for part, bound in zip(kernel.parts, launches, strict=True)
    )


def may_bind(problem: Problem, query: Tensor) -> bool:
    """Whether a call has no tensors but those of POINTERS, and runs on a card rather than in Triton's interpreter."""
    more = problem.modifiers.dropout or problem.modifiers.score_mod or problem.mask.sparse
    return query.is_cuda and not more and problem.dtype is not DType.FLOAT8


def ready(
    kernel: Kernel, problem: Problem, operands: Operands, saved: Saved, like: Gradients | None = None
) -> Callable[[Gradients], None]:
    """What launches the kernels on these tensors again and again, each time with a scratch of its own.

    Where it may, it does so by bound launches, as calls do: that costs the host less than is hidden from who times it.

    Args:
        like: gradients that lie as those will that it is called with; when None, as `empty_gradients` has them.
    """
    if not may_bind(problem, operands.query):
        return partial(launch, kernel, problem, operands, saved)
    like = like or empty_gradients(problem, operands)
    scratch = empty_scratch(kernel, problem, operands.query, operands.key)
    launches = bind(kernel, problem, operands, saved, like, scratch)

    def again(gradients: Gradients) -> None:
        scratch = empty_scratch(kernel, problem, operands.query, operands.key)
        bias_sums = _empty_bias_sums(kernel, problem, gradients)
        addresses = addresses_of(operands, saved, gradients, scratch, bias_sums)
        for bound in launches:
            bound(addresses)
        _settle(kernel, operands, gradients, scratch, bias_sums)

    return again


def addresses_of(
    operands: Operands, saved: Saved, gradients: Gradients, scratch: Scratch, bias_sums: Tensor | None = None
) -> tuple[int, ...]:
    """What bound launches take: addresses in the order of POINTERS.

    Args:
        bias_sums: where the launches leave sums of a bias's gradient, in `bias_sums_shape`; None where they leave it.
    """
    tensors = (
        operands.query, operands.key, operands.value, saved.output, saved.lse, saved.output_grad, saved.lse_grad,
        scratch.rows[0], scratch.rows[1], scratch.sums, gradients.query, gradients.key, gradients.value,
        operands.cu_seqlens_q, operands.cu_seqlens_kv, scratch.turns, operands.bias, operands.slopes,
        gradients.bias, gradients.bias if bias_sums is None else bias_sums,
        scratch.rows[2] if gradients.slopes is not None else None, gradients.slopes, scratch.key_sums,
        *map(scratch.copies.get, COPIES),
    )  # fmt: skip
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


def grids_of(
    kernel: Kernel, problem: Problem, rows_q: int, rows_kv: int, bias: tuple[int, ...] = ()
) -> dict[str, tuple[int]]:
    """Name of each kernel -> how many programs it is launched with.

    Args:
        rows_q: of the query's view; of packed sequences, their tokens.
        rows_kv: of the key's.
        bias: batch and heads of a bias that has a gradient.
    """
    assert kernel.manifest.grids is not None
    grids = kernel.manifest.grids(problem.batch, problem.heads_q, problem.heads_kv, rows_q, rows_kv, *bias)
    for name, programs in kernel.manifest.programs_an_sm.items():
        grids[name] = (min(*grids[name], programs * kernel.sm_count),)
    return grids


def rows_with_queries(kernel: Kernel, rows: Tensor, queries: int) -> Tensor:
    """The rows of a scratch that a sink's gradient is summed over, [2, batch, heads_q, rows].

    Those of the first `queries`, or all where packed sequences begin at rows of their own and kernels clear the others.
    """
    return rows[:2] if kernel.manifest.rows is not None else rows[:2, ..., :queries]


def sink_gradient(sinks: Tensor, rows: Tensor) -> Tensor:
    """The gradient of sinks [heads_q], each a score without a value: minus its weight times delta, over all queries.

    Args:
        rows: [2, batch, heads_q, seq_q], each query's LSE in powers of two, and its delta.
    """
    row_lse, delta = rows
    weights = torch.exp2(sinks[:, None] * math.log2(math.e) - row_lse)
    return -(weights * delta).sum((0, 2))


def scratch_shapes(kernel: Kernel, problem: Problem, query: Tensor | View, key: Tensor | View) -> ScratchShapes:
    """What `empty_scratch` allocates."""
    batch, heads_q, seq_q, _ = query.shape
    numbers = 3 if problem.modifiers.learned_slopes else 2
    sums, turns = (
        0 if numbers is None else int(numbers(problem.batch, problem.heads_q, seq_q))
        for numbers in (kernel.manifest.sums, kernel.manifest.turns)
    )
    key_sums = 0
    if kernel.manifest.key_sums is not None:
        key_sums = int(kernel.manifest.key_sums(problem.batch, problem.heads_q, problem.heads_kv, key.shape[2]))
    sizes = problem.batch, problem.heads_q, problem.heads_kv, seq_q, problem.seq_kv
    copies = kernel.manifest.copies(*sizes) if kernel.manifest.copies is not None else {}
    rows_of_head = -(-seq_q // ROW_STEP) * ROW_STEP
    if kernel.manifest.rows is not None:
        rows_of_head = int(kernel.manifest.rows(problem.batch, seq_q))
    rows = numbers, batch, heads_q, rows_of_head
    return ScratchShapes(rows=rows, sums=sums, turns=turns, key_sums=key_sums, copies=copies)


def empty_scratch(kernel: Kernel, problem: Problem, query: Tensor, key: Tensor) -> Scratch:
    """Room for what the kernels of one launch leave for one another."""
    shapes, manifest = scratch_shapes(kernel, problem, query, key), kernel.manifest
    return Scratch(
        rows=query.new_empty(shapes.rows, dtype=torch.float32),
        sums=query.new_empty(shapes.sums, dtype=torch.float32) if manifest.sums is not None else None,
        turns=query.new_empty(shapes.turns, dtype=torch.int32) if manifest.turns is not None else None,
        key_sums=query.new_empty(shapes.key_sums, dtype=torch.float32) if manifest.key_sums is not None else None,
        copies={name: query.new_empty(shape) for name, shape in shapes.copies.items()},
    )


def _arguments(
    kernel: Kernel, problem: Problem, operands: Operands, saved: Saved, gradients: Gradients, scratch: Scratch,
    bias_sums: Tensor | None,
) -> dict[str, object]:  # fmt: skip
    """All that a signature may name."""
    three = gradients.query, gradients.key, gradients.value
    of_views = operands.query, operands.key, operands.value, saved.output, saved.output_grad, *three
    tensors = dict(zip(VIEWS, of_views, strict=True))
    views = {name: View.of(tensor) for name, tensor in tensors.items()}
    shapes = scratch_shapes(kernel, problem, views["query"], views["key"])
    arguments: dict[str, object] = {
        **dict(zip(SIZED, sized_arguments(problem, views, shapes, ScoreViews.of(operands)), strict=True)),
        **{f"{name}_ptr": tensor for name, tensor in tensors.items()},
        "lse_ptr": saved.lse,
        "lse_grad_ptr": saved.lse_grad,
        "row_lse_ptr": scratch.rows[0],
        "delta_ptr": scratch.rows[1],
        "query_sums_ptr": scratch.sums,
        "turns_ptr": scratch.turns,
        "key_sums_ptr": scratch.key_sums,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "cu_seqlens_q_ptr": operands.cu_seqlens_q,
        "cu_seqlens_kv_ptr": operands.cu_seqlens_kv,
        "scale": operands.scale,
        "window_left": problem.mask.left,
        "window_right": problem.mask.right,
    }
    if problem.modifiers.on_scores or problem.modifiers.dropout or problem.mask.mod:
        arguments |= forward.modifiers(operands)
    if operands.table is not None:
        arguments |= forward.listed(operands.table)
        arguments |= forward.listed(block_table.turned(operands.table, operands.key.shape[2]), "turned_")
    if scratch.copies:
        arguments |= {f"{name}_copy_ptr": copy for name, copy in scratch.copies.items()}
    if gradients.slopes is not None:
        arguments |= {"slope_rows_ptr": scratch.rows[2], "slope_grad_ptr": gradients.slopes}
    if gradients.bias is not None:
        arguments |= _of_bias(operands, gradients.bias, bias_sums)
    tensors |= {"row_lse": scratch.rows[0], "delta": scratch.rows[1]}
    if scratch.sums is not None:
        tensors["query_sums"] = scratch.sums
    read = _read(kernel, views, shapes)
    for name, kind in kernel.manifest.descriptors.items():
        of = described(name)
        arguments[name] = _box(kernel, tensors[of], read[of], kind)
    return arguments


def sized_arguments(
    problem: Problem, views: Mapping[str, View], scratch: ScratchShapes, scores: ScoreViews
) -> tuple[int, ...]:
    """What SIZED names."""
    seq_q, seq_kv = views["query"].shape[2], views["key"].shape[2]
    rows, copies = scratch.rows[3], scratch.copies["key"][3] if scratch.copies else 0
    steps = [step for name in VIEWS for step in views[name].strides]
    _, heads, queries, keys = scores.bias_sizes
    of_grad = heads * queries * keys, queries * keys, keys  # it has no gaps
    of_scores = *scores.bias_strides, *scores.slope_strides, *of_grad, *scores.bias_sizes
    return (problem.batch, seq_q, seq_kv, seq_q, seq_kv, rows, copies, *steps, *of_scores)


def _read(kernel: Kernel, views: Mapping[str, View], scratch: ScratchShapes) -> dict[str, View]:
    """How all lies that descriptors read: the tensors of VIEWS, and rows and sums of the scratch."""
    if kernel.manifest.ragged:
        views = {name: ragged_view(view) for name, view in views.items()}
    rows = View((math.prod(scratch.rows[1:]),), (1,))
    sums = View((scratch.sums // SUMS_IN_LINE, SUMS_IN_LINE), (SUMS_IN_LINE, 1))
    return {**views, "row_lse": rows, "delta": rows, "query_sums": sums}


def ragged_view(view: View) -> View:
    """A packed [1, heads, tokens, head_dim] view as descriptors have it whose boxes end where a sequence does.

    The axes are [wrap, end, heads, row, head_dim]; `end` and `row` both step a token. Row i of the n before token e is
    at (EDGE, e, head, EDGE - n + i): EDGE steps of `wrap` take EDGE tokens off again, as addresses wrap around at 2**64
    bytes. Behind row EDGE - 1 the TMA unit reads zeros, and writes nothing (triton/tools/ragged_tma.py).
    """
    _, heads, _, head_dim = view.shape
    _, head_step, step, _ = view.strides
    return type(view)((_WRAPS, _WRAPS, heads, EDGE, head_dim), (2**34 - step, step, head_step, step, 1))


def bias_sums_shape(
    kernel: Kernel, problem: Problem, sizes: tuple[int, int, int, int]
) -> tuple[int, int, int, int] | None:
    """Of the float32 sums that a launch leaves of the gradient of a bias; None where it leaves the gradient itself.

    Args:
        sizes: of the bias as the caller gave it: an axis that shares it is 1 long.
    """
    batch, heads, queries, keys = sizes
    if (queries, keys) == (problem.seq_q, problem.seq_kv):
        return None
    tile = kernel.manifest.bias_tile
    assert tile is not None
    rows = queries if queries == problem.seq_q else -(-problem.seq_q // tile[0])
    columns = keys if keys == problem.seq_kv else -(-problem.seq_kv // tile[1])
    return batch, heads, rows, columns


def add_bias_sums(gradient: Tensor, sums: Tensor) -> None:
    """Writes the gradient [batch, heads, queries, keys] of a bias that queries or keys share, of what a launch left."""
    gradient.copy_(sums.sum([axis for axis in (2, 3) if gradient.shape[axis] == 1], keepdim=True))


def _empty_bias_sums(kernel: Kernel, problem: Problem, gradients: Gradients) -> Tensor | None:
    """Room for the float32 sums of the tiles that share a bias; None where no launch leaves such sums."""
    if gradients.bias is None:
        return None
    batch, heads, queries, keys = gradients.bias.shape
    shape = bias_sums_shape(kernel, problem, (batch, heads, queries, keys))
    return None if shape is None else gradients.bias.new_empty(shape, dtype=torch.float32)


def _of_bias(operands: Operands, grad: Tensor, sums: Tensor | None) -> dict[str, object]:
    """What the gradient of a bias takes beside: where to write it, or float32 sums of the tiles that share it."""
    arguments: dict[str, object] = {
        "bias_grad_ptr": grad,
        "bias_sums_ptr": grad if sums is None else sums,
        **dict(zip(strides("g"), grad.stride()[:3], strict=True)),
    }
    if operands.table is not None:
        states = block_table.states_of(operands.table, operands.key.shape[2])
        arguments["states_ptr"] = states
        for place, axis in enumerate("bh"):
            arguments[f"states_step_{axis}"] = states.stride(place) if states.shape[place] > 1 else 0
    return arguments


def _box(kernel: Kernel, tensor: Tensor, view: View, kind: str) -> Descriptor | TensorDescriptor:
    """What a kernel reads boxes of a tensor with: for the TMA unit, or for Triton's interpreter."""
    described = Descriptor.of(view, tensor.data_ptr())
    if kernel.device.type == "cuda" or kernel.manifest.language is Language.GLUON:
        return described
    match = re.search(r"\[(.*)\]", kind)
    assert match is not None
    block = [int(size) for size in match[1].split(",")]
    return TensorDescriptor(tensor.as_strided(*view), list(described.shape), list(described.strides), block)
