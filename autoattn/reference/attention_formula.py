"""The reference: attention in eager PyTorch, independent of every kernel here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoattn.core.mask import Alignment
from autoattn.core.modifiers import Bias
from autoattn.core.problem import DType, Precision, Problem
from autoattn.expressions import language
from autoattn.expressions.language import MASK_NAMES, SCORE_NAMES
from autoattn.tensors.block_table import grid_of
from autoattn.tensors.operands import BlockTable, Operands

TORCH_DTYPE = {
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT32: torch.float32,
    DType.FLOAT8: torch.float8_e4m3fn,
}
FLOAT8_BOOST = 256.0  # weights of at most 1 are stored as float8 times this, to use more of its exponents
FUNCTIONS: dict[str, Callable[..., Any]] = {  # those of autoattn.expression
    **{name: getattr(torch, name) for name in (
        "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "sigmoid", "tanh",
    )},
    "where": torch.where,
    "minimum": lambda left, right: torch.minimum(*_tensors(left, right)),
    "maximum": lambda left, right: torch.maximum(*_tensors(left, right)),
    "to_float": lambda value: value.to(torch.float32) if value.dtype != torch.float64 else value,
    "to_int": lambda value: value.to(torch.int64),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where operands lie that were cut out of a call: what depends on sequence and head counts from there."""

    sequence: int = 0  # the call's, that is the first one here
    head: int = 0  # likewise a query head
    heads_q: int  # of the call


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """Queries of one sequence, and where the sequence lies; found once a call, since packed offsets lie on the GPU."""

    entry: int  # of the batch, that holds the sequence
    sequence: int
    origin: Origin
    inside: Tensor  # which of the rows that were asked for lie in the sequence
    positions: Tensor  # of those rows, counted from the sequence's first query
    first_q: int  # inside the entry
    seq_q: int
    first_kv: int
    seq_kv: int

    @property
    def keys(self) -> slice:
        """The sequence's keys inside the batch entry."""
        return slice(self.first_kv, self.first_kv + self.seq_kv)


