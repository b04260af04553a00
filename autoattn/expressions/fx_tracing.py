"""Traces a caller's Python function into the text of an expression and the tensors that it reads.

FlexAttention's score_mod and mask_mod are functions of 0-d tensors. torch.fx records what one does to such tensors as a
graph of aten operations, and each operation becomes a line of autoattn.expressions.language.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from autoattn import torch_private
from autoattn.errors import ProblemError
from autoattn.expressions import captures, language
from autoattn.expressions.expression import CAPTURE_TYPES

CPU = torch.device("cpu")
INTS = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64)
MAX_ELEMENTS = 2**31 - 1  # of a captured tensor: kernels count them in 32 bits
MAX_POWER = 8  # whole exponents up to this become products
WAY_OUT = "write it as an expression text (docs/masks.md)"
JOINS = {
    "add": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "remainder": "%", "floor_divide": "//",
}  # fmt: skip
LOGIC = {"logical_and": "&", "logical_or": "|", "logical_xor": "^"}
CALLS = {
    "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "sigmoid", "tanh", "minimum",
    "maximum", "where",
}  # fmt: skip
SAME = {"detach", "clone", "alias", "lift_fresh", "lift_fresh_copy", "view", "expand", "_unsafe_view"}
CONSTANTS = {  # of an operation that makes a constant: what it holds, or the place of it among the arguments
    "scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 2, "zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0,
    "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0,
}  # fmt: skip

Function = Callable[..., Any]
_TextAndCaptures = tuple[str, tuple[Tensor, ...]]
_traced: weakref.WeakKeyDictionary[Function, dict[Any, tuple[Any, _TextAndCaptures]]] = weakref.WeakKeyDictionary()


def trace(function: Function | str, names: tuple[str, ...], device: torch.device = CPU) -> _TextAndCaptures:
    """The expression of a function of 0-d tensors, and what it captures as contiguous tensors of 1 to 4 axes.

    A captured tensor is read when the kernel runs: numbers that are written into it later count. A function is traced
    once, and again when what it captures is another tensor or another number. Captured tensors of 16 bits are computed
    with in float32. A text comes back as it is.

    Args:
        function: takes a tensor for each name, the score float32 and the others int32.
        names: expression.SCORE_NAMES or expression.MASK_NAMES
        device: where the captured tensors must be

    Raises:
        ProblemError: the function does what an expression cannot say, or captures a tensor that a kernel cannot read.
    """
    if isinstance(function, str):
        language.parse(function, names)
        return function, ()
    if not callable(function):
        raise ProblemError(f"a mod must be a function or an expression's text, got {function!r:.80}; see docs/masks.md")
    place = (names, device)
    try:
        captured = captures.fingerprint(function)
        known = _traced.setdefault(function, {}) if isinstance(function, FunctionType) else {}
    except captures.UnknownError:
        captured, known = None, {}
    if place not in known or known[place][0] != captured:
        known[place] = captured, _translated(function, names, device)
    text, tensors = known[place][1]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ProblemError(
            "a captured tensor must not need a gradient, which the kernels do not compute, got one that does; call "
            "under torch.no_grad() or detach it"
        )
    return text, tuple(tensor.detach().reshape(tensor.shape or (1,)).contiguous() for tensor in tensors)


class _Indexing(TorchFunctionMode):
    """Lets a 0-d tensor index another: PyTorch would ask it for its number, which is not known yet."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            index = list(index) if isinstance(index, tuple) else [index]
            if any(isinstance(entry, Tensor) for entry in index) and all(
                isinstance(entry, Tensor | int) for entry in index
            ):
                for axis in reversed(range(len(index))):
                    if not isinstance(index[axis], Tensor):
                        table = table.select(axis, index.pop(axis))
                return torch.ops.aten.index.Tensor(table, index)
        return func(*args, **(kwargs or {}))


