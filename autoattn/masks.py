"""Builders of sparse masks: from block tables, from functions, and from PyTorch's BlockMask.

A mask by function says for each pair (q_idx, kv_idx) whether it counts. Kernels skip blocks without such a pair,
compute blocks full of them as if there were no mask, and ask the function in the others alone (FlexAttention; Dong et
al. 2024, arXiv:2412.05496).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoattn.core.mask import Mask
from autoattn.errors import ProblemError, TensorError
from autoattn.expressions import captures, fx_tracing, language
from autoattn.expressions.captures import Traced
from autoattn.expressions.language import MASK_NAMES, SCORE_NAMES
from autoattn.reference import attention_formula
from autoattn.tensors import block_table
from autoattn.tensors.operands import BlockTable

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

CPU = torch.device("cpu")
BLOCK = 128  # queries and keys of a block, as PyTorch's create_block_mask has it

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # b, h, q_idx, kv_idx -> whether the pair counts
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # score, b, h, q_idx, kv_idx -> score
Rows = Sequence[Sequence[int]]  # the blocks of keys that each block of queries sees


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockSparse:
    """A sparse mask for sequences of one length, ready for `autoattn.attention`."""

    mask: Mask
    table: BlockTable
    captures: tuple[Tensor, ...]  # what the mask's expression reads, contiguous
    seq_q: int
    seq_kv: int


def from_table(
    kept: Tensor | Rows,
    *,
    block_size: int | tuple[int, int] = BLOCK,
    seq_q: int,
    seq_kv: int,
    device: torch.device = CPU,
) -> BlockSparse:
    """The pairs in listed blocks.

    Args:
        kept: [query blocks, key blocks] or [batch or 1, heads or 1, query blocks, key blocks] bool; or, for each block
            of queries, the numbers of the blocks of keys that it sees.
        block_size: queries and keys of a block (one number for both); powers of two from 16 to 4096.
        seq_q, seq_kv: queries and keys; the last blocks may hang over their ends.
        device: where the lists go when `kept` is no tensor.

    Raises:
        ProblemError: the block size is not supported.
        TensorError: the table has not one row for each block of queries, or names a block that is not there.
    """
    block_q, block_kv = _sizes(block_size)
    Mask.blocks(block_q, block_kv, 0.0)  # refuses sizes
    rows, columns = -(-seq_q // block_q), -(-seq_kv // block_kv)
    if not isinstance(kept, Tensor):
        kept = _grid_of_rows(kept, rows, columns).to(device)
    if kept.dtype is not torch.bool or kept.dim() not in (2, 4) or kept.shape[-2:] != (rows, columns):
        raise TensorError(
            f"a table must be bool, [{rows}, {columns}] or [batch, heads, {rows}, {columns}] for {seq_q} queries and "
            f"{seq_kv} keys in blocks of {block_q} by {block_kv}, got {kept.dtype} {tuple(kept.shape)}; correct it"
        )
    kept = kept.reshape(1, 1, rows, columns) if kept.dim() == 2 else kept
    return _block_sparse(kept, torch.zeros_like(kept), block_q, block_kv, seq_q, seq_kv)


def from_block_mask(block_mask: BlockMask) -> BlockSparse:
    """PyTorch's torch.nn.attention.flex_attention.BlockMask, converted once for each object.

    A full block that hangs over the end of the sequence becomes a partial one, where its function is asked.

    Raises:
        ProblemError: its block size is not supported, or its function is no arithmetic (expressions.fx_tracing).
        TensorError: its lists name a block twice, or one that is not there.
    """
    if block_mask in _converted:
        return _converted[block_mask]
    block_q, block_kv = block_mask.BLOCK_SIZE
    Mask.blocks(block_q, block_kv, 0.0)
    seq_q, seq_kv = block_mask.seq_lengths
    rows, columns = -(-seq_q // block_q), -(-seq_kv // block_kv)
    partial = _grid_of_theirs(block_mask.kv_num_blocks, block_mask.kv_indices, rows, columns)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None:
        full = _grid_of_theirs(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, rows, columns)
    if bool((full + partial > 1).any()):
        raise TensorError(
            "a block mask must list each block once, got one twice in a row; build it with create_block_mask"
        )
    device = block_mask.kv_num_blocks.device
    text, captured = fx_tracing.trace(block_mask.mask_mod, MASK_NAMES, device)
    text = "" if text == "True" else text  # PyTorch's noop_mask
    mask = _block_sparse(full + partial > 0, partial > 0, block_q, block_kv, seq_q, seq_kv, text, captured)
    _converted[block_mask] = mask
    return mask


_converted: weakref.WeakKeyDictionary[Any, BlockSparse] = weakref.WeakKeyDictionary()


def from_mod(
    mask_mod: MaskMod, *, batch: int = 1, heads: int = 1, seq_q: int, seq_kv: int, device: torch.device | str = CPU,
    block_size: int | tuple[int, int] = BLOCK,
) -> BlockSparse:  # fmt: skip
    """The pairs that a FlexAttention mask_mod keeps, by PyTorch's create_block_mask.

    Args:
        mask_mod: (b, h, q_idx, kv_idx), 0-d whole numbers -> a boolean, True keeps.
        batch, heads: how many the function tells apart; 1 where it does not ask b or h.
        block_size: powers of two from 16 to 4096.

    Raises:
        ProblemError: the function is no arithmetic (expressions.fx_tracing), or the block size is not supported.
    """
    from torch.nn.attention.flex_attention import create_block_mask  # pulls in torch._dynamo

    sizes = _sizes(block_size)
    Mask.blocks(*sizes, 0.0)
    device = torch.device(device)
    fx_tracing.trace(mask_mod, MASK_NAMES, device)  # says what is wrong before create_block_mask fails on it
    return from_block_mask(create_block_mask(mask_mod, batch, heads, seq_q, seq_kv, device=device, BLOCK_SIZE=sizes))


def document(ids: Tensor, *, causal: bool = False, block_size: int | tuple[int, int] = BLOCK) -> BlockSparse:
    """Pairs of the same document.

    Args:
        ids: [seq] or [batch, seq] int32 or int64: the document that each token belongs to.
        causal: hide keys behind the query.
    """
    if not isinstance(ids, Tensor) or ids.dim() not in (1, 2) or ids.dtype not in (torch.int32, torch.int64):
        raise TensorError(
            f"document ids must be an int32 or int64 tensor of [seq] or [batch, seq], got {_shape(ids)}; cast it"
        )
    ids = ids.reshape(-1, ids.shape[-1]).contiguous()
    batch, seq = ids.shape

    def same(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ids[b, q_idx] == ids[b, kv_idx]

    def same_of_one(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ids[0, q_idx] == ids[0, kv_idx]

    mod = same if batch > 1 else same_of_one
    return from_mod(
        _both(mod, _causal) if causal else mod,
        batch=batch,
        seq_q=seq,
        seq_kv=seq,
        device=ids.device,
        block_size=block_size,
    )


def prefix_lm(
    prefix: int | Tensor,
    seq_q: int,
    seq_kv: int,
    *,
    device: torch.device | str = CPU,
    block_size: int | tuple[int, int] = BLOCK,
) -> BlockSparse:
    """All of the first `prefix` keys, and behind them those up to the query's own position.

    Args:
        prefix: a number for all sequences, or [batch] int32 or int64, which also decides the device.
    """
    if isinstance(prefix, int) and not isinstance(prefix, bool):
        return from_mod(
            lambda b, h, q_idx, kv_idx: (kv_idx < prefix) | (q_idx >= kv_idx),
            seq_q=seq_q, seq_kv=seq_kv, device=device, block_size=block_size,
        )  # fmt: skip
    if not isinstance(prefix, Tensor) or prefix.dim() != 1 or prefix.dtype not in (torch.int32, torch.int64):
        raise TensorError(
            f"a prefix must be a whole number or an int32 or int64 tensor of [batch], got {_shape(prefix)}; cast it"
        )
    lengths, batch = prefix.contiguous(), len(prefix)

    def ahead(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < lengths[b if batch > 1 else 0]) | (q_idx >= kv_idx)

    return from_mod(ahead, batch=batch, seq_q=seq_q, seq_kv=seq_kv, device=prefix.device, block_size=block_size)


def dilated_window(
    left: int, right: int, rate: int, *, seq_q: int, seq_kv: int, device: torch.device | str = CPU,
    block_size: int | tuple[int, int] = BLOCK,
) -> BlockSparse:  # fmt: skip
    """Every `rate`-th key of those from q_idx - left to q_idx + right: Longformer's dilated sliding window (Beltagy et
    al. 2020, arXiv:2004.05150), as attention-gym's generate_dilated_sliding_window has it for left = right.
    """
    for name, number, least in (("left", left, 0), ("right", right, 0), ("rate", rate, 1)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ProblemError(
                f"{name} of a dilated window must be a whole number from {least}, got {number!r}; correct it"
            )

    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance <= left) & (distance >= -right) & (distance % rate == 0)

    return from_mod(near, seq_q=seq_q, seq_kv=seq_kv, device=device, block_size=block_size)


def score(score_mod: ScoreMod, *, device: torch.device | str = CPU) -> Traced:
    """A score_mod that is traced here instead of at each call, for the argument `score_mod` of `autoattn.attention`.

    torch.compile can take it whatever the function reads; where it is a function, it must not read tensors or numbers
    of its surroundings there. Numbers are those of now; tensors are read when the kernel runs.

    Args:
        score_mod: (score, b, h, q_idx, kv_idx) -> score, of 0-d tensors.
        device: of the tensors that it reads.

    Raises:
        ProblemError: the function is no arithmetic (autoattn.expressions.fx_tracing).
    """
    text, captured = fx_tracing.trace(score_mod, SCORE_NAMES, torch.device(device))
    return Traced(text=text, captures=captured)


def check(block_sparse: BlockSparse, *, batch: int, heads: int, seq_q: int, seq_kv: int, device: torch.device) -> None:
    """Checks that a mask is one for a call's sizes.

    Raises:
        TensorError: it is for other lengths or another device, or was built for fewer sequences or heads than it asks.
    """
    table = block_sparse.table.full_counts
    if (block_sparse.seq_q, block_sparse.seq_kv) != (seq_q, seq_kv) or table.device != device:
        raise TensorError(
            f"a sparse mask must be for the call's {seq_q} queries and {seq_kv} keys on {device}, got one for "
            f"{block_sparse.seq_q} and {block_sparse.seq_kv} on {table.device}; build it anew"
        )
    mod = block_sparse.mask.mod
    asks = language.parse(mod, MASK_NAMES).answer.asks if mod else frozenset()
    for axis, (name, have) in enumerate((("b", batch), ("h", heads))):
        if table.shape[axis] != have and (table.shape[axis] != 1 or name in asks):
            raise TensorError(
                f"a sparse mask must be built for the call's {have} values of {name}, or for one and not ask {name}, "
                f"got {table.shape[axis]}; build it with batch and heads of the call"
            )
    if mod:
        sizes = {"b": batch, "h": heads, "q_idx": seq_q, "kv_idx": seq_kv}
        captures.check(mod, MASK_NAMES, block_sparse.captures, sizes)


def to_dense(block_sparse: BlockSparse, *, batch: int = 1, heads: int = 1) -> Tensor:
    """[batch, heads, seq_q, seq_kv] bool: the pairs that count; for people and tests.

    Args:
        batch, heads: of the call, where the table is alike for all.
    """
    table, mask = block_sparse.table, block_sparse.mask
    seq_q, seq_kv = block_sparse.seq_q, block_sparse.seq_kv
    columns = -(-seq_kv // table.block_kv)
    full, partial = (
        (block_table.grid_of(counts, listed, columns) > 0)
        .repeat_interleave(table.block_q, 2)
        .repeat_interleave(table.block_kv, 3)[:, :, :seq_q, :seq_kv]
        for counts, listed in ((table.full_counts, table.full_blocks), (table.partial_counts, table.partial_blocks))
    )
    device = full.device
    batch, heads = max(batch, full.shape[0]), max(heads, full.shape[1])
    if mask.mod:
        names = {
            "b": torch.arange(batch, device=device)[:, None, None, None],
            "h": torch.arange(heads, device=device)[:, None, None],
            "q_idx": torch.arange(seq_q, device=device)[:, None],
            "kv_idx": torch.arange(seq_kv, device=device),
            **{f"captured{place}": tensor for place, tensor in enumerate(block_sparse.captures)},
        }
        partial = partial & language.parse(mask.mod, MASK_NAMES).evaluate(names, attention_formula.FUNCTIONS)
    return (full | partial).expand(batch, heads, seq_q, seq_kv)


def _block_sparse(
    kept: Tensor, partial: Tensor, block_q: int, block_kv: int, seq_q: int, seq_kv: int, mod: str = "",
    captured: tuple[Tensor, ...] = (),
) -> BlockSparse:  # fmt: skip
    """Lists and facts of tables of booleans, [batch or 1, heads or 1, query blocks, key blocks]."""
    density = float(kept.float().mean())
    return BlockSparse(
        mask=Mask.blocks(block_q, block_kv, density, mod),
        table=block_table.table_of(kept, block_q=block_q, block_kv=block_kv, seq_kv=seq_kv, partial=partial),
        captures=captured,
        seq_q=seq_q,
        seq_kv=seq_kv,
    )


def _sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
    if isinstance(block_size, int):
        return block_size, block_size
    if isinstance(block_size, Sequence) and len(block_size) == 2:
        return block_size[0], block_size[1]
    raise ProblemError(f"a block size must be one or two whole numbers, got {block_size!r}; correct it")


def _grid_of_rows(kept: Rows, rows: int, columns: int) -> Tensor:
    """[rows, columns] bool"""
    if len(kept) != rows:
        raise TensorError(
            f"a table must have a list for each of the {rows} blocks of queries, got {len(kept)}; correct it"
        )
    grid = torch.zeros(rows, columns, dtype=torch.bool)
    for row, listed in enumerate(kept):
        for block in listed:
            if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < columns:
                raise TensorError(
                    f"blocks of keys must be numbers from 0 to {columns - 1}, got {block!r} in row {row}; correct it"
                )
            grid[row, block] = True
    return grid


def _grid_of_theirs(counts: Tensor, listed: Tensor, rows: int, columns: int) -> Tensor:
    """[batch or 1, heads or 1, rows, columns] int32: how often a row's list names a column; refuses lists of others."""
    counts, listed = counts[:, :, :rows], listed[:, :, :rows]
    there = torch.arange(listed.shape[3], device=listed.device) < counts[..., None]
    outside = there & ((listed < 0) | (listed >= columns))
    if counts.shape[2] < rows or bool(outside.any()) or bool((counts < 0).any() | (counts > listed.shape[3]).any()):
        raise TensorError(
            f"a block mask must list blocks from 0 to {columns - 1} for each of {rows} blocks of queries, got others; "
            "build it with create_block_mask for these lengths"
        )
    return block_table.grid_of(counts, listed, columns)


def _causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def _both(left: MaskMod, right: MaskMod) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: left(b, h, q_idx, kv_idx) & right(b, h, q_idx, kv_idx)


def _shape(captured: Any) -> str:
    return f"{captured.dtype} {tuple(captured.shape)}" if isinstance(captured, Tensor) else repr(captured)[:80]
