"""The oracle against PyTorch's own attention in float64 and against cases that were computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from autoattn import reference
from autoattn.mask import Mask
from autoattn.problem import Precision

FULL, CAUSAL, TOP_LEFT = Mask(), Mask.parse("causal"), Mask.parse("causal:top-left")
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


def exact(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("seq_q", "seq_kv"), LENGTHS)
@pytest.mark.parametrize("mask", [FULL, TOP_LEFT], ids=str)
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (4, 4), (6, 2), (3, 1)])
def test_it_agrees_with_pytorch(mask: Mask, seq_q: int, seq_kv: int, heads_q: int, heads_kv: int) -> None:
    query, key, value = inputs(heads_q=heads_q, heads_kv=heads_kv, seq_q=seq_q, seq_kv=seq_kv)
    output, _ = reference.attention(query, key, value, mask=mask, scale=0.3)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    exact(output, sdpa(query, key, value, is_causal=mask.causal, scale=0.3, enable_gqa=True))


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(1, 7), (5, 5), (3, 8)])
def test_aligned_bottom_right_it_agrees_with_pytorchs_own_mask(seq_q: int, seq_kv: int) -> None:
    from torch.nn.attention.bias import causal_lower_right

    query, key, value = inputs(heads_q=2, heads_kv=2, seq_q=seq_q, seq_kv=seq_kv)
    output, _ = reference.attention(query, key, value, mask=CAUSAL, scale=0.3)
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
    output, lse = reference.attention(query, key, value, mask=mask, scale=1.0)
    exact(output[0, 0], torch.tensor(expected, dtype=torch.float64))
    seen = {"full": [5, 5], "causal:top-left": [1, 2], "causal:bottom-right": [4, 5]}[str(mask)]
    exact(lse[0, 0], torch.tensor([math.log(count) for count in seen], dtype=torch.float64))


def test_two_keys_computed_by_hand() -> None:
    """Scores 0 and scale * 2 * 3 = log(3) give the weights 1/4 and 3/4."""
    query, key = torch.tensor([[[[2.0]]]]), torch.tensor([[[[0.0], [3.0]]]])
    value = torch.tensor([[[[8.0], [4.0]]]])
    output, lse = reference.attention(query, key, value, mask=FULL, scale=math.log(3) / 6)
    assert output.item() == pytest.approx(5.0, abs=1e-12)
    assert lse.item() == pytest.approx(math.log(4), abs=1e-12)


def test_a_row_that_sees_no_key_gives_zero_and_an_lse_of_minus_infinity() -> None:
    query, key, value = inputs(seq_q=5, seq_kv=2)
    output, lse = reference.attention(query, key, value, mask=CAUSAL, scale=1.0)
    assert (output[:, :, :3] == 0.0).all()
    assert (lse[:, :, :3] == -math.inf).all()
    assert output[:, :, 3:].abs().min() > 0.0
    assert lse[:, :, 3:].isfinite().all()


@pytest.mark.parametrize("mask", [FULL, CAUSAL, TOP_LEFT], ids=str)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(9, 7), (7, 9)])
def test_some_rows_are_those_of_the_whole(mask: Mask, seq_q: int, seq_kv: int) -> None:
    tensors = inputs(seq_q=seq_q, seq_kv=seq_kv)
    rows = torch.tensor([6, 0, 3, 3])
    whole, whole_lse = reference.attention(*tensors, mask=mask, scale=0.5)
    some, some_lse = reference.attention(*tensors, mask=mask, scale=0.5, rows=rows)
    exact(some, whole[:, :, rows])
    exact(some_lse, whole_lse[:, :, rows])


def test_query_heads_read_the_key_head_of_their_group() -> None:
    query, key, value = inputs(heads_q=6, heads_kv=2)
    output, _ = reference.attention(query, key, value, mask=FULL, scale=1.0)
    for head in range(6):
        alone, _ = reference.attention(
            query[:, head : head + 1], key[:, head // 3 : head // 3 + 1], value[:, head // 3 : head // 3 + 1],
            mask=FULL, scale=1.0,
        )  # fmt: skip
        exact(output[:, head : head + 1], alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_counts_in_float64_unless_told_otherwise(dtype: torch.dtype) -> None:
    tensors = inputs(dtype=dtype)
    output, lse = reference.attention(*tensors, mask=CAUSAL, scale=1.0)
    assert (output.dtype, lse.dtype) == (torch.float64, torch.float64)
    wide, _ = reference.attention(*(tensor.double() for tensor in tensors), mask=CAUSAL, scale=1.0)
    exact(output, wide)


def test_large_scores_do_not_overflow() -> None:
    query, key, value = inputs()
    output, lse = reference.attention(query * 1e4, key * 1e4, value, mask=FULL, scale=1.0)
    assert output.isfinite().all()
    assert lse.isfinite().all()


def kept(mask: Mask, seq_q: int, seq_kv: int) -> Tensor:
    return reference.visible(torch.arange(seq_q), seq_q, seq_kv, mask)


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
    ],
    ids=str,
)
def test_masks_drawn_by_hand(mask: Mask, seq_q: int, seq_kv: int, expected: list[str]) -> None:
    drawn = ["".join(str(int(cell)) for cell in row) for row in kept(mask, seq_q, seq_kv)]
    assert drawn == expected


@pytest.mark.parametrize("mask", [FULL, CAUSAL, TOP_LEFT], ids=str)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [*LENGTHS, (1, 12), (12, 1), (6, 13)])
def test_the_problem_counts_the_pairs_that_the_mask_keeps(mask: Mask, seq_q: int, seq_kv: int) -> None:
    import kernels

    one = kernels.problem(seq_q=seq_q, seq_kv=seq_kv, mask=mask)
    assert one.kept_pairs() == int(kept(one.mask, seq_q, seq_kv).sum())


# --- the yardstick ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.bfloat16, 1e-4, 0.1), (torch.float16, 1e-5, 0.01)])
def test_the_yardstick_errs_like_the_low_precision(dtype: torch.dtype, least: float, most: float) -> None:
    tensors = inputs(seq_q=64, seq_kv=64, head_dim=32, dtype=dtype)
    rough = reference.low_precision(*tensors, mask=CAUSAL, scale=0.2, precision=Precision.IEEE)
    expected, _ = reference.attention(*tensors, mask=CAUSAL, scale=0.2)
    assert rough.dtype is dtype
    assert least < float((rough.double() - expected).abs().max()) < most


def test_the_yardstick_of_tf32_is_far_rougher_than_that_of_float32() -> None:
    tensors = inputs(seq_q=64, seq_kv=64, head_dim=32, dtype=torch.float32)
    expected, _ = reference.attention(*tensors, mask=FULL, scale=0.2)
    facts: dict[str, Any] = {"mask": FULL, "scale": 0.2}
    error = {
        precision: float((reference.low_precision(*tensors, **facts, precision=precision) - expected).abs().max())
        for precision in Precision
    }
    assert 100 * error[Precision.IEEE] < error[Precision.TF32] < 0.01


def test_tf32_keeps_ten_bits_of_the_fraction_and_drops_the_rest() -> None:
    cut = reference.cut_to_tf32
    same = torch.tensor([0.0, 1.0, -2.0, 1.0 + 2.0**-10, 2.0**127, 2.0**-126, math.inf, -math.inf])
    assert torch.equal(cut(same), same)
    assert cut(torch.tensor([1.0 + 2.0**-11])).item() == 1.0
    assert cut(torch.tensor([-(1.0 + 2.0**-10 + 2.0**-12)])).item() == -(1.0 + 2.0**-10)
    assert cut(torch.tensor([math.nan])).isnan().all()


def test_cutting_to_tf32_leaves_its_input_alone_and_takes_any_strides() -> None:
    tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).t()
    before = tensor.clone()
    cut = reference.cut_to_tf32(tensor)
    assert torch.equal(tensor, before)
    assert torch.equal(cut, reference.cut_to_tf32(before))
