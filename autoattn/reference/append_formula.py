"""The reference of an append: plain PyTorch writes keys and values into a cache, rotated where that is asked."""

from __future__ import annotations

import torch
from torch import Tensor

from autoattn.tensors.appended import Append, Rotation

FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


def append(given: Append) -> tuple[Tensor | None, Tensor]:
    """Writes into the cache, in place.

    Returns:
        The rotated query as a [batch, heads_q, seq_q, head_dim] tensor, None without a rotation; and the lengths
        after the append, [batch] int32.
    """
    cache, rotation = given.cache, given.rotation
    batch, _, seq_new, _ = given.new_key.shape
    lengths = cache.lengths
    positions = lengths[:, None] + torch.arange(seq_new, device=lengths.device)  # [batch, seq_new]
    new_key = given.new_key
    if rotation is not None:
        new_key = rotated(new_key, positions, rotation)
    new_key, new_value = _stored(new_key, given.key_scale), _stored(given.new_value, given.value_scale)
    for sequence in range(batch):
        inside = (positions[sequence] >= 0) & (positions[sequence] < cache.capacity)
        places = positions[sequence][inside]
        if cache.pages is not None:
            page = given.key.shape[2]
            rows, places = cache.pages[sequence, places // page].long(), places % page
        else:
            rows = (
                torch.full_like(places, sequence) if cache.rows is None else cache.rows[sequence].expand(places.shape)
            )
        given.key[rows.long(), :, places] = new_key[sequence][:, inside].transpose(0, 1)
        if not given.latent:
            given.value[rows.long(), :, places] = new_value[sequence][:, inside].transpose(0, 1)
    query = None
    if rotation is not None:
        steps = torch.arange(rotation.query.shape[2], device=lengths.device) * int(rotation.moving)
        query = rotated(rotation.query, lengths[:, None].clamp_min(0) + steps, rotation)
    total = (lengths.clamp_max(cache.capacity) + seq_new).clamp(0, cache.capacity)
    return query, total.to(torch.int32)


def _stored(new: Tensor, scale: Tensor | None) -> Tensor:
    """New keys or values [batch, heads, seq, head_dim] as the cache stores them; in float8 too large ones saturate."""
    if scale is None:
        return new
    return (new.float() / scale[:, :, None, None]).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)


def rotated(tensor: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """A [batch, heads, seq, head_dim] tensor, rotated in float32 as its positions [batch, seq] say.

    Positions that the tables do not have, which only lengths that lie lead to, make the rotated elements 0.
    """
    rotary_dim, last = rotation.rotary_dim, rotation.cos.shape[0] - 1
    rows = positions.clamp(0, last).long()
    known = (positions == rows)[:, None, :, None]
    # [batch, 1, seq, pairs]
    cos, sin = (table[rows][:, None].float() * known for table in (rotation.cos, rotation.sin))
    turned = tensor[..., :rotary_dim].float()
    if rotation.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    pairs = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pairs, dim=-1).flatten(-2) if rotation.interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((turned.to(tensor.dtype), tensor[..., rotary_dim:]), dim=-1)
