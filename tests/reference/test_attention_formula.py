"""The oracle against PyTorch's own attention in float64 and against cases that were computed by hand."""

from __future__ import annotations

import math
from typing import Any

import kernels
import pytest
import torch
from torch import Tensor

from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Precision, Problem
from autoattn.reference import attention_formula
from autoattn.reference import inputs as random_inputs
from autoattn.tensors.operands import Operands

FULL, CAUSAL, TOP_LEFT = Mask(), Mask.parse("causal"), Mask.parse("causal:top-left")
WINDOWS = [Mask.window(*sides) for sides in ((2, 0), (0, 0), (1, 3), (-1, 2), (3, -1), (50, 50))]
LENGTHS = [(1, 1), (1, 7), (5, 5), (3, 8), (8, 3)]


def inputs(
    batch: int = 2, heads_q: int = 4, heads_kv: int = 2, seq_q: int = 5, seq_kv: int = 7, head_dim: int = 6,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rng = torch.Generator().manual_seed(0)
    shapes = ((heads_q, seq_q), (heads_kv, seq_kv), (heads_kv, seq_kv))
    query, key, value = (
        torch.randn(batch, heads, seq, head_dim, generator=rng, dtype=torch.float64).to(dtype) for heads, seq in shapes
    )
    return query, key, value


def call(
    *tensors: Tensor, mask: Mask = FULL, scale: float = 1.0, precision: Precision = Precision.IEEE, **facts: Any
) -> tuple[Problem, Operands]:
    """The problem and the operands of three tensors; float64 goes under the name of float32."""
    query, key, value = tensors
    kinds = {torch.float16: DType.FLOAT16, torch.bfloat16: DType.BFLOAT16}
    names = {name: facts.pop(name) for name in ("modifiers", "layout", "tokens_q", "tokens_kv") if name in facts}
    problem = kernels.problem(
        dtype=kinds.get(query.dtype, DType.FLOAT32), batch=query.shape[0], heads_q=query.shape[1],
        heads_kv=key.shape[1], seq_q=query.shape[2], seq_kv=key.shape[2], head_dim=query.shape[3],
        head_dim_v=value.shape[3], mask=mask, precision=precision, **names,
    )  # fmt: skip
    return problem, Operands(query=query, key=key, value=value, scale=scale, **facts)


def attention(*tensors: Tensor, rows: Tensor | None = None, **facts: Any) -> tuple[Tensor, Tensor]:
    return attention_formula.attention(*call(*tensors, **facts), rows=rows)


def low_precision(*tensors: Tensor, **facts: Any) -> Tensor:
    return attention_formula.low_precision(*call(*tensors, **facts))


def exact(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("seq_q", "seq_kv"), LENGTHS)
@pytest.mark.parametrize("mask", [FULL, TOP_LEFT], ids=str)
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (4, 4), (6, 2), (3, 1)])
def test_it_agrees_with_pytorch(mask: Mask, seq_q: int, seq_kv: int, heads_q: int, heads_kv: int) -> None:
    query, key, value = inputs(heads_q=heads_q, heads_kv=heads_kv, seq_q=seq_q, seq_kv=seq_kv)
    output, _ = attention(query, key, value, mask=mask, scale=0.3)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    exact(output, sdpa(query, key, value, is_causal=mask.causal, scale=0.3, enable_gqa=True))


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(1, 7), (5, 5), (3, 8)])
def test_aligned_bottom_right_it_agrees_with_pytorchs_own_mask(seq_q: int, seq_kv: int) -> None:
    from torch.nn.attention.bias import causal_lower_right

    query, key, value = inputs(heads_q=2, heads_kv=2, seq_q=seq_q, seq_kv=seq_kv)
    output, _ = attention(query, key, value, mask=CAUSAL, scale=0.3)
    bias = causal_lower_right(seq_q, seq_kv)
    exact(output, torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=0.3))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (FULL, [[2.0], [2.0]]),  # means of 0..4
        (TOP_LEFT, [[0.0], [0.5]]),  # of 0, and of 0..1
        (CAUSAL, [[1.5], [2.0]]),  # of 0..3, and of 0..4
    ],
    ids=str,
)
def test_equal_scores_give_the_mean_of_the_visible_values(mask: Mask, expected: list[list[float]]) -> None:
    query, key = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 5, 1)
    value = torch.arange(5.0).reshape(1, 1, 5, 1)
    output, lse = attention(query, key, value, mask=mask, scale=1.0)
    exact(output[0, 0], torch.tensor(expected, dtype=torch.float64))
    seen = {"full": [5, 5], "causal:top-left": [1, 2], "causal:bottom-right": [4, 5]}[str(mask)]
    exact(lse[0, 0], torch.tensor([math.log(count) for count in seen], dtype=torch.float64))


