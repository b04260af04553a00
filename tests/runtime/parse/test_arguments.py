"""What a caller gives, as a problem and its operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from argument_calls import KEY, OFFSETS, QUERY, TOKENS, causal, read, read_packed, zeros
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import autoattn
from autoattn import masks
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Precision, Problem
from autoattn.errors import TensorError
from autoattn.runtime.parse import arguments
from autoattn.tensors import cu_seqlens

# --- problems ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "query", "key"),
    [(Layout.BHSD, (2, 6, 5, 24), (2, 3, 7, 24)), (Layout.BSHD, (2, 5, 6, 24), (2, 7, 3, 24))],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tensors_pose_the_problem_of_their_shapes(
    dtype: torch.dtype, layout: Layout, query: tuple[int, ...], key: tuple[int, ...]
) -> None:
    tensors = zeros(*query, dtype=dtype), zeros(*key, dtype=dtype), zeros(*key[:3], 40, dtype=dtype)
    call = arguments.read(*tensors, layout=layout.value)
    assert call.problem == Problem(
        dtype=DType(str(dtype).removeprefix("torch.")), batch=2, heads_q=6, heads_kv=3, seq_q=5, seq_kv=7, head_dim=24,
        head_dim_v=40, layout=layout,
    )  # fmt: skip
    views = call.operands.query, call.operands.key, call.operands.value
    assert [tuple(view.shape) for view in views] == [(2, 6, 5, 24), (2, 3, 7, 24), (2, 3, 7, 40)]
    assert all(view.data_ptr() == tensor.data_ptr() for view, tensor in zip(views, tensors, strict=True))
    assert (call.operands.scale, call.empty) == (24**-0.5, False)


@pytest.mark.parametrize(
    ("given", "mask"),
    [
        ({}, "full"),
        ({"causal": True}, "causal:bottom-right"),
        ({"causal": "bottom-right"}, "causal:bottom-right"),
        ({"causal": "top-left"}, "causal:top-left"),
        ({"mask": "causal:top-left"}, "causal:top-left"),
        ({"mask": "window:3,1"}, "window:3,1"),
        ({"mask": Mask.window(3, 1)}, "window:3,1"),
        ({"mask": "full", "causal": False, "window": (-1, -1)}, "full"),
        ({"mask": "causal", "window": (-1, -1)}, "causal:bottom-right"),
        ({"window": (3, 1)}, "window:3,1"),
        ({"window": [3, 1]}, "window:3,1"),
        ({"window": (3, 1), "causal": True}, "window:3,0"),
        ({"window": (3, -1), "causal": "bottom-right"}, "window:3,0"),
        ({"window": (-1, 0)}, "causal:bottom-right"),
        ({"window": (-1, 3), "causal": True}, "causal:bottom-right"),
        ({"window": (-1, -1), "causal": "top-left"}, "causal:top-left"),
        ({"window": (3, -1)}, "window:3,-1"),
        ({"window": (6, 1)}, "window:-1,1"),
        ({"window": (6, 4)}, "full"),
        ({"window": (0, 0)}, "window:0,0"),
    ],
    ids=str,
)
def test_every_way_to_say_a_mask_becomes_the_simplest_one(given: dict[str, Any], mask: str) -> None:
    call = read(**given)
    assert (str(call.problem.mask), call.problem.modifiers, call.operands.bias) == (mask, Modifiers(), None)


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize(
    ("tensor", "kind", "shape"),
    [
        (torch.ones(7) > 0, Bias.KEYS, (2, 6, 1, 7)),
        (torch.ones(2, 1, 1, 7) > 0, Bias.KEYS, (2, 6, 1, 7)),
        (torch.ones(2, 1, 1, 7).expand(2, 6, 5, 7) > 0, Bias.BOOLEAN, (2, 6, 5, 7)),  # comparing wrote it out
        ((torch.ones(2, 1, 1, 7) > 0).expand(2, 6, 5, 7), Bias.KEYS, (2, 6, 1, 7)),
        (torch.ones(5, 7) > 0, Bias.BOOLEAN, (2, 6, 5, 7)),
        (torch.ones(6, 1, 7) > 0, Bias.KEYS, (2, 6, 1, 7)),
        (torch.ones(5, 1) > 0, Bias.BOOLEAN, (2, 6, 5, 7)),
        (torch.ones(5, 7), Bias.ADDITIVE, (2, 6, 5, 7)),
        (torch.ones(1, 6, 1, 1).half(), Bias.ADDITIVE, (2, 6, 5, 7)),
    ],
    ids=str,
)
def test_a_tensor_that_masks_or_adds_is_expanded_to_the_scores(
    tensor: Tensor, kind: Bias, shape: tuple[int, ...], name: str
) -> None:
    call = read(**{name: tensor, "causal": True})
    assert call.problem.modifiers == Modifiers(bias=kind)
    assert call.problem.mask.causal
    assert call.operands.bias is not None
    assert (tuple(call.operands.bias.shape), call.operands.bias.data_ptr()) == (shape, tensor.data_ptr())


def test_one_query_makes_every_boolean_mask_one_of_keys() -> None:
    call = arguments.read(QUERY[:, :, :1], KEY, KEY, mask=torch.ones(2, 1, 1, 7) > 0)
    assert call.problem.modifiers.bias is Bias.KEYS


def test_modifiers_become_facts_of_the_problem_and_numbers_of_the_launch() -> None:
    slopes, sinks = torch.rand(6), torch.rand(12)[::2].double()
    call = read(softcap=30, alibi_slopes=slopes, sinks=sinks, dropout=0.5, seed=3, score_mod="score + b", scale=2)
    assert call.problem.modifiers == Modifiers(
        softcap=True, alibi=True, sinks=True, dropout=True, score_mod="score + b"
    )
    operands = call.operands
    assert (operands.softcap, operands.dropout, operands.seed, operands.scale) == (30.0, 0.5, 3, 2.0)
    assert operands.slopes is not None
    assert (tuple(operands.slopes.shape), operands.slopes.stride()) == ((2, 6), (0, 1))
    assert operands.sinks is not None
    assert (operands.sinks.dtype, operands.sinks.is_contiguous()) == (torch.float32, True)
    torch.testing.assert_close(operands.sinks, sinks.float())


def test_what_is_switched_off_leaves_no_trace() -> None:
    assert read(softcap=0, dropout=0, seed=7, alibi_slopes=None).problem == read().problem
    assert read(softcap=0, dropout=0.0, sinks=torch.zeros(6)).problem.modifiers == Modifiers(sinks=True)


def test_a_function_as_score_mod_becomes_text_and_the_tensors_that_it_reads() -> None:
    table = torch.arange(6.0)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h]

    call = read(score_mod=score_mod)
    assert "captured0: float32[1]" in call.problem.modifiers.score_mod
    (captured,) = call.operands.score_captures
    assert torch.equal(captured, table)


@pytest.mark.parametrize(
    ("dtype", "setting", "given", "kept"),
    [
        (torch.float32, "highest", None, Precision.IEEE),
        (torch.float32, "high", None, Precision.TF32),
        (torch.float32, "medium", None, Precision.TF32),
        (torch.float32, "high", "ieee", Precision.IEEE),
        (torch.float32, "highest", "tf32x3", Precision.TF32X3),
        (torch.bfloat16, "high", None, Precision.IEEE),
    ],
)
def test_precision_speaks_of_float32_alone_and_overrules_pytorchs_setting(
    dtype: torch.dtype, setting: str, given: str | None, kept: Precision
) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(setting)
        tensor = zeros(1, 1, 2, 8, dtype=dtype)
        assert arguments.read(tensor, tensor, tensor, precision=given).problem.precision is kept
    finally:
        torch.set_float32_matmul_precision(before)


def test_float8_tensors_have_scales_of_one_unless_given() -> None:
    query, key = QUERY.to(torch.float8_e4m3fn), KEY.to(torch.float8_e4m3fn)
    given = torch.full((3, 2), 2.0).T
    call = arguments.read(query, key, key, key_scale=given)
    assert (call.problem.dtype, call.problem.dtype.output) == (DType.FLOAT8, DType.BFLOAT16)
    scales = call.operands.query_scale, call.operands.key_scale, call.operands.value_scale
    for scale, value in zip(scales, (1.0, 2.0, 1.0), strict=True):
        assert scale is not None
        assert scale.is_contiguous()
        assert torch.equal(scale, torch.full((2, 3), value))


def test_autocast_leaves_float8_and_what_is_given_with_it_alone() -> None:
    query, key = QUERY.to(torch.float8_e4m3fn), KEY.to(torch.float8_e4m3fn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert arguments.read(query, key, key).problem.dtype is DType.FLOAT8
        call = arguments.read(QUERY.float(), KEY.float(), KEY.float(), bias=torch.zeros(5, 7), precision="tf32")
    assert (call.problem.dtype, call.problem.precision) == (DType.BFLOAT16, Precision.IEEE)


def test_a_call_without_tokens_is_empty() -> None:
    for query, key in ((QUERY[:, :, :0], KEY), (QUERY, KEY[:, :, :0]), (QUERY[:0], KEY[:0])):
        call = arguments.read(query, key, key, causal=True)
        assert call.empty
        assert tuple(call.operands.query.shape) == tuple(query.shape)


# --- tables -----------------------------------------------------------------------------------------------------------


def test_a_block_table_and_flexattentions_own_pose_the_same_problem() -> None:
    query, key = zeros(2, 6, 200, 8), zeros(2, 3, 300, 8)
    ours = masks.from_mod(causal, seq_q=200, seq_kv=300)
    theirs = create_block_mask(causal, None, None, 200, 300, device="cpu")
    our_call, their_call = (arguments.read(query, key, key, mask=mask, sinks=torch.zeros(6)) for mask in (ours, theirs))
    assert our_call.problem == their_call.problem
    assert our_call.problem.mask.sparse
    for call in (our_call, their_call):
        assert call.operands.table is not None
        dense = masks.to_dense(ours)
        output = autoattn.attention(torch.zeros(1, 1, 200, 8), torch.zeros(1, 1, 300, 8), torch.eye(300)[None, None],
                                    mask=ours)  # fmt: skip
        assert torch.equal(output > 0, dense)


# --- packed sequences -------------------------------------------------------------------------------------------------


def test_packed_tensors_pose_a_packed_problem() -> None:
    call = read_packed(causal=True)
    assert call.problem == Problem(
        dtype=DType.FLOAT16, batch=3, heads_q=6, heads_kv=3, seq_q=5, seq_kv=5, head_dim=8, mask=Mask.parse("causal"),
        layout=Layout.PACKED, tokens_q=10, tokens_kv=12,
    )  # fmt: skip
    assert tuple(call.operands.query.shape) == (1, 6, 10, 8)
    assert call.operands.query.data_ptr() == TOKENS[0].data_ptr()
    assert call.operands.cu_seqlens_q is OFFSETS[0]


def test_a_longest_sequence_is_never_longer_than_all_tokens() -> None:
    problem = read_packed(*OFFSETS, 10**6, torch.tensor(10**6)).problem
    assert (problem.seq_q, problem.seq_kv) == (10, 12)


def test_the_offsets_are_read_once_for_each_state_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: reads.append(1) or tolist(tensor))
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    for _ in range(3):
        read_packed(offsets, offsets)
    assert len(reads) == 1
    offsets[1] = 5
    read_packed(offsets, offsets)
    assert len(reads) == 2
    offsets[1] = 10
    with pytest.raises(TensorError, match="never decrease"):
        read_packed(offsets, offsets)


def test_offsets_that_were_found_good_are_compared_with_each_calls_own_lengths() -> None:
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    read_packed(offsets, offsets)
    with pytest.raises(TensorError, match="must end within the 8 tokens, got 9"):
        read_packed(offsets, offsets, tensors=tuple(tensor[:8] for tensor in TOKENS))
    with pytest.raises(TensorError, match="above the given maximum of 4 tokens, got 5"):
        read_packed(offsets, offsets, 4, 5)


def test_what_was_read_is_forgotten_with_the_tensor() -> None:
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    read_packed(offsets, offsets)
    before = len(cu_seqlens.known_contents)
    del offsets
    assert len(cu_seqlens.known_contents) == before - 1


def test_offsets_of_inference_mode_are_taken() -> None:
    with torch.inference_mode():
        offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
        read_packed(offsets, offsets)


def negated(*shape: int) -> Tensor:
    """As PyTorch gives the imaginary part of a conjugate: its memory holds the negatives."""
    imaginary = torch.complex(torch.randn(shape), torch.randn(shape)).conj().imag
    assert imaginary.is_neg()
    return imaginary


def test_views_that_stand_for_negatives_are_copied() -> None:
    three = [negated(2, 4, 8, 16) for _ in range(3)]
    given = {"bias": negated(8, 8), "alibi_slopes": negated(4), "sinks": negated(4)}
    read = arguments.read(*three, **given).operands
    tensors = {
        name: getattr(read, name) for name in ("query", "key", "value", "bias", "narrow_bias", "slopes", "sinks")
    }
    expected = [*three, given["bias"], given["bias"], given["alibi_slopes"], given["sinks"]]
    for (name, tensor), wanted in zip(tensors.items(), expected, strict=True):
        assert not tensor.is_neg(), name
        assert torch.equal(*torch.broadcast_tensors(tensor, wanted)), name
    plain = [torch.randn(2, 4, 8, 16) for _ in range(3)]
    assert arguments.read(*plain).operands.query is plain[0]
