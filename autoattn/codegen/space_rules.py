"""Arithmetic that a data file may state: numbers, names, comparisons, and nothing that can act.

A search space is data and is never evaluated as Python. Its rules are parsed with Python's grammar, every node is
checked against a short list, and only then turned into a closure over plain numbers and strings.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

from autoattn.errors import SpaceError

Facts = Mapping[str, Any]
MAX_LENGTH = 500  # characters of one rule
MAX_DEPTH = 40  # levels of nesting; our deepest rule has a quarter of it, and each level is a call
MAX_BITS = 256  # of a whole number; names that build on names could double its length with each


def _on_numbers(act: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that takes no words: 'a' * 10**9 and '%999999999d' % 1 would fill the memory."""

    def apply(*values: Any) -> Any:
        for value in values:  # a loop: a search asks millions of times, and `any` takes twice as long
            if isinstance(value, str):
                raise TypeError("words can only be compared")
        result = act(*values)
        if isinstance(result, int) and result.bit_length() > MAX_BITS:
            raise OverflowError(f"a whole number of more than {MAX_BITS} bits")
        return result

    return apply


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: _on_numbers(operator.add),
    ast.Sub: _on_numbers(operator.sub),
    ast.Mult: _on_numbers(operator.mul),
    ast.Div: _on_numbers(operator.truediv),
    ast.FloorDiv: _on_numbers(operator.floordiv),
    ast.Mod: _on_numbers(operator.mod),
    ast.USub: _on_numbers(operator.neg),
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Not: operator.not_,
}
# The same for values of which every one is a number: they need no guard against words, and unguarded whole numbers that
# each take 64 bits cannot grow past what MAX_DEPTH levels make of them.
_OF_NUMBERS: dict[type[ast.AST], Callable[..., Any]] = {
    **_OPERATORS,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
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
        names: set[str] = set()
        self._tree = tree
        self._value = _closure(tree, text.strip(), names, MAX_DEPTH)
        self.names = frozenset(names)

    def given(self, facts: Facts, unknown: frozenset[str]) -> Rule:
        """The same rule with all worked out that needs no unknown name; it asks for fewer facts and costs less.

        Args:
            facts: hold every other name in `names`.
            unknown: names of numbers.
        """
        return self._of(_folded(self._tree, facts, unknown))

    def renamed(self, names: Mapping[str, str], facts: Facts) -> Rule:
        """The same rule that asks for its facts by other names, or not at all.

        Args:
            names: name in `names` -> its other name.
            facts: what is put in for names that have none, as far as it is known.
        """
        return self._of(_renamed(self._tree, names, facts))

    def _of(self, tree: ast.expr) -> Rule:
        """A rule of the same text that works a checked expression out."""
        names: set[str] = set()
        _note_names(tree, names)
        rule = object.__new__(Rule)
        rule.text, rule._tree, rule.names = self.text, tree, frozenset(names)
        return rule

    @cached_property
    def _value(self) -> Callable[[Facts], Any]:
        """The expression as a function of the facts: of most rules that `given` makes, only the identity is asked."""
        operators = _OPERATORS if _has_words(self._tree) else _OF_NUMBERS
        return _closure(self._tree, self.text.strip(), set(), MAX_DEPTH, operators)

    def identity(self, names: Mapping[str, str], facts: Facts) -> Hashable:
        """Equal for rules whose `renamed` always have the same value, and fail with the same words."""
        return self.text, _identity(self._tree, names, facts)

    def __call__(self, facts: Facts) -> Any:
        """The value of the expression; `facts` must hold every name in `names`.

        Raises:
            SpaceError: the arithmetic has no result, such as a division by zero.
        """
        try:
            return self._value(facts)
        except ArithmeticError as error:
            raise SpaceError(f"the rule {self.text!r} fails ({error}); correct it") from None
        except TypeError as error:
            raise SpaceError(f"the rule {self.text!r} mixes numbers and words ({error}); correct it") from None


def _renamed(node: ast.expr, names: Mapping[str, str], facts: Facts) -> ast.expr:
    """A checked expression with other names for what it asks, or with the values."""

    def part(node: ast.expr) -> ast.expr:
        return _renamed(node, names, facts)

    match node:
        case ast.Name(id=name) if name in names:
            return ast.Name(names[name], node.ctx)
        case ast.Name(id=name) if name in facts:
            return ast.Constant(facts[name])
        case ast.UnaryOp():
            return ast.UnaryOp(node.op, part(node.operand))
        case ast.BinOp():
            return ast.BinOp(part(node.left), node.op, part(node.right))
        case ast.Compare():
            return ast.Compare(part(node.left), node.ops, list(map(part, node.comparators)))
        case ast.Call():
            return ast.Call(node.func, list(map(part, node.args)), [])
        case ast.BoolOp():
            return ast.BoolOp(node.op, list(map(part, node.values)))
    return node


def _identity(node: ast.expr, names: Mapping[str, str], facts: Facts) -> Hashable:
    """A value that says all of what `_renamed` gives."""
    match node:
        case ast.Constant(value=value):
            return type(value), value  # 1, 1.0 and True are equal
        case ast.Name(id=name):
            if name in names:
                return names[name]
            return (type(facts[name]), facts[name]) if name in facts else name
        case ast.Call(func=ast.Name(id=function)):
            return ast.Call, function, *(_identity(part, names, facts) for part in node.args)
        case ast.Compare(ops=[comparison]):
            return type(comparison), *(_identity(part, names, facts) for part in _parts(node))
        case ast.UnaryOp() | ast.BinOp() | ast.BoolOp():
            return type(node.op), *(_identity(part, names, facts) for part in _parts(node))
    raise AssertionError(f"a checked expression holds no {type(node).__name__}")


def _parts(node: ast.expr) -> Sequence[ast.expr]:
    """The expressions that a checked one is made of, in order."""
    match node:
        case ast.BinOp(left=left, right=right):
            return left, right
        case ast.Compare(left=left, comparators=[right]):
            return left, right
        case ast.BoolOp(values=values):
            return values
        case ast.Call(args=arguments):
            return arguments
        case ast.UnaryOp(operand=operand):
            return (operand,)
    return ()


def _note_names(node: ast.expr, names: set[str]) -> None:
    """Adds the names that a checked expression asks for."""
    if isinstance(node, ast.Name):
        names.add(node.id)
    else:
        for part in _parts(node):
            _note_names(part, names)


def _has_words(tree: ast.expr) -> bool:
    if isinstance(tree, ast.Constant):
        return isinstance(tree.value, str)
    return any(map(_has_words, _parts(tree)))


def _closure(
    node: ast.expr, text: str, names: set[str], depth: int, operators: Mapping[type[ast.AST], Any] = _OPERATORS
) -> Callable[[Facts], Any]:
    """Turns a node into a function of the facts, and notes in `names` what it will ask of them."""
    if depth == 0:
        raise SpaceError(f"a rule must nest at most {MAX_DEPTH} levels, got {text!r}; write it flatter")

    def parts(*nodes: ast.expr) -> list[Callable[[Facts], Any]]:
        return [_closure(part, text, names, depth - 1, operators) for part in nodes]

    match node:
        case ast.Constant(value=int() | float() | str() as constant):
            return lambda facts: constant
        case ast.Name(id=name) if name not in _FUNCTIONS:
            names.add(name)
            return operator.itemgetter(name)
        case ast.UnaryOp() if type(node.op) in operators:
            return _applied(operators[type(node.op)], parts(node.operand))
        case ast.BinOp() if type(node.op) in operators:
            return _joined(operators[type(node.op)], parts(node.left, node.right), node.left, node.right)
        case ast.Compare(ops=[comparison], comparators=[right]) if type(comparison) in operators:
            return _joined(operators[type(comparison)], parts(node.left, right), node.left, right)
        case ast.BoolOp():
            return _first(parts(*node.values), isinstance(node.op, ast.Or))
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, _, *_] as arguments, keywords=[]):
            return _applied(_FUNCTIONS[name], parts(*arguments))
    piece = ast.get_source_segment(text, node)
    raise SpaceError(
        f"a rule may hold numbers, names, + - * / // %, one comparison at a time, and, or, not, min and max of two or "
        f"more, got {piece!r} in {text!r}; write it with those"
    )


