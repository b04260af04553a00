"""Kernels on caches compile for Ampere and Hopper, with and without programs that share a tile."""

from __future__ import annotations

from typing import Any

import kernels
import pytest

from autoattn.core.key_cache import KeyCache
from autoattn.core.problem import DType, Layout
from autoattn.kernels import compiler

PACKED = {"layout": Layout.PACKED, "tokens_q": 66, "tokens_kv": 100}
CASES: tuple[tuple[int, str, dict[str, Any], dict[str, Any]], ...] = (
    (90, "paged:16", {}, {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}),
    (90, "paged:64", {"mask": "window:9,3"}, {"BLOCK_N": 64, "SPLITS": 4, "PART_BLOCKS": 2, "num_stages": 3}),
    (90, "contiguous,rows,leftpad", PACKED | {"mask": "causal"}, {"BLOCK_N": 32, "PACK_GQA": 1, "SPLITS": 2}),
    (90, "paged:16", {"mask": "causal"}, {"PACK_GQA": 1, "SPLITS": 64, "SHARED_PROGRAMS": 512, "num_stages": 3}),
    (80, "paged:1", PACKED, {"PACK_GQA": 1, "num_stages": 3, "softmax": "first_max"}),
    (80, "paged:48", {"dtype": DType.BFLOAT16, "mask": "causal"}, {"PERSISTENT": 1, "mask_loop": "branch"}),
)


@pytest.mark.parametrize(("arch", "text", "facts", "changes"), CASES)
def test_kernels_on_caches_compile(arch: int, text: str, facts: dict[str, Any], changes: dict[str, Any]) -> None:
    one = kernels.problem(cache=KeyCache.parse(text), head_dim=64, **facts)
    compiled = compiler.build(kernels.source(one, **changes), arch)
    if changes.get("num_stages") == 3:
        assert "cp.async" in compiled.asm["ptx"]


def test_reading_pages_ahead_keeps_as_many_blocks_in_flight_as_without_pages() -> None:
    shared = [
        compiler.build(
            kernels.source(
                kernels.problem(cache=KeyCache.parse(text), head_dim=64), BLOCK_N=64, num_warps=4, num_stages=3
            ),
            90,
        ).metadata.shared
        for text in ("contiguous", "paged:16", "paged:64")
    ]
    assert shared[0] == shared[1] == shared[2]
