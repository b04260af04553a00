"""Rendered Gluon kernels in their interpreter: they agree with the reference, and planted faults are found."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from typing import Any

import gluon_kernels
import gluon_texts
import hopper_gradients
import pytest
import torch
from gluon_texts import CPU, planted, said, source
from rarely import rarely

from autoattn.codegen import render, search_space
from autoattn.core import triton_release
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Layout, Problem
from autoattn.core.variant import Source
from autoattn.errors import AutoattnError
from autoattn.kernels import compiler
from autoattn.reference.inputs import Scores
from autoattn.validation import gradient_check

pytestmark = pytest.mark.interpreter

Case = tuple[dict[str, Any], dict[str, Any]]
SHARED: dict[str, Any] = {"output_buffer": "shared", "query_stages": 1}
MOD = "captured0: int32[1]\ncaptured0[q_idx] % 5 >= kv_idx % 3"
CASES: list[Case] = [
    ({}, {"schedule": "one_tile", "BLOCK_M": 192, "ping_pong": "named", "overlap": 1, "softmax": "vote", **SHARED}),
    ({"mask": "causal"}, {"schedule": "persistent", "ping_pong": "mbarrier", "slot_release": "mbarrier"}),
    ({"mask": "window:40,9"}, {"mask_loop": "branch_own", "overlap": 0, "softmax": "online", "row_sum": "each"}),
    ({"mask": "causal:top-left", "head_dim": 80}, {"HEAD_SPLIT": 1, "BLOCK_N": 80, "overlap": 1, "software_exp2": 4}),
    ({"mask": "window:40,0", "layout": Layout.PACKED}, {"softmax": "lazy", "software_exp2": 2, "mask_loop": "split"}),
    ({"dtype": DType.FLOAT8}, {"softmax": "lazy", "CTAS": 2, "BLOCK_M": 64}),
    ({"mask": "blocks:128x64,0.5"}, {"softmax": "online", "v_wait": "early"}),
    ({"mask": Mask.blocks(64, 32, 0.5, MOD)}, {"BLOCK_M": 64, "softmax": "first_max", "overlap": 1}),
    ({"dtype": DType.FLOAT16, "head_dim": 56}, {"PACK_GQA": 2, "queries_in": "registers", "overlap": 1}),
    ({"head_dim": 192, "head_dim_v": 128}, {"HEAD_SPLIT": 1, "softmax": "first_max", **SHARED}),
    ({"mask": "blocks:128x64,0.5", "head_dim": 80}, {"HEAD_SPLIT": 1, "softmax": "first_max", "overlap": 1}),
    ({"mask": "blocks:64x64,0.5", "head_dim": 72}, {"HEAD_SPLIT": 2, "softmax": "vote", "BLOCK_M": 64, "overlap": 1}),
    ({"mask": Mask.blocks(64, 32, 0.5, MOD), "head_dim": 192, "head_dim_v": 128},
     {"HEAD_SPLIT": 1, "BLOCK_M": 64, "softmax": "online", "overlap": 0, **SHARED}),
]  # fmt: skip
BASE: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 32, "num_stages": 2}
# Of a walk over many blocks; each has kinds of barriers of its own.
PIPELINE: dict[str, Any] = {
    **BASE, "overlap": 1, "softmax": "online", "ping_pong": "named", "slot_release": "mbarrier", "schedule": "dynamic",
}  # fmt: skip
NAMED: dict[str, Any] = {**BASE, "overlap": 0, "softmax": "online", "slot_release": "named", "ping_pong": "none"}


def make_problem(**changes: Any) -> Problem:
    return gluon_kernels.problem(**{"head_dim": 64, **changes})


@pytest.mark.parametrize(("facts", "chosen"), rarely(CASES, lambda case: CASES.index(case) not in (3, 6, 8, 9, 11, 12)))
def test_kernels_agree_with_the_reference(facts: dict[str, Any], chosen: dict[str, Any]) -> None:
    problem = make_problem(**facts)
    assert said(source(problem, lse=True, **{**BASE, **chosen}), problem) == ""


@pytest.mark.parametrize("scores", [Scores.OUTGROWN, Scores.WILD])
@pytest.mark.parametrize(
    ("facts", "chosen"),
    [
        ({"mask": "causal"}, {}),
        ({"mask": "blocks:128x32,0.5", "head_dim": 80}, {"HEAD_SPLIT": 1, "ping_pong": "none"}),
        ({"mask": "causal"}, {"schedule": "one_tile", "ping_pong": "mbarrier", "overlap": 0, **SHARED}),
        ({"mask": "causal"}, {"schedule": "one_tile", "BLOCK_M": 64, "ping_pong": "none", **SHARED}),
    ],
    ids=["causal", "a block table, head dim in pieces", "programs of a tile", "programs of a tile, one consumer"],
)
def test_tiles_are_computed_again(facts: dict[str, Any], chosen: dict[str, Any], scores: Scores) -> None:
    problem = make_problem(**facts)
    rendered = source(problem, **{**BASE, "softmax": "first_max", "overlap": 1, "schedule": "dynamic", **chosen})
    assert said(rendered, problem, (33, 200), scores) == ""
    unknown = planted(rendered, "        wild = ", "        wild = gl.nothing")
    assert "has no nothing" in said(unknown, problem, (33, 200), scores)


def test_a_program_of_a_tile_hears_of_wrong_rows_from_each_consumer() -> None:
    problem = make_problem(mask="causal")
    chosen = {**BASE, **SHARED, "schedule": "one_tile", "softmax": "first_max", "overlap": 1, "ping_pong": "none"}
    rendered = source(problem, **chosen)
    assert [rendered.text.count(f"recompute.index({c}).load(") for c in range(3)] == [1, 1, 0]
    deaf = planted(rendered, "    if wrong == 1:", "    if wrong == 2:")
    assert "outputs are NaN or never written" in said(deaf, problem, (100, 104), Scores.WILD)


@pytest.mark.parametrize("release", triton_release.SUPPORTED)
def test_the_names_of_each_release_are_known(release: str) -> None:
    problem = make_problem()
    assert (
        said(render.render(problem, gluon_kernels.variant(problem, **BASE), release=release), problem, (17, 34)) == ""
    )
    problem = hopper_gradients.problem(head_dim=64)
    assert judged(render.render(problem, hopper_gradients.variant(problem), release=release), problem, (17, 34)) == ""


@pytest.mark.parametrize("programs", [1, 3])
def test_programs_share_the_tiles(programs: int) -> None:
    problem = make_problem()
    for schedule in ("persistent", "dynamic"):
        assert said(source(problem, **{**BASE, "schedule": schedule}), problem, sm_count=programs) == ""


# Of a rendered text: what, in its place, which occurrence, how the sentence begins.
FAULTS: list[tuple[dict[str, Any], str, str, int, str]] = [
    (PIPELINE, "mbarrier.wait(query_full.index(query_place), query_phase)", "pass", 0, "missed barrier at queries"),
    (PIPELINE, "mbarrier.wait(key_full.index(slot), phase, pred=block > begin)", "pass", 0, "missed barrier at keys"),
    (PIPELINE, "mbarrier.wait(value_full.index(value_slot), value_phase)",
     "mbarrier.wait(value_full.index(value_slot), value_phase ^ 1)", 0, "missed barrier at values"),
    (PIPELINE, "    free_key(key_free, slot)\n", "", 0, "deadlock: "),
    (PIPELINE, "mbarrier.arrive(value_free.index(slot), count=1)", "pass", 0, "deadlock: "),
    (PIPELINE, "mbarrier.wait(key_free.index(slot), phase)", "mbarrier.wait(key_free.index(slot), phase ^ 1)", 0,
     "deadlock: "),
    (PIPELINE, "num_outstanding=1, deps=(score_token,)", "num_outstanding=2, deps=(score_token,)", 0,
     "the result of the product of "),
    (PIPELINE, "mbarrier.init(value_free.index(place), count=CONSUMERS)",
     "mbarrier.init(value_free.index(place), count=1)", 0, ""),
    (PIPELINE, "    fence_async_shared()\n", "", 0, "missed fence at outputs"),
    (PIPELINE, "    tma.store_wait(pendings=0)\n", "", 0, "missed barrier at outputs"),
    (PIPELINE, "mbarrier.wait(next_full, turn & 1)", "pass", 0, "missed barrier at next_tile"),
    (PIPELINE, "    pass_turn(c)\n", "", 0, "deadlock: "),
    (PIPELINE, "key.block_type.nbytes", "key.block_type.nbytes * 2", 0, "deadlock: "),
    (PIPELINE, "    mbarrier.invalidate(next_full)\n", "    mbarrier.invalidate(next_full)\n" * 2, 0, "forward "),
    (NAMED, "bar.sync $1, 288", "bar.sync $1, 160", 0, ""),
    (NAMED, "wait_free_value(value_free, gl.to_tensor(free), phase)", "pass", 0, "consume(0), consume(1) came to "),
    (NAMED, "    wait_free_key(key_free, slot, phase)\n", "", 0, ""),
    (NAMED, "row_max - new_max", "new_max - row_max", 0, "bf16 "),
    (NAMED, "o_n[None, :] < seq_kv", "o_n[None, :] < seq_kv + 64", 0, "bf16 "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "right", "wrong", "place", "sentence"), rarely(FAULTS, lambda fault: FAULTS.index(fault) not in (4, 12))
)
def test_a_planted_fault_is_found(chosen: dict[str, Any], right: str, wrong: str, place: int, sentence: str) -> None:
    problem = make_problem()
    rendered = source(problem, **chosen)
    reason = said(planted(rendered, right, wrong, place=place), problem)
    assert reason != ""
    assert reason.startswith(sentence)
    assert reason.count("\n") == 0


def test_a_slot_that_is_released_too_early_is_found() -> None:
    problem = make_problem()
    rendered = source(problem, **PIPELINE)
    wait = next(line for line in rendered.text.splitlines() if "num_outstanding=1" in line)
    early = planted(rendered, f"{wait}\n    free_key(key_free, slot)\n", f"    free_key(key_free, slot)\n{wait}\n")
    assert said(early, problem).startswith("missed barrier at keys")


def test_consumers_may_clear_the_same_rows_and_must_fence_them() -> None:
    problem = make_problem(layout=Layout.PACKED)
    rendered = source(problem, **NAMED)
    assert said(rendered, problem) == ""
    unfenced = planted(rendered, "    fence_async_shared()\n", "")
    assert said(unfenced, problem).startswith("missed fence at values")
    apart = planted(rendered, f"    {render_barrier(rendered)}()  # of this warpgroup", "    # of this warpgroup")
    assert said(apart, problem).startswith("missed barrier at values")


def render_barrier(rendered: Source) -> str:
    """What this release of Triton calls the barrier of a partition."""
    return "gl.thread_barrier" if "gl.thread_barrier" in rendered.text else "gl.barrier"


def test_a_deadlock_names_each_partition_and_its_barrier() -> None:
    problem = make_problem()
    reason = said(
        planted(source(problem, **PIPELINE), "mbarrier.arrive(key_free.index(slot), count=1)", "pass"), problem
    )
    assert re.search(r"consume\(0\) waits for phase \d of key_full\[\d\], which has ended \d+ and lacks 1 of 1", reason)
    assert re.search(r"produce waits for phase 0 of key_free\[\d\], which has ended 0 and lacks 2 of 2", reason)


def test_the_same_launches_are_the_same_runs() -> None:
    problem = make_problem()
    rendered = planted(source(problem, **PIPELINE), "    pass_turn(c)\n", "")
    assert said(rendered, problem) == said(rendered, problem) != ""


# Lines that only order what is ordered already, or who comes first: (part of the line)
NOT_NEEDED = (
    "take_turn(c",
    "thread_barrier()",
    "gl.barrier()",
    "wait(next_free",
    "wait(turns.index",
    "wait(query_free",
)
SYNCHRONISES = re.compile(
    r"mbarrier\.(wait|arrive|expect)|fence_async|store_wait|free_(key|value)\(|(take|pass)_turn\("
)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("chosen", [PIPELINE, {**NAMED, "schedule": "persistent", **SHARED}])
def test_no_line_that_synchronises_can_be_left_out(chosen: dict[str, Any]) -> None:
    problem = make_problem()
    rendered = source(problem, **chosen)
    lines = rendered.text.splitlines()
    begin = lines.index("@gluon.jit")
    unfound = []
    for number, line in enumerate(lines[begin:], begin):
        code = line.split("#")[0]
        if not SYNCHRONISES.search(code) or code.startswith("def ") or any(each in code for each in NOT_NEEDED):
            continue
        left = "\n".join([*lines[:number], line[: len(line) - len(line.lstrip())] + "pass", *lines[number + 1 :]])
        if said(Source(name=rendered.name, text=left, variant=rendered.variant, traits=rendered.traits), problem) == "":
            unfound.append(f"{number + 1}: {line}")
    # The last wait for stores, where each tile has waited for its own.
    assert [line for line in unfound if "store_wait" not in line] == []


def feasible(seed: int) -> tuple[Problem, Source]:
    """A problem and a feasible variant, drawn."""
    drawn = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        *({"mask": mask} for mask in ("full", "causal", "window:40,9", "window:-1,30", "window:30,-1")),
        *({"mask": mask} for mask in ("blocks:64x64,0.5", "blocks:128x128,0.5")),
        *({"mask": mask, "layout": Layout.PACKED} for mask in ("full", "causal", "window:40,9")),
        *({"mask": mask, "dtype": DType.FLOAT8} for mask in ("full", "causal")),
    ]
    kind = drawn.choice(kinds)
    dims = (
        [(64, 64), (128, 128)] if "dtype" in kind else [(56, 56), (64, 64), (80, 80), (64, 128), (192, 128), (256, 256)]
    )
    head_dim, head_dim_v = drawn.choice(dims)
    problem = make_problem(head_dim=head_dim, head_dim_v=head_dim_v, **kind)
    variants = search_space.load("gluon/forward").feasible(problem, gluon_kernels.H200, drawn)
    variant = next(itertools.islice(variants, 1), None)
    if variant is None:
        return feasible(seed + 1000)
    return problem, render.render(problem, variant, replace(render.natural_traits(problem), lse=drawn.random() < 0.5))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40))
def test_drawn_variants_agree_with_the_reference(seed: int) -> None:
    problem, rendered = feasible(seed)
    lengths = ((203, 113), (113, 203), (64, 1), (150, 300))[seed % 4]
    scores = Scores.STEEP if seed % 2 and problem.dtype is not DType.FLOAT8 else Scores.PLAIN
    assert said(rendered, problem, lengths, scores, sm_count=1 + 2 * (seed % 3 == 0), number=seed % 4) == ""


GRADIENTS: list[Case] = [
    ({"head_dim": 128}, {}),
    ({"head_dim": 64, "mask": "causal"}, {"summing": "tma", "order": "ascending"}),
    ({"head_dim": 64}, {"summing": "threads", "order": "descending", "schedule": "one_tile"}),
    ({"head_dim": 64, "mask": "window:40,9"}, {"schedule": "one_tile", "slot_release": "mbarrier", "fences": "own"}),
    ({"head_dim": 256}, {}),
    ({"head_dim": 64}, {"next_scores": "at_once"}),
    ({"head_dim": 80, "mask": "causal"}, {"next_scores": "after_value_grad", "value_grad": "early"}),
    ({"head_dim": 112, "head_dim_v": 72}, {"next_scores": "after_query_grad", "row_loads": "early"}),
    ({"head_dim": 96, "mask": "causal"}, {"order": "descending", "query_walk": "by_head"}),
    ({"head_dim": 40}, {"summing": "threads", "order": "ascending", "BLOCK_M": 64, "schedule": "one_tile"}),
    ({"head_dim": 40, "head_dim_v": 16}, {"next_scores": "at_once", "BLOCK_M": 64, "order": "any"}),
    ({"head_dim": 192, "head_dim_v": 128}, {}),
    ({"head_dim": 144, "mask": "causal"}, {"order": "ascending", "value_grad": "late", "slot_release": "mbarrier"}),
]  # fmt: skip


def judged(rendered: Source, problem: Problem, lengths: tuple[int, int] = (200, 200)) -> str:
    """The same of gradients."""
    case = gradient_check.make_small_case(problem, *lengths, 1, CPU, torch.Generator().manual_seed(0))
    try:
        return gradient_check.judge(compiler.load(rendered, CPU), [case]).reason
    except AutoattnError as error:
        return str(error)


@pytest.mark.parametrize(("facts", "chosen"), rarely(GRADIENTS, lambda case: GRADIENTS.index(case) in (1, 7)))
def test_gradients_agree_with_the_reference(facts: dict[str, Any], chosen: dict[str, Any]) -> None:
    problem = hopper_gradients.problem(**facts)
    assert judged(hopper_gradients.source(problem, **chosen), problem) == ""


GRADIENT_FAULTS = [
    ("    fence_async_shared()\n    wait_until_may_add", "    wait_until_may_add", 0, "missed fence at score_grads"),
    ("    say_added(gl.to_tensor(ADDED + c))\n", "", 0, "deadlock: "),
    ("            end_turn(turns_ptr, part)\n", "", 1, "deadlock: "),  # of blocks of which no pair is hidden
    ("            tma.store_wait(pendings=0)\n", "", 0, "missed barrier at sums"),
    ("setp.lt.s32 early, seen, $2", "setp.le.s32 early, seen, $2", 0, "deadlock: "),
]


@pytest.mark.parametrize(
    ("right", "wrong", "place", "sentence"),
    rarely(GRADIENT_FAULTS, lambda fault: GRADIENT_FAULTS.index(fault) in (0, 2)),
)
def test_a_planted_fault_of_gradients_is_found(right: str, wrong: str, place: int, sentence: str) -> None:
    problem = hopper_gradients.problem(head_dim=64)
    rendered = hopper_gradients.source(problem, summing="tma", order="ascending", schedule="one_tile")
    reason = judged(planted(rendered, right, wrong, place=place), problem, (150, 200))
    assert reason != ""
    assert reason.startswith(sentence)


def test_memory_that_no_tensor_holds_is_not_read() -> None:
    body = """
    @gluon.jit
    def kernel(numbers_ptr, count):
        gl.store(numbers_ptr, gl.load(numbers_ptr + count))
    """
    numbers = torch.arange(8, dtype=torch.int32)
    gluon_texts.launch(body, numbers_ptr=numbers, count=3)
    assert numbers[0] == 3
    with pytest.raises(AutoattnError, match="memory that no tensor of the launch holds"):
        gluon_texts.launch(body, numbers_ptr=numbers, count=8)
