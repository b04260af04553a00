"""The model of the GPU: what fits, how the work is counted, and claims that physics makes of any time."""

from dataclasses import replace
from typing import Any

import kernels
import measured_kernels
import model_fit
import model_quality
import pytest
from checkout_paths import CHECKOUT
from modelled import A30, A100, H200, MASKED, PARAMS, PLAIN, RTX3090, plain, problem, report

from autoattn.codegen import search_space
from autoattn.core.problem import DType, Layout, Precision
from autoattn.core.variant import Variant
from autoattn.cost_model import loop_cost as demands
from autoattn.cost_model import predictor, tile_schedule
from autoattn.cost_model.constants import BOUNDS, CONSTANTS, FITTED
from autoattn.cost_model.kernel_kind import Path as Kind
from autoattn.cost_model.kernel_kind import path_of, program_of
from autoattn.cost_model.loop_cost import demand, pass_cycles
from autoattn.cost_model.occupancy import occupancy
from autoattn.cost_model.predictor import predict
from autoattn.kernels.compiler import inspect

MMA = CONSTANTS[Kind.SYNCHRONOUS]
PAGE = CHECKOUT / "docs/model.md"


def time(of=None, on=A100, kernel=None, **params):
    return predict(of or problem(), on, plain(PARAMS | params), kernel or report()).time_us


# --- one pass ---------------------------------------------------------------------------------------------------------


def cost(device=A100, of=None, loop=PLAIN, num_warps=4, **params):
    params = PARAMS | params
    return demand(of or problem(), device, params, loop, program_of(plain(params), report(num_warps=num_warps)), MMA)


def test_tensor_time_is_flops_over_peak():
    # 4 x 128 x 64 x 64 flop; an A100's SM does 312e12 / (108 x 1410 MHz) = 2049 a cycle
    assert cost().tensor == pytest.approx(2_097_152 / 2048.8, rel=1e-3)
    assert cost(of=problem(dtype=DType.FLOAT32)).tensor == 32 * 4 * 4  # only LDSM: IEEE products are FFMA


def test_exp_time_is_eight_cycles_each():
    assert cost().exp == 8 * 68
    assert cost(num_warps=8).exp == 2 * 8 * 68


def test_float32_lanes_are_half_as_many_on_an_a100():
    loop = {"FFMA": 1000}
    assert cost(A100, loop=loop).issue == 2000
    assert cost(RTX3090, loop=loop).issue == 1000


def test_warpgroup_products_with_few_keys_are_bound_by_shared_memory():
    loop = {"HGMMA.64x32x16.F32.BF16.SS": 4}
    flops = [4 * 64 * n * 64 / 4096 for n in (32, 128)]
    narrow, wide = (cost(H200, loop=loop, BLOCK_M=64, BLOCK_N=n).tensor for n in (32, 128))
    assert wide == pytest.approx(flops[1], rel=0.02)
    assert narrow > 1.2 * flops[0]


def test_a_lone_block_pays_for_everything_in_turn():
    alone = cost()
    assert pass_cycles(alone, 1, 4, MMA) == pytest.approx(sum(alone.stations()) + alone.latency)


def test_more_blocks_never_lower_the_throughput_nor_beat_the_slowest_unit():
    shared = [pass_cycles(cost(), blocks, 4, MMA) for blocks in range(1, 17)]
    assert shared == sorted(shared, reverse=True)
    assert shared[-1] >= max(cost().stations())
    assert shared[-1] < 1.3 * max(cost().stations())


def test_copies_asked_for_ahead_hide_their_latency():
    waiting = {name.replace("LDGSTS", "LDG"): count for name, count in PLAIN.items()}
    assert cost(num_stages=3).latency < cost(num_stages=1, loop=waiting).latency
    late = cost(num_stages=1, loop=waiting, barrier="after_qk").latency
    assert late > cost(num_stages=1, loop=waiting).latency


