"""The pipeline of a call: look it up, parse it, plan it, run it, and prepare for the next one like it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from autoattn.core.call_arguments import ARGUMENTS, DEFAULTS, PACKED_ARGUMENTS, PACKED_DEFAULTS, KeyRole, names
from autoattn.runtime import append, call_cache, call_keys, prepared_call, resized_call
from autoattn.runtime.call_keys import Key
from autoattn.runtime.parse import append_arguments, arguments, cache_arguments, sdpa_arguments
from autoattn.runtime.parse.arguments import Call
from autoattn.runtime.parse.cache_arguments import CacheTensors
from autoattn.runtime.plan import planner
from autoattn.runtime.plan.planner import Plan
from autoattn.runtime.prepared_call import Answer
from autoattn.runtime.run import execute
from autoattn.runtime.torch_op import tracing
from autoattn.tensors import operands

# The arguments as they stand in the key of a prepared call; `functional` writes the same tuples out.
USUAL, SELDOM = (names(ARGUMENTS, role) for role in (KeyRole.USUAL, KeyRole.SELDOM))
PACKED_USUAL, PACKED_SELDOM = (names(PACKED_ARGUMENTS, role) for role in (KeyRole.USUAL, KeyRole.SELDOM))


def attention(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Answer:
    """`autoattn.attention`, for calls that no guard looked at."""
    given = {**DEFAULTS, **given}
    call_key = call_keys.of(query, key, value, (), *_words(given, USUAL, SELDOM))
    answer = call_cache.find(call_key)
    if answer is not None and (output := answer(query, key, value, *_extras(given, SELDOM))) is not None:
        return output
    return new_attention(call_key, query, key, value, **given)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, max_seqlen_q: int,
    max_seqlen_kv: int, **given: Any,
) -> Answer:  # fmt: skip
    """`autoattn.packed_attention`, for calls that no guard looked at."""
    given = {**PACKED_DEFAULTS, **given}
    tensors = query, key, value, cu_seqlens_q, cu_seqlens_kv
    usual, seldom = _words(given, PACKED_USUAL, PACKED_SELDOM)
    call_key = call_keys.of(query, key, value, tensors[3:], (*usual, max_seqlen_q, max_seqlen_kv), seldom)
    answer = call_cache.find(call_key)
    if answer is not None:
        arguments.longest(query, key, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
        if (output := answer(*tensors, *_extras(given, PACKED_SELDOM))) is not None:
            return output
    return new_packed_attention(call_key, *tensors, max_seqlen_q, max_seqlen_kv, **given)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def new_cached_attention(
    call_key: Key | None, query: Tensor, cache: CacheTensors, cu_seqlens_q: Tensor | None, *, return_lse: bool,
    **given: Any,
) -> Answer:  # fmt: skip
    """`cached_attention` where no prepared call answers; torch.compile calls it between graphs.

    Raises:
        TensorError: the arguments do not make one call.
        ProblemError: they do, but it is not supported.
    """
    call = cache_arguments.read(query, cache, cu_seqlens_q, **given)
    plan = planner.plan(call, lse=return_lse, learns=False)
    offsets = cache.offsets if cu_seqlens_q is None else (cu_seqlens_q, *cache.offsets)
    extras = _extras(given, ("alibi_slopes", "sinks"))
    return answer(call_key, (query, cache.key, cache.value, *offsets, *extras), call, plan, lse=return_lse)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def new_append(
    call_key: Key | None, query: Tensor, cache: CacheTensors, key: Any, value: Any, cos: Any, sin: Any,
    interleaved: bool, moving: bool, attend: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """An append where no prepared one answers; all arguments are checked before anything is written.

    Args:
        attend: the arguments of the attention behind it, without those of the cache.

    Returns:
        The query to attend with, and the lengths after the append.
    """
    cache_arguments.read(query, cache, **cache_arguments.complete(attend))
    cache = cache_arguments.with_all_scales(cache)
    packed = attend["cu_seqlens_q"] is not None
    given = append_arguments.read(
        query, cache, key, value, cos, sin, interleaved=interleaved, moving=moving, packed=packed
    )
    # Tables that were copied are none of the caller's, whose addresses a prepared call takes.
    copied = given.rotation is not None and given.rotation.cos is not cos
    return append.append(None if copied else call_key, query, given)


def _words(given: dict[str, Any], usual: tuple[str, ...], seldom: tuple[str, ...]) -> tuple[Any, Any]:
    """The arguments as the key of a prepared call has them."""
    rare = tuple(given[name] for name in seldom)
    return tuple(given[name] for name in usual), None if all(argument is None for argument in rare) else rare


def _extras(given: dict[str, Any], seldom: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The tensors among the arguments that stand seldom in a key, in its order."""
    return call_keys.tensors_among(given[name] for name in seldom)


