"""The table of call arguments: what `autoattn.attention` takes beside query, key and value, declared once.

The key of a prepared call, the operator's schema, the module's arguments, the command line's modifiers and the shapes
parser come from it. docs/call-arguments.md walks through adding one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any


class KeyRole(Enum):
    """How an argument stands in the key of a prepared call."""

    USUAL = "usual"  # always there
    SELDOM = "seldom"  # None in most calls, which then have a shorter key
    NEVER = "never"  # calls that give it are not prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class CallArgument:
    """One argument of `autoattn.attention`."""

    name: str
    type: str  # as the function annotates it
    default: object = None
    key: KeyRole = KeyRole.SELDOM
    schema: str = ""  # its type in the operator's schema; empty where other words of the schema say it
    packed: bool = True  # whether `packed_attention` takes it too
    module: bool = False  # whether a module keeps it: it says the same in every call
    learned: bool = False  # a tensor that may need a gradient
    modifier: str = ""  # the field of Modifiers, and the key in a shapes file, that says whether a call has it
    below: float | None = None  # of a number from 0: what it stays below
    absent: str = ""  # of such a number: what the default means, as an error says it
    example: float = 0.0  # of such a number: what random inputs take, near the size of the scores so that it shows


def _tensor(name: str, **facts: Any) -> CallArgument:
    return CallArgument(name=name, type="Tensor | None", schema="Tensor?", learned=True, **facts)


ARGUMENTS = (
    CallArgument(name="window", type="tuple[int, int] | None", module=True),  # in front, where keys unfold it
    CallArgument(
        name="mask", type="str | Mask | Tensor | BlockSparse | BlockMask | None", packed=False, module=True
    ),
    CallArgument(name="causal", type="bool | str", default=False, key=KeyRole.USUAL, module=True),
    _tensor("bias", packed=False, modifier="bias"),
    CallArgument(
        name="softcap", type="float", default=0.0, key=KeyRole.USUAL, schema="float", module=True, modifier="softcap",
        below=math.inf, absent="0 switches it off", example=2.0,
    ),
    _tensor("alibi_slopes", modifier="alibi"),
    _tensor("sinks", modifier="sinks"),
    CallArgument(
        name="score_mod", type="str | Callable[..., Tensor] | Traced | None", module=True, modifier="score_mod"
    ),
    CallArgument(
        name="dropout", type="float", default=0.0, key=KeyRole.USUAL, schema="float", module=True, modifier="dropout",
        below=1.0, absent="0 keeps every weight", example=0.25,
    ),
    CallArgument(name="seed", type="int | None", key=KeyRole.NEVER, schema="SymInt?"),
    CallArgument(name="scale", type="float | None", key=KeyRole.USUAL, schema="float?", module=True),
    CallArgument(name="layout", type="str", default="bhsd", key=KeyRole.USUAL, schema="str", packed=False, module=True),
    CallArgument(name="precision", type="str | None", schema="str?", module=True),
    CallArgument(name="numerics", type="str | None", schema="str?", module=True),
    CallArgument(
        name="deterministic", type="bool", default=False, key=KeyRole.USUAL, schema="bool", module=True
    ),
    _tensor("query_scale"),
    _tensor("key_scale"),
    _tensor("value_scale"),
    CallArgument(name="return_lse", type="bool", default=False, key=KeyRole.USUAL, schema="bool"),
)  # fmt: skip
BY_NAME = {argument.name: argument for argument in ARGUMENTS}
PACKED_ARGUMENTS = tuple(argument for argument in ARGUMENTS if argument.packed)
DEFAULTS = {argument.name: argument.default for argument in ARGUMENTS}
PACKED_DEFAULTS = {argument.name: argument.default for argument in PACKED_ARGUMENTS}
NUMBERS = tuple(argument for argument in ARGUMENTS if argument.below is not None)


def names(arguments: tuple[CallArgument, ...], role: KeyRole) -> tuple[str, ...]:
    """The names of the arguments with a role in the key, in the key's order."""
    return tuple(argument.name for argument in arguments if argument.key is role)
