"""One sentence for whatever is wrong with what a caller gives."""

from __future__ import annotations

import math
from typing import Any

import fake_device
import pytest
import torch
from argument_calls import KEY, OFFSETS, QUERY, causal, read, read_packed, zeros
from torch import Tensor

from autoattn import masks
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Numerics, Problem
from autoattn.errors import AutoattnError, ProblemError, TensorError
from autoattn.runtime.parse import arguments

GOOD = zeros(2, 6, 5, 8)
TABLE = masks.from_mod(causal, seq_q=5, seq_kv=7)
WRONG: dict[str, tuple[tuple[Any, Any, Any], str]] = {
    "no tensor": ((GOOD, [1.0], GOOD), "key must be a torch.Tensor, got list; convert it first"),
    "nothing": ((None, GOOD, GOOD), "query must be a torch.Tensor, got NoneType; convert it first"),
    "sparse": ((GOOD, GOOD.to_sparse(), GOOD), "key must be dense, got layout torch.sparse_coo; call its to_dense()"),
    "nested": (
        (torch.nested.as_nested_tensor([zeros(6, 5, 8)], layout=torch.strided), GOOD, GOOD),
        "query must be dense, got a nested tensor; pad it, or give packed_attention its tokens",
    ),
    "three axes": (
        (GOOD, GOOD, zeros(6, 5, 8)),
        "value must be [batch, heads, seq, head_dim], got shape (6, 5, 8); add or merge axes",
    ),
    "complex numbers": (
        (GOOD.cfloat(), GOOD.cfloat(), GOOD.cfloat()),
        "query must be float16, bfloat16, float32, float64 or float8_e4m3fn, got torch.complex64; cast it with .to()",
    ),
    "two dtypes": (
        (GOOD, GOOD, GOOD.bfloat16()),
        "value must have the query's dtype torch.float16, got torch.bfloat16; cast one of them",
    ),
    "two devices": ((GOOD, GOOD.to("meta"), GOOD), "key must be on the query's device cpu, got meta; move it"),
    "two batches": (
        (GOOD, zeros(3, 6, 5, 8), zeros(3, 6, 5, 8)),
        "key must be [batch, heads, seq, head_dim] with the query's batch 2 and head_dim 8, got shape (3, 6, 5, 8); "
        "check the axes and the layout",
    ),
    "two head dims": (
        (GOOD, zeros(2, 6, 5, 16), GOOD),
        "key must be [batch, heads, seq, head_dim] with the query's batch 2 and head_dim 8, got shape (2, 6, 5, 16); "
        "check the axes and the layout",
    ),
    "two lengths": (
        (GOOD, GOOD, zeros(2, 6, 4, 8)),
        "value must be [batch, heads, seq, head_dim] with the key's batch, heads, seq, got shape (2, 6, 4, 8) beside "
        "(2, 6, 5, 8); check the axes",
    ),
    "heads that do not divide": (
        (GOOD, zeros(2, 4, 5, 8), zeros(2, 4, 5, 8)),
        "query heads must be a multiple of key heads, got 6 and 4; check the layout or repeat the key heads",
    ),
    "no heads": (
        (GOOD, zeros(2, 0, 5, 8), zeros(2, 0, 5, 8)),
        "query heads must be a multiple of key heads, got 6 and 0; check the layout or repeat the key heads",
    ),
    "no head dim": (
        (GOOD, GOOD, zeros(2, 6, 5, 0)),
        "head_dim must be at least 1, got 8 of query, 0 of value; check the axes",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_make_no_call_are_refused_in_one_sentence(name: str) -> None:
    tensors, sentence = WRONG[name]
    with pytest.raises(TensorError) as caught:
        arguments.read(*tensors)
    assert str(caught.value) == sentence


def test_a_sentence_names_the_axes_of_the_callers_layout() -> None:
    with pytest.raises(TensorError, match=r"key must be \[batch, seq, heads, head_dim\] with"):
        arguments.read(zeros(2, 5, 6, 8), zeros(3, 5, 6, 8), zeros(3, 5, 6, 8), layout="bshd")
    with pytest.raises(TensorError, match="multiple of key heads, got 5 and 6"):
        arguments.read(zeros(2, 6, 5, 8), zeros(2, 5, 6, 8), zeros(2, 5, 6, 8), layout="bshd")
    with pytest.raises(TensorError, match=r"query must be \[tokens, heads, head_dim\], got shape \(2, 6, 5, 8\)"):
        read_packed(tensors=(GOOD, GOOD, GOOD))
    with pytest.raises(TensorError, match=r"key must be \[tokens, heads, head_dim\] with the query's head_dim 8, got"):
        read_packed(tensors=(zeros(10, 6, 8), zeros(12, 3, 9), zeros(12, 3, 9)))


def test_what_no_kernel_takes_is_said_and_keeps_its_own_scale() -> None:
    wide, small, values = zeros(1, 1, 2, 257), zeros(1, 1, 2, 8), zeros(1, 1, 2, 513)
    call = arguments.read(wide, wide, wide)
    assert call.no_kernel == "the head dim of query is 257, and the kernels take at most 256"
    assert call.operands.scale == 257**-0.5
    assert arguments.read(small, small, values).no_kernel.startswith("the head dim of value is 513")
    assert arguments.read(*[small.double()] * 3).no_kernel.startswith("the tensors are float64, and the kernels take")
    assert arguments.read(*[zeros(1, 1, 2, 256)] * 3).no_kernel == ""


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"layout": "sbhd"}, "layout must be bhsd or bshd, got 'sbhd'; correct it"),
    "packed layout": ({"layout": "packed"}, "layout must be bhsd or bshd, got 'packed'; correct it"),
    "no layout": ({"layout": None}, "layout must be bhsd or bshd, got None; correct it"),
    "causal": ({"causal": "left"}, "causal must be True, False, bottom-right or top-left, got 'left'; correct it"),
    "causal number": ({"causal": 1}, "causal must be True, False, bottom-right or top-left, got 1; correct it"),
    "words": ({"mask": "triangle"}, "mask must be full, causal, causal:top-left, "),
    "number as mask": ({"mask": 3}, "mask must be words such as causal or window:128,0, a Mask, a tensor, "),
    "function as mask": ({"mask": causal}, "a BlockSparse or a BlockMask, got function; convert it first"),
    "blocks without a table": ({"mask": "blocks:64x64,0.5"}, "a mask of blocks needs its table, got blocks:64x64,0.5;"),
    "window": ({"window": 128}, "window must be two whole numbers (left, right), got 128; -1 is no bound on a side"),
    "three sides": ({"window": (1, 2, 3)}, "window must be two whole numbers (left, right), got (1, 2, 3);"),
    "negative window": ({"window": (-2, 0)}, "a window must be two whole numbers from -1 (no bound), got (-2, 0);"),
    "fractional window": ({"window": (1.5, 0)}, "a window must be two whole numbers from -1 (no bound), got (1.5, 0);"),
    "boolean window": ({"window": (True, 0)}, "a window must be two whole numbers from -1 (no bound), got (True, 0);"),
    "mask and causal": (
        {"mask": "window:3,1", "causal": True},
        "mask and causal must not both say which keys a query sees, got mask='window:3,1' and causal=True; give one",
    ),
    "mask and window": (
        {"mask": "causal", "window": (3, 0)},
        "mask and window must not both say which keys a query sees, got mask='causal' and window=(3, 0); ",
    ),
    "Mask and window": ({"mask": Mask(), "window": (3, 0)}, "got mask='full' and window=(3, 0); give one of them"),
    "table and causal": (
        {"mask": TABLE, "causal": True},
        "a block table and causal must not come together, got causal",
    ),
    "table and window": (
        {"mask": TABLE, "window": (3, 1)},
        "a block table and window must not come together, got window=(3, 1); say it in the mask's function",
    ),
    "top-left window": (
        {"window": (3, 1), "causal": "top-left"},
        "windows are aligned bottom-right, got window=(3, 1) with causal='top-left'; leave one out",
    ),
    "two tensors": (
        {"mask": torch.ones(5, 7) > 0, "bias": torch.ones(5, 7)},
        "mask and bias must not both be tensors, got two; make them one with bias.masked_fill(~mask, -inf)",
    ),
    "table of other lengths": ({"mask": masks.from_mod(causal, seq_q=5, seq_kv=8)}, "got one for 5 and 8 on cpu;"),
    "bias list": ({"bias": [1.0]}, "bias must be a torch.Tensor, got list; convert it first"),
    "bias shape": (
        {"bias": torch.ones(7, 5)},
        "bias must be broadcastable to [batch, heads_q, seq_q, seq_kv] = (2, 6, 5, 7), got shape (7, 5); check",
    ),
    "mask of key heads": ({"mask": torch.ones(2, 3, 5, 7)}, "mask must be broadcastable to"),
    "five axes": ({"bias": torch.ones(1, 1, 1, 5, 7)}, "got shape (1, 1, 1, 5, 7); check the axes"),
    "bias dtype": (
        {"bias": torch.ones(5, 7).bfloat16()},
        "float32 or torch.float16 (added to the scores), got torch.bf",
    ),
    "integers": ({"mask": torch.ones(5, 7).int()}, "mask must be bool (True attends), float32 or torch.float16 (added"),
    "bias device": ({"bias": torch.ones(5, 7).to("meta")}, "bias must be on the query's device cpu, got meta; move it"),
    "negative softcap": ({"softcap": -1.0}, "softcap must be a finite number from 0, got -1.0; 0 switches it off"),
    "infinite softcap": ({"softcap": math.inf}, "softcap must be a finite number from 0, got inf; 0 switches it off"),
    "nan softcap": ({"softcap": math.nan}, "softcap must be a finite number from 0, got nan; 0 switches it off"),
    "words as softcap": ({"softcap": "30"}, "softcap must be a finite number from 0, got '30'; 0 switches it off"),
    "no softcap": ({"softcap": None}, "softcap must be a finite number from 0, got None; 0 switches it off"),
    "no dropout": ({"dropout": None}, "dropout must be a finite number from 0 and below 1, got None; 0 keeps every"),
    "dropout of all": ({"dropout": 1.0}, "dropout must be a finite number from 0 and below 1, got 1.0; 0 keeps every"),
    "negative dropout": ({"dropout": -0.1}, "dropout must be a finite number from 0 and below 1, got -0.1; 0 keeps"),
    "dropout flag": ({"dropout": True}, "dropout must be a finite number from 0 and below 1, got True; 0 keeps every"),
    "seed": ({"dropout": 0.1, "seed": -1}, "seed must be a whole number from 0 to 2**63 - 1, got -1; correct it"),
    "large seed": ({"dropout": 0.1, "seed": 2**63}, "seed must be a whole number from 0 to 2**63 - 1, got 922"),
    "slopes": (
        {"alibi_slopes": torch.ones(3)},
        "alibi_slopes must be float32 [heads_q] or [batch, heads_q] = (2, 6), got torch.float32 of shape (3,); cast or",
    ),
    "slopes dtype": ({"alibi_slopes": torch.ones(6).half()}, "got torch.float16 of shape (6,); cast or expand them"),
    "slopes number": ({"alibi_slopes": 0.5}, "alibi_slopes must be a torch.Tensor, got float; convert it first"),
    "sinks": ({"sinks": torch.ones(3)}, "sinks must be floating [heads_q] = (6,), got torch.float32 of shape (3,);"),
    "sinks dtype": (
        {"sinks": torch.ones(6).int()},
        "sinks must be floating [heads_q] = (6,), got torch.int32 of shape",
    ),
    "sinks device": ({"sinks": torch.ones(6).to("meta")}, "sinks must be on the query's device cpu, got meta; move it"),
    "score_mod text": ({"score_mod": "score + import os"}, "an expression must be arithmetic, got"),
    "score_mod name": ({"score_mod": "score + d"}, "got 'd'"),
    "score_mod number": ({"score_mod": 3}, "a mod must be a function or an expression's text, got 3; "),
    "score_mod tensors": (
        {"score_mod": "captured0: float32[1]\nscore + captured0[h]"},
        "an expression must get the tensors that it declares, float32[1], got none; correct one of them",
    ),
    "scale": ({"scale": "large"}, "scale must be a number or None, got 'large'; correct it"),
    "precision": ({"precision": "ieee"}, "precision is a choice for float32 alone, got torch.float16; leave it out"),
    "unknown precision": (
        {"precision": "fp32"},
        "precision must be ieee, tf32, tf32x3 or None, got 'fp32'; correct it",
    ),
    "numerics": ({"numerics": "lazy"}, "numerics must be any, online or None, got 'lazy'; correct it"),
    "numerics as a switch": ({"numerics": True}, "numerics must be any, online or None, got True; correct it"),
    "scale of float8": (
        {"key_scale": torch.ones(2, 3)},
        "key_scale belongs to float8_e4m3fn tensors, got torch.float16; multiply by it instead",
    ),
}


