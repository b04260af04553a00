"""PyTorch's attention: F.scaled_dot_product_attention, each of its backends, and the formula in plain PyTorch."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend

from autoattn import torch_private
from autoattn.baselines import deterministic_sdpa
from autoattn.core.mask import Mask
from autoattn.core.modifiers import SWITCHES, Bias
from autoattn.core.problem import DType, Precision, Problem
from autoattn.reference import attention_formula
from autoattn.tensors.operands import Operands

SDPA = "sdpa"  # as PyTorch itself chooses a backend: what the user had
EAGER = "eager"  # plain PyTorch, one head at a time: for what no fused attention of PyTorch's knows
VARLEN = "varlen-flash"  # torch.nn.attention.varlen: FlashAttention-2 on packed sequences
BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_TINY = torch.finfo(torch.float32).tiny
MASK_ELEMENTS = 2**30  # of a mask that is written out for PyTorch: 1 GiB of booleans


def why_not_sdpa(problem: Problem) -> str | None:
    """Why F.scaled_dot_product_attention cannot compute a problem; None when it can."""
    modifiers = problem.modifiers
    if problem.cache is not None:
        return "it takes no cache whose lengths lie on the device"
    if problem.packed:
        return "it takes no packed sequences"
    for name in ("score_mod", *SWITCHES):
        if getattr(modifiers, name):
            return f"it has no {name}" if name != "dropout" else "its dropout draws other numbers"
    if problem.dtype is DType.FLOAT8 or problem.precision is Precision.TF32X3:
        return f"it has no {problem.precision.value if problem.dtype is DType.FLOAT32 else problem.dtype.value}"
    if (
        is_mask_written_out(problem)
        and problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv > MASK_ELEMENTS
    ):
        return "the mask would have to be written out, and is too large for that"
    return None


def why_not_call(problem: Problem, *, lse: bool) -> str | None:
    """Why F.scaled_dot_product_attention cannot say a call; None when it can."""
    return "it gives no LSE" if lse else why_not_sdpa(problem)


def sdpa(problem: Problem, operands: Operands, *, backend: str = SDPA) -> Tensor:
    """F.scaled_dot_product_attention with the problem's own mask: [batch, heads_q, seq_q, head_dim_v].

    A query that sees no key gives 0, as everywhere in autoattn; PyTorch's backends disagree on it.

    Raises:
        RuntimeError: the named backend does not take these inputs.
    """
    mask = _dense_mask(problem, operands)
    return _by_backend(problem, operands, backend, mask, _blind(mask))


def eager(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """Output and LSE by the reference's formulas, in float32 or, for float64 inputs, in float64 throughout."""
    if operands.query.dtype is torch.float64:
        return attention_formula.attention(problem, operands, dtype=torch.float64)
    output, lse = attention_formula.attention(problem, operands, dtype=torch.float32)
    return output.to(attention_formula.TORCH_DTYPE[problem.dtype.output]), lse.float()


def call_of(name: str, problem: Problem, operands: Operands) -> Callable[[], Tensor]:
    """One rival, ready to be timed: what it needs as a mask is written out before."""
    if name == VARLEN:
        return partial(_varlen, problem, operands)
    return partial(_by_backend, problem, operands, name, *_prepared(problem, operands))


def calls(problem: Problem, operands: Operands) -> dict[str, Callable[[], Tensor]]:
    """The rivals that take these operands, ready to be timed: each was run once."""
    candidates: dict[str, Callable[[], Tensor]] = {}
    if problem.packed and problem.cache is None:
        candidates[VARLEN] = lambda: _varlen(problem, operands)
    elif why_not_sdpa(problem) is None:
        masks = _prepared(problem, operands)
        for name in (SDPA, *BACKENDS):
            candidates[name] = partial(_by_backend, problem, operands, name, *masks)
    rivals: dict[str, Callable[[], Tensor]] = {}
    for name, call in candidates.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns why a backend does not take the inputs
                call()
            if operands.query.is_cuda:
                torch.cuda.synchronize(operands.query.device)
        except (RuntimeError, ImportError, TypeError):  # no kernel of this backend for these inputs, or out of memory
            if operands.query.is_cuda:
                torch.cuda.empty_cache()
            continue
        rivals[name] = call
    return rivals


