"""F.scaled_dot_product_attention's arguments as those of `autoattn.attention`, or why PyTorch gets a call as it is.

None of this runs for a call that was answered before.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoattn import torch_private
from autoattn.core.call_arguments import DEFAULTS
from autoattn.core.problem import Layout
from autoattn.errors import SdpaError, SdpaIndexError, SdpaTypeError, TensorError, UsageError
from autoattn.runtime.parse import arguments

_USUAL = {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
_TRACED = ("FakeTensor", "FunctionalTensor")  # by name: most programs do not load their modules
_PLAIN = (Tensor, torch.nn.Parameter)
_BY_CLASS: dict[type[Exception], type[TensorError]] = {
    RuntimeError: SdpaError,
    TypeError: SdpaTypeError,
    IndexError: SdpaIndexError,
}


def is_traced_by_jit() -> bool:
    """Whether torch.jit.trace records what runs."""
    return not torch.compiler.is_compiling() and torch_private.get_jit_tracing_state() is not None


@contextmanager
def outside_of_jit() -> Iterator[None]:
    """What runs in the block is not recorded by torch.jit.trace; sizes are plain numbers there."""
    state = torch_private.get_jit_tracing_state()
    torch_private.set_jit_tracing_state(None)
    try:
        yield
    finally:
        torch_private.set_jit_tracing_state(state)


@contextmanager
def recorded_by_jit() -> Iterator[None]:
    """No warnings of torch.jit.trace about checks, which the operator repeats whenever it runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        yield


def by_pytorch(query: Any, key: Any, value: Any, attn_mask: Any, **given: Any) -> Tensor:
    """F.scaled_dot_product_attention, without arguments that are the defaults.

    PyTorch's formula answers calls without elements that its backends fail on.
    """
    said = _without_defaults(given, _USUAL)
    if attn_mask is not None:
        said["attn_mask"] = attn_mask
    if not _needs_the_formula(query, key, value):
        return torch_private.sdpa(query, key, value, **said)
    if said.get("enable_gqa") and 0 in (*query.shape[-3:-2], *key.shape[-3:-2]):
        key, value = (_of_heads(tensor, query.shape[-3]) for tensor in (key, value))
        del said["enable_gqa"]
    with sdpa_kernel(SDPBackend.MATH):
        return torch_private.sdpa(query, key, value, **said)


def _needs_the_formula(*tensors: Any) -> bool:
    """Whether dense tensors have an axis without elements for which a backend of PyTorch fails.

    Of a GPU, the output is None in place of a tensor (torch 2.11, an H200 and an H100). On any device, torch 2.11
    divides by the number of heads, which ends the process; 2.13 does not.
    """
    if is_traced_by_jit() or not all(type(tensor) in _PLAIN and not tensor.is_nested for tensor in tensors):
        return False
    axes = slice(-3, -2) if tensors[0].device.type == "cpu" else slice(None)
    fails = tensors[0].device.type != "cpu" or torch.__version__ < (2, 13)
    return fails and any(0 in tensor.shape[axes] for tensor in tensors)


