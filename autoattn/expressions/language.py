"""The small language in which a caller changes scores or hides pairs: arithmetic that cannot act.

    captured0: float32[1]
    far = q_idx - kv_idx > 128
    where(far, score * captured0[h], score)

Lines give names to values, the last line is the answer; all values are float32 numbers, whole numbers of 32 bits or
booleans, elementwise. A tensor of the caller's is declared by its dtype and number of axes and read by whole numbers.
Python's grammar parses a text, every node is checked against a short list, and only what was checked is written out
again as Triton: a text that came from a file cannot do more than arithmetic.
"""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from functools import lru_cache

from autoattn.errors import ProblemError
from autoattn.expressions.expression import (
    ACTS,
    CAPTURE_TYPES,
    FUNCTIONS,
    OF_PAIRS,
    OPERATORS,
    SIGNS,
    Capture,
    Expression,
    Kind,
    Node,
    triton_of,
)

SCORE_NAMES = ("score", "b", "h", "q_idx", "kv_idx")  # what a score_mod may ask; its answer is a score
MASK_NAMES = ("b", "h", "q_idx", "kv_idx")  # what a mask may ask; its answer is a boolean, True keeps
MAX_LENGTH = 20_000  # characters
MAX_DEPTH = 60  # levels of nesting
MAX_CAPTURES = 16
LARGEST, SMALLEST = 3.4028234663852886e38, 2.0**-126  # normal float32; Triton would count beyond them in float64
INFINITY = "inf"  # a name that is always known


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


def parse_optional(text: str, names: tuple[str, ...]) -> Expression | None:
    """The expression of a text, None of an empty one.

    Raises:
        ProblemError: as `parse`.
    """
    return parse(text, names) if text else None


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
        return replace(read, head_value=self._head_value(triton_of(read))) if by_head else read

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
