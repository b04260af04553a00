"""Checked expressions: the values that a text names, as Triton and over tensors.

Each value has a kind, inferred from its parts, because Python, PyTorch and Triton disagree where kinds are mixed:
booleans do not add up, `//` and `%` round down, functions of whole numbers count in float32, and what holds no name is
computed while the text is read.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

OF_PAIRS = frozenset({"score", "q_idx", "kv_idx"})  # what differs between the pairs of one head of one sequence
CAPTURE_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32", "int64": "i64", "bool": "i1"}
FUNCTIONS = {  # name -> (number of arguments, the same in Triton)
    "where": (3, "tl.where"),
    "minimum": (2, "minimum"),
    "maximum": (2, "maximum"),
    "abs": (1, "tl.abs"),
    "exp": (1, "tl.exp"),
    "exp2": (1, "tl.exp2"),
    "log": (1, "tl.log"),
    "log2": (1, "tl.log2"),
    "sqrt": (1, "tl.sqrt"),
    "rsqrt": (1, "tl.rsqrt"),
    "sin": (1, "tl.sin"),
    "cos": (1, "tl.cos"),
    "floor": (1, "tl.floor"),
    "sigmoid": (1, "tl.sigmoid"),
    "tanh": (1, "tanh"),
    "to_float": (1, "to_float"),
    "to_int": (1, "to_int"),
}
OPERATORS: dict[type[ast.AST], tuple[str, Callable[..., Any]]] = {  # how it is written, and what it does
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.BitAnd: ("&", operator.and_),
    ast.BitOr: ("|", operator.or_),
    ast.BitXor: ("^", operator.xor),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
}
SIGNS: dict[type[ast.AST], tuple[str, Callable[..., Any]]] = {
    ast.USub: ("-", operator.neg),
    ast.Invert: ("~", operator.invert),
}
ACTS = dict(OPERATORS.values()) | {f"{act}x": do for act, do in SIGNS.values()}


class Kind(str, Enum):
    """What a value is."""

    BOOL = "boolean"
    INT = "whole number"
    FLOAT = "number"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A tensor of the caller's that an expression reads."""

    name: str  # captured0, captured1, ...
    dtype: str  # one of CAPTURE_TYPES
    axes: int

    @property
    def kind(self) -> Kind:
        """What its elements are in the language."""
        if self.dtype == "bool":
            return Kind.BOOL
        return Kind.INT if self.dtype.startswith("int") else Kind.FLOAT

    def arguments(self) -> list[tuple[str, str]]:
        """(name, Triton's type) of what a kernel needs to read it; the last axis's stride is 1."""
        strides = [(f"{self.name}_stride{axis}", "i32") for axis in range(self.axes - 1)]
        sizes = [(f"{self.name}_size{axis}", "i32") for axis in range(self.axes)]
        return [(f"{self.name}_ptr", f"*{CAPTURE_TYPES[self.dtype]}"), *strides, *sizes]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """A checked value."""

    act: str  # "number", "name", "step", "read", one of ACTS, or one of FUNCTIONS
    kind: Kind
    parts: tuple[Node, ...] = ()
    number: bool | int | float = 0
    name: str = ""  # of a name, a step or a capture
    capture: Capture | None = None
    asks: frozenset[str] = frozenset()  # the names that it depends on
    head_value: str = ""  # of a score_mod's read that asks nothing of pairs: the name under which it is passed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expression:
    """A checked text."""

    captures: tuple[Capture, ...]
    steps: tuple[tuple[str, Node], ...]  # name -> value, in order
    answer: Node

    def triton(self) -> list[str]:
        """The lines of a Triton function's body: of the names, `arguments` of `pair_captures` and `head_values`."""
        answer = triton_of(self.answer)
        if self.answer.kind is not Kind.BOOL and "score" not in self.answer.asks:
            answer = f"tl.where(score == score, {answer}, {answer})"  # in the shape of the scores
        return [*(f"own_{name} = {triton_of(value)}" for name, value in self.steps), f"return {answer}"]

    @property
    def head_values(self) -> list[str]:
        """The names of what a score_mod reads of captures once a head of a sequence."""
        return list(dict.fromkeys(node.head_value for value in self._values() for node in _head_reads(value)))

    def head_lines(self) -> list[str]:
        """The lines of a Triton function of b, h and each capture's `arguments` that returns `head_values`."""
        lines: list[str] = []
        steps: list[str] = []  # that a later read may ask
        read: list[str] = []
        for name, value in (*self.steps, ("", self.answer)):
            for node in _head_reads(value):
                if node.head_value not in read:
                    lines += [*steps, f"{node.head_value} = {_load(node, [triton_of(part) for part in node.parts])}"]
                    steps = []
                    read.append(node.head_value)
            if name and not value.asks & OF_PAIRS:
                steps.append(f"own_{name} = {triton_of(value)}")
        return [*lines, f"return {', '.join(read)}"] if read else []

    @property
    def pair_captures(self) -> tuple[Capture, ...]:
        """The captures without those of which only `head_values` are read."""
        reads = [node for node in self._nodes() if node.act == "read"]
        by_head = {node.name for node in reads if node.head_value}
        by_pair = {node.name for node in reads if not node.head_value}
        return tuple(capture for capture in self.captures if capture.name not in by_head - by_pair)

    def evaluate(self, names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
        """The answer over values that know Python's operators; captures are tensors among `names`."""
        known = dict(names)
        for name, value in self.steps:
            known[f"own_{name}"] = _value(value, known, functions)
        return _value(self.answer, known, functions)

    @property
    def reads_pairs(self) -> bool:
        """Whether it reads a tensor at places that both positions decide, or a score: once for each pair."""
        reads = (node.asks for node in self._nodes() if node.act == "read")
        return any({"q_idx", "kv_idx"} <= asks or "score" in asks for asks in reads)

    @property
    def reads_key_slopes(self) -> bool:
        """Whether it multiplies what depends on the key's place by a number that it reads, of any size and sign."""
        values = dict(self.steps)

        def reads_number(node: Node) -> bool:
            if node.act == "read":
                return node.kind is Kind.FLOAT
            return any(reads_number(part) for part in ((values[node.name],) if node.act == "step" else node.parts))

        products = (node.parts for node in self._nodes() if node.act in ("*", "/"))
        return any(
            "kv_idx" in left.asks and reads_number(right) for pair in products for left, right in (pair, pair[::-1])
        )

    def calls(self, *functions: str) -> bool:
        """Whether it calls one of these functions."""
        return any(node.act in functions for node in self._nodes())

    def indexed(self) -> Iterator[tuple[str, int, str]]:
        """(capture, axis, name): which axes of captures a name indexes as it is; they must be as long as it counts."""
        for node in self._nodes():
            if node.act == "read":
                yield from ((node.name, axis, part.name) for axis, part in enumerate(node.parts) if part.act == "name")

    def _values(self) -> list[Node]:
        return [*(value for _, value in self.steps), self.answer]

    def _nodes(self) -> Iterator[Node]:
        waiting = self._values()
        while waiting:
            node = waiting.pop()
            waiting.extend(node.parts)
            yield node


def triton_of(node: Node) -> str:
    """One value as Triton; steps have a prefix, so that no name of a caller's hides one of the kernel's."""
    parts = [triton_of(part) for part in node.parts]
    match node.act:
        case "number":
            return f'float("{node.number}")' if abs(node.number) == math.inf else repr(node.number)
        case "name" | "step":
            return node.name if node.act == "name" else f"own_{node.name}"
        case "read":
            return node.head_value or _load(node, parts)
        case "//" | "%":  # Triton's truncate as C's do
            act = "remainder" if node.act == "%" else "floor_divide" if node.kind is Kind.INT else "floor_divide_float"
            return f"{act}({', '.join(parts)})"
        case "-x" | "~x":
            return f"({node.act[0]}{parts[0]})"
        case "to_int" | "floor" if node.parts[0].kind is Kind.INT:
            return parts[0]
        case "where" | "minimum" | "maximum" | "abs" | "to_int" | "to_float":
            return f"{FUNCTIONS[node.act][1]}({', '.join(parts)})"
        case act if act in FUNCTIONS:
            real = parts[0] if node.parts[0].kind is Kind.FLOAT else f"to_float({parts[0]})"
            return f"{FUNCTIONS[act][1]}({real})"
    return f"({parts[0]} {node.act} {parts[1]})"


def _load(node: Node, parts: list[str]) -> str:
    """A read; an index that is no bare name may leave the tensor where a pair is hidden anyway, and is moved inside."""
    assert node.capture is not None
    offsets = []
    for axis, (part, text) in enumerate(zip(node.parts, parts, strict=True)):
        index = text if is_inside(part) else f"inside({text}, {node.name}_size{axis})"
        offsets.append(index if axis == node.capture.axes - 1 else f"{index} * {node.name}_stride{axis}")
    load = f"tl.load({node.name}_ptr + {' + '.join(offsets)})"
    return f"to_float({load})" if node.capture.dtype in ("float16", "bfloat16") else load


def _head_reads(node: Node) -> Iterator[Node]:
    """The reads that have names, in the order in which they are made."""
    for part in node.parts:
        yield from _head_reads(part)
    if node.act == "read" and node.head_value:
        yield node


def is_inside(index: Node) -> bool:
    """Whether an index needs no care: the caller's tensors are checked to hold each position, head and sequence."""
    return index.act == "name" or (index.act == "number" and index.number == 0)


def _value(node: Node, names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
    parts = [_value(part, names, functions) for part in node.parts]
    match node.act:
        case "number":
            return node.number
        case "name" | "step":
            return names[node.name if node.act == "name" else f"own_{node.name}"]
        case "read":
            tensor = names[node.name]
            element = tensor[tuple(
                index if is_inside(part) else _inside(index, tensor.shape[axis], functions)
                for axis, (part, index) in enumerate(zip(node.parts, parts, strict=True))
            )]  # fmt: skip
            assert node.capture is not None
            return functions["to_float"](element) if node.capture.dtype in ("float16", "bfloat16") else element
        case act if act in FUNCTIONS:
            return functions[act](*parts)
    return ACTS[node.act](*parts)


def _inside(index: Any, size: int, functions: Mapping[str, Callable[..., Any]]) -> Any:
    """An index below 0 counts from the end, as PyTorch's; one outside becomes the nearest inside."""
    if isinstance(index, int):
        return min(max(index + size if index < 0 else index, 0), size - 1)
    index = functions["where"](index < 0, index + size, index)
    return functions["minimum"](functions["maximum"](index, 0), size - 1)
