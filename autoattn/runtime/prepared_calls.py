"""Calls that were answered before: what decides an answer finds what was prepared for it, in a few microseconds.

The ordinary way (arguments, answer) reads a call, checks it and plans it. All that it decides from stands in the key
here, so that a call with a known key needs nothing but memory for its output and a launch. What a key cannot hold is
never prepared: tensors beside query, key, value and the offsets of packed sequences, functions, a seed, subclasses of
tensors with rules of their own, and calls that torch.compile traces. An error is never kept either.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from autoattn import torch_private
from autoattn.baselines import pytorch_sdpa
from autoattn.core.mask import Mask
from autoattn.core.problem import Layout
from autoattn.kernels import forward
from autoattn.kernels.bound_launch import Addresses, Bound
from autoattn.kernels.compiler import Kernel
from autoattn.kernels.forward import ALIGNED
from autoattn.runtime import paired_launches, recent_calls
from autoattn.runtime.paired_launches import Pair
from autoattn.runtime.parse import arguments
from autoattn.runtime.parse.arguments import Call
from autoattn.runtime.plan import gradient_problem
from autoattn.runtime.run import recompute_counter
from autoattn.tensors.operands import as_given

if TYPE_CHECKING:
    from collections.abc import Callable

    from autoattn.runtime.plan.planner import Plan

MOST = 4096  # a growing key cache asks for something new at every step
Key: TypeAlias = tuple[Hashable, ...]
Made: TypeAlias = tuple[Tensor, Tensor | None]  # output and LSE, as a kernel sees them
Answer: TypeAlias = Tensor | tuple[Tensor, Tensor]
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_WORDS = frozenset({type(None), bool, int, float, str, Mask})  # types whose values say all about an argument
_watchers = torch_private.count_dispatch_modes  # modes, which would not see a launch
_repeats = torch_private.are_gradients_deterministic
_FLOAT32 = torch.float32
_ROOMS = forward.POINTERS.index("scratch_ptr")  # the first of three that most launches do without


def key(
    query: Any, key: Any, value: Any, offsets: tuple[Any, ...], words: tuple[Any, ...], seldom: tuple[Any, ...] | None
) -> Key | None:
    """All that decides how a call is answered; None when that takes more than a look at its arguments.

    It is written out where a loop would be shorter, since every call pays for it.

    Args:
        offsets: cu_seqlens_q and cu_seqlens_kv of a packed call.
        words: arguments that are mostly given, or have a default other than None.
        seldom: the window and the others, but for the seed of a dropout, which is never prepared; None where all of
            them are None.
    """
    if torch.compiler.is_compiling() or _watchers():
        return None
    if seldom is not None:
        window = seldom[0]
        if window is not None and type(window) is not tuple:
            return None
        words += (*seldom[1:], *(window or ()), window is None)
    kinds = tuple(map(type, words))  # 1, 1.0 and True are equal, but not the same argument
    if not (_WORDS.issuperset(kinds) and type(query) in _TENSORS and type(key) in _TENSORS and type(value) in _TENSORS):
        return None
    others: tuple[Hashable, ...] = ()
    try:
        address = query.data_ptr() | key.data_ptr() | value.data_ptr()
        for tensor in offsets:
            if type(tensor) not in _TENSORS:
                return None
            others += tensor.shape, tensor.stride(), tensor.dtype, tensor.device
            address |= tensor.data_ptr()
        if query.is_neg() or key.is_neg() or value.is_neg():
            return None  # what lies in memory are other numbers
        dtype, device = query.dtype, query.device
        if not (dtype is key.dtype is value.dtype and device == key.device == value.device):
            return None  # no such call is prepared: it is an error, or autocast gives it other tensors
        kind = "cuda" if query.is_cuda else "cpu"
        return (
            dtype, device, query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(), others,
            address & ALIGNED,
            (query.requires_grad or key.requires_grad or value.requires_grad) and torch.is_grad_enabled()
            and (True, _repeats()),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            dtype is _FLOAT32 and torch.get_float32_matmul_precision(),
            arguments.asked_numerics(),
            kinds,
            words,
        )  # fmt: skip
    except RuntimeError:  # a sparse or nested tensor has no strides, one under torch.func.vmap no address
        return None


def find(asked: Key | None) -> Callable[..., Answer | None] | None:
    """What answers calls of a key: given the key's tensors, it returns what the front door returns.

    It returns None when PyTorch refused after all; the ordinary way then says why, or finds another.
    """
    return None if asked is None else _known.get(asked)


def keep(asked: Key | None, tensors: tuple[Tensor, ...], call: Call, plan: Plan, made: Made, answer: Answer) -> None:
    """Prepares for the next call of a key, where that is possible.

    Args:
        tensors: those of the key.
        call, plan, made: how these were understood, who answered, and with which output and LSE.
        answer: what the front door returns to its caller: views of these.
    """
    if asked is None or not plan.lasting or not _tensors_are_all(tensors, call):
        return
    known: _Kernel | Pair | _PyTorch | _Either | None
    if plan.captured is not None:
        known = _by_either(asked, tensors, call, plan)
    elif (both := plan.passes(call.problem)) is not None:
        known = _by_both(both, tensors, call, made[0], answer)
    elif plan.kernel is not None:
        known = _by_kernel(plan.kernel, call, made, answer)
    else:
        switched = plan.repeats and not _repeats()  # in both passes, which takes more than a call
        known = None if switched else _by_pytorch(asked, tensors, call, plan.explanation.route)
    if known is None:
        return
    with _writing:
        while len(_known) >= MOST:
            del _known[next(iter(_known))]  # the oldest
        _known[asked] = known


def remember(query: Tensor, key: Tensor, value: Tensor, words: tuple[Any, ...], known: Callable[..., Any]) -> None:
    """Keeps what answered a call where a look at its tensors finds it."""
    known = known.outside if isinstance(known, _Either) else known
    recent_calls.keep(query, key, value, words, known, exact=not (isinstance(known, _PyTorch) and known.sees))


def forget() -> None:
    """Drops what was prepared."""
    recent_calls.forget()
    with _writing:
        _known.clear()


def _tensors_are_all(tensors: tuple[Tensor, ...], call: Call) -> bool:
    """Whether a call computes on the caller's own tensors and nothing else that may be another one next time."""
    problem, operands = call.problem, call.operands
    three = operands.query, operands.key, operands.value
    cast = any(given.dtype is not read.dtype for given, read in zip(tensors, three, strict=False))
    others = operands.bias, operands.slopes, operands.sinks, operands.table, operands.query_scale  # the last: float8
    captured = operands.mask_captures or operands.score_captures
    drawn = problem.modifiers.dropout  # its seed is another one each time
    return all(tensor is None for tensor in others) and not (call.empty or cast or captured or drawn)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kernel:
    """An answer by a kernel of ours."""

    # Sizes and strides. PyTorch takes twice as long to make a tensor of a torch.Size, or of sizes alone.
    output: tuple[tuple[int, ...], tuple[int, ...]]
    lse: tuple[tuple[int, ...], tuple[int, ...]] | None
    zeros: int  # numbers that a launch finds at zero
    tiles: int  # of which they say afterwards whether they were computed again
    partials: int  # numbers
    launch: Bound

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *offsets: Tensor) -> Answer:
        output = query.new_empty_strided(*self.output)  # in the dtype of the query: other calls are not prepared
        lse = None if self.lse is None else query.new_empty_strided(*self.lse, dtype=_FLOAT32)
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
        if offsets:
            addresses += tuple(tensor.data_ptr() for tensor in offsets)
        if self.partials or recompute_counter.counting:
            self._launch_with_rooms(query, addresses)
        else:
            self.launch(addresses)
        return output if lse is None else (output, lse)

    def _launch_with_rooms(self, query: Tensor, addresses: Addresses) -> None:
        """Gives the launch room for parts, and a scratch of its own while somebody counts."""
        counted = self.tiles and recompute_counter.counting  # then nobody else may have the scratch later
        scratch = query.new_zeros(self.zeros, dtype=torch.int32) if counted else None
        partials = query.new_empty(self.partials, dtype=_FLOAT32) if self.partials else None
        rooms = (0 if room is None else room.data_ptr() for room in (scratch, None, partials))
        self.launch((*addresses[:_ROOMS], *rooms, *addresses[_ROOMS + 3 :]))
        if scratch is not None:
            recompute_counter.note(scratch[forward.FLAGS : forward.FLAGS + self.tiles])