def new_attention(
    call_key: Key | None, query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **given: Any
) -> Answer:
    """`attention` where no prepared call answers: by PyTorch for nested tensors, by the operator for who traces."""
    tensors = query, key, value
    if call_key is None and sdpa_arguments.are_nested(*tensors):
        return sdpa_arguments.nested(*tensors, {**given, "return_lse": return_lse})()
    by_jit = sdpa_arguments.is_traced_by_jit()
    if by_jit or (call_key is None and tracing.is_watched(*tensors)):
        from autoattn.runtime.torch_op import compile_frontend  # for those who trace

        with sdpa_arguments.recorded_by_jit() if by_jit else nullcontext():
            return compile_frontend.attention(*tensors, eagerly=attention, return_lse=return_lse, **given)
    own = *tensors, *_extras(given, SELDOM)
    sized = resized_call.take_apart(call_key, given["layout"], given)
    prepared = resized_call.prepare(sized, own)
    if prepared is not None and (output := prepared(*own)) is not None:
        return output
    call = arguments.read(*tensors, **given)
    plan = planner.plan(call, lse=return_lse)
    output = answer(call_key, own, call, plan, lse=return_lse)
    resized_call.remember(sized, call, plan)
    return output


def new_packed_attention(
    call_key: Key | None, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor,
    max_seqlen_q: int, max_seqlen_kv: int, *, return_lse: bool, **given: Any,
) -> Answer:  # fmt: skip
    """`packed_attention` where no prepared call answers: by the operator for who traces."""
    tensors = query, key, value, cu_seqlens_q, cu_seqlens_kv
    by_jit = sdpa_arguments.is_traced_by_jit()
    if by_jit or (call_key is None and tracing.is_watched(*tensors)):
        from autoattn.runtime.torch_op import compile_frontend  # for those who trace

        with sdpa_arguments.recorded_by_jit() if by_jit else nullcontext():
            return compile_frontend.packed_attention(
                *tensors, max_seqlen_q, max_seqlen_kv, eagerly=packed_attention, return_lse=return_lse, **given
            )
    own = *tensors, *_extras(given, PACKED_SELDOM)
    sized = resized_call.take_apart(call_key, resized_call.PACKED, given, (max_seqlen_q, max_seqlen_kv))
    prepared = resized_call.prepare(sized, own)
    if prepared is not None and (output := prepared(*own)) is not None:
        return output
    call = arguments.read_packed(*tensors, max_seqlen_q, max_seqlen_kv, **given)
    plan = planner.plan(call, lse=return_lse)
    output = answer(call_key, own, call, plan, lse=return_lse)
    resized_call.remember(sized, call, plan)
    return output


def answer(
    call_key: Key | None, tensors: tuple[Tensor, ...], call: Call, plan: Plan, *, lse: bool, like: Tensor | None = None
) -> Answer:
    """Runs a planned call, and prepares for the next one with its key.

    Args:
        tensors: those of the key, as the caller gave them.
        like: for an operator, whose gradients are another's: a [batch, heads, seq, head_dim] view, as which the output
            lies in memory; the LSE, which is given wherever both passes are planned, then has no gaps.

    Returns:
        The output as the caller lays out tensors; with lse, (output, LSE).
    """
    computed = execute.run(call, plan, lse=lse, records=like is None)
    output, sums = computed
    if like is not None:
        output = operands.lying_as(output, like)
    output = operands.as_given(output, call.problem.layout)
    if sums is not None:
        sums = sums[0] if call.problem.packed else sums
        sums = sums if like is None else sums.contiguous()
    result = output if sums is None else (output, sums)
    prepared_call.prepare(call_key, tensors, call, planner.settled(plan, call.problem), computed, result)
    return result