def test_two_keys_computed_by_hand() -> None:
    """Scores 0 and scale * 2 * 3 = log(3) give the weights 1/4 and 3/4."""
    query, key = torch.tensor([[[[2.0]]]]), torch.tensor([[[[0.0], [3.0]]]])
    value = torch.tensor([[[[8.0], [4.0]]]])
    output, lse = attention(query, key, value, mask=FULL, scale=math.log(3) / 6)
    assert output.item() == pytest.approx(5.0, abs=1e-12)
    assert lse.item() == pytest.approx(math.log(4), abs=1e-12)


def test_a_row_that_sees_no_key_gives_zero_and_an_lse_of_minus_infinity() -> None:
    query, key, value = inputs(seq_q=5, seq_kv=2)
    output, lse = attention(query, key, value, mask=CAUSAL, scale=1.0)
    assert (output[:, :, :3] == 0.0).all()
    assert (lse[:, :, :3] == -math.inf).all()
    assert output[:, :, 3:].abs().min() > 0.0
    assert lse[:, :, 3:].isfinite().all()


@pytest.mark.parametrize("mask", [FULL, CAUSAL, TOP_LEFT], ids=str)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(9, 7), (7, 9)])
def test_some_rows_are_those_of_the_whole(mask: Mask, seq_q: int, seq_kv: int) -> None:
    tensors = inputs(seq_q=seq_q, seq_kv=seq_kv)
    rows = torch.tensor([6, 0, 3, 3])
    whole, whole_lse = attention(*tensors, mask=mask, scale=0.5)
    some, some_lse = attention(*tensors, mask=mask, scale=0.5, rows=rows)
    exact(some, whole[:, :, rows])
    exact(some_lse, whole_lse[:, :, rows])


