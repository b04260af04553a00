"""FlashInfer's prefill of a batch of sequences with keys in one tensor: outputs of dense and packed 16-bit problems.

Documented at https://docs.flashinfer.ai/api/attention.html (BatchPrefillWithRaggedKVCacheWrapper).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoattn.core.mask import Alignment, Mask
from autoattn.core.modifiers import SWITCHES
from autoattn.core.problem import DType, Op, Problem
from autoattn.tensors.operands import Operands

WORKSPACE_BYTES = 128 * 1024 * 1024  # as its documentation recommends
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))  # of keys and values
UNBOUNDED = -1  # a window without a bound


def load() -> Callable[..., Any]:
    """What is called.

    Raises:
        ImportError: FlashInfer is not installed.
    """
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    wrapper: Callable[..., Any] = BatchPrefillWithRaggedKVCacheWrapper
    return wrapper


def why_not(problem: Problem) -> str | None:
    """Why it does not do a problem, in words; None when nothing is known against it."""
    if problem.op is Op.BACKWARD:
        return "it has no backward pass"
    if problem.dtype not in (DType.FLOAT16, DType.BFLOAT16):
        return f"it takes 16-bit inputs here, not {problem.dtype.value}"
    if (problem.head_dim, problem.head_dim_v) not in HEAD_DIMS:
        return f"it takes head dims of 64, 128, 256 and 192 with 128, not {problem.head_dim} and {problem.head_dim_v}"
    return _why_not_mask(problem.mask) or _why_not_modified(problem)


def _why_not_mask(mask: Mask) -> str | None:
    if mask.sparse:
        return "it is given no block tables here"
    if mask.causal and mask.alignment is Alignment.TOP_LEFT:
        return "it aligns causal masks bottom-right"
    if not mask.causal and mask.right != 0 and (mask.bounded_left or mask.right is not None):
        return "it takes windows that end at the query's own position"
    return None


def _why_not_modified(problem: Problem) -> str | None:
    for name in ("score_mod", *SWITCHES):
        if name != "softcap" and getattr(problem.modifiers, name):
            return f"it is given no {name} here"
    return "it is given no biases here" if problem.modifiers.bias.value != "none" else None


def prepare(problem: Problem, operands: Operands) -> Callable[[], Tensor]:
    """The call that is timed; what it plans for the lengths is done before."""
    device = operands.query.device
    query, key, value = (
        tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (operands.query, operands.key, operands.value)
    )
    starts_q, starts_kv = operands.cu_seqlens_q, operands.cu_seqlens_kv
    if not problem.packed:
        sequences = torch.arange(problem.batch + 1, dtype=torch.int32, device=device)
        starts_q, starts_kv = sequences * problem.seq_q, sequences * problem.seq_kv
    mask = problem.mask
    wrapper = load()(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "NHD")
    wrapper.plan(
        starts_q,
        starts_kv,
        problem.heads_q,
        problem.heads_kv,
        problem.head_dim,
        head_dim_vo=problem.head_dim_v,
        causal=mask.causal or mask.right == 0,
        window_left=UNBOUNDED if mask.left is None else mask.left,
        logits_soft_cap=operands.softcap if problem.modifiers.softcap else None,
        sm_scale=operands.scale,
        q_data_type=query.dtype,
        kv_data_type=key.dtype,
    )
    return partial(_run, wrapper, query, key, value, problem.tokens_q if problem.packed else problem.seq_q)


def _run(wrapper: Any, query: Tensor, key: Tensor, value: Tensor, rows: int) -> Tensor:
    """[batch, heads_q, rows, head_dim_v] of queries [tokens, heads_q, head_dim]."""
    output: Tensor = wrapper.run(query, key, value)
    return output.unflatten(0, (-1, rows)).transpose(1, 2)