def _folded(node: ast.expr, facts: Facts, unknown: frozenset[str]) -> ast.expr:
    """A checked expression, whose parts without unknown names are numbers and words; what has no result stays."""
    match node:
        case ast.Constant():
            return node
        case ast.Name(id=name):
            return node if name in unknown else _constant(node, lambda: facts[name])
        case ast.BoolOp():
            return _decided([_folded(part, facts, unknown) for part in node.values], node)
    parts = [_folded(part, facts, unknown) for part in _parts(node)]
    match node:
        case ast.BinOp(op=operation):
            folded: ast.expr = ast.BinOp(parts[0], operation, parts[1])
            act = _OPERATORS[type(operation)]
        case ast.Compare(ops=[comparison]):
            folded = ast.Compare(parts[0], node.ops, parts[1:])
            act = _OPERATORS[type(comparison)]
        case ast.UnaryOp(op=sign):
            folded = ast.UnaryOp(sign, *parts)
            act = _OPERATORS[type(sign)]
        case ast.Call(func=ast.Name(id=function)):
            folded = ast.Call(node.func, parts, [])
            act = _FUNCTIONS[function]
        case _:
            raise AssertionError(f"a checked expression holds no {type(node).__name__}")
    values = [part.value for part in parts if isinstance(part, ast.Constant)]
    return _constant(folded, lambda: act(*values)) if len(values) == len(parts) else folded


