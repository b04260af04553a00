"""Tiles that programs share, and heads that share a tile's rows, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import interpreted
import kernels
import pytest
import torch
from interpreted import Run, run
from rarely import diagonal, rarely

from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Layout, Precision, Problem
from autoattn.core.variant import Source
from autoattn.kernels import forward
from autoattn.kernels.compiler import load
from autoattn.validation import output_check
from autoattn.workers.worker_pool import Pool

pytestmark = pytest.mark.interpreter

MASKS = ("full", "causal:bottom-right", "causal:top-left", "window:9,3", "window:9,0", "window:7,-1", "window:-1,3")
MASK_LOOPS = ("split", "every", "branch")
SOFTMAXES = ("online", "lazy", "first_max")
HEAVY = Modifiers(sinks=True, alibi=True, softcap=True)


def small(**changes: Any) -> Problem:
    return kernels.problem(**{"batch": 1, "heads_q": 2, "heads_kv": 1, "seq_q": 37, "seq_kv": 85, **changes})


def broken(child: Pool, right: str, wrong: str, **chosen: Any) -> interpreted.Result:
    """What the gate says of a kernel in which `wrong` stands where `right` stood."""
    problem = small(mask="causal")
    source = kernels.source(problem, **chosen)
    assert right in source.text
    fault = replace(source, text=source.text.replace(right, wrong))
    return interpreted.result(child, Run(source=fault, problem=problem, make=interpreted.dense))


# --- programs that share a tile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", kernels.covering({
    "mask": MASKS, "mask_loop": MASK_LOOPS, "softmax": SOFTMAXES, "SPLITS": (2, 4, 16),
    "parts_read": ("maxima_first", "by_rows"), "modifiers": (Modifiers(), HEAVY),
    "lengths": ((37, 85), (85, 37), (1, 170), (16, 64)), "head_dims": ((16, 16), (24, 40)),
}), ids=str)  # fmt: skip
def test_programs_that_share_a_tile_match_the_reference(child: Pool, point: dict[str, Any]) -> None:
    point = dict(point)
    seq_q, seq_kv = point.pop("lengths")
    head_dim, head_dim_v = point.pop("head_dims")
    facts = {"seq_q": seq_q, "seq_kv": seq_kv, "head_dim": head_dim, "head_dim_v": head_dim_v}
    problem = small(mask=point.pop("mask"), modifiers=point.pop("modifiers"), **facts)
    result = run(child, problem, **point)
    assert result.ok, result


@pytest.mark.parametrize(("changes", "heads"), [
    ({"mask": "full", "seq_q": 1}, 4), ({"mask": "causal", "seq_q": 5}, 4), ({"mask": "window:-1,3"}, 2),
    ({"mask": "full", "seq_q": 3, "head_dim": 40, "head_dim_v": 24, "modifiers": HEAVY}, 3),
])  # fmt: skip
@pytest.mark.parametrize("together", [0, 1])
def test_parts_of_a_tile_are_added_up_by_groups_of_eight(
    child: Pool, changes: dict[str, Any], heads: int, together: int
) -> None:
    problem = small(heads_q=heads, seq_kv=270, **changes)  # 17 blocks of keys: two groups, and one of a single part
    source = kernels.source(problem, SPLITS=32, PACK_GQA=together, parts_read="by_groups")
    assert "GROUP_PARTS" in source.text
    result = run(child, problem, SPLITS=32, PACK_GQA=together, parts_read="by_groups")
    assert result.ok, result


@pytest.mark.parametrize(("changes", "splits"), diagonal([
    {"mask": "blocks:16x32,0.5"}, {"dtype": DType.FLOAT32}, {"dtype": DType.FLOAT32, "precision": Precision.TF32},
    {"modifiers": Modifiers(dropout=True)}, {"modifiers": kernels.MODIFIERS[2]}, {"modifiers": kernels.MODIFIERS[5]},
    {"layout": Layout.BSHD, "batch": 3},
], (2, 4)), ids=str)  # fmt: skip
def test_every_other_kind_of_problem_may_be_shared(child: Pool, changes: dict[str, Any], splits: int) -> None:
    parts_read = "by_rows" if splits == 4 else "maxima_first"
    result = run(child, small(**changes), SPLITS=splits, parts_read=parts_read)
    assert result.ok, result


@pytest.mark.parametrize(("make", "softmax"), diagonal([
    interpreted.wild_values, interpreted.nan_in_hidden_keys, interpreted.overflowing, interpreted.rising,
    interpreted.falling, interpreted.sunken, interpreted.steep,
], ("first_max", "online")))  # fmt: skip
def test_numbers_that_spoil_one_programs_part_spoil_nothing_else(child: Pool, make: Any, softmax: str) -> None:
    result = run(child, small(mask="causal"), make, SPLITS=4, softmax=softmax)
    assert result.ok, result


def test_the_gates_steep_case_finds_a_second_computation_that_drops_blocks_of_a_shared_tile(child: Pool) -> None:
    seq_q, seq_kv = output_check.STEEP_LENGTHS
    problem = small(heads_q=1, mask="full", seq_q=seq_q, seq_kv=seq_kv)
    source = kernels.source(problem, SPLITS=8, softmax="first_max", BLOCK_M=128, BLOCK_N=128)
    blocks = "tl.range(begin_n, end_n, BLOCK_N, num_stages=1)"
    assert source.text.count(blocks) == 1
    fault = replace(source, text=source.text.replace(blocks, blocks.replace("end_n", "begin_n + BLOCK_N")))
    judged = [
        interpreted.result(child, Run(source=each, problem=problem, make=interpreted.steep)) for each in (source, fault)
    ]
    assert [result.ok for result in judged] == [True, False], judged


def test_sums_that_are_finite_one_by_one_do_not_overflow_together(child: Pool) -> None:
    """Around the first block's maximum each program's sum is about 2.6e38, which twice is more than float32 holds."""
    problem = small(seq_q=1, seq_kv=64, dtype=DType.FLOAT32)
    result = run(child, problem, huge_but_finite, SPLITS=2, softmax="first_max", scale=1.0)
    assert result.ok, result


def huge_but_finite(problem: Problem) -> Any:
    """Scores of 0 in the first block, then once 127.6 * ln(2) for each of two programs."""
    whole = interpreted.dense(problem)
    whole.query.zero_()
    whole.query[..., 0] = 1.0
    whole.key.zero_()
    whole.key[:, :, 24, 0] = whole.key[:, :, 40, 0] = 127.6 * 0.6931471805599453
    return whole


@pytest.mark.parametrize(
    "splits", rarely([1, 2, 4], lambda splits: splits == 2)
)  # the longest sequence has three blocks
@pytest.mark.parametrize("mask", ["full", "causal", "window:9,3", "window:-1,3"])
def test_packed_sequences_are_shared_too(child: Pool, mask: str, splits: int) -> None:
    problem = interpreted.packed(heads_q=4, heads_kv=2, mask=mask)
    result = run(child, problem, interpreted.ragged, SPLITS=splits, PACK_GQA=int(splits != 2), softmax="lazy")
    assert result.ok, result


@dataclass(frozen=True, slots=True, kw_only=True)
class Twice:
    """A kernel that is launched twice into the same room."""

    source: Source
    problem: Problem

    def run(self, memory: dict[Any, Any]) -> tuple[bool, int, bool]:
        """Runs in the child: whether both gave the same, what the counters hold then, and whether any part was read."""
        operands = interpreted.dense(self.problem)
        kernel = load(self.source, interpreted.CPU)
        name, size = forward.zeros(kernel, self.problem, operands.query) or ("", 0)
        assert name == "arrivals_ptr"
        room = torch.zeros(size, dtype=torch.int32)
        parts = torch.empty(forward.partials(kernel, self.problem, operands.query))
        outputs = []
        for filling in (float("nan"), 7.0):
            parts.fill_(filling)
            output = output_check.empty_output(self.problem, 0, interpreted.CPU)
            arguments = forward.launch_arguments(kernel, self.problem, operands, output, None)
            arguments |= {name: room, "partial_ptr": parts}
            kernel.launch(forward.launch_grid(kernel, self.problem, operands.query), arguments)
            outputs.append(output.clone())
        return torch.equal(*outputs), int(room.abs().sum()), bool((parts != 7.0).any())


@pytest.mark.parametrize(("parts_read", "splits"), [("maxima_first", 4), ("by_rows", 4), ("by_groups", 16)])
def test_a_launch_leaves_its_counters_at_zero_and_reads_no_part_that_it_did_not_write(
    child: Pool, parts_read: str, splits: int
) -> None:
    problem = small(mask="causal", seq_kv=270)
    source = kernels.source(problem, SPLITS=splits, parts_read=parts_read)
    outcome = child.result(Twice(source=source, problem=problem), interpreted.SECONDS)
    assert outcome == (True, 0, True)


@pytest.mark.parametrize(("right", "wrong"), [
    ("blocks * (part + 1) // parts", "blocks * part // parts"),
    ("== parts - 1", "== parts - 2"),
    ("acc += part_acc * shrink[:, None]", "acc += part_acc"),
    ("row_sum += part_sum * shrink", "row_sum += part_sum"),
    ("inner_end = tl.maximum(begin_n, tl.minimum(inner_end, end_n))", "inner_end = inner_end"),
])  # fmt: skip
def test_a_fault_in_the_sharing_is_seen(child: Pool, right: str, wrong: str) -> None:
    assert not broken(child, right, wrong, SPLITS=4).ok


@pytest.mark.parametrize(("right", "wrong"), [
    ("part_acc * shrink[:, :, None]", "part_acc"),
    ("part_sum * shrink", "part_sum"),
    ("for first in range(0, rows, ROWS)", "for first in range(0, ROWS, ROWS)"),
    ("m_t = o_t // ROWS == first // ROWS", "m_t = o_t // ROWS == 0"),
    ("(o_p < parts)[:, None]", "(o_p < parts - 1)[:, None]"),
])  # fmt: skip
def test_a_fault_in_the_adding_up_of_rows_is_seen(child: Pool, right: str, wrong: str) -> None:
    assert not broken(child, right, wrong, SPLITS=32, parts_read="by_rows", num_warps=1).ok


# --- heads that share keys as rows of a tile --------------------------------------------------------------------------


@pytest.mark.parametrize("point", kernels.covering({
    "mask": MASKS, "mask_loop": MASK_LOOPS, "softmax": SOFTMAXES, "SPLITS": (1, 2, 4), "PERSISTENT": (0, 1),
    "heads": ((4, 1), (6, 2), (17, 1)), "seq_q": (1, 7, 20), "modifiers": (Modifiers(), HEAVY),
    "layout": (Layout.BHSD, Layout.BSHD), "HEAD_GROUP": (1, 2),
}), ids=str)  # fmt: skip
def test_heads_that_share_keys_match_the_reference_as_rows_of_a_tile(child: Pool, point: dict[str, Any]) -> None:
    point = dict(point)
    heads_q, heads_kv = point.pop("heads")
    facts = {name: point.pop(name) for name in ("mask", "modifiers", "layout", "seq_q")}
    problem = small(batch=2, heads_q=heads_q, heads_kv=heads_kv, seq_kv=70, **facts)
    if point["SPLITS"] > 1:
        point["PERSISTENT"] = 0
    result = run(child, problem, PACK_GQA=1, sm_count=3, **point)
    assert result.ok, result


@pytest.mark.parametrize("make", [interpreted.wild_values, interpreted.steep])
def test_values_that_are_no_numbers_reach_only_the_rows_that_see_them_in_every_head(child: Pool, make: Any) -> None:
    problem = small(heads_q=4, mask="causal")
    result = run(child, problem, make, PACK_GQA=1, SPLITS=2, softmax="first_max")
    assert result.ok, result


@pytest.mark.parametrize(("right", "wrong"), [
    ("i_h = i_kv * group_size + o_r % group_size", "i_h = i_kv * group_size + o_r * 0"),
    ("o_m = o_r // group_size", "o_m = o_r"),
    ("stop_m = (start_r + BLOCK_M - 1) // group_size + 1", "stop_m = start_m + 1"),
])  # fmt: skip
def test_a_fault_in_the_packing_of_heads_is_seen(child: Pool, right: str, wrong: str) -> None:
    assert not broken(child, right, wrong, PACK_GQA=1).ok
