"""Attention as a function: the tuned kernel where there is one, PyTorch's own otherwise, and the reason on request."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from autoattn import compile, dispatch, gpu, render, rivals
from autoattn.dispatch import Explanation
from autoattn.errors import CompileError, TensorError
from autoattn.ops import forward
from autoattn.mask import Mask
from autoattn.problem import Layout, Precision, Problem
from autoattn.variant import Source, Traits

AUTOCAST = ("cpu", "cuda")  # asking PyTorch which kinds have it is more than Dynamo can trace
MAX_SCALE = 1e38  # times log2(e) it is still a float32

_Plan = tuple[Explanation, compile.Kernel | None]
_plans: dict[tuple[Problem, Traits, int], _Plan] = {}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bhsd",
) -> Tensor:
    """softmax(scale * query @ key^T + mask) @ value.

    Args:
        query: [batch, heads_q, seq_q, head_dim], or [batch, seq_q, heads_q, head_dim] with layout="bshd"; float16,
            bfloat16 or float32. float32 products follow torch.get_float32_matmul_precision().
        key, value: the same with heads_kv, which divides heads_q, and seq_kv.
        causal: True or "bottom-right": query i sees the keys up to i + seq_kv - seq_q, as in FlashAttention;
            "top-left": up to i, as in F.scaled_dot_product_attention. They differ only when the lengths do.
        scale: what scores are multiplied by; 1 / sqrt(head_dim) when None.
        layout: "bhsd" or "bshd", of all tensors.

    Returns:
        The output, shaped like the query. A query that sees no key gives 0.

    Raises:
        TensorError: the tensors do not make one attention call.
        ProblemError: a size is not supported, or the mask is unknown.
        CacheError: a cache file is damaged or newer.
    """
    problem, views, scale = _asked(query, key, value, causal, scale, layout)
    explanation, kernel = _plan(problem, views, scale)
    if kernel is None:
        output = _by_pytorch(explanation, problem, views, scale)
    else:
        output = forward.empty_output(views[0], problem.layout)
        forward.launch(kernel, *views, output, None, scale)
    return output.transpose(1, 2) if problem.layout is Layout.BSHD else output


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bhsd",
) -> Explanation:
    """What `attention` does with the same arguments, and why; it compiles the kernel to be sure, and runs nothing."""
    problem, views, scale = _asked(query, key, value, causal, scale, layout)
    return _plan(problem, views, scale)[0]


def forget() -> None:
    """Drops what this process decided, so that a cache written since is read anew."""
    _plans.clear()


def _asked(
    query: Tensor, key: Tensor, value: Tensor, causal: bool | str, scale: float | None, layout: str
) -> tuple[Problem, tuple[Tensor, Tensor, Tensor], float]:
    """The problem, the tensors as [batch, heads, seq, head_dim] views, and the scale."""
    try:
        order = Layout(layout)
    except ValueError:
        raise TensorError(f"layout must be bhsd or bshd, got {layout!r}; correct it") from None
    query, key, value = (_autocast(tensor) for tensor in (query, key, value))
    mask = Mask.parse(causal if isinstance(causal, bool) else f"causal:{causal}")
    # Dynamo cannot trace the question, and while it traces PyTorch's own attention answers.
    exact = torch.compiler.is_compiling() or torch.get_float32_matmul_precision() == "highest"
    problem = forward.problem_of(
        query, key, value, mask=mask, layout=order, precision=Precision.IEEE if exact else Precision.TF32
    )
    if order is Layout.BSHD:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    try:
        return problem, (query, key, value), problem.head_dim**-0.5 if scale is None else float(scale)
    except (TypeError, ValueError):
        raise TensorError(f"scale must be a number or None, got {scale!r}; correct it") from None


def _autocast(tensor: Tensor) -> Tensor:
    """What PyTorch's own attention makes of a tensor under autocast; other things are left to the checks."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in forward.DTYPE:
        return tensor
    kind = tensor.device.type
    if kind not in AUTOCAST or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _plan(problem: Problem, views: tuple[Tensor, Tensor, Tensor], scale: float) -> _Plan:
    reason = _why_sdpa(problem, views, scale)
    if reason is not None:
        return dispatch.sdpa(reason, problem), None
    name = _name(problem, views)
    if name not in _plans:
        if torch.cuda.is_current_stream_capturing():
            reason = "a CUDA graph is being captured and the kernel is not loaded; call once before capturing"
            return dispatch.sdpa(reason, problem), None
        _plans[name] = _prepare(*name)
    return _plans[name]


def _name(problem: Problem, views: tuple[Tensor, Tensor, Tensor]) -> tuple[Problem, Traits, int]:
    """What a plan depends on: the problem, what the memory of the inputs and of the new output asks, and the card."""
    asked, output = forward.traits_of(*views), render.natural_traits(problem)
    alignment = math.gcd(asked.alignment, output.alignment)
    return problem, replace(asked, alignment=alignment, wide=asked.wide or output.wide), views[0].device.index


def _prepare(problem: Problem, traits: Traits, index: int) -> _Plan:
    """Decides and, when the answer is a kernel, compiles it: once per problem, traits and card."""
    card = gpu.present(index)
    explanation = dispatch.explain(problem, card)
    refused = ""
    for variant in dispatch.variants(explanation, card):
        try:
            kernel = _loaded(render.render(problem, variant, traits), index)
        except CompileError as error:
            refused = str(error)
        else:
            return replace(explanation, variant=variant), kernel
    return (dispatch.sdpa(refused, problem, explanation.steps) if refused else explanation), None


@cache
def _loaded(source: Source, index: int) -> compile.Kernel:
    """Problems that differ only in sizes share a kernel; a growing key cache poses a new one at every step."""
    return compile.load(source, torch.device("cuda", index))


def _by_pytorch(
    explanation: Explanation, problem: Problem, views: tuple[Tensor, Tensor, Tensor], scale: float
) -> Tensor:
    """PyTorch's attention with the backend that was the fastest; with any, where that one does not take the tensors."""
    try:
        return rivals.sdpa(*views, mask=problem.mask, scale=scale, backend=explanation.route)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        if explanation.route == rivals.SDPA:
            raise
        reason = f"{explanation.route} was the fastest, but does not take these tensors"
        _plans[_name(problem, views)] = dispatch.sdpa(reason, problem, explanation.steps), None
        return rivals.sdpa(*views, mask=problem.mask, scale=scale)


def _why_sdpa(problem: Problem, views: tuple[Tensor, Tensor, Tensor], scale: float) -> str | None:
    """Why no kernel of ours may run, whatever was tuned; None when one may."""
    query = views[0]
    if query.device.type != "cuda":
        return f"the tensors are on the {query.device.type}, where PyTorch's own attention runs"
    if torch.version.hip is not None:
        return "this is a ROCm build of PyTorch, and the kernels are made for NVIDIA GPUs"
    if torch.is_grad_enabled() and any(view.requires_grad for view in views):
        return "an input needs a gradient, and there is no backward kernel yet"
    if torch.compiler.is_compiling():
        return "torch.compile is tracing, and the kernels are not custom operators yet"
    if any(type(view) not in (Tensor, torch.nn.Parameter) for view in views):
        return "a tensor subclass has rules of its own"
    if not torch.finfo(torch.float32).tiny <= scale <= MAX_SCALE:
        return f"the kernels need a positive scale that float32 can hold, got {scale}"
    if problem.batch * problem.heads_q * -(-problem.seq_q // 16) > forward.MAX_TILES:
        return "the launch would need more than 2**31 - 1 programs"
    return None