@pytest.mark.parametrize(
    ("given", "environment", "kept"),
    [
        (None, None, Numerics.ANY),
        (None, "", Numerics.ANY),
        (None, "any", Numerics.ANY),
        (None, "online", Numerics.ONLINE),
        ("online", None, Numerics.ONLINE),
        ("any", "online", Numerics.ANY),
        ("online", "nonsense", Numerics.ONLINE),
    ],
)
def test_numerics_are_the_calls_or_else_the_environments(
    given: str | None, environment: str | None, kept: Numerics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AUTOATTN_NUMERICS", raising=False)
    if environment is not None:
        monkeypatch.setenv("AUTOATTN_NUMERICS", environment)
    assert read(numerics=given).problem.numerics is kept
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    tokens = zeros(4, 2, 8)
    packed = arguments.read_packed(tokens, tokens, tokens, offsets, offsets, 4, 4, numerics=given)
    assert packed.problem.numerics is kept


def test_an_environment_that_asks_for_unknown_numerics_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOATTN_NUMERICS", "Online")
    with pytest.raises(TensorError) as caught:
        read()
    assert str(caught.value) == "AUTOATTN_NUMERICS must be any or online, got 'Online'; correct or unset it"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_with_a_way_out(name: str) -> None:
    given, words = MISTAKES[name]
    with pytest.raises(AutoattnError) as caught:
        read(**given)
    sentence = str(caught.value)
    assert words in sentence
    assert "; " in sentence or "correct" in sentence
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (torch.ones(2, 6), "key_scale must be float32 [batch, heads_kv] = (2, 3), got torch.float32 of shape (2, 6);"),
        (
            torch.ones(2, 3).half(),
            "key_scale must be float32 [batch, heads_kv] = (2, 3), got torch.float16 of shape (2",
        ),
        (2.0, "key_scale must be a torch.Tensor, got float; convert it first"),
    ],
)
def test_a_scale_of_float8_that_does_not_fit_is_refused(scale: Any, words: str) -> None:
    query, key = QUERY.to(torch.float8_e4m3fn), KEY.to(torch.float8_e4m3fn)
    with pytest.raises(TensorError) as caught:
        arguments.read(query, key, key, key_scale=scale)
    assert words in str(caught.value)


