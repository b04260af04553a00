"""Problem and Mask against brute force and against their contracts."""

from __future__ import annotations

import dataclasses
import random

import drawn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoattn.core import kernel_kind
from autoattn.core.mask import Alignment, Mask, MaskKind
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Numerics, Op, Precision, Problem
from autoattn.core.tile_widths import pieces
from autoattn.errors import ProblemError

MASKS = [Mask(), *(Mask(kind=MaskKind.CAUSAL, alignment=alignment) for alignment in Alignment)]
PACKED = {"layout": Layout.PACKED, "tokens_q": 999, "tokens_kv": 999}
PLAIN = Problem(dtype=DType.BFLOAT16, batch=2, heads_q=8, heads_kv=2, seq_q=128, seq_kv=256, head_dim=64)


def problem(**changes: object) -> Problem:
    return dataclasses.replace(PLAIN, **changes)  # type: ignore[arg-type]


def sees(mask: Mask, query: int, key: int, seq_q: int, seq_kv: int) -> bool:
    """The definition, one pair at a time: how far the key stands behind the query, both counted from their last."""
    if mask.kind is MaskKind.FULL:
        return True
    if mask.kind is MaskKind.CAUSAL and mask.alignment is Alignment.TOP_LEFT:
        return key <= query
    behind = (seq_q - query) - (seq_kv - key)
    if mask.kind is MaskKind.CAUSAL:
        return behind <= 0
    return (mask.left is None or -behind <= mask.left) and (mask.right is None or behind <= mask.right)


widths = st.one_of(st.just(-1), st.integers(0, 30))
windows = st.builds(Mask.window, widths, widths)
masks = st.one_of(st.sampled_from(MASKS), windows)


@given(st.integers(1, 24), st.integers(1, 24), masks)
def test_kept_pairs_counts_what_the_mask_keeps(seq_q: int, seq_kv: int, mask: Mask) -> None:
    kept = sum(sees(mask, query, key, seq_q, seq_kv) for query in range(seq_q) for key in range(seq_kv))
    assert problem(batch=3, seq_q=seq_q, seq_kv=seq_kv, mask=mask).kept_pairs() == 3 * kept


@given(st.integers(1, 24), st.integers(1, 24), masks)
def test_the_band_says_which_keys_a_query_sees(seq_q: int, seq_kv: int, mask: Mask) -> None:
    first, last = problem(mask=mask).band(seq_q, seq_kv)
    for query in range(seq_q):
        for key in range(seq_kv):
            inside = (first is None or key >= query + first) and (last is None or key <= query + last)
            assert inside == sees(mask, query, key, seq_q, seq_kv)


@given(st.integers(1, 24), st.integers(1, 24), masks)
def test_a_simplified_problem_keeps_the_same_pairs(seq_q: int, seq_kv: int, mask: Mask) -> None:
    call = problem(seq_q=seq_q, seq_kv=seq_kv, mask=mask)
    simplified = call.simplified()
    assert simplified.simplified() == simplified
    for query in range(seq_q):
        for key in range(seq_kv):
            assert sees(call.mask, query, key, seq_q, seq_kv) == sees(simplified.mask, query, key, seq_q, seq_kv)


@pytest.mark.parametrize(
    ("sides", "seq_q", "seq_kv", "simple"),
    [
        ((255, 0), 128, 256, "causal:bottom-right"),  # the last query stands at key 255
        ((254, 0), 128, 256, "window:254,0"),
        ((255, 127), 128, 256, "full"),
        ((3, 127), 128, 256, "window:3,-1"),
        ((3, 126), 128, 256, "window:3,126"),
        ((3, 255), 512, 256, "window:3,255"),  # not clamped to seq_kv, as FlashAttention-2's is
        ((3, 0), 1, 256, "window:3,0"),
        ((0, -1), 5, 5, "window:0,-1"),
    ],
)
def test_a_side_without_effect_is_left_out(sides: tuple[int, int], seq_q: int, seq_kv: int, simple: str) -> None:
    assert str(problem(seq_q=seq_q, seq_kv=seq_kv, mask=Mask.window(*sides)).simplified().mask) == simple


def test_what_is_learned_is_a_fact_of_the_backward_problem_alone() -> None:
    learned = Modifiers(bias=Bias.LEARNED, alibi=True, learned_slopes=True)
    assert problem(modifiers=learned) == problem(modifiers=Modifiers(bias=Bias.ADDITIVE, alibi=True))
    backward = problem(op=Op.BACKWARD, modifiers=learned)
    assert backward.modifiers == learned
    assert "_alibi-learned_bias-learned_" in backward.key
    fixed = problem(op=Op.BACKWARD, modifiers=Modifiers(bias=Bias.LEARNED, alibi=True))
    assert "_alibi_bias-learned_" in fixed.key
    assert not kernel_kind.shares_kernels(backward, fixed)


