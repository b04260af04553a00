"""Random operands: every axis of a problem is there, reproducible, and able to show a fault."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import cached
import drawn
import interpreted
import kernels
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoattn.core.call_arguments import BY_NAME
from autoattn.core.key_cache import KeyCache
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout
from autoattn.reference import attention_formula, inputs
from autoattn.reference.inputs import Scores

CPU = torch.device("cpu")


def operands_of(problem, **facts):
    return inputs.make(problem, CPU, torch.Generator().manual_seed(0), **facts)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_operands_of_any_problem_have_its_shapes(rng: random.Random) -> None:
    call = drawn.call_of(rng, drawn.TINY)
    problem, operands = call.problem, call.operands(CPU)
    batch, tokens_q, tokens_kv = (
        (1, problem.tokens_q, problem.tokens_kv) if problem.packed else (problem.batch, problem.seq_q, problem.seq_kv)
    )
    assert operands.query.shape == (batch, problem.heads_q, tokens_q, problem.head_dim)
    assert operands.key.shape == (batch, problem.heads_kv, tokens_kv, problem.head_dim)
    assert operands.value.shape == (batch, problem.heads_kv, tokens_kv, problem.head_dim_v)
    assert (operands.bias is not None) == (problem.modifiers.bias is not Bias.NONE)
    assert (operands.table is not None) == problem.mask.sparse
    assert (operands.cu_seqlens_q is not None) == problem.packed
    if call.lengths is not None:
        assert [pair[1::2] for pair in operands.spans()] == list(call.lengths)


def test_a_seed_gives_the_same_numbers_and_another_gives_others() -> None:
    problem = kernels.problem(modifiers=kernels.MODIFIERS[5])
    first, again = operands_of(problem), operands_of(problem)
    assert torch.equal(first.query, again.query)
    assert torch.equal(first.score_captures[0], again.score_captures[0])
    other = inputs.make(problem, CPU, torch.Generator().manual_seed(1))
    assert not torch.equal(first.query, other.query)


def test_steep_scores_overflow_in_float32_around_the_first_keys() -> None:
    operands = operands_of(kernels.problem(dtype=DType.FLOAT32, head_dim=64), scores=Scores.STEEP)
    scores = operands.query[:, :2] @ operands.key.mT * operands.scale
    rise = scores[..., -1] - scores[..., :16].amax(-1)
    assert float(rise.max()) > 89.0


@pytest.mark.parametrize("backwards", [False, True], ids=["from the first key", "from the last key"])
@pytest.mark.parametrize("mask", ["full", "causal", "window:128,0", "window:100,40"])
def test_outgrown_scores_overflow_in_every_tile_around_its_first_keys(mask: str, backwards: bool) -> None:
    """But in tiles that see these keys alone."""
    problem = kernels.problem(dtype=DType.FLOAT32, head_dim=64, seq_q=640, seq_kv=640, mask=mask)
    operands = operands_of(problem, scores=Scores.OUTGROWN)
    seen = attention_formula.visible(problem, operands, torch.arange(640))[0]
    scores = (operands.query @ operands.key.repeat_interleave(problem.group_size, 1).mT * operands.scale)[:, :, :]
    scores = scores.masked_fill(~seen, -math.inf)
    spared = 0
    for start in range(0, 640, 64):  # tiles of 64 rows walk blocks of 64 keys
        keys = seen[start : start + 64].any(0).nonzero().flatten()
        # A kernel walks backwards from the last block that all of a tile's rows see in full, and those it cuts.
        last = int(seen[start].nonzero().max()) // 64 * 64 if backwards else 0
        anchor = start if problem.mask.bounded_left and not backwards else last
        first = slice(anchor, None if backwards else anchor + 64)
        tile = scores[:, :, start : start + 64]
        if set(keys.tolist()) <= set(range(640)[first]):
            spared += 1
            continue
        rise = tile.amax(-1) - tile[..., first].amax(-1)
        assert float(rise.amax(-1).min()) > 89.0, (start, "in every head of every sequence some row must overflow")
    assert spared <= 1


@pytest.mark.parametrize("layout", [Layout.BHSD, Layout.BSHD])
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32])
def test_outgrown_scores_are_exact_whatever_a_tensor_core_cuts_off(dtype: DType, layout: Layout) -> None:
    problem = kernels.problem(dtype=dtype, head_dim=256, seq_q=64, seq_kv=300, heads_q=2, heads_kv=2, layout=layout)
    usual = operands_of(problem)
    outgrown, drawn_so = inputs.outgrown(usual), operands_of(problem, scores=Scores.OUTGROWN, guard=3)
    for operands in (outgrown, drawn_so):
        query, key = operands.query, operands.key
        cut = attention_formula.cut_to_tf32(query.float()) @ attention_formula.cut_to_tf32(key.float()).mT
        assert torch.equal(cut.double(), query.double() @ key.double().mT)
        assert operands.scale == usual.scale * inputs.OUTGROWN
    assert outgrown.query.stride() == usual.query.stride()
    assert float((outgrown.key - usual.key).abs().max()) <= 1 / 16
    assert drawn_so.key._base is not None
    assert bool(drawn_so.key._base.isnan().any()), "rows of NaN stand behind each sequence"


def test_outgrown_keys_of_a_latent_hold_its_values() -> None:
    cache = KeyCache.parse("contiguous,latent")
    problem = cached.problem(cache, dtype=DType.BFLOAT16, head_dim=576, head_dim_v=512, heads_q=4, heads_kv=1)
    operands = inputs.outgrown(operands_of(problem))
    assert torch.equal(operands.value, operands.key[..., :512])


@pytest.mark.parametrize(
    "facts", [{}, {"layout": Layout.PACKED, "batch": 3, "tokens_q": 150, "tokens_kv": 170}], ids=["dense", "packed"]
)
def test_trained_inputs_have_sinks_at_the_begin_of_each_sequence_and_loud_values(facts: dict[str, Any]) -> None:
    problem = kernels.problem(dtype=DType.FLOAT32, head_dim=128, seq_q=90, seq_kv=100, **facts)
    operands = operands_of(problem, scores=Scores.TRAINED)
    keys = operands.key.repeat_interleave(problem.group_size, dim=1)
    for place, (first_q, queries, first_kv, length) in enumerate(operands.spans()):
        entry = 0 if problem.packed else place
        rows, columns = slice(first_q, first_q + queries), slice(first_kv, first_kv + length)
        scores = operands.query[entry, :, rows] @ keys[entry, :, columns].mT * operands.scale
        assert float(scores[..., :4].mean()) == pytest.approx(12.0, abs=1.5)
        assert float(scores[..., 4:].mean().abs() if length > 4 else 0.0) < 1.0
    values = operands.value.flatten()
    assert float((values**4).mean() / (values**2).mean() ** 2) > 6.0, "3 is that of normal numbers"


def test_trained_inputs_of_float8_are_numbers() -> None:
    operands = operands_of(kernels.problem(dtype=DType.FLOAT8, head_dim=128), scores=Scores.TRAINED)
    for tensor in (operands.query, operands.key, operands.value):
        assert bool(tensor.float().isfinite().all())


@pytest.mark.parametrize("bias", list(Bias)[1:])
def test_biases_hide_about_a_fifth(bias: Bias) -> None:
    operands = operands_of(kernels.problem(seq_q=64, seq_kv=256, modifiers=Modifiers(bias=bias)))
    hidden = ~operands.bias if operands.bias.dtype is torch.bool else operands.bias == -torch.inf
    assert 0.1 < float(hidden.double().mean()) < 0.3


def test_packed_sequences_leave_a_tail_and_guards_are_nan() -> None:
    problem = interpreted.packed()
    operands = interpreted.ragged(problem)
    assert int(operands.cu_seqlens_q[-1]) == problem.tokens_q - interpreted.TAIL
    room = operands.query._base
    assert room is not None
    assert int(room.isnan().sum()) == interpreted.GUARD_ROWS * problem.heads_q * problem.head_dim


def test_dropout_and_sinks_are_there_when_asked_for() -> None:
    operands = operands_of(kernels.problem(modifiers=Modifiers(dropout=True, sinks=True, softcap=True, alibi=True)))
    assert operands.dropout == BY_NAME["dropout"].example
    assert operands.seed > 2**32, "both words of the seed are used"
    assert operands.sinks.shape == (4,)
    assert operands.slopes.shape == (2, 4)
    assert operands.softcap == BY_NAME["softcap"].example


def test_float8_has_a_scale_for_each_tensor_and_key_head() -> None:
    problem = kernels.problem(dtype=DType.FLOAT8, layout=Layout.BSHD)
    operands = operands_of(problem)
    assert operands.query.dtype is torch.float8_e4m3fn
    scales = (operands.query_scale, operands.key_scale, operands.value_scale)
    for scale in scales:
        assert scale.shape == (2, 2)
        assert scale.dtype is torch.float32
    assert all((left != right).all() for left, right in itertools.combinations(scales, 2)), "or a swap is not seen"
