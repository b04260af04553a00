"""Hopper's backward template compiles into the machine code that its text means, and says what it cannot do."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hopper_gradients import H200, TEMPLATE, problem, source, variant
from rarely import rarely

from autoattn.codegen import render, search_space
from autoattn.core import triton_release
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout
from autoattn.core.variant import Traits
from autoattn.kernels import manifest
from autoattn.kernels.compiler import build, inspect, load_module

pytestmark = [pytest.mark.usefixtures("nothing_compiled_before"), pytest.mark.sampled]

ALIKE = "captured0: int32[1]\n(captured0[q_idx] == captured0[kv_idx]) & (q_idx // 8 >= kv_idx // 8)"
TABLE = "captured0: float32[2]\nscore + captured0[h, q_idx - kv_idx]"  # a number a pair
KINDS: tuple[tuple[dict[str, Any], Traits], ...] = (
    ({}, Traits()),
    ({"mask": "causal", "head_dim": 64}, Traits(lse=True)),
    ({"mask": "causal:top-left", "dtype": DType.FLOAT16}, Traits(wide=True)),
    ({"mask": "window:600,64", "head_dim": 80, "head_dim_v": 56}, Traits()),
    ({"mask": "window:600,-1", "head_dim": 32}, Traits()),
    ({"mask": "causal", "head_dim": 256}, Traits(lse=True)),
    ({"mask": "window:600,64", "head_dim": 192, "head_dim_v": 128}, Traits(wide=True)),
    ({"mask": "causal", "layout": Layout.PACKED}, Traits(lse=True)),
    ({"mask": "window:600,64", "layout": Layout.PACKED, "head_dim": 64}, Traits(wide=True)),
    ({"mask": "causal", "layout": Layout.PACKED, "head_dim": 160, "head_dim_v": 112}, Traits(lse=True)),
    ({"mask": Mask.blocks(256, 128, 0.5, ALIKE)}, Traits(lse=True)),
    ({"mask": Mask.blocks(64, 128, 0.5, ALIKE), "head_dim": 64}, Traits()),
)


@pytest.mark.exhaustive
def test_the_queries_gradients_are_added_in_memory_and_nothing_waits_in_line() -> None:
    report = inspect(source(problem(head_dim=64), BLOCK_M=64, order="any"), 90)
    assert report.spilled_bytes == 0
    assert report.loop["UTMAREDG"] == 1
    assert report.loop["STS.128"] == 4, "sums leave the registers 16 bytes at a time"
    products = {name: count for name, count in report.loop.items() if name.startswith("HGMMA")}
    assert sum(products.values()) == 3 * 4 + 2 * 4 + 4, "five products: three of 64 deep, the part for queries of 128"
    assert report.loop["WARPGROUP.ARRIVE"] == 6, "one for each product, and one for each half of the keys"
    assert not [name for name in report.loop if name.startswith(("LDL", "STL"))]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_changed_scores_stay_in_registers() -> None:
    call = problem(head_dim=64, mask="causal", modifiers=Modifiers(softcap=True, alibi=True))
    report = inspect(source(call), 90)
    assert report.spilled_bytes <= 32
    assert not [name for name in report.loop if name.startswith(("LDL", "STL"))]
    assert report.loop["MUFU.TANH"] == report.loop["MUFU.EX2"] == 32, "one of each a pair"


SLOPES = "captured0: float32[1]\nscore - captured0[h] * abs(q_idx - kv_idx)"  # a number a head
# With a head dim, the instructions of a step that a pair takes at most, which are 12 without a score_mod, and how many
# load numbers that a thread left in memory before the loop
SCORE_MODS = (
    ("score + 0.01 * (kv_idx - q_idx)", 128, 18, 2),
    ("captured0: int32[1]\nwhere(captured0[q_idx] == captured0[kv_idx], score, -inf)", 128, 20, 2),
    ("20.0 * tanh(score / 20.0)", 128, 27, 0),
    (TABLE, 64, 26, 0),
    (SLOPES, 128, 19, 1),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "head_dim", "most", "loads"),
    rarely(SCORE_MODS, lambda case: case[0] == TABLE),
    ids=["positions", "documents", "tanh", "table", "slopes"],
)
@pytest.mark.exhaustive
def test_scores_that_a_caller_changes_stay_in_registers(text: str, head_dim: int, most: int, loads: int) -> None:
    call = problem(head_dim=head_dim, mask="causal", modifiers=Modifiers(score_mod=text))
    seed = search_space.load(TEMPLATE).seeds_for(call, H200)[0]
    loop = inspect(render.render(call, seed), 90).loop
    assert sum(count for name, count in loop.items() if name.startswith("LDL")) <= loads
    assert not [name for name in loop if name.startswith("STL")]
    assert not (text == SLOPES and [name for name in loop if name.startswith("LDG")]), "read once a head"
    assert sum(loop.values()) <= most * 64 * 64 // 128


@pytest.mark.parametrize(
    ("mask", "mask_loop"),
    rarely(list(itertools.product(("causal", "full"), ("branch", "split"))), lambda case: case == ("causal", "branch")),
)
@pytest.mark.exhaustive
def test_each_consumer_of_wide_heads_sums_one_gradient_and_halves_that_of_queries(mask: str, mask_loop: str) -> None:
    report = inspect(source(problem(head_dim=256, mask=mask), mask_loop=mask_loop), 90)
    assert report.spilled_bytes <= 16
    for loop in (report.loop, report.masked_loop):
        products = {name.split(".")[1]: count for name, count in loop.items() if name.startswith("HGMMA")}
        sums = {"64x256x16": 4, "64x128x16": 4}
        assert products == {"64x64x16": 16, **sums}, "scores or weights' gradients; of keys or values; half of queries'"
        assert loop["WARPGROUP.ARRIVE"] == 3, "one for each product"
        assert loop.get("REDG", 16) == 16, "64 numbers of a thread, four at a time; there is a branch around some"
        assert not [name for name in loop if name.startswith(("LDL", "STL"))]


def test_the_weights_of_wide_heads_do_not_wait_for_scores_gradients_of_their_own_step() -> None:
    text = source(problem(head_dim=192, mask="causal"), next_scores="at_once").text
    step = text[text.index("def step(") : text.index("def produce(")]
    grads, weights = step.split("    else:\n", 1)
    behind = ("multiply_queries(", "query_grad = warpgroup_mma_wait(num_outstanding=4")
    for part, words in (
        (weights, ("say(WEIGHTS_FULL + grad_slot)", "hear(GRADS_FULL + (grad_slot ^ 1))", "multiply_weights(")),
        (grads, ("hear(WEIGHTS_FULL + grad_slot)", "say(GRADS_FULL + grad_slot)", "multiply_grads(")),
    ):
        places = [part.index(word) for word in (*words, *behind)]
        assert places == sorted(places), "the next scores are begun before anything is waited for"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_default_is_not_serialised_and_does_not_spill_in_its_loop() -> None:
    assert inspect(source(problem(mask="causal:top-left", dtype=DType.FLOAT16), Traits(wide=True)), 90).loop


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "traits"), rarely((KINDS[1], KINDS[3]), lambda kind: kind == KINDS[1]), ids=str)
def test_a_feasible_variant_compiles(kind: dict[str, Any], traits: Traits) -> None:
    call = problem(**kind)
    chosen = next(search_space.load(TEMPLATE).feasible(call, H200, random.Random(str(kind))))
    rendered = render.render(call, chosen, traits)
    adds = {"tma": "cp.reduce.async.bulk.tensor.2d", "threads": "red.relaxed.gpu.global.add.v4.f32"}
    for name in manifest.of(load_module(rendered)).parts:
        compiled = build(rendered, 90, name)
        assert (adds[str(chosen["summing"])] in compiled.asm["ptx"]) is (name == "backward_keys"), chosen
        assert compiled.metadata.shared <= H200.shared_bytes_per_block, chosen


@pytest.mark.parametrize(("schedule", "barriers"), [("one_tile", 6), ("dynamic", 10)])
def test_every_barrier_that_is_made_is_dropped_at_the_end_of_the_kernel(schedule: str, barriers: int) -> None:
    for release in ("named", "mbarrier"):
        text = source(problem(mask="causal"), slot_release=release, schedule=schedule).text
        initialised = set(re.findall(r"mbarrier\.init\(([a-z_]+)", text))
        dropped = set(re.findall(r"mbarrier\.invalidate\(([a-z_]+)", text))
        assert initialised == dropped
        assert len(initialised) == barriers
        assert "    drop_barriers(" in text[text.rindex("gl.warp_specialize(") :]


REFUSED: dict[str, dict[str, Any]] = {
    "16 bits": {"dtype": DType.FLOAT32},
    "multiple of 16 bytes": {"head_dim": 60},
    "at most 256 columns": {"head_dim_v": 512},
    "a program's keys in one of its columns": {"mask": Mask.blocks(64, 64, 0.5)},
    "not tried with block tables": {"mask": Mask.blocks(128, 128, 0.5), "modifiers": Modifiers(softcap=True)},
    "sums no gradients of slopes": {"modifiers": Modifiers(alibi=True, learned_slopes=True)},
    "drops no weights": {"modifiers": Modifiers(dropout=True)},
    "adds no biases": {"modifiers": Modifiers(bias=Bias.KEYS)},
    "two registers": {"modifiers": Modifiers(score_mod=TABLE)},
    "sin and cos": {"modifiers": Modifiers(score_mod="cos(score)")},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_has_no_kernel_here_is_refused_in_words(words: str) -> None:
    reason = search_space.load(TEMPLATE).why_infeasible(variant(problem()), problem(**REFUSED[words]), H200)
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(
    ("words", "params"),
    [
        ("shared memory", {"num_stages": 4}),
        ("registers", {"BLOCK_M": 128, "num_stages": 2, "score_grad_stages": 1, "summing": "threads"}),
        ("serialises", {"next_scores": "at_once"}),
    ],
)
def test_what_does_not_fit_is_refused_in_words(words: str, params: dict[str, Any]) -> None:
    reason = search_space.load(TEMPLATE).why_infeasible(variant(problem(), **params), problem(), H200)
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(
    ("words", "params"),
    [
        ("still reads", {"score_grad_stages": 1}),
        ("begin scores with both", {"next_scores": "after_value_grad"}),
        ("16 named barriers", {"order": "ascending", "slot_release": "named"}),
        ("behind their product", {"row_loads": "early"}),
        ("shared memory", {"summing": "tma"}),
    ],
)
def test_what_consumers_that_share_keys_cannot_do_is_refused_in_words(words: str, params: dict[str, Any]) -> None:
    call = problem(head_dim=192)
    reason = search_space.load(TEMPLATE).why_infeasible(variant(call, **params), call, H200)
    assert reason is not None
    assert words in reason


def test_no_registers_are_left_for_the_next_scores_beside_gradients_of_256_columns() -> None:
    call = problem(head_dim=256)
    reason = search_space.load(TEMPLATE).why_infeasible(variant(call, next_scores="at_once"), call, H200)
    assert reason is not None
    assert "serialises" in reason


CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"summing": "threads", "schedule": "one_tile"},
    {"mask_loop": "branch", "next_scores": "after_query_grad"},
    {"order": "ascending", "BLOCK_M": 64},
    {"order": "descending", "schedule": "one_tile"},
)


@pytest.mark.exhaustive
def test_files_stand_alone_and_have_short_lines() -> None:
    for kind, traits in KINDS:
        call = problem(**kind)
        for changes in CHANGES:
            lines = source(call, traits, **changes).text.splitlines()
            assert not [line for line in lines if line.startswith(("import autoattn", "from autoattn"))]
            assert [line for line in lines if line != line.rstrip()] == []
            assert max(map(len, lines)) <= render.MAX_LINE, (kind, changes)


def test_batch_heads_and_lengths_never_reach_the_text() -> None:
    small = problem(batch=1, heads_q=2, heads_kv=2, seq_q=700, seq_kv=900)
    chosen = variant(problem())
    assert render.render(small, chosen).text == render.render(problem(), chosen).text


# Of packed problems: (facts, what the template's default is changed by).
PACKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "128 columns": ({"mask": "causal"}, {}),
    "64 columns, in turns": ({"mask": "causal", "head_dim": 64}, {"order": "descending", "BLOCK_M": 128}),
    "window": ({"mask": "window:600,64"}, {"schedule": "one_tile", "order": "any"}),
    "256 columns": ({"head_dim": 256}, {}),
}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.exhaustive
def test_packed_sequences_are_walked_by_the_loops_of_dense_ones(kind: str) -> None:
    """The TMA unit ends boxes where a sequence does, so that no step has a mask more."""
    facts, chosen = PACKED[kind]
    packed, dense = (
        inspect(source(problem(**facts, layout=layout), **chosen), 90) for layout in (Layout.PACKED, Layout.BSHD)
    )
    for theirs, ours in ((dense.loop, packed.loop), (dense.masked_loop, packed.masked_loop)):
        kept = [
            name for name in theirs if name.startswith(("HGMMA", "MUFU", "STS", "LDS", "UTMAREDG", "WARPGROUP", "FSEL"))
        ]
        assert {name: ours.get(name) for name in kept} == {name: theirs[name] for name in kept}
    assert packed.spilled_bytes <= dense.spilled_bytes + 32


@pytest.mark.parametrize("schedule", ["one_tile", "dynamic"])
def test_boxes_of_packed_tensors_have_two_axes_more(schedule: str) -> None:
    module = load_module(source(problem(layout=Layout.PACKED), schedule=schedule))
    assert module.RAGGED
    for name, (block, _) in module.DESCRIPTORS.items():
        assert len(block) == (1 if name in ("row_lse_step", "delta_step") else 2 if name == "query_sums_tile" else 5)
    text = source(problem(layout=Layout.PACKED), schedule=schedule).text
    own = re.findall(r"\((?:key|value)(?:_grad)?_tile, \[([^\]]*)\]", text)
    assert own
    assert all(place.startswith("EDGE, end_kv, i_kv, EDGE - seq_kv + start_n") for place in own)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.exhaustive
def test_room_for_the_queries_of_packed_sequences_holds_each_in_blocks_of_its_own(block: int) -> None:
    module = load_module(source(problem(layout=Layout.PACKED, head_dim=64), BLOCK_M=block, order="ascending"))
    lengths = [0, 1, 63, 64, 65, 0, 200]
    begins = [sum(lengths[:each]) // block + each for each in range(len(lengths))]
    ends = [begin + -(-length // block) for begin, length in zip(begins, lengths, strict=True)]
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))
    assert ends[-1] * block <= module.rows(len(lengths), sum(lengths))
    assert module.sums(len(lengths), 3, sum(lengths)) == 3 * module.rows(len(lengths), sum(lengths)) * 64


def test_gradients_that_must_repeat_to_the_bit_are_added_in_turn_and_others_may_be() -> None:
    points = search_space.load(TEMPLATE)
    for kind in ({}, {"mask": "causal", "head_dim": 64}, {"mask": "window:600,64", "head_dim": 256}):
        loose, strict = problem(**kind), problem(deterministic=True, **kind)
        seeds = {call.deterministic: points.seeds_for(call, H200) for call in (loose, strict)}
        orders = {
            deterministic: {points.params_of(each)["order"] for each in variants}
            for deterministic, variants in seeds.items()
        }
        assert "any" in orders[False]
        assert "any" not in orders[True]
        for each in seeds[False]:
            turns = points.params_of(each)["order"] != "any"
            assert points.repeats(each) is turns
            assert ("do not repeat themselves" in str(points.why_infeasible(each, strict, H200))) is not turns


@pytest.mark.exhaustive
def test_one_thread_gives_the_turn_on_behind_all_that_was_added() -> None:
    call = problem(head_dim=64, deterministic=True)
    chosen: dict[str, Any] = {"order": "ascending", "BLOCK_M": 64, "next_scores": "own_step", "schedule": "one_tile"}
    rendered = source(call, **chosen)
    ptx = build(rendered, 90, "backward_keys").asm["ptx"]
    # The first to come writes, the others add; the TMA unit has done either when the turn goes on.
    walk = rendered.text[rendered.text.index("def take_turns") :]
    names = triton_release.gluon_names(triton_release.installed_release())
    steps = (
        *("wait_for_turn", "wait_until_added", "if turn == 0", names.tma_store, "else:", "add_to_memory"),
        *("store_wait", "let_add", "end_turn"),
    )
    places = [walk.index(word, walk.index("wait_for_turn")) for word in steps]
    assert places == sorted(places)
    turns = re.findall(r"wait_group 0; bar\.warp\.sync -1; [^@]*@first red\.release", ptx)
    assert len(turns) == ptx.count("red.release") >= 2, "each consumer's"
    assert ptx.count("cp.reduce.async.bulk.tensor.2d") == ptx.count("cp.async.bulk.tensor.2d.global.shared") >= 2

    ptx = build(source(call, **chosen, summing="threads"), 90, "backward_keys").asm["ptx"]
    acquires = ptx.split("ld.acquire.gpu.global.s32")[1:]
    assert len(acquires) >= 2, "each consumer's"
    for step in acquires:
        places = [step.index(word) for word in ("bar.arrive", "bar.sync", "red.release")]
        assert places == sorted(places)
        assert "@first red.release" in step
    assert ptx.count("@first st.relaxed.gpu.global.v4") == ptx.count("@!first red.relaxed.gpu.global.add.v4") >= 16
    # Threads add behind their warp's word, and tell it when they have.
    words = re.findall(r"bar\.(sync|arrive)\s+%r\d+, 160|red\.(relaxed)", ptx)
    met = [key for key, _ in itertools.groupby(first or second for first, second in words)]
    added = [place for place, word in enumerate(met) if word == "relaxed"]
    assert len(added) >= 2
    assert all(met[place - 1] == "sync" and met[place + 1] == "arrive" for place in added)


# --- one tile after another -------------------------------------------------------------------------------------------

WALKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "turns": ({"head_dim": 64, "mask": "causal"}, {"order": "descending", "BLOCK_M": 128, "num_stages": 2}),
    "as they come": ({"head_dim": 64, "mask": "window:600,64"}, {"order": "any", "BLOCK_M": 128, "num_stages": 2}),
    "one tile of gradients": ({"head_dim": 64}, {"order": "any", "score_grad_stages": 1, "BLOCK_M": 128}),
    "wider, turns": ({"mask": "causal"}, {"order": "descending", "fences": "own", "mask_loop": "branch"}),
    "wider, as they come": ({"head_dim": 80, "head_dim_v": 128}, {"order": "any", "slot_release": "mbarrier"}),
    "narrow tiles": ({"head_dim": 64}, {"order": "ascending", "BLOCK_M": 64, "next_scores": "own_step"}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", WALKED)
@pytest.mark.exhaustive
def test_the_loops_of_programs_that_walk_many_tiles_are_those_of_programs_of_one(kind: str) -> None:
    facts, chosen = WALKED[kind]
    walked, alone = (inspect(source(problem(**facts), **chosen, schedule=each), 90) for each in ("dynamic", "one_tile"))
    for theirs, ours in ((alone.loop, walked.loop), (alone.masked_loop, walked.masked_loop)):
        kept = [name for name in theirs if name.startswith(("HGMMA", "MUFU", "STS", "LDS", "UTMAREDG", "WARPGROUP"))]
        assert {name: ours.get(name) for name in kept} == {name: theirs[name] for name in kept}
    assert walked.spilled_bytes <= alone.spilled_bytes + 64


@pytest.mark.parametrize("kind", WALKED)
def test_the_next_keys_may_come_before_gradients_leave(kind: str) -> None:
    facts, chosen = WALKED[kind]
    text = source(problem(**facts), **chosen, schedule="dynamic").text
    end = text[text.index("def sum_tile(") : text.index("def consume(")]
    assert end.index("mbarrier.arrive(key_free") < end.index("(value_grad.to(ELEMENT)"), "values are overwritten later"
    staged = "room.index(0).store(value_grad" in end
    assert staged is (chosen.get("BLOCK_M") == 128), "where a consumer's tile of scores' gradients holds both"
    assert (end.index("mbarrier.arrive(value_free") < end.index("value_grad.to(ELEMENT)")) is staged


def test_a_program_takes_its_next_tile_once_it_has_loaded_the_last_of_this_one() -> None:
    """Taken earlier, others wait for what a program has not begun to add: up to four times as long on an H200."""
    text = source(problem(mask="causal"), order="descending", schedule="dynamic", query_walk="by_head").text
    walk = text[text.index("def produce(") :]
    assert walk.index("load_tile(") < walk.index("gl.atomic_add(taken, 1)") < walk.index("hand_on(")
    assert text.count("gl.atomic_add(") == 1


@pytest.mark.parametrize("order", ["any", "ascending"])
def test_programs_that_walk_many_tiles_are_as_many_as_sms_and_count_tiles_behind_the_turns(order: str) -> None:
    chosen: dict[str, Any] = {"order": order, "BLOCK_M": 64, "next_scores": "own_step"}
    walked = load_module(source(problem(), **chosen, schedule="dynamic"))
    alone = load_module(source(problem(), **chosen, schedule="one_tile"))
    assert walked.grids(4, 32, 8, 4096, 8192) == alone.grids(4, 32, 8, 4096, 8192)
    assert walked.PERSISTENT == {"backward_keys": 1}
    assert not hasattr(alone, "PERSISTENT")
    turns = alone.turns(4, 32, 4096) if order == "ascending" else 0
    assert walked.turns(4, 32, 4096) == turns + 1


@pytest.mark.exhaustive
def test_how_many_programs_stay_on_an_sm_is_part_of_a_kernels_name() -> None:
    rendered = source(problem(head_dim=64), schedule="dynamic", order="any")
    other = replace(
        rendered, text=rendered.text.replace('PERSISTENT = {"backward_keys": 1}', 'PERSISTENT = {"backward_keys": 2}')
    )
    assert other.text != rendered.text
    assert inspect(other, 90).code != inspect(rendered, 90).code


TWO: dict[str, Any] = {"schedule": "dynamic", "order": "any", "BLOCK_M": 128, "num_stages": 2, "key_stages": 2}


@pytest.mark.exhaustive
def test_keys_of_two_tiles_fit_and_come_before_the_queries_that_see_them() -> None:
    call = problem(head_dim=64, mask="causal", layout=Layout.PACKED)
    assert search_space.load(TEMPLATE).why_infeasible(variant(call, **TWO), call, H200) is None
    report = inspect(source(call, **TWO), 90)
    assert report.shared_bytes <= H200.shared_bytes_per_block
    assert not [name for name in report.loop if name.startswith(("LDL", "STL"))]
    text = source(call, **TWO).text
    tile = text[text.index("def load_tile(") : text.index("def produce(")]
    assert tile.index("load_own(") < tile.index("(query_step, [")
    assert text.count("load_own(") == 2
    barriers = re.findall(r"mbarrier\.init\((\w+)\.index\(place\)", text)
    assert {"key_full", "value_full", "key_free", "value_free"} <= set(barriers)


@pytest.mark.parametrize("head_dim", rarely((64, 96, 128), lambda head_dim: head_dim == 128))
@pytest.mark.exhaustive
def test_programs_that_join_others_leave_no_number_of_a_step_in_memory_and_name_a_block_of_each_head(
    head_dim: int,
) -> None:
    call = problem(head_dim=head_dim, mask="causal")
    chosen: dict[str, Any] = {"schedule": "dynamic", "order": "any", "query_walk": "joined"}
    assert search_space.load(TEMPLATE).why_infeasible(variant(call, **chosen), call, H200) is None
    report = inspect(source(call, **chosen), 90)
    moved = {name: count for name, count in report.loop.items() if name.startswith(("LDL", "STL"))}
    # Beside narrower heads, the entry and the lengths are left in memory before the loop, and loaded there.
    assert sum(moved.values()) <= (0 if head_dim == 128 else 4)
    assert not [name for name in moved if name.startswith("STL")]
    assert load_module(source(call, **chosen)).turns(4, 32, 4096) == 1 + 4 * 32


@pytest.mark.parametrize(
    ("words", "facts", "params"),
    [
        ("do not choose where they begin", {}, {"schedule": "one_tile"}),
        ("do not choose where they begin", {}, {"order": "descending"}),
        ("were slower", {"mask": "full"}, {}),
        ("were slower", {"heads_kv": 32}, {}),
        ("were slower", {"layout": Layout.PACKED}, {}),
    ],
)
def test_programs_join_others_only_under_a_diagonal_where_heads_share_keys(
    words: str, facts: dict[str, Any], params: dict[str, Any]
) -> None:
    call = problem(**{"mask": "causal", **facts})
    chosen = {"schedule": "dynamic", "order": "any", "query_walk": "joined", **params}
    reason = search_space.load(TEMPLATE).why_infeasible(variant(call, **chosen), call, H200)
    assert reason is not None
    assert words in reason


def test_a_program_of_one_tile_has_no_next_keys() -> None:
    call = problem(head_dim=64)
    reason = search_space.load(TEMPLATE).why_infeasible(variant(call, **{**TWO, "schedule": "one_tile"}), call, H200)
    assert reason is not None
    assert "has no next keys" in reason


@pytest.mark.parametrize(
    ("words", "facts", "params"),
    [
        ("leave through the room for sums", {}, {"summing": "threads"}),
        ("leave through the room for sums", {"head_dim": 256}, {}),
        ("more tiles than there are SMs", {"batch": 1, "seq_q": 2048, "seq_kv": 2048}, {}),
    ],
)
def test_what_programs_that_walk_many_tiles_cannot_do_is_refused_in_words(
    words: str, facts: dict[str, Any], params: dict[str, Any]
) -> None:
    call = problem(**facts)
    reason = search_space.load(TEMPLATE).why_infeasible(variant(call, schedule="dynamic", **params), call, H200)
    assert reason is not None
    assert words in reason


@pytest.mark.exhaustive
def test_each_kernel_may_begin_early_and_waits_for_the_one_before() -> None:
    """Before it reads what that one wrote: nothing but barriers of its own and arithmetic stands before the wait."""
    rendered = source(problem(head_dim=64), order="ascending")
    ptx = {name: build(rendered, 90, name).asm["ptx"] for name in manifest.of(load_module(rendered)).parts}
    assert [name for name, text in ptx.items() if "griddepcontrol.launch_dependents" in text] == [*ptx][:2]
    assert [name for name, text in ptx.items() if "griddepcontrol.wait" in text] == [*ptx][1:]
    for name, options in load_module(rendered).PARTS.items():
        assert options.get("launch_pdl", False) is ("griddepcontrol.wait" in ptx[name])
        before = ptx[name].partition("griddepcontrol.wait")[0] if options.get("launch_pdl") else ""
        assert not re.findall(r"(?:ld|st|red|atom)\.\S*global|cp\.async\.bulk", before), name