def _translated(function: Function, names: tuple[str, ...], device: torch.device) -> _TextAndCaptures:
    """Text and captured tensors, as the function holds them."""
    examples = [
        torch.zeros((), dtype=torch.float32 if name == "score" else torch.int32, device=device) for name in names
    ]
    try:
        with torch.no_grad(), _Indexing():
            graph = make_fx(lambda *given: function(*given))(*examples)  # make_fx itself knows no default arguments
    except Exception as error:  # the caller's own code, which may raise anything
        reason = " ".join(str(error).split())
        if "_local_scalar_dense" in reason:
            reason = "it asks a tensor for its value, as `if` and int() do; use torch.where"
        raise ProblemError(
            f"a mod must be arithmetic on the tensors {', '.join(names)}, got {_called(function)}: {reason:.200}; or "
            f"{WAY_OUT}"
        ) from error
    translation = _Translation(graph, names, device, _called(function))
    text = translation.text()
    language.parse(text, names)
    return text, tuple(translation.tensors)


def _called(function: Function) -> str:
    return str(getattr(function, "__qualname__", function.func if isinstance(function, partial) else type(function)))


class _Table:
    """A captured tensor of which some axes are indexed."""

    def __init__(self, name: str, indices: list[str | None]) -> None:
        self.name, self.indices = name, indices

    def at(self, given: Mapping[int, str]) -> _Table:
        """Indexed at some of the axes that are left."""
        left = [place for place, index in enumerate(self.indices) if index is None]
        indices = list(self.indices)
        for axis, index in given.items():
            indices[left[axis]] = index
        return _Table(self.name, indices)


