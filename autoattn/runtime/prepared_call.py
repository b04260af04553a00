"""Prepared calls: memory for the output and a bound launch, or one operator of PyTorch's, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch
from torch import Tensor

from autoattn import torch_private
from autoattn.baselines import pytorch_sdpa
from autoattn.core.problem import Layout, Problem, sizes_of
from autoattn.kernels import forward
from autoattn.kernels.bound_launch import Addresses, Bound
from autoattn.kernels.compiler import Kernel
from autoattn.runtime import call_cache, training_call
from autoattn.runtime.call_cache import PreparedCall
from autoattn.runtime.call_keys import Key
from autoattn.runtime.parse.arguments import Call
from autoattn.runtime.plan import gradient_problem
from autoattn.runtime.run import recompute_counter
from autoattn.runtime.training_call import TrainingCall
from autoattn.tensors import score_tensors
from autoattn.tensors.operands import View, as_given
from autoattn.tensors.score_tensors import UNCHANGED, ScoreViews

if TYPE_CHECKING:
    from collections.abc import Callable

    from autoattn.runtime.plan.planner import Plan

Computed: TypeAlias = tuple[Tensor, Tensor | None]  # output and LSE, as a kernel sees them
Answer: TypeAlias = Tensor | tuple[Tensor, Tensor]
_repeats = torch_private.are_gradients_deterministic
_FLOAT32 = torch.float32
# As forward.POINTERS ends
_SCALES = "key_scale", "value_scale"
_BEHIND = "cu_seqlens_q", "cu_seqlens_kv", *score_tensors.NAMES, *forward.CACHE_POINTERS.values(), *_SCALES
_SCRATCH_PLACE = forward.POINTERS.index("scratch_ptr")  # the first of three that most launches do without


def prepare(
    call_key: Key | None, tensors: tuple[Tensor, ...], call: Call, plan: Plan, computed: Computed, answer: Answer
) -> None:
    """Keeps in the call cache what answers the next call of a key, where that is possible.

    Args:
        tensors: those of the key.
        call, plan, made: how these were understood, who answered, and with which output and LSE.
        answer: what the public function returns to its caller: views of these.
    """
    if call_key is None or not plan.lasting or not _tensors_are_all(tensors, call):
        return
    prepared: PreparedCall | None
    if plan.captured is not None:
        prepared = _by_either(call_key, tensors, call, plan)
    elif (both := plan.passes(call.problem)) is not None:
        prepared = _by_both(both, tensors, call, computed[0], answer)
    elif plan.kernel is not None:
        prepared = _by_kernel(plan.kernel, call, computed, answer)
    else:
        switched = plan.repeats and not _repeats()  # in both passes, which takes more than a call
        prepared = None if switched else _by_pytorch(call_key, tensors, call, plan.explanation.route)
    if prepared is not None:
        call_cache.keep(call_key, prepared)


def prepare_merging(
    call_key: Key | None, tensors: tuple[Tensor, ...], call: Call, kernel: Kernel, output: Tensor, lse: Tensor
) -> None:
    """Keeps what merges the next call of a key into output and LSE of other keys: `KernelCall.write`.

    Args:
        output, lse: [batch, heads, seq, head_dim] and [batch, heads, seq] views of these.
    """
    if call_key is not None and _tensors_are_all(tensors, call):
        prepared = _by_kernel(kernel, call, (output, lse), (output, lse))
        if prepared is not None:
            call_cache.keep(call_key, prepared)


def resize(
    prepared: PreparedCall, call_key: Key, problem: Problem, views: tuple[View, View, View],
    scores: ScoreViews = UNCHANGED,
) -> PreparedCall | None:  # fmt: skip
    """What answers calls of other sizes by the same kernels, or by the same operator of PyTorch's; None where nothing
    is resized.

    Args:
        call_key: of such calls.
        views: of query, key and value.
        scores: of bias and slopes.
    """
    if isinstance(prepared, SdpaCall):
        return replace(prepared, call_key=call_key)
    if isinstance(prepared, KernelCall):
        return _resized(prepared, problem, views, scores)
    if isinstance(prepared, TrainingCall) and isinstance(prepared.forward, KernelCall):
        passes = prepared.both
        both = gradient_problem.Pass(
            problem=problem,
            forward=passes.forward,
            backward=passes.backward,
            backward_problem=passes.backward_problem.resized(*sizes_of(problem)),
        )
        forward_call = _resized(prepared.forward, problem, views, scores)
        return training_call.resize(prepared, both, forward_call, views, scores)
    return None


def _resized(prepared: KernelCall, problem: Problem, views: tuple[View, View, View], scores: ScoreViews) -> KernelCall:
    query, key, value = views
    output, kernel = query.without_gaps(problem.head_dim_v), prepared.kernel
    lse = None
    if prepared.lse is not None:
        _, heads, rows, _ = query.shape
        lse = ((heads, rows), (rows, 1)) if problem.packed else (query.shape[:3], (heads * rows, rows, 1))
    needed = forward.zeros(kernel, problem, query)
    return KernelCall(
        kernel=kernel,
        output=output.given(problem.layout),
        lse=lse,
        zeros=0 if needed is None else needed[1],
        tiles=forward.tiles(kernel, problem, query),
        partials=forward.partials(kernel, problem, query),
        launch=forward.resize(prepared.launch, kernel, problem, (query, key, value, output), scores),
        others=prepared.others,
        places=prepared.places,
    )


def _tensors_are_all(tensors: tuple[Tensor, ...], call: Call) -> bool:
    """Whether a call computes on the caller's own tensors and nothing else that may be another one next time."""
    problem, operands = call.problem, call.operands
    three = operands.query, operands.key, operands.value
    cast = any(given.dtype is not read.dtype for given, read in zip(tensors, three, strict=False))
    others = operands.table, operands.query_scale  # the last: float8, whose missing scales are new ones each time
    captured = operands.mask_captures or operands.score_captures
    drawn = problem.modifiers.dropout  # its seed is another one each time
    return all(tensor is None for tensor in others) and not (call.empty or cast or captured or drawn)


