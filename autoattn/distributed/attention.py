"""The public function: attention of a sequence whose tokens are divided among the ranks of a group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoattn import functional
from autoattn.core.mask import Mask
from autoattn.core.problem import Layout
from autoattn.core.rank_choice import Method, RankCall
from autoattn.distributed import measured_method, ring, shards, ulysses
from autoattn.distributed.communication import Ranks, agree, ranks_of
from autoattn.distributed.partial_call import Terms
from autoattn.distributed.rectangles import Reach
from autoattn.distributed.schedule import Split
from autoattn.distributed.sharding import Sharding
from autoattn.errors import AutoattnError, TensorError, UsageError
from autoattn.kernels.forward import DTYPE
from autoattn.runtime.parse import arguments, mask_arguments, modifier_arguments
from autoattn.tensors import cu_seqlens as offset_tensors


@overload
def context_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: dist.ProcessGroup | DeviceMesh,
    return_lse: Literal[False] = False, **given: Any,
) -> Tensor: ...  # fmt: skip


@overload
def context_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: dist.ProcessGroup | DeviceMesh, return_lse: Literal[True],
    **given: Any,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    sharding: str = "zigzag",
    method: str = "auto",
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    seq_len: int | None = None,
    deterministic: bool = False,
    layout: str = "bhsd",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Self-attention of sequences whose tokens are divided among the ranks of a group, as `shard` divides them.

    All ranks call it together, with the same arguments but for their tokens. docs/context-parallel.md has examples.

    Args:
        query: this rank's [batch, heads_q, seq, head_dim], or [batch, seq, heads_q, head_dim] with layout="bshd";
            [tokens, heads_q, head_dim] with cu_seqlens.
        key, value: the same with heads_kv, which divides heads_q; value may have a head dim of its own.
        group: the ranks; of one rank it is the plain call.
        sharding: "zigzag", "contiguous" or "stripe".
        method: "ring" (keys of one rank after another, beside computation), "allgather" (all keys that a rank sees,
            then one call for each chunk of its queries), "ulysses" (all tokens of some heads); "auto" takes what
            `autoattn tune --ranks` measured to be the fastest, else the ring, but all-gather for windows and slopes.
        causal, window, softcap, scale: as in `autoattn.attention`; lengths and positions are those of whole sequences.
        sinks: [heads_q], the same on each rank.
        alibi_slopes: [heads_q], or [batch, heads_q] without cu_seqlens; with a causal mask for method "allgather".
        cu_seqlens: where packed documents begin, and where the last ends, among the tokens of all ranks; whole
            numbers or an int32 tensor, best one of the CPU, since one of a GPU is waited for. Each document is
            divided by itself.
        seq_len: tokens of a whole sequence; ranks times this rank's tokens when None.
        deterministic: as in `autoattn.attention`. Gradients of different ranks are always summed in one order.
        layout: "bhsd" or "bshd", of query, key, value and output.
        return_lse: whether the log-sum-exp is returned too.

    Returns:
        The output of this rank's queries, like the query with the value's head dim. With return_lse, (output, lse):
        [batch, heads_q, seq] or [heads_q, tokens] float32, in natural logarithms. Gradients of sinks and slopes are
        this rank's share, as those of weights are: their sum over the ranks is the gradient.

    Raises:
        TensorError, UsageError: the arguments do not make one call, or not the same one on all ranks.
        GroupError: a rank ends, or does not answer in the group's time.
    """
    given = {
        "causal": causal, "window": window, "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes,
        "scale": scale, "deterministic": deterministic,
    }  # fmt: skip
    ranks = ranks_of(group)
    if ranks.size == 1:
        return _alone(query, key, value, sharding, cu_seqlens, {**given, "return_lse": return_lse}, layout)
    if not all(isinstance(tensor, Tensor) for tensor in (query, key, value)):  # other ranks cannot be told without one
        arguments.check_tensors(query, key, value, arguments.AXES[Layout.BHSD])
    kind, refusal = None, None
    try:
        three = arguments.autocast(query, key, value)
        kind = _kind(three, ranks, (sharding, method, layout), cu_seqlens, seq_len, given)
    except AutoattnError as error:  # a mistake, or a damaged file of choices
        refusal = error
    words = "" if kind is None else f"{kind.words}; return_lse {return_lse}"
    agree(ranks, words, refusal, query.device)
    assert kind is not None
    output, lse = _computed((three[0], three[1], three[2]), kind, ranks, given)
    return (output, lse) if return_lse else output


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kind:
    """What calls have in common whose arguments differ in the numbers of tensors alone."""

    order: Layout
    split: Split
    method: Method
    reach: Reach
    terms: Terms  # without slopes
    words: str  # all that must be the same on each rank