def test_query_heads_read_the_key_head_of_their_group() -> None:
    query, key, value = inputs(heads_q=6, heads_kv=2)
    output, _ = attention(query, key, value, mask=FULL, scale=1.0)
    for head in range(6):
        alone, _ = attention(
            query[:, head : head + 1], key[:, head // 3 : head // 3 + 1], value[:, head // 3 : head // 3 + 1],
            mask=FULL, scale=1.0,
        )  # fmt: skip
        exact(output[:, head : head + 1], alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_counts_in_float64_unless_told_otherwise(dtype: torch.dtype) -> None:
    tensors = inputs(dtype=dtype)
    output, lse = attention(*tensors, mask=CAUSAL, scale=1.0)
    assert (output.dtype, lse.dtype) == (torch.float64, torch.float64)
    wide, _ = attention(*(tensor.double() for tensor in tensors), mask=CAUSAL, scale=1.0)
    exact(output, wide)


def test_large_scores_do_not_overflow() -> None:
    query, key, value = inputs()
    output, lse = attention(query * 1e4, key * 1e4, value, mask=FULL, scale=1.0)
    assert output.isfinite().all()
    assert lse.isfinite().all()


def kept(mask: Mask, seq_q: int, seq_kv: int) -> Tensor:
    problem, operands = call(*inputs(seq_q=seq_q, seq_kv=seq_kv), mask=mask)
    return attention_formula.visible(problem, operands, torch.arange(seq_q))[0]


@pytest.mark.parametrize(
    ("mask", "seq_q", "seq_kv", "expected"),
    [
        (FULL, 2, 3, ["111", "111"]),
        (CAUSAL, 3, 3, ["100", "110", "111"]),
        (TOP_LEFT, 3, 3, ["100", "110", "111"]),
        (CAUSAL, 2, 4, ["1110", "1111"]),
        (TOP_LEFT, 2, 4, ["1000", "1100"]),
        (CAUSAL, 4, 2, ["00", "00", "10", "11"]),
        (TOP_LEFT, 4, 2, ["10", "11", "11", "11"]),
        (CAUSAL, 1, 3, ["111"]),
        (Mask.window(1, 0), 3, 3, ["100", "110", "011"]),
        (Mask.window(0, 1), 3, 3, ["110", "011", "001"]),
        (Mask.window(1, 1), 2, 4, ["0111", "0011"]),
        (Mask.window(1, 0), 4, 2, ["00", "00", "10", "11"]),
        (Mask.window(1, -1), 4, 2, ["11", "11", "11", "11"]),
        (Mask.window(0, -1), 2, 4, ["0011", "0001"]),
        (Mask.window(-1, 1), 4, 2, ["00", "10", "11", "11"]),
    ],
    ids=str,
)
def test_masks_drawn_by_hand(mask: Mask, seq_q: int, seq_kv: int, expected: list[str]) -> None:
    drawn = ["".join(str(int(cell)) for cell in row) for row in kept(mask, seq_q, seq_kv)]
    assert drawn == expected


@pytest.mark.parametrize("mask", [FULL, CAUSAL, TOP_LEFT, *WINDOWS], ids=str)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [*LENGTHS, (1, 12), (12, 1), (6, 13)])
def test_the_problem_counts_the_pairs_that_the_mask_keeps(mask: Mask, seq_q: int, seq_kv: int) -> None:
    problem = kernels.problem(seq_q=seq_q, seq_kv=seq_kv, mask=mask)
    assert problem.kept_pairs() == problem.batch * int(kept(problem.mask, seq_q, seq_kv).sum())


# --- the yardstick ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.bfloat16, 1e-4, 0.1), (torch.float16, 1e-5, 0.01)])
def test_the_yardstick_errs_like_the_low_precision(dtype: torch.dtype, least: float, most: float) -> None:
    tensors = inputs(seq_q=64, seq_kv=64, head_dim=32, dtype=dtype)
    rough = low_precision(*tensors, mask=CAUSAL, scale=0.2, precision=Precision.IEEE)
    expected, _ = attention(*tensors, mask=CAUSAL, scale=0.2)
    assert rough.dtype is dtype
    assert least < float((rough.double() - expected).abs().max()) < most


def test_the_yardstick_of_tf32_is_far_rougher_than_that_of_float32() -> None:
    tensors = inputs(seq_q=64, seq_kv=64, head_dim=32, dtype=torch.float32)
    expected, _ = attention(*tensors, mask=FULL, scale=0.2)
    facts: dict[str, Any] = {"mask": FULL, "scale": 0.2}
    error = {
        precision: float((low_precision(*tensors, **facts, precision=precision) - expected).abs().max())
        for precision in (Precision.IEEE, Precision.TF32)
    }
    assert 100 * error[Precision.IEEE] < error[Precision.TF32] < 0.01


def test_tf32_keeps_ten_bits_of_the_fraction_and_drops_the_rest() -> None:
    cut = attention_formula.cut_to_tf32
    same = torch.tensor([0.0, 1.0, -2.0, 1.0 + 2.0**-10, 2.0**127, 2.0**-126, math.inf, -math.inf])
    assert torch.equal(cut(same), same)
    assert cut(torch.tensor([1.0 + 2.0**-11])).item() == 1.0
    assert cut(torch.tensor([-(1.0 + 2.0**-10 + 2.0**-12)])).item() == -(1.0 + 2.0**-10)
    assert cut(torch.tensor([math.nan])).isnan().all()


def test_cutting_to_tf32_leaves_its_input_alone_and_takes_any_strides() -> None:
    tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).t()
    before = tensor.clone()
    cut = attention_formula.cut_to_tf32(tensor)
    assert torch.equal(tensor, before)
    assert torch.equal(cut, attention_formula.cut_to_tf32(before))


# --- modifiers --------------------------------------------------------------------------------------------------------


def by_hand(query: Tensor, key: Tensor, value: Tensor, change: Any = None) -> Tensor:
    """softmax(change(query key^T)) value, with as many key heads as query heads."""
    scores = query @ key.mT
    return (change(scores) if change else scores).softmax(-1) @ value