def _others(call: Call) -> tuple[str, ...]:
    """The fields of Operands and of its cache that the tensors of a call's key behind query, key and value are."""
    operands = call.operands
    offsets = [name for name in ("cu_seqlens_q", "cu_seqlens_kv") if getattr(operands, name) is not None]
    if operands.cache is not None:
        fields = forward.CACHE_POINTERS.values()
        offsets += [field for field in fields if getattr(operands.cache, field) is not None]
        offsets += [name for name in _SCALES if getattr(operands, name) is not None]
    return (*offsets, *(name for name in score_tensors.NAMES if getattr(operands, name) is not None))


def _places(others: tuple[str, ...]) -> tuple[int | None, ...]:
    """Where among `_others` each tensor is that _BEHIND names, up to the last one that is there; None for no tensor."""
    last = max(map(_BEHIND.index, others), default=-1)
    return tuple(others.index(name) if name in others else None for name in _BEHIND[: last + 1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelCall:
    """An answer by a kernel of ours."""

    kernel: Kernel
    # Sizes and strides. PyTorch takes twice as long to make a tensor of a torch.Size, or of sizes alone.
    output: tuple[tuple[int, ...], tuple[int, ...]]
    lse: tuple[tuple[int, ...], tuple[int, ...]] | None
    zeros: int  # numbers that a launch finds at zero
    tiles: int  # of which they say afterwards whether they were computed again
    partials: int  # numbers
    launch: Bound
    others: tuple[str, ...] = ()  # fields of Operands and its cache: what the tensors behind query, key and value are
    places: tuple[int | None, ...] = ()  # `_places` of these
    sees_switches: ClassVar[bool] = False

    @property
    def guarded(self) -> KernelCall:
        """The same for calls that guards know."""
        return self

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Answer:
        output = query.new_empty_strided(*self.output)  # in the dtype of the query: other calls are not prepared
        lse = None if self.lse is None else query.new_empty_strided(*self.lse, dtype=_FLOAT32)
        self.write(query, key, value, others, output, lse)
        return output if lse is None else (output, lse)

    def write(
        self, query: Tensor, key: Tensor, value: Tensor, others: tuple[Tensor, ...], output: Tensor, lse: Tensor | None
    ) -> None:
        """Launches the kernel on an output and an LSE that are there."""
        addresses: Addresses = (  # in the order of forward.POINTERS
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            output.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            0,
            0,
            0,
        )
        if others:
            others = score_tensors.as_read(self.others, others)
            addresses += tuple([0 if place is None else others[place].data_ptr() for place in self.places])
        if self.partials or recompute_counter.counting:
            self._launch_with_scratch(query, addresses)
        else:
            self.launch(addresses)

    def _launch_with_scratch(self, query: Tensor, addresses: Addresses) -> None:
        """Gives the launch memory for partial results, and a scratch of its own while somebody counts."""
        counted = self.tiles and recompute_counter.counting  # then nobody else may have the scratch later
        scratch = query.new_zeros(self.zeros, dtype=torch.int32) if counted else None
        partials = query.new_empty(self.partials, dtype=_FLOAT32) if self.partials else None
        buffers = (0 if buffer is None else buffer.data_ptr() for buffer in (scratch, None, partials))
        self.launch((*addresses[:_SCRATCH_PLACE], *buffers, *addresses[_SCRATCH_PLACE + 3 :]))
        if scratch is not None:
            recompute_counter.note(scratch[forward.FLAGS : forward.FLAGS + self.tiles])


def _by_kernel(kernel: Kernel, call: Call, computed: Computed, answer: Answer) -> KernelCall | None:
    output, lse = (answer, None) if isinstance(answer, Tensor) else answer
    if kernel.compiled is None:  # Triton's interpreter compiles nothing
        return None
    query, others = call.operands.query, _others(call)
    needed = forward.zeros(kernel, call.problem, query)
    return KernelCall(
        kernel=kernel,
        output=(tuple(output.shape), output.stride()),
        lse=None if lse is None else (tuple(lse.shape), lse.stride()),
        zeros=0 if needed is None else needed[1],
        tiles=forward.tiles(kernel, call.problem, query),
        partials=forward.partials(kernel, call.problem, query),
        launch=forward.bind(kernel, call.problem, call.operands, *computed),
        others=others,
        places=_places(others),
    )


def _by_both(
    both: gradient_problem.Pass, tensors: tuple[Tensor, ...], call: Call, output: Tensor, answer: Answer
) -> TrainingCall | None:
    """Both passes by kernels; the LSE, which the backward ones read, need not be part of the answer."""
    lse = output.new_empty(output.shape[:3], dtype=_FLOAT32)
    given = answer if isinstance(answer, Tensor) else answer[0]
    forward = _by_kernel(both.forward, call, (output, lse), (given, lse[0] if call.problem.packed else lse))
    return None if forward is None else training_call.prepare(both, call.operands, forward, forward.others)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SdpaCall:
    """An answer by PyTorch's own attention."""

    call_key: Key
    attend: Callable[..., Tensor]  # of query, key, value and the bias, if there is one
    swapped: bool  # the caller's tensors are [batch, seq, heads, head_dim]
    sees_switches: bool  # as F.scaled_dot_product_attention does and its operators do not
    yields: bool  # to kernels, while a CUDA graph is captured

    @property
    def guarded(self) -> SdpaCall:
        """The same for calls that guards know."""
        return self

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor | None:
        if self.yields and torch.cuda.is_current_stream_capturing():
            return None
        try:
            if self.swapped:
                swapped = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
                return self.attend(*swapped, *others).transpose(1, 2)
            return self.attend(query, key, value, *others)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            call_cache.drop(self.call_key)
            return None


def _by_pytorch(
    call_key: Key, tensors: tuple[Tensor, ...], call: Call, route: str, *, yields: bool = False
) -> SdpaCall | None:
    if route not in (pytorch_sdpa.SDPA, *pytorch_sdpa.BACKENDS):
        return None
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    attend = pytorch_sdpa.bind(call.problem, call.operands.scale, route, learns=learns)
    swapped = call.problem.layout is Layout.BSHD
    sees_switches = not pytorch_sdpa.is_one_operator(call.problem, route)
    return (
        None
        if attend is None
        else SdpaCall(call_key=call_key, attend=attend, swapped=swapped, sees_switches=sees_switches, yields=yields)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CaptureCall:
    """An answer by PyTorch's own attention, and by kernels while a CUDA graph is captured."""

    outside: SdpaCall
    captured: TrainingCall

    @property
    def guarded(self) -> SdpaCall:
        """Outside of a capture, which guards do not see; it yields inside of one."""
        return self.outside

    @property
    def sees_switches(self) -> bool:
        """As the call outside of a capture."""
        return self.outside.sees_switches

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Answer | None:
        answer: Answer | None = self.outside(query, key, value, *others)
        if answer is None and torch.cuda.is_current_stream_capturing():
            answer = self.captured(query, key, value, *others)
        return answer


def _by_either(call_key: Key, tensors: tuple[Tensor, ...], call: Call, plan: Plan) -> CaptureCall | None:
    assert plan.captured is not None
    both = plan.captured.passes(call.problem)
    assert both is not None
    output = forward.empty_output(call.problem, call.operands.query)
    captured = _by_both(both, tensors, call, output, as_given(output, call.problem.layout))
    outside = _by_pytorch(call_key, tensors, call, plan.explanation.route, yields=True)
    return None if captured is None or outside is None else CaptureCall(outside=outside, captured=captured)
