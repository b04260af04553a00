"""The template for latent caches on Hopper: which problems it takes, when calls run it, and its machine code."""

from __future__ import annotations

from typing import Any

import latent_kernels
import pytest
from latent_kernels import MLA, TEMPLATE
from rarely import diagonal, rarely
from samples import A30, H200

from autoattn.codegen import portfolio, render, search_space
from autoattn.core import triton_release
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import Layout, Problem
from autoattn.kernels import compiler

SIZES: dict[str, Any] = {"batch": 32, "seq_kv": 8192, "mask": "causal", **MLA}


def problem(text: str, **facts: Any) -> Problem:
    """Multi-head latent attention of 16 heads, absorbed."""
    return latent_kernels.problem(text, **SIZES | facts)


def why_not(problem: Problem, **changes: Any) -> str:
    """Why a variant is infeasible on an H200."""
    variant = latent_kernels.variant(**{"byte_stages": 2 if problem.caches_float8 else 1, **changes})
    return search_space.load(TEMPLATE).why_infeasible(variant, problem, H200) or ""


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (problem("paged:16,latent"), "from one page"),
        (problem("paged:48,latent"), "from one page"),
        (problem("paged:64,latent", modifiers=Modifiers(sinks=True)), "changes no scores"),
        (problem("paged:64,latent", modifiers=Modifiers(softcap=True)), "changes no scores"),
        (problem("paged:64,latent", mask="window:99,0"), "in front of a window"),
        (problem("paged:64,latent", layout=Layout.PACKED, tokens_q=40, tokens_kv=9999), "of one sequence"),
        (problem("paged:64", head_dim=96, head_dim_v=64), "latent caches alone"),
        (problem("paged:64,latent", head_dim=41, head_dim_v=32), "at least 32 columns"),
    ],
    ids=str,
)
def test_other_calls_are_left_to_triton_in_words(problem: Problem, words: str) -> None:
    assert words in why_not(problem)
    assert portfolio.default(problem, H200).template == "triton/forward"


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        ("paged:64,latent", {"BLOCK_N": 64, "num_stages": 3}, "shared memory of one block"),
        ("paged:64,latent", {"byte_stages": 2}, "only keys of 8 bits wait"),
        ("paged:64,latent", {"PART_BLOCKS": 2}, "only tiles that programs share"),
        ("paged:64,latent,splits=2", {"SPLITS": 4}, "how many programs may share"),
        ("paged:64,latent,splits=2", {"PERSISTENT": 1}, "would depend on its batch"),
        ("paged:64,latent,split_length=64", {"SPLITS": 4, "PART_BLOCKS": 2}, "how many keys a program has"),
        ("paged:64,latent", {"PERSISTENT": 1, "SPLITS": 2}, "where their shares of all keys end"),
        ("paged:64,latent", {"BLOCK_M": 16, "BLOCK_N": 32}, "has 64 rows, of keys"),
        ("paged:64,latent", {"BLOCK_M": 32, "BLOCK_N": 64}, "half of such a tile's rows"),
        ("paged:64,latent", {"BLOCK_M": 16, "BLOCK_N": 64}, ""),
        ("paged:64,float8_e4m3,latent", {"num_stages": 3}, ""),
    ],
)
def test_variants_are_refused_in_words(text: str, changes: dict[str, Any], words: str) -> None:
    reason = why_not(problem(text), **changes)
    assert words in reason
    assert bool(words) or not reason


def test_ampere_is_left_to_triton() -> None:
    points = search_space.load(TEMPLATE)
    assert "those of Hopper" in str(points.why_infeasible(latent_kernels.variant(), problem("paged:64,latent"), A30))


@pytest.mark.parametrize(
    ("text", "facts"),
    [("paged:64,latent", {}), ("paged:64,float8_e4m3,latent", {"seq_q": 4}), ("contiguous,latent", {"batch": 1})],
    ids=str,
)
def test_calls_that_nobody_tuned_run_it_on_hopper(text: str, facts: dict[str, Any]) -> None:
    assert portfolio.default(problem(text, **facts), H200).template == TEMPLATE


def test_calls_that_nobody_tuned_run_triton_forward_on_ampere() -> None:
    assert portfolio.default(problem("paged:64,latent"), A30).template == "triton/forward"


