"""torch.compile and FakeTensor entry: says a call in the arguments of torch.ops.autoattn.attention.

Dynamo follows this code, so it is plain: what is no tensor becomes words and numbers of the operator while it traces,
and no length is compared with anything. Wrong arguments raise the sentence that the functions have for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autoattn import masks, torch_private
from autoattn.baselines import deterministic_sdpa
from autoattn.core.call_arguments import ARGUMENTS, NUMBERS
from autoattn.core.mask import Mask
from autoattn.core.problem import Layout, Precision
from autoattn.errors import ProblemError, TensorError
from autoattn.expressions import captures, fx_tracing
from autoattn.expressions.captures import Traced
from autoattn.expressions.language import SCORE_NAMES
from autoattn.hardware import nvidia
from autoattn.runtime.parse import arguments, mask_arguments, modifier_arguments
from autoattn.runtime.plan import cache_lookup, default_gradients, planner
from autoattn.runtime.run import execute
from autoattn.runtime.torch_op import attention_schema, tracing
from autoattn.tensors import cu_seqlens

Answer: TypeAlias = Tensor | tuple[Tensor, Tensor]
_WHOLE = str(Mask())
_SAYABLE = (str, Tensor, Mask, masks.BlockSparse)


def attention(query: Tensor, key: Tensor, value: Tensor, *, eagerly: Callable[..., Answer], **given: Any) -> Answer:
    """`autoattn.attention` as one operator; all arguments are given.

    Args:
        eagerly: computes the call where it breaks the graph.
    """
    mod = _mod(given["score_mod"], query)
    mask = given["mask"]
    if mod is None or not (mask is None or isinstance(mask, _SAYABLE) or not torch.compiler.is_dynamo_compiling()):
        broken: Answer = _outside_of_the_graph(eagerly, query, key, value, **given)
        return broken
    if _is_pytorchs(query, key, value) or _is_better_by_pytorch(query, key, value, given):
        return _by_pytorch(query, key, value, **given)
    layout = arguments.layout_of(given["layout"])
    query, key, value, precision = _three(query, key, value, layout, given["precision"])
    words, table, bias = _seen(mask, given["causal"], given["window"], given["bias"])
    if bias is not None:
        modifier_arguments.check_tensor("bias", bias, query.device)
    options = {**_shared_options(query, given), **mod, **table_arguments(table)}
    slopes = given["alibi_slopes"]
    answer: tuple[Tensor, Tensor] = attention_schema.operator(
        query, key, value, bias, mask=words, layout=layout.value, precision=precision,
        keep_lse=_learns(query, key, value, given["sinks"], bias, slopes),
        learns_bias=_learns(bias), learns_slopes=_learns(slopes), **options,
    )  # fmt: skip
    return answer if given["return_lse"] else answer[0]


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, max_seqlen_q: int,
    max_seqlen_kv: int, *, eagerly: Callable[..., Answer], **given: Any,
) -> Answer:  # fmt: skip
    """`autoattn.packed_attention` as one operator; all arguments are given, and `eagerly` as for `attention`."""
    mod = _mod(given["score_mod"], query)
    if mod is None:
        tensors = query, key, value, cu_seqlens_q, cu_seqlens_kv
        broken: Answer = _outside_of_the_graph(eagerly, *tensors, max_seqlen_q, max_seqlen_kv, **given)
        return broken
    query, key, value, precision = _three(query, key, value, Layout.PACKED, given["precision"])
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        cu_seqlens.check_form(name, offsets, query.device)
    cu_seqlens.check_pair(cu_seqlens_q, cu_seqlens_kv)
    answer: tuple[Tensor, Tensor] = attention_schema.operator(
        query, key, value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
        max_seqlen_q=arguments.length_of("max_seqlen_q", max_seqlen_q),
        max_seqlen_kv=arguments.length_of("max_seqlen_kv", max_seqlen_kv),
        mask=str(mask_arguments.band(given["causal"], given["window"])), layout=Layout.PACKED.value,
        precision=precision, keep_lse=_learns(query, key, value, given["sinks"], given["alibi_slopes"]),
        learns_slopes=_learns(given["alibi_slopes"]), **_shared_options(query, given), **mod,
    )  # fmt: skip
    return answer if given["return_lse"] else answer[0]


# --- What goes another way --------------------------------------------------------------------------------------------


def _call(function: Callable[..., Answer], *tensors: Any, **given: Any) -> Answer:
    """The call as it is: here torch.compile breaks the graph."""
    return function(*tensors, **given)


_outside_of_the_graph = torch.compiler.disable(
    _call,
    reason="a BlockMask, or a score_mod that reads tensors or numbers of its surroundings, must be read before; give "
    "what autoattn.masks.from_block_mask or autoattn.masks.score makes of it",
)


def _is_pytorchs(*tensors: Tensor) -> bool:
    """Whether Dynamo traces what knows PyTorch's attention alone.

    That are DTensor and other classes with rules of their own, and derivatives by torch.func.
    """
    if not torch.compiler.is_dynamo_compiling():
        return False
    if any(isinstance(tensor, Tensor) and type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors):
        return True
    return _is_differentiated()


def _is_better_by_pytorch(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> bool:
    """Whether Dynamo traces a training step that PyTorch's own attention says in full, and answers outside of a graph.

    The operator would compute such a call twice.
    """
    if not torch.compiler.is_dynamo_compiling() or not _learns(query, key, value):
        return False
    if _learns(given["mask"], given["bias"]):  # of which PyTorch's backward passes refuse some
        return False
    if _is_asked_alone(given):  # the operator switches PyTorch's algorithms when it runs; a graph cannot
        return False
    biased = isinstance(given["mask"], Tensor) or given["bias"] is not None
    plain = (
        (given["mask"] is None or isinstance(given["mask"], Tensor))
        and not (biased and given["causal"])
        and given["window"] is None
        and not given["return_lse"]
        and given["precision"] != Precision.TF32X3.value
        and all(given[name] in (None, 0.0) for name in _NUMBERS)
        and all(given[name] is None for name in _UNKNOWN_TO_SDPA)
    )
    if not plain:
        return False
    if arguments.why_no_kernel(query, value) != "" or not _has_kernels(query.device):
        return True
    return not biased and _is_believed_faster(query, key, value, given)


def _has_kernels(device: torch.device) -> bool:
    """Whether kernels run on a device at all."""
    return planner.why_not_on(device) is None and _is_supported(device.index)


def _is_believed_faster(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> bool:
    """Whether PyTorch's gradients of a plain call without a bias are believed faster, and none were tuned on the card.

    Where some were, the operator decides when autograd comes to it. A causal mask must be square: another one would be
    written out.
    """
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[-1] != value.shape[-1]:
        return False
    axis = 1 if given["layout"] == Layout.BSHD.value else 2
    if given["causal"] and query.shape[axis] != key.shape[axis]:
        return False
    return (
        not given["deterministic"]
        and not torch.are_deterministic_algorithms_enabled()
        and _leaves_plain(query.device.index)
    )


def _is_asked_alone(given: dict[str, Any]) -> bool:
    """Whether a call asks for gradients that repeat to the bit, and PyTorch was not told to run all of it so."""
    return given["deterministic"] is True and not torch.are_deterministic_algorithms_enabled()


# What changes scores and weights, but for a bias: F.scaled_dot_product_attention takes none of it.
_NUMBERS = tuple(number.name for number in NUMBERS)
_UNKNOWN_TO_SDPA = tuple(
    argument.name
    for argument in ARGUMENTS
    if (argument.modifier or argument.learned) and argument.name not in ("bias", *_NUMBERS)
)


def _is_supported(index: int | None) -> bool:
    card = nvidia.present(index)
    return card is not None and cache_lookup.device_supported(card) is None


_is_supported._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _leaves_plain(index: int | None) -> bool:
    """Whether a card leaves plain training calls of 16 bits to PyTorch, whatever their lengths."""
    card = nvidia.present(index)
    return not cache_lookup.differentiates(card) and default_gradients.are_pytorchs(card)


_leaves_plain._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_differentiated() -> bool:
    return torch_private.transforms() not in ((), (tracing.VMAP,))


_is_differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo guards on the transforms itself


def _by_pytorch(query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **given: Any) -> Answer:
    """PyTorch's own attention, traced."""
    if _is_asked_alone(given) and (_learns(query, key, value) or _is_differentiated()):
        raise TensorError(
            "deterministic=True must not be asked where torch.compile traces PyTorch's attention, got it with a tensor "
            f"class or a transform that takes no kernel; {deterministic_sdpa.WAY_OUT}"
        )
    call = arguments.read(query, key, value, **given)
    planned = planner.plan_without_kernel(call, "Dynamo traces what a kernel cannot follow", lse=return_lse)
    output, lse = execute.run(call, planned, lse=return_lse)
    output = output.transpose(1, 2) if given["layout"] == Layout.BSHD.value else output
    return output if lse is None else (output, lse)


