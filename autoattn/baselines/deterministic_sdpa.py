"""PyTorch's attention with gradients that repeat to the bit, for one call instead of the whole process.

PyTorch asks whether algorithms shall be deterministic when a backward pass runs, and its cuDNN attention when a forward
pass does. So a call that asks for it by itself switches that on in both of its passes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autoattn import torch_private
from autoattn.errors import TensorError
from autoattn.tensors.operands import Operands

Answer: TypeAlias = tuple[Tensor, Tensor | None]  # output and LSE
WAY_OUT = "call torch.use_deterministic_algorithms(True) around both passes"


@contextmanager
def switched_on(wanted: bool = True) -> Iterator[None]:
    """torch.use_deterministic_algorithms(True) for a block, where it is wanted.

    PyTorch keeps it for the whole process: what other threads run meanwhile is deterministic too.
    """
    if not wanted:
        yield
        return
    global _before
    with _counting:
        if not _inside:
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            _before = torch.are_deterministic_algorithms_enabled(), warns
            torch_private.set_deterministic_algorithms(True, warn_only=False)
        _inside.append(None)
    try:
        yield
    finally:
        with _counting:
            _inside.pop()
            if not _inside:
                torch_private.set_deterministic_algorithms(_before[0], warn_only=_before[1])


def attend(call: Callable[[Operands], Answer], operands: Operands) -> Answer:
    """What `call` makes of the operands, whose backward pass is deterministic whenever autograd runs it.

    Raises:
        TensorError: torch.func differentiates it, which runs no backward pass that could be switched.
        RuntimeError: PyTorch has no deterministic algorithm for a part of it.
    """
    if torch_private.are_transforms_active():
        raise TensorError(f"deterministic=True must not be asked of a call that torch.func differentiates; {WAY_OUT}")
    given = {field.name: getattr(operands, field.name) for field in fields(operands)}
    learners = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor) and tensor.requires_grad}
    answer: Answer = _Both.apply(call, operands, tuple(learners), *learners.values())
    return answer


class _Both(torch.autograd.Function):
    """A graph of its own, which this function differentiates while the switch is on."""

    @staticmethod
    def forward(
        ctx: Any, call: Callable[[Operands], Answer], operands: Operands, names: tuple[str, ...], *learners: Tensor
    ) -> Answer:
        leaves = [tensor.detach().requires_grad_() for tensor in learners]
        with torch.enable_grad(), switched_on():
            answer = call(replace(operands, **dict(zip(names, leaves, strict=True))))
        ctx.set_materialize_grads(False)
        ctx.leaves, ctx.answer = leaves, answer
        output, lse = answer
        return output.detach(), None if lse is None else lse.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *pulls: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = [(tensor, pull) for tensor, pull in zip(ctx.answer, pulls, strict=True) if pull is not None]
        if not pairs:
            return (None,) * (3 + len(ctx.leaves))
        tensors, wanted = zip(*pairs, strict=True)
        again = torch_private.keeps_graph()  # else what is saved is freed, as autograd does
        with switched_on():
            grads = torch.autograd.grad(tensors, ctx.leaves, wanted, retain_graph=again, allow_unused=True)
        return None, None, None, *grads


_counting = threading.Lock()
_inside: list[None] = []  # one for each block that is open
_before = (False, False)  # what was set, and whether it only warns, before the first of them
