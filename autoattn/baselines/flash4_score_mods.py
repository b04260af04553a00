"""Score_mods for FlashAttention-4, whose kernels call a function of the caller's in CuTe, and another for gradients.

The function gets the scaled scores of one to four pairs, and their places, as CuTe's vectors. It walks the checked
expression while the kernel is traced, so that the kernel holds nothing but the arithmetic.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autoattn.core.problem import Op, Problem
from autoattn.errors import ProblemError
from autoattn.expressions import derivative, language
from autoattn.expressions.expression import ACTS, Expression, Kind, Node, is_inside
from autoattn.expressions.language import SCORE_NAMES
from autoattn.tensors.operands import Operands

# Those that are computed as FlashAttention-4 computes its own softcap, by the unit for special functions. A sine is
# not: of large numbers it would be wrong.
FAST = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh")
HOPPER = 9
Attend = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a function for FlashAttention-4 computes, and what it is told in a call."""

    text: str
    sizes: tuple[tuple[int, ...], ...] = ()  # of the tensors that the text reads
    group: int = 1  # above 1: the queries of a key head, where a kernel moves queries and heads (`_put_back`)
    unbounded: bool = False  # whether places may lie outside their sequence, where a row has no key


def why_not(problem: Problem) -> str | None:
    """Why it does not change scores as a problem says, one clause; None when nothing is known against it."""
    modifiers = problem.modifiers
    if not modifiers.score_mod:
        return None
    if modifiers.softcap:
        return "it takes a score_mod or a softcap, not both"
    if problem.op is Op.BACKWARD:
        try:
            derivative.of(modifiers.score_mod)
        except ProblemError:
            return "it is given no score_mod here that has no derivative in PyTorch"
    return None


def changing(attend: Attend, problem: Problem, operands: Operands) -> Attend:
    """FlashAttention's function with the score_mod of a problem, and with its derivative where gradients are asked for.

    Args:
        attend: flash_attn_func or flash_attn_varlen_func; it answers with the output and more.
    """
    change = Change(
        text=problem.modifiers.score_mod,
        sizes=tuple(tuple(tensor.shape) for tensor in operands.score_captures),
        unbounded=_has_rows_without_keys(problem),
    )
    facts: dict[str, Any] = {"score_mod": score_mod(change)}
    if operands.score_captures:
        facts["aux_tensors"] = [readable(tensor) for tensor in operands.score_captures]
    recomputed = None  # the function by which a backward pass computes the scores again
    if problem.op is Op.BACKWARD:
        if problem.group_size > 1 and _asks_places(change.text) and moves_queries(operands.query.device):
            change = replace(change, group=problem.group_size)
            recomputed = score_mod(change)
        facts["score_mod_bwd"] = gradient_mod(change)

    def attended(*tensors: Tensor, **given: Any) -> Any:
        answer = attend(*tensors, **given, **facts)
        if recomputed is not None and answer[0].grad_fn is not None:
            answer[0].grad_fn.score_mod = recomputed  # where FlashAttention keeps what its backward pass calls
        return answer

    return attended


@cache
def score_mod(change: Change) -> Callable[..., Any]:
    """What FlashAttention-4 calls for scores; always the same function for the same change."""
    expression = language.parse(change.text, SCORE_NAMES)

    def changed(
        score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any, **_: Any
    ) -> Any:
        return _computed(expression, change, score, (b, h, q_idx, kv_idx), seqlen_info, aux_tensors)

    return _named(changed, "score", change)


@cache
def gradient_mod(change: Change) -> Callable[..., Any]:
    """What FlashAttention-4 calls to make gradients of scores of those of the changed ones."""
    expression = derivative.of(change.text)

    def changed(
        grad: Any, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any, **_: Any
    ) -> Any:
        if expression.answer.act == "number" and expression.answer.number == 1.0:
            return grad
        return grad * _computed(expression, change, score, (b, h, q_idx, kv_idx), seqlen_info, aux_tensors)

    return _named(changed, "gradient", change)


