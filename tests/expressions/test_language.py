"""The language of expressions: what it takes, what it computes, and that nothing else passes."""

from __future__ import annotations

import math
from typing import Any

import kernels
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoattn.core.mask import Mask
from autoattn.core.modifiers import Modifiers
from autoattn.errors import ProblemError
from autoattn.expressions import language
from autoattn.expressions.language import MASK_NAMES, SCORE_NAMES, parse
from autoattn.kernels import compiler
from autoattn.reference import attention_formula

GRID: dict[str, Tensor] = {
    "score": torch.linspace(-3.0, 3.0, 7 * 9).reshape(1, 7, 9),
    "b": torch.zeros(1, 1, 1, dtype=torch.int64),
    "h": torch.arange(3)[:, None, None],
    "q_idx": torch.arange(7)[None, :, None],
    "kv_idx": torch.arange(9)[None, None, :],
}


def value(text: str, *captures: Tensor) -> Any:
    """What a score_mod gives over the grid."""
    names = GRID | {f"captured{place}": tensor for place, tensor in enumerate(captures)}
    return parse(text, SCORE_NAMES).evaluate(names, attention_formula.FUNCTIONS)


def same(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.to(expected.dtype).expand(3, 7, 9), expected.expand(3, 7, 9))


# --- what it computes -------------------------------------------------------------------------------------------------


def test_lines_give_names_and_the_last_line_is_the_answer() -> None:
    text = "far = q_idx - kv_idx > 2\nloss = 0.5 * h\nwhere(far, score - loss, score)"
    score, h, far = GRID["score"], GRID["h"], GRID["q_idx"] - GRID["kv_idx"] > 2
    same(value(text), torch.where(far, score - 0.5 * h, score))


def test_a_name_may_be_given_anew() -> None:
    same(value("t = score\nold = t\nt = old * 2\nt + old"), GRID["score"] * 3)


def test_numbers_are_computed_while_the_text_is_read() -> None:
    assert parse("third = 1 / 3\nscore * (third * 3)", SCORE_NAMES).steps == ()
    same(value("score * -(2 + 3 * 4 // 5 % 3)"), GRID["score"] * -4)


def test_a_captured_tensor_is_read_by_whole_numbers() -> None:
    slopes, table = torch.tensor([0.5, 1.0, 2.0]), torch.arange(63).reshape(7, 9)
    text = "captured0: float32[1]\ncaptured1: int64[2]\nscore * captured0[h] + captured1[q_idx, kv_idx]"
    same(value(text, slopes, table), GRID["score"] * slopes[:, None, None] + table)


def test_a_computed_index_counts_from_the_end_below_0_and_stays_inside() -> None:
    table = torch.arange(5.0)
    index = (GRID["q_idx"] - GRID["kv_idx"]) * 2
    inside = torch.where(index < 0, index + 5, index).clamp(0, 4)
    same(value("captured0: float32[1]\ncaptured0[(q_idx - kv_idx) * 2]", table), table[inside])
    assert value("captured0: float32[1]\ncaptured0[-1]", table) == 4.0
    assert value("captured0: float32[1]\ncaptured0[99]", table) == 4.0


def test_a_bare_name_beyond_a_tensor_is_an_error_and_is_told_beforehand() -> None:
    text = "captured0: float32[2]\ncaptured0[h, q_idx - 1] + score"
    assert list(parse(text, SCORE_NAMES).indexed()) == [("captured0", 0, "h")]
    with pytest.raises(IndexError):
        value(text, torch.zeros(2, 9))


def test_tensors_of_16_bits_are_numbers_of_32() -> None:
    assert (
        value("captured0: bfloat16[1]\ncaptured0[h] * 1.0", torch.ones(3, dtype=torch.bfloat16)).dtype is torch.float32
    )


@given(
    st.sampled_from(["//", "%", "/"]),
    st.one_of(st.integers(-50, 50), st.floats(-50, 50, width=32).filter(lambda number: abs(number) > 0.01)),
)
def test_division_and_its_rest_are_pytorchs(sign: str, divisor: float) -> None:
    if divisor == 0:
        return
    difference = GRID["q_idx"] - GRID["kv_idx"]
    ways = {"//": torch.floor_divide, "%": torch.remainder, "/": torch.true_divide}
    same(value(f"(q_idx - kv_idx) {sign} ({divisor!r})"), ways[sign](difference, divisor))


@pytest.mark.parametrize(("least", "most"), [("2.5", "3"), ("3", "2.5")])
def test_minimum_and_maximum_do_not_cut_numbers_to_whole_ones(least: str, most: str) -> None:
    same(value(f"minimum(kv_idx, {least})"), GRID["kv_idx"].clamp(max=float(least)))
    same(value(f"maximum(kv_idx, {most})"), GRID["kv_idx"].clamp(min=float(most)))


