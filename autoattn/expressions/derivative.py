"""The derivative of an expression with respect to its score, which is an expression too.

Whoever changes scores by a text has the gradients of the changed ones; those of the scores are these times the
derivative. Where a function has a corner or a step, the derivative is PyTorch's: 0 for a step, at a corner that of
abs is 0, and that of the smaller or larger of two equal numbers their mean. Where a text hides a pair by -inf, the pair
has no weight, so that any number will do: it is what it is for the others.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from autoattn.errors import ProblemError
from autoattn.expressions.expression import Expression, Kind, Node
from autoattn.expressions.language import SCORE_NAMES, parse

STEPS = ("floor", "to_int")  # of these the derivative is 0 wherever there is one


@lru_cache(maxsize=256)
def of(text: str) -> Expression:
    """The derivative of a score_mod with respect to its score, with the same captures.

    Raises:
        ProblemError: the text is no such expression, or rounds a number of the score by // or takes a remainder by one,
            which PyTorch does not differentiate, so that nothing could vouch for a kernel.
    """
    whole = parse(text, SCORE_NAMES)
    steps: list[tuple[str, Node]] = []
    known: dict[str, Node | None] = {}  # a step's name -> its derivative; None for 0
    taken = {name for name, _ in whole.steps}
    for name, value in whole.steps:
        steps.append((name, value))
        grown = _derivative(value, known)
        if grown is not None and grown.act not in ("number", "name"):
            own = f"growth_of_{name}"
            while own in taken:
                own += "_"
            taken.add(own)
            steps.append((own, grown))
            grown = replace(grown, act="step", name=own, parts=())
        known[name] = grown
    answer = _derivative(_shown(whole), known) or _number(0.0)
    if answer.kind is not Kind.FLOAT:
        answer = _number(float(answer.number)) if answer.act == "number" else _node("to_float", answer)
    return Expression(captures=whole.captures, steps=tuple(steps), answer=answer)


def _shown(whole: Expression) -> Node:
    """The answer for the pairs that it does not hide: a choice between a number and -inf is the number."""
    steps, answer = dict(whole.steps), whole.answer
    while len(steps) == len(whole.steps):  # else a name may have stood for another value
        value = steps[answer.name] if answer.act == "step" else answer
        sides = value.parts[1:] if value.act == "where" else ()
        shown = [side for side in sides if side.act != "number" or side.number != -math.inf]
        if len(shown) != 1:
            break
        answer = shown[0]
    return answer


def _derivative(node: Node, known: dict[str, Node | None]) -> Node | None:
    """The derivative of one value; None for 0."""
    if "score" not in node.asks or node.kind is not Kind.FLOAT or node.act in (*STEPS, "read"):
        return None
    if node.act == "name":
        return _number(1.0)
    if node.act == "step":
        return known[node.name]
    if node.act == "//" or (node.act == "%" and "score" in node.parts[1].asks):
        raise ProblemError(
            f"a score_mod that is differentiated must have a derivative in PyTorch, got {node.act} of a score; "
            "write floor(one / other)"
        )
    grown = [_derivative(part, known) for part in node.parts]
    if all(grad is None for grad in grown):
        return None
    if node.act == "where":
        return _node("where", node.parts[0], grown[1] or _number(0.0), grown[2] or _number(0.0))
    if node.act in ("minimum", "maximum"):
        return _of_extremes(node, grown)
    if len(grown) == 2:
        return _of_two(node, grown)
    assert grown[0] is not None
    return grown[0] if node.act == "to_float" else _times(grown[0], _of_one(node))


def _of_two(node: Node, grown: list[Node | None]) -> Node | None:
    """The derivative of what an operator makes of two numbers."""
    left, right = node.parts
    left_grad, right_grad = grown
    match node.act:
        case "+":
            return _plus(left_grad, right_grad)
        case "-":
            return _plus(left_grad, _minus(right_grad))
        case "*":
            return _plus(_times(left_grad, right), _times(right_grad, left))
        case "/":
            return _plus(_over(left_grad, right), _minus(_over(_times(right_grad, node), right)))
        case "%":
            return left_grad
    raise AssertionError(node.act)


def _of_extremes(node: Node, grown: list[Node | None]) -> Node:
    """The derivative of the smaller or the larger of two numbers."""
    left, right = node.parts
    left_grad, right_grad = (grad or _number(0.0) for grad in grown)
    mean = _node("*", _node("+", left_grad, right_grad), _number(0.5))
    first = _node("<" if node.act == "minimum" else ">", left, right)
    return _node("where", first, left_grad, _node("where", _node("==", left, right), mean, right_grad))


def _of_one(node: Node) -> Node:
    """The derivative of a function by its argument."""
    value = node.parts[0]
    match node.act:
        case "-x":
            return _number(-1.0)
        case "abs":
            below = _node("where", _node("<", value, _number(0.0)), _number(-1.0), _number(0.0))
            return _node("where", _node(">", value, _number(0.0)), _number(1.0), below)
        case "exp":
            return node
        case "exp2":
            return _node("*", node, _number(math.log(2.0)))
        case "log":
            return _node("/", _number(1.0), value)
        case "log2":
            return _node("/", _number(1.0 / math.log(2.0)), value)
        case "sqrt":
            return _node("/", _number(0.5), node)
        case "rsqrt":
            return _node("*", _node("*", _number(-0.5), node), _node("*", node, node))
        case "sin":
            return _node("cos", value)
        case "cos":
            return _node("-x", _node("sin", value))
        case "sigmoid":
            return _node("*", node, _node("-", _number(1.0), node))
        case "tanh":
            return _node("-", _number(1.0), _node("*", node, node))
    raise AssertionError(node.act)


def _number(number: float) -> Node:
    return Node(act="number", kind=Kind.FLOAT, number=number)


def _node(act: str, *parts: Node) -> Node:
    """A value that is a number, or a boolean where it compares."""
    kind = Kind.BOOL if act in ("<", ">", "==") else Kind.FLOAT
    return Node(act=act, kind=kind, parts=parts, asks=frozenset[str]().union(*(part.asks for part in parts)))


def _plus(left: Node | None, right: Node | None) -> Node | None:
    return left if right is None else right if left is None else _node("+", left, right)


def _minus(node: Node | None) -> Node | None:
    if node is None:
        return None
    return _number(-node.number) if node.act == "number" else _node("-x", node)


def _times(node: Node | None, factor: Node) -> Node | None:
    if node is None:
        return None
    if node.act == "number" and factor.act == "number":
        return _number(float(node.number * factor.number))
    return factor if node.act == "number" and node.number == 1.0 else _node("*", node, factor)


def _over(node: Node | None, divisor: Node) -> Node | None:
    return None if node is None else _node("/", node, divisor)
