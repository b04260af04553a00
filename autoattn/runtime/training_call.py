"""Prepared training calls: both passes bound but for the addresses, and one node of autograd.

Where sequences are short, a training step waits for the CPU. So nothing is looked at twice: sizes, strides and launches
are those of the first call, and a node of autograd keeps the tensors and these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from autoattn import torch_private
from autoattn.core.call_arguments import NUMBERS
from autoattn.core.modifiers import Bias
from autoattn.kernels import backward
from autoattn.kernels.bound_launch import Bound
from autoattn.kernels.forward import ALIGNED
from autoattn.runtime.plan import gradient_problem
from autoattn.runtime.run import autograd
from autoattn.tensors import score_tensors
from autoattn.tensors.operands import Operands, Saved, View, as_given, viewed
from autoattn.tensors.score_tensors import UNCHANGED, ScoreViews

Steps: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides
Views: TypeAlias = tuple[View, View, View]
_ALIGNED_NUMBERS = 4  # of 4 bytes
_MOST = 64  # kinds of output gradients that are kept
_FLOAT32 = torch.float32
_transforms = torch_private.are_transforms_active


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreGradients:
    """Room for the gradients of bias and slopes; None where the kernels give none."""

    bias: Tensor | None = None  # with four axes: one that shares it is 1 long
    bias_sums: Tensor | None = None  # float32 sums of its tiles, where queries or keys share it
    slopes: Tensor | None = None  # [batch, heads_q]


_NO_GRADIENTS = ScoreGradients()
_READ = "cu_seqlens_q", "cu_seqlens_kv", "bias", "slopes"  # what backward kernels read behind query, key and value


def _aligned(numbers: int) -> int:
    """As many numbers, or the few more behind which the next room may begin."""
    return -(-numbers // _ALIGNED_NUMBERS) * _ALIGNED_NUMBERS


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """How much memory a call needs, and how its output and its gradients lie in it."""

    output: tuple[int, ...]  # strides of the output that it gives, which the backward kernels read
    gradients: tuple[Steps, Steps, Steps]  # of query, key and value
    scratch: backward.ScratchShapes  # of what the kernels leave for one another, of which the next say where it lies
    rows: int  # bytes of each query's LSE, of its delta, and of its part of a learned slope's gradient
    sums: int  # bytes behind these, in which queries' gradients are added up
    key_sums: int  # behind which bytes of them stand gradients of keys and values that programs share
    queries: int  # rows of the query's view
    numbers: int  # of 4 bytes, of all that the kernels leave for one another; behind the sums stand the turns
    copies: tuple[int, ...]  # behind which bytes of these stand turned copies of float32 factors; maybe none

    @classmethod
    def of(cls, both: gradient_problem.Pass, views: Views) -> Memory:
        """Of calls whose query, key and value lie like these."""
        problem, layout = both.backward_problem, both.problem.layout
        scratch = backward.scratch_shapes(both.backward, problem, *views[:2])
        rows, sums = math.prod(scratch.rows), scratch.sums
        key_sums = _aligned(rows + sums + scratch.turns)
        end = room = _aligned(key_sums + scratch.key_sums)
        copies: tuple[int, ...] = ()
        if scratch.copies:
            sizes = [math.prod(scratch.copies[name]) for name in backward.COPIES if name in scratch.copies]
            *begins, end = accumulate(sizes, initial=room)
            copies = tuple(4 * begin for begin in begins)
        query, key, value = views
        return cls(
            output=query.without_gaps(problem.head_dim_v).given(layout)[1],
            gradients=(
                query.without_gaps(problem.head_dim).given(layout),
                key.without_gaps(problem.head_dim).given(layout),
                value.without_gaps(problem.head_dim_v).given(layout),
            ),
            scratch=scratch,
            rows=4 * (rows // scratch.rows[0]),
            sums=4 * sums,
            key_sums=4 * key_sums,
            queries=query.shape[2],
            numbers=end,
            copies=copies,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingCall:
    """Launches of two passes. Tensors are the caller's; behind query, key and value stand those that `others` names."""

    both: gradient_problem.Pass
    scale: float
    arguments: dict[str, Any]  # those that are numbers
    forward: Callable[..., tuple[Tensor, Tensor]]  # (query, key, value, *others) -> output and LSE
    memory: Memory
    others: tuple[str, ...] = ()  # fields of Operands: offsets of packed sequences, bias, slopes, sinks
    scores: ScoreViews = UNCHANGED
    models: list[tuple[Bound, ...]] = field(default_factory=list)  # one, of any size, which others are made of; or none
    # (strides of an output gradient, address modulo 16) -> launches
    launches: dict[tuple[tuple[int, ...], int], tuple[Bound, ...]] = field(default_factory=dict)

    sees_switches: ClassVar[bool] = False

    @property
    def guarded(self) -> TrainingCall:
        """The same for calls that guards know."""
        return self

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Any:
        """Output, or output and LSE where the backward kernels take its gradient; autograd knows both."""
        apply = _Attention.apply if _transforms() else _apply
        output, lse = apply(self, query, key, value, *others)
        return (output, lse) if self.both.backward.source.traits.lse else output

    @property
    def learned(self) -> tuple[bool, ...]:
        """Which of `others` have gradients. A bias and slopes have them where the kernels give them."""
        modifiers = self.both.backward_problem.modifiers
        learned = {"bias": modifiers.bias is Bias.LEARNED, "slopes": modifiers.learned_slopes, "sinks": True}
        return tuple(learned.get(name, False) for name in self.others)

    def differentiate(
        self, output_grad: Tensor | None, lse_grad: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
        output: Tensor, lse: Tensor, *others: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Gradients of query, key and value, then of `others`; where that of the output or the LSE is missing, it is 0.

        Those of `others` are None where they have none, and in the caller's shape and dtype.
        """
        if output_grad is None:
            output_grad = torch.zeros_like(output)
        push = output_grad.data_ptr()
        kind = output_grad.stride(), push & ALIGNED
        launches = None if output_grad.is_neg() else self.launches.get(kind)
        if launches is None:
            if not autograd.reads(self.both.backward, self._view(output_grad)):
                copy = output_grad.clone(memory_format=torch.contiguous_format)
                return self.differentiate(copy, lse_grad, query, key, value, output, lse, *others)
            launches = self._bind(kind, output_grad, query, key, value, output, lse, *others)
        if self.both.backward.source.traits.lse:
            lse_grad = autograd.lse_grad_as_read(lse_grad, lse)
        memory = self.memory
        of_query, of_key, of_value = memory.gradients
        query_grad = query.new_empty_strided(*of_query)
        key_grad = key.new_empty_strided(*of_key)
        value_grad = value.new_empty_strided(*of_value)
        scratch = query.new_empty_strided((memory.numbers,), (1,), dtype=_FLOAT32)
        room = scratch.data_ptr()
        given = dict(zip(self.others, others, strict=True)) if others else {}
        starts, ends, bias, slopes = (_address(given.get(name)) for name in _READ) if given else (0, 0, 0, 0)
        grads = self._score_gradients(given) if given else _NO_GRADIENTS
        numbers = memory.scratch.rows[0] * memory.rows  # behind which the sums stand
        addresses: tuple[int, ...] = (  # in the order of backward.POINTERS
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            output.data_ptr(),
            lse.data_ptr(),
            push,
            0 if lse_grad is None else lse_grad.data_ptr(),
            room,
            room + memory.rows,
            room + numbers,
            query_grad.data_ptr(),
            key_grad.data_ptr(),
            value_grad.data_ptr(),
            starts,
            ends,
            room + numbers + memory.sums,
            bias,
            slopes,
            _address(grads.bias),
            _address(grads.bias if grads.bias_sums is None else grads.bias_sums),
            0 if grads.slopes is None else room + 2 * memory.rows,
            _address(grads.slopes),
            room + memory.key_sums,
        )
        if memory.copies:
            addresses += tuple(room + begin for begin in memory.copies)
        for launch in launches:
            launch(addresses)
        if not given:
            return query_grad, key_grad, value_grad
        return query_grad, key_grad, value_grad, *self._settled(grads, given, scratch)

    def _score_gradients(self, given: dict[str, Tensor]) -> ScoreGradients:
        """Room for the gradients of bias and slopes that the kernels give."""
        problem, kernel = self.both.backward_problem, self.both.backward
        bias = bias_sums = slopes = None
        if problem.modifiers.bias is Bias.LEARNED:
            bias = given["bias"].new_empty(self.scores.bias_sizes)
            shape = backward.bias_sums_shape(kernel, problem, self.scores.bias_sizes)
            bias_sums = None if shape is None else bias.new_empty(shape, dtype=_FLOAT32)
        if problem.modifiers.learned_slopes:
            slopes = given["slopes"].new_empty((problem.batch, problem.heads_q))
        return ScoreGradients(bias=bias, bias_sums=bias_sums, slopes=slopes)

    def _settled(self, grads: ScoreGradients, given: dict[str, Tensor], scratch: Tensor) -> list[Tensor | None]:
        """The gradients of `others`, from what the launches left."""
        settled: dict[str, Tensor] = {}
        if grads.bias is not None:
            if grads.bias_sums is not None:
                backward.add_bias_sums(grads.bias, grads.bias_sums)
            settled["bias"] = grads.bias.view(given["bias"].shape)
        if grads.slopes is not None:
            settled["slopes"] = grads.slopes.sum_to_size(given["slopes"].shape)
        if "sinks" in given:
            numbers, batch, heads, rows = self.memory.scratch.rows
            of_rows = scratch[: numbers * batch * heads * rows].view(numbers, batch, heads, rows)
            (sinks,) = score_tensors.as_read(("sinks",), (given["sinks"].detach(),))
            of_rows = backward.rows_with_queries(self.both.backward, of_rows, self.memory.queries)
            gradient = backward.sink_gradient(sinks, of_rows)
            settled["sinks"] = gradient.to(given["sinks"].dtype)
        return [settled.get(name) for name in self.others]

    def formula(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        """Output and LSE as the call gives them, in plain PyTorch."""
        output, lse = autograd.formula(self.both.problem, self._operands(query, key, value, *others))
        return as_given(output, self.both.problem.layout), lse[0] if self.both.problem.packed else lse

    def _bind(
        self, kind: tuple[tuple[int, ...], int], output_grad: Tensor, query: Tensor, key: Tensor, value: Tensor,
        output: Tensor, lse: Tensor, *others: Tensor,
    ) -> tuple[Bound, ...]:  # fmt: skip
        problem, kernel = self.both.backward_problem, self.both.backward
        if self.models:
            given = (query, key, value, output, output_grad)
            layout = self.both.problem.layout
            views = [View.of_given(tensor.shape, tensor.stride(), layout) for tensor in given]
            views += [View.of_given(*gradient, layout) for gradient in self.memory.gradients]
            named = dict(zip(backward.VIEWS, views, strict=True))
            launches = backward.resize(self.models[0], kernel, problem, named, self.memory.scratch, self.scores)
            return self._keep(kind, launches)
        operands = self._operands(query, key, value, *others)
        sums = lse[None] if self.both.problem.packed else lse
        saved = Saved(
            output=self._view(output),
            lse=sums,
            output_grad=self._view(output_grad),
            lse_grad=sums if kernel.source.traits.lse else None,  # only what it is like counts
        )
        scratch = backward.empty_scratch(kernel, problem, operands.query, operands.key)
        gradients = backward.empty_gradients(problem, operands)
        launches = backward.bind(kernel, problem, operands, saved, gradients, scratch)
        self.models.append(launches)
        return self._keep(kind, launches)

    def _keep(self, kind: tuple[tuple[int, ...], int], launches: tuple[Bound, ...]) -> tuple[Bound, ...]:
        if len(self.launches) >= _MOST:
            self.launches.clear()
        self.launches[kind] = launches
        return launches

    def _operands(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Operands:
        given = dict(zip(self.others, others, strict=True))
        offsets = {name: given[name] for name in ("cu_seqlens_q", "cu_seqlens_kv") if name in given}
        operands = Operands(
            query=self._view(query), key=self._view(key), value=self._view(value), scale=self.scale,
            **self.arguments, **offsets,
        )  # fmt: skip
        return score_tensors.with_scores(operands, self.both.problem, given)

    def _view(self, tensor: Tensor) -> Tensor:
        return viewed(tensor, self.both.problem.layout)


def prepare(
    both: gradient_problem.Pass, operands: Operands, forward: Callable[..., tuple[Tensor, Tensor]],
    others: tuple[str, ...] = (),
) -> TrainingCall | None:  # fmt: skip
    """Both passes of calls like this one; None where its launches need more than addresses.

    Args:
        operands: the call's, which autoattn.runtime.prepared_call has found to be its tensors and nothing else.
        forward: the forward pass of such calls, whose output lies as the query does.
        others: fields of Operands: what the tensors behind query, key and value are.
    """
    if not backward.may_bind(both.backward_problem, operands.query):
        return None
    views = View.of(operands.query), View.of(operands.key), View.of(operands.value)
    return TrainingCall(
        both=both,
        scale=operands.scale,
        arguments={number.name: getattr(operands, number.name) for number in NUMBERS},
        forward=forward,
        memory=Memory.of(both, views),
        others=others,
        scores=ScoreViews.of(operands),
    )


def resize(
    prepared: TrainingCall, both: gradient_problem.Pass, forward: Callable[..., tuple[Tensor, Tensor]], views: Views,
    scores: ScoreViews = UNCHANGED,
) -> TrainingCall:  # fmt: skip
    """The same for other sizes, with the same kernels.

    Args:
        views: of query, key and value.
        scores: of bias and slopes.
    """
    return TrainingCall(
        both=both,
        scale=prepared.scale,
        arguments=prepared.arguments,
        forward=forward,
        memory=Memory.of(both, views),
        models=prepared.models,
        others=prepared.others,
        scores=scores,
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, prepared: TrainingCall, query: Tensor, key: Tensor, value: Tensor, *others: Tensor
    ) -> tuple[Tensor, Tensor]:
        output, lse = prepared.forward(query, key, value, *others)
        ctx.save_for_backward(query, key, value, output, lse, *others)
        ctx.prepared = prepared
        ctx.set_materialize_grads(False)
        if not prepared.both.backward.source.traits.lse:
            ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor | None) -> tuple[Tensor | None, ...]:
        once = _Gradients.apply if torch.is_grad_enabled() else _gradients  # somebody may ask for second derivatives
        gradients = once(ctx.prepared, *pulls, *ctx.saved_tensors)
        others = len(ctx.prepared.others)
        return (None, *gradients, *(None,) * (others + 3 - len(gradients)))


# PyTorch's own `apply` first asks for transforms of torch.func, as `TrainingCall` does, and looks in each tensor for
# what is left of one that ended, whose address `call_keys.of` could not have read. That takes a third of its time.
_apply = super(torch.autograd.Function, _Attention).apply


def _gradients(prepared: TrainingCall, *given: Any) -> tuple[Tensor | None, ...]:
    return prepared.differentiate(*given)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prepared: TrainingCall, *tensors: Any) -> tuple[Tensor | None, ...]:
        ctx.prepared = prepared
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return prepared.differentiate(*tensors)

    @staticmethod
    def backward(ctx: Any, *pushes: Tensor | None) -> tuple[Tensor | None, ...]:
        prepared = ctx.prepared
        output_grad, lse_grad, query, key, value, _, _, *others = ctx.saved_tensors
        learned = prepared.learned
        learners = [tensor if learns else None for tensor, learns in zip(others, learned, strict=True)]

        def attend(query: Tensor, key: Tensor, value: Tensor, *learnt: Tensor | None) -> tuple[Tensor, Tensor]:
            both = [fixed if tensor is None else tensor for fixed, tensor in zip(others, learnt, strict=True)]
            answer: tuple[Tensor, Tensor] = prepared.formula(query, key, value, *both)
            return answer

        inputs = query, key, value, *learners
        wanted = (*pushes, *(None,) * (len(inputs) - len(pushes)))
        pulls, seconds = autograd.differentiate_again(attend, (output_grad, lse_grad), inputs, wanted)
        return None, *pulls, *seconds[:3], None, None, *seconds[3:]