def _alone(
    query: Tensor, key: Tensor, value: Tensor, sharding: str, cu_seqlens: Any, given: dict[str, Any], layout: str
) -> Tensor | tuple[Tensor, Tensor]:
    """The plain call, of a group with one rank."""
    if cu_seqlens is None:
        return functional.attention(query, key, value, layout=layout, **given)
    offsets = shards.offsets_of(cu_seqlens)
    tensor = offset_tensors.of_numbers(offsets, query.device)
    longest = max(end - begin for begin, end in pairwise(offsets))
    return functional.packed_attention(query, key, value, tensor, tensor, longest, longest, **given)


_kinds: dict[Any, _Kind] = {}
_REMEMBERED = 256  # kinds of calls
_PLAIN = frozenset({type(None), bool, int, float, str})  # types whose values say all about an argument


def _kind(
    three: tuple[Tensor, ...], ranks: Ranks, choices: tuple[str, str, str], cu_seqlens: Any, seq_len: int | None,
    given: dict[str, Any],
) -> _Kind:  # fmt: skip
    """What call the arguments pose; they are read once for each kind.

    Raises:
        TensorError, UsageError: they pose none.
    """
    offsets = None if cu_seqlens is None else shards.offsets_of(cu_seqlens)
    kind_key = _kind_key(three, ranks, choices, offsets, seq_len, given)
    kind = None if kind_key is None else _kinds.get(kind_key)
    if kind is None:
        kind = _read(three, ranks, choices, offsets, seq_len, given)
        if kind_key is not None:
            if len(_kinds) >= _REMEMBERED:
                _kinds.clear()
            _kinds[kind_key] = kind
    return kind


def _kind_key(
    three: tuple[Tensor, ...], ranks: Ranks, choices: tuple[str, str, str], offsets: tuple[int, ...] | None,
    seq_len: int | None, given: dict[str, Any],
) -> Any:  # fmt: skip
    """All that decides what a call computes and sends; None where that takes more than a look at its arguments."""
    window = given["window"]
    words = (
        *choices, seq_len, given["causal"], given["softcap"], given["scale"], given["deterministic"],
        *(window if type(window) is tuple else (window,)),
    )  # fmt: skip
    kinds = tuple(map(type, words))  # 1, 1.0 and True are equal, but not the same argument
    if not _PLAIN.issuperset(kinds):
        return None
    tensors = *three, given["sinks"], given["alibi_slopes"]
    try:
        facts = tuple([
            None if each is None else (type(each), each.layout, each.dtype, each.device, each.shape, each.requires_grad)
            for each in tensors
        ])  # fmt: skip
    except (AttributeError, RuntimeError):  # no tensor, or a nested one, which has no shape
        return None
    switches = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    return ranks.rank, ranks.size, offsets, words, kinds, facts, switches


