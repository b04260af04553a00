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
from autoattn.baselines import (
    deterministic_sdpa,
    flash4_score_mods,
    flashinfer_prefill,
    flex_attention,
    pytorch_sdpa,
)
from autoattn.core.mask import Alignment
from autoattn.core.modifiers import SWITCHES, Bias
from autoattn.core.problem import DType, Layout, Op, Precision, Problem
from autoattn.errors import UsageError
from autoattn.tensors.operands import Gradients, Operands

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
        if problem.cache is not None:
            return "it is called with keys and values in tensors of their own"
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
    with triton_environment(), compile_settings(problem):
        yield


@contextmanager
def compile_settings(problem: Problem) -> Iterator[None]:
    """What peers that torch.compile compiles for a problem must find set in each call, lest they compile anew."""
    before = torch.get_float32_matmul_precision()
    # Peers may form float32 products as the problem allows ours to.
    torch.set_float32_matmul_precision("high" if problem.precision is Precision.TF32 else "highest")
    try:
        with ExitStack() as stack:
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


def _why_not_flash(taken: tuple[str, ...], values: bool, problem: Problem) -> str | None:
    """What no version does.

    Args:
        taken: the modifiers that this one takes.
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
        if getattr(modifiers, name) and name not in taken:
            return f"it is given no {name} here"
    if modifiers.bias.value != "none":
        return "it is given no biases here"
    if problem.head_dim_v != problem.head_dim and not values:
        return "it takes values of the keys' head dim alone"
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return f"it takes head dims that are multiples of 8, not {problem.head_dim} and {problem.head_dim_v}"
    return flash4_score_mods.why_not(problem)


def _flash(load: Callable[[], tuple[Any, Any]], unbounded: int | None, problem: Problem, operands: Operands) -> Call:
    """A call of FlashAttention in its own layout, [batch, seq, heads, head_dim] without gaps.

    Args:
        unbounded: what a window without a bound on a side is called.
    """
    dense, packed = load()
    attend = packed if problem.packed else dense
    if problem.modifiers.score_mod:
        attend = flash4_score_mods.changing(attend, problem, operands)
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
        answer = attend(query, key, value, **facts)
        output: Tensor = answer[0] if isinstance(answer, tuple) else answer
        return (output[None] if problem.packed else output).transpose(1, 2)

    return call


def _flash_peer(
    number: int, package: str, function: str, load: Callable[[], tuple[Any, Any]], unbounded: int | None, *taken: str
) -> Peer:
    return Peer(
        name=f"fa{number}",
        about=f"FlashAttention-{number} ({function})",
        package=package,
        load=load,
        refuses=partial(_why_not_flash, ("softcap", *taken), number > 2),
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
            load=flex_attention.load,
            refuses=flex_attention.why_not,
            prepare=flex_attention.prepare,
            layout=Layout.BHSD,
            title="FlexAttention",
            compiles=True,
        ),
        _flash_peer(2, "flash-attn", "flash_attn.flash_attn_func", _flash_2, -1, "alibi"),
        _flash_peer(3, "flash-attn-3", "flash_attn_interface.flash_attn_func", _flash_3, -1),
        _flash_peer(4, "flash-attn-4", "flash_attn.cute.flash_attn_func", _flash_4, None, "score_mod"),
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
