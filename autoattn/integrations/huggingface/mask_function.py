"""The mask function that Transformers calls for `attn_implementation="autoattn"`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoattn.integrations.huggingface import mask_pattern
from autoattn.integrations.huggingface.mask_pattern import MaskPattern
from autoattn.integrations.huggingface.structured_mask import Packing, StructuredMask
from autoattn.integrations.once import warn_once

# Models whose layers add keys behind those of the mask, and columns of numbers to a mask that is a tensor.
LENGTHENED = ("deepseek_v4",)


def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | StructuredMask | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | StructuredMask | None:
    """Which keys a query sees, in the form that costs the kernels least.

    Args:
        q_length, kv_length: queries, and keys including unfilled slots of a static cache.
        q_offset, kv_offset: positions of the first query and key; a tensor for static caches.
        mask_function: (b, h, q_idx, kv_idx) -> bool; causal when None.
        attention_mask: [batch, tokens] bool, True for tokens that are no padding; or what an earlier call returned.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether None may be returned.
        others: `config` counts, of the model, and in a graph `local_size`, of the window or chunk.

    Returns:
        None where every query sees every key; a StructuredMask for several queries; a bool tensor
        [batch, 1, seq_q, seq_kv] for one query, for a pattern that is unknown, and for a caller that needs a tensor,
        of numbers for models of LENGTHENED.
    """
    # Dynamo of torch 2.11 loads no lazy module.
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    if isinstance(attention_mask, StructuredMask):
        return attention_mask
    function = causal_mask_function if mask_function is None else mask_function
    pairs: partial[Tensor] = partial(
        sdpa_mask, batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
        kv_offset=kv_offset, mask_function=function, attention_mask=attention_mask, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
    )  # fmt: skip
    config = others.get("config")
    if getattr(config, "model_type", "") in LENGTHENED:
        return eager_mask(**pairs.keywords, **others)
    shape = (batch_size, 1, q_length, kv_length)
    causal, may_skip = not allow_is_bidirectional_skip, allow_is_causal_skip or allow_is_bidirectional_skip
    if is_traced():
        local_size, chunk_size = others.get("local_size"), getattr(config, "attention_chunk_size", None)
        pattern = None if use_vmap else mask_pattern.infer(function, local_size, chunk_size, causal, may_skip)
        if pattern is not None and pattern.may_be_packed and attention_mask is None and q_length > 1:
            return StructuredMask(
                shape=shape, keys=kv_length, causal=True, window=pattern.window, padding=None, packing=None,
                packed=True, pairs=pairs,
            )  # fmt: skip
    elif (pattern := mask_pattern.read(function)) is None and q_length > 1:
        warn_once(
            "a mask of a pattern that autoattn does not know reaches its kernels as a tensor of all pairs; the numbers "
            "are the same"
        )
    if pattern is None or pattern.may_be_packed or (not may_skip and pattern.sequence_ids is None):
        return pairs()
    keys = filled_keys(pattern, q_length, kv_length, q_offset, kv_offset)
    if keys is None:
        return pairs()
    pattern = without_idle_parts(pattern, keys, kv_offset)
    padding = key_padding(attention_mask, kv_offset, keys)
    return _in_parts(pattern, shape, keys, q_offset, padding, pairs)


def _in_parts(
    pattern: MaskPattern, shape: tuple[int, int, int, int], keys: int, q_offset: int | Tensor, padding: Tensor | None,
    pairs: Callable[[], Tensor],
) -> Tensor | StructuredMask | None:  # fmt: skip
    """A mask of a known pattern, whose parts each hide some key.

    A causal one of several queries is never None: not every layer says `is_causal`, and some drop queries behind it.
    """
    batch, _, q_length, kv_length = shape
    parted = pattern.chunk > 0 or pattern.sequence_ids is not None
    plain = padding is None and pattern.window is None and not parted
    if plain and (not pattern.causal or (q_length == 1 and keys == kv_length)):
        return None
    packing = find_packing(pattern, batch, q_length, keys, q_offset, padding) if parted else None
    if q_length == 1 or (parted and packing is None):
        return pairs()
    return StructuredMask(
        shape=shape, keys=keys, causal=pattern.causal, window=pattern.window,
        padding=None if parted else padding, packing=packing, packed=parted, pairs=pairs,
    )  # fmt: skip


def is_traced() -> bool:
    """Whether a graph is recorded, so that no number on the device can be read."""
    return bool(torch.compiler.is_compiling() or torch.jit.is_tracing())


def filled_keys(
    pattern: MaskPattern, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int
) -> int | None:
    """How many keys are filled, where the last query stands at the last of them; None where nobody can say so.

    A pattern without positions sees all keys, wherever the queries stand.
    """
    if not pattern.causal and pattern.window is None and not pattern.chunk:
        return kv_length
    if isinstance(q_offset, Tensor):
        if is_traced():
            return None
        q_offset = int(q_offset)
    keys = q_offset + q_length - kv_offset
    if not pattern.causal and keys != kv_length:
        return None
    return keys if keys <= kv_length else None


def without_idle_parts(pattern: MaskPattern, keys: int, kv_offset: int) -> MaskPattern:
    """The pattern without a window or chunks that hide none of so many keys, the first of which is at `kv_offset`."""
    causal, window, chunk = pattern.causal, pattern.window, pattern.chunk
    if window is not None:
        left, right = window
        if causal:
            right = 0
        # With no bound on the right, as after sliding_window_overlay alone, only the left side can hide a key.
        window = None if keys - 1 <= left and (causal or right < 0 or keys - 1 <= right) else (left, right)
    if chunk and kv_offset + keys <= chunk:
        chunk = 0
    return MaskPattern(
        causal=causal, window=window, chunk=chunk, left_padding=pattern.left_padding if chunk else None,
        sequence_ids=pattern.sequence_ids, position_ids=pattern.position_ids,
    )  # fmt: skip


def key_padding(attention_mask: Tensor | None, kv_offset: int, keys: int) -> Tensor | None:
    """[batch, 1, 1, keys] bool, True for tokens; None where all are. Keys past the end of the mask are padding."""
    if attention_mask is None:
        return None
    seen = attention_mask[:, kv_offset : kv_offset + keys]
    if seen.shape[1] < keys:
        seen = torch.nn.functional.pad(seen, (0, keys - seen.shape[1]))
    if not is_traced() and bool(seen.all()):
        return None
    return seen[:, None, None, :]


def find_packing(
    pattern: MaskPattern, batch: int, q_length: int, keys: int, q_offset: int | Tensor, padding: Tensor | None
) -> Packing | None:
    """The sequences and chunks of a prompt as packed sequences; None where they are none.

    Chunks begin at the first token after the padding on the left, and a row's padding may follow its tokens: a causal
    mask hides what follows. The number of sequences is read from the device, once a mask.
    """
    if (
        is_traced()
        or q_length == 1
        or not pattern.causal
        or int(q_offset) != 0
        or keys != q_length
        or not _is_contiguous(padding)
    ):
        return None
    borders = None  # [batch, seq - 1]: whether a token begins another sequence than the one before it
    if pattern.sequence_ids is not None:
        borders = pattern.sequence_ids.diff(dim=1) != 0
    if pattern.chunk:
        borders = _chunk_borders(pattern, q_length) if borders is None else borders | _chunk_borders(pattern, q_length)
    assert borders is not None
    begins = torch.nn.functional.pad(borders.expand(batch, -1), (1, 0), value=True)  # each row begins one
    starts = begins.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(starts, (0, 1), value=batch * q_length).to(torch.int32)
    return Packing(offsets=offsets, longest=int(offsets.diff().max()))


def _chunk_borders(pattern: MaskPattern, q_length: int) -> Tensor:
    """[batch, seq - 1]: whether a token begins another chunk than the one before it."""
    assert pattern.left_padding is not None
    if pattern.position_ids is not None:
        places = pattern.position_ids
    else:
        places = torch.arange(q_length, device=pattern.left_padding.device)[None]
    return ((places - pattern.left_padding[:, None]) // pattern.chunk).diff(dim=1) != 0


def _is_contiguous(padding: Tensor | None) -> bool:
    """Whether no padding lies between the tokens of a row."""
    if padding is None:
        return True
    rows = padding[:, 0, 0].int()
    begins = (torch.nn.functional.pad(rows, (1, 0)).diff(dim=1) == 1).sum(1)
    return bool((begins <= 1).all())
