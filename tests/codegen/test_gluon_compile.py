"""The Gluon family compiles for Hopper, and its rules and its machine code say what it cannot do; no GPU is needed."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import fake_device
import kernels
import pytest
import torch
from gluon_kernels import H200, TEMPLATE, Spy, problem, source, variant
from rarely import rarely

from autoattn.codegen import render, search_space
from autoattn.core import device_profiles, triton_release
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Layout, Problem
from autoattn.core.variant import Source, Traits, Value, Variant
from autoattn.errors import CompileError
from autoattn.kernels import compiler, forward
from autoattn.kernels.compiler import Kernel, build, inspect, load_module
from autoattn.kernels.gluon_interpreter import module_loader
from autoattn.reference import inputs
from autoattn.runtime.plan import cache_lookup

pytestmark = [pytest.mark.usefixtures("nothing_compiled_before"), pytest.mark.sampled]

ALIKE = "captured0: int32[1]\n(captured0[q_idx] == captured0[kv_idx]) & (q_idx // 8 >= kv_idx // 8)"
SLOPES = "captured0: float32[1]\nscore - captured0[h] * abs(q_idx - kv_idx)"  # a number a head
TABLE = "captured0: float32[2]\nscore + captured0[h, q_idx - kv_idx]"  # a number a pair
ORDER = "HEAD_GROUP"  # of the tiles, which no loop knows of
KINDS: tuple[tuple[dict[str, Any], Traits], ...] = (
    ({"head_dim": 128}, Traits()),
    ({"head_dim": 128, "mask": "causal"}, Traits()),
    ({"head_dim": 64, "mask": "causal:top-left", "dtype": DType.FLOAT16}, Traits()),
    ({"head_dim": 56, "mask": "window:1024,0"}, Traits()),
    ({"head_dim": 80, "mask": "window:600,64", "dtype": DType.FLOAT16}, Traits(lse=True)),
    ({"head_dim": 256, "mask": "causal"}, Traits(lse=True)),
    ({"head_dim": 192, "head_dim_v": 128, "mask": "window:-1,30"}, Traits(lse=True)),
    ({"head_dim": 16}, Traits(wide=True)),
    ({"head_dim": 128, "layout": Layout.PACKED}, Traits()),
    ({"head_dim": 72, "mask": "causal", "layout": Layout.PACKED, "dtype": DType.FLOAT16}, Traits(lse=True)),
    ({"head_dim": 64, "mask": "window:600,64", "layout": Layout.PACKED}, Traits(lse=True)),
    ({"head_dim": 128, "mask": "blocks:128x128,0.5"}, Traits(lse=True)),
    ({"head_dim": 64, "mask": Mask.blocks(256, 64, 0.5, ALIKE)}, Traits()),
    ({"head_dim": 80, "mask": Mask.blocks(128, 64, 0.5, ALIKE)}, Traits(lse=True)),
    ({"head_dim": 192, "mask": "blocks:64x64,0.5"}, Traits(lse=True)),
)


def device(name: str) -> Device:
    return device_profiles.named(name)


# --- what compiles ----------------------------------------------------------------------------------------------------


def test_every_barrier_that_is_made_keeps_its_room_to_the_end_of_the_kernel() -> None:
    # Triton gives the room of a barrier that nobody uses any more to other data. Shared memory where a barrier was made
    # must hold nothing else before it is dropped (PTX, mbarrier.init): the card lost tiles when it switched processes.
    # A program of one tile need not drop what it would drop before it computes that tile again.
    for softmax in ("online", "vote", "first_max"):
        for schedule in ("one_tile", "dynamic"):
            call = problem(head_dim=128, mask="causal")
            output: dict[str, Any] = {"query_stages": 1} | (
                {"output_buffer": "shared"} if schedule == "one_tile" else {}
            )
            text = source(call, softmax=softmax, schedule=schedule, slot_release="named", **output).text
            initialised = set(re.findall(r"mbarrier\.init\(([a-z_]+)", text))
            dropped = set(re.findall(r"mbarrier\.invalidate\(([a-z_]+)", text))
            assert initialised == dropped
            assert len(initialised) == (8 if schedule == "dynamic" else 6)
            # Of a program of one tile, behind its first roles; of others, behind the last ones.
            place = text.index if schedule == "one_tile" else text.rindex
            assert "    drop_barriers(" in text[place("gl.warp_specialize(") :]


def test_a_program_of_one_tile_that_computes_nothing_again_drops_its_barriers_last() -> None:
    text = source(
        problem(head_dim=128), softmax="online", schedule="one_tile", slot_release="named", query_stages=1,
        output_buffer="shared",
    ).text  # fmt: skip
    assert "consume_again" not in text
    assert "    drop_barriers(" in text[text.index("gl.warp_specialize(") :]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "traits"), rarely(KINDS[::2], lambda kind: kind in KINDS[2::8]), ids=str)
def test_a_feasible_variant_compiles(kind: dict[str, Any], traits: Traits) -> None:
    call = problem(**kind)
    points = search_space.load(TEMPLATE)
    chosen = next(points.feasible(call, H200, random.Random(str(kind))))
    rendered = render.render(call, chosen, traits)
    compiled = build(rendered, 90)
    assert "cp.async.bulk.tensor.4d.shared" in compiled.asm["ptx"], chosen
    assert "wgmma.mma_async" in compiled.asm["ptx"], chosen
    assert compiled.metadata.shared <= H200.shared_bytes_per_block, chosen


EARLY = 4  # seeds of a kind; the others are refused too, if they are
FIRST, OTHERS = slice(0, 1), slice(1, None)
OFTEN = (1,)  # kinds whose first seed each run compiles


@cache
def early_seeds() -> tuple[tuple[Variant, ...], ...]:
    """Of each kind the seed that is tried first, and of the next few those that no kind before it has."""
    seeds_by_kind: list[tuple[Variant, ...]] = []
    known: set[tuple[tuple[str, Value], ...]] = set()
    for kind, _ in KINDS:
        tried = search_space.load(TEMPLATE).seeds_for(problem(**kind), H200)[:EARLY]
        loops = {tuple(pair for pair in seed.params if pair[0] != ORDER): seed for seed in reversed(tried)}
        seeds_by_kind.append(tuple(seed for loop, seed in loops.items() if seed is tried[0] or loop not in known))
        known |= set(loops)
    return tuple(seeds_by_kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "place"),
    rarely(
        [*itertools.product(("first", "others"), range(len(KINDS)))],
        lambda case: case[0] == "first" and case[1] in OFTEN,
    ),
)
@pytest.mark.exhaustive
def test_no_seed_that_is_tried_early_is_serialised_or_spills_in_its_loop(place: int, part: str) -> None:
    kind, traits = KINDS[place]
    seeds = early_seeds()[place][FIRST if part == "first" else OTHERS]
    if not seeds:
        pytest.skip("the seeds behind its first are those of kinds before it")
    for seed in seeds:
        assert inspect(render.render(problem(**kind), seed, traits), 90).loop, seed


@pytest.mark.exhaustive
def test_a_causal_mask_costs_the_loop_over_whole_blocks_nothing() -> None:
    """Weights that two loops carry would be unpacked and packed again in each step."""
    free, causal = (inspect(source(problem(head_dim=128, mask=mask)), 90).loop for mask in ("full", "causal"))
    assert abs(sum(free.values()) - sum(causal.values())) < 16
    assert causal.get("PRMT", 0) < 8


@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_loop_over_whole_blocks_costs_packed_sequences_nothing(mask: str) -> None:
    plain = inspect(source(problem(head_dim=128, mask=mask)), 90).loop
    loop = inspect(source(problem(head_dim=128, mask=mask, layout=Layout.PACKED)), 90).loop
    assert abs(sum(loop.values()) - sum(plain.values())) < 16
    assert loop["BAR"] == plain["BAR"]


@pytest.mark.exhaustive
def test_a_kept_maximum_takes_the_maxima_out_of_the_loop() -> None:
    kept, online = (
        inspect(source(problem(head_dim=128), softmax=softmax), 90).loop for softmax in ("first_max", "online")
    )
    assert "FMNMX" not in kept
    assert online["FMNMX"] >= 64


@pytest.mark.exhaustive
def test_the_loop_that_adds_values_key_by_key_is_not_taken_for_one_that_masks() -> None:
    report = inspect(source(problem(head_dim=128, mask="causal"), softmax="vote"), 90)
    assert not [name for name in (*report.loop, *report.masked_loop) if name.startswith("LDG")]
    assert sum(report.masked_loop.values()) < 3 * sum(report.loop.values())


@pytest.mark.slow
@pytest.mark.exhaustive
def test_changed_scores_stay_in_registers() -> None:
    call = problem(head_dim=64, mask="causal", modifiers=Modifiers(softcap=True, alibi=True, sinks=True))
    report = inspect(source(call), 90)
    assert not [name for name in report.loop if name.startswith(("LDL", "STL"))]
    assert report.loop["MUFU.TANH"] == 32, "one a pair"


SCORE_MODS = (  # and the instructions of a loop that a pair takes at most; without a score_mod they are 5
    ("score + 0.01 * (kv_idx - q_idx)", 8),
    ("captured0: int32[1]\nwhere(captured0[q_idx] == captured0[kv_idx], score, -inf)", 14),
    ("20.0 * tanh(score / 20.0)", 13),
    (TABLE, 21),
    (SLOPES, 10),  # beside which the maximum moves
)


IDS = ["positions", "documents", "tanh", "table", "slopes"]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "most"), rarely(SCORE_MODS, lambda case: case[0] == TABLE), ids=IDS)
@pytest.mark.exhaustive
def test_scores_that_a_caller_changes_stay_in_registers(text: str, most: int) -> None:
    call = problem(head_dim=128, mask="causal", modifiers=Modifiers(score_mod=text))
    seed = search_space.load(TEMPLATE).seeds_for(call, H200)[0]
    loop = inspect(render.render(call, seed, Traits(lse=True)), 90).loop
    assert not [name for name in loop if name.startswith(("LDL", "STL"))]
    assert not (text == SLOPES and [name for name in loop if name.startswith("LDG")]), "read once a tile"
    assert sum(loop.values()) <= most * 64 * int(seed["BLOCK_N"]) // 128


# --- what is refused --------------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Value]]] = {
    "16 and 8 bits": ({"dtype": DType.FLOAT32}, {}),
    "multiple of 16 bytes": ({"head_dim": 57}, {}),
    "256 columns": ({"head_dim_v": 512}, {}),
    "sees all that its tile sees": ({"mask": "causal"}, {"BLOCK_M": 64, "mask_loop": "split_own", "ping_pong": "none"}),
    "one row of the block table": ({"mask": "blocks:64x128,0.5"}, {"BLOCK_M": 128}),
    "a step's keys": ({"mask": "blocks:128x64,0.5"}, {"BLOCK_N": 128}),
    "first whole block": ({"mask": "blocks:128x128,0.5"}, {"softmax": "first_max", "overlap": 0}),
    "and drops no weights": ({"modifiers": Modifiers(dropout=True)}, {}),
    "two registers": ({"modifiers": Modifiers(score_mod=TABLE)}, {}),
    "room for few keys": (
        {"modifiers": Modifiers(score_mod=TABLE), "head_dim": 256},
        {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 1, "query_stages": 1, "ping_pong": "none"},
    ),
    "far below others": ({"modifiers": Modifiers(alibi=True)}, {"softmax": "first_max"}),
    "slopes of either sign": ({"modifiers": Modifiers(score_mod=SLOPES), "mask": "causal"}, {"softmax": "first_max"}),
    "sin and cos": ({"modifiers": Modifiers(score_mod="sin(score)")}, {}),
    "not tried with float8": ({"modifiers": Modifiers(softcap=True), "dtype": DType.FLOAT8}, {}),
    "each head has scores changed": ({"modifiers": Modifiers(sinks=True)}, {"PACK_GQA": 4}),
    "registers": ({}, {"BLOCK_M": 192, "num_stages": 1, "query_stages": 1, "output_buffer": "shared"}),
    "shared memory": ({"head_dim": 256}, {"BLOCK_N": 64, "query_stages": 2}),
    "named barriers": ({}, {"num_stages": 4, "query_stages": 1, "BLOCK_N": 32, "BLOCK_M": 192}),
    "in a loop of their own": ({"mask": "causal"}, {"mask_loop": "branch"}),
    "with one slot": ({}, {"num_stages": 1, "v_wait": "early"}),
    "in whose shadow": ({}, {"softmax": "vote", "overlap": 0}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused_in_words(words: str) -> None:
    facts, params = REFUSED[words]
    chosen = variant(problem(head_dim=128), **{"ping_pong": "named", **params})
    reason = search_space.load(TEMPLATE).why_infeasible(chosen, problem(**{"head_dim": 128, **facts}), H200)
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize("name", ["a30", "l4", "b200"])
def test_other_architectures_are_refused(name: str) -> None:
    reason = search_space.load(TEMPLATE).why_infeasible(
        variant(problem(head_dim=64)), problem(head_dim=64), device(name)
    )
    assert reason is not None
    assert "Hopper" in reason


def test_rows_that_are_not_aligned_are_refused_before_they_are_rendered() -> None:
    with pytest.raises(CompileError, match="multiples of 16 bytes, got tensors where only 8 divide"):
        source(problem(head_dim=64), Traits(alignment=4))


@pytest.mark.exhaustive
def test_serialised_products_are_a_compile_error() -> None:
    crowded = source(
        problem(head_dim=128), BLOCK_M=192, query_stages=1, output_buffer="shared", num_stages=1, softmax="online"
    )
    with pytest.raises(CompileError, match="ptxas serialised its 16 warpgroup products a block"):
        inspect(crowded, 90)


def test_what_ptxas_refuses_is_quoted_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    large: dict[str, Any] = {"BLOCK_M": 192, "BLOCK_N": 256, "num_stages": 1, "query_stages": 1}
    with pytest.raises(CompileError, match="Insufficient registers"):
        build(source(problem(head_dim=16), softmax="online", **large), 90)
    assert capsys.readouterr().out == ""


def test_on_the_cpu_it_is_loaded_for_the_interpreter_of_gluon() -> None:
    kernel = compiler.load(source(problem(head_dim=64)), torch.device("cpu"))
    assert isinstance(kernel.module, module_loader.InterpretedModule)
    assert kernel.compiled is None


# --- the file and its launch ------------------------------------------------------------------------------------------


def launched(problem: Problem, rendered: Source, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(grid, arguments by name) of each launch."""
    fake_device.set_context(monkeypatch)
    calls: list[Any] = []
    module = load_module(rendered)
    facts: dict[str, Any] = {"source": rendered, "module": module, "device": torch.device("cpu"), "sm_count": 2}
    operands = inputs.make(problem, device=torch.device("cpu"), generator=torch.Generator().manual_seed(0))
    output = forward.empty_output(problem, operands.query)
    forward.launch(Kernel(compiled=Spy("main", calls), **facts), problem, operands, output, None)
    return [(grid, dict(zip(module.SIGNATURE, values, strict=True))) for _, grid, values in calls]