def test_infinity_has_a_name() -> None:
    same(
        value("where(q_idx < kv_idx, -inf, score)"),
        GRID["score"].masked_fill(GRID["q_idx"] < GRID["kv_idx"], -math.inf),
    )


# --- what it becomes in Triton ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("score - 1e30", "return (score - 1e+30)"),
        ("where(h > 1, -inf, score)", 'return tl.where((h > 1), float("-inf"), score)'),
        ("score * (h // 2) % 3", "return remainder((score * floor_divide(h, 2)), 3)"),
        ("score // 2", "return floor_divide_float(score, 2)"),
        ("score + exp(h) + floor(h)", "return ((score + tl.exp(to_float(h))) + h)"),
        ("h * 2", "return tl.where(score == score, (h * 2), (h * 2))"),
        ("3", "return tl.where(score == score, 3, 3)"),
    ],
)
def test_an_answer_is_written_out_as_triton(text: str, line: str) -> None:
    assert parse(text, SCORE_NAMES).triton() == [line]


def test_names_of_lines_hide_nothing_of_the_kernel() -> None:
    read = parse("tl = score * 2\nremainder = tl % 3\nremainder + tl", SCORE_NAMES)
    assert read.triton() == [
        "own_tl = (score * 2)", "own_remainder = remainder(own_tl, 3)", "return (own_remainder + own_tl)",
    ]  # fmt: skip


def test_what_is_read_by_head_is_passed_and_the_same_is_read_once() -> None:
    text = "captured0: float32[2]\ncaptured1: int32[1]\nplace = captured1[b] + h\nx = score * captured0[b, place]\n"
    read = parse(text + "x + captured0[b, h] - captured0[b, h] * captured1[kv_idx]", SCORE_NAMES)
    assert read.head_lines() == [
        "head_value0 = tl.load(captured1_ptr + b)",
        "own_place = (head_value0 + h)",
        "head_value1 = tl.load(captured0_ptr + b * captured0_stride0 + inside(own_place, captured0_size1))",
        "head_value2 = tl.load(captured0_ptr + b * captured0_stride0 + h)",
        "return head_value0, head_value1, head_value2",
    ]
    assert read.triton() == [
        "own_place = (head_value0 + h)",
        "own_x = (score * head_value1)",
        "return ((own_x + head_value2) - (head_value2 * tl.load(captured1_ptr + kv_idx)))",
    ]
    assert [capture.name for capture in read.pair_captures] == ["captured1"]


def test_a_name_that_is_given_again_reads_again() -> None:
    text = "captured0: float32[1]\nplace = h + 1\nx = score + captured0[place]\nplace = h + 2\nx * captured0[place]"
    read = parse(text, SCORE_NAMES)
    assert read.head_values == ["head_value0", "head_value1"]
    assert read.triton()[1::2] == ["own_x = (score + head_value0)", "return (own_x * head_value1)"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("captured0: float32[2]\nscore + captured0[h, kv_idx]", SCORE_NAMES),
        ("captured0: float32[1]\nplace = to_int(score)\nscore + captured0[place]", SCORE_NAMES),
        ("captured0: bool[1]\ncaptured0[h]", MASK_NAMES),
    ],
)
def test_what_pairs_read_is_not_passed(text: str, names: tuple[str, ...]) -> None:
    read = parse(text, names)
    assert (read.head_values, read.head_lines(), read.pair_captures) == ([], [], read.captures)


def test_reads_are_written_out_with_strides_and_computed_indices_moved_inside() -> None:
    read = parse("captured0: bfloat16[2]\nscore + captured0[h, kv_idx - 1]", SCORE_NAMES)
    assert read.triton() == [
        "return (score + to_float(tl.load(captured0_ptr + h * captured0_stride0 + "
        "inside((kv_idx - 1), captured0_size1))))"
    ]
    assert read.captures[0].arguments() == [
        ("captured0_ptr", "*bf16"),
        ("captured0_stride0", "i32"),
        ("captured0_size0", "i32"),
        ("captured0_size1", "i32"),
    ]


# --- what it refuses --------------------------------------------------------------------------------------------------