def offsets(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


PACKED_MISTAKES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "decreasing": (
        (offsets(0, 5, 4, 9),),
        {},
        "cu_seqlens_q must never decrease, got a step of -1; add up the lengths",
    ),
    "not from 0": ((offsets(1, 4, 4, 9),), {}, "cu_seqlens_q must start at 0, got 1; put a 0 in front"),
    "past the end": ((offsets(0, 4, 6, 11),), {}, "cu_seqlens_q must end within the 10 tokens, got 11; correct the"),
    "past the keys": ((OFFSETS[0], offsets(0, 5, 9, 13)), {}, "cu_seqlens_kv must end within the 12 tokens, got 13;"),
    "int64": ((OFFSETS[0].long(),), {}, "cu_seqlens_q must be int32, got torch.int64; cast it with .int()"),
    "list": (([0, 4, 9],), {}, "cu_seqlens_q must be a torch.Tensor, got list; convert it first"),
    "two axes": ((OFFSETS[0][None],), {}, "cu_seqlens_q must be [sequences + 1] and contiguous, got shape (1, 4) with"),
    "no offsets": ((OFFSETS[0][:0],), {}, "cu_seqlens_q must be [sequences + 1] and contiguous, got shape (0,) with"),
    "strided": ((torch.zeros(8).int()[::2],), {}, "got shape (4,) with strides (2,); begin with 0 and add the lengths"),
    "device": ((OFFSETS[0].to("meta"),), {}, "cu_seqlens_q must be on the query's device cpu, got meta; move it"),
    "two counts": (
        (OFFSETS[0], offsets(0, 5, 12), 5, 7),
        {},
        "cu_seqlens_q and cu_seqlens_kv must describe as many sequences, got 3 and 2; give a sequence without keys a",
    ),
    "longer": ((*OFFSETS, 4), {}, "must hold no sequence above the given maximum of 4 tokens, got 5; raise it"),
    "negative length": ((*OFFSETS, -1), {}, "max_seqlen_q must be a whole number from 0, got -1; give the longest"),
    "fractional length": ((*OFFSETS, 5, 5.0), {}, "max_seqlen_kv must be a whole number from 0, got 5.0; give the"),
    "top-left": ((), {"causal": "top-left"}, "packed sequences align a causal mask bottom-right, got top-left; "),
    "slopes": (
        (),
        {"alibi_slopes": torch.ones(2, 6)},
        "alibi_slopes must be float32 [heads_q] or [batch, heads_q] = (3",
    ),
    "window": ((), {"window": (0, -2)}, "a window must be two whole numbers from -1 (no bound), got (0, -2);"),
}