SMALL: dict[str, Any] = {"dtype": DType.FLOAT16, "batch": 1, "heads_q": 4, "heads_kv": 2, "seq_q": 200, "seq_kv": 300}


def test_a_launch_describes_its_tensors_and_brings_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    call = kernels.problem(**SMALL, head_dim=72, mask=Mask.parse("causal"), layout=Layout.BSHD)
    rendered = source(problem(head_dim=72, mask="causal"), BLOCK_M=128, schedule="dynamic")
    ((grid, given),) = launched(call, rendered, monkeypatch)
    assert grid == (2, 1, 1)
    described = given["query_low"]
    assert given["query_high"] == described, "one tensor, read in two boxes"
    assert given["key_low"] == given["key_high"] != described
    assert described.shape == (1, 4, 200, 72)
    assert described.strides[1:] == (72, 4 * 72, 1)
    assert all(step % 8 == 0 for step in described.strides[:-1])
    scratch = given["scratch_ptr"]
    assert scratch.dtype == torch.int32
    assert scratch.tolist() == [0] * (2 + 3 * 4 * 2), "counters, and of each tile whether it was wrong, and links"


def test_each_launch_has_its_own_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    call = kernels.problem(**SMALL, head_dim=64)
    rendered = source(problem(head_dim=64), softmax="online")
    (one_launch,), (other,) = (launched(call, rendered, monkeypatch) for _ in range(2))
    assert one_launch[1]["scratch_ptr"].numel() == 2, "only the counters of tiles and of programs"
    assert one_launch[1]["scratch_ptr"] is not other[1]["scratch_ptr"]