# --- the whole kernel -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [problem(), problem(seq_q=128, batch=1), problem("causal"), problem(heads_kv=1)])
@pytest.mark.parametrize("fact", ["bandwidth", "l2_bytes", "sm_count", "sustained_clock_mhz"])
def test_more_of_anything_is_never_slower(of, fact):
    better = replace(A100, **{fact: type(getattr(A100, fact))(2 * getattr(A100, fact))})
    if fact == "sm_count":  # the peak is a fact of the whole card
        better = replace(better, peak_flops={name: 2 * rate for name, rate in A100.peak_flops.items()})
    assert time(of, better) <= time(of, A100) * (1 + 1e-9)


def test_causal_takes_about_half():
    assert 0.5 < time(problem("causal")) / time(problem()) < 0.6


def test_narrower_windows_are_faster():
    masks = ["full", "window:-1,128", "window:1024,1024", "window:1024,0", "window:128,128", "window:128,0"]
    times = [time(problem(mask)) for mask in masks]
    assert times == sorted(times, reverse=True)
    assert times[-1] < 0.2 * times[0]


def test_sparser_tables_are_faster_and_a_full_one_is_like_no_mask():
    times = [time(problem(f"blocks:128x128,{density}")) for density in (1, 0.5, 0.1)]
    assert times[0] == pytest.approx(time(), rel=0.01)
    assert 0.45 < times[1] / times[0] < 0.6
    assert 0.1 < times[2] / times[0] < 0.25


def test_packed_sequences_cost_what_their_tokens_do():
    facts: dict[str, Any] = {"layout": Layout.PACKED, "batch": 16, "seq_q": 2048, "seq_kv": 2048}
    dense = time(problem(batch=16, seq_q=2048, seq_kv=2048))
    assert time(problem(**facts, tokens_q=16 * 2048, tokens_kv=16 * 2048)) == pytest.approx(dense, rel=0.05)
    assert time(problem(**facts, tokens_q=8 * 2048, tokens_kv=8 * 2048)) < 0.5 * dense


def test_two_parts_of_a_head_dim_ask_for_less_of_the_tensor_cores():
    whole, split = (cost(of=problem(head_dim=80), HEAD_SPLIT=value).tensor for value in (0, 1))
    assert split == pytest.approx(whole * 80 / 128)
    wide = problem(head_dim=64, head_dim_v=512)
    assert cost(of=wide).tensor == pytest.approx(cost(of=problem(head_dim=64)).tensor * (64 + 512) / 128)


def test_products_have_the_rates_of_their_types():
    loop = {"QGMMA.64x128x32.F32.E4M3.E4M3.RS": 4}
    half = cost(H200, loop={"HGMMA.64x128x16.F32.BF16.RS": 4}, BLOCK_N=128).tensor
    assert cost(H200, of=problem(dtype=DType.FLOAT8), loop=loop, BLOCK_N=128).tensor == pytest.approx(
        half / 2, rel=0.05
    )
    once, thrice = (
        cost(of=problem(dtype=DType.FLOAT32, precision=Precision(name)), loop={"HMMA": 1}).tensor
        for name in ("tf32", "tf32x3")
    )
    assert thrice == pytest.approx(3 * once)


@pytest.mark.parametrize(("products", "parts", "precision"), [("bf16x3", 3, "tf32"), ("bf16x6", 6, "ieee")])
@pytest.mark.parametrize(("device", "opcode"), [(A100, "HMMA.16816.F32.BF16"), (H200, "HGMMA.64x64x16.F32.BF16.RS")])
def test_float32_made_of_bfloat16_takes_as_many_bfloat16_products(device, opcode, products, parts, precision):
    once = cost(device, loop={opcode: 16}).tensor
    of = problem(dtype=DType.FLOAT32, precision=Precision(precision))
    assert cost(device, of=of, loop={opcode: 16 * parts}, products=products).tensor == pytest.approx(parts * once)