class _Translation:
    """The lines of a graph."""

    def __init__(self, graph: GraphModule, names: tuple[str, ...], device: torch.device, function: str) -> None:
        self.module, self.names, self.device, self.function = graph, names, device, function
        self.tensors: list[Tensor] = []
        self.values: dict[Node, str | _Table] = {}
        self.lines: dict[str, str] = {}  # what is computed -> its name

    def text(self) -> str:
        self.module.graph.eliminate_dead_code()
        waiting = list(self.names)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = waiting.pop(0)
            elif node.op == "get_attr":
                self.values[node] = self._attribute(node)
            elif node.op == "output":
                answer = self._answer(node.args[0])
            else:
                self.values[node] = self._named(self._operation(node))
        declared = [
            f"captured{place}: {str(tensor.dtype).removeprefix('torch.')}[{tensor.dim() or 1}]"
            for place, tensor in enumerate(self.tensors)
        ]
        return "\n".join([*declared, *(f"{name} = {value}" for value, name in self.lines.items()), answer])

    def _answer(self, result: Any) -> str:
        value = self._scalar(result)
        if isinstance(result, Node) and result.meta["val"].dim():
            raise self._refused(f"a result of shape {tuple(result.meta['val'].shape)}, not a single number")
        return value

    def _attribute(self, node: Node) -> str | _Table:
        """A captured tensor; one without axes is read at once."""
        tensor: Tensor = getattr(self.module, str(node.target))
        if all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users) and not tensor.dim():
            return _literal(tensor.item())  # torch.tensor(3.0), made anew by each call
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in CAPTURE_TYPES:
            raise self._refused(f"a captured tensor of {kind}, not {', '.join(CAPTURE_TYPES)}")
        if tensor.dim() > 4 or not 1 <= tensor.numel() <= MAX_ELEMENTS:
            raise self._refused(f"a captured tensor of shape {tuple(tensor.shape)}, not 0 to 4 axes that are not empty")
        if tensor.device.type != self.device.type:
            raise self._refused(f"a captured tensor on the {tensor.device}, not the {self.device}")
        place = next((place for place, known in enumerate(self.tensors) if known is tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(tensor)
        return _Table(f"captured{place}", [None] * tensor.dim()) if tensor.dim() else f"captured{place}[0]"

    def _named(self, value: str | _Table) -> str | _Table:
        """The name of a line for what is more than a name or a number; the same is computed once."""
        if isinstance(value, _Table):
            if None in value.indices:
                return value
            value = f"{value.name}[{', '.join(str(index) for index in value.indices)}]"
        if value.isidentifier() or _is_literal(value):
            return value
        return self.lines.setdefault(value, f"t{len(self.lines)}")

    def _operation(self, node: Node) -> str | _Table:
        name = node.target.overloadpacket.__name__ if torch_private.is_operator(node.target) else str(node.target)
        if name in ("index", "select"):
            return self._indexed(node, name)
        if name in CONSTANTS and not node.meta["val"].dim():
            held = CONSTANTS[name]
            number = held if isinstance(held, float) else node.args[held]
            return self._cast(_literal(number), node.meta["val"].dtype, number)
        if name in SAME:
            value = self.values[node.args[0]]
            same = isinstance(value, str) and not node.meta["val"].dim()
            return value if same or name == "lift_fresh_copy" else self._unknown(name)
        arguments = [self._scalar(argument) if argument is not None else None for argument in node.args]
        if name in JOINS:
            return self._joined(name, node, arguments)
        if name in LOGIC:
            left, right = (self._boolean(argument) for argument in node.args)
            return f"{left} {LOGIC[name]} {right}"
        if name in CALLS:
            return f"{name}({', '.join(map(str, arguments))})"
        special = getattr(self, f"_of_{name.strip('_')}", None)
        return special(node, *arguments) if special else self._unknown(name)

    def _joined(self, name: str, node: Node, arguments: list[str | None]) -> str:
        left, right = arguments[:2]
        sign = JOINS[name]
        if _kind(node.args[0]) is _kind(node.args[1]) is bool:  # booleans do not add up
            sign = {"+": "|", "*": "&"}.get(sign, sign)
        alpha = node.kwargs.get("alpha", 1)
        return f"{left} {sign} {right}" if alpha == 1 else f"{left} {sign} {right} * {_literal(alpha)}"

    # Operations that take more than a sign or a name; called by the name that aten has for them.

    def _of_neg(self, node: Node, value: str) -> str:
        return f"-{value}"

    def _of_bitwise_not(self, node: Node, value: str) -> str:
        return f"~{value}"

    def _of_logical_not(self, node: Node, value: str) -> str:
        return f"~{self._boolean(node.args[0])}"

    def _of_reciprocal(self, node: Node, value: str) -> str:
        return f"1.0 / {value}"

    def _of_square(self, node: Node, value: str) -> str:
        return f"{value} * {value}"

    def _of_relu(self, node: Node, value: str) -> str:
        return f"maximum({value}, {'0.0' if _kind(node) is float else '0'})"

    def _of_rsub(self, node: Node, left: str, right: str) -> str:
        return f"{right} - {left}" if len(node.args) == 2 and not node.kwargs else self._unknown("rsub with alpha")

    def _of_clamp(self, node: Node, value: str, least: str | None = None, most: str | None = None) -> str:
        value = value if least is None else f"maximum({value}, {least})"
        return value if most is None else f"minimum({value}, {most})"

    def _of_clamp_min(self, node: Node, value: str, least: str) -> str:
        return f"maximum({value}, {least})"

    def _of_clamp_max(self, node: Node, value: str, most: str) -> str:
        return f"minimum({value}, {most})"

    def _of_masked_fill(self, node: Node, value: str, hidden: str, number: str) -> str:
        if _kind(node.args[2]) is float and _kind(node) is not float:
            raise self._refused("masked_fill of whole numbers with a fraction")
        return f"where({hidden}, {number}, {value})"

    def _of_div(self, node: Node, left: str, right: str) -> str:
        mode = node.kwargs.get("rounding_mode")
        if mode == "floor":
            return f"{left} // {right}"
        if mode is None:
            return f"{left} / {right}"
        whole = f"{_magnitude(left)} // {_magnitude(right)}"
        return f"where(({left} < 0) ^ ({right} < 0), -({whole}), {whole})"

    def _of_pow(self, node: Node, base: str, power: str) -> str:
        root = {0.5: f"sqrt({base})", -0.5: f"rsqrt({base})", -1: f"1.0 / {base}"}
        number, exponent = node.args
        if isinstance(exponent, int | float) and exponent in root:
            return root[exponent]
        if isinstance(exponent, int | float) and exponent == int(exponent) and 1 <= exponent <= MAX_POWER:
            return " * ".join([base] * int(exponent))
        if isinstance(number, int | float) and number > 0 and _kind(node) is float:
            factor = math.log2(number)
            return f"exp2({power})" if factor == 1.0 else f"exp2({power} * {_literal(factor)})"
        raise self._refused(f"pow of {base} and {power}, neither a whole exponent up to {MAX_POWER} nor a base above 0")

    def _of_to_copy(self, node: Node, value: str) -> str:
        return self._cast(value, node.kwargs.get("dtype", node.meta["val"].dtype), node.args[0])

    def _boolean(self, argument: Any) -> str:
        value = self._scalar(argument)
        return value if _kind(argument) is bool else f"({value} != 0)"

    def _cast(self, value: str, dtype: torch.dtype, source: Any) -> str:
        """The value of `source` as another dtype."""
        kind = bool if dtype is torch.bool else int if dtype in INTS else float
        if (
            kind is float
            and dtype not in FLOATS
            and not (isinstance(source, Node) and source.meta["val"].dtype is dtype)
        ):
            raise self._refused(f"a cast to {dtype}, whose rounding an expression does not know")
        if not isinstance(source, Node):
            return _literal(kind(source))
        if kind is _kind(source):
            return value
        return f"{value} != 0" if kind is bool else f"to_int({value})" if kind is int else f"to_float({value})"

    def _indexed(self, node: Node, name: str) -> _Table | str:
        table = self.values[node.args[0]] if isinstance(node.args[0], Node) else None
        if not isinstance(table, _Table):
            return self._unknown(name)
        if name == "select":
            return table.at({int(node.args[1]): _literal(node.args[2])})
        return table.at({axis: self._scalar(index) for axis, index in enumerate(node.args[1]) if index is not None})

    def _scalar(self, argument: Any) -> str:
        value = self.values[argument] if isinstance(argument, Node) else argument
        if isinstance(value, _Table):
            raise self._refused(f"{value.name} with axes that are not indexed; index a tensor before computing with it")
        if isinstance(value, str):
            return value
        if isinstance(value, bool | int | float):
            return _literal(value)
        raise self._refused(f"{value!r:.80}, which is no number")

    def _unknown(self, name: str) -> str:
        raise self._refused(f"{name}, which the language of expressions does not have")

    def _refused(self, what: str) -> ProblemError:
        return ProblemError(
            f"a mod must be arithmetic on the tensors {', '.join(self.names)}, got {self.function} with {what}; change "
            f"it or {WAY_OUT}"
        )


def _literal(number: Any) -> str:
    """A number as an expression spells it."""
    if isinstance(number, float) and math.isinf(number):
        return "inf" if number > 0 else "(-inf)"
    return repr(number) if isinstance(number, bool) or not math.copysign(1.0, number) < 0 else f"({number!r})"


def _magnitude(value: str) -> str:
    """The value without its sign; a number's is computed here, because functions are of names."""
    return value.strip("(-)") if _is_literal(value) else f"abs({value})"


def _is_literal(value: str) -> bool:
    try:
        float(value.strip("()"))
    except ValueError:
        return False
    return True


def _kind(value: Any) -> type:
    """bool, int or float: what a node or a number holds."""
    dtype = value.meta["val"].dtype if isinstance(value, Node) else type(value)
    if isinstance(dtype, type):
        return dtype
    return bool if dtype is torch.bool else float if dtype.is_floating_point else int
