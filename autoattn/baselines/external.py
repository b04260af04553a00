"""Baselines by name: PyTorch's backends, FlexAttention, FlashAttention-2, -3 and -4, FlashInfer.

`pytorch_sdpa` is the part of it that every PyTorch has, and that the tuner times; the rest may be missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from autoattn import torch_private
from autoattn.baselines import deterministic_sdpa, flashinfer_prefill, pytorch_sdpa
from autoattn.core.mask import Alignment
from autoattn.core.problem import SWITCHES, Bias, DType, Layout, Op, Precision, Problem
from autoattn.errors import UsageError
from autoattn.tensors import block_table
from autoattn.tensors.operands import Gradients, Operands

FLEX_BLOCK = 128  # queries and keys of a block of FlexAttention's tables, as its own create_block_mask has them
SIXTEEN_BITS = (DType.FLOAT16, DType.BFLOAT16)
UNKNOWN = "of unknown version"
Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One way to compute attention that is not ours."""

    name: str
    about: str  # in words, with the function that is called
    package: str  # whose version is told
    load: Callable[[], object]  # gives what is called; raises where it cannot be imported
    refuses: Callable[[Problem], str | None]  # why it does not do a problem, in words
    prepare: Callable[[Problem, Operands], Call]  # the call that is timed; all that is done once is done before
    layout: Layout | None = None  # how the tensors lie that it takes as they are; None where the problem's do
    title: str = ""  # what a sentence calls it; its name where empty
    compiles: bool = False  # its first call for a problem waits for a compiler, for seconds

    @property
    def is_installed(self) -> bool:
        """Whether its package is installed, as the package's metadata say: nothing is imported."""
        return self.version() != UNKNOWN

    def why_missing(self) -> str | None:
        """Why it cannot be called here at all; None when it can."""
        return why_not_loadable(self)

    def why_not(self, problem: Problem) -> str | None:
        """Why it cannot compute a problem here, one clause; None when nothing is known against it."""
        return self.why_missing() or self.refuses(problem)

    def version(self) -> str:
        """The installed version of its package."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return UNKNOWN


def named(names: str) -> list[Peer]:
    """The peers of a list as a,b,c, each once, in the order given.

    Raises:
        UsageError: a name is unknown, or there is none.
    """
    peers: dict[str, Peer] = {}
    for name in names.split(","):
        peer = PEERS.get(name.strip())
        if peer is None:
            raise UsageError(f"a peer must be one of {', '.join(PEERS)}, got {name.strip()!r:.60}; correct it")
        peers[peer.name] = peer
    return list(peers.values())


def backward_pass(peer: Peer, problem: Problem, operands: Operands, output_grad: Tensor) -> Callable[[], Gradients]:
    """A peer's backward pass alone, ready to be timed: its forward pass is done, and its graph is kept.

    Leaves and output gradient lie as the peer takes them, so that nothing is copied on the way.

    Args:
        problem: backward; where it is deterministic, PyTorch's switch is on in both passes.
    """
    three = (operands.query, operands.key, operands.value)
    leaves = tuple(_lying(peer.layout, tensor).requires_grad_() for tensor in three)
    pull, repeated = _lying(peer.layout, output_grad), problem.deterministic
    with deterministic_sdpa.switched_on(repeated):
        traced = replace(operands, query=leaves[0], key=leaves[1], value=leaves[2])
        output = peer.prepare(problem, traced)()

    def differentiate() -> Gradients:
        query, key, value = pytorch_sdpa.differentiated(output, leaves, pull, repeated)
        return Gradients(query=query, key=key, value=value)

    return differentiate


@contextmanager
def settled(problem: Problem) -> Iterator[None]:
    """How PyTorch and the environment are set while the peers of a problem are prepared and run; both are restored."""
    before = torch.get_float32_matmul_precision()
    # Peers may form float32 products as the problem allows ours to.
    torch.set_float32_matmul_precision("high" if problem.precision is Precision.TF32 else "highest")
    try:
        with ExitStack() as stack:
            stack.enter_context(triton_environment())
            if problem.op is Op.BACKWARD:
                # A compiled backward pass may overwrite what was saved for it, unless it is told that it runs again.
                # PyTorch keeps that by thread, so that this one, and none of autograd's own, runs the passes.
                stack.enter_context(torch_private.without_donated_buffers())
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def triton_environment() -> Iterator[None]:
    """Restores Triton's environment variables: torch.compile sets some, after which our kernels are compiled anew."""
    before = _triton_variables()
    try:
        yield
    finally:
        for name in _triton_variables().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _triton_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}