def _read(
    three: tuple[Tensor, ...], ranks: Ranks, choices: tuple[str, str, str], offsets: tuple[int, ...] | None,
    seq_len: int | None, given: dict[str, Any],
) -> _Kind:  # fmt: skip
    sharding, method, layout = choices
    order = arguments.layout_of(layout) if offsets is None else Layout.PACKED
    _check_tensors(three[0], three[1], three[2], order)
    three = _tokens_first(three, order)
    axis = 0 if order is Layout.PACKED else 1
    split = _split(three[0].shape[axis], ranks, sharding, offsets, seq_len)
    mask = mask_arguments.band(given["causal"], given["window"])
    reach = Reach(left=mask.left, right=0 if mask.causal else mask.right)
    # [batch, heads_q, seq, head_dim], for the checks of what changes scores
    seen = three[0].transpose(0, 1)[None] if order is Layout.PACKED else three[0].transpose(1, 2)
    batch = len(split.offsets) - 1 if order is Layout.PACKED else three[0].shape[0]
    modifier_arguments.read(seen, batch, 1, 1, given)
    learns = torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad
        for tensor in (*three, given["sinks"], given["alibi_slopes"])
    )
    slopes = given["alibi_slopes"]
    if method == "auto" and slopes is None and split.sharding is Sharding.ZIGZAG:
        rank_call = _rank_call(three, mask, split, packed=order is Layout.PACKED, learns=learns)
        measured = None if rank_call is None else measured_method.find(rank_call, ranks.size, three[0].device)
        method = method if measured is None else measured.value
    chosen = _method(method, reach, split, ranks, three, slopes)
    terms = Terms(
        scale=arguments.scale_of(given["scale"]),
        softcap=float(given["softcap"]),
        deterministic=arguments.deterministic_of(given["deterministic"]),
        learns=learns,
        learns_slopes=slopes is not None and slopes.requires_grad and torch.is_grad_enabled(),
    )
    shapes = [(*tensor.shape[:axis], *tensor.shape[axis + 1 :]) for tensor in three]
    words = (
        f"{_tokens_in_words(split)}; query {shapes[0]} beside tokens; key {shapes[1]} beside tokens; value {shapes[2]} "
        f"beside tokens; {three[0].dtype}; {split.sharding.value}; method {chosen.value}; mask {mask}; softcap "
        f"{given['softcap']}; scale {given['scale']}; sinks {_shape(given['sinks'])}; alibi_slopes "
        f"{_shape(slopes)}; deterministic {terms.deterministic}; gradients {learns}"
    )
    return _Kind(order=order, split=split, method=chosen, reach=reach, terms=terms, words=words)


def _tokens_first(three: tuple[Tensor, ...], order: Layout) -> tuple[Tensor, ...]:
    """Tensors as [batch, seq, heads, head_dim], or packed [tokens, heads, head_dim]."""
    return tuple([tensor.transpose(1, 2) for tensor in three]) if order is Layout.BHSD else three


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, order: Layout) -> None:
    names = arguments.AXES[order]
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise TensorError(
                f"{name} must be this rank's plain tensor, got {type(tensor).__name__}; give its to_local()"
            )
    arguments.check_tensors(query, key, value, names)
    axis = names.index("seq") if "seq" in names else 0
    if query.shape[axis] != key.shape[axis]:
        raise TensorError(
            "queries and keys must be of the same tokens, got "
            f"{query.shape[axis]} and {key.shape[axis]} on this rank; call autoattn.attention where keys are others"
        )
    if query.dtype is torch.float8_e4m3fn:
        raise TensorError("context_attention takes no float8_e4m3fn, got it; cast query, key and value to bfloat16")
    if 0 in (query.shape[0], query.shape[names.index("heads")]) and order is not Layout.PACKED:
        raise TensorError(f"a call over ranks must have a sequence and a head, got {tuple(query.shape)}; leave it out")


