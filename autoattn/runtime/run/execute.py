"""Runs a planned call: a kernel, both passes of kernels, or PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autoattn.baselines import deterministic_sdpa, pytorch_sdpa
from autoattn.core.problem import Problem
from autoattn.errors import TensorError
from autoattn.kernels import forward
from autoattn.runtime.parse.arguments import Call
from autoattn.runtime.plan import planner
from autoattn.runtime.plan.planner import Plan
from autoattn.runtime.run import autograd, recompute_counter
from autoattn.tensors.operands import Operands, empty_as


def run(call: Call, planned: Plan, *, lse: bool, records: bool = True) -> tuple[Tensor, Tensor | None]:
    """Output [batch, heads_q, seq_q, head_dim_v] and, when wanted, LSE [batch, heads_q, seq_q] in natural logarithms.

    The batch is 1 when packed.

    Args:
        records: whether autograd records both passes; else the LSE of planned passes is given too, for whoever does.
    """
    if call.empty:
        return _nothing(call, lse)
    problem, operands = call.problem, call.operands
    if planned.captured is not None and torch.cuda.is_current_stream_capturing():
        planned = planned.captured
    if planned.kernel is None:
        if planned.repeats and not torch.are_deterministic_algorithms_enabled():
            return deterministic_sdpa.attend(lambda given: _by_pytorch(planned, problem, given, lse), operands)
        return _by_pytorch(planned, problem, operands, lse)
    if (both := planned.passes(problem)) is not None:
        return autograd.attend(both, operands) if records else autograd.launch(both, operands)
    output = forward.empty_output(problem, operands.query)
    sums = operands.query.new_empty(operands.query.shape[:3], dtype=torch.float32) if lse else None
    flags = forward.launch(planned.kernel, problem, operands, output, sums, counting=bool(recompute_counter.counting))
    if flags is not None:
        recompute_counter.note(flags)
    return output, sums


def _by_pytorch(plan: Plan, problem: Problem, operands: Operands, lse: bool) -> tuple[Tensor, Tensor | None]:
    """PyTorch's attention with the chosen backend; with any, where that one does not take the tensors."""
    route = plan.explanation.route
    if route == pytorch_sdpa.EAGER:
        return _eager(problem, operands, lse)
    try:
        return pytorch_sdpa.sdpa(problem, operands, backend=route), None
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        if route == pytorch_sdpa.SDPA:
            raise
        planner.rule_out(problem, route)
        return pytorch_sdpa.sdpa(problem, operands), None


def _eager(problem: Problem, operands: Operands, lse: bool) -> tuple[Tensor, Tensor | None]:
    """The formula in plain PyTorch, in float32 whatever autocast says."""
    query = operands.query
    kind = query.device.type
    if kind == "meta":
        output = empty_as(query, operands.value.shape[3], forward.output_dtype(query.dtype))
        return output, query.new_empty(query.shape[:3], dtype=forward.lse_dtype(query.dtype)) if lse else None
    if kind == "cuda" and torch.cuda.is_current_stream_capturing():
        raise TensorError(
            f"a CUDA graph can hold this call only with its kernel, got {problem}, which is not loaded or has none; "
            "call it once before capturing"
        )
    with torch.autocast(kind, enabled=False):
        output, sums = pytorch_sdpa.eager(problem, operands)
    return output, sums if lse else None


def _nothing(call: Call, lse: bool) -> tuple[Tensor, Tensor | None]:
    """The answer where no query meets a key: 0, with gradients of 0, which is what products over no keys are."""
    operands = call.operands
    batch, heads, seq_q, head_dim = operands.query.shape
    heads_kv = operands.key.shape[1]
    dtype = forward.output_dtype(operands.query.dtype)
    keys, values = operands.key[:, :, :0], operands.value[:, :, :0]
    if operands.cache is not None:  # rows of a cache, or its pages, are no sequences of the batch
        keys, values = (tensor.new_empty(batch, heads_kv, 0, tensor.shape[3]) for tensor in (keys, values))
    query, key, value = (tensor.to(dtype) for tensor in (operands.query, keys, values))
    groups = query.reshape(batch, heads_kv, heads // heads_kv if heads_kv else 1, seq_q, head_dim)
    weights = groups @ key[:, :, None].transpose(3, 4)
    output = (weights @ value[:, :, None]).reshape(batch, heads, seq_q, value.shape[3])
    if not lse:
        return output, None
    sums = query.new_full((batch, heads, seq_q), -math.inf, dtype=forward.lse_dtype(query.dtype))
    if operands.sinks is not None:
        end = seq_q if operands.cu_seqlens_q is None else operands.cu_seqlens_q[-1]
        inside = torch.arange(seq_q, device=query.device) < end
        sums = torch.where(inside, operands.sinks[:, None], sums)
    return output, sums
