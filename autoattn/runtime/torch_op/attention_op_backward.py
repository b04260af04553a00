"""The backward pass of torch.ops.autoattn.attention, itself an operator: torch.ops.autoattn.attention_backward.

Where kernels serve both passes, the forward one left the LSE and the backward ones take it. Else the call is computed
once more, from query, key and value, and PyTorch differentiates that. What is saved is linear in the lengths.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from autoattn import torch_private
from autoattn.core.problem import Layout
from autoattn.errors import TensorError
from autoattn.hardware import nvidia
from autoattn.runtime import call_cache, prepared_call
from autoattn.runtime.call import attention, packed_attention
from autoattn.runtime.call_keys import Key
from autoattn.runtime.parse.arguments import Call
from autoattn.runtime.plan import decision, planner
from autoattn.runtime.run import autograd, execute
from autoattn.runtime.torch_op import attention_op, attention_schema
from autoattn.runtime.torch_op.attention_schema import INPUTS, LEARNING, LISTS, PACKED, TENSORS, WORDS, library
from autoattn.runtime.training_call import TrainingCall
from autoattn.tensors import operands
from autoattn.tensors.operands import View

Gradients: TypeAlias = tuple[Tensor | list[None] | None, ...]

library.define(
    f"attention_backward(Tensor? grad_output, Tensor? grad_lse, Tensor output, Tensor lse, {INPUTS}, *, "
    f"bool[] learns, {WORDS}) -> Tensor[]"
)
_operator = torch.ops.autoattn.attention_backward.default
_BEFORE = 4  # arguments of it that stand in front of the inputs
_THREE = LEARNING[:3]


def _by_kernel(
    grad_output: Tensor | None, grad_lse: Tensor | None, output: Tensor, lse: Tensor, inputs: tuple[Any, ...],
    words: dict[str, Any],
) -> dict[str, Tensor | None] | None:  # fmt: skip
    """Gradients by kernels, of all tensors that they give one of; None where none serves."""
    given, call_key = attention_schema.named(inputs, words), attention_op.posed(inputs, words)
    call = attention_op.read(given)
    plan = attention_op.plan_both(call, given)
    if (both := plan.passes(call.problem)) is None:
        return None
    _prepare(call_key, inputs, call, plan, output, lse)
    as_read = [None if tensor is None else attention_op.as_read(tensor, given) for tensor in (output, grad_output)]
    sums = [tensor[None] if tensor is not None and given["layout"] == PACKED else tensor for tensor in (lse, grad_lse)]
    gradients = autograd.differentiate(
        both.backward, both.backward_problem, call.operands, as_read[0], sums[0], as_read[1], sums[1]
    )
    layout = Layout(given["layout"])
    named: dict[str, Tensor | None] = {
        name: operands.as_given(gradient, layout) for name, gradient in gradients.named()
    }
    sinks = given["sinks"]
    named["sinks"] = gradients.sinks if gradients.sinks is None else gradients.sinks.to(sinks.dtype)
    named["bias"] = gradients.bias if gradients.bias is None else gradients.bias.reshape(given["bias"].shape)
    slopes = given["alibi_slopes"]
    named["alibi_slopes"] = gradients.slopes if gradients.slopes is None else gradients.slopes.sum_to_size(slopes.shape)
    return named


def _prepare(
    call_key: Key | None, inputs: tuple[Any, ...], call: Call, plan: planner.Plan, output: Tensor, lse: Tensor
) -> None:
    """Keeps both passes of a call whose forward pass was another's: one that merged, or one before `forget`.

    Args:
        output, lse: of all keys, which the forward pass would leave in the same places.
    """
    problem = call.problem
    without_gaps = View.of(call.operands.query).without_gaps(problem.head_dim_v).given(problem.layout)[1]
    if output.stride() != without_gaps or not lse.is_contiguous() or call_cache.find(call_key) is not None:
        return
    own = *inputs[:3], *attention_op.others_of(inputs)
    computed = operands.viewed(output, problem.layout), lse[None] if problem.packed else lse
    prepared_call.prepare(call_key, own, call, planner.settled(plan, problem), computed, (output, lse))


def _by_pytorch(
    grad_output: Tensor | None, grad_lse: Tensor | None, given: dict[str, Any], learners: list[str]
) -> dict[str, Tensor | None]:
    """Gradients of the named tensors by computing the call once more; None for 0."""
    words = {**given, "return_lse": grad_lse is not None}
    with torch.enable_grad():
        leaves = {name: given[name].detach().requires_grad_() for name in learners}
        again, again_lse = _answer(words | leaves)
        pairs = [
            (tensor, push)
            for tensor, push in ((again, grad_output), (again_lse, grad_lse))
            if tensor is not None is not push
        ]
        tensors, pushes = zip(*pairs, strict=True)
        grads = torch.autograd.grad(tensors, list(leaves.values()), pushes, allow_unused=True)
    return dict(zip(leaves, grads, strict=True))


def _answer(given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Output and LSE of a call that the operator's arguments pose."""
    three = given["query"], given["key"], given["value"]
    words = {**attention_op.function_arguments(given), "return_lse": given["return_lse"]}
    with attention_op.quiet(given["query"]):
        if given["layout"] == PACKED:
            answer = packed_attention(*three, *attention_op.lengths(given), **words)
        else:
            answer = attention(*three, **words)
    return (answer, None) if isinstance(answer, Tensor) else answer


