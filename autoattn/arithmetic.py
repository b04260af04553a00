"""Arithmetic that a data file may state: numbers, names, comparisons, and nothing that can act.

A search space is data and is never evaluated as Python. Its rules are parsed with Python's grammar, every node is
checked against a short list, and only then turned into a closure over plain numbers and strings.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from autoattn.errors import SpaceError

Facts = Mapping[str, Any]
MAX_LENGTH = 500  # characters of one rule
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max}


class Rule:
    """An expression over named facts.

    Raises:
        SpaceError: the text is not such an expression.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if not isinstance(text, str) or len(text) > MAX_LENGTH:
            raise SpaceError(f"a rule must be text of at most {MAX_LENGTH} characters, got {text!r:.60}; shorten it")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise SpaceError(f"a rule must be arithmetic such as BLOCK_M <= 128, got {text!r}; correct it") from None
        self.names = frozenset(
            node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in _FUNCTIONS
        )
        self._value = _closure(tree, text)

    def __call__(self, facts: Facts) -> Any:
        """The value of the expression; `facts` must hold every name in `names`."""
        try:
            return self._value(facts)
        except ArithmeticError as error:
            raise SpaceError(f"the rule {self.text!r} fails ({error}); correct it") from None
        except TypeError as error:
            raise SpaceError(f"the rule {self.text!r} mixes numbers and words ({error}); correct it") from None


def _closure(node: ast.AST, text: str) -> Callable[[Facts], Any]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
        constant = node.value
        return lambda facts: constant
    if isinstance(node, ast.Name):
        name = node.id
        return lambda facts: facts[name]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        act, operand = _OPERATORS[type(node.op)], _closure(node.operand, text)
        return lambda facts: act(operand(facts))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        act, left, right = _OPERATORS[type(node.op)], _closure(node.left, text), _closure(node.right, text)
        return lambda facts: act(left(facts), right(facts))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        act, left, right = _OPERATORS[type(node.ops[0])], _closure(node.left, text), _closure(node.comparators[0], text)
        return lambda facts: act(left(facts), right(facts))
    if isinstance(node, ast.BoolOp):
        parts = [_closure(part, text) for part in node.values]
        if isinstance(node.op, ast.And):
            return lambda facts: all(part(facts) for part in parts)
        return lambda facts: any(part(facts) for part in parts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and node.args:
        call, arguments = _FUNCTIONS[node.func.id], [_closure(part, text) for part in [*node.args, *node.keywords]]
        return lambda facts: call(*[argument(facts) for argument in arguments])
    piece = ast.unparse(node)
    raise SpaceError(
        f"a rule may hold numbers, names, + - * / // %, one comparison at a time, and, or, not, min and max, "
        f"got {piece!r} in {text!r}; write it with those"
    )