def _split(tokens: int, ranks: Ranks, sharding: str, offsets: tuple[int, ...] | None, seq_len: int | None) -> Split:
    """How the tokens of all ranks are divided, of which this one has some."""
    if offsets is not None:
        total = offsets[-1]
        if seq_len is not None:
            raise UsageError(f"seq_len must not be given with cu_seqlens, got {seq_len!r}; leave it out")
    else:
        total = ranks.size * tokens if seq_len is None else arguments.length_of("seq_len", seq_len)
    split = shards.split_of(ranks, sharding, offsets, total)
    if tokens != split.lengths[ranks.rank]:
        raise TensorError(
            f"rank {ranks.rank} must have {split.lengths[ranks.rank]} of {total} tokens on {ranks.size} ranks, got "
            f"{tokens}; divide them with autoattn.distributed.shard"
        )
    return split


def _rank_call(three: Sequence[Tensor], mask: Mask, split: Split, *, packed: bool, learns: bool) -> RankCall | None:
    """The call as `autoattn tune --ranks` would measure it; None in a dtype that it does not."""
    query, key, value = three
    if (dtype := DTYPE.get(query.dtype)) is None:
        return None
    return RankCall(
        dtype=dtype, heads_q=query.shape[-2], heads_kv=key.shape[-2], head_dim=query.shape[-1],
        head_dim_v=value.shape[-1], mask=mask, packed=packed, learns=learns, batch=1 if packed else query.shape[0],
        tokens=split.offsets[-1],
    )  # fmt: skip


def _method(
    method: str, reach: Reach, split: Split, ranks: Ranks, three: tuple[Tensor, ...], slopes: Tensor | None
) -> Method:
    """The caller's method, or the one that suits the call."""
    if not isinstance(method, str) or method not in ("auto", *Method):
        raise UsageError(f"method must be ring, allgather, ulysses or auto, got {method!r:.60}; correct it")
    in_order = split.sharding is not Sharding.STRIPE
    # A call on keys in order counts distances from the last key, which a causal call's last query stands at.
    slopes_by_gather = in_order and reach.right == 0
    if method == "auto":
        if slopes is not None:
            method = "allgather" if slopes_by_gather else "ulysses"
        else:
            method = "allgather" if reach.left is not None and in_order else "ring"
    chosen = Method(method)
    if chosen is Method.ULYSSES:
        ulysses.check_heads(three[0].shape[-2], three[1].shape[-2], ranks.size)
    elif slopes is not None and (chosen is Method.RING or not slopes_by_gather):
        raise UsageError(
            "alibi_slopes need method ulysses, or method allgather with a causal mask or window and another sharding "
            f"than stripe, got method {chosen.value} with {split.sharding.value}; change the method"
        )
    if slopes is not None and slopes.dim() > 1 and three[0].dim() == 3:
        raise TensorError(
            f"alibi_slopes must be [heads_q] for packed documents over ranks, got shape {tuple(slopes.shape)}; give "
            "all documents the same"
        )
    return chosen


def _computed(
    three: tuple[Tensor, Tensor, Tensor], kind: _Kind, ranks: Ranks, given: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Output and LSE of the rank's queries."""
    query, key, value = _tokens_first(three, kind.order)
    if kind.method is Method.ULYSSES:
        output, lse = ulysses.attend(query, key, value, kind.split, ranks, **given)
    else:
        slopes = given["alibi_slopes"]
        terms = kind.terms if slopes is None else replace(kind.terms, slopes=slopes)
        packed = kind.order is Layout.PACKED
        plan = ring.placed(kind.split, ranks.rank, kind.reach, kind.method, query.device, packed=packed)
        output, lse = ring.attend(query, key, value, given["sinks"], terms, ranks, plan)
    return output.transpose(1, 2) if kind.order is Layout.BHSD else output, lse


@lru_cache(maxsize=64)
def _tokens_in_words(split: Split) -> str:
    """The tokens of all ranks and their documents; long lists of these by a digest."""
    documents = len(split.offsets) - 1
    digest = hashlib.sha256(str(split.offsets).encode()).hexdigest()[:12]
    return f"{split.offsets[-1]} tokens in {documents} documents (digest {digest})"


def _shape(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