@pytest.mark.parametrize("text", ["paged:16,latent", "paged:64"])
def test_what_it_does_not_take_runs_triton_forward(text: str) -> None:
    dims = {} if "latent" in text else {"head_dim": 128, "head_dim_v": 128}
    assert portfolio.default(problem(text, **dims), H200).template == "triton/forward"


@pytest.mark.parametrize(
    ("text", "facts", "parts"),
    [
        ("paged:64,latent", {"batch": 8, "seq_kv": 16000}, (16, 16)),
        ("paged:64,latent", {"batch": 32, "seq_kv": 100_000}, (64, 32)),
        ("paged:64,latent", {"batch": 32, "seq_kv": 100_000, "seq_q": 4}, (64, 32)),
        ("paged:64,float8_e4m3,latent", {"batch": 8, "seq_kv": 16000}, (16, 16)),
        ("paged:64,float8_e4m3,latent", {"batch": 32, "seq_kv": 100_000}, (32, 16)),
    ],
    ids=str,
)
def test_a_search_tries_many_long_parts_behind_persistent_programs(
    text: str, facts: dict[str, Any], parts: tuple[int, int]
) -> None:
    seeds = search_space.load(TEMPLATE).seeds_for(problem(text, **facts), H200)
    assert seeds[0]["PERSISTENT"] == 1
    assert parts in [(seed["SPLITS"], seed["PART_BLOCKS"]) for seed in seeds]


DEFAULTS: tuple[tuple[str, dict[str, Any]], ...] = (  # of more than 16 rows, which fill tiles of 64
    ("paged:64,latent", {"seq_q": 2}),
    ("paged:64,latent", {"seq_q": 4}),
    ("paged:64,latent", {"batch": 1, "heads_q": 128, "seq_kv": 65536}),
    ("contiguous,latent", {"seq_q": 2}),
    ("paged:64,float8_e4m3,latent", {"seq_q": 4}),
)


@pytest.mark.parametrize(("text", "facts"), rarely(DEFAULTS, lambda case: case == DEFAULTS[-1]), ids=str)
def test_defaults_of_many_rows_keep_the_loop_in_registers_and_fill_the_shared_memory_of_one_program(
    text: str, facts: dict[str, Any]
) -> None:
    call = problem(text, **facts)
    default = search_space.load(TEMPLATE).default(call, H200)
    report = compiler.inspect(render.render(call, default), H200.arch)
    assert report.spilled_bytes <= (8 if triton_release.installed_release() == "3.6" else 40)  # outside of the loop
    assert not any(opcode.startswith(("LDL", "STL")) for opcode in report.loop)
    products = {opcode: count for opcode, count in report.loop.items() if opcode.startswith("HGMMA")}
    keys = 32 if call.caches_float8 else 64
    # [64, 576] x [576, keys], and [64, keys] x [keys, 256] from weights in registers
    assert sorted(products.values()) == sorted([576 // 16, keys // 16])
    assert H200.shared_bytes_per_block - 16 * 1024 < report.shared_bytes <= H200.shared_bytes_per_block


@pytest.mark.parametrize(("text", "rows"), diagonal(("paged:64,latent", "paged:64,float8_e4m3,latent"), (16, 32)))
def test_few_rows_are_the_columns_of_products(text: str, rows: int) -> None:
    call = problem(text, seq_q=rows // 16)
    stages = {"num_stages": 1, "byte_stages": 3} if call.caches_float8 else {}
    report = compiler.inspect(latent_kernels.source(call, BLOCK_M=rows, BLOCK_N=64, **stages), H200.arch)
    products = {opcode for opcode in report.loop if opcode.startswith("HGMMA")}
    assert {opcode.split(".")[1] for opcode in products} == {f"64x{rows}x16"}
    # [64, 576] x [576, rows], and four times [64, 64] x [64, rows]
    assert sum(report.loop[opcode] for opcode in products) == 576 // 16 + 4 * 4


def test_float8_becomes_float16_two_numbers_at_a_time() -> None:
    call = problem("paged:64,float8_e4m3,latent")
    source = latent_kernels.source(call, byte_stages=4)
    ptx = compiler.build(source, 90).asm["ptx"]
    assert ptx.count("cvt.rn.f16x2.e4m3x2") == 32 * 576 // 2 // 128
    assert "ELEMENT = gl.constexpr(gl.float16)" in source.text
