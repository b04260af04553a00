"""What torch.ops.autoattn.attention does: its kernels for the dispatcher, shapes, autocast and flops.

When it runs, it does what the function does. Calls that nobody traces do not come here: the dispatcher and Python's
registrations take several times as long as the rest of a small call. The backward pass is in `attention_op_backward`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from autoattn import torch_private
from autoattn.core.call_arguments import PACKED_DEFAULTS
from autoattn.core.mask import Mask
from autoattn.core.problem import Layout
from autoattn.expressions.captures import Traced
from autoattn.kernels.forward import lse_dtype, output_dtype
from autoattn.runtime import call, call_cache, call_keys
from autoattn.runtime.parse import arguments
from autoattn.runtime.parse.arguments import Call
from autoattn.runtime.plan import planner
from autoattn.runtime.plan.gradient_problem import Learned
from autoattn.runtime.prepared_call import Answer, KernelCall
from autoattn.runtime.torch_op.attention_schema import LEARNING, PACKED, SAME, TENSORS, library, named, operator
from autoattn.runtime.training_call import TrainingCall
from autoattn.tensors import operands
from autoattn.tensors.operands import BlockTable

_OFFSETS = TENSORS.index("cu_seqlens_q")
_SCORES = slice(TENSORS.index("bias"), TENSORS.index("sinks") + 1)
# The arguments of the functions that the schema has under the same names.
_ARGUMENTS = (*LEARNING[3:], *(argument.name for argument in SAME if argument.name != "return_lse"))
_PACKED_ARGUMENTS = tuple(name for name in _ARGUMENTS if name in PACKED_DEFAULTS)


def quiet(query: Tensor) -> AbstractContextManager[object]:
    """Autocast switched off where it is on: its work was done before an operator runs."""
    kind = query.device.type
    if kind in arguments.AUTOCAST and torch.is_autocast_enabled(kind):
        off: AbstractContextManager[object] = torch.autocast(kind, enabled=False)
        return off
    return contextlib.nullcontext()


def read(given: dict[str, Any]) -> Call:
    """The call that an operator's arguments pose."""
    with quiet(given["query"]):
        if given["layout"] == PACKED:
            return arguments.read_packed(*_three(given), *lengths(given), **function_arguments(given))
        return arguments.read(*_three(given), **function_arguments(given))


def _attention(*tensors: Any, **words: Any) -> tuple[Tensor, Tensor]:
    """Output and LSE; the output lies in memory as the query does, the LSE without gaps.

    The LSE has no elements when nobody asks for it. Asked for by keep_lse alone it is for the backward pass, and NaN
    where no kernels serve both passes.
    """
    answer = at_once(tensors, words)
    return _both(_ordinary(tensors, words), tensors, words) if answer is None else answer


