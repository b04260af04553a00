"""Kernels on caches compile for Ampere and Hopper, with and without programs that share a tile."""

from __future__ import annotations

from typing import Any

import kernels
import pytest
from rarely import rarely
from samples import H200

from autoattn.codegen import render, search_space
from autoattn.core.key_cache import KeyCache
from autoattn.core.problem import DType, Layout, Problem
from autoattn.kernels import compiler

PACKED = {"layout": Layout.PACKED, "tokens_q": 66, "tokens_kv": 100}
AHEAD: dict[str, Any] = {
    "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, "PACK_GQA": 1, "first_block": "ahead", "parts_read": "at_once",
    "mask_loop": "every",
}  # fmt: skip
CASES: tuple[tuple[int, str, dict[str, Any], dict[str, Any]], ...] = (
    (90, "paged:16", {}, {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}),
    (90, "paged:64", {"mask": "window:9,3"}, {"BLOCK_N": 64, "SPLITS": 4, "PART_BLOCKS": 2, "num_stages": 3}),
    (90, "contiguous,rows,leftpad", PACKED | {"mask": "causal"}, {"BLOCK_N": 32, "PACK_GQA": 1, "SPLITS": 2}),
    (90, "paged:16", {"mask": "causal"}, {"PACK_GQA": 1, "SPLITS": 64, "SHARED_PROGRAMS": 512, "num_stages": 3}),
    (90, "contiguous,rows,leftpad", {"seq_q": 4, "mask": "causal"}, AHEAD | {"SPLITS": 4, "softmax": "lazy"}),
    (90, "paged:1,float8_e4m3", {"dtype": DType.BFLOAT16, "seq_q": 1}, AHEAD | {"SPLITS": 64}),
    (80, "paged:1", PACKED, {"PACK_GQA": 1, "num_stages": 3, "softmax": "first_max"}),
    (80, "paged:48", {"dtype": DType.BFLOAT16, "mask": "causal"}, {"PERSISTENT": 1, "mask_loop": "branch"}),
)


@pytest.mark.parametrize(("arch", "text", "facts", "changes"), rarely(CASES, lambda case: case in (CASES[1], CASES[4])))
def test_kernels_on_caches_compile(arch: int, text: str, facts: dict[str, Any], changes: dict[str, Any]) -> None:
    problem = kernels.problem(cache=KeyCache.parse(text), head_dim=64, **facts)
    compiled = compiler.build(kernels.source(problem, **changes), arch)
    if changes.get("num_stages") == 3:
        assert "cp.async" in compiled.asm["ptx"]


LATENT: tuple[tuple[int, str, dict[str, Any], dict[str, Any]], ...] = (
    (90, "paged:64,latent", {"seq_q": 4, "mask": "causal"}, {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8}),
    (
        90,
        "paged:16,latent",
        PACKED | {"seq_kv": 100, "mask": "causal"},
        {"BLOCK_N": 32, "SPLITS": 4, "mask_loop": "branch"},
    ),
    (90, "contiguous,latent,rows,leftpad", {"mask": "window:99,-1"}, {"BLOCK_N": 32, "softmax": "lazy"}),
    (80, "paged:64,latent", {"dtype": DType.FLOAT16}, {"BLOCK_N": 32, "SPLITS": 64, "SHARED_PROGRAMS": 256}),
    (80, "paged:1,latent", {}, {"BLOCK_N": 16, "PERSISTENT": 1}),
)


def latent(text: str, **facts: Any) -> Problem:
    """Multi-head latent attention of 16 heads, absorbed."""
    sizes = {"batch": 32, "heads_q": 16, "heads_kv": 1, "seq_q": 1, "seq_kv": 8192, "layout": Layout.BSHD}
    dims = {"dtype": DType.BFLOAT16, "head_dim": 576, "head_dim_v": 512}
    return kernels.problem(cache=KeyCache.parse(text), **sizes | dims | facts)


@pytest.mark.parametrize(("arch", "text", "facts", "changes"), LATENT)
def test_kernels_on_latents_read_each_block_once_and_ahead(
    arch: int, text: str, facts: dict[str, Any], changes: dict[str, Any]
) -> None:
    changes = {"num_warps": 4, "num_stages": 3, "PACK_GQA": 1, "HEAD_SPLIT": 1, **changes}
    report = compiler.inspect(kernels.source(latent(text, **facts), **changes), arch)
    copies = sum(count for opcode, count in report.loop.items() if opcode.startswith("LDGSTS"))
    # 16 bytes for a thread at a time, of 576 elements of each key
    assert copies == 576 * 2 * changes["BLOCK_N"] // (16 * 32 * changes["num_warps"])


@pytest.mark.parametrize("text", ["paged:64,latent", "contiguous,latent", "paged:64,float8_e4m3,latent"])
def test_defaults_for_few_rows_of_latents_keep_all_in_registers_and_shared_memory(text: str) -> None:
    problem = latent(text)
    default = search_space.load("triton/forward").default(problem, H200)
    report = compiler.inspect(render.render(problem, default), H200.arch)
    assert report.spilled_bytes == 0
    programs = 1 if problem.caches_float8 else 2  # on an SM
    assert programs * (report.shared_bytes + 1024) <= H200.shared_bytes_per_sm
    assert programs * report.registers * 32 * report.num_warps <= H200.registers_per_sm


def test_a_float8_latent_is_read_ahead_as_it_lies_and_converted_into_one_tile() -> None:
    problem = latent("paged:64,float8_e4m3,latent")
    source = kernels.source(problem, BLOCK_N=64, num_warps=8, num_stages=3, PACK_GQA=1, HEAD_SPLIT=1)
    report = compiler.inspect(source, 90)
    ahead, converted, queries = 2 * 64 * 576, 64 * 512 * 2, 16 * 576 * 2
    assert ahead + converted <= report.shared_bytes <= ahead + converted + queries + 2048
    assert any(opcode.startswith("LDGSTS") for opcode in report.loop)


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


@pytest.mark.parametrize("page", rarely(["contiguous", "paged:16", "paged:64"], lambda page: page == "paged:16"))
def test_a_first_block_is_asked_for_before_anything_is_waited_for_at_a_barrier(page: str) -> None:
    problem = kernels.problem(dtype=DType.BFLOAT16, head_dim=128, seq_q=1, cache=KeyCache.parse(page))
    ptx = compiler.build(kernels.source(problem, SPLITS=16, **AHEAD), 90).asm["ptx"]
    begin, _, _ = ptx.partition("bar.sync")
    of_keys_and_values = 2 * 64 * 128 * 2 // (4 * 32 * 16)  # by each thread, 16 bytes at once
    assert begin.count("ld.global.v4.b32") >= of_keys_and_values