EVEN = {"heads_q": 4, "heads_kv": 4}


def test_softcap_bends_scores_before_the_mask() -> None:
    tensors = inputs(**EVEN)
    output, _ = attention(*tensors, modifiers=Modifiers(softcap=True), softcap=0.7)
    exact(output, by_hand(*tensors, lambda scores: 0.7 * torch.tanh(scores / 0.7)))


@pytest.mark.parametrize(("mask", "shift"), [(FULL, 2), (CAUSAL, 2), (TOP_LEFT, 0)], ids=str)
def test_alibi_counts_the_distance_from_the_querys_own_position(mask: Mask, shift: int) -> None:
    tensors = inputs(**EVEN)
    slopes = torch.rand(2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    distance = (torch.arange(5)[:, None] + shift - torch.arange(7)).abs()
    hidden = ~kept(mask, 5, 7)

    def change(scores: Tensor) -> Tensor:
        return (scores - slopes[:, :, None, None] * distance).masked_fill(hidden, -math.inf)

    output, _ = attention(*tensors, mask=mask, modifiers=Modifiers(alibi=True), slopes=slopes)
    exact(output, by_hand(*tensors, change))


def test_a_bias_is_added_to_scaled_scores_and_booleans_hide() -> None:
    tensors = inputs(**EVEN)
    numbers = torch.randn(2, 4, 5, 7, generator=torch.Generator().manual_seed(1))
    output, _ = attention(*tensors, modifiers=Modifiers(bias=Bias.ADDITIVE), bias=numbers)
    exact(output, by_hand(*tensors, lambda scores: scores + numbers))
    output, _ = attention(*tensors, modifiers=Modifiers(bias=Bias.BOOLEAN), bias=numbers > -1.0)
    exact(output, by_hand(*tensors, lambda scores: scores.masked_fill(numbers <= -1.0, -math.inf)))
    keys = (numbers[:, :1, :1] > -0.5).expand(2, 4, 1, 7)
    output, _ = attention(*tensors, modifiers=Modifiers(bias=Bias.KEYS), bias=keys)
    exact(output, by_hand(*tensors, lambda scores: scores.masked_fill(~keys, -math.inf)))


def test_a_sink_takes_its_share_and_gives_nothing() -> None:
    tensors = inputs(seq_q=5, seq_kv=3, **EVEN)
    sinks = torch.tensor([0.0, 1.0, -2.0, 3.0])
    output, lse = attention(*tensors, mask=CAUSAL, modifiers=Modifiers(sinks=True), sinks=sinks)
    plain, plain_lse = attention(*tensors, mask=CAUSAL)
    total = torch.logaddexp(plain_lse, sinks.double()[None, :, None])
    exact(lse, total)
    exact(output, plain * (plain_lse - total).exp()[..., None])
    assert (output[:, :, :2] == 0.0).all(), "rows that see no key"
    exact(lse[:, :, :2], sinks.double()[None, :, None].expand(2, 4, 2))


def test_dropout_drops_its_share_and_scales_what_is_left() -> None:
    query, key = torch.zeros(1, 1, 64, 1), torch.zeros(1, 1, 64, 1)
    value = torch.eye(64)[None, None]
    output, lse = attention(query, key, value, modifiers=Modifiers(dropout=True), dropout=0.25, seed=7)
    assert set(output.unique().tolist()) == {0.0, 1.0 / 64.0 / 0.75}
    assert 0.2 < float((output == 0.0).double().mean()) < 0.3
    assert lse.allclose(torch.tensor(math.log(64.0), dtype=torch.float64)), "the LSE is that of all keys"


def test_a_score_mod_reads_positions_heads_and_captures() -> None:
    tensors = inputs(heads_q=4, heads_kv=2)
    captured = torch.randn(4, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    text = "captured0: float32[2]\nscore * 0.5 + captured0[h, kv_idx] * (q_idx - kv_idx) + b"
    output, _ = attention(*tensors, modifiers=Modifiers(score_mod=text), score_captures=(captured,))
    query, key, value = tensors
    distance = torch.arange(5)[:, None] - torch.arange(7)
    entry = torch.arange(2)[:, None, None, None]
    change = lambda scores: scores * 0.5 + captured[:, None, :] * distance + entry  # noqa: E731
    exact(output, by_hand(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), change))


def test_packed_sequences_are_what_each_would_be_alone() -> None:
    query, key, value = inputs(batch=1, seq_q=9, seq_kv=14)
    starts = [torch.tensor(each, dtype=torch.int32) for each in ((0, 0, 5, 5, 8), (0, 3, 7, 7, 12))]
    facts: dict[str, Any] = {"layout": Layout.PACKED, "tokens_q": 9, "tokens_kv": 14, "mask": CAUSAL}
    output, lse = attention(query, key, value, cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1], **facts)
    for first, end, first_kv, end_kv in ((0, 5, 3, 7), (5, 8, 7, 12)):
        tensors = (query[:, :, first:end], key[:, :, first_kv:end_kv], value[:, :, first_kv:end_kv])
        alone, alone_lse = attention(*tensors, mask=CAUSAL)
        exact(output[:, :, first:end], alone)
        exact(lse[:, :, first:end], alone_lse)
    assert (output[:, :, 8:] == 0.0).all(), "the tail belongs to no sequence"
    assert (lse[:, :, 8:] == -math.inf).all()