def _lying(layout: Layout | None, tensor: Tensor) -> Tensor:
    """A [batch, heads, seq, head_dim] view of the same numbers without history, which lie as a layout says."""
    tensor = tensor.detach()
    if layout is None:
        return tensor
    return tensor.contiguous() if layout is Layout.BHSD else tensor.transpose(1, 2).contiguous().transpose(1, 2)


@lru_cache(maxsize=32)
def why_not_loadable(peer: Peer) -> str | None:
    """Why what a peer calls cannot be imported, in words; None when it can. It is tried once in a process."""
    try:
        peer.load()
    except ModuleNotFoundError as error:
        return f"not installed (no module {error.name})"
    except ImportError as error:
        return f"not installed ({error.name or 'its package'} is there without it, or cannot be loaded)"
    except Exception as error:  # a package that was built for another PyTorch raises what it likes
        return f"cannot be imported ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
    return None


def _pytorch() -> object:
    return torch


def _why_not_varlen(problem: Problem) -> str | None:
    return None if problem.packed else "it takes packed sequences alone"


def _why_not_sdpa(problem: Problem) -> str | None:
    if problem.modifiers.bias is Bias.LEARNED:
        return "its backward passes refuse some biases that need a gradient"
    return pytorch_sdpa.why_not_sdpa(problem)


def _why_not_cudnn(problem: Problem) -> str | None:
    return "its gradients do not repeat to the bit" if problem.deterministic else _why_not_sdpa(problem)


def _rival(name: str, about: str, refuses: Callable[[Problem], str | None]) -> Peer:
    return Peer(
        name=name,
        about=about,
        package="torch",
        load=_pytorch,
        refuses=refuses,
        prepare=partial(pytorch_sdpa.call_of, name),
    )


# FlexAttention


def _flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    function: Callable[..., Any] = flex_attention
    return function


def _why_not_flex(problem: Problem) -> str | None:
    modifiers = problem.modifiers
    if problem.packed:
        return "packed sequences are not written as a mask_mod here"
    if problem.dtype is DType.FLOAT8 or problem.precision.value == "tf32x3":
        return f"it has no {problem.precision.value if problem.dtype is DType.FLOAT32 else problem.dtype.value}"
    for name in ("score_mod", "learned_slopes", "sinks", "dropout"):
        if getattr(modifiers, name):
            return f"{name} is not written for it here"
    if modifiers.bias.value != "none" or problem.mask.mod:
        return "biases and mask expressions are not written for it here"
    return None


def _flex(problem: Problem, operands: Operands) -> Call:
    # Dynamo compiles one function for eight shapes and then falls back to plain PyTorch, so it starts anew each time.
    torch.compiler.reset()
    compiled = torch.compile(_flex_attention(), dynamic=False)
    query, key, value = (tensor.contiguous() for tensor in (operands.query, operands.key, operands.value))
    return partial(
        compiled,
        query,
        key,
        value,
        score_mod=_score_mod(problem, operands),
        block_mask=block_mask(problem, operands),
        scale=operands.scale,
        enable_gqa=problem.group_size > 1,
    )