def _of_heads(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values [..., heads_kv, seq_kv, head_dim] for so many heads, where no key meets a query: zeros, if any."""
    return tensor.sum(-3, keepdim=True).expand(*tensor.shape[:-3], heads, *tensor.shape[-2:])


def why_pytorch(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, enable_gqa: Any
) -> str | None:
    """Why F.scaled_dot_product_attention gets a call as it is; None where `autoattn.attention` can take it.

    Reads types, dtypes and shapes alone. What is neither PyTorch's nor right is left to the checks of `attention`.
    """
    three = {"query": query, "key": key, "value": value}
    tensors = three if attn_mask is None else {**three, "attn_mask": attn_mask}
    if is_traced_by_jit():
        return "torch.jit.trace records PyTorch's operators alone"
    for name, tensor in tensors.items():
        if (reason := _why_of_its_kind(tensor)) is not None:
            return f"{name} is {reason}"
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        return None
    flags = isinstance(is_causal, bool) and isinstance(enable_gqa, bool)
    if not flags or any(tensor.dim() < 2 for tensor in three.values()):
        return None
    if any(tensor.device != query.device for tensor in tensors.values()):
        return None  # PyTorch does not always look, so that `check` must refuse it
    for name, tensor in three.items():
        # A traced length may be a symbol that nobody can compare.
        sizes = (*tensor.shape[:-2], tensor.shape[-1]) if torch.compiler.is_compiling() else tensor.shape
        if 0 in sizes:
            return f"{name} has an axis without elements, got shape {tuple(tensor.shape)}"
    if key.shape[-2] != value.shape[-2]:
        return None  # PyTorch may read past the end of the value: likewise
    if attn_mask is not None and is_causal:
        return "attn_mask comes together with is_causal, which some backends of some versions of PyTorch take"
    if attn_mask is not None and attn_mask.dim() < 2:
        return "attn_mask has fewer than two axes, which some backends take"
    plain = attn_mask is None and dropout_p == 0.0 and not torch.compiler.is_compiling()
    # What is plain goes there through `attention`, which knows the scales for which PyTorch's masks fail.
    if not plain and (reason := arguments.why_no_kernel(query, value)):
        return reason
    if isinstance(dropout_p, int | float) and dropout_p == 1.0:
        return "dropout_p is 1, which leaves no weight"
    return None


def _why_of_its_kind(tensor: Any) -> str | None:
    """What a tensor is that has rules of its own; None for others."""
    if not isinstance(tensor, Tensor):
        # torch.fx's, and other classes that take PyTorch's functions
        return f"a {type(tensor).__name__} with rules of its own" if hasattr(tensor, "__torch_function__") else None
    if tensor.is_nested:
        return "a nested tensor"
    if type(tensor) not in _PLAIN and type(tensor).__name__ not in _TRACED:
        return f"a {type(tensor).__name__}, a tensor class with rules of its own"
    return None


def check(query: Any, key: Any, value: Any, attn_mask: Any, is_causal: Any, enable_gqa: Any) -> None:
    """Refuses what `attention` would take, and what makes PyTorch's fused backends read memory that is no tensor's.

    (With torch 2.13 and 2.15 on the CPU, a value with more tokens than the key corrupts the heap.)

    Raises:
        SdpaTypeError: a flag is no boolean.
        SdpaError: value has other tokens than key, or a tensor is on another device.
    """
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise SdpaTypeError(f"{name} must be True or False, got {flag!r:.60}; correct it")
    tensors = [tensor for tensor in (query, key, value, attn_mask) if isinstance(tensor, Tensor)]
    if any(tensor.device != tensors[0].device for tensor in tensors):
        devices = ", ".join(str(tensor.device) for tensor in tensors)
        raise SdpaError(f"all tensors must be on one device, got {devices}; move them")
    if not all(isinstance(tensor, Tensor) and tensor.dim() >= 2 for tensor in (key, value)):
        return
    if key.shape[-2] != value.shape[-2]:
        raise SdpaError(
            f"value must have the key's {key.shape[-2]} tokens, got {value.shape[-2]} in shape {tuple(value.shape)}; "
            "check the axes"
        )


def refused(mistake: UsageError, by_pytorch: Exception) -> Exception:
    """What is raised for a call that neither `attention` nor PyTorch takes: the sentence, in PyTorch's class too."""
    for kind, ours in _BY_CLASS.items():
        if isinstance(by_pytorch, kind):
            return ours(str(mistake))
    return mistake


# --- Axes -------------------------------------------------------------------------------------------------------------


def broadcast(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[int, ...] | None]:
    """Query, key, value and mask as [batch, heads, ...], and what stands in front of the output's last two axes.

    The last is None where the output has them already.

    Raises:
        TensorError: they are no tensors, have too few axes, or do not broadcast.
    """
    heads = -3 if enable_gqa else -2  # where the axes end that are broadcast
    tensors = (("query", query), ("key", key), ("value", value), *((("attn_mask", mask),) if mask is not None else ()))
    for name, tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TensorError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it first")
        if tensor.dim() < 2 and name != "attn_mask":
            raise TensorError(f"{name} must be [..., seq, head_dim], got shape {tuple(tensor.shape)}; add axes")
        if tensor.dim() < 3 and enable_gqa and name != "attn_mask":
            raise TensorError(
                f"{name} must be [..., heads, seq, head_dim] with enable_gqa, got shape {tuple(tensor.shape)}; add axes"
            )
    outer = query.shape[:heads]
    if query.dim() == 4 and outer == key.shape[:heads] == value.shape[:heads] and (mask is None or mask.dim() <= 4):
        return query, key, value, mask, None
    try:
        outer = torch.broadcast_shapes(*(tensor.shape[:heads] for tensor in (query, key, value)))
        if mask is not None:  # it must fit the scores, which know nothing of the values
            scores = (*torch.broadcast_shapes(query.shape[:heads], key.shape[:heads]), *query.shape[heads:-1])
            mask.expand(*scores, key.shape[-2])
        query, key, value = (tensor.expand(*outer, *tensor.shape[heads:]) for tensor in (query, key, value))
        outer = query.shape[:-2]
        if mask is not None and (mask.dim() > 4 or query.dim() > 4):
            mask = mask.expand(*outer, query.shape[-2], key.shape[-2])
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors)
        raise TensorError(
            f"the axes in front of the last two must broadcast, got {shapes}; set enable_gqa if key heads are fewer"
        ) from None
    query, key, value = (_four_axes(tensor) for tensor in (query, key, value))
    return query, key, value, _four_axes(mask) if mask is not None and mask.dim() > 4 else mask, tuple(outer)


