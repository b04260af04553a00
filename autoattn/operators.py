"""Attention as an operator of PyTorch's dispatcher, torch.ops.autoattn.attention.

torch.compile, torch.export, FakeTensors, dispatch modes and torch.func see one operator with known shapes. When it runs
it does what the function would. Calls that nobody traces do not come here: the dispatcher and Python's registrations
take several times as long as the rest of a small call. Its backward pass is in `differentiate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from autoattn import arguments
from autoattn.captures import Traced
from autoattn.mask import Mask
from autoattn.operands import BlockTable
from autoattn.ops.forward import DTYPE
from autoattn.problem import Layout
from autoattn.reference import TORCH_DTYPE

VMAP = "Vmap"  # PyTorch's name of the one transform that takes no derivative
PACKED = Layout.PACKED.value
LEARNING = (  # the tensors that may need a gradient
    *("query", "key", "value", "bias", "alibi_slopes", "sinks"),
    *("query_scale", "key_scale", "value_scale"),
)
LISTS = ("table", "mask_captures", "score_captures")
TENSORS = (*LEARNING, "cu_seqlens_q", "cu_seqlens_kv", "drawn_seed", *LISTS)  # in the order of the schema
_OPTIONAL = ", ".join(f"Tensor{'[]' * (name in LISTS)}? {name}=None" for name in TENSORS[3:])
INPUTS = f"Tensor query, Tensor key, Tensor value, {_OPTIONAL}"
WORDS = (
    "str mask='full', str mask_mod='', SymInt[] table_sizes=[], float density=0.0, float softcap=0.0, "
    "str score_mod='', float dropout=0.0, SymInt? seed=None, float? scale=None, str layout='bhsd', "
    "SymInt max_seqlen_q=0, SymInt max_seqlen_kv=0, str? precision=None, str? numerics=None, bool return_lse=False"
)
library = torch.library.Library("autoattn", "FRAGMENT")
library.define(f"attention({INPUTS}, *, {WORDS}) -> (Tensor, Tensor)")
operator = torch.ops.autoattn.attention.default
_DEFAULTS = {argument.name: argument.default_value for argument in operator._schema.arguments[3:]}


def is_watched(*tensors: Any) -> bool:
    """Whether somebody would not see a kernel's launch: torch.compile, a dispatch mode, FakeTensors, torch.vmap.

    Transforms of torch.func that differentiate are left to PyTorch's own attention, whose derivatives they can take.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    if any(type(one).__name__ == "FakeTensor" for one in tensors):  # by name: most programs do not load its module
        return True
    return transforms() == (VMAP,)


def transforms() -> tuple[str, ...]:
    """The kinds of torch.func's transforms that are active."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return tuple(sorted({level.key().name for level in stack}))


def named(tensors: Sequence[Any], words: dict[str, Any]) -> dict[str, Any]:
    """An operator's arguments by name; the dispatcher leaves out those that are the defaults."""
    return {**_DEFAULTS, **dict(zip(TENSORS, tensors, strict=False)), **words}


def answered(given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Output and LSE as the functions give them, with autocast off, whose work is done."""
    kind = given["query"].device.type
    if kind in arguments.AUTOCAST and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return answered(given)
    found = _asked(given)
    return (found, None) if isinstance(found, Tensor) else found


def _attention(*tensors: Any, **words: Any) -> tuple[Tensor, Tensor]:
    """Output and LSE, contiguous; the LSE has no elements when it is not asked for."""
    output, lse = answered(named(tensors, words))
    return output.contiguous(), output.new_empty(0, dtype=torch.float32) if lse is None else lse.contiguous()


def _shapes(*tensors: Any, **words: Any) -> tuple[Tensor, Tensor]:
    given = named(tensors, words)
    query, value = given["query"], given["value"]
    output = query.new_empty([*query.shape[:-1], value.shape[-1]], dtype=TORCH_DTYPE[DTYPE[query.dtype].output])
    if not given["return_lse"]:
        return output, query.new_empty(0, dtype=torch.float32)
    axes = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1), PACKED: (1, 0)}[given["layout"]]
    return output, query.new_empty([query.shape[axis] for axis in axes], dtype=torch.float32)


library.impl("attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("autoattn::attention", _shapes, lib=library)


def _asked(given: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """The function's answer, which knows calls that it answered before."""
    from autoattn import functional  # which imports this module

    three = given["query"], given["key"], given["value"]
    same = (*LEARNING[4:], "softcap", "dropout", "scale", "precision", "numerics", "return_lse")
    asked = {name: given[name] for name in same}
    asked["seed"] = given["seed"] if given["drawn_seed"] is None else int(given["drawn_seed"])
    asked["score_mod"] = _score_mod(given)
    if given["layout"] != PACKED:
        return functional.attention(*three, mask=_mask(given), bias=given["bias"], layout=given["layout"], **asked)
    offsets = given["cu_seqlens_q"], given["cu_seqlens_kv"], given["max_seqlen_q"], given["max_seqlen_kv"]
    seen = Mask.parse(given["mask"])
    if seen.causal:
        return functional.packed_attention(*three, *offsets, causal=seen.alignment.value, **asked)
    window = (-1 if seen.left is None else seen.left, -1 if seen.right is None else seen.right)
    return functional.packed_attention(*three, *offsets, window=window, **asked)


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
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        found: tuple[Tensor, Tensor] = operator(*three, *tensors[3:], **words)
    return found


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
_AUTOCAST = _AUTOCAST | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
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