def gradient_calls(
    problem: Problem, operands: Operands, output_grad: Tensor
) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """The backward passes of the rivals that take these operands, ready to be timed: each was run once.

    A call gives the gradients of query, key and value alone, of a forward pass that is done and whose graph is kept.
    Those of a deterministic problem are of PyTorch's deterministic algorithms, which cuDNN's attention has not. None
    gives that of a bias: PyTorch's backward passes refuse some that need one, so that no call goes there. None takes
    slopes at all.
    """
    if problem.modifiers.bias is Bias.LEARNED:
        return {}
    repeated = problem.deterministic
    leaves = tuple(
        tensor.detach().clone().requires_grad_() for tensor in (operands.query, operands.key, operands.value)
    )
    traced = replace(operands, query=leaves[0], key=leaves[1], value=leaves[2])
    rivals: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    with deterministic_sdpa.switched_on(repeated):
        candidates = calls(problem, traced)
    for name, call in candidates.items():
        try:
            with deterministic_sdpa.switched_on(repeated):
                output = call()
            backward = partial(differentiated, output, leaves, output_grad, repeated)
            backward()
            if output_grad.is_cuda:
                torch.cuda.synchronize(output_grad.device)
        except RuntimeError:  # no backward of this backend for these inputs, or out of memory
            if output_grad.is_cuda:
                torch.cuda.empty_cache()
            continue
        rivals[name] = backward
    return rivals


def differentiated(
    output: Tensor, leaves: tuple[Tensor, ...], output_grad: Tensor, repeated: bool
) -> tuple[Tensor, ...]:
    """Gradients of the leaves by autograd, which keeps the graph; by deterministic algorithms if `repeated`."""
    with deterministic_sdpa.switched_on(repeated):
        grads: tuple[Tensor, ...] = torch.autograd.grad(output, leaves, output_grad, retain_graph=True)
    return grads


def bind(problem: Problem, scale: float, backend: str = SDPA, *, learns: bool = True) -> Callable[..., Tensor] | None:
    """`sdpa` of a problem and scale for any query, key and value; None where these do not go to PyTorch as they are.

    Where the problem has a bias, the call takes it behind them, as the caller gave it.

    Args:
        learns: whether somebody may differentiate the output.
    """
    if is_mask_written_out(problem) or not scale >= _TINY:
        return None
    if problem.modifiers.bias is not Bias.NONE:
        return partial(_biased, _attend(problem.heads_q, problem.heads_kv), scale, backend)
    if is_one_operator(problem, backend):
        return partial(OPERATORS[backend], causal=problem.mask.causal, learns=learns, scale=scale)
    mask, attend = problem.mask, _attend(problem.heads_q, problem.heads_kv)
    if backend == SDPA and _says(mask, problem.seq_q, problem.seq_kv):
        return partial(attend, is_causal=mask.causal, scale=scale)  # one call less, which short steps wait for

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if backend == SDPA:
            return _plain(mask, attend, query, key, value, scale)
        with only_backend(backend):
            return _plain(mask, attend, query, key, value, scale)

    return call


def _biased(
    attend: Callable[..., Tensor], scale: float, backend: str, query: Tensor, key: Tensor, value: Tensor, bias: Tensor
) -> Tensor:
    """PyTorch's attention with a bias as the caller gave it: a query that sees no key gives 0."""
    bias = bias[(None,) * (4 - bias.dim())]
    with nullcontext() if backend == SDPA else only_backend(backend):
        return _with_bias(attend, query, key, value, bias, _blind(bias), scale)


def _with_bias(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, bias: Tensor, blind: Tensor | None,
    scale: float,
) -> Tensor:  # fmt: skip
    bias = bias.to(query.dtype) if bias.is_floating_point() else bias
    output = attend(query, key, value, attn_mask=bias, scale=scale)
    return output if blind is None else output.masked_fill(blind, 0.0)