def test_products_made_of_bfloat16_show_in_the_machine_code_as_often_as_they_are_counted():
    loops = [
        inspect(kernels.source(of, BLOCK_M=64, BLOCK_N=32, num_warps=4, products=products), 80).loop
        for of, products in (
            (kernels.problem(dtype=DType.BFLOAT16), "as_asked"),
            (kernels.problem(dtype=DType.FLOAT32, precision=Precision.TF32), "bf16x3"),
            (kernels.problem(dtype=DType.FLOAT32), "bf16x6"),
        )
    ]
    once, three, six = (loop["HMMA.16816.F32.BF16"] for loop in loops)
    assert {"bf16x3": three / once, "bf16x6": six / once} == demands.BFLOAT16_PARTS


def test_time_grows_with_the_batch_once_the_card_is_full():
    assert time(problem(batch=16)) == pytest.approx(2 * time(problem(batch=8)), rel=0.1)


def test_one_tile_more_than_a_wave_costs_a_wave():
    per_wave = A100.sm_count * occupancy(A100, 240, 48 * 1024, 4)
    one_wave, one_more, two_waves = (
        time(problem(batch=1, heads_q=n, heads_kv=n, seq_q=128)) for n in (per_wave, per_wave + 1, 2 * per_wave)
    )
    assert one_wave < one_more < two_waves


def test_spills_cost():
    loop = PLAIN | {"LDL": 40, "STL": 20}
    assert time(kernel=report(loop=loop, masked_loop=loop)) > 1.05 * time()


def test_masking_every_block_costs():
    causal = problem("causal")
    assert time(causal, kernel=report(loop=MASKED, masked_loop={}), mask_loop="every") > 1.02 * time(causal)


def test_longest_rows_first_is_no_slower_for_causal():
    few = problem("causal", batch=1)
    assert time(few, row_order="descending", HEAD_GROUP=0) < time(few, row_order="ascending", HEAD_GROUP=0)


def test_persistent_programs_that_do_not_fit_at_once_gain_nothing():
    alone = report(registers=255, num_warps=8)
    assert time(PERSISTENT=2, kernel=alone) >= time(PERSISTENT=1, kernel=alone) * (1 - 1e-9)


def test_keys_beyond_the_l2_are_read_again_unless_heads_take_turns():
    long = problem(batch=1, heads_q=256, heads_kv=256, seq_q=65536, seq_kv=65536)
    apart = predict(long, A30, plain(PARAMS | {"HEAD_GROUP": 0}), report()).parts_us["dram"]
    in_turn = predict(long, A30, plain(PARAMS | {"HEAD_GROUP": 1}), report()).parts_us["dram"]
    assert in_turn == pytest.approx(1e6 * long.bytes() / (predictor.DRAM_EFFICIENCY * A30.bandwidth))
    assert apart > 10 * in_turn


def test_keys_that_one_tile_walks_are_read_once_however_long_they_are():
    """64 queries on 65,536 keys were believed to read them twice, which made splits look better than they are."""
    one_tile = problem(batch=16, heads_q=12, heads_kv=12, seq_q=64, seq_kv=65536)
    moved = predict(one_tile, H200, plain(PARAMS | {"BLOCK_M": 64}), report()).parts_us["dram"]
    assert moved == pytest.approx(1e6 * one_tile.bytes() / (predictor.DRAM_EFFICIENCY * H200.bandwidth))


def test_keys_that_no_query_sees_are_not_read():
    seen, all_keys = (
        predict(problem(mask, seq_q=1, seq_kv=65536), H200, plain(PARAMS), report()).parts_us["dram"]
        for mask in ("window:2047,0", "full")
    )
    assert seen < all_keys / 16


def test_a_launch_waits_for_the_lines_of_its_code_once():
    short, long = (report(code_bytes=size) for size in (10_000, 10_000 + 100 * predictor.CODE_LINE))
    waited = 1e6 * 100 * MMA.code_line / (A100.sustained_clock_mhz * 1e6)
    assert time(kernel=long) - time(kernel=short) == pytest.approx(waited)
    assert time(problem(batch=64), kernel=long) - time(problem(batch=64), kernel=short) == pytest.approx(waited)
    assert waited > 0