@pytest.mark.parametrize("name", PACKED_MISTAKES)
def test_a_mistake_with_packed_sequences_is_one_sentence(name: str) -> None:
    lengths, given, words = PACKED_MISTAKES[name]
    with pytest.raises(AutoattnError) as caught:
        read_packed(*lengths, **given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", ["mask", "bias"])
def test_packed_sequences_take_no_tensor_that_masks(what: str) -> None:
    """There is no such argument, and the problem refuses it by name."""
    facts: dict[str, Any] = (
        {"mask": Mask.blocks(64, 64, 0.5)} if what == "mask" else {"modifiers": Modifiers(bias=Bias.BOOLEAN)}
    )
    with pytest.raises(ProblemError, match="packed sequences take full, causal and window masks, got a b"):
        Problem(
            dtype=DType.FLOAT16, batch=1, heads_q=1, heads_kv=1, seq_q=1, seq_kv=1, head_dim=8, tokens_q=1, tokens_kv=1,
            layout=Layout.PACKED, **facts,
        )  # fmt: skip


@pytest.mark.parametrize("capturing", [False, True])
def test_a_captured_graph_asks_for_a_seed(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoattn.runtime.parse import modifier_arguments

    fake_device.set_context(monkeypatch).capturing = capturing
    card = torch.device("cuda")
    assert modifier_arguments.choose_seed(3, card) == 3
    if capturing:
        with pytest.raises(TensorError, match="dropout in a CUDA graph must have a seed, got None"):
            modifier_arguments.choose_seed(None, card)
    else:
        assert 0 <= modifier_arguments.choose_seed(None, card) < 2**62
