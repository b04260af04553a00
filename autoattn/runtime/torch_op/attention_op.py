"""Attention as an operator of PyTorch's dispatcher, torch.ops.autoattn.attention.

torch.compile, torch.export, FakeTensors, dispatch modes and torch.func see one operator with known shapes. When it runs
it does what the function would. Calls that nobody traces do not come here: the dispatcher and Python's registrations
take several times as long as the rest of a small call. Its backward pass is in `attention_op_backward`.
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
from autoattn.core.call_arguments import ARGUMENTS
from autoattn.core.mask import Mask
from autoattn.core.problem import Layout
from autoattn.expressions.captures import Traced
from autoattn.kernels.forward import lse_dtype, output_dtype
from autoattn.runtime import call_cache, prepared_call
from autoattn.runtime.parse import arguments
from autoattn.runtime.parse.arguments import Call
from autoattn.runtime.plan import planner
from autoattn.runtime.plan.gradient_problem import Learned
from autoattn.runtime.run import autograd, execute
from autoattn.runtime.training_call import TrainingCall
from autoattn.tensors import operands
from autoattn.tensors.operands import BlockTable

VMAP = "Vmap"  # PyTorch's name of the one transform that takes no derivative
PACKED = Layout.PACKED.value
# The tensors that may need a gradient.
LEARNING = ("query", "key", "value", *(argument.name for argument in ARGUMENTS if argument.learned))
LISTS = ("table", "mask_captures", "score_captures")
TENSORS = (*LEARNING, "cu_seqlens_q", "cu_seqlens_kv", "drawn_seed", *LISTS)  # in the order of the schema
_OPTIONAL = ", ".join(f"Tensor{'[]' * (name in LISTS)}? {name}=None" for name in TENSORS[3:])
INPUTS = f"Tensor query, Tensor key, Tensor value, {_OPTIONAL}"
# The arguments that the schema has as the function has them, and what the others become.
SAME = tuple(argument for argument in ARGUMENTS if argument.schema and not argument.learned)
WORDS = ", ".join((
    "str mask='full', str mask_mod='', str score_mod='', SymInt[] table_sizes=[], float density=0.0",
    "SymInt max_seqlen_q=0, SymInt max_seqlen_kv=0",
    "bool keep_lse=False, bool learns_bias=False, bool learns_slopes=False",
    *(f"{argument.schema} {argument.name}={argument.default!r}" for argument in SAME),
))  # fmt: skip
library = torch.library.Library("autoattn", "FRAGMENT")
library.define(f"attention({INPUTS}, *, {WORDS}) -> (Tensor, Tensor)")
operator = torch.ops.autoattn.attention.default
_OFFSETS = TENSORS.index("cu_seqlens_q")
_DEFAULTS = {argument.name: argument.default_value for argument in operator._schema.arguments[3:]}


def is_watched(*tensors: Any) -> bool:
    """Whether somebody would not see a kernel's launch: torch.compile, a dispatch mode, FakeTensors, torch.vmap.

    Transforms of torch.func that differentiate are left to PyTorch's own attention, whose derivatives they can take.
    """
    if torch.compiler.is_compiling() or torch_private.count_dispatch_modes():
        return True
    if any(type(one).__name__ == "FakeTensor" for one in tensors):  # by name: most programs do not load its module
        return True
    return torch_private.transforms() == (VMAP,)


def named(tensors: Sequence[Any], words: dict[str, Any]) -> dict[str, Any]:
    """An operator's arguments by name; the dispatcher leaves out those that are the defaults."""
    return {**_DEFAULTS, **dict(zip(TENSORS, tensors, strict=False)), **words}


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
    found = at_once(tensors, words)
    return _both(_ordinary(tensors, words), tensors, words) if found is None else found