def block_mask(problem: Problem, operands: Operands) -> Any:
    """The problem's mask as FlexAttention's BlockMask; None for a full one. The lists of blocks are computed, not tried
    out pair by pair.
    """
    from torch.nn.attention.flex_attention import BlockMask

    table, mask_mod = operands.table, None
    sizes = (problem.seq_q, problem.seq_kv)
    first, last = problem.band(*sizes)
    if table is None and first is None and last is None:
        return None
    if table is None:
        low, high = (-problem.seq_q if first is None else first), (problem.seq_kv if last is None else last)
        table = _band_table(problem, low, high, operands.query.device)

        def in_band(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k >= q + low) & (k <= q + high)

        # One comparison where one is enough, as its users write it.
        mask_mod = in_band if first is not None and last is not None else _one_sided(first, last)
    return BlockMask.from_kv_blocks(
        table.partial_counts,
        table.partial_blocks,
        table.full_counts,
        table.full_blocks,
        BLOCK_SIZE=(table.block_q, table.block_kv),
        mask_mod=mask_mod,
        seq_lengths=sizes,
    )


def _one_sided(first: int | None, last: int | None) -> Callable[..., Tensor]:
    if last == 0:
        return lambda b, h, q, k: q >= k
    if last is not None:
        return lambda b, h, q, k: k <= q + last
    return lambda b, h, q, k: k >= q + first


def _band_table(problem: Problem, low: int, high: int, device: torch.device) -> Any:
    """Blocks of a band: query q sees the keys q + low to q + high."""
    begin_q = torch.arange(0, problem.seq_q, FLEX_BLOCK)[:, None]
    begin_k = torch.arange(0, problem.seq_kv, FLEX_BLOCK)[None, :]
    end_q = (begin_q + FLEX_BLOCK).clamp(max=problem.seq_q) - 1
    end_k = (begin_k + FLEX_BLOCK).clamp(max=problem.seq_kv) - 1
    least, most = begin_k - end_q, end_k - begin_q  # of key minus query, which takes every value between them
    kept = (most >= low) & (least <= high)
    whole = (least >= low) & (most <= high)
    return block_table.table_of(
        kept[None, None].to(device),
        block_q=FLEX_BLOCK,
        block_kv=FLEX_BLOCK,
        seq_kv=problem.seq_kv,
        partial=~whole[None, None].to(device),
    )


def _score_mod(problem: Problem, operands: Operands) -> Callable[..., Tensor] | None:
    """Softcap, then ALiBi."""
    modifiers, cap, slopes = problem.modifiers, operands.softcap, operands.slopes
    if not modifiers.softcap and not modifiers.alibi:
        return None
    shift = problem.seq_kv - problem.seq_q if problem.mask.alignment is Alignment.BOTTOM_RIGHT else 0

    def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if modifiers.softcap:
            score = cap * torch.tanh(score / cap)
        return score - slopes[b, h] * (q + shift - k).abs() if slopes is not None else score

    return changed


# FlashAttention


def _flash_2() -> tuple[Any, Any]:
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    return flash_attn_func, flash_attn_varlen_func


def _flash_3() -> tuple[Any, Any]:
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    return flash_attn_func, flash_attn_varlen_func


def _flash_4() -> tuple[Any, Any]:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    return flash_attn_func, flash_attn_varlen_func


def _why_not_flash(alibi: bool, values: bool, problem: Problem) -> str | None:
    """What no version does.

    Args:
        alibi: whether this one takes slopes.
        values: whether this one takes values of another head dim than the keys'.
    """
    modifiers, mask = problem.modifiers, problem.mask
    if problem.dtype not in SIXTEEN_BITS:
        return f"it takes 16-bit inputs here, not {problem.dtype.value}"
    if mask.sparse:
        return "it is given no block tables here"
    if mask.causal and mask.alignment is Alignment.TOP_LEFT:
        return "it aligns causal masks bottom-right"
    for name in ("score_mod", *SWITCHES):
        if getattr(modifiers, name) and name not in ("softcap", *(("alibi",) if alibi else ())):
            return f"it is given no {name} here"
    if modifiers.bias.value != "none":
        return "it is given no biases here"
    if problem.head_dim_v != problem.head_dim and not values:
        return "it takes values of the keys' head dim alone"
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return f"it takes head dims that are multiples of 8, not {problem.head_dim} and {problem.head_dim_v}"
    return None


