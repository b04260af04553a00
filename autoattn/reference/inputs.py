"""Random operands for a problem: what the gate checks kernels on, and what the tuner times them on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from autoattn.core.call_arguments import NUMBERS
from autoattn.core.modifiers import Bias
from autoattn.core.problem import DType, Layout, Problem
from autoattn.errors import ProblemError
from autoattn.expressions import language
from autoattn.expressions.language import MASK_NAMES, SCORE_NAMES
from autoattn.reference import cache_inputs
from autoattn.reference.attention_formula import TORCH_DTYPE
from autoattn.tensors import block_table
from autoattn.tensors.operands import BlockTable, Operands

LOUD = 6.0  # a factor on queries
LOUD_RISE = 30.0  # what scores of LOUD times a normal number reach
STEEP_QUERY = 16.0  # one element of each query
STEEP_RISE = 240.0  # what it adds to the last key's score; e**89 overflows in float32
OUTGROWN = 1024.0  # a factor on the scale of scores
OUTGROWN_RISE = 5.0 * OUTGROWN  # what they reach
SINKS = 4  # keys at the begin of a sequence that trained-like queries look at
SINK_SCORE = 12.0  # what they add to each query's score there
CAPTURE_ELEMENTS = 2**28  # of one tensor that an expression reads


class Scores(str, Enum):
    """How scores are spread."""

    PLAIN = "plain"  # random normal queries and keys
    LOUD = "loud"  # row maxima move by more than 2**8 from block to block
    STEEP = "steep"  # they rise so far that weights around the first block's maximum overflow, even in float32
    TRAINED = "trained"  # as trained models have them: every query looks at the first keys, values have heavy tails
    OUTGROWN = "outgrown"  # so far apart that every maximum is outgrown by keys that come later, in whatever order
    WILD = "wild"  # the last key and its value are NaN, and two more values inf and -inf; of a latent, all are NaN


def make(
    problem: Problem,
    device: torch.device,
    generator: torch.Generator,
    *,
    scores: Scores = Scores.PLAIN,
    guard: int = 0,
    lengths: Sequence[tuple[int, int]] | None = None,
    sharing: tuple[bool, bool, bool, bool] = (True, False, False, False),
) -> Operands:
    """Random normal operands; behind each sequence stand `guard` rows of NaN.

    Args:
        lengths: (queries, keys) of each packed sequence, or of each sequence on a cache, which has all queries unless
            it is packed; those of the problem when None. What is left of the tokens is a tail that belongs to no
            sequence.
        sharing: which of batch, heads, queries and keys share a learned bias.
    """
    query = tensor(
        problem, problem.heads_q, problem.seq_q, problem.tokens_q, problem.head_dim, guard, device, generator
    )
    held = problem if problem.cache is None else cache_inputs.held_apart(problem)
    key = tensor(held, held.heads_kv, held.seq_kv, held.tokens_kv, problem.head_dim, guard, device, generator)
    if problem.is_latent:
        value = key[..., : held.head_dim_v]
    else:
        value = tensor(held, held.heads_kv, held.seq_kv, held.tokens_kv, held.head_dim_v, guard, device, generator)
    _spread(scores, query, key, value)
    if scores is Scores.TRAINED:
        _train(held, query, key, value, lengths, generator)
    cache = None
    if problem.cache is not None:
        keys = [keys for _, keys in lengths or problem.lengths()]
        key, value, cache = cache_inputs.scattered(problem.cache, key, value, keys, generator)
    modifiers, heads = problem.modifiers, problem.heads_q
    cu_seqlens_q, cu_seqlens_kv = (_cumulative(problem, lengths, place, device) for place in (0, 1))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def scale(there: bool) -> Tensor | None:
        """Another one at each call, so that a kernel which takes one for another is seen."""
        return normal(problem.batch, problem.heads_kv).abs() + 0.5 if there else None

    bias, narrow = _bias(problem, device, generator, sharing) if modifiers.bias is not Bias.NONE else (None, None)
    examples: dict[str, Any] = {
        number.name: number.example for number in NUMBERS if getattr(modifiers, number.modifier)
    }
    operands = Operands(
        query=query,
        key=key,
        value=value,
        scale=problem.head_dim**-0.5,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv if cache is None else None,
        cache=cache,
        query_scale=scale(problem.dtype is DType.FLOAT8),
        key_scale=scale(problem.loads_float8),
        value_scale=scale(problem.loads_float8),
        bias=bias,
        narrow_bias=narrow,
        slopes=(2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads)).expand(problem.batch, heads)
        if modifiers.alibi
        else None,
        sinks=normal(heads) if modifiers.sinks else None,
        **examples,
        seed=int(torch.randint(2**62, (1,), generator=generator)) if modifiers.dropout else 0,
        table=_table(problem, device, generator) if problem.mask.sparse else None,
        mask_captures=_captured(problem, problem.mask.mod, MASK_NAMES, device, generator),
        score_captures=_captured(problem, modifiers.score_mod, SCORE_NAMES, device, generator),
    )
    return _far_apart(operands) if scores is Scores.OUTGROWN else operands


def outgrown(operands: Operands) -> Operands:
    """The same values for scores that outgrow the maximum of whatever keys a tile begins with.

    Scores of normal tensors then have a spread of 1,024. A row's largest one lies above that of its first block by
    more than float32's exponents reach, 89, unless it is in that block: with as many rows as a tile has, one of them
    has its largest elsewhere, whether keys are walked from the first or from the last one, under every mask. Only
    tiles that see no other block than the first are spared.

    Queries and keys are those of `operands` in eighths. All products and sums of such numbers are exact in tensor
    cores too. Otherwise what tf32 cuts off would decide, at this spread, which of two near keys has a row.
    """
    query, key = _in_eighths(operands.query), _in_eighths(operands.key)
    value = key[..., : operands.value.shape[3]] if _are_latent(operands.key, operands.value) else operands.value
    return _far_apart(replace(operands, query=query, key=key, value=value))


def _far_apart(operands: Operands) -> Operands:
    return replace(operands, scale=operands.scale * OUTGROWN, softcap=operands.softcap * OUTGROWN)


def _are_latent(key: Tensor, value: Tensor) -> bool:
    """Whether values are the first elements of their keys, in the same memory."""
    return bool(value.data_ptr() == key.data_ptr())


def _in_eighths(tensor: Tensor) -> Tensor:
    """Multiples of 1/8: normal numbers then have 6 bits. Those of float8, which have 4, stay as they are."""
    return tensor if tensor.dtype is torch.float8_e4m3fn else (tensor * 8.0).round() / 8.0


def tensor(
    problem: Problem,
    heads: int,
    seq: int,
    tokens: int,
    head_dim: int,
    guard: int,
    device: torch.device,
    generator: torch.Generator | None,
    *,
    dtype: DType | None = None,
) -> Tensor:
    """A [batch, heads, seq, head_dim] view in the problem's layout, with `guard` rows of NaN behind every sequence.

    Filled with random normal numbers, or left NaN when there is no generator. Packed: [1, heads, tokens, head_dim],
    with the guard behind the last token.
    """
    kind = TORCH_DTYPE[dtype or problem.dtype]
    batch, rows = (1, tokens) if problem.packed else (problem.batch, seq)
    shape = (
        (batch, heads, rows + guard, head_dim)
        if problem.layout is Layout.BHSD
        else (batch, rows + guard, heads, head_dim)
    )
    room = torch.full(shape, math.nan, dtype=torch.float32 if kind is torch.float8_e4m3fn else kind, device=device)
    room = room if problem.layout is Layout.BHSD else room.transpose(1, 2)
    if generator is not None:
        seed = int(torch.randint(2**31, (1,), generator=generator))
        room[:, :, :rows].normal_(generator=torch.Generator(device=device).manual_seed(seed))
    return room.to(kind)[:, :, :rows]


def _spread(scores: Scores, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Changes random normal tensors in place, so that their scores are spread as asked."""
    if scores is Scores.LOUD:
        query.copy_((query.float() * LOUD).to(query.dtype))
    elif scores is Scores.STEEP:
        query[..., -1] = STEEP_QUERY
        last = STEEP_RISE / STEEP_QUERY * query.shape[3] ** 0.5
        key[..., -1] = torch.linspace(0.0, last, key.shape[2], device=key.device).to(key.dtype)
    elif scores is Scores.OUTGROWN:
        for tensor in (query, key):
            tensor.copy_(_in_eighths(tensor))
    elif scores is Scores.WILD:
        keys = key.shape[2]
        if _are_latent(key, value):  # where inf would be in the key too, and a score NaN
            value[:, :, -3:, ::3] = math.nan
            return
        for place, number in ((keys // 3, math.inf), (keys // 2, -math.inf), (keys - 1, math.nan)):
            value[:, :, place, ::3] = number
        key[:, :, -1] = math.nan


def _train(
    problem: Problem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[tuple[int, int]] | None,
    generator: torch.Generator,
) -> None:
    """Gives every query a common part, the first keys of each sequence its image, and the values a heavy tail.

    The sinks of trained models do the same to a softmax: a few keys hold most of the weight, and a maximum that is
    found in the first block rarely grows.
    """
    head_dim = query.shape[3]
    pull = SINK_SCORE**0.5 * head_dim**0.25  # of both sides, so that scaled products have SINK_SCORE
    common = torch.randn(head_dim, generator=generator).to(query.device)
    common *= pull / common.norm()
    query.copy_((query.float() + common).to(query.dtype))
    first = 0
    for _, keys in (lengths or problem.lengths()) if problem.packed else ((0, key.shape[2]),):
        sinks = key[:, :, first : first + min(SINKS, keys)]
        sinks.copy_((sinks.float() + common).to(key.dtype))
        first += keys
    if _are_latent(key, value):  # whose scores would have the tail too
        return
    seed = int(torch.randint(2**31, (1,), generator=generator))
    loud = torch.empty_like(value, dtype=torch.float32)
    loud.normal_(generator=torch.Generator(device=value.device).manual_seed(seed)).clamp_(-3.0, 3.0).exp_()
    value.copy_((value.float() * loud).to(value.dtype))


def _cumulative(
    problem: Problem, lengths: Sequence[tuple[int, int]] | None, place: int, device: torch.device
) -> Tensor | None:
    if not problem.packed:
        return None
    offsets = torch.tensor([0, *(pair[place] for pair in (lengths or problem.lengths()))])
    return offsets.cumsum(0).to(torch.int32).to(device)


def _bias(
    problem: Problem, device: torch.device, generator: torch.Generator, sharing: tuple[bool, bool, bool, bool]
) -> tuple[Tensor, Tensor | None]:
    """Alike for all heads, and for all sequences unless it is padding of keys, as biases mostly are; and one that is
    added before it is expanded. One that is learned is shared as asked, by default by all sequences alone.
    """
    full = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
    seed = torch.Generator(device=device).manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
    if problem.modifiers.bias is Bias.KEYS:
        kept = torch.rand(problem.batch, 1, 1, problem.seq_kv, generator=seed, device=device) < 0.8
        return kept.expand(problem.batch, problem.heads_q, 1, problem.seq_kv), None
    shape = (1, 1, *full[2:])
    if problem.modifiers.bias is Bias.LEARNED:
        batch, heads, queries, keys = (1 if shared else size for size, shared in zip(full, sharing, strict=True))
        shape = batch, heads, queries, keys
    numbers = torch.rand(shape, generator=seed, device=device)
    if problem.modifiers.bias is Bias.BOOLEAN:
        return (numbers < 0.8).expand(full), None
    numbers = torch.where(numbers < 0.2, -math.inf, 4.0 * numbers - 2.0)
    narrow = numbers.to(TORCH_DTYPE[problem.dtype.output])
    return narrow.expand(full), narrow


def _table(problem: Problem, device: torch.device, generator: torch.Generator) -> BlockTable:
    """Random blocks at the mask's density, alike for all heads; half are partial where the mask has an expression."""
    mask = problem.mask
    shape = (1, 1, -(-problem.seq_q // mask.block_q), -(-problem.seq_kv // mask.block_kv))
    kept = torch.rand(shape, generator=generator) < mask.density
    partial = torch.rand(shape, generator=generator) < 0.5 if mask.mod else None
    return block_table.table_of(
        kept.to(device),
        block_q=mask.block_q,
        block_kv=mask.block_kv,
        seq_kv=problem.seq_kv,
        partial=partial.to(device) if partial is not None else None,
    )


def _captured(
    problem: Problem, text: str, names: tuple[str, ...], device: torch.device, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Random numbers for what an expression reads, so many that any index of the problem is in range."""
    size = max(problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
    tensors = []
    for capture in language.parse(text, names).captures if text else ():
        if size**capture.axes > CAPTURE_ELEMENTS:
            raise ProblemError(
                f"an expression that is tuned may read {CAPTURE_ELEMENTS} elements, got {capture.axes} axes of {size}; "
                "tune a smaller problem"
            )
        numbers = torch.randn((size,) * capture.axes, generator=generator).to(device)
        kind: torch.dtype = getattr(torch, capture.dtype)
        tensors.append(numbers > 0 if kind is torch.bool else (4 * numbers).to(kind))
    return tuple(tensors)