def test_shared_keys_need_less_of_the_dram():
    few, many = (predict(problem(heads_kv=n), A100, plain(PARAMS), report()).parts_us["dram"] for n in (4, 32))
    assert few < many


def test_a_small_problem_is_bound_by_its_launch_or_latency():
    tiny = predict(problem(batch=1, heads_q=1, heads_kv=1, seq_q=128, seq_kv=128), A100, plain(PARAMS), report())
    assert tiny.bound in ("launch", "latency")
    assert tiny.time_us < 20


def test_a_prediction_is_never_faster_than_any_of_its_parts():
    for mask in ("full", "causal"):
        prediction = predict(problem(mask), A100, plain(PARAMS), report())
        assert prediction.time_us >= max(prediction.parts_us.values())
        assert prediction.occupancy == 2
        assert prediction.waves == pytest.approx(4 * 32 * 32 / (108 * 2))


def test_the_model_ranks_the_measured_kernels_as_well_as_its_page_says():
    judged = [row for row in measured_kernels.recorded_rows() if len(row.cases) > model_quality.FEWEST]
    assert sum(len(row.cases) for row in judged) > 600
    for row in judged:
        quality = model_quality.quality(row, [measured_kernels.milliseconds(case) for case in row.cases])
        assert quality.spearman > 0.85, f"{row.name} {row.problem}: {quality.spearman}"
        assert quality.ten < 0.1, f"{row.name} {row.problem}: {quality.ten}"


def test_constants_lie_within_their_bounds():
    assert set(BOUNDS) == set(MMA.__dataclass_fields__)
    for constants in CONSTANTS.values():
        assert all(low <= getattr(constants, name) <= high for name, (low, high) in BOUNDS.items())
    assert set(CONSTANTS) == set(Kind)
    read = [CONSTANTS[kind].left_reads for kind in (Kind.WARPGROUP, Kind.SPECIALISED)]
    assert read[0] == read[1], "of left factors by the same hardware"