# --- The operator's arguments -----------------------------------------------------------------------------------------


def _three(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, precision: Any
) -> tuple[Tensor, Tensor, Tensor, str | None]:
    """Query, key and value as autocast makes them, and the precision, which is a choice of float32 alone."""
    given = getattr(query, "dtype", None)
    query, key, value = arguments.autocast(query, key, value)
    arguments.check_tensors(query, key, value, arguments.AXES[layout])
    _check_words("precision", precision, "ieee, tf32, tf32x3")
    cast = given is torch.float32 and query.dtype is not torch.float32
    return query, key, value, None if cast else precision


def _seen(mask: Any, causal: Any, window: Any, bias: Any) -> tuple[str, Any, Tensor | None]:
    """The words of a mask, a table of blocks, and a bias."""
    shape = str(mask_arguments.band(causal, window))  # as text: Dynamo compares no masks of which numbers are symbols
    if mask is None:
        return shape, None, bias
    if isinstance(mask, Tensor):
        if bias is not None:
            raise mask_arguments.two_tensors()
        return shape, None, mask
    words = mask if isinstance(mask, str) else str(mask) if isinstance(mask, Mask) else None
    if shape != _WHOLE:
        raise mask_arguments.contradiction(words, causal, window)
    return (_WHOLE, mask, bias) if words is None else (words, None, bias)