def is_one_operator(problem: Problem, backend: str) -> bool:
    """Whether F.scaled_dot_product_attention hands a problem that a backend takes to its operator, as it is.

    It repeats heads, pads odd head dims, and knows which backends align a causal mask in which way. SDPA itself
    chooses a backend each time.
    """
    return (
        backend in OPERATORS
        and problem.dtype in (DType.FLOAT16, DType.BFLOAT16)
        and problem.heads_q == problem.heads_kv
        and problem.head_dim == problem.head_dim_v
        and problem.head_dim % 8 == 0
        and (not problem.mask.causal or problem.seq_q == problem.seq_kv)
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, learns: bool, scale: float) -> Tensor:
    return torch_private.flash_attention(query, key, value, causal=causal, scale=scale)


# Backend -> its operator beneath F.scaled_dot_product_attention.
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "sdpa-flash": _flash,
    "sdpa-cudnn": torch_private.cudnn_attention,
    "sdpa-efficient": torch_private.efficient_attention,
}


class only_backend:  # noqa: N801 - a context, as torch.no_grad
    """PyTorch's sdpa_kernel for one backend, in 1 us where that takes 9.

    PyTorch keeps which backends it may take for the whole process, so that threads must take turns.
    """

    _turn = threading.RLock()
    _switches = (
        (SDPBackend.FLASH_ATTENTION, cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        (SDPBackend.CUDNN_ATTENTION, cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        (SDPBackend.EFFICIENT_ATTENTION, cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        (SDPBackend.MATH, cuda.math_sdp_enabled, cuda.enable_math_sdp),
    )

    def __init__(self, backend: str) -> None:
        self.backend = BACKENDS[backend]
        self.before: list[tuple[Callable[[bool], None], bool]] = []

    def __enter__(self) -> None:
        self._turn.acquire()
        for backend, enabled, enable in self._switches:
            if enabled() is not (wanted := backend is self.backend):
                self.before.append((enable, not wanted))
                enable(wanted)

    def __exit__(self, *error: object) -> None:
        for enable, before in self.before:
            enable(before)
        self._turn.release()


def _by_backend(
    problem: Problem, operands: Operands, backend: str, mask: Tensor | None, blind: Tensor | None
) -> Tensor:
    """PyTorch's attention with what `_dense_mask` and `_blind` gave, which is made once where a call is timed."""
    if backend != SDPA:
        with only_backend(backend):
            return _sdpa(problem, operands, mask, blind)
    return _sdpa(problem, operands, mask, blind)


def _prepared(problem: Problem, operands: Operands) -> tuple[Tensor | None, Tensor | None]:
    """What a timed call need not do: the mask, and the rows that see no key, where there are any."""
    mask = _dense_mask(problem, operands)
    blind = _blind(mask)
    return mask, blind if blind is not None and bool(blind.any()) else None


def _blind(mask: Tensor | None) -> Tensor | None:
    """Which rows of a mask see no key; its last axis is 1."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        return ~mask.any(-1, keepdim=True)
    return mask.detach().amax(-1, keepdim=True) == -torch.inf  # reads it once, and writes a number a row


def _attend(heads_q: int, heads_kv: int) -> Callable[..., Tensor]:
    """PyTorch's attention for as many heads."""
    return partial(torch_private.sdpa, enable_gqa=True) if heads_q != heads_kv else torch_private.sdpa


def is_mask_written_out(problem: Problem) -> bool:
    """Whether PyTorch needs the mask as a tensor of all pairs."""
    mask = problem.mask
    banded = mask.bounded_left or mask.right is not None
    return banded or mask.sparse or (mask.causal and problem.modifiers.bias is not Bias.NONE)


def _dense_mask(problem: Problem, operands: Operands) -> Tensor | None:
    """What PyTorch takes as attn_mask: None, booleans or numbers to add, that broadcast to all pairs.

    A bias that is added is not expanded, so that nobody reads it more often than it is there.
    """
    bias = operands.bias if operands.narrow_bias is None else operands.narrow_bias
    if not is_mask_written_out(problem):
        return bias
    rows = torch.arange(problem.seq_q, device=operands.query.device)
    seen = torch.stack([
        attention_formula.visible(problem, operands, rows, sequence)
        for sequence in range(problem.batch if problem.mask.sparse else 1)
    ])  # fmt: skip
    if bias is None:
        return seen
    return seen & bias if bias.dtype is torch.bool else torch.where(seen, bias, -torch.inf)


def _sdpa(problem: Problem, operands: Operands, mask: Tensor | None, blind: Tensor | None) -> Tensor:
    query, key, value, scale = operands.query, operands.key, operands.value, operands.scale
    # Decided by us: traced with symbolic sizes, PyTorch's own comparison is no bool.
    attend = _attend(query.shape[1], key.shape[1])
    # PyTorch's fused backends scale what they have masked, and -inf times 0 or less is no mask.
    if scale < 0.0:
        query, scale = -query, -scale
    if scale < _TINY:
        query, scale = query * 0.0, 1.0
    if mask is not None:
        return _with_bias(attend, query, key, value, mask, blind, scale)
    return _plain(problem.mask, attend, query, key, value, scale)


def _plain(
    mask: Mask, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Full and causal masks, which need no tensor."""
    seq_q, seq_kv = query.shape[2], key.shape[2]
    if _says(mask, seq_q, seq_kv):
        return attend(query, key, value, is_causal=mask.causal, scale=scale)
    blind = max(0, seq_q - seq_kv)  # aligned bottom-right, the first rows see no key
    if blind == 0:
        return attend(query, key, value, attn_mask=_lower_right(query, seq_kv), scale=scale)
    seen = attend(query[:, :, blind:], key, value, is_causal=True, scale=scale)
    return torch.cat((seen.new_zeros(*seen.shape[:2], blind, seen.shape[3]), seen), dim=2)


def _says(mask: Mask, seq_q: int, seq_kv: int) -> bool:
    """Whether is_causal alone says a full or causal mask: PyTorch's is aligned top-left."""
    return not mask.causal or seq_q == seq_kv or mask.alignment.value == "top-left"


def _lower_right(query: Tensor, seq_kv: int) -> Tensor:
    """A causal mask aligned bottom-right, as PyTorch's fused backends know it, unless Dynamo would have to trace it."""
    seq_q = query.shape[2]
    if torch.compiler.is_compiling():
        return torch.ones(seq_q, seq_kv, dtype=torch.bool, device=query.device).tril(seq_kv - seq_q)
    # Imported here because it pulls in all of torch._dynamo, a second that most programs need not spend.
    from torch.nn.attention.bias import causal_lower_right

    bias: Tensor = causal_lower_right(seq_q, seq_kv)
    return bias


def _varlen(problem: Problem, operands: Operands) -> Tensor:
    """FlashAttention-2 on packed sequences, where PyTorch has it."""
    from torch.nn.attention.varlen import varlen_attn

    mask, modifiers = problem.mask, problem.modifiers
    if modifiers.names or problem.group_size > 1 or problem.dtype not in (DType.FLOAT16, DType.BFLOAT16):
        raise RuntimeError("varlen_attn takes plain attention in 16 bits")
    if mask.bounded_left or (mask.bounded_right and not mask.causal):
        raise RuntimeError("varlen_attn takes no windows")
    # Views of which autograd copies nothing; behind tensor[0] it would fill and copy a tensor.
    tokens = [tensor.squeeze(0).transpose(0, 1) for tensor in (operands.query, operands.key, operands.value)]
    lengths = (operands.cu_seqlens_q, operands.cu_seqlens_kv, problem.seq_q, problem.seq_kv)
    window = {"window_size": (-1, 0)} if mask.causal else {}
    try:
        output = varlen_attn(*tokens, *lengths, scale=operands.scale, **window)
    except TypeError:  # torch 2.11 has neither scale nor windows
        output = varlen_attn(*tokens, *lengths, is_causal=mask.causal)
    return output.transpose(0, 1)[None]