def _four_axes(tensor: Tensor) -> Tensor:
    """[batch, heads, seq, last]: missing axes are 1, and several in front of the heads become one."""
    while tensor.dim() < 4:
        tensor = tensor[None]
    return tensor if tensor.dim() == 4 else tensor.flatten(0, -4)


# --- `attention` of what is no dense tensor ---------------------------------------------------------------------------


def is_recorded_by_fx(*tensors: Any) -> bool:
    """Whether torch.fx.symbolic_trace put something in a tensor's place that records what is done with it."""
    return any(isinstance(tensor, torch.fx.Proxy) for tensor in tensors)


def record(function: Callable[..., Any], placed: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """A node of torch.fx's graph that calls a function of ours when the graph runs.

    Args:
        placed: the arguments that have no names in the call.
    """
    usual = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    return torch.overrides.handle_torch_function(function, placed, *placed, **_without_defaults(given, usual))


def _without_defaults(given: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are not the defaults, which are None, numbers and words."""
    return {
        name: argument
        for name, argument in given.items()
        if type(argument) is not type(usual[name]) or argument != usual[name]
    }


def are_nested(*tensors: Any) -> bool:
    """Whether some are nested tensors."""
    return any(isinstance(tensor, Tensor) and tensor.is_nested for tensor in tensors)


NESTED = "a nested tensor goes to F.scaled_dot_product_attention"
_SAID = ("causal", "dropout", "scale", "layout", "numerics")  # what a nested call may say; numerics choose a kernel


def nested(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> Callable[[], Tensor]:
    """`attention` on nested tensors, which PyTorch's attention computes where it can say the call.

    Args:
        query: [batch, heads_q, ragged seq_q, head_dim], or [batch, ragged seq_q, heads_q, head_dim] with layout="bshd"
        given: the other arguments of `attention`

    Raises:
        TensorError: it cannot.
    """
    for name, argument in given.items():
        if name not in _SAID and argument is not DEFAULTS[name] and argument != DEFAULTS[name]:
            raise TensorError(
                f"{NESTED}, which has no {name}, got {argument!r:.60}; leave it out or call packed_attention"
            )
    swapped = arguments.layout_of(given["layout"]) is Layout.BSHD
    if swapped:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    causal = given["causal"]
    same = query is key or (query.layout is torch.jagged and query.shape[-2] == key.shape[-2])
    if causal not in (False, "top-left") and not (causal in (True, "bottom-right") and same):
        raise TensorError(
            f"{NESTED}, which aligns a causal mask top-left, got causal={causal!r} and sequences that may differ in "
            "length; give causal='top-left', or give packed_attention the tokens"
        )
    words = {"is_causal": bool(causal), "dropout_p": given["dropout"], "scale": given["scale"]}
    if query.size(1) != key.size(1):
        words["enable_gqa"] = True

    def call() -> Tensor:
        output = by_pytorch(query, key, value, None, **words)
        return output.transpose(1, 2) if swapped else output

    return call
