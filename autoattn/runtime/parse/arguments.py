"""Parses a call's arguments into one problem and its operands; a caller's mistake is one sentence here."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autoattn.core.call_arguments import DEFAULTS, PACKED_DEFAULTS
from autoattn.core.key_cache import MAX_LATENT_DIM, KeyCache
from autoattn.core.problem import MAX_HEAD_DIM, MAX_HEAD_DIM_V, DType, Layout, Numerics, Precision, Problem
from autoattn.errors import TensorError
from autoattn.kernels.forward import DTYPE, output_dtype
from autoattn.runtime.parse import mask_arguments, modifier_arguments
from autoattn.tensors import cu_seqlens
from autoattn.tensors.operands import Operands, as_they_lie

AUTOCAST = ("cpu", "cuda")  # asking PyTorch which kinds have it is more than Dynamo can trace
AXES = {
    Layout.BHSD: ("batch", "heads", "seq", "head_dim"),
    Layout.BSHD: ("batch", "seq", "heads", "head_dim"),
    Layout.PACKED: ("tokens", "heads", "head_dim"),
}
_CAST = (torch.float16, torch.bfloat16, torch.float32)  # what autocast casts
NUMERICS = "AUTOATTN_NUMERICS"  # the environment's variable
# Each call asks for it, and os.environ takes 2 us to turn names into bytes and back; CPython keeps the bytes here.
_ENVIRONMENT: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_NUMERICS = os.environ.encodekey(NUMERICS) if _ENVIRONMENT is not os.environ else NUMERICS
_ANY_NUMERICS = tuple(numerics.value for numerics in Numerics)  # Dynamo cannot list an enumeration
FLOAT8_SCALES = ("query_scale", "key_scale", "value_scale")
_LAYOUTS = {"bhsd": Layout.BHSD, "bshd": Layout.BSHD}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One attention call, understood and checked."""

    problem: Problem  # sizes of 0 stand as 1
    operands: Operands
    no_kernel: str = ""  # why no kernel knows such tensors: the problem then has a dtype and head dims that one knows
    empty: bool = False  # there is no query, no head or no key, so there is nothing to compute
    deterministic: bool = False  # its gradients, if it has any, must repeat to the bit