@given(st.integers(1, 512), st.sampled_from(MASKS[1:]))
def test_both_alignments_are_one_problem_when_the_lengths_agree(seq: int, mask: Mask) -> None:
    first = problem(seq_q=seq, seq_kv=seq, mask=mask)
    second = problem(seq_q=seq, seq_kv=seq, mask=Mask.parse("causal"))
    assert first == second
    assert first.key == second.key


def test_the_alignments_stay_two_problems_when_the_lengths_differ() -> None:
    first, second = (problem(mask=mask) for mask in MASKS[1:])
    assert first != second
    assert first.key != second.key


def test_flops_are_four_per_kept_pair_and_element() -> None:
    assert problem(mask=Mask()).flops() == 4 * 2 * 8 * (128 * 256) * 64
    # 128 queries on 256 keys, bottom-right: they see 129, 130, ..., 256 keys.
    assert problem(mask=Mask.parse("causal")).flops() == 4 * 2 * 8 * sum(range(129, 257)) * 64


@pytest.mark.parametrize(("dtype", "size"), [(DType.FLOAT16, 2), (DType.BFLOAT16, 2), (DType.FLOAT32, 4)])
def test_bytes_count_every_input_and_output_once(dtype: DType, size: int) -> None:
    query = output = 2 * 8 * 128 * 64
    key = value = 2 * 2 * 256 * 64
    assert problem(dtype=dtype).bytes() == (query + key + value + output) * size


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
    layout=st.sampled_from((Layout.BHSD, Layout.BSHD)),
    precision=st.sampled_from(Precision),
    numerics=st.sampled_from(Numerics),
    op=st.sampled_from(Op),
) | st.builds(problem, op=st.just(Op.BACKWARD), deterministic=st.booleans(), numerics=st.sampled_from(Numerics))


@given(problems, problems)
def test_the_key_tells_problems_apart(first: Problem, second: Problem) -> None:
    assert (first.key == second.key) == (first == second)
    assert (str(first) == str(second)) == (first == second)


@given(problems)
def test_the_key_can_stand_in_a_file_name(problem: Problem) -> None:
    assert set(problem.key) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-")


def test_numerics_stand_in_names_only_when_they_are_online_and_change_no_kernel() -> None:
    default, online = problem(), problem(numerics=Numerics.ONLINE)
    assert default == problem(numerics=Numerics.ANY)
    assert "any" not in default.key + str(default)
    assert (online.key, str(online)) == (f"{default.key}_online", f"{default} online")
    assert kernel_kind.shares_kernels(default, online)
    assert default.family == online.family


@given(st.randoms(use_true_random=False))
def test_any_problem_has_a_key_for_a_file_name_and_one_line_of_words(rng: random.Random) -> None:
    problem = drawn.call_of(rng, drawn.LARGE).problem
    assert set(problem.key) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-.")
    assert "\n" not in str(problem)
    assert problem.flops() >= 0
    assert problem.bytes() > 0


@given(st.integers(1, 6), st.integers(1, 50), st.integers(0, 300))
def test_lengths_of_packed_sequences_fill_the_tokens(batch: int, longest: int, more: int) -> None:
    tokens = longest + more
    call = problem(batch=batch, layout=Layout.PACKED, seq_q=longest, seq_kv=longest, tokens_q=tokens, tokens_kv=tokens)
    queries = [pair[0] for pair in call.lengths()]
    assert max(queries) == longest
    assert sum(queries) == min(tokens, batch * longest)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens_q": 5}, "tokens_q belongs to the layout packed"),
        ({"layout": Layout.PACKED, "tokens_q": 5, "tokens_kv": 999}, "tokens_q must be at least seq_q"),
        ({**PACKED, "mask": Mask.blocks(16, 16, 0.5)}, "got a block table"),
        ({**PACKED, "modifiers": Modifiers(bias=Bias.KEYS)}, "got a bias"),
        ({**PACKED, "mask": Mask.parse("causal:top-left")}, "align a causal mask bottom-right"),
        ({"head_dim_v": 513}, "head_dim_v must be at most 512"),
        ({"precision": Precision.TF32X3}, "a choice for float32 alone"),
    ],
    ids=str,
)
def test_facts_that_contradict_one_another_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        problem(**changes)


@pytest.mark.parametrize(
    ("head_dim", "widths"),
    [(1, (16,)), (16, (16,)), (24, (32,)), (40, (32, 16)), (56, (64,)), (72, (64, 16)), (80, (64, 16)),
     (96, (64, 32)), (111, (128,)), (160, (128, 32)), (192, (128, 64)), (256, (256,))],
)  # fmt: skip
def test_pieces_hold_a_head_dim_in_the_least_room(head_dim: int, widths: tuple[int, ...]) -> None:
    assert pieces(head_dim) == widths
