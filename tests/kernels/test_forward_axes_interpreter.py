"""Masks, packed sequences, head dims, precisions and modifiers in Triton's interpreter, one axis at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import interpreted
import kernels
import pytest
from interpreted import Run, run
from rarely import diagonal

from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Precision, Problem
from autoattn.core.variant import Source, Traits
from autoattn.workers.worker_pool import Pool

pytestmark = pytest.mark.interpreter

MASK_LOOPS = ("split", "every", "branch")
SOFTMAXES = ("online", "lazy", "first_max")


def small(**changes: Any) -> Problem:
    return kernels.problem(**{"batch": 1, "heads_q": 2, "heads_kv": 1, "seq_q": 37, "seq_kv": 53, **changes})


# --- windows ----------------------------------------------------------------------------------------------------------

LENGTHS = ((37, 53), (53, 37), (1, 33), (33, 1), (48, 48))
SIDES = ((9, 3), (0, 0), (16, 0), (15, 17), (5, -1), (-1, 5), (40, 40), (0, 1))


@pytest.mark.parametrize("point", kernels.covering({
    "sides": SIDES, "lengths": LENGTHS, "mask_loop": MASK_LOOPS, "softmax": SOFTMAXES,
    "row_order": ("descending", "ascending"),
}), ids=str)  # fmt: skip
def test_every_window_matches_the_reference(child: Pool, point: dict[str, Any]) -> None:
    point = dict(point)
    seq_q, seq_kv = point.pop("lengths")
    result = run(child, small(seq_q=seq_q, seq_kv=seq_kv, mask=Mask.window(*point.pop("sides"))), **point)
    assert result.ok, result


@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32)])
@pytest.mark.parametrize("left", [3, 15, 16, 17, 31, 47])
def test_every_place_of_a_windows_edge_in_a_block_matches_the_reference(
    child: Pool, left: int, block_m: int, block_n: int
) -> None:
    problem = small(heads_q=1, seq_q=65, seq_kv=70, mask=f"window:{left},0")
    result = run(child, problem, BLOCK_M=block_m, BLOCK_N=block_n)
    assert result.ok, result


@pytest.mark.parametrize(
    ("mask", "right", "wrong"),
    [
        ("window:9,3", ">= o_m[:, None] + first", "> o_m[:, None] + first"),
        ("window:9,3", "<= o_m[:, None] + last", "< o_m[:, None] + last"),
        ("window:9,3", "first = shift - window_left", "first = shift - window_left - 1"),
        ("window:9,3", "begin_n = tl.maximum(0, tl.minimum(seq_kv, start_m + first))", "begin_n = 16 + start_m * 0"),
        ("window:33,3", "inner_n = tl.cdiv(", "inner_n = 0 * tl.cdiv("),
        ("causal", "end_n = tl.maximum(0, tl.minimum(seq_kv, start_m + BLOCK_M + last))", "end_n = start_m + 16"),
    ],
)
def test_a_window_that_is_wrong_by_one_is_seen(child: Pool, mask: str, right: str, wrong: str) -> None:
    problem = small(mask=mask)
    assert not interpreted.result(
        child, Run(source=broken(problem, right, wrong), problem=problem, make=interpreted.dense)
    ).ok


def broken(problem: Problem, right: str, wrong: str, **changes: Any) -> Source:
    """The kernel with a fault planted in its text."""
    source = kernels.source(problem, **changes)
    assert right in source.text
    return replace(source, text=source.text.replace(right, wrong))


# --- packed sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", kernels.covering({
    "mask": ("full", "causal", "window:9,3", "window:7,-1"), "mask_loop": MASK_LOOPS, "softmax": SOFTMAXES,
    "BLOCK_M": (16, 32), "PERSISTENT": (0, 1), "HEAD_GROUP": (1, 0), "row_order": ("descending", "ascending"),
}), ids=str)  # fmt: skip
def test_packed_sequences_match_the_reference(child: Pool, point: dict[str, Any]) -> None:
    """Empty ones, ones with keys or queries alone, and a tail: its output is 0 and its LSE -inf."""
    point = dict(point)
    problem = interpreted.packed(heads_q=2, heads_kv=1, mask=point.pop("mask"))
    result = run(child, problem, interpreted.ragged, sm_count=3, **point)
    assert result.blind_zero
    assert result.lse_blind
    assert result.ok, result


def test_a_packed_kernel_that_looks_past_a_sequence_is_seen(child: Pool) -> None:
    problem = interpreted.packed(heads_q=2, heads_kv=1)
    source = broken(problem, "seq_kv = tl.where(start_m < seq_q, tl.maximum(seq_kv, 0), 0)", "seq_kv += 1")
    assert not interpreted.result(child, Run(source=source, problem=problem, make=interpreted.ragged)).ok


# --- head dims and precisions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(16, 16), (80, 80), (96, 96), (72, 72), (40, 40), (192, 192), (16, 64), (64, 16), (33, 17), (24, 80), (96, 20),
     (1, 3), (8, 512), (192, 128)],
)  # fmt: skip
@pytest.mark.parametrize("split", [0, 1])
def test_head_dims_of_their_own_match_the_reference(child: Pool, head_dim: int, head_dim_v: int, split: int) -> None:
    problem = small(seq_q=7, seq_kv=21, head_dim=head_dim, head_dim_v=head_dim_v, mask="causal")
    result = run(child, problem, HEAD_SPLIT=split)
    assert result.ok, result


@pytest.mark.parametrize("precision", [Precision.IEEE, Precision.TF32X3])
@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_float32_keeps_its_precision(child: Pool, precision: Precision, softmax: str) -> None:
    problem = small(dtype=DType.FLOAT32, precision=precision, head_dim=24, mask="window:9,3")
    result = run(child, problem, softmax=softmax)
    assert result.ok, result
    assert result.max_error < 2e-5


# --- modifiers --------------------------------------------------------------------------------------------------------

MODIFIERS = {
    "softcap": Modifiers(softcap=True),
    "alibi": Modifiers(alibi=True),
    "sinks": Modifiers(sinks=True),
    "dropout": Modifiers(dropout=True),
    "keys": Modifiers(bias=Bias.KEYS),
    "boolean": Modifiers(bias=Bias.BOOLEAN),
    "additive": Modifiers(bias=Bias.ADDITIVE),
    "score_mod": Modifiers(score_mod="captured0: float32[2]\nscore * captured0[h, kv_idx] + (q_idx - kv_idx) % 7"),
    "score_mod of heads": Modifiers(score_mod="captured0: float32[2]\nscore * captured0[b, h] - kv_idx / 8"),
    "hiding score_mod": Modifiers(score_mod="where((q_idx + b) % 5 > kv_idx // 4, score, -inf)"),
}
PACKED_TOO = [name for name, modifiers in MODIFIERS.items() if modifiers.bias is Bias.NONE]


@pytest.mark.parametrize("point", kernels.covering({
    "name": tuple(MODIFIERS), "mask": ("full", "causal", "causal:top-left", "window:9,3"), "softmax": SOFTMAXES,
    "mask_loop": MASK_LOOPS, "head_dim": (16, 24), "dtype": (DType.FLOAT16, DType.FLOAT32),
}), ids=str)  # fmt: skip
def test_every_modifier_matches_the_reference(child: Pool, point: dict[str, Any]) -> None:
    point = dict(point)
    facts = {name: point.pop(name) for name in ("mask", "head_dim", "dtype")}
    result = run(child, small(batch=2, seq_q=19, seq_kv=35, modifiers=MODIFIERS[point.pop("name")], **facts), **point)
    assert result.ok, result


@pytest.mark.parametrize("seq_kv", [35, 48], ids=["loaded one by one", "loaded by 16 bytes"])
def test_a_row_of_a_bias_that_queries_share_matches_the_reference(child: Pool, seq_kv: int) -> None:
    problem = small(batch=2, seq_q=19, seq_kv=seq_kv, mask="causal", modifiers=MODIFIERS["additive"])
    traits = interpreted.traits_for(problem, interpreted.biased_by_row, lse=True)
    assert traits.bias_shared
    assert (traits.bias_alignment == 8) is (seq_kv == 48)
    assert "stride_bs +" not in kernels.source(problem, traits).text
    result = run(child, problem, interpreted.biased_by_row)
    assert result.ok, result


@pytest.mark.parametrize("name", PACKED_TOO)
def test_every_modifier_of_packed_sequences_matches_the_reference(child: Pool, name: str) -> None:
    problem = interpreted.packed(heads_q=2, heads_kv=1, mask="causal", modifiers=MODIFIERS[name])
    result = run(child, problem, interpreted.ragged)
    assert result.ok, result


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_all_modifiers_at_once_match_the_reference(child: Pool, softmax: str) -> None:
    modifiers = replace(MODIFIERS["score_mod"], softcap=True, alibi=True, bias=Bias.ADDITIVE, sinks=True, dropout=True)
    result = run(child, small(batch=2, seq_q=19, seq_kv=35, mask="window:9,3", modifiers=modifiers), softmax=softmax)
    assert result.ok, result


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("softcap", "scores = softcap * tanh(scores / softcap)", "scores = softcap * tanh(scores)"),
        ("alibi", "+ shift - o_n[None, :]", "- o_n[None, :]"),
        ("sinks", "tl.load(sinks_ptr + i_h)", "tl.load(sinks_ptr + i_h * 0)"),
        ("dropout", "zero + row, zero)", "zero, zero)"),
        ("dropout", "< drop_below", "> drop_below"),
        ("keys", "bias_ptr + o_n * stride_bn, mask=o_n < seq_kv", "bias_ptr + o_n * 0, mask=o_n < seq_kv"),
        ("boolean", "bias != 0", "bias == 0"),
        ("additive", "scores += bias", "scores -= bias"),
        ("score_mod", "rest + right, rest)", "rest, rest)"),
        ("score_mod", "captured0_stride0 + kv_idx", "captured0_stride0"),
        ("score_mod of heads", "= read_by_head(sequence, i_h,", "= read_by_head(sequence, i_kv,"),
    ],
)
def test_a_modifier_that_is_a_little_wrong_is_seen(child: Pool, name: str, right: str, wrong: str) -> None:
    problem = small(batch=2, seq_q=19, seq_kv=35, modifiers=MODIFIERS[name])
    source = broken(problem, right, wrong, mask_loop="every") if name != "keys" else broken(problem, right, wrong)
    assert not interpreted.result(child, Run(source=source, problem=problem, make=interpreted.dense)).ok


def test_dropout_draws_the_references_numbers_whatever_the_tiles(child: Pool) -> None:
    """One weight of another number would change an output by far more than is allowed."""
    problem = small(batch=2, seq_q=33, seq_kv=50, dtype=DType.FLOAT32, modifiers=MODIFIERS["dropout"])
    tiles: list[dict[str, Any]] = [{}, {"BLOCK_M": 32, "BLOCK_N": 32}, {"PERSISTENT": 2, "HEAD_GROUP": 0}]
    for tile in tiles:
        result = run(child, problem, **tile)
        assert result.ok, result


# --- block tables -----------------------------------------------------------------------------------------------------

MOD = "captured0: int32[1]\n(captured0[q_idx] == captured0[kv_idx]) | (kv_idx % 3 == h)"
TABLES = {
    "16": Mask.blocks(16, 16, 0.5),
    "32x64": Mask.blocks(32, 64, 0.5),
    "64x16": Mask.blocks(64, 16, 0.5),
    "empty": Mask.blocks(16, 16, 0.0),
    "whole": Mask.blocks(16, 16, 1.0),
    "mod": Mask.blocks(16, 16, 0.7, MOD),
    "mod 32": Mask.blocks(32, 32, 0.7, MOD),
}


@pytest.mark.parametrize("point", kernels.covering({
    "name": tuple(TABLES), "lengths": ((37, 53), (53, 37), (64, 64)), "softmax": SOFTMAXES, "mask_loop": MASK_LOOPS,
    "make": (interpreted.inside_nan, interpreted.steep),
}), ids=lambda point: "-".join(str(getattr(value, "__name__", value)) for value in point.values()))  # fmt: skip
def test_every_block_table_matches_the_reference(child: Pool, point: dict[str, Any]) -> None:
    point = dict(point)
    seq_q, seq_kv = point.pop("lengths")
    problem = small(batch=2, seq_q=seq_q, seq_kv=seq_kv, mask=TABLES[point.pop("name")])
    result = run(child, problem, point.pop("make"), **point)
    assert result.ok, result


def test_full_blocks_are_not_cut_by_the_expression_when_a_tile_is_computed_anew(child: Pool) -> None:
    problem = small(seq_q=16, seq_kv=48, mask=TABLES["mod"])
    for make in (interpreted.steep, interpreted.wild_values):
        result = run(child, problem, make, softmax="first_max")
        assert result.ok, result


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_a_block_that_is_not_listed_has_no_say_in_the_maximum(child: Pool, softmax: str) -> None:
    """Key block 0 has by far the largest scores, and no row sees it."""
    problem = small(seq_q=16, seq_kv=48, mask=TABLES["16"], modifiers=Modifiers(sinks=True))
    result = run(child, problem, interpreted.loud_block_that_is_not_listed, softmax=softmax)
    assert result.ok, result


# --- NaN and inf ------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": "causal", "seq_q": 20, "seq_kv": 50},
    "top-left": {"mask": "causal:top-left", "seq_q": 20, "seq_kv": 50},
    "window": {"mask": "window:3,1", "seq_q": 5, "seq_kv": 50},
    "one side": {"mask": "window:3,-1", "seq_q": 5, "seq_kv": 50},
    "keys": {"modifiers": Modifiers(bias=Bias.KEYS)},
    "boolean": {"modifiers": Modifiers(bias=Bias.BOOLEAN), "seq_q": 3},
    "additive": {"modifiers": Modifiers(bias=Bias.ADDITIVE), "seq_q": 3},
    "blocks": {"mask": TABLES["16"], "seq_q": 16},
    "mod": {"mask": Mask.blocks(16, 16, 0.5, "kv_idx % 4 == 0"), "seq_q": 16},
}


@pytest.mark.parametrize(("kind", "softmax"), diagonal(KINDS, SOFTMAXES))
def test_nan_in_hidden_keys_and_values_never_leaks(child: Pool, kind: str, softmax: str) -> None:
    result = run(child, small(**KINDS[kind]), interpreted.nan_in_hidden_keys, softmax=softmax)
    assert result.ok, result


@pytest.mark.parametrize(("kind", "softmax"), diagonal(KINDS, SOFTMAXES))
def test_values_that_are_nan_or_inf_reach_just_the_rows_that_see_them(child: Pool, kind: str, softmax: str) -> None:
    """And inf keeps its sign."""
    result = run(child, small(**{**KINDS[kind], "seq_q": 37, "seq_kv": 53}), interpreted.wild_values, softmax=softmax)
    assert result.max_error <= result.allowed, result


# --- traits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", ["packed", "window", "blocks", "modifiers"])
def test_kernels_for_any_stride_take_the_new_axes(child: Pool, name: str, wide: bool) -> None:
    heavy = replace(MODIFIERS["score_mod"], alibi=True, bias=Bias.ADDITIVE)
    problem = {
        "packed": interpreted.packed(heads_q=2, heads_kv=1, mask="causal"),
        "window": small(mask="window:9,3", head_dim=80, head_dim_v=24, layout=Layout.BSHD),
        "blocks": small(mask=TABLES["mod"]),
        "modifiers": small(modifiers=heavy),
    }[name]
    bias = "fp16" if problem.modifiers.bias is not Bias.NONE else ""
    make = interpreted.ragged if name == "packed" else interpreted.odd_strides
    result = run(child, problem, make, traits=Traits(alignment=1, wide=wide, lse=True, bias=bias), HEAD_SPLIT=1)
    assert result.ok, result