def read(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Call:
    """The call that the arguments of `autoattn.attention` pose; those that are missing are the defaults.

    Raises:
        TensorError: the arguments do not make one attention call.
        ProblemError: they do, but it is not supported.
    """
    given = _complete(given, "attention", DEFAULTS)
    order = layout_of(given["layout"])
    dtype = getattr(query, "dtype", None)
    query, key, value = autocast(query, key, value)
    check_tensors(query, key, value, AXES[order])
    if order is Layout.BSHD:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    batch, _, seq_q, _ = query.shape
    seq_kv = key.shape[2]
    seen = mask_arguments.read(
        given["mask"], given["causal"], given["window"], given["bias"], query, seq_kv, output_dtype(query.dtype)
    )
    changed = modifier_arguments.read(query, batch, seq_q, seq_kv, given, bias=seen.kind)
    facts = {"layout": order, "mask": seen.mask, "modifiers": changed.modifiers}
    tensors = {"bias": seen.bias, "narrow_bias": seen.narrow_bias, "table": seen.table, "mask_captures": seen.captures}
    return call_of((query, key, value), (batch, seq_q, seq_kv), dtype, given, facts, tensors | changed.operands)


def _complete(given: dict[str, Any], function: str, known: dict[str, object]) -> dict[str, Any]:
    """All arguments, those that are missing with their defaults.

    Args:
        known: the defaults of those that the function takes.
    """
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return {**DEFAULTS, **given}


def layout_of(layout: Any) -> Layout:
    """The layout of a call that is not packed."""
    order = _LAYOUTS.get(layout) if isinstance(layout, str) else None
    if order is None:
        raise TensorError(f"layout must be bhsd or bshd, got {layout!r}; correct it")
    return order


def read_packed(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, max_seqlen_q: int,
    max_seqlen_kv: int, **given: Any,
) -> Call:  # fmt: skip
    """The call that the arguments of `autoattn.packed_attention` pose; those that are missing are the defaults.

    Raises:
        TensorError: the arguments do not make one attention call.
        ProblemError: they do, but it is not supported.
    """
    given = _complete(given, "packed_attention", PACKED_DEFAULTS)
    dtype = getattr(query, "dtype", None)
    query, key, value = autocast(query, key, value)
    check_tensors(query, key, value, AXES[Layout.PACKED])
    seq_q, seq_kv = longest(query, key, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    cu_seqlens.check_pair(cu_seqlens_q, cu_seqlens_kv)
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    batch = cu_seqlens_q.shape[0] - 1
    changed = modifier_arguments.read(query, batch, seq_q, seq_kv, given)
    facts = {
        "layout": Layout.PACKED,
        "mask": mask_arguments.band(given["causal"], given["window"]),
        "modifiers": changed.modifiers,
        "tokens_q": query.shape[2] or 1,
        "tokens_kv": key.shape[2] or 1,
    }
    tensors = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv, **changed.operands}
    return call_of((query, key, value), (batch, seq_q, seq_kv), dtype, given, facts, tensors)


def longest(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, max_seqlen_q: int, max_seqlen_kv: int
) -> tuple[int, int]:
    """Bounds of the queries and the keys of one packed sequence; checks what describes the sequences.

    Args:
        query, key: [tokens, heads, head_dim]

    Raises:
        TensorError: the offsets or the maxima describe no sequences of these tokens.
    """
    tokens_q, tokens_kv = query.shape[0], key.shape[0]
    # A maximum may be a bound that is far too high; no sequence is longer than all tokens.
    seq_q = min(length_of("max_seqlen_q", max_seqlen_q), tokens_q)
    seq_kv = min(length_of("max_seqlen_kv", max_seqlen_kv), tokens_kv)
    cu_seqlens.check("cu_seqlens_q", cu_seqlens_q, tokens_q, seq_q, query.device)
    cu_seqlens.check("cu_seqlens_kv", cu_seqlens_kv, tokens_kv, seq_kv, query.device)
    return seq_q, seq_kv


def call_of(
    tensors: tuple[Tensor, Tensor, Tensor], sizes: tuple[int, int, int], dtype: torch.dtype | None,
    given: Mapping[str, Any], facts: dict[str, Any], extras: dict[str, Any],
) -> Call:  # fmt: skip
    """What both kinds of call have in common.

    Args:
        tensors: query, key and value as [batch, heads, seq, head_dim] views, of batch 1 when packed
        sizes: sequences, and the most queries and keys of one; any of them may be 0
        dtype: the caller's, which autocast may have changed
        given: the call's arguments
        facts: the problem's facts that both kinds find in their own ways
        extras: the other operands
    """
    query, key, value = tensors
    batch, seq_q, seq_kv = sizes
    cache: KeyCache | None = facts.get("cache")
    most = MAX_LATENT_DIM if cache is not None and cache.latent else MAX_HEAD_DIM
    problem = _problem(
        dtype=DTYPE.get(query.dtype, DType.FLOAT32),
        batch=batch or 1,
        heads_q=query.shape[1] or 1,
        heads_kv=key.shape[1] or 1,
        seq_q=seq_q or 1,
        seq_kv=seq_kv or 1,
        head_dim=min(query.shape[3], most),
        head_dim_v=min(value.shape[3], MAX_HEAD_DIM_V),
        precision=_precision(given["precision"], dtype, query),
        numerics=numerics_of(given["numerics"]),
        **facts,
    )
    scale = scale_of(given["scale"])
    operands = Operands(
        query=query,
        key=key,
        value=value,
        scale=query.shape[3] ** -0.5 if scale is None else scale,
        **extras,
        **_float8_scales(query, (batch, key.shape[1]), {name: given[name] for name in FLOAT8_SCALES}),
    )
    return Call(
        problem=problem,
        operands=as_they_lie(operands),
        no_kernel=why_no_kernel(query, value, most),
        empty=batch == 0 or seq_q == 0 or seq_kv == 0 or query.shape[1] == 0,
        deterministic=deterministic_of(given["deterministic"]),
    )


def why_no_kernel(query: Tensor, value: Tensor, most_dim: int = MAX_HEAD_DIM) -> str:
    """Why no kernel knows the dtype or the head dims of a call; empty where one may.

    Args:
        most_dim: of a query.
    """
    if query.dtype is torch.float64:
        return "the tensors are float64, and the kernels take float16, bfloat16, float32 and float8_e4m3fn"
    for name, size, most in (("query", query.shape[-1], most_dim), ("value", value.shape[-1], MAX_HEAD_DIM_V)):
        if size > most:
            return f"the head dim of {name} is {size}, and the kernels take at most {most}"
    return ""


def _problem(**facts: Any) -> Problem:
    """The problem under its simplest name; a call costs microseconds, and most pose a problem that was posed before."""
    return Problem(**facts).simplified() if torch.compiler.is_compiling() else _posed(**facts)


@lru_cache(maxsize=4096)
def _posed(**facts: Any) -> Problem:
    return Problem(**facts).simplified()


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What PyTorch's own attention makes of tensors under autocast; other things are left to the checks."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else ""
    if kind not in AUTOCAST or not torch.is_autocast_enabled(kind):
        return tensors
    wanted = torch.get_autocast_dtype(kind)
    return tuple(
        tensor.to(wanted)
        if isinstance(tensor, Tensor) and tensor.dtype in _CAST and tensor.device.type == kind
        else tensor
        for tensor in tensors
    )


def check_tensors(query: Tensor, key: Tensor, value: Tensor, names: tuple[str, ...]) -> None:
    """Refuses what is no query, key and value with the named axes."""
    axes = f"[{', '.join(names)}]"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TensorError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it first")
        if tensor.is_nested:
            raise TensorError(f"{name} must be dense, got a nested tensor; pad it, or give packed_attention its tokens")
        if tensor.layout is not torch.strided:
            raise TensorError(f"{name} must be dense, got layout {tensor.layout}; call its to_dense()")
        if tensor.dim() != len(names):
            raise TensorError(f"{name} must be {axes}, got shape {tuple(tensor.shape)}; add or merge axes")
        if tensor.dtype not in DTYPE and tensor.dtype is not torch.float64:
            raise TensorError(
                f"{name} must be float16, bfloat16, float32, float64 or float8_e4m3fn, got {tensor.dtype}; cast it "
                "with .to()"
            )
        if tensor.dtype != query.dtype:
            raise TensorError(f"{name} must have the query's dtype {query.dtype}, got {tensor.dtype}; cast one of them")
        if tensor.device != query.device:
            raise TensorError(f"{name} must be on the query's device {query.device}, got {tensor.device}; move it")
    batched = names[0] == "batch"
    if key.shape[-1] != query.shape[-1] or (batched and key.shape[0] != query.shape[0]):
        alike = f"batch {query.shape[0]} and " * batched + f"head_dim {query.shape[-1]}"
        raise TensorError(
            f"key must be {axes} with the query's {alike}, got shape {tuple(key.shape)}; check the axes and the layout"
        )
    if value.shape[:-1] != key.shape[:-1]:
        raise TensorError(
            f"value must be {axes} with the key's {', '.join(names[:-1])}, got shape {tuple(value.shape)} beside "
            f"{tuple(key.shape)}; check the axes"
        )
    if query.shape[-1] == 0 or value.shape[-1] == 0:
        raise TensorError(
            f"head_dim must be at least 1, got {query.shape[-1]} of query, {value.shape[-1]} of value; check the axes"
        )
    heads = names.index("heads")
    check_heads(query.shape[heads], key.shape[heads], "layout")


def check_heads(heads_q: int, heads_kv: int, suspect: str) -> None:
    """Refuses query heads that key heads cannot be shared among; `suspect` is what the caller should check."""
    if (heads_q == 0) != (heads_kv == 0) or (heads_kv and heads_q % heads_kv):
        raise TensorError(
            f"query heads must be a multiple of key heads, got {heads_q} and {heads_kv}; check the {suspect} or repeat "
            "the key heads"
        )


def length_of(name: str, given: Any) -> int:
    """A length that a caller gave, as a whole number.

    Raises:
        TensorError: it is none, or negative.
    """
    if isinstance(given, (int, torch.SymInt)) and not isinstance(given, bool):
        # As it is: torch.compile and torch.export may give a symbol, and operator.index would make it a number.
        length: int = given
    else:
        try:
            length = -1 if isinstance(given, bool) else operator.index(given)
        except (TypeError, ValueError):
            length = -1
    if length < 0:
        raise TensorError(f"{name} must be a whole number from 0, got {given!r}; give the longest sequence's tokens")
    return length


def scale_of(scale: Any) -> float | None:
    """The caller's scale, which may be None."""
    if scale is None:
        return None
    try:
        number = float(scale)
    except (TypeError, ValueError):
        number = None  # Dynamo of torch 2.11 cannot follow an error that is raised here
    if number is None:
        raise TensorError(f"scale must be a number or None, got {scale!r}; correct it")
    return number


def _precision(precision: str | None, given: torch.dtype | None, query: Tensor) -> Precision:
    """How float32 products are formed; `given` is the dtype before autocast, which overrules the choice."""
    if precision is not None:
        if not isinstance(precision, str) or precision not in tuple(Precision):
            raise TensorError(f"precision must be ieee, tf32, tf32x3 or None, got {precision!r}; correct it")
        if given is not torch.float32:
            raise TensorError(f"precision is a choice for float32 alone, got {given}; leave it out")
    if query.dtype is not torch.float32:
        return Precision.IEEE
    if precision is not None:
        return Precision(precision)
    # Dynamo cannot trace the question; it comes here only with classes of tensors that PyTorch's attention answers.
    exact = torch.compiler.is_compiling() or torch.get_float32_matmul_precision() == "highest"
    return Precision.IEEE if exact else Precision.TF32


def asked_numerics() -> str:
    """What the environment asks of calls that ask nothing themselves; empty where it does not."""
    setting = _ENVIRONMENT.get(_NUMERICS)
    return setting if isinstance(setting, str) else os.fsdecode(setting) if setting else ""


def numerics_of(numerics: str | None) -> Numerics:
    """Which ways of keeping the maximum may answer."""
    name, none, way_out = "numerics", ", online or None", "correct it"
    if numerics is None:
        # Dynamo cannot trace the question, see `_precision`.
        numerics = Numerics.ANY.value if torch.compiler.is_compiling() else asked_numerics() or Numerics.ANY.value
        name, none, way_out = NUMERICS, " or online", "correct or unset it"
    if not isinstance(numerics, str) or numerics not in _ANY_NUMERICS:
        raise TensorError(f"{name} must be any{none}, got {numerics!r:.60}; {way_out}")
    return Numerics(numerics)


def deterministic_of(given: Any) -> bool:
    """Whether gradients must repeat to the bit: the caller says so, or PyTorch's switch for all algorithms.

    Raises:
        TensorError: the caller's is no boolean.
    """
    if not isinstance(given, bool):
        raise TensorError(f"deterministic must be True or False, got {given!r:.60}; correct it")
    return given or torch.are_deterministic_algorithms_enabled()


def _float8_scales(query: Tensor, shape: tuple[int, int], given: dict[str, Any]) -> dict[str, Tensor]:
    """The operands that float8 tensors have beside the others, each [batch, heads_kv]."""
    float8 = DTYPE.get(query.dtype) is DType.FLOAT8
    scales = {}
    for name, tensor in given.items():
        if tensor is None:
            continue
        if not float8:
            raise TensorError(f"{name} belongs to float8_e4m3fn tensors, got {query.dtype}; multiply by it instead")
        modifier_arguments.check_tensor(name, tensor, query.device)
        if tensor.dtype is not torch.float32 or tensor.shape != shape:
            raise TensorError(
                f"{name} must be float32 [batch, heads_kv] = {shape}, got {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}; expand or cast it"
            )
        scales[name] = tensor.contiguous()
    if float8 and len(scales) < len(given):
        ones = torch.ones(shape, device=query.device)
        scales = {name: scales.get(name, ones) for name in given}
    return scales