def _has_rows_without_keys(problem: Problem) -> bool:
    """Whether some query may see no key. A kernel reads a block before the first key for it, all the same."""
    _, last = problem.band(problem.seq_q, problem.seq_kv)
    return problem.packed or (last is not None and last < 0)


def _asks_places(text: str) -> bool:
    return bool({"h", "q_idx"} & language.parse(text, SCORE_NAMES).answer.asks)


def _named(function: Callable[..., Any], *facts: object) -> Callable[..., Any]:
    """The function with the digest by which FlashAttention-4 tells kernels apart: their code alone is the same."""
    function.__cute_hash__ = hashlib.sha256(repr(facts).encode()).hexdigest()  # type: ignore[attr-defined]
    return function


def readable(tensor: Tensor) -> Tensor:
    """The same elements as CuTe reads them: of several axes of stride 1, it must be told which one is the last."""
    tensor = tensor.contiguous().view(torch.uint8 if tensor.dtype is torch.bool else tensor.dtype)
    tensor.__leading_dim__ = tensor.dim() - 1
    return tensor


@cache
def moves_queries(device: torch.device) -> bool:
    """Whether a backward pass gives a function other places than the forward pass, where heads share keys.

    Hopper's of 4.0.0b36 does: it takes its queries apart as if those of a key head lay side by side, which they do in
    its forward pass alone.
    """
    if torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90

    return "pack_gqa" not in inspect.getsource(FlashAttentionBackwardSm90.apply_score_mod)


