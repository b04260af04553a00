"""Problem and Mask against brute force and against their contracts."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoattn.errors import ProblemError
from autoattn.mask import Alignment, Mask, MaskKind
from autoattn.problem import DType, Layout, Op, Precision, Problem

MASKS = [Mask(), *(Mask(kind=MaskKind.CAUSAL, alignment=alignment) for alignment in Alignment)]
PLAIN = Problem(dtype=DType.BFLOAT16, batch=2, heads_q=8, heads_kv=2, seq_q=128, seq_kv=256, head_dim=64)


def problem(**changes: object) -> Problem:
    return dataclasses.replace(PLAIN, **changes)  # type: ignore[arg-type]


def sees(mask: Mask, query: int, key: int, seq_q: int, seq_kv: int) -> bool:
    """The definition, one pair at a time."""
    if mask.kind is MaskKind.FULL:
        return True
    if mask.alignment is Alignment.TOP_LEFT:
        return key <= query
    return seq_kv - key >= seq_q - query  # counted from the last query and the last key


@given(st.integers(1, 24), st.integers(1, 24), st.sampled_from(MASKS))
def test_kept_pairs_counts_what_the_mask_keeps(seq_q: int, seq_kv: int, mask: Mask) -> None:
    kept = sum(sees(mask, query, key, seq_q, seq_kv) for query in range(seq_q) for key in range(seq_kv))
    assert problem(seq_q=seq_q, seq_kv=seq_kv, mask=mask).kept_pairs() == kept


@given(st.integers(1, 24), st.integers(1, 24), st.sampled_from(MASKS[1:]))
def test_shift_says_the_last_key_that_a_query_sees(seq_q: int, seq_kv: int, mask: Mask) -> None:
    shift = problem(seq_q=seq_q, seq_kv=seq_kv, mask=mask).shift
    for query in range(seq_q):
        for key in range(seq_kv):
            assert (key <= query + shift) == sees(mask, query, key, seq_q, seq_kv)


@given(st.integers(1, 512), st.sampled_from(MASKS[1:]))
def test_both_alignments_are_one_problem_when_the_lengths_agree(seq: int, mask: Mask) -> None:
    one = problem(seq_q=seq, seq_kv=seq, mask=mask)
    other = problem(seq_q=seq, seq_kv=seq, mask=Mask.parse("causal"))
    assert one == other
    assert one.key == other.key


def test_the_alignments_stay_two_problems_when_the_lengths_differ() -> None:
    one, other = (problem(mask=mask) for mask in MASKS[1:])
    assert one != other
    assert one.key != other.key


def test_flops_are_four_per_kept_pair_and_element() -> None:
    assert problem(mask=Mask()).flops() == 4 * 2 * 8 * (128 * 256) * 64
    # 128 queries on 256 keys, bottom-right: they see 129, 130, ..., 256 keys.
    assert problem(mask=Mask.parse("causal")).flops() == 4 * 2 * 8 * sum(range(129, 257)) * 64


@pytest.mark.parametrize(("dtype", "size"), [(DType.FLOAT16, 2), (DType.BFLOAT16, 2), (DType.FLOAT32, 4)])
def test_bytes_count_every_input_and_output_once(dtype: DType, size: int) -> None:
    query = output = 2 * 8 * 128 * 64
    key = value = 2 * 2 * 256 * 64
    assert problem(dtype=dtype).bytes() == (query + key + value + output) * size


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("full", "full"),
        (False, "full"),
        ("causal", "causal:bottom-right"),
        (True, "causal:bottom-right"),
        ("causal:bottom-right", "causal:bottom-right"),
        ("causal:top-left", "causal:top-left"),
    ],
)
def test_mask_reads_its_names(text: str | bool, written: str) -> None:
    mask = Mask.parse(text)
    assert str(mask) == written
    assert Mask.parse(str(mask)) == mask
    assert mask.causal == (written != "full")


@pytest.mark.parametrize(
    "text", ["", "Causal", "causal:", "full:", "full:top-left", "causal:left", "window", " causal", "1"]
)
def test_mask_refuses_other_names(text: str) -> None:
    with pytest.raises(ProblemError, match="mask must be"):
        Mask.parse(text)


@pytest.mark.parametrize("name", ["batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim"])
@pytest.mark.parametrize("size", [0, -1, True, 1.0, "8", None, 2**31])
def test_sizes_are_whole_numbers_that_fit_int32(name: str, size: object) -> None:
    with pytest.raises(ProblemError, match=f"{name} must be a whole number"):
        problem(**{name: size})


def test_query_heads_are_a_multiple_of_key_heads() -> None:
    assert problem(heads_q=8, heads_kv=1).group_size == 8
    for heads_kv in (3, 16):
        with pytest.raises(ProblemError, match="heads_q must be a multiple of heads_kv"):
            problem(heads_kv=heads_kv)


@pytest.mark.parametrize(("head_dim", "padded"), [(1, 16), (16, 16), (17, 32), (56, 64), (80, 128), (256, 256)])
def test_head_dim_goes_to_256_and_pads_to_a_power_of_two(head_dim: int, padded: int) -> None:
    assert problem(head_dim=head_dim).head_dim_padded == padded
    with pytest.raises(ProblemError, match="head_dim must be at most 256"):
        problem(head_dim=257)


def test_precision_is_a_choice_for_float32_alone() -> None:
    assert problem(dtype=DType.FLOAT32, precision=Precision.TF32).family == "float32-tf32_d64"
    with pytest.raises(ProblemError, match="precision tf32 is a choice for float32 alone"):
        problem(precision=Precision.TF32)


problems = st.builds(
    Problem,
    dtype=st.just(DType.FLOAT32),
    batch=st.integers(1, 3),
    heads_q=st.sampled_from([4, 8]),
    heads_kv=st.sampled_from([1, 2, 4]),
    seq_q=st.integers(1, 3),
    seq_kv=st.integers(1, 3),
    head_dim=st.integers(1, 256),
    mask=st.sampled_from(MASKS),
    layout=st.sampled_from(Layout),
    precision=st.sampled_from(Precision),
    op=st.sampled_from(Op),
)


@given(problems, problems)
def test_the_key_tells_problems_apart(one: Problem, other: Problem) -> None:
    assert (one.key == other.key) == (one == other)
    assert (str(one) == str(other)) == (one == other)


@given(problems)
def test_the_key_can_stand_in_a_file_name(one: Problem) -> None:
    assert set(one.key) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-")