def _by_kernel(kernel: Kernel, call: Call, made: Made, answer: Answer) -> _Kernel | None:
    output, lse = (answer, None) if isinstance(answer, Tensor) else answer
    if kernel.compiled is None:  # Triton's interpreter compiles nothing
        return None
    query = call.operands.query
    needed = forward.zeros(kernel, call.problem, query)
    return _Kernel(
        output=(tuple(output.shape), output.stride()),
        lse=None if lse is None else (tuple(lse.shape), lse.stride()),
        zeros=0 if needed is None else needed[1],
        tiles=forward.tiles(kernel, call.problem, query),
        partials=forward.partials(kernel, call.problem, query),
        launch=forward.bind(kernel, call.problem, call.operands, *made),
    )


def _by_both(
    both: gradient_problem.Pass, tensors: tuple[Tensor, ...], call: Call, output: Tensor, answer: Answer
) -> Pair | None:
    """Both passes by kernels; the LSE, which the backward ones read, need not be part of the answer."""
    lse = output.new_empty(output.shape[:3], dtype=_FLOAT32)
    given = answer if isinstance(answer, Tensor) else answer[0]
    forward = _by_kernel(both.forward, call, (output, lse), (given, lse[0] if call.problem.packed else lse))
    return None if forward is None else paired_launches.pair(both, call.operands, tensors, forward, forward.output[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PyTorch:
    """An answer by PyTorch's own attention."""

    asked: Key
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    swapped: bool  # the caller's tensors are [batch, seq, heads, head_dim]
    sees: bool  # by itself what is switched on, as F.scaled_dot_product_attention does and its operators do not
    yields: bool  # to kernels, while a CUDA graph is captured

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        if self.yields and torch.cuda.is_current_stream_capturing():
            return None
        try:
            if self.swapped:
                swapped = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
                return self.attend(*swapped).transpose(1, 2)
            return self.attend(query, key, value)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            recent_calls.forget()
            with _writing:
                _known.pop(self.asked, None)
            return None


def _by_pytorch(
    asked: Key, tensors: tuple[Tensor, ...], call: Call, route: str, *, yields: bool = False
) -> _PyTorch | None:
    if route not in (pytorch_sdpa.SDPA, *pytorch_sdpa.BACKENDS):
        return None
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    attend = pytorch_sdpa.bind(call.problem, call.operands.scale, route, learns=learns)
    swapped = call.problem.layout is Layout.BSHD
    sees = not pytorch_sdpa.is_one_operator(call.problem, route)
    return None if attend is None else _PyTorch(asked=asked, attend=attend, swapped=swapped, sees=sees, yields=yields)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Either:
    """An answer by PyTorch's own attention, and by kernels while a CUDA graph is captured."""

    outside: _PyTorch
    captured: Pair

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Answer | None:
        answer: Answer | None = self.outside(query, key, value)
        if answer is None and torch.cuda.is_current_stream_capturing():
            answer = self.captured(query, key, value)
        return answer


def _by_either(asked: Key, tensors: tuple[Tensor, ...], call: Call, plan: Plan) -> _Either | None:
    assert plan.captured is not None
    both = plan.captured.passes(call.problem)
    assert both is not None
    output = forward.empty_output(call.problem, call.operands.query)
    captured = _by_both(both, tensors, call, output, as_given(output, call.problem.layout))
    outside = _by_pytorch(asked, tensors, call, plan.explanation.route, yields=True)
    return None if captured is None or outside is None else _Either(outside=outside, captured=captured)


_known: dict[Key, _Kernel | Pair | _PyTorch | _Either] = {}
_writing = threading.Lock()
