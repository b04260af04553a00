"""Attention as a function: the tuned kernel where there is one, PyTorch's own otherwise, and the reason on request."""

from __future__ import annotations

import torch
from torch import Tensor

from autoattn import compile, dispatch, gpu, render, rivals
from autoattn.dispatch import Explanation
from autoattn.entry import KERNEL
from autoattn.errors import CompileError, TensorError
from autoattn.ops import forward
from autoattn.problem import Layout, Mask, Precision, Problem
from autoattn.variant import Traits

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
        output = rivals.sdpa(*views, mask=problem.mask, scale=scale, backend=explanation.route)
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
    if isinstance(query, Tensor) and torch.is_autocast_enabled(query.device.type):
        low = torch.get_autocast_dtype(query.device.type)  # as PyTorch's own attention does
        query, key, value = (tensor.to(low) for tensor in (query, key, value))
    mask = Mask.parse(causal if isinstance(causal, bool) else f"causal:{causal}")
    exact = torch.get_float32_matmul_precision() == "highest"
    problem = forward.problem_of(
        query, key, value, mask=mask, layout=order, precision=Precision.IEEE if exact else Precision.TF32
    )
    if order is Layout.BSHD:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return problem, (query, key, value), problem.head_dim**-0.5 if scale is None else float(scale)


def _plan(problem: Problem, views: tuple[Tensor, Tensor, Tensor], scale: float) -> _Plan:
    reason = _why_sdpa(problem, views, scale)
    if reason is not None:
        return dispatch.sdpa(reason, problem), None
    index = views[0].device.index
    name = (problem, forward.traits_of(*views), index)
    if name not in _plans:
        if torch.cuda.is_current_stream_capturing():
            reason = "a CUDA graph is being captured and the kernel is not loaded; call once before capturing"
            return dispatch.sdpa(reason, problem), None
        _plans[name] = _prepare(problem, name[1], index)
    return _plans[name]


def _prepare(problem: Problem, traits: Traits, index: int) -> _Plan:
    """Decides and, when the answer is a kernel, compiles it: once per problem, traits and card."""
    explanation = dispatch.explain(problem, gpu.present(index))
    if explanation.route != KERNEL or explanation.variant is None:
        return explanation, None
    source = render.render(problem, explanation.variant, traits)
    try:
        return explanation, compile.load(source, torch.device("cuda", index))
    except CompileError as error:
        return dispatch.sdpa(str(error), problem, explanation.steps), None


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
    if not scale > 0.0:
        return f"the kernels need a positive scale, got {scale}"
    if problem.batch * problem.heads_q * -(-problem.seq_q // 16) > forward.MAX_TILES:
        return "the launch would need more than 2**31 - 1 programs"
    return None
