"""Random caches of keys and values: rows or pages in random order, with NaN wherever a kernel must not look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autoattn.core.key_cache import KeyCache
from autoattn.core.problem import MAX_HEAD_DIM, Layout, Problem
from autoattn.tensors.operands import CachedKeys

SPARE = 2  # rows or pages of NaN that no sequence has
MOST_PAD = 7  # keys of left padding


def held_apart(problem: Problem) -> Problem:
    """The problem whose keys and values are those of a cache's sequences, each in a row of its own.

    Keys of a latent cache may be longer than any problem without one allows; those have the most that it allows here.
    """
    head_dim = min(problem.head_dim, MAX_HEAD_DIM)
    return replace(
        problem, cache=None, key_lengths=None, layout=Layout.BSHD, tokens_q=0, tokens_kv=0, head_dim=head_dim
    )


def scattered(
    cache: KeyCache, key: Tensor, value: Tensor, counts: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, Tensor, CachedKeys]:
    """A cache that holds the first keys and values of each sequence.

    Args:
        key: [batch, heads_kv, seq_kv, head_dim]
        value: [batch, heads_kv, seq_kv, head_dim_v]; those of a cache of float8 are rounded to it, and those of a
            latent cache are the first elements of the keys.
        counts: keys of each sequence.

    Returns:
        key and value of the cache, as views with heads before keys, and where each sequence has its own.
    """
    if cache.float8:
        key, value = (tensor.to(torch.float8_e4m3fn) for tensor in (key, value))
    batch, _, most, _ = key.shape
    device = key.device
    pads = torch.zeros(batch, dtype=torch.int64)
    if cache.leftpad:
        pads = torch.randint(MOST_PAD + 1, (batch,), generator=generator)
    page = cache.page or most + (MOST_PAD if cache.leftpad else 0)
    columns = -(-most // page)
    rows, total = torch.arange(batch)[:, None], batch
    if cache.rows:
        total = batch + SPARE
        rows = torch.randperm(total, generator=generator)[:batch, None]
    elif cache.page:
        held = [-(-count // page) for count in counts]  # pages of each sequence
        total = sum(held) + SPARE
        *pages, spare = torch.randperm(total, generator=generator).split([*held, SPARE])
        rows = spare[:1].repeat(batch, columns)
        for sequence, own in enumerate(pages):
            rows[sequence, : len(own)] = own
    stored = (key,) if cache.latent else (key, value)
    rooms = [
        torch.full((total, page, *tensor.shape[1::2]), math.nan, dtype=tensor.dtype, device=device).transpose(1, 2)
        for tensor in stored
    ]
    for sequence, count in enumerate(counts):
        places = torch.arange(count) + pads[sequence]
        row, place = rows[sequence, places // page].to(device), (places % page).to(device)
        for room, tensor in zip(rooms, stored, strict=True):
            room[row, :, place] = tensor[sequence, :, :count].transpose(0, 1)
    lengths = torch.tensor(counts) + pads
    numbers = {
        "lengths": lengths,
        "pages": rows if cache.page else None,
        "rows": rows[:, 0] if cache.rows else None,
        "leftpad": pads if cache.leftpad else None,
    }
    tensors = {
        name: None if number is None else number.to(torch.int32).contiguous().to(device)
        for name, number in numbers.items()
    }
    lengths_there = tensors.pop("lengths")
    assert lengths_there is not None
    values = rooms[0][..., : value.shape[3]] if cache.latent else rooms[1]
    return rooms[0], values, CachedKeys(lengths=lengths_there, capacity=columns * page, **tensors)