def _constant(node: ast.expr, work_out: Callable[[], Any]) -> ast.expr:
    """The value of a node; the node itself where it has none, or one that is no number and no word."""
    try:
        value = work_out()
    except (ArithmeticError, TypeError, SpaceError):  # said when somebody asks for it
        return node
    return ast.Constant(value) if isinstance(value, int | float | str) else node


def _decided(values: list[ast.expr], node: ast.BoolOp) -> ast.expr:
    """`and` or `or` of these, without those that decide nothing and those behind one that decides."""
    wanted = isinstance(node.op, ast.Or)
    kept: list[ast.expr] = []
    for place, value in enumerate(values):
        if isinstance(value, ast.Constant) and bool(value.value) is wanted:
            kept.append(value)
            break
        if not isinstance(value, ast.Constant) or place == len(values) - 1:
            kept.append(value)
    return kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept)


def _joined(
    act: Callable[..., Any], parts: list[Callable[[Facts], Any]], left: ast.expr, right: ast.expr
) -> Callable[[Facts], Any]:
    """An operator between two parts; a constant is put in, since to ask for it takes as long as the operator."""
    first, second = parts
    if isinstance(right, ast.Constant):
        last = right.value
        return lambda facts: act(first(facts), last)
    if isinstance(left, ast.Constant):
        begin = left.value
        return lambda facts: act(begin, second(facts))
    return lambda facts: act(first(facts), second(facts))


def _applied(act: Callable[..., Any], parts: list[Callable[[Facts], Any]]) -> Callable[[Facts], Any]:
    return lambda facts: act(*[part(facts) for part in parts])


def _first(parts: list[Callable[[Facts], Any]], wanted: bool) -> Callable[[Facts], Any]:
    """The value of the first part that is as wanted, else of the last, as Python's `or` and `and` have it."""
    if len(parts) == 2:
        first, second = parts
        if wanted:
            return lambda facts: first(facts) or second(facts)
        return lambda facts: first(facts) and second(facts)

    def value(facts: Facts) -> Any:
        result: Any = None
        for part in parts:
            result = part(facts)
            if bool(result) is wanted:
                break
        return result

    return value