def at_once(tensors: Sequence[Any], words: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The operator's answer where one is prepared; None where there is none."""
    if (known := call_cache.find(posed(tensors, words))) is None:
        return None
    pass_of = known.forward if isinstance(known, TrainingCall) else known
    found = pass_of(*tensors[:3], *offsets_of(tensors))
    return None if found is None else _both(found, tensors, words)


def _both(found: prepared_call.Answer, tensors: Sequence[Any], words: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The output and the LSE that the schema promises, where the answer may be the output alone."""
    if not isinstance(found, Tensor):
        return found
    if words.get("keep_lse"):
        return found, found.new_full(_lse_shape(named(tensors, words)), math.nan, dtype=lse_dtype(found.dtype))
    return found, found.new_empty_strided((0,), (1,), dtype=lse_dtype(found.dtype))


def _ordinary(tensors: Sequence[Any], words: dict[str, Any]) -> prepared_call.Answer:
    """The output, and the LSE where it is asked for or kernels serve both passes; prepares for the next such call."""
    given = named(tensors, words)
    call = read(given)
    lse, both = given["return_lse"], None
    if given["keep_lse"]:
        planned = plan_both(call, given)
        both = planned.passes(call.problem)
    with quiet(given["query"]):
        if both is not None:
            made: prepared_call.Made = autograd.launch(both, call.operands)
        else:
            planned = planner.plan(call, lse=lse, learns=False)
            made = execute.run(call, planned, lse=lse)
    output, sums = as_given(made[0], given["query"], given), made[1]
    if sums is not None:
        sums = (sums[0] if given["layout"] == PACKED else sums).contiguous()
    found = output if sums is None else (output, sums)
    asked = posed(tensors, words)
    settled = planner.settled(planned, call.problem)
    prepared_call.prepare(asked, (*tensors[:3], *offsets_of(tensors)), call, settled, made, found)
    return found


def posed(tensors: Sequence[Any], words: dict[str, Any]) -> call_cache.Key | None:
    """The key of the operator's call; None where it computes on more tensors than that keeps."""
    query, key, value, *others = tensors
    offsets = offsets_of(tensors)
    if sum(isinstance(one, Tensor) or bool(one) for one in others) > len(offsets):
        return None
    facts = (*words, *words.values(), "operator", torch.are_deterministic_algorithms_enabled())
    return call_cache.key(query, key, value, offsets, facts, None)


def offsets_of(tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    """cu_seqlens_q and cu_seqlens_kv, where they are there."""
    return tuple(one for one in tensors[_OFFSETS : _OFFSETS + 2] if one is not None)


def plan_both(call: Call, given: dict[str, Any]) -> planner.Plan:
    """Who answers a call that an operator's arguments pose, and whose gradients somebody wants: kernels where they may.

    Where they do not, the operator computes the call twice.
    """
    learned = Learned(bias=given["learns_bias"], slopes=given["learns_slopes"])
    found = planner.plan(call, lse=given["return_lse"], learns=True, learned=learned)
    return found.captured or found


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
    found: Tensor = query.new_empty(_lse_shape(given) if wanted else [0], dtype=lse_dtype(query.dtype))
    return found


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
    same = (*LEARNING[3:], *(argument.name for argument in SAME if argument.name != "return_lse"))
    asked = {name: given[name] for name in same}
    asked["seed"] = given["seed"] if given["drawn_seed"] is None else int(given["drawn_seed"])
    asked["score_mod"] = _score_mod(given)
    if given["layout"] != PACKED:
        return {**asked, "mask": _mask(given)}
    for argument in ARGUMENTS:
        if not argument.packed:
            asked.pop(argument.name, None)
    seen = Mask.parse(given["mask"])
    if seen.causal:
        return {**asked, "causal": seen.alignment.value}
    return {**asked, "window": (-1 if seen.left is None else seen.left, -1 if seen.right is None else seen.right)}


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
        found: tuple[Tensor, Tensor] = operator(*three, *tensors[3:], **words)
    return found


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
