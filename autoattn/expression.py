"""The small language in which a caller changes scores or hides pairs: arithmetic that cannot act.

    captured0: float32[1]
    far = q_idx - kv_idx > 128
    where(far, score * captured0[h], score)

Lines give names to values, the last line is the answer; all values are numbers or booleans, elementwise. A tensor of the
caller's is declared by its dtype and number of axes and read by integer indices. Python's grammar parses a text, every
node is checked against a short list, and only what was checked is written out again as Triton: a text that came from a
file cannot do more than arithmetic.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autoattn.errors import ProblemError

SCORE_NAMES = ("score", "b", "h", "q_idx", "kv_idx")  # what a score_mod may ask; its answer is a score
MASK_NAMES = ("b", "h", "q_idx", "kv_idx")  # what a mask may ask; its answer is a boolean, True keeps
MAX_LENGTH = 20_000  # characters
MAX_DEPTH = 60  # levels of nesting
CAPTURE_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32", "int64": "i64", "bool": "i1"}
FUNCTIONS = {  # name -> (number of arguments, the same in Triton)
    "where": (3, "tl.where"),
    "minimum": (2, "tl.minimum"),
    "maximum": (2, "tl.maximum"),
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
    ast.USub: ("-", operator.neg),
    ast.Invert: ("~", operator.invert),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
}
INFINITY = "inf"  # a name that is always known


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A tensor of the caller's that an expression reads."""

    name: str  # captured0, captured1, ...
    dtype: str  # one of CAPTURE_TYPES
    axes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expression:
    """A checked text."""

    captures: tuple[Capture, ...]
    steps: tuple[tuple[str, ast.expr], ...]  # name -> value, in order
    answer: ast.expr

    def triton(self) -> list[str]:
        """The lines of a Triton function's body. Strides of a capture are named <name>_stride0, and so on; the last
        axis's is 1."""
        lines = [f"{name} = {_triton(value)}" for name, value in self.steps]
        return [*lines, f"return {_triton(self.answer)}"]

    def evaluate(self, names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
        """The answer over values that know Python's operators; captures are among `names`."""
        known = dict(names)
        for name, value in self.steps:
            known[name] = _value(value, known, functions)
        return _value(self.answer, known, functions)


@lru_cache(maxsize=256)
def parse(text: str, names: tuple[str, ...]) -> Expression:
    """Reads an expression that may ask for `names`.

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
    captures: list[Capture] = []
    steps: list[tuple[str, ast.expr]] = []
    known = {*names, INFINITY}
    for place, statement in enumerate(body):
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Subscript() as kind, value=None):
                captures.append(_capture(name, kind, len(captures)))
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if place < len(body) - 1:
                _check(value, known, captures, MAX_DEPTH)
                if name in FUNCTIONS or name in (*names, INFINITY) or not name.isascii() or name.startswith(("captured", "_", "tl")):
                    raise _refused(statement, "a name of its own")
                known.add(name)
                steps.append((name, value))
            case ast.Expr(value=value) if place == len(body) - 1:
                _check(value, known, captures, MAX_DEPTH)
                return Expression(captures=tuple(captures), steps=tuple(steps), answer=value)
            case _:
                raise _refused(statement, "a line such as name = value, or a value in the last line")
    raise ProblemError(f"an expression must end with its answer, got {text!r:.200}; add a line with the value")


def _capture(name: str, kind: ast.Subscript, place: int) -> Capture:
    match kind:
        case ast.Subscript(value=ast.Name(id=dtype), slice=ast.Constant(value=int(axes))) if (
            dtype in CAPTURE_TYPES and not isinstance(axes, bool) and 1 <= axes <= 4 and name == f"captured{place}"
        ):
            return Capture(name=name, dtype=dtype, axes=axes)
    raise _refused(kind, f"a declaration such as captured{place}: float32[1]")


def _check(node: ast.expr, known: set[str], captures: list[Capture], depth: int) -> None:
    """Refuses a node that is more than arithmetic over what is known."""
    if depth == 0:
        raise ProblemError(f"an expression must nest at most {MAX_DEPTH} levels; give parts of it names")
    parts: list[ast.expr] = []
    match node:
        case ast.Constant(value=bool() | int() | float() as number) if abs(number) < 1e38:
            pass
        case ast.Name(id=name) if name in known:
            pass
        case ast.UnaryOp(operand=operand) if type(node.op) in OPERATORS:
            parts = [operand]
        case ast.BinOp(left=left, right=right) if type(node.op) in OPERATORS:
            parts = [left, right]
        case ast.Compare(left=left, ops=[comparison], comparators=[right]) if type(comparison) in OPERATORS:
            parts = [left, right]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if (
            name in FUNCTIONS and len(arguments) == FUNCTIONS[name][0]
        ):
            parts = arguments
        case ast.Subscript(value=ast.Name(id=name)) if any(one.name == name for one in captures):
            parts = _indices(node)
            if len(parts) != next(one.axes for one in captures if one.name == name):
                raise _refused(node, "one index for each axis")
        case _:
            raise _refused(node, "numbers, names, operators, and the functions " + ", ".join(FUNCTIONS))
    for part in parts:
        _check(part, known, captures, depth - 1)


def _indices(node: ast.Subscript) -> list[ast.expr]:
    return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]


def _refused(node: ast.AST, wanted: str) -> ProblemError:
    return ProblemError(f"an expression may hold {wanted}, got {ast.unparse(node)!r:.200}; see docs/masks.md")


def _triton(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=value):
            return repr(value)
        case ast.Name(id=name):
            return 'float("inf")' if name == INFINITY else name
        case ast.UnaryOp(op=op, operand=operand):
            return f"({OPERATORS[type(op)][0]}{_triton(operand)})"
        case ast.BinOp(left=left, op=ast.FloorDiv() | ast.Mod() as op, right=right):  # Triton's truncate as C's do
            act = "floor_divide" if isinstance(op, ast.FloorDiv) else "remainder"
            return f"{act}({_triton(left)}, {_triton(right)})"
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            return f"({_triton(left)} {OPERATORS[type(op)][0]} {_triton(right)})"
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return f"{FUNCTIONS[name][1]}({', '.join(map(_triton, arguments))})"
        case ast.Subscript(value=ast.Name(id=name)):
            *outer, last = map(_triton, _indices(node))
            offsets = [f"{index} * {name}_stride{axis}" for axis, index in enumerate(outer)]
            return f"tl.load({name}_ptr + {' + '.join([*offsets, last])})"
    raise AssertionError(ast.dump(node))


def _value(node: ast.expr, names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
    def of(part: ast.expr) -> Any:
        return _value(part, names, functions)

    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return math.inf if name == INFINITY else names[name]
        case ast.UnaryOp(op=op, operand=operand):
            return OPERATORS[type(op)][1](of(operand))
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            return OPERATORS[type(op)][1](of(left), of(right))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return functions[name](*map(of, arguments))
        case ast.Subscript(value=ast.Name(id=name)):
            return names[name][tuple(map(of, _indices(node)))]
    raise AssertionError(ast.dump(node))
