"""The schema of torch.ops.autoattn.attention, from the table of call arguments.

torch.compile, torch.export, FakeTensors, dispatch modes and torch.func see one operator with known shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoattn.core.call_arguments import ARGUMENTS
from autoattn.core.problem import Layout

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
_DEFAULTS = {argument.name: argument.default_value for argument in operator._schema.arguments[3:]}


_KEYWORDS = tuple(argument.name for argument in operator._schema.arguments if argument.kwarg_only)


def without_defaults(words: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments as the dispatcher gives them: in the order of the schema, without those that are defaults."""
    return {name: words[name] for name in _KEYWORDS if name in words and words[name] != _DEFAULTS[name]}


def named(tensors: Sequence[Any], words: dict[str, Any]) -> dict[str, Any]:
    """An operator's arguments by name; the dispatcher leaves out those that are the defaults."""
    return {**_DEFAULTS, **dict(zip(TENSORS, tensors, strict=False)), **words}