def _backward(*tensors: Any, learns: list[bool], **words: Any) -> list[Tensor]:
    """Gradients of those of LEARNING that learn, in its order; each lies in memory as its tensor does."""
    grads = at_once(tensors, learns, words)
    return _ordinary(tensors, learns, words) if grads is None else grads


def at_once(tensors: tuple[Any, ...], learns: list[bool], words: dict[str, Any]) -> list[Tensor] | None:
    """Gradients where both passes are prepared; None where they are not.

    Args:
        tensors, learns, words: what `torch.ops.autoattn.attention_backward` takes, words without defaults and in the
            order of the schema, as the dispatcher gives them.
    """
    known = call_cache.find(attention_op.posed(tensors[_BEFORE:], words)) if words.get("keep_lse") else None
    if not isinstance(known, TrainingCall):
        return None
    *pulls, output, lse, query, key, value = tensors[: _BEFORE + 3]
    if output.stride() != known.memory.output or not lse.is_contiguous():
        return None
    others = attention_op.others_of(tensors[_BEFORE:])
    grads = known.differentiate(*pulls, query, key, value, output, lse, *others)
    gradients = dict(zip((*_THREE, *known.others), grads, strict=False))
    gradients["alibi_slopes"] = gradients.get("slopes")
    learned = [gradients.get(name) for name in _learners(learns)]
    return None if any(gradient is None for gradient in learned) else [grad for grad in learned if grad is not None]


def _ordinary(tensors: tuple[Any, ...], learns: list[bool], words: dict[str, Any]) -> list[Tensor]:
    given = attention_schema.named(tensors[_BEFORE:], words)
    # The dispatcher has left autograd behind, so that nothing would be recorded.
    with torch_private.above_autograd():
        grad_output, grad_lse, output, lse = tensors[:_BEFORE]
        learners = _learners(learns)
        pulls, inputs = (grad_output, grad_lse), tensors[_BEFORE:]
        grads = _by_kernel(*pulls, output, lse, inputs, words) if given["keep_lse"] else None
        if grads is None:
            grads = _by_pytorch(grad_output, grad_lse, given, learners)
    return [_settled(grads[name], name, given) for name in learners]


def _shapes(*tensors: Any, learns: list[bool], **words: Any) -> list[Tensor]:
    given = attention_schema.named(tensors[_BEFORE:], words)
    return [_empty(name, given) for name in _learners(learns)]


library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("autoattn::attention_backward", _shapes, lib=library)


def _empty(name: str, given: dict[str, Any]) -> Tensor:
    tensor = given[name]
    if name in _THREE:
        return attention_op.empty_as(tensor, tensor.shape[-1], given)
    return tensor.new_empty(tensor.shape)


def _settled(grad: Tensor | None, name: str, given: dict[str, Any]) -> Tensor:
    """A gradient as `_empty` says that it lies; zeros where there is none."""
    if grad is None:
        return _empty(name, given).zero_()
    if name in _THREE:
        return attention_op.as_given(attention_op.as_read(grad, given), given[name], given)
    return grad.contiguous()


def _learners(learns: list[bool]) -> list[str]:
    return [name for name, learnt in zip(LEARNING, learns, strict=True) if learnt]