def attention(
    problem: Problem, operands: Operands, *, dtype: torch.dtype = torch.float64, rows: Tensor | None = None,
    origin: Origin | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention and log-sum-exp, every step in `dtype`.

    Args:
        rows: [rows] query positions (tokens, when packed) to compute; all when None
        origin: of operands that are a part of a call; captured tensors are the call's

    Returns:
        output [batch, heads_q, rows, head_dim_v] and LSE [batch, heads_q, rows] in natural logarithms (batch is 1 when
        packed); a row that sees no key has output 0 and LSE -inf, unless it has a sink.
    """
    return _assembled(problem, operands, dtype, rows, origin)


def low_precision(
    problem: Problem, operands: Operands, *, rows: Tensor | None = None, origin: Origin | None = None
) -> Tensor:
    """The same maths with PyTorch in the tensors' own precision: the yardstick for an honest error."""
    if problem.dtype is DType.FLOAT8:
        exact = _assembled(problem, operands, torch.float32, rows, origin, float8=True)[0]
        return exact.to(TORCH_DTYPE[problem.dtype.output])
    if problem.precision is Precision.TF32:
        return _assembled(problem, operands, torch.float32, rows, origin, cut=True)[0]
    return attention(problem, operands, dtype=operands.query.dtype, rows=rows, origin=origin)[0]


def visible(problem: Problem, operands: Operands, positions: Tensor, sequence: int = 0) -> Tensor:
    """[1 or heads_q, rows, seq_kv] booleans: which keys of a sequence the query at each of its positions sees."""
    first_q, seq_q, first_kv, seq_kv = operands.spans()[sequence]
    place = Place(
        entry=0 if operands.cu_seqlens_q is not None else sequence, sequence=sequence,
        origin=Origin(heads_q=problem.heads_q), inside=first_q + positions, positions=positions,
        first_q=first_q, seq_q=seq_q, first_kv=first_kv, seq_kv=seq_kv,
    )  # fmt: skip
    return _visible(problem, operands, place)


def philox(seed: int, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """Random whole numbers below 2**32, as int64, of the counters (first, second, third, 0), which are broadcast.

    Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"); the first of four words.
    """
    word = 0xFFFFFFFF
    shape = torch.broadcast_shapes(first.shape, second.shape, third.shape)
    zero = torch.zeros(shape, dtype=torch.int64, device=first.device)
    counter = [first.long() + zero, second.long() + zero, third.long() + zero, zero]
    keys = [seed & word, seed >> 32 & word]
    for _ in range(10):
        low_0, high_0 = _product(0xD2511F53, counter[0])
        low_2, high_2 = _product(0xCD9E8D57, counter[2])
        counter = [high_2 ^ counter[1] ^ keys[0], low_2, high_0 ^ counter[3] ^ keys[1], low_0]
        keys = [(keys[0] + 0x9E3779B9) & word, (keys[1] + 0xBB67AE85) & word]
    return counter[0]


def cut_to_tf32(tensor: Tensor) -> Tensor:
    """float32 without the low 13 bits: what a tensor core sees of a float32 operand (PTX ISA, mma with .tf32).

    Its gradient is cut too, as an operand of the products of a backward pass.
    """
    cut: Tensor = _Cut.apply(tensor)
    return cut


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return cut_to_tf32(gradients[0])


def _product(factor: int, counter: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits of a product of 32-bit numbers, in int64 that would overflow if multiplied whole."""
    low, high = (factor & 0xFFFF) * counter, (factor >> 16) * counter
    middle = (low >> 16) + (high & 0xFFFF)
    return (low & 0xFFFF) | (middle & 0xFFFF) << 16, (high >> 16) + (middle >> 16)


def _assembled(
    problem: Problem, operands: Operands, dtype: torch.dtype, rows: Tensor | None, origin: Origin | None, **rough: bool
) -> tuple[Tensor, Tensor]:
    """Puts together the parts of each sequence and key head, one at a time to bound the memory."""
    query = operands.query
    if rows is None:
        rows = torch.arange(query.shape[2], device=query.device)
    batch, heads = query.shape[0], query.shape[1]
    output = torch.zeros(batch, heads, len(rows), operands.value.shape[3], dtype=dtype, device=query.device)
    lse = torch.full(output.shape[:3], -math.inf, dtype=dtype, device=query.device)
    for place in _places(operands, rows, origin or Origin(heads_q=problem.heads_q)):
        for head in range(problem.heads_kv):
            group = slice(head * problem.group_size, (head + 1) * problem.group_size)
            part_output, part_lse = _part(problem, operands, dtype, place, head, group, **rough)
            output[place.entry, group, place.inside] = part_output
            lse[place.entry, group, place.inside] = part_lse
    return output, lse


def _places(operands: Operands, rows: Tensor, origin: Origin) -> Iterator[Place]:
    """Each sequence that some of the rows lie in."""
    packed = operands.cu_seqlens_q is not None
    for sequence, (first_q, seq_q, first_kv, seq_kv) in enumerate(operands.spans()):
        inside = torch.nonzero((rows >= first_q) & (rows < first_q + seq_q))[:, 0]
        if len(inside):
            yield Place(
                entry=0 if packed else sequence, sequence=sequence, origin=origin, inside=inside,
                positions=rows[inside] - first_q, first_q=first_q, seq_q=seq_q, first_kv=first_kv, seq_kv=seq_kv,
            )  # fmt: skip


def _part(
    problem: Problem, operands: Operands, dtype: torch.dtype, place: Place, head: int, group: slice, *,
    cut: bool = False, float8: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [group, rows, head_dim_v] and LSE [group, rows] of one key head of one sequence.

    Args:
        group: the query heads that share the key head `head`.
        cut: form products as tensor cores do in tf32.
        float8: round the weights to float8 as a kernel does.
    """
    entry, positions = place.entry, place.positions
    query = _scaled(operands.query[entry, group, place.first_q + positions], operands.query_scale, place, head, dtype)
    key = _scaled(_keys_of(operands, operands.key, place, head), operands.key_scale, place, head, dtype)
    value = _scaled(_keys_of(operands, operands.value, place, head), operands.value_scale, place, head, dtype)
    if cut:  # queries lose the bits that they lose in a kernel, which scales scores
        query, key, value = (cut_to_tf32(tensor) for tensor in (query, key, value))
        scores = query @ key.transpose(0, 1) * operands.scale
    else:
        scores = (query * operands.scale) @ key.transpose(0, 1)
    scores = _modified(problem, operands, scores, place, group)
    seen = _visible(problem, operands, place)
    seen = seen[group] if seen.shape[0] > 1 else seen
    bias = operands.bias
    if bias is not None:
        bias = bias[entry, group][:, positions if bias.shape[2] > 1 else slice(None)]
        if problem.modifiers.bias in (Bias.ADDITIVE, Bias.LEARNED):
            scores = scores + bias.to(dtype)
        else:
            seen = seen & bias
    scores = scores.masked_fill(~seen, -math.inf)
    seen = scores != -math.inf  # a score_mod and a bias may hide too
    scores = scores.masked_fill(~seen, -math.inf)  # so that no gradient of a row without keys, which is NaN, gets past
    all_scores = scores
    if operands.sinks is not None:
        sink = operands.sinks[group].to(dtype)[:, None, None].expand(*scores.shape[:2], 1)
        all_scores = torch.cat((scores, sink), dim=2)
    lse = torch.logsumexp(all_scores, dim=-1)
    blind = (lse == -math.inf)[..., None]
    if float8:
        top = torch.nn.functional.pad(scores, (1, 0), value=-1e30).amax(2, keepdim=True)  # also without any key
        weights = (torch.exp(scores - top) * FLOAT8_BOOST).to(torch.float8_e4m3fn).to(dtype) / FLOAT8_BOOST
        weights = weights * torch.exp(top - lse[..., None])
    else:
        weights = torch.softmax(all_scores, dim=-1)[..., : scores.shape[2]]
    weights = weights.masked_fill(blind | ~seen, 0.0)
    if problem.modifiers.dropout:
        kept = _kept(problem, operands, place, group)
        weights = weights * kept / (1 - operands.dropout)
    # A key that a row does not see has no part in it, whatever stands in its value: 0 * NaN would be one.
    wild = ~torch.isfinite(value)
    output = weights.to(dtype) @ value.masked_fill(wild, 0.0)
    if bool(wild.any()):
        picked = torch.einsum("hmn,nd->hmd", seen.expand_as(weights).to(dtype), wild.to(dtype)) > 0
        output = torch.where(picked, _wild_sum(seen.expand_as(weights), value, dtype), output)
    return output, lse


def _keys_of(operands: Operands, tensor: Tensor, place: Place, head: int) -> Tensor:
    """[keys, head_dim] of one key head of a sequence, of its key or value."""
    if operands.cache is not None:
        return operands.cache.keys_of(tensor, place.sequence, head, place.keys)
    return tensor[place.entry, head, place.keys]


def _wild_sum(seen: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """inf, -inf or NaN: what the values that are no finite numbers add up to, for each row that sees any."""
    up, down = ((value == math.inf) | value.isnan()).to(dtype), ((value == -math.inf) | value.isnan()).to(dtype)
    ups, downs = (torch.einsum("hmn,nd->hmd", seen.to(dtype), part) > 0 for part in (up, down))
    zero = torch.zeros((), dtype=dtype, device=value.device)
    return torch.where(ups, math.inf, zero) + torch.where(downs, -math.inf, zero)


def _scaled(tensor: Tensor, scales: Tensor | None, place: Place, head: int, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if scales is None else tensor.to(dtype) * scales[place.sequence, head].to(dtype)


def _visible(problem: Problem, operands: Operands, place: Place) -> Tensor:
    """`visible` of a place's queries."""
    positions = place.positions
    keys = torch.arange(place.seq_kv, device=positions.device)
    first, last = problem.band(place.seq_q, place.seq_kv)
    seen = torch.ones(len(positions), place.seq_kv, dtype=torch.bool, device=positions.device)
    if first is not None:
        seen &= keys[None, :] >= positions[:, None] + first
    if last is not None:
        seen &= keys[None, :] <= positions[:, None] + last
    if operands.table is not None:
        return seen & _in_table(problem, operands, operands.table, place, keys)
    return seen[None]


def _modified(problem: Problem, operands: Operands, scores: Tensor, place: Place, group: slice) -> Tensor:
    """Scaled scores [group, rows, keys] after score_mod, softcap and ALiBi."""
    modifiers = problem.modifiers
    keys = torch.arange(place.seq_kv, device=scores.device)
    if modifiers.score_mod:
        names = _names(operands.score_captures, place, group, keys) | {"score": scores}
        answer = language.parse(modifiers.score_mod, SCORE_NAMES).evaluate(names, FUNCTIONS)
        scores = _tensor(answer, scores).to(scores.dtype).expand_as(scores)
    if modifiers.softcap:
        scores = operands.softcap * torch.tanh(scores / operands.softcap)
    if modifiers.alibi and operands.slopes is not None:
        shift = place.seq_kv - place.seq_q if problem.mask.alignment is Alignment.BOTTOM_RIGHT else 0
        distance = (place.positions[:, None] + shift - keys[None, :]).abs()
        scores = scores - operands.slopes[place.sequence, group].to(scores.dtype)[:, None, None] * distance
    return scores


def _names(captures: tuple[Tensor, ...], place: Place, group: slice, keys: Tensor) -> dict[str, Tensor]:
    """What an expression may ask, broadcast against [group, rows, keys]."""
    device, origin = keys.device, place.origin
    return {
        "b": torch.full((1, 1, 1), origin.sequence + place.sequence, device=device),
        "h": origin.head + torch.arange(group.start, group.stop, device=device)[:, None, None],
        "q_idx": place.positions[None, :, None],
        "kv_idx": keys[None, None, :],
        **{f"captured{place}": tensor for place, tensor in enumerate(captures)},
    }


def _in_table(problem: Problem, operands: Operands, table: BlockTable, place: Place, keys: Tensor) -> Tensor:
    """[1 or heads_q, rows, keys] booleans: pairs in a listed block, cut by the mask's expression if it is partial."""
    heads = slice(0, problem.heads_q)
    pairs = []
    for counts, listed in (
        (table.full_counts, table.full_blocks),
        (table.partial_counts, table.partial_blocks),
    ):
        entry = min(place.sequence, counts.shape[0] - 1)
        grid = grid_of(counts[entry], listed[entry], -(-len(keys) // table.block_kv)) > 0
        pairs.append(grid[:, place.positions // table.block_q][:, :, keys // table.block_kv])
    full, partial = pairs
    if problem.mask.mod:
        names = _names(operands.mask_captures, place, heads, keys)
        answer = language.parse(problem.mask.mod, MASK_NAMES).evaluate(names, FUNCTIONS)
        partial = partial & _tensor(answer, partial).bool()
    return full | partial


def _kept(problem: Problem, operands: Operands, place: Place, group: slice) -> Tensor:
    """[group, rows, keys] booleans: the weights that dropout leaves."""
    keys = torch.arange(place.seq_kv, device=place.positions.device)
    names = _names((), place, group, keys)
    row = names["h"] + names["b"] * place.origin.heads_q
    return philox(operands.seed, names["kv_idx"], names["q_idx"], row) >= drop_below(operands.dropout)


def drop_below(dropout: float) -> int:
    """Random words below this are dropped."""
    return min(int(dropout * 2**32), 2**32 - 1)


def _tensor(answer: Any, like: Tensor) -> Tensor:
    return answer if isinstance(answer, Tensor) else torch.tensor(answer, device=like.device)


def _tensors(left: Any, right: Any) -> tuple[Tensor, Tensor]:
    like = left if isinstance(left, Tensor) else right
    return _tensor(left, like), _tensor(right, like)