def _flash(load: Callable[[], tuple[Any, Any]], unbounded: int | None, problem: Problem, operands: Operands) -> Call:
    """A call of FlashAttention in its own layout, [batch, seq, heads, head_dim] without gaps.

    Args:
        unbounded: what a window without a bound on a side is called.
    """
    dense, packed = load()
    mask = problem.mask
    query, key, value = (
        tensor.transpose(1, 2).contiguous() for tensor in (operands.query, operands.key, operands.value)
    )
    left, right = (unbounded if side is None else side for side in (mask.left, mask.right))
    facts: dict[str, Any] = {"softmax_scale": operands.scale, "causal": mask.causal, "window_size": (left, right)}
    if problem.modifiers.softcap:
        facts["softcap"] = operands.softcap
    if operands.slopes is not None:
        facts["alibi_slopes"] = operands.slopes.contiguous()
    if problem.deterministic:
        facts["deterministic"] = True
    if problem.packed:
        query, key, value = query.squeeze(0), key.squeeze(0), value.squeeze(0)
        facts |= {"cu_seqlens_q": operands.cu_seqlens_q, "cu_seqlens_k": operands.cu_seqlens_kv}
        facts |= {"max_seqlen_q": problem.seq_q, "max_seqlen_k": problem.seq_kv}

    def call() -> Tensor:
        answer = (packed if problem.packed else dense)(query, key, value, **facts)
        output: Tensor = answer[0] if isinstance(answer, tuple) else answer
        return (output[None] if problem.packed else output).transpose(1, 2)

    return call


def _flash_peer(
    number: int, package: str, function: str, load: Callable[[], tuple[Any, Any]], unbounded: int | None
) -> Peer:
    return Peer(
        name=f"fa{number}",
        about=f"FlashAttention-{number} ({function})",
        package=package,
        load=load,
        refuses=partial(_why_not_flash, number == 2, number > 2),
        prepare=partial(_flash, load, unbounded),
        layout=Layout.BSHD,
        title=f"FlashAttention-{number}",
        compiles=number == 4,
    )


PEERS = {
    peer.name: peer
    for peer in (
        _rival(pytorch_sdpa.SDPA, "F.scaled_dot_product_attention as it chooses itself", _why_not_sdpa),
        _rival("sdpa-flash", "SDPA's FlashAttention-2", _why_not_sdpa),
        _rival("sdpa-cudnn", "SDPA's cuDNN", _why_not_cudnn),
        _rival("sdpa-efficient", "SDPA's memory-efficient attention", _why_not_sdpa),
        _rival(pytorch_sdpa.VARLEN, "torch.nn.attention.varlen", _why_not_varlen),
        Peer(
            name="flex",
            about="FlexAttention, compiled for the problem (torch.nn.attention.flex_attention)",
            package="torch",
            load=_flex_attention,
            refuses=_why_not_flex,
            prepare=_flex,
            layout=Layout.BHSD,
            title="FlexAttention",
            compiles=True,
        ),
        _flash_peer(2, "flash-attn", "flash_attn.flash_attn_func", _flash_2, -1),
        _flash_peer(3, "flash-attn-3", "flash_attn_interface.flash_attn_func", _flash_3, -1),
        _flash_peer(4, "flash-attn-4", "flash_attn.cute.flash_attn_func", _flash_4, None),
        Peer(
            name="flashinfer",
            about="FlashInfer (flashinfer.BatchPrefillWithRaggedKVCacheWrapper)",
            package="flashinfer-python",
            load=flashinfer_prefill.load,
            refuses=flashinfer_prefill.why_not,
            prepare=flashinfer_prefill.prepare,
            layout=Layout.BSHD,
            title="FlashInfer",
            compiles=True,
        ),
    )
}
# Those that finals meet beside PyTorch's backends. No call is dispatched to them.
FINALS_PEERS = ("flex", "fa2", "fa3", "fa4", "flashinfer")