def at_once(tensors: Sequence[Any], words: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The operator's answer where one is prepared; None where there is none."""
    if (known := call_cache.find(posed(tensors, words))) is None:
        return None
    pass_of = known.forward if isinstance(known, TrainingCall) else known
    answer = pass_of(*tensors[:3], *others_of(tensors))
    if isinstance(answer, Tensor) and not isinstance(pass_of, KernelCall):  # PyTorch's lies as its backend left it
        given = named(tensors, words)
        answer = as_given(as_read(answer, given), given["query"], given)
    return None if answer is None else _both(answer, tensors, words)


def _both(answer: Answer, tensors: Sequence[Any], words: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The output and the LSE that the schema promises, where the answer may be the output alone."""
    if not isinstance(answer, Tensor):
        return answer
    if words.get("keep_lse"):
        return answer, answer.new_full(_lse_shape(named(tensors, words)), math.nan, dtype=lse_dtype(answer.dtype))
    return answer, answer.new_empty_strided((0,), (1,), dtype=lse_dtype(answer.dtype))


def _ordinary(tensors: Sequence[Any], words: dict[str, Any]) -> Answer:
    """The output, and the LSE where it is asked for or kernels serve both passes; prepares for the next such call."""
    given = named(tensors, words)
    parsed, lse = read(given), given["return_lse"]
    call_key = posed(tensors, words)  # of the caller's autocast, which `quiet` switches off
    plan = plan_both(parsed, given) if given["keep_lse"] else None
    with quiet(given["query"]):
        if plan is None or plan.passes(parsed.problem) is None:
            plan = planner.plan(parsed, lse=lse, learns=False)
        own = *tensors[:3], *others_of(tensors)
        like = as_read(given["query"], given)
        return call.answer(call_key, own, parsed, plan, lse=lse, like=like)


def at_once_by_kernels(tensors: Sequence[Any], words: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Output and LSE where kernels are prepared for both passes; None where they are not.

    Args:
        words: without defaults and in the order of the schema, as the dispatcher gives them.
    """
    known = call_cache.find(posed(tensors, words))
    return known.forward(*tensors[:3], *others_of(tensors)) if isinstance(known, TrainingCall) else None


def posed(tensors: Sequence[Any], words: dict[str, Any], *more: str | int) -> call_keys.Key | None:
    """The key of the operator's call; None where it computes on more tensors than that keeps.

    Args:
        more: what else tells calls apart.
    """
    query, key, value, *extras = tensors
    offsets, scores = _offsets_of(tensors), tensors[_SCORES]
    known = len(offsets) + sum(tensor is not None for tensor in scores)
    if sum(isinstance(extra, Tensor) or bool(extra) for extra in extras) > known:
        return None
    facts = (*words, *words.values(), *more, "operator", torch.are_deterministic_algorithms_enabled())
    return call_keys.of(query, key, value, offsets, facts, (None, *scores) if known > len(offsets) else None)


def others_of(tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    """The offsets of packed sequences, then bias, slopes and sinks, where they are there."""
    return (*_offsets_of(tensors), *(tensor for tensor in tensors[_SCORES] if tensor is not None))


def _offsets_of(tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    """cu_seqlens_q and cu_seqlens_kv, where they are there."""
    return tuple(offsets for offsets in tensors[_OFFSETS : _OFFSETS + 2] if offsets is not None)


def plan_both(call: Call, given: dict[str, Any]) -> planner.Plan:
    """Who answers a call that an operator's arguments pose, and whose gradients somebody wants: kernels where they may.

    Where they do not, the operator computes the call twice.
    """
    learned = Learned(bias=given["learns_bias"], slopes=given["learns_slopes"])
    plan = planner.plan(call, lse=given["return_lse"], learns=True, learned=learned)
    return plan.captured or plan


def as_read(tensor: Tensor, given: dict[str, Any]) -> Tensor:
    """The caller's output, or a gradient of it, as a [batch, heads, seq, head_dim] view."""
    return operands.viewed(tensor, Layout(given["layout"]))


def as_given(tensor: Tensor, like: Tensor, given: dict[str, Any]) -> Tensor:
    """Such a view as the caller has it, in memory as `like`, a tensor of the caller's, lies there."""
    return operands.as_given(operands.lying_as(tensor, as_read(like, given)), Layout(given["layout"]))


def empty_as(like: Tensor, head_dim: int, given: dict[str, Any], dtype: torch.dtype | None = None) -> Tensor:
    """A new tensor in memory as `like`, a tensor of the caller's, lies there, but for the head dim and the dtype."""
    return operands.as_given(operands.empty_as(as_read(like, given), head_dim, dtype), Layout(given["layout"]))


def _shapes(*tensors: Any, **words: Any) -> tuple[Tensor, Tensor]:
    given = named(tensors, words)
    query, value = given["query"], given["value"]
    output = empty_as(query, value.shape[-1], given, output_dtype(query.dtype))
    return output, empty_lse(given)


def empty_lse(given: dict[str, Any]) -> Tensor:
    """A new LSE; without elements where nobody wants one."""
    wanted = given["return_lse"] or given["keep_lse"]
    query: Tensor = given["query"]
    lse: Tensor = query.new_empty(_lse_shape(given) if wanted else [0], dtype=lse_dtype(query.dtype))
    return lse


def _lse_shape(given: dict[str, Any]) -> list[int]:
    axes = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1), PACKED: (1, 0)}[given["layout"]]
    return [given["query"].shape[axis] for axis in axes]


library.impl("attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("autoattn::attention", _shapes, lib=library)


def _three(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value."""
    return given["query"], given["key"], given["value"]


def lengths(given: dict[str, Any]) -> tuple[Tensor, Tensor, int, int]:
    return given["cu_seqlens_q"], given["cu_seqlens_kv"], given["max_seqlen_q"], given["max_seqlen_kv"]


def function_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The other arguments of the function, but for return_lse."""
    packed = given["layout"] == PACKED
    keywords = {name: given[name] for name in (_PACKED_ARGUMENTS if packed else _ARGUMENTS)}
    keywords["seed"] = given["seed"] if given["drawn_seed"] is None else int(given["drawn_seed"])
    keywords["score_mod"] = _score_mod(given)
    if not packed:
        return {**keywords, "mask": _mask(given)}
    seen = Mask.parse(given["mask"])
    if seen.causal:
        return {**keywords, "causal": seen.alignment.value}
    return {**keywords, "window": seen.window_size}


def _score_mod(given: dict[str, Any]) -> str | Traced | None:
    text, captured = given["score_mod"], given["score_captures"]
    return Traced(text=text, captures=tuple(captured)) if captured else text or None


def _mask(given: dict[str, Any]) -> Any:
    """Words, or the table of blocks that the operator got in pieces."""
    if not given["table"]:
        return given["mask"]
    from autoattn.masks import BlockSparse  # pulls in PyTorch's tracer

    block_q, block_kv, seq_q, seq_kv = given["table_sizes"]
    full_counts, full_blocks, partial_counts, partial_blocks = given["table"]
    return BlockSparse(
        mask=Mask.blocks(block_q, block_kv, given["density"], given["mask_mod"]),
        table=BlockTable(
            block_q=block_q, block_kv=block_kv, full_counts=full_counts, full_blocks=full_blocks,
            partial_counts=partial_counts, partial_blocks=partial_blocks,
        ),
        captures=tuple(given["mask_captures"] or ()),
        seq_q=seq_q,
        seq_kv=seq_kv,
    )  # fmt: skip


# --- Autocast ---------------------------------------------------------------------------------------------------------


def _autocast(*tensors: Any, **words: Any) -> tuple[Tensor, Tensor]:
    """Query, key and value are cast, as PyTorch's own attention casts them; no other tensor is."""
    three = arguments.autocast(*tensors[:3])
    if three[0].dtype is not tensors[0].dtype:
        words.pop("precision", None)  # it was one of float32 products
    with torch_private.below_autocast():
        answer: tuple[Tensor, Tensor] = operator(*three, *tensors[3:], **words)
    return answer


for _key in ("AutocastCUDA", "AutocastCPU"):
    library.impl("attention", _autocast, _key)


# --- Flops ------------------------------------------------------------------------------------------------------------


def products(query: Sequence[int], key: Sequence[int], value: Sequence[int], words: dict[str, Any]) -> tuple[int, int]:
    """Flops of a product with the query's and one with the value's head dim, as PyTorch's FlopCounterMode counts them.

    Hidden pairs count too, as for PyTorch's own attention; of a packed query those with the longest sequence's keys.

    Args:
        query, key, value: shapes.
        words: the operator's keyword arguments that are no defaults.
    """
    axis = 1 if words.get("layout") in (Layout.BSHD.value, PACKED) else 2
    keys = words["max_seqlen_kv"] if words.get("layout") == PACKED else key[axis]
    rows = math.prod(query[:-1])
    return 2 * rows * keys * query[-1], 2 * rows * keys * value[-1]


def _flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *others: Any, **words: Any) -> int:
    return sum(products(query, key, value, words))


register_flop_formula(torch.ops.autoattn.attention)(_flops)