def _computed(
    expression: Expression, change: Change, score: Any, places: tuple[Any, Any, Any, Any], seqlen_info: Any,
    tensors: Sequence[Any],
) -> Any:  # fmt: skip
    """The answer of an expression for some pairs, as a vector of float32."""
    b, h, q_idx, kv_idx = places
    if change.group > 1:
        h, q_idx = _put_back(h, q_idx, change.group, seqlen_info if change.sizes else None)
    names = {"score": score, "b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx}
    pairs = _Pairs(names=names, tensors=tensors, change=change)
    for name, value in expression.steps:
        pairs.steps[name] = pairs.value(value)
    return pairs.counted(expression.answer, Kind.FLOAT)


def _put_back(h: Any, q_idx: Any, group: int, seqlen_info: Any) -> tuple[Any, Any]:
    """Head and query of pairs of which a kernel gives head * group + query % group, and query // group.

    Args:
        seqlen_info: the lengths, where tensors are read: queries behind the last one must not lead outside.
    """
    import cutlass.cute as cute

    head = h // group
    query = q_idx * group + (h - head * group)
    if seqlen_info is not None:
        query = cute.math.min(query, cute.full_like(query, seqlen_info.seqlen_q - 1))
    return head, query


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pairs:
    """Some pairs in the registers of a thread, and the values of a text for them. A value is a vector of CuTe's: of
    float32, int32 or booleans, as its kind says.
    """

    names: dict[str, Any]  # score, b, h, q_idx and kv_idx
    tensors: Sequence[Any]  # captured0, captured1, ...
    change: Change
    steps: dict[str, Any] = field(default_factory=dict)  # those that are computed

    def value(self, node: Node) -> Any:
        """One value of the text."""
        import cutlass.cute as cute

        parts, kind = node.parts, node.kind
        match node.act:
            case "number":
                return self._full(node.number, kind)
            case "name":
                return self.names[node.name]
            case "step":
                return self.steps[node.name]
            case "read":
                return self._read(node)
            case "where":
                return cute.where(self.value(parts[0]), self.counted(parts[1], kind), self.counted(parts[2], kind))
            case "minimum" | "maximum":
                left, right = (self.counted(part, kind) for part in parts)
                act = cute.math.min if node.act == "minimum" else cute.math.max
                return act(left, right, propagate_nan=True)
            case "to_int" | "to_float":
                return self.counted(parts[0], kind)
            case "floor" if kind is Kind.INT:
                return self.value(parts[0])
            case "abs" | "floor":
                return getattr(cute.math, node.act)(self.value(parts[0]))
            case "sigmoid":
                return 1.0 / (1.0 + cute.math.exp(-self.counted(parts[0], Kind.FLOAT), fastmath=True))
            case "exp" | "exp2" | "log" | "log2" | "sqrt" | "rsqrt" | "sin" | "cos" | "tanh":
                return getattr(cute.math, node.act)(self.counted(parts[0], Kind.FLOAT), fastmath=node.act in FAST)
            case "-x":
                return -self.value(parts[0])
            case "~x":  # CuTe's vectors do not know ~
                return self.value(parts[0]) ^ self._full(True if kind is Kind.BOOL else -1, kind)
        return self._joined(node)

    def counted(self, node: Node, kind: Kind) -> Any:
        """One value as a vector of another kind."""
        import cutlass.cute as cute

        value = self.value(node)
        if node.kind is kind:
            return value
        if node.kind is Kind.BOOL:
            return cute.where(value, self._full(1, kind), self._full(0, kind))
        return value.to(_type_of(kind))

    def _joined(self, node: Node) -> Any:
        """What an operator makes of two values; they are made one kind first, in which it counts."""
        kinds = {part.kind for part in node.parts}
        if node.act in ("&", "|", "^"):
            kind = node.kind
        else:
            kind = Kind.FLOAT if Kind.FLOAT in kinds or node.act == "/" else Kind.INT
        left, right = (self.counted(part, kind) for part in node.parts)
        if node.act == "%":
            return self._remainder(left, right, kind)
        if node.act == "//" and kind is Kind.FLOAT:
            import cutlass.cute as cute

            whole = (left - self._remainder(left, right, kind)) / right
            return cute.math.floor(whole + 0.5)  # the quotient itself may be rounded up
        return ACTS[node.act](left, right)

    def _remainder(self, left: Any, right: Any, kind: Kind) -> Any:
        """The remainder with the sign of `right`, as Python's."""
        import cutlass.cute as cute

        # CuTe's // of whole numbers rounds down, but its % cuts; its % of numbers takes minutes to compile.
        if kind is Kind.INT:
            return left - left // right * right
        rest, zero = cute.math.fma(-cute.math.floor(left / right), right, left), self._full(0.0, kind)
        # The quotient may have been rounded up to a whole number.
        return cute.where((rest != zero) & ((rest < zero) ^ (right < zero)), rest + right, rest)

    def _read(self, node: Node) -> Any:
        """Elements of a tensor, one for each pair."""
        import cutlass.cute as cute

        assert node.capture is not None
        place = int(node.name.removeprefix("captured"))
        tensor, sizes = self.tensors[place], self.change.sizes[place]
        indices = [
            self.value(part) if is_inside(part) and not self.change.unbounded else self._inside(self.value(part), size)
            for part, size in zip(node.parts, sizes, strict=True)
        ]
        pairs = cute.size(self.names["score"].shape)
        gathered = cute.make_rmem_tensor(pairs, tensor.element_type)
        for pair in range(pairs):
            indexed = tuple(index[pair] for index in indices)
            gathered[pair] = tensor[indexed if len(indexed) > 1 else indexed[0]]
        elements = gathered.load().to(_type_of(Kind.INT if node.kind is Kind.BOOL else node.kind))
        return elements != self._full(0, Kind.INT) if node.kind is Kind.BOOL else elements

    def _inside(self, index: Any, size: int) -> Any:
        """An index below 0 counts from the end, as PyTorch's; one outside becomes the nearest inside."""
        import cutlass.cute as cute

        first, last = self._full(0, Kind.INT), self._full(size - 1, Kind.INT)
        counted = cute.where(index < first, index + self._full(size, Kind.INT), index)
        return cute.math.min(cute.math.max(counted, first), last)

    def _full(self, number: bool | int | float, kind: Kind) -> Any:
        import cutlass.cute as cute

        return cute.full_like(self.names["score"], number, _type_of(kind))


def _type_of(kind: Kind) -> Any:
    import cutlass

    return {Kind.BOOL: cutlass.Boolean, Kind.INT: cutlass.Int32, Kind.FLOAT: cutlass.Float32}[kind]
