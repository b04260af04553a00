"""Calls on key caches whose lengths on the GPU are larger than the cache, or negative: a program for compute-sanitizer.

python lying_lengths.py honoured | planted

`planted` reads one element past the end of a tensor, which compute-sanitizer must report.
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
from torch import Tensor

import autoattn
from autoattn import functional

BATCH, PAGES, PAGE, HEADS, HEADS_KV, DIM = 4, 6, 16, 8, 2, 64
CAPACITY = PAGES * PAGE
LIES = (CAPACITY + 1, 10**6, 2**31 - 1, -5)  # the lengths of a batch


def numbers(*shape: int) -> Tensor:
    """Random numbers in a piece of memory of their own."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def whole(*shape: int) -> Tensor:
    """int32 numbers up to their count, [shape]."""
    return torch.arange(torch.Size(shape).numel(), device="cuda", dtype=torch.int32).view(shape)


def attend(queries: int) -> None:
    """Contiguous caches, pages and latents, with one and with several splits."""
    query, lengths = numbers(BATCH, queries, HEADS, DIM), torch.tensor(LIES, device="cuda", dtype=torch.int32)
    contiguous = [numbers(BATCH, CAPACITY, HEADS_KV, DIM) for _ in range(2)]
    pages, table = [numbers(BATCH * PAGES, PAGE, HEADS_KV, DIM) for _ in range(2)], whole(BATCH, PAGES)
    latents, heads = numbers(BATCH * PAGES, PAGE, 1, 576), numbers(BATCH, queries, 16, 576)
    for splits in (0, 3):
        autoattn.cached_attention(query, *contiguous, lengths, causal=True, splits=splits)
        autoattn.cached_attention(query, *pages, lengths, block_table=table, causal=True, splits=splits)
    autoattn.cached_attention(heads, latents, latents[..., :512], lengths, block_table=table, causal=True)


def attend_varlen() -> None:
    """FlashAttention's packed door with pages."""
    offsets = torch.tensor([0, 1, 4, 6, 7], device="cuda", dtype=torch.int32)
    key, value = (numbers(BATCH * PAGES, PAGE, HEADS_KV, DIM) for _ in range(2))
    lengths = torch.tensor(LIES, device="cuda", dtype=torch.int32)
    functional.flash_attn_varlen_func(
        numbers(7, HEADS, DIM), key, value, offsets, None, 3, CAPACITY, causal=True, block_table=whole(BATCH, PAGES),
        seqused_k=lengths,
    )  # fmt: skip


def append() -> None:
    """New keys behind such lengths, with rotary tables: nothing is written outside the cache."""
    lengths = torch.tensor(LIES, device="cuda", dtype=torch.int32)
    pages = [numbers(BATCH * PAGES, PAGE, HEADS_KV, DIM) for _ in range(2)]
    contiguous = [numbers(BATCH, CAPACITY, HEADS_KV, DIM) for _ in range(2)]
    new = [numbers(BATCH, 2, HEADS_KV, DIM) for _ in range(2)]
    rotary = {name: numbers(CAPACITY, DIM // 2) for name in ("rotary_cos", "rotary_sin")}
    for caches, words in ((contiguous, {}), (pages, {"block_table": whole(BATCH, PAGES)})):
        functional.flash_attn_with_kvcache(
            numbers(BATCH, 2, HEADS, DIM), *caches, *new, cache_seqlens=lengths, causal=True, **rotary, **words
        )


@triton.jit
def read_behind(source_ptr, target_ptr, COUNT: tl.constexpr):
    """Reads the elements from the last one of COUNT on."""
    tl.store(target_ptr, tl.load(source_ptr + COUNT + tl.program_id(0) * 1024))


def plant() -> None:
    """Reads behind a tensor of 512 bytes, the unit of PyTorch's allocations."""
    source, target = (torch.zeros(128, device="cuda") for _ in range(2))
    read_behind[(8,)](source, target, COUNT=128)


if __name__ == "__main__":
    if sys.argv[1] == "planted":
        plant()
    else:
        for queries in (1, 5):
            attend(queries)
        attend_varlen()
        append()
    torch.cuda.synchronize()
    print("done")