def test_the_offsets_of_packed_sequences_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading waits for the GPU."""
    problem = kernels.problem(
        layout=Layout.PACKED, tokens_q=66, tokens_kv=100, mask="causal", modifiers=Modifiers(alibi=True, dropout=True)
    )
    operands = random_inputs.make(problem, torch.device("cpu"), torch.Generator().manual_seed(0))
    read: list[Operands] = []
    spans = Operands.spans
    monkeypatch.setattr(Operands, "spans", lambda self: read.append(self) or spans(self))
    attention_formula.attention(problem, operands)
    assert len(read) == 1


def test_a_hidden_value_that_is_nan_has_no_part_and_a_visible_one_does() -> None:
    query, key, value = inputs(seq_q=4, seq_kv=4)
    value[:, :, 2, 0], value[:, :, 2, 1], value[:, :, 2, 2] = math.nan, math.inf, -math.inf
    output, _ = attention(query, key, value, mask=CAUSAL)
    assert output[:, :, :2].isfinite().all()
    assert output[:, :, 2:, 0].isnan().all()
    assert (output[:, :, 2:, 1] == math.inf).all()
    assert (output[:, :, 2:, 2] == -math.inf).all()
    assert output[:, :, 2:, 3:].isfinite().all()


# --- random numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "counter", "expected"),
    [(0, (0, 0, 0), 0x6627E8D5)],  # kat_vectors of Random123: philox4x32-10, all zero
)
def test_philox_gives_the_published_numbers(seed: int, counter: tuple[int, int, int], expected: int) -> None:
    assert int(attention_formula.philox(seed, *map(torch.tensor, counter))) == expected


def test_philox_is_that_of_the_paper() -> None:
    """Philox in Python's own whole numbers, as the paper writes it."""

    def slow(seed: int, counter: list[int]) -> int:
        keys = [seed & 0xFFFFFFFF, seed >> 32]
        for _ in range(10):
            first, third = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
            counter = [
                third >> 32 ^ counter[1] ^ keys[0], third & 0xFFFFFFFF,
                first >> 32 ^ counter[3] ^ keys[1], first & 0xFFFFFFFF,
            ]  # fmt: skip
            keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
        return counter[0]

    for seed, counter in ((2**62 - 1, [2**31 - 1, 5, 77]), (12345678901234567, [1, 2, 3]), (1, [4000, 4001, 4002])):
        assert int(attention_formula.philox(seed, *map(torch.tensor, counter))) == slow(seed, [*counter, 0])


def test_float8_sequences_without_keys_give_zero() -> None:
    problem = kernels.problem(dtype=DType.FLOAT8, layout=Layout.PACKED, batch=2, tokens_q=66, tokens_kv=50, head_dim=16)
    operands = random_inputs.make(
        problem, torch.device("cpu"), torch.Generator().manual_seed(0), lengths=((33, 0), (33, 50))
    )
    output = attention_formula.low_precision(problem, operands)
    assert bool((output[:, :, :33] == 0.0).all())
    assert bool(output[:, :, 33:].isfinite().all())