def test_the_page_has_the_constants_and_stars_those_at_their_bounds():
    rows = [line.split("|")[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    head = next(cells for cells in rows if cells[0].strip() == "constant")
    shown = {cells[0].strip(): [cell.strip() for cell in cells[1:-1]] for cells in rows if cells[0].strip() in BOUNDS}
    assert set(shown) == set(BOUNDS)
    for column, title in enumerate(head[1:-1]):
        kind = Kind(title.strip())
        for name, cells in shown.items():
            value = getattr(CONSTANTS[kind], name)
            star = " *" if value in BOUNDS[name] else ""
            assert cells[column] == (f"{value:g}{star}" if name in FITTED[kind] else ""), f"{kind.value} {name}"


@pytest.mark.exhaustive
def test_a_fit_finds_the_constants_that_times_were_made_with():
    kind = Kind.SYNCHRONOUS
    true = {**CONSTANTS, kind: replace(CONSTANTS[kind], pass_latency=300.0, barrier_latency=200.0)}
    rows = [row for row in measured_kernels.recorded_rows() if row.name == "sm_80"]
    synthetic = [
        replace(
            row,
            cases=tuple(replace(case, median_ms=measured_kernels.milliseconds(case, true)) for case in row.cases),
        )
        for row in rows
    ]
    fitted = model_fit.fit(synthetic, [kind])[kind]
    assert fitted.pass_latency == pytest.approx(300.0, rel=0.1)
    assert fitted.barrier_latency == pytest.approx(200.0, rel=0.1)
    assert set(FITTED[kind]) <= set(BOUNDS)


# --- kinds of machine code --------------------------------------------------------------------------------------------

SPECIALISED: dict[str, Any] = {
    "BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 2, "softmax": "online", "overlap": 1, "mask_loop": "split",
    "schedule": "dynamic", "HEAD_GROUP": 1, "row_order": "descending",
}  # fmt: skip
HOPPER = {
    "HGMMA.64x128x16.F32.BF16.SS": 8, "HGMMA.64x128x16.F32.BF16.RS": 8, "MUFU.EX2": 64, "FFMA": 64, "FADD": 64,
    "F2FP": 32, "WARPGROUP.ARRIVE": 2, "WARPGROUP.DEPBAR.LE": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("template", "loop", "kind"),
    [
        ("triton/forward", PLAIN, Kind.SYNCHRONOUS),
        ("triton/forward", HOPPER, Kind.WARPGROUP),
        ("gluon/forward", HOPPER, Kind.SPECIALISED),
        ("triton/forward", {"FFMA": 4096, "MUFU.EX2": 16}, Kind.LANES),
    ],
)
def test_each_kind_of_machine_code_has_constants_of_its_own(template, loop, kind):
    assert path_of(report(loop=loop), template) is kind


def specialised(**params):
    """The prediction for a program of two workers and one that loads, on an H200."""
    kernel = report(arch=90, registers=168, shared_bytes=200_000, num_warps=12, loop=HOPPER, masked_loop={})
    of = problem("full", head_dim=128, head_dim_v=128)
    return predict(of, H200, Variant.of("gluon/forward", SPECIALISED | params), kernel)


def test_workers_of_a_program_share_its_keys_and_have_rows_of_their_own():
    params = SPECIALISED | {"BLOCK_M": 192}
    program = program_of(Variant.of("gluon/forward", params), report(num_warps=16))
    assert (program.workers, program.rows, program.warps) == (3, 64, 4)
    assert program.specialised
    assert not program_of(plain(PARAMS), report()).specialised


def test_each_family_counts_packed_heads_in_its_own_way():
    of = problem(heads_q=32, heads_kv=4)
    triton, gluon = (search_space.load(f"{family}/forward") for family in ("triton", "gluon"))
    assert [triton.heads_of_tile({"PACK_GQA": packed}, of) for packed in (0, 1)] == [1, 8]
    assert [gluon.heads_of_tile({"PACK_GQA": packed}, of) for packed in (1, 4)] == [1, 4]
    assert [space.heads_of_tile({}, of) for space in (triton, gluon)] == [1, 1]


@pytest.mark.parametrize(("group", "together", "heads"), [(7, 8, 1), (7, 4, 2), (8, 4, 2), (7, 1, 7), (1, 1, 1)])
def test_heads_that_do_not_fill_a_tile_are_still_some(group, together, heads):
    of = problem(batch=3, heads_q=2 * group, heads_kv=2)
    assert tile_schedule.heads_of(of, together) == 3 * 2 * heads
    kernel = report(arch=90, registers=168, shared_bytes=200_000, num_warps=12, loop=HOPPER, masked_loop={})
    assert predict(of, H200, Variant.of("gluon/forward", SPECIALISED | {"PACK_GQA": together}), kernel).time_us > 0


def test_work_in_the_shadow_of_products_is_faster():
    assert specialised(overlap=1).time_us < specialised(overlap=0).time_us


def test_one_slot_costs_more_than_two_and_most_where_products_run_ahead():
    costs = [
        specialised(num_stages=1, overlap=overlap).time_us - specialised(overlap=overlap).time_us for overlap in (0, 1)
    ]
    assert 0 < costs[0] < costs[1]


def test_programs_that_walk_on_save_the_beginnings_of_tiles():
    assert specialised(schedule="dynamic").time_us < specialised(schedule="one_tile").time_us


def test_few_tiles_are_predicted_to_be_faster_shared():
    of = problem("causal", batch=1, heads_q=1, heads_kv=1, seq_q=4096, seq_kv=4096)
    params = PARAMS | {"BLOCK_M": 64}
    alone, among = (predict(of, H200, plain(params | {"SPLITS": splits}), report()).time_us for splits in (1, 4))
    assert among < 0.7 * alone