def table_arguments(table: Any) -> dict[str, Any]:
    """A table of blocks as the operator takes it."""
    if table is None:
        return {}
    if not isinstance(table, masks.BlockSparse):  # FlexAttention's, and nobody follows this code
        with torch_private.without_dispatch_modes():
            table = masks.from_block_mask(table)
    sparse, table = table, table.table
    return {
        "table": [table.full_counts, table.full_blocks, table.partial_counts, table.partial_blocks],
        "table_sizes": [table.block_q, table.block_kv, sparse.seq_q, sparse.seq_kv],
        "density": sparse.mask.density,
        "mask_mod": sparse.mask.mod,
        "mask_captures": list(sparse.captures) or None,
    }


def _shared_options(query: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """What changes weights, and what both functions have."""
    _check_words("numerics", given["numerics"], "any, online")
    options: dict[str, Any] = {
        "scale": arguments.scale_of(given["scale"]),
        "numerics": given["numerics"],
        "deterministic": arguments.deterministic_of(given["deterministic"]),
        "return_lse": bool(given["return_lse"]),
    }
    for number in NUMBERS:
        options[number.name] = modifier_arguments.number_of(number, given[number.name])
    seed = given["seed"]
    if options["dropout"] > 0.0:
        # A number that is drawn while the graph runs, and that the backward pass gets again.
        options.update(
            {"drawn_seed": modifier_arguments.draw()} if seed is None else {"seed": modifier_arguments.seed_of(seed)}
        )
    for name in attention_schema.LEARNING[4:]:
        if given[name] is not None:
            modifier_arguments.check_tensor(name, given[name], query.device)
            options[name] = given[name]
    return options


def _learns(*tensors: Any) -> bool:
    """Whether some of the tensors need a gradient."""
    learners = [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad]
    return torch.is_grad_enabled() and len(learners) > 0  # Dynamo of torch 2.11 knows no truth of a list


def _check_words(name: str, given: Any, known: str) -> None:
    """Refuses what the operator cannot even take; which words there are, the function checks when it runs."""
    if given is not None and not isinstance(given, str):
        raise TensorError(f"{name} must be {known} or None, got {given!r}; correct it")


def _mod(score_mod: Any, query: Tensor) -> dict[str, Any] | None:
    """A score_mod as the operator takes it; None for a function that may mean another thing in the next call."""
    if score_mod is None or isinstance(score_mod, str):
        return {"score_mod": score_mod or ""}
    if isinstance(score_mod, Traced):
        return {"score_mod": score_mod.text, "score_captures": list(score_mod.captures) or None}
    if torch.compiler.is_dynamo_compiling():
        text = _text(score_mod)
        return None if text is None else {"score_mod": text}
    with torch_private.without_dispatch_modes():
        text, captured = fx_tracing.trace(score_mod, SCORE_NAMES, query.device)
    return {"score_mod": text, "score_captures": list(captured) or None}


def _text(function: Any) -> str | None:
    """The text of a function whose code says all, which is what Dynamo knows it by; None for others."""
    try:
        return fx_tracing.trace(function, SCORE_NAMES)[0] if captures.is_fixed(function) else None
    except ProblemError:  # outside of the graph it is raised with its sentence
        return None


_text._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo calls it while it traces
