"""The small language in which a caller changes scores or hides pairs: arithmetic that cannot act.

    captured0: float32[1]
    far = q_idx - kv_idx > 128
    where(far, score * captured0[h], score)

Lines give names to values, the last line is the answer; all values are float32 numbers, whole numbers of 32 bits or
booleans, elementwise. A tensor of the caller's is declared by its dtype and number of axes and read by whole numbers.
Python's grammar parses a text, every node is checked against a short list, and only what was checked is written out
again as Triton: a text that came from a file cannot do more than arithmetic.

Each value has a kind, inferred from its parts, because Python, PyTorch and Triton disagree where kinds are mixed:
booleans do not add up, `//` and `%` round down, functions of whole numbers count in float32, and what holds no name is
computed while the text is read.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any

from autoattn.errors import ProblemError

SCORE_NAMES = ("score", "b", "h", "q_idx", "kv_idx")  # what a score_mod may ask; its answer is a score
MASK_NAMES = ("b", "h", "q_idx", "kv_idx")  # what a mask may ask; its answer is a boolean, True keeps
OF_PAIRS = frozenset({"score", "q_idx", "kv_idx"})  # what differs between the pairs of one head of one sequence
MAX_LENGTH = 20_000  # characters
MAX_DEPTH = 60  # levels of nesting
MAX_CAPTURES = 16
LARGEST, SMALLEST = 3.4028234663852886e38, 2.0**-126  # normal float32; Triton would count beyond them in float64
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
INFINITY = "inf"  # a name that is always known


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
        answer = _triton(self.answer)
        if self.answer.kind is not Kind.BOOL and "score" not in self.answer.asks:
            answer = f"tl.where(score == score, {answer}, {answer})"  # in the shape of the scores
        return [*(f"own_{name} = {_triton(value)}" for name, value in self.steps), f"return {answer}"]

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
                    lines += [*steps, f"{node.head_value} = {_load(node, [_triton(part) for part in node.parts])}"]
                    steps = []
                    read.append(node.head_value)
            if name and not value.asks & OF_PAIRS:
                steps.append(f"own_{name} = {_triton(value)}")
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


@lru_cache(maxsize=256)
def parse(text: str, names: tuple[str, ...]) -> Expression:
    """Reads an expression that may ask for `names`: a mask's when they have no score, else a score_mod.

    Raises:
        ProblemError: the text is no such expression; the sentence quotes the part.
    """
    if not isinstance(text, str) or not text.strip() or len(text) > MAX_LENGTH:
        raise ProblemError(
            f"an expression must be text of 1 to {MAX_LENGTH} characters, got {text!r:.60}; see docs/masks.md"
        )
    try:
        body = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProblemError(f"an expression must be arithmetic, got {text!r:.200} ({error}); correct it") from None
    reader = _Reader(names)
    for place, statement in enumerate(body):
        answer = reader.line(statement, last=place == len(body) - 1)
        if answer is not None:
            wanted = "a number" if "score" in names else "a boolean"
            if (answer.kind is Kind.BOOL) is ("score" in names):
                raise _refused(statement, f"{wanted} as its answer")
            return Expression(captures=tuple(reader.captures), steps=tuple(reader.steps), answer=answer)
    raise ProblemError(f"an expression must end with its answer, got {text!r:.200}; add a line with the value")


class _Reader:
    """Lines -> checked values; it knows what was declared and named so far."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.captures: list[Capture] = []
        self.steps: list[tuple[str, Node]] = []
        self.known = {INFINITY: Node(act="number", kind=Kind.FLOAT, number=math.inf)}
        for name in names:
            kind = Kind.FLOAT if name == "score" else Kind.INT
            self.known[name] = Node(act="name", kind=kind, name=name, asks=frozenset({name}))
        self.taken = {*self.known, *FUNCTIONS}
        self.changes_scores = "score" in names
        self.head_values: dict[str, str] = {}  # a read as Triton -> the name under which it is passed
        self.head_reads = 0  # names given

    def line(self, statement: ast.stmt, *, last: bool) -> Node | None:
        """The answer, when the line is one."""
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Subscript() as kind, value=None) if not last:
                self.captures.append(_capture(name, kind, len(self.captures)))
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if not last:
                if name in self.taken or not name.isascii() or name.startswith("captured"):
                    raise _refused(statement, "a name of its own")
                node = self.node(value, MAX_DEPTH)
                if name in self.known:
                    self.head_values.clear()  # the same text may read another element from now on
                self.known[name] = node if node.act == "number" else replace(node, act="step", name=name, parts=())
                if node.act != "number":
                    self.steps.append((name, node))
            case ast.Expr(value=value) if last:
                return self.node(value, MAX_DEPTH)
            case _:
                raise _refused(statement, "lines such as name = value, and a value in the last line")
        return None

    def node(self, node: ast.expr, depth: int) -> Node:
        """A checked value; refuses what is more than arithmetic over what is known."""
        if depth == 0:
            raise ProblemError(f"an expression must nest at most {MAX_DEPTH} levels; give parts of it names")
        match node:
            case ast.Constant(value=bool() | int() | float() as number):
                return _number(node, number)
            case ast.Name(id=name) if name in self.known:
                return self.known[name]
            case ast.UnaryOp(op=op, operand=operand) if type(op) in SIGNS:
                return _joined(node, f"{SIGNS[type(op)][0]}x", self.node(operand, depth - 1))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return _joined(node, OPERATORS[type(op)][0], self.node(left, depth - 1), self.node(right, depth - 1))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATORS:
                return _joined(node, OPERATORS[type(op)][0], self.node(left, depth - 1), self.node(right, depth - 1))
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if (
                name in FUNCTIONS and len(arguments) == FUNCTIONS[name][0]
            ):
                return _called(node, name, *(self.node(argument, depth - 1) for argument in arguments))
            case ast.Subscript(value=ast.Name(id=name)) if any(declared.name == name for declared in self.captures):
                return self._read(node, name, depth)
        raise _refused(node, "numbers, names, operators, and the functions " + ", ".join(FUNCTIONS))

    def _read(self, node: ast.Subscript, name: str, depth: int) -> Node:
        capture = next(declared for declared in self.captures if declared.name == name)
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if len(indices) != capture.axes:
            raise _refused(node, "one index for each axis")
        parts = tuple(self.node(index, depth - 1) for index in indices)
        if any(part.kind is not Kind.INT for part in parts):
            raise _refused(node, "whole numbers as indices")
        asks = frozenset({name}).union(*(part.asks for part in parts))
        read = Node(act="read", kind=capture.kind, name=name, capture=capture, parts=parts, asks=asks)
        by_head = self.changes_scores and not asks & OF_PAIRS
        return replace(read, head_value=self._head_value(_triton(read))) if by_head else read

    def _head_value(self, read: str) -> str:
        if read not in self.head_values:
            self.head_values[read] = f"head_value{self.head_reads}"
            self.head_reads += 1
        return self.head_values[read]