def test_a_kernel_that_cannot_go_wrong_is_launched_without_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[str, Any] = {"BLOCK_M": 128, "schedule": "one_tile", "query_stages": 1, "output_buffer": "shared"}
    rendered = source(problem(head_dim=64), softmax="online", **chosen)
    assert "scratch" not in load_module(rendered).SIGNATURE
    ((grid, _),) = launched(kernels.problem(**SMALL, head_dim=64), rendered, monkeypatch)
    assert grid == (4 * 2, 1, 1)


def test_a_packed_launch_needs_no_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    call = kernels.problem(**SMALL, head_dim=64, layout=Layout.PACKED, tokens_q=500, tokens_kv=600, mask="causal")
    call = replace(call, batch=3)
    rendered = source(problem(head_dim=64, mask="causal", layout=Layout.PACKED), BLOCK_M=128, schedule="one_tile")
    ((grid, arguments),) = launched(call, rendered, monkeypatch)
    tiles = 4 * (500 // 128 + 3 + 1)
    assert grid == (tiles, 1, 1)
    assert arguments["scratch_ptr"].numel() >= 2 + tiles
    assert arguments["cu_seqlens_q_ptr"].tolist() == [0, *torch.tensor(call.lengths()).cumsum(0)[:, 0]]
    assert arguments["output_ptr"].shape == (1, 4, 500, 64)
    assert arguments["query"].shape == (1, 4, 500, 64)
    assert (arguments["tokens_q"], arguments["tokens_kv"], arguments["batch"]) == (500, 600, 3)


@pytest.mark.parametrize(("mask", "passes"), [("window:128,0", 2), ("causal", 1), ("window:128,-1", 1)])
def test_consumers_that_take_their_own_blocks_pass_over_the_others(mask: str, passes: int) -> None:
    own = source(problem(head_dim=64, mask=mask), BLOCK_M=128, mask_loop="split_own").text
    assert own.count("slot, phase = pass_over(") == passes
    assert "pass_over" not in source(problem(head_dim=64, mask=mask), BLOCK_M=128, mask_loop="split").text


def test_files_stand_alone_and_have_short_lines() -> None:
    for kind, traits in KINDS:
        lines = source(problem(**kind), traits).text.splitlines()
        assert not [line for line in lines if line.startswith(("import autoattn", "from autoattn"))]
        assert [line for line in lines if line != line.rstrip()] == []
        assert max(map(len, lines)) <= render.MAX_LINE, kind


@pytest.mark.parametrize(
    ("installed", "serves"), [("3.6.0", True), ("3.9.1", True), ("3.60.0", False), ("3.12.0", False)]
)
@pytest.mark.usefixtures("no_portfolio")
def test_the_template_is_for_the_releases_of_triton_that_its_space_names(
    installed: str, serves: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(triton_release, "installed", lambda: installed)
    points, call = search_space.load(TEMPLATE), kernels.problem(head_dim=128, seq_q=4096, seq_kv=4096)
    assert bool(points.seeds_for(call, H200)) is serves
    assert (next(points.feasible(call, H200), None) is not None) is serves
    explanation = cache_lookup.explain(call, H200, tmp_path)
    assert explanation.variant is not None
    assert explanation.variant.template == (TEMPLATE if serves else "triton/forward")
    said = [
        step
        for step in explanation.steps
        if f"written for Triton 3.6, 3.7, 3.8 or 3.9, whose language moves, and this is {installed}" in step
    ]
    assert bool(said) is not serves
