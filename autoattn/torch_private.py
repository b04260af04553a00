"""Every use of a private name of PyTorch: the only module that holds one.

A name that is missing raises at import where nothing works without it. The guards of torch.compile may be missing:
`TENSOR_GUARDS` is then false, and the call cache tells calls apart in Python alone. tests/test_torch_private.py probes
each name; it runs with every supported release of PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_C: Any = torch._C

# --- What watches or changes a call -----------------------------------------------------------------------------------

count_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
are_transforms_active: Callable[[], bool] = _C._are_functorch_transforms_active
are_gradients_deterministic: Callable[[], bool] = _C._get_deterministic_algorithms
get_jit_tracing_state: Callable[[], Any] = _C._get_tracing_state
set_jit_tracing_state: Callable[[Any], None] = _C._set_tracing_state


def transforms() -> tuple[str, ...]:
    """The kinds of torch.func's transforms that are active, such as Vmap and Grad."""
    stack = _C._functorch.get_interpreter_stack() or ()
    return tuple(sorted({level.key().name for level in stack}))


def has_dual_level() -> bool:
    """Whether a tensor may have a tangent, which forward-mode derivatives carry along (torch.autograd.forward_ad)."""
    return bool(forward_ad._current_level >= 0)


def set_deterministic_algorithms(on: bool, *, warn_only: bool) -> None:
    """torch.use_deterministic_algorithms without what it does beside for torch.compile."""
    _C._set_deterministic_algorithms(on, warn_only=warn_only)


def keeps_graph() -> bool:
    """Whether the backward pass that runs now keeps what was saved for another one."""
    return bool(_C._autograd._get_current_graph_task_keep_graph())


def is_for_cuda_graphs() -> bool:
    """Whether torch.compile makes a graph that CUDA graphs will hold, as in its mode reduce-overhead."""
    inductor: Any = sys.modules.get("torch._inductor.config")
    return inductor is not None and bool(inductor.triton.cudagraphs)


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """No dispatch mode, FakeTensor's among them, sees what runs in the block."""
    from torch.utils._python_dispatch import _disable_current_modes

    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def is_operator(target: object) -> bool:
    """Whether a node of torch.fx calls an overload of an operator."""
    return isinstance(target, torch._ops.OpOverload)


# --- Guards -----------------------------------------------------------------------------------------------------------

try:
    from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
except ImportError:
    TENSOR_GUARDS = False
else:
    TENSOR_GUARDS = True


def guard_tensors(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """A check whether other tensors have the same types, dtypes, devices, sizes, strides and wanted gradients.

    Where one object stands in several places, it must there too: the guards refuse an object that they meet twice.
    """
    guards: Any = TensorGuards  # whose annotations leave out the tensors
    first = [next(place for place, earlier in enumerate(tensors) if earlier is tensor) for tensor in tensors]
    places = sorted(set(first))
    distinct = [tensors[place] for place in places]
    sizes, strides = [list(tensor.shape) for tensor in distinct], [list(tensor.stride()) for tensor in distinct]
    check: Callable[..., bool] = guards(*distinct, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if len(places) == len(tensors):
        return check

    def check_shared(*others: Any) -> bool:
        shared = all(others[place] is tensor for place, tensor in zip(first, others, strict=True))
        return shared and check(*(others[place] for place in places))

    return check_shared


def guard_global_state() -> Callable[[], bool]:
    """A check whether modes, autocast and other switches of PyTorch are as now."""
    check: Callable[[], bool] = GlobalStateGuard().check
    return check


# --- The dispatcher ---------------------------------------------------------------------------------------------------

_AUTOCAST = _C.DispatchKeySet(_C.DispatchKey.AutocastCUDA) | _C.DispatchKeySet(_C.DispatchKey.AutocastCPU)


def below_autocast() -> AbstractContextManager[Any]:
    """Operators that run in the block are not cast again."""
    context: AbstractContextManager[Any] = _C._ExcludeDispatchKeyGuard(_AUTOCAST)
    return context


def above_autograd() -> AbstractContextManager[Any]:
    """Operators that run in the block are recorded again, where the dispatcher has left autograd behind."""
    context: AbstractContextManager[Any] = _C._SetExcludeDispatchKeyGuard(_C.DispatchKey.AutogradFunctionality, False)
    return context


def autograd_kernel(
    operator: Any, backward: Callable[..., Any], save: Callable[..., None] | None
) -> Callable[..., Any]:
    """What torch.library.register_autograd registers for an operator."""
    from torch._library.autograd import Info, make_autograd_impl

    kernel: Callable[..., Any] = make_autograd_impl(operator, Info(backward, save))
    return kernel


# --- The card, and PyTorch's attention --------------------------------------------------------------------------------

# Without a card PyTorch may lack these.
current_device: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)


def _stream_without_card(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# Index of a card -> handle of its current stream
current_stream: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", _stream_without_card)


def spin(cycles: int) -> None:
    """Keeps the current stream busy for so many cycles of the card."""
    torch.cuda._sleep(cycles)


# F.scaled_dot_product_attention itself, also within a block of `autoattn.use`, which puts autoattn in its place
sdpa: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention


def flash_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> Tensor:
    """PyTorch's FlashAttention-2 operator; tensors are [batch, heads, seq, head_dim]."""
    result: tuple[Tensor, ...] = torch._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, False, scale=scale
    )
    return result[0]


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float, learns: bool) -> Tensor:
    """PyTorch's cuDNN operator, which computes the LSE where somebody learns."""
    result: tuple[Tensor, ...] = torch._scaled_dot_product_cudnn_attention(
        query, key, value, None, learns, 0.0, causal, False, scale=scale
    )
    return result[0]


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float, learns: bool
) -> Tensor:
    """PyTorch's memory-efficient operator, which computes the LSE where somebody learns."""
    result: tuple[Tensor, ...] = torch._scaled_dot_product_efficient_attention(
        query, key, value, None, learns, 0.0, causal, scale=scale
    )
    return result[0]


# --- What benchmarks ask of torch.compile -----------------------------------------------------------------------------


def without_donated_buffers() -> AbstractContextManager[Any]:
    """A compiled forward pass keeps its buffers, so that its backward pass can run again."""
    from torch._functorch import config

    context: AbstractContextManager[Any] = config.patch(donated_buffer=False)
    return context


def without_autograd_cache() -> AbstractContextManager[Any]:
    """torch.compile compiles both passes anew, and counts what it fuses."""
    from torch._functorch import config

    context: AbstractContextManager[Any] = config.patch(enable_autograd_cache=False)
    return context


def count_fused_attention() -> int:
    """How many attentions torch.compile has recognised so far and put SDPA in the place of."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fuse_attention"])


def compile_noting(function: Callable[..., Any], note: Callable[[torch.fx.GraphModule], None]) -> Callable[..., Any]:
    """A function compiled to graphs that run as they are; each graph is noted first."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def take(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        note(module)
        return make_boxed_func(module.forward)

    compiled: Callable[..., Any] = torch.compile(function, backend=aot_autograd(fw_compiler=take), dynamic=False)
    return compiled