def _capture(name: str, kind: ast.Subscript, place: int) -> Capture:
    match kind:
        case ast.Subscript(value=ast.Name(id=dtype), slice=ast.Constant(value=int(axes))) if (
            dtype in CAPTURE_TYPES
            and not isinstance(axes, bool)
            and 1 <= axes <= 4
            and place < MAX_CAPTURES
            and name == f"captured{place}"
        ):
            return Capture(name=name, dtype=dtype, axes=axes)
    raise _refused(kind, f"up to {MAX_CAPTURES} declarations such as captured{place}: float32[1]")


def _number(node: ast.expr, number: bool | int | float) -> Node:
    if isinstance(number, bool):
        return Node(act="number", kind=Kind.BOOL, number=number)
    if isinstance(number, int):
        if not -(2**31) <= number < 2**31:
            raise _refused(node, "whole numbers of 32 bits")
        return Node(act="number", kind=Kind.INT, number=number)
    if not (number == 0.0 or SMALLEST <= abs(number) <= LARGEST or abs(number) == math.inf):
        raise _refused(node, "numbers that float32 holds")
    return Node(act="number", kind=Kind.FLOAT, number=number)


def _joined(node: ast.expr, act: str, *parts: Node) -> Node:
    """What an operator makes of its parts; computed at once when they are numbers."""
    kinds = [part.kind for part in parts]
    if act in ("&", "|", "^", "~x"):
        if Kind.FLOAT in kinds or len(set(kinds)) > 1:
            raise _refused(node, f"{act.strip('x')} between booleans, or between whole numbers")
    elif act in ("+", "-", "*", "/", "//", "%", "-x") and set(kinds) == {Kind.BOOL}:
        raise _refused(node, "booleans joined by &, | and ~; to_int makes numbers of them")
    if all(part.act == "number" for part in parts) and act != "~x":
        try:
            return _number(node, ACTS[act](*(part.number for part in parts)))
        except ArithmeticError:
            raise _refused(node, "numbers that can be computed") from None
    if act in ("//", "%") and parts[1].act == "number" and parts[1].number == 0:
        raise _refused(node, "a divisor that is not 0")
    kind = Kind.FLOAT if Kind.FLOAT in kinds or act == "/" else Kind.BOOL if set(kinds) == {Kind.BOOL} else Kind.INT
    kind = Kind.BOOL if act in ("<", "<=", ">", ">=", "==", "!=") else kind
    return Node(act=act, kind=kind, parts=parts, asks=_asks(node, *parts))