FORBIDDEN = [
    "", "   ", "score +", "score = 1", "print(score)", "__import__('os')", "score.real", "score[0]", "lambda: 1",
    "score if h else 0", "[score]", "(score, 1)", "score ** 2", "score @ score", "score << 1", "not score", "+score",
    "h > 1 and b > 0", "0 < h < 3", "h in b", "h is b", "'text'", "1j", "f'{score}'", "score := 1", "...", "None",
    "where(h > 1, score)", "where(h > 1, score, other=0)", "where(*h)", "exp", "exp(score)(1)", "unknown + 1",
    "tl.load(h)",
    "import os\nscore", "def f(): pass\nscore", "for t in h: score", "score\nscore", "t = score", "t: int = 3\nscore",
    "a, t = score\nscore", "a = t = score\nscore", "exp = score\nexp", "score = h\nscore", "inf = 3\nscore",
    "captured0 = h\nscore", "captured0[h]", "captured1: float32[1]\nscore", "captured0: float64[1]\nscore",
    "captured0: float32[0]\nscore", "captured0: float32[5]\nscore", "captured0: float32[True]\nscore",
    "captured0: float32[1]\ncaptured0", "captured0: float32[1]\ncaptured0[h, b]",
    "captured0: float32[1]\ncaptured0[0.5]",
    "captured0: float32[1]\ncaptured0[h > 1]", "captured0: float32[1]\ncaptured0[h:]", "captured0: float32[1]\nh[0]",
    "\u00e9 = score\n\u00e9", "score\x00", "1e39 + score", "1e-40 + score", "4294967296 + h", "2147483647 + 1 + score",
    "score + 1 / 0", "h // 0", "h % 0", "inf - inf + score", "exp(1.0) + score", "~3 + h", "score & 1", "score | h",
    "(h > 1) & h", "-(h > 1) + score", "(h > 1) + (b > 1) + score", "where(h, score, 0)", "where(True, score, 0)",
    "where(h > 1, score, h > 1)", "exp(h > 1) + score", "h > 1", "-" * 70 + "score", "(" * 300 + "score" + ")" * 300,
    "score + " * 4000 + "score", "9" * 5000 + " + score",
]  # fmt: skip


@pytest.mark.parametrize("text", FORBIDDEN, ids=range(len(FORBIDDEN)))
def test_what_is_no_arithmetic_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ProblemError) as caught:
        parse(text, SCORE_NAMES)
    assert "\n" not in str(caught.value).replace("\\n", "")
    assert len(str(caught.value)) < 600


def test_a_mask_knows_no_score_and_answers_with_a_boolean() -> None:
    parse("q_idx >= kv_idx", MASK_NAMES)
    parse("True", MASK_NAMES)
    for text in ("score > 0", "q_idx", "1.0"):
        with pytest.raises(ProblemError):
            parse(text, MASK_NAMES)


def test_so_many_captures_and_no_more() -> None:
    lines = [f"captured{place}: float32[1]" for place in range(language.MAX_CAPTURES + 1)]
    parse("\n".join([*lines[:-1], "score"]), SCORE_NAMES)
    with pytest.raises(ProblemError, match="up to 16"):
        parse("\n".join([*lines, "score"]), SCORE_NAMES)


@given(st.text(alphabet="scoreqkv_idxhb0123456789.+-*/%()[]:=<>&|~, \n'\"\\{}@!;", max_size=40))
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    try:
        lines = parse(text, SCORE_NAMES).triton()
    except ProblemError:
        return
    assert lines[-1].startswith("return ")


# --- compiled ---------------------------------------------------------------------------------------------------------

EVERYTHING = """captured0: float16[1]
captured1: int64[2]
captured2: bool[1]
a = q_idx - kv_idx
near = (a % -3 == 0) | captured2[kv_idx] & (captured2[q_idx] == True) & ~(q_idx == 3)
w = score % 0.7 + score // -0.3 + kv_idx // 2.5 + floor(score) + to_int(score) + abs(a) / 4 + floor(h)
k = captured1[h, a] + captured1[q_idx, -1] + minimum(q_idx, 2.5) + maximum(kv_idx, 3) + captured1[b, h] // -2
v = exp2(-(h + 1)) + tanh(score) + sqrt(q_idx) + rsqrt(score) + sin(h) + cos(w) + log(w) + log2(h) + exp(w) + sigmoid(a)
where(near, score + captured0[h] * v, w + 0.01 * k + (q_idx > 2) * 0.5 + to_int(a == 0) + to_float(a ^ 3))
"""  # Triton's compiler is stricter about kinds than its interpreter


def test_all_functions_and_operators_compile_for_a_gpu() -> None:
    problem = kernels.problem(modifiers=Modifiers(score_mod=EVERYTHING))
    compiler.build(kernels.source(problem, num_warps=4), 80)


def test_a_mask_compiles_for_a_gpu() -> None:
    text = "captured0: bool[2]\n(captured0[h, kv_idx] ^ (q_idx // 3 % 2 == 0)) & (b < 1)"
    compiler.build(kernels.source(kernels.problem(mask=Mask.blocks(16, 16, 0.5, text)), num_warps=4), 90)
