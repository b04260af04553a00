"""The backward template compiles, into the machine code that its text means; no GPU is needed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import gradient_kernels
import pytest
from rarely import rarely

from autoattn.codegen import render, search_space
from autoattn.core import device_profiles, triton_release
from autoattn.core.device import MatrixUnit
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Op, Precision, Problem
from autoattn.core.variant import Traits
from autoattn.errors import CompileError
from autoattn.kernels import manifest
from autoattn.kernels.compiler import build, inspect, load_module

BENT = "captured0: bfloat16[2]\nx = score * captured0[h, kv_idx]\nwhere(q_idx % 3 == b, x, 4 * tanh(x / 4))"
CARDS = {80: "a30", 90: "h200"}


def large(**changes: Any) -> Problem:
    facts = {"dtype": DType.BFLOAT16, "batch": 4, "heads_q": 16, "heads_kv": 16, "seq_q": 4096, "seq_kv": 4096}
    return Problem(**{**facts, "head_dim": 64, "op": Op.BACKWARD, **changes})  # type: ignore[arg-type]


SMALLEST: list[dict[str, Any]] = [
    {"mask": Mask.parse("window:40,9"), "modifiers": Modifiers(softcap=True, alibi=True), "head_dim_v": 40},
    {"dtype": DType.FLOAT32, "precision": Precision.TF32, "head_dim": 57},
    {"dtype": DType.FLOAT32, "mask": Mask.parse("causal:top-left")},
    {"mask": Mask.parse("causal"), "modifiers": Modifiers(sinks=True, dropout=True, bias=Bias.ADDITIVE)},
    {"mask": Mask.blocks(64, 32, 0.5, "captured0: bfloat16[2]\ncaptured0[h, q_idx] > 0.5"), "head_dim": 80},
    {"mask": Mask.parse("causal"), "modifiers": Modifiers(bias=Bias.LEARNED, softcap=True, sinks=True)},
    {"mask": Mask.blocks(64, 32, 0.5, "q_idx > kv_idx"), "modifiers": Modifiers(bias=Bias.LEARNED, dropout=True)},
    {"modifiers": Modifiers(score_mod=BENT, softcap=True), "mask": Mask.parse("window:40,9")},
    {"layout": Layout.PACKED, "tokens_q": 9999, "tokens_kv": 9999, "mask": Mask.parse("causal")},
    {"mask": Mask.parse("causal"), "modifiers": Modifiers(alibi=True, learned_slopes=True, sinks=True), "head_dim": 80},
    {
        "layout": Layout.PACKED,
        "tokens_q": 9999,
        "tokens_kv": 9999,
        "modifiers": Modifiers(alibi=True, learned_slopes=True),
    },
]
ON_HOPPER = 0, 4, 7  # in each run; with one warp Hopper gets the tensor cores' instructions of older cards


@pytest.mark.parametrize(
    ("arch", "place"),
    rarely(
        [(arch, place) for arch in CARDS for place in range(len(SMALLEST))],
        lambda case: case[0] == 80 or case[1] in ON_HOPPER,
    ),
)
def test_the_smallest_tiles_compile_on_each_card(arch: int, place: int) -> None:
    problem = large(**SMALLEST[place])
    source = gradient_kernels.source(problem, Traits(alignment=1, wide=True) if problem.head_dim == 57 else None)
    for name in manifest.of(load_module(source)).parts:
        compiled = build(source, arch, name)
        assert f".target sm_{arch}" in compiled.asm["ptx"]
        assert "atom." not in compiled.asm["ptx"]
        assert "red." not in compiled.asm["ptx"].replace("shared.", "")


@pytest.mark.parametrize("copies", rarely(["none", "turned"], lambda copies: copies == "turned"))
def test_no_step_turns_a_float32_factor_in_shared_memory_where_copies_were_turned_before(copies: str) -> None:
    problem = large(dtype=DType.FLOAT32, precision=Precision.TF32, head_dim=128, mask=Mask.parse("causal"))
    tiles = {"QUERIES_BLOCK_M": 64, "QUERIES_BLOCK_N": 32, "KEYS_BLOCK_N": 64, "KEYS_BLOCK_M": 32}
    launch = {f"{name}_{word}": n for name in ("queries", "keys") for word, n in (("num_warps", 4), ("num_stages", 2))}
    loop = inspect(
        gradient_kernels.source(problem, render.natural_traits(problem), copies=copies, **tiles, **launch), 90
    ).loop
    assert sum(count for name, count in loop.items() if name.startswith("HGMMA")) > 0
    stores = sum(count for name, count in loop.items() if name.startswith("STS"))
    assert (stores > 0) is (copies == "none")


@pytest.mark.slow
@pytest.mark.parametrize("mask", [Mask.parse("causal"), Mask.blocks(128, 128, 0.5, "q_idx >= kv_idx")], ids=str)
def test_hoppers_default_reads_by_the_tma_unit_and_keeps_its_loops_out_of_local_memory(mask: Mask) -> None:
    problem, device = large(head_dim=128, mask=mask), device_profiles.named("h200")
    source = render.render(problem, search_space.load(gradient_kernels.TEMPLATE).default(problem, device))
    report = inspect(source, 90)
    assert report.loop["UTMALDG.4D"] == 4, "a key and a value, a query and a gradient"
    assert report.loop["UTMALDG.1D"] == 2, "LSE and delta"
    # The kernel has all 255 registers that there are; what Triton 3.9 makes of it needs a few more.
    most, spilled = (12, 128) if triton_release.installed_release() == "3.9" else (4, 64)
    assert sum(count for name, count in report.loop.items() if name.startswith(("LDL", "STL"))) <= most
    assert report.spilled_bytes <= spilled


def test_a_report_of_both_kernels_names_the_most_that_either_needs() -> None:
    source = gradient_kernels.source(large(), KEYS_BLOCK_N=64, KEYS_BLOCK_M=32, keys_num_warps=4)
    report = inspect(source, 80)
    alone = [build(source, 80, name).metadata for name in manifest.of(load_module(source)).parts]
    assert report.num_warps == 4
    assert (
        report.shared_bytes >= max(metadata.shared for metadata in alone) > min(metadata.shared for metadata in alone)
    )


def test_what_has_no_gradient_kernel_is_refused_with_a_reason() -> None:
    device, points = device_profiles.named("h200"), search_space.load(gradient_kernels.TEMPLATE)
    least = gradient_kernels.variant()
    for changes, word in (
        ({"dtype": DType.FLOAT8}, "float8"),
        ({"dtype": DType.FLOAT32, "precision": Precision.TF32X3}, "ieee or tf32"),
    ):
        reason = points.why_infeasible(least, large(**changes), device)
        assert reason is not None
        assert word in reason


def test_a_score_mod_that_pytorch_cannot_differentiate_is_refused() -> None:
    problem = large(modifiers=Modifiers(score_mod="score // 2"))
    with pytest.raises(CompileError, match="must have a derivative in PyTorch, got // of a score"):
        gradient_kernels.source(problem)


def test_tiles_lie_within_a_block_of_the_table() -> None:
    device, points = device_profiles.named("h200"), search_space.load(gradient_kernels.TEMPLATE)
    problem = large(mask=Mask.blocks(16, 32, 0.5))
    assert points.default(problem, device) == gradient_kernels.variant()
    for tile, most in (("QUERIES_BLOCK_M", 16), ("QUERIES_BLOCK_N", 32), ("KEYS_BLOCK_N", 32), ("KEYS_BLOCK_M", 16)):
        for size in (16, 32, 64):
            reason = points.why_infeasible(gradient_kernels.variant(**{tile: size}), problem, device)
            assert (reason is None) is (size <= most), (tile, size, reason)
            assert reason is None or "block table" in reason or "block of the table" in reason


@pytest.mark.slow
def test_hoppers_default_beside_a_bias_keeps_its_loops_out_of_local_memory() -> None:
    problem, device = large(modifiers=Modifiers(bias=Bias.ADDITIVE)), device_profiles.named("h200")
    report = inspect(render.render(problem, search_space.load(gradient_kernels.TEMPLATE).default(problem, device)), 90)
    assert report.spilled_bytes == 0
    assert not [name for name in report.loop if name.startswith(("LDL", "STL"))]


@pytest.mark.slow
def test_backward_keys_loads_a_row_of_a_bias_that_queries_share_before_its_loop() -> None:
    problem, device = large(modifiers=Modifiers(bias=Bias.ADDITIVE)), device_profiles.named("h200")
    variant = search_space.load(gradient_kernels.TEMPLATE).default(problem, device)
    loads = []
    for shared in (False, True):
        source = render.render(problem, variant, replace(render.natural_traits(problem), bias_shared=shared))
        _, _, *loops = build(source, 90, "backward_keys").asm["ttgir"].split("scf.for")  # the first is over heads
        loads.append(sum(loop.split("scf.yield")[0].count("tt.load") for loop in loops))
    assert loads[0] > 0
    assert loads[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("card", ["h200", "a30"])
def test_the_default_of_a_learned_bias_keeps_its_loops_out_of_local_memory(card: str) -> None:
    problem, device = large(head_dim=64, modifiers=Modifiers(bias=Bias.LEARNED)), device_profiles.named(card)
    source = render.render(problem, search_space.load(gradient_kernels.TEMPLATE).default(problem, device))
    compiled = build(source, device.arch, "backward_bias")
    assert compiled.metadata.shared <= device.shared_bytes_per_block
    assert ".local" not in compiled.asm["ptx"]
    products = "wgmma" if device.capabilities.matrix_unit is MatrixUnit.WGMMA else "mma.sync"
    assert products in compiled.asm["ptx"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", [Precision.IEEE, Precision.TF32], ids=lambda precision: precision.value)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(160, 160), (256, 256), (64, 192), (128, 192), (192, 128)])
def test_hoppers_default_for_wide_heads_in_float32_compiles(
    head_dim: int, head_dim_v: int, precision: Precision
) -> None:
    causal = Mask.parse("causal")
    problem = large(dtype=DType.FLOAT32, precision=precision, head_dim=head_dim, head_dim_v=head_dim_v, mask=causal)
    device = device_profiles.named("h200")
    default = search_space.load(gradient_kernels.TEMPLATE).default(problem, device)
    assert inspect(render.render(problem, default), device.arch).shared_bytes <= device.shared_bytes_per_block


CARDS_AND_DIMS = [*itertools.product(["h200", "a30"], [64, 128])]


@pytest.mark.slow
@pytest.mark.parametrize(("card", "head_dim"), rarely(CARDS_AND_DIMS, lambda case: case == ("a30", 64)))
def test_the_gradient_of_slopes_moves_no_more_registers_to_memory(card: str, head_dim: int) -> None:
    device, mask = device_profiles.named(card), Mask.parse("causal")
    reports = []
    for learned in (False, True):
        problem = large(head_dim=head_dim, mask=mask, modifiers=Modifiers(alibi=True, learned_slopes=learned))
        source = render.render(problem, search_space.load(gradient_kernels.TEMPLATE).default(problem, device))
        reports.append(inspect(source, device.arch))
    assert reports[1].spilled_bytes <= reports[0].spilled_bytes
    assert reports[1].digest != reports[0].digest


def test_a_learned_bias_has_rules_of_its_own() -> None:
    device, points = device_profiles.named("h200"), search_space.load(gradient_kernels.TEMPLATE)
    tiles = {"QUERIES_BLOCK_M": 128, "QUERIES_BLOCK_N": 128, "queries_num_warps": 4, "queries_num_stages": 2}
    wide = gradient_kernels.variant(**tiles)
    assert points.why_infeasible(wide, large(modifiers=Modifiers(bias=Bias.ADDITIVE)), device) is None
    reason = points.why_infeasible(wide, large(modifiers=Modifiers(bias=Bias.LEARNED)), device)
    assert reason is not None
    assert "gradient of a bias" in reason


@pytest.mark.parametrize("card", ["h200", "a30"])
@pytest.mark.parametrize("head_dim", [1, 64, 80, 128, 256])
@pytest.mark.parametrize(
    "numbers", [(DType.FLOAT16, Precision.IEEE), (DType.FLOAT32, Precision.IEEE), (DType.FLOAT32, Precision.TF32)]
)
def test_every_head_dim_has_a_default(card: str, head_dim: int, numbers: tuple[DType, Precision]) -> None:
    problem = large(dtype=numbers[0], precision=numbers[1], head_dim=head_dim)
    points = search_space.load(gradient_kernels.TEMPLATE)
    assert (
        points.why_infeasible(
            points.default(problem, device_profiles.named(card)), problem, device_profiles.named(card)
        )
        is None
    )
