"""The backward template's numbers, in Triton's interpreter: every mask, awkward sizes and strides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gradient_kernels
import interpreted
import kernels
import pytest
from gradient_kernels import Differentiated, judged
from rarely import diagonal, rarely

from autoattn.codegen import render
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Op, Precision, Problem
from autoattn.core.variant import Traits
from autoattn.reference.inputs import Scores
from autoattn.runtime.plan.gradient_problem import Learned
from autoattn.validation import gradient_check
from autoattn.workers.worker_pool import Failure, Pool

pytestmark = pytest.mark.interpreter

MASKS = ("full", "causal", "causal:top-left", "window:5,3", "window:0,0", "window:7,-1", "window:-1,3", "window:20,0")
POINTS = kernels.covering(
    {
        "mask": MASKS,
        "lengths": ((17, 37), (37, 17), (32, 16)),
        "heads": ((2, 2, 2), (1, 4, 2), (1, 3, 1)),
        "dims": ((16, 16), (24, 40), (13, 13)),
        "layout": (Layout.BHSD, Layout.BSHD),
        "dtype": (DType.FLOAT16, DType.FLOAT32),
        "queries_loads": ("pointer", "descriptor"),
        "keys_loads": ("pointer", "descriptor"),
        "tiles": ((16, 16, 16, 16), (32, 16, 16, 32), (16, 32, 32, 16)),
        "HEAD_GROUP": (1, 4),
    }
)


def make_problem(**changes: Any) -> Problem:
    """Two sequences of two heads that share their keys: the least that tells each from the others."""
    return gradient_kernels.problem(**{"heads_q": 2, "heads_kv": 1, **changes})


@pytest.mark.parametrize("point", POINTS, ids=lambda point: "-".join(str(value) for value in point.values()))
def test_gradients_agree_with_autograd_through_the_reference(child: Pool, point: dict[str, Any]) -> None:
    batch, heads_q, heads_kv = point["heads"]
    problem = make_problem(
        dtype=point["dtype"], mask=point["mask"], layout=point["layout"], batch=batch, heads_q=heads_q,
        heads_kv=heads_kv, seq_q=point["lengths"][0], seq_kv=point["lengths"][1], head_dim=point["dims"][0],
        head_dim_v=point["dims"][1],
    )  # fmt: skip
    names = ("QUERIES_BLOCK_M", "QUERIES_BLOCK_N", "KEYS_BLOCK_N", "KEYS_BLOCK_M")
    tiles = dict(zip(names, point["tiles"], strict=True))
    loads = {name: point[name] for name in ("queries_loads", "keys_loads")}
    verdict = judged(child, problem, HEAD_GROUP=point["HEAD_GROUP"], **loads, **tiles)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("scores", "dtype"), diagonal((Scores.LOUD, Scores.STEEP), (DType.FLOAT16, DType.FLOAT32)))
def test_scores_that_rise_far_keep_their_gradients(child: Pool, scores: Scores, dtype: DType) -> None:
    verdict = judged(child, make_problem(dtype=dtype, mask="causal", seq_q=37, seq_kv=50), scores=scores)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(
    ("modifiers", "loads"),
    diagonal(
        (Modifiers(softcap=True), Modifiers(alibi=True), Modifiers(softcap=True, alibi=True)),
        ("pointer", "descriptor"),
    ),
)
def test_changed_scores_have_gradients(child: Pool, modifiers: Modifiers, loads: str) -> None:
    problem = make_problem(mask="window:9,4", modifiers=modifiers, dtype=DType.FLOAT32)
    assert judged(child, problem, queries_loads=loads, keys_loads=loads).ok


def test_tf32_gradients_are_as_good_as_pytorchs(child: Pool) -> None:
    assert judged(child, make_problem(dtype=DType.FLOAT32, precision=Precision.TF32, mask="causal")).ok


@pytest.mark.parametrize("modifiers", [Modifiers(), Modifiers(sinks=True)])
def test_an_lse_has_a_gradient_too(child: Pool, modifiers: Modifiers) -> None:
    problem = make_problem(mask="causal", dtype=DType.FLOAT32, modifiers=modifiers, seq_q=37, seq_kv=20)
    verdict = judged(child, problem, Traits(lse=True))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("bias", [Bias.KEYS, Bias.BOOLEAN, Bias.ADDITIVE])
def test_biases_are_part_of_the_scores(child: Pool, bias: Bias) -> None:
    problem = make_problem(mask="causal", modifiers=Modifiers(bias=bias), dtype=DType.FLOAT32)
    verdict = judged(child, problem, QUERIES_BLOCK_N=32)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("aligned", [0, 1])
def test_a_row_of_a_bias_that_queries_share_is_part_of_their_scores(child: Pool, aligned: int) -> None:
    problem = make_problem(mask="causal", modifiers=Modifiers(bias=Bias.ADDITIVE), dtype=DType.FLOAT32)
    traits = replace(render.natural_traits(problem), bias_shared=True, bias_alignment=aligned)
    verdict = judged(child, problem, traits, make=interpreted.biased_by_row)
    assert verdict.ok, verdict.reason


def test_a_row_of_a_bias_that_queries_share_has_a_gradient(child: Pool) -> None:
    problem = make_problem(mask="full", modifiers=LEARNED, dtype=DType.FLOAT32)
    traits = replace(render.natural_traits(problem), bias_shared=True)
    verdict = judged(child, problem, traits, small=(37, 50), number=3)
    assert gradient_check.SHARINGS[3][2], "queries share it"
    assert verdict.ok, verdict.reason


SCORE_MODS: tuple[dict[str, Any], ...] = (
    {"mask": "causal", "modifiers": Modifiers(score_mod="score * score / 4 - abs(q_idx - kv_idx) / 8", softcap=True)},
    {
        "mask": "window:9,4",
        "modifiers": Modifiers(score_mod="captured0: float32[2]\nx = score * captured0[h, kv_idx]\nx + tanh(x + b)"),
    },
    # Where scores are hidden or lie beyond the end, they are 0, and their logarithm's derivative is no number.
    {"mask": "full", "modifiers": Modifiers(score_mod="where(q_idx % 3 == kv_idx % 3, -inf, log(abs(score)))")},
    {
        "mask": Mask.blocks(16, 32, 0.5, "captured0: int32[1]\ncaptured0[q_idx] >= captured0[kv_idx]"),
        "modifiers": Modifiers(score_mod="captured0: float32[1]\nsigmoid(score) * captured0[q_idx] % 5", sinks=True),
    },
    {
        "mask": "causal", "layout": Layout.PACKED, "tokens_q": 60, "tokens_kv": 70, "small": (33, 50),
        "modifiers": Modifiers(score_mod="captured0: float32[1]\nscore * captured0[b] + h", alibi=True),
    },
    {"mask": "causal", "modifiers": Modifiers(score_mod="minimum(score * 2, score + h)", bias=Bias.LEARNED)},
)  # fmt: skip


@pytest.mark.parametrize("facts", SCORE_MODS, ids=lambda facts: facts["modifiers"].score_mod)
def test_changed_scores_have_the_gradients_of_any_expression(child: Pool, facts: dict[str, Any]) -> None:
    small = facts.get("small")
    problem = make_problem(dtype=DType.FLOAT32, **{name: value for name, value in facts.items() if name != "small"})
    verdict = judged(child, problem, small=small)
    assert verdict.ok, verdict.reason


LEARNED = Modifiers(bias=Bias.LEARNED)
LEARNERS: tuple[dict[str, Any], ...] = (  # one for each way to share a bias
    {"mask": "full", "queries_loads": "descriptor", "keys_loads": "descriptor", "dtype": DType.FLOAT16},
    {"mask": "causal", "modifiers": replace(LEARNED, softcap=True), "head_dim": 13, "head_dim_v": 24},
    {"mask": "window:5,3", "modifiers": replace(LEARNED, alibi=True), "QUERIES_BLOCK_N": 32},
    {"mask": Mask.blocks(32, 16, 0.5, "q_idx > kv_idx"), "modifiers": replace(LEARNED, sinks=True)},
    {"mask": Mask.blocks(16, 16, 0.5, "(q_idx + h + b) % 3 != kv_idx % 3")},
    {"mask": "causal:top-left", "modifiers": replace(LEARNED, dropout=True), "dtype": DType.FLOAT16},
    {"mask": "full", "modifiers": replace(LEARNED, sinks=True), "QUERIES_BLOCK_M": 32},
)


@pytest.mark.parametrize("number", rarely(range(len(gradient_check.SHARINGS)), lambda number: number % 2 == 0))
def test_a_learned_bias_has_a_gradient_whoever_shares_it(child: Pool, number: int) -> None:
    facts = {"modifiers": LEARNED, "dtype": DType.FLOAT32, **LEARNERS[number]}
    params = {name: facts.pop(name) for name in [*facts] if name in gradient_kernels.BASE}
    verdict = judged(child, make_problem(**facts), small=(37, 50), number=number, **params)
    assert verdict.ok, verdict.reason


SLOPED = Modifiers(alibi=True, learned_slopes=True)
SLOPES: tuple[dict[str, Any], ...] = (
    {"mask": "full", "queries_loads": "descriptor", "keys_loads": "descriptor", "dtype": DType.FLOAT16},
    {"mask": "causal", "modifiers": replace(SLOPED, softcap=True, sinks=True), "head_dim": 13, "head_dim_v": 24},
    {"mask": "causal:top-left", "layout": Layout.BSHD, "dtype": DType.FLOAT16, "QUERIES_BLOCK_M": 32},
    {"mask": "window:5,3", "modifiers": replace(SLOPED, dropout=True), "QUERIES_BLOCK_N": 32},
    {"mask": "causal", "layout": Layout.PACKED, "tokens_q": 60, "tokens_kv": 70, "HEAD_GROUP": 4},
    {"mask": "full", "layout": Layout.PACKED, "tokens_q": 60, "tokens_kv": 70, "dtype": DType.FLOAT16},
    {"mask": Mask.blocks(32, 16, 0.5, "(q_idx + h + b) % 3 != kv_idx % 3")},
    {"mask": "causal", "modifiers": replace(SLOPED, bias=Bias.LEARNED, score_mod="tanh(score) * 2")},
    {"mask": "causal", "precision": Precision.TF32},
)


@pytest.mark.parametrize("facts", rarely(SLOPES, lambda facts: facts in SLOPES[::2]), ids=str)
def test_learned_slopes_have_gradients(child: Pool, facts: dict[str, Any]) -> None:
    facts = {"modifiers": SLOPED, "dtype": DType.FLOAT32, **facts}
    params = {name: facts.pop(name) for name in [*facts] if name in gradient_kernels.BASE}
    verdict = judged(child, make_problem(**facts), small=(37, 50), **params)
    assert verdict.ok, verdict.reason


def test_a_slope_has_the_gradient_of_an_lse_too(child: Pool) -> None:
    problem = make_problem(mask="causal", dtype=DType.FLOAT32, modifiers=SLOPED, seq_q=37, seq_kv=20)
    verdict = judged(child, problem, Traits(lse=True))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(
    ("modifiers", "layout"),
    diagonal((Modifiers(sinks=True), Modifiers(dropout=True)), (Layout.BSHD, Layout.PACKED)),
)
def test_sinks_and_dropout_have_gradients(child: Pool, modifiers: Modifiers, layout: Layout) -> None:
    tokens = {"tokens_q": 60, "tokens_kv": 70} if layout is Layout.PACKED else {}
    problem = make_problem(mask="causal", modifiers=modifiers, dtype=DType.FLOAT32, layout=layout, **tokens)
    verdict = judged(child, problem, small=(33, 50))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("mask", ["full", "causal", "window:5,3", "window:5,-1"])
def test_packed_sequences_have_gradients_of_their_own_pairs_alone(child: Pool, mask: str) -> None:
    problem = make_problem(mask=mask, layout=Layout.PACKED, tokens_q=60, tokens_kv=70, modifiers=Modifiers(alibi=True))
    verdict = judged(child, problem, small=(33, 50), KEYS_BLOCK_N=32, HEAD_GROUP=4)
    assert verdict.ok, verdict.reason


TABLES = {  # name -> what partial blocks keep
    "listed blocks": "",
    "documents": "captured0: int32[1]\ncaptured0[q_idx] >= captured0[kv_idx]",
    "by heads": "(q_idx + h + b) % 3 != kv_idx % 3",
}


@pytest.mark.parametrize(("name", "loads"), diagonal(TABLES, ("pointer", "descriptor")))
def test_block_tables_have_gradients(child: Pool, name: str, loads: str) -> None:
    mod = TABLES[name]
    problem = make_problem(mask=Mask.blocks(16, 32, 0.5, mod), seq_q=45, seq_kv=70, layout=Layout.BSHD)
    verdict = judged(child, problem, queries_loads=loads, keys_loads=loads)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("tiles", [(32, 16, 16, 32), (16, 32, 32, 16)])
def test_each_head_may_have_a_table_of_its_own(child: Pool, tiles: tuple[int, ...]) -> None:
    names = ("QUERIES_BLOCK_M", "QUERIES_BLOCK_N", "KEYS_BLOCK_N", "KEYS_BLOCK_M")
    problem = make_problem(mask=Mask.blocks(32, 32, 0.5, "q_idx >= kv_idx"), seq_q=75, seq_kv=70, dtype=DType.FLOAT32)
    chosen: dict[str, Any] = dict(zip(names, tiles, strict=True))
    verdict = judged(child, problem, make=interpreted.tables_of_heads, **chosen)
    assert verdict.ok, verdict.reason


def test_modified_scores_in_a_block_table_have_gradients(child: Pool) -> None:
    modifiers = Modifiers(softcap=True, alibi=True, bias=Bias.ADDITIVE, sinks=True, dropout=True)
    problem = make_problem(mask=Mask.blocks(16, 32, 0.6, "q_idx != kv_idx"), modifiers=modifiers, dtype=DType.FLOAT32)
    verdict = judged(child, problem)
    assert verdict.ok, verdict.reason


def test_offsets_of_64_bits_and_strides_that_nothing_divides_serve_any_tensors(child: Pool) -> None:
    problem = make_problem(mask="window:5,-1", layout=Layout.BSHD, head_dim=24, head_dim_v=16)
    assert judged(child, problem, Traits(alignment=1, wide=True)).ok
    # Where the TMA unit could not read the tensors, the same variant is rendered with pointers.
    source = gradient_kernels.source(problem, Traits(alignment=1), queries_loads="descriptor", keys_loads="descriptor")
    assert "tensordesc" not in source.text
    assert judged(child, problem, source_=source).ok


@pytest.mark.parametrize("layout", [Layout.BHSD, Layout.BSHD])
def test_autograd_runs_both_passes(child: Pool, layout: Layout) -> None:
    problem = replace(
        make_problem(mask="causal", dtype=DType.FLOAT32, layout=layout, seq_q=37, seq_kv=20, head_dim_v=24),
        op=Op.FORWARD,
    )
    job = Differentiated(
        forward=kernels.source(problem, render.natural_traits(problem, lse=True)),
        backward=gradient_kernels.source(replace(problem, op=Op.BACKWARD)),
        problem=problem,
    )
    errors = child.result(job, interpreted.SECONDS)
    assert not isinstance(errors, Failure), errors.detail
    assert max(errors.values()) < 1e-5, errors


def test_autograd_learns_a_bias(child: Pool) -> None:
    problem = kernels.problem(mask="causal", dtype=DType.FLOAT32, modifiers=Modifiers(bias=Bias.ADDITIVE, softcap=True))
    job = Differentiated(
        forward=kernels.source(problem, render.natural_traits(problem, lse=True)),
        backward=gradient_kernels.source(replace(problem, op=Op.BACKWARD, modifiers=replace(LEARNED, softcap=True))),
        problem=problem,
        learned=Learned(bias=True),
    )
    errors = child.result(job, interpreted.SECONDS)
    assert not isinstance(errors, Failure), errors.detail
    assert set(errors) == {"output", "query", "key", "value", "narrow_bias"}
    assert max(errors.values()) < 2e-5, errors


def test_autograd_learns_slopes(child: Pool) -> None:
    modifiers = Modifiers(alibi=True, softcap=True)
    problem = kernels.problem(mask="causal", dtype=DType.FLOAT32, modifiers=modifiers)
    backward_problem = replace(problem, op=Op.BACKWARD, modifiers=replace(modifiers, learned_slopes=True))
    job = Differentiated(
        forward=kernels.source(problem, render.natural_traits(problem, lse=True)),
        backward=gradient_kernels.source(backward_problem),
        problem=problem,
        learned=Learned(slopes=True),
    )
    errors = child.result(job, interpreted.SECONDS)
    assert not isinstance(errors, Failure), errors.detail
    assert set(errors) == {"output", "query", "key", "value", "slopes"}
    assert errors.pop("slopes") < 1e-3  # a sum of distances up to 50
    assert max(errors.values()) < 2e-5, errors


SPOILT = {
    "a sharer of the bias left out": ("tl.range(0, sharers)", "tl.range(1, sharers)"),
    "a slope that grows with its scores": ("slope_grad -= tl.sum", "slope_grad += tl.sum"),
    "a slope's distances with a sign": (
        "tl.sum(score_grads * distance, 1)", "tl.sum(score_grads * (o_m[:, None] + shift - o_n[None, :]), 1)"
    ),
    "a slope that softcap bends": (
        "tl.sum(score_grads * distance, 1)", "tl.sum(score_grads * distance * (1.0 - bent * bent), 1)"
    ),
    "a tail of a slope's queries left out": ("range(0, seq_q, 1024)", "range(0, seq_q - 1023, 1024)"),
    "scores that do not grow": ("score_grads * growth", "score_grads"),
    "a bias that softcap bends": ("bias_grads = weights *", "bias_grads = (1.0 - bent * bent) * weights *"),
    "a mask that is one off": ("<= o_m[None, :] + last", "< o_m[None, :] + last"),
    "no delta": ("weight_grads - delta[:, None]", "weight_grads"),
    "one head of a group left out": ("range(0, group_size)", "range(1, group_size)"),
    "a scale forgotten": ("(query_grad * scale)", "query_grad"),
    "a tail of queries left out": ("end_m = seq_q", "end_m = seq_q // KEYS_BLOCK_M * KEYS_BLOCK_M"),
    "a store out of bounds": ("mask=m_n[:, None])\n    tl.store", "mask=(o_n <= seq_kv)[:, None])\n    tl.store"),
    "a small LSE cut off": ('float("inf"), lse * LOG2E)', 'float("inf"), tl.maximum(lse * LOG2E, 1.0))'),
    "queries beyond the end of a table's last block": (
        "output_grad_ptrs + start_m * stride_dos, mask=m_m[:, None], other=0.0)",
        "output_grad_ptrs + start_m * stride_dos)",
    ),
    "a table that is not turned": ("turned_partial_blocks_ptr + ", "turned_full_blocks_ptr + "),
}  # fmt: skip


WHOLE = make_problem(batch=1, mask="causal", seq_q=41, seq_kv=23)


def test_the_gate_takes_the_kernel_that_is_spoilt_below(child: Pool) -> None:
    assert judged(child, WHOLE).ok


@pytest.mark.parametrize("change", SPOILT.values(), ids=SPOILT.keys())
def test_the_gate_sees_what_is_wrong(child: Pool, change: tuple[str, str], request: pytest.FixtureRequest) -> None:
    problem = WHOLE
    if "table" in request.node.name:
        problem = make_problem(batch=1, mask=Mask.blocks(16, 16, 0.5, "q_idx > kv_idx"), seq_q=41, seq_kv=23)
    if "grow" in request.node.name:
        problem = make_problem(mask="causal", seq_q=21, seq_kv=23, modifiers=Modifiers(score_mod="tanh(score) * 2"))
    if "slope" in request.node.name:
        problem = make_problem(
            mask="full", seq_q=21, seq_kv=23, modifiers=replace(SLOPED, softcap=True), dtype=DType.FLOAT32
        )
    if "bias" in request.node.name:
        problem = make_problem(mask="causal", seq_q=21, seq_kv=23, modifiers=replace(LEARNED, softcap=True))
    source = gradient_kernels.source(problem)
    assert change[0] in source.text
    spoilt = replace(source, text=source.text.replace(*change))
    assert not judged(child, problem, source_=spoilt).ok


def test_the_gate_sees_a_row_without_keys_whose_lse_stays_minus_infinity(child: Pool) -> None:
    """What a bias hides has a score of -inf, and -inf less -inf is NaN; a mask's tests would hide that."""
    hidden = Modifiers(bias=Bias.BOOLEAN)
    problem = make_problem(batch=1, mask="causal", seq_q=41, seq_kv=23, dtype=DType.FLOAT32, modifiers=hidden)
    source = gradient_kernels.source(problem)
    right = 'tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)'
    assert right in source.text
    assert judged(child, problem, source_=source).ok
    verdict = judged(child, problem, source_=replace(source, text=source.text.replace(right, "lse * LOG2E")))
    assert "NaN" in verdict.reason