# --- Autograd ---------------------------------------------------------------------------------------------------------


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> None:
    """Keeps the inputs, the output and the LSE; nothing that grows with queries times keys."""
    ctx.set_materialize_grads(False)
    if not keyword_only_inputs["return_lse"]:
        ctx.mark_non_differentiable(output[1])
    ctx.words = keyword_only_inputs
    ctx.lengths = [
        -1 if argument is None else len(argument) if isinstance(argument, list) else 1 for argument in inputs
    ]
    flat = [
        part
        for argument in inputs
        for part in (argument if isinstance(argument, list) else [argument])
        if part is not None
    ]
    ctx.save_for_backward(*output, *flat)


def _differentiate(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> Gradients:
    output, lse, *flat = ctx.saved_tensors
    inputs: list[Any] = []
    for name, length in zip(TENSORS, ctx.lengths, strict=True):
        parts = [flat.pop(0) for _ in range(length)]
        inputs.append(None if length < 0 else parts if name in LISTS else parts[0])
    nothing: list[Any] = [[None] * len(argument) if isinstance(argument, list) else None for argument in inputs]
    if grad_output is None and grad_lse is None:
        return tuple(nothing[: len(ctx.needs_input_grad)])
    given = len(ctx.needs_input_grad)  # the dispatcher leaves out what is the default, and wants no gradients of it
    learns = [place < given and bool(ctx.needs_input_grad[place]) for place in range(len(LEARNING))]
    grads = torch.ops.autoattn.attention_backward(
        grad_output, grad_lse, output, lse, *inputs, learns=learns, **ctx.words
    )
    for place, learnt in enumerate(learns):
        if learnt:
            nothing[place] = grads.pop(0)
    return tuple(nothing[:given])


def _no_second(ctx: Any, *pushes: Any) -> Gradients:
    raise TensorError(
        "torch.ops.autoattn.attention must be differentiated once, got a second derivative, for which there is no "
        "formula; write attention in plain PyTorch where it is needed"
    )


# torch.library.register_autograd registers these as they are. Each then goes through the dispatcher to come to the same
# Python once more, which takes as long again as all else that a short call waits for; so what is prepared is answered
# here where nothing is recorded, as in each graph that torch.compile made.
recorded = torch_private.autograd_kernel(attention_schema.operator, _differentiate, _save)
recorded_backward = torch_private.autograd_kernel(_operator, _no_second, None)


def _attention(keys: torch.DispatchKeySet, *tensors: Any, **words: Any) -> tuple[Tensor, Tensor]:
    find = _in_parts if torch.is_grad_enabled() else attention_op.at_once
    answer = find(tensors, words)
    return recorded(keys, *tensors, **words) if answer is None else answer


def _in_parts(tensors: tuple[Any, ...], words: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """PyTorch's own attention in place of the operator, for whoever traces a training step that is better off with it.

    A graph in which lengths are symbols, and one for CUDA graphs, keep the operator.
    """
    query, key, value, *extras = tensors
    if not words.get("keep_lse") or type(query).__name__ not in _TRACED or any(extra is not None for extra in extras):
        return None
    if (
        not all(type(size) is int for tensor in (query, key, value) for size in tensor.shape)
        or torch_private.is_for_cuda_graphs()
    ):
        return None
    given = attention_schema.named(tensors, words)
    if given["return_lse"] or given["deterministic"] or torch.are_deterministic_algorithms_enabled():
        return None
    call = attention_op.read(given)
    theirs = decision.in_place_of_kernels(call.problem, nvidia.present(query.device.index))
    if theirs is None:
        return None
    output, _ = execute.run(call, planner.Plan(theirs), lse=False)
    return attention_op.as_given(output, query, given), attention_op.empty_lse(given)


_TRACED = ("FakeTensor", "FunctionalTensor")  # by name: most programs do not load their modules


def _attention_backward(keys: torch.DispatchKeySet, *tensors: Any, learns: list[bool], **words: Any) -> list[Tensor]:
    grads = None if torch.is_grad_enabled() else at_once(tensors, learns, words)
    return recorded_backward(keys, *tensors, learns=learns, **words) if grads is None else grads


library.impl("attention", _attention, "Autograd", with_keyset=True)
library.impl("attention_backward", _attention_backward, "Autograd", with_keyset=True)


def _flops(grad: Any, grad_lse: Any, output: Any, lse: Any, *shapes: Any, **words: Any) -> int:
    """Three products with the query's head dim (scores again, gradients of query and key) and two with the value's."""
    query, key, value = shapes[:3]
    narrow, wide = attention_op.products(query, key, value, words)
    return 3 * narrow + 2 * wide


register_flop_formula(torch.ops.autoattn.attention_backward)(_flops)