def _called(node: ast.expr, name: str, *parts: Node) -> Node:
    """What a function makes of its arguments."""
    kinds = [part.kind for part in parts]
    if name == "where":
        if kinds[0] is not Kind.BOOL or parts[0].act == "number":
            raise _refused(node, "where(condition, one, other) with a condition of comparisons")
        if (kinds[1] is Kind.BOOL) is not (kinds[2] is Kind.BOOL):
            raise _refused(node, "where() of two numbers, or of two booleans")
        kinds = kinds[1:]
    elif Kind.BOOL in kinds and name not in ("to_int", "to_float"):
        raise _refused(node, f"{name}() of numbers; to_int makes numbers of booleans")
    if name in ("where", "minimum", "maximum", "abs", "floor"):
        kind = Kind.FLOAT if Kind.FLOAT in kinds else kinds[0]
    else:
        kind = Kind.INT if name == "to_int" else Kind.FLOAT
    return Node(act=name, kind=kind, parts=parts, asks=_asks(node, *parts))


def _asks(node: ast.expr, *parts: Node) -> frozenset[str]:
    asks = frozenset[str]().union(*(part.asks for part in parts))
    if not asks:
        raise _refused(node, "the number itself where it depends on no name")
    return asks


def _refused(node: ast.AST, wanted: str) -> ProblemError:
    return ProblemError(f"an expression may hold {wanted}, got {ast.unparse(node)!r:.200}; see docs/masks.md")


def _triton(node: Node) -> str:
    """One value as Triton; steps have a prefix, so that no name of a caller's hides one of the kernel's."""
    parts = [_triton(part) for part in node.parts]
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
        index = text if _is_inside(part) else f"inside({text}, {node.name}_size{axis})"
        offsets.append(index if axis == node.capture.axes - 1 else f"{index} * {node.name}_stride{axis}")
    load = f"tl.load({node.name}_ptr + {' + '.join(offsets)})"
    return f"to_float({load})" if node.capture.dtype in ("float16", "bfloat16") else load


def _head_reads(node: Node) -> Iterator[Node]:
    """The reads that have names, in the order in which they are made."""
    for part in node.parts:
        yield from _head_reads(part)
    if node.act == "read" and node.head_value:
        yield node


def _is_inside(index: Node) -> bool:
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
                index if _is_inside(part) else _inside(index, tensor.shape[axis], functions)
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
