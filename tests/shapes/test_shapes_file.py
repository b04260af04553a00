"""Shapes files: the format, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoattn.core.key_cache import KeyCache
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Numerics, Precision, Problem
from autoattn.core.sequence_lengths import KeyLengths
from autoattn.errors import ShapesError
from autoattn.shapes import shapes_file

FIELDS: dict[str, Any] = {"dtype": "bfloat16", "batch": 2, "heads": 4, "seq": 128, "head_dim": 64}


def file_of(*problems: object, **top: object) -> dict[str, Any]:
    return {"version": 1, "groups": {"one": {"problems": list(problems)}}, **top}


def problems_of(*problems: object, **top: object) -> list[Problem]:
    return [named.problem for named in shapes_file.parse(file_of(*problems, **top), "f.yaml")]


def the_problem(**changes: object) -> Problem:
    """The single problem that FIELDS with changes stands for; None removes a key."""
    values = {key: value for key, value in {**FIELDS, **changes}.items() if value is not None}
    (problem,) = problems_of(values)
    return problem


def refusal(document: object) -> str:
    with pytest.raises(ShapesError) as caught:
        shapes_file.parse(document, "f.yaml")
    message = str(caught.value)
    assert message.startswith("f.yaml")
    assert "\n" not in message
    return message


# The problem


def test_a_problem_says_what_it_says_and_defaults_the_rest() -> None:
    assert the_problem() == Problem(
        dtype=DType.BFLOAT16, batch=2, heads_q=4, heads_kv=4, seq_q=128, seq_kv=128, head_dim=64
    )
    full = the_problem(heads_kv=2, seq="64x256", mask="causal:top-left", layout="bshd", dtype="float32:tf32")
    assert (full.heads_q, full.heads_kv, full.seq_q, full.seq_kv) == (4, 2, 64, 256)
    assert full.mask == Mask.parse("causal:top-left")
    assert (full.layout, full.dtype, full.precision) == (Layout.BSHD, DType.FLOAT32, Precision.TF32)


@pytest.mark.parametrize(
    ("text", "dtype", "precision"),
    [
        ("float16", DType.FLOAT16, Precision.IEEE),
        ("fp16", DType.FLOAT16, Precision.IEEE),
        ("bf16", DType.BFLOAT16, Precision.IEEE),
        ("float32", DType.FLOAT32, Precision.IEEE),
        ("float32:ieee", DType.FLOAT32, Precision.IEEE),
        ("fp32:tf32", DType.FLOAT32, Precision.TF32),
        ("float32:tf32x3", DType.FLOAT32, Precision.TF32X3),
        ("float8_e4m3", DType.FLOAT8, Precision.IEEE),
        ("fp8", DType.FLOAT8, Precision.IEEE),
    ],
)
def test_dtype_carries_the_precision(text: str, dtype: DType, precision: Precision) -> None:
    assert (the_problem(dtype=text).dtype, the_problem(dtype=text).precision) == (dtype, precision)


@pytest.mark.parametrize("precision", list(Precision))
def test_precision_is_the_key_of_what_stands_behind_the_dtype(precision: Precision) -> None:
    assert the_problem(dtype="fp32", precision=precision.value) == the_problem(dtype=f"fp32:{precision.value}")


def test_a_list_of_precisions_is_a_grid_and_a_default_precision_serves_float32() -> None:
    named = problems_of({**FIELDS, "dtype": "fp32", "precision": ["ieee", "tf32", "tf32x3"]})
    assert [problem.precision for problem in named] == list(Precision)
    (problem,) = problems_of({**FIELDS, "dtype": "float32"}, defaults={"precision": "tf32"})
    assert problem.precision is Precision.TF32
    assert "got precision: tf32 with bfloat16" in refusal(file_of(FIELDS, defaults={"precision": "tf32"}))


def test_lengths_have_three_spellings() -> None:
    assert the_problem(seq="64x256") == the_problem(seq=None, seq_q=64, seq_kv=256)
    assert the_problem(seq="64x64") == the_problem(seq=64)


def test_masks_have_two_spellings() -> None:
    assert the_problem(seq="64x256", causal=True) == the_problem(seq="64x256", mask="causal:bottom-right")
    assert the_problem(causal=False) == the_problem(mask="full") == the_problem()


def test_windows_and_block_tables_are_masks() -> None:
    assert the_problem(mask="window:7,0").mask == Mask.window(7, 0)
    assert the_problem(mask="blocks:64x32,0.5").mask == Mask.blocks(64, 32, 0.5)


def test_a_window_wider_than_the_sequence_is_the_mask_that_it_comes_to() -> None:
    assert the_problem(mask="window:127,0") == the_problem(mask="causal")
    assert problems_of({**FIELDS, "mask": ["window:500,500", "full", "window:-1,-1"]}) == [the_problem()]
    assert the_problem(mask="window:126,0").mask.left == 126


def test_values_may_have_a_head_dim_of_their_own() -> None:
    assert (the_problem().head_dim_v, the_problem(head_dim_v=128).head_dim_v) == (64, 128)
    assert the_problem(head_dim_v=64) == the_problem()


def test_packed_sequences_say_how_many_tokens_they_have() -> None:
    packed = {"layout": "packed", "batch": 3}
    problem = the_problem(**packed, tokens="200x300", seq="100x128")
    assert (problem.layout, problem.batch, problem.seq_q, problem.seq_kv) == (Layout.PACKED, 3, 100, 128)
    assert (problem.tokens_q, problem.tokens_kv) == (200, 300)
    assert the_problem(**packed, seq="100x128", tokens_q=200, tokens_kv=300) == problem
    assert the_problem(**packed, tokens=200).tokens_kv == 200


def test_numerics_may_be_a_list_and_are_any_where_nothing_is_said() -> None:
    assert the_problem().numerics is Numerics.ANY
    assert the_problem(numerics="online").numerics is Numerics.ONLINE
    both = problems_of({**FIELDS, "numerics": ["any", "online"]})
    assert both == [the_problem(), the_problem(numerics="online")]
    for wrong in ("first_max", True, 1):
        document = {"version": 1, "groups": {"g": {"problems": [{**FIELDS, "numerics": wrong}]}}}
        assert f"numerics must be any or online, got {wrong!r}; correct it" in refusal(document)


def test_gradients_may_have_to_repeat_to_the_bit() -> None:
    both = problems_of({**FIELDS, "operation": "backward", "deterministic": [False, True]})
    assert [problem.deterministic for problem in both] == [False, True]
    for wrong, words in (
        ("yes", "deterministic must be true or false, got 'yes'"),
        (True, "backward alone, got forward"),
    ):
        document = {"version": 1, "groups": {"g": {"problems": [{**FIELDS, "deterministic": wrong}]}}}
        assert words in refusal(document)


def test_modifiers_are_switches_words_and_expressions() -> None:
    assert the_problem().modifiers == Modifiers()
    every = {"softcap": True, "alibi": True, "sinks": True, "dropout": True}
    assert the_problem(**every).modifiers == Modifiers(softcap=True, alibi=True, sinks=True, dropout=True)
    sloped = the_problem(operation="backward", alibi=True, learned_slopes=True)
    assert sloped.modifiers == Modifiers(alibi=True, learned_slopes=True)
    biases = problems_of({**FIELDS, "bias": ["none", "keys", "boolean", "additive"]})
    assert [problem.modifiers.bias for problem in biases] == list(Bias)[:4]
    text = "far = q_idx - kv_idx > 9\nwhere(far, -inf, score)"
    assert the_problem(score_mod=f"{text}\n").modifiers == Modifiers(score_mod=text)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"batch": 0}, "batch must be a whole number from 1 to 2147483647, got 0"),
        ({"heads": -4}, "heads must be a whole number"),
        ({"heads_kv": True}, "heads_kv must be a whole number from 1 to 2147483647, got True"),
        ({"head_dim": 64.0}, "head_dim must be a whole number from 1 to 2147483647, got 64.0"),
        ({"batch": "2"}, "batch must be a whole number from 1 to 2147483647, got '2'"),
        ({"batch": 2**31}, "batch must be a whole number"),
        ({"batch": {"a": 1}}, "batch must be a whole number"),
        ({"batch": [1, [2]]}, r"batch must be a whole number from 1 to 2147483647, got \[2\]"),
        ({"batch": []}, "batch must be a value or a list of them, got an empty list"),
        ({"seq": True}, "seq must be a whole number"),
        ({"seq": "128"}, "seq must be a number or a text as 1024x4096, got '128'"),
        ({"seq": "0x128"}, "seq must be a whole number from 1 to 2147483647, got 0"),
        ({"seq": "9" * 5000 + "x1"}, "seq must be a number or a text as 1024x4096"),
        ({"seq": "1x2x3"}, "seq must be a number or a text"),
        ({"seq": None, "seq_q": 128}, "must say seq_kv, but does not"),
        ({"seq": None}, "must say seq, but does not"),
        ({"dtype": None, "batch": None}, "must say dtype, batch, but does not"),
        ({"seq_q": 128}, "gives seq and seq_q; keep one of them"),
        ({"mask": "full", "causal": True}, "gives mask and causal; keep one of them"),
        ({"dtype": "float64"}, "dtype must be float16, .* got 'float64'"),
        ({"dtype": "bfloat16:tf32"}, "dtype must be .* got 'bfloat16:tf32'"),
        ({"dtype": "float32:"}, "dtype must be .* got 'float32:'"),
        ({"dtype": "float32:fast"}, "dtype must be .* got 'float32:fast'"),
        ({"dtype": 16}, "dtype must be .* got 16"),
        ({"mask": "diagonal"}, "mask must be full, causal, .* got 'diagonal'"),
        ({"mask": True}, "mask must be full, causal"),
        ({"causal": "top-left"}, "causal must be true or false, got 'top-left'"),
        ({"causal": 1}, "causal must be true or false, got 1"),
        ({"layout": "bsd"}, "layout must be bhsd, bshd or packed, got 'bsd'"),
        ({"layout": []}, "layout must be a value or a list"),
        ({"layout": {}}, "layout must be bhsd, bshd or packed, got {}"),
        ({"mask": "window:1"}, "mask must be .* got 'window:1'"),
        ({"mask": "window:-2,0"}, r"a window must be two whole numbers from -1 \(no bound\), got \(-2, 0\)"),
        ({"mask": "blocks:100x128,0.5"}, "blocks of a mask must be powers of two from 16 to 4096, got 100 by 128"),
        ({"mask": "blocks:128x128,1.5"}, "the density of a mask must be from 0 to 1, got 1.5"),
        ({"dtype": "float32:tf32x2"}, "dtype must be .*tf32x3 .* got 'float32:tf32x2'"),
        ({"dtype": "fp8:tf32"}, "dtype must be .* got 'fp8:tf32'"),
        ({"head_dim_v": 513}, "head_dim_v must be at most 512, got 513"),
        ({"head_dim_v": 0}, "head_dim_v must be a whole number from 1 to 2147483647, got 0"),
        ({"layout": "packed"}, "must say tokens, but does not"),
        ({"layout": "packed", "tokens_q": 128}, "must say tokens_kv, but does not"),
        ({"layout": "packed", "tokens": 128, "tokens_q": 128}, "gives tokens and tokens_q; keep one of them"),
        ({"layout": "packed", "tokens": 127}, "tokens_q must be at least seq_q, 128, got 127"),
        ({"layout": "packed", "tokens": "many"}, "tokens must be a number or a text as 1024x4096, got 'many'"),
        ({"layout": "packed", "tokens": 256, "bias": "keys"}, "packed sequences take .* masks, got a bias"),
        ({"layout": "packed", "tokens": 256, "mask": "blocks:16x16,0.5"}, "packed .*, got a block table"),
        ({"tokens": 256}, "tokens_q belongs to the layout packed, got bhsd; leave it out"),
        ({"softcap": 30.0}, "softcap must be true or false, got 30.0; its numbers belong to the call"),
        ({"alibi": 1}, "alibi must be true or false, got 1"),
        ({"operation": "backward", "learned_slopes": True}, "learned_slopes must come with alibi"),
        ({"sinks": "yes"}, "sinks must be true or false, got 'yes'"),
        ({"dropout": 0.1}, "dropout must be true or false, got 0.1"),
        ({"bias": "key"}, "bias must be none, keys, boolean, additive or learned, got 'key'"),
        ({"bias": True}, "bias must be none, keys, boolean, additive or learned, got True"),
        ({"score_mod": 1}, "score_mod must be an expression as text, got 1"),
        ({"score_mod": ""}, "an expression must be text"),
        ({"score_mod": "open('x')"}, "an expression may hold .* got"),
        ({"score_mod": "score + row"}, "an expression may hold numbers, names, .* got 'row'"),
        ({"heads_kv": 3}, "heads_q must be a multiple of heads_kv, got 4 and 3"),
        ({"head_dim": 257}, "head_dim must be at most 256, got 257"),
        ({"head_dims": 64}, "unknown key 'head_dims'; did you mean head_dim?"),
        ({"zzz": 64}, "unknown key 'zzz'; known are alibi, batch, bias, cache, causal,"),
        ({"precision": "tf32"}, "precision is a choice for float32 alone, got precision: tf32 with bfloat16; leave it"),
        ({"precision": "ieee"}, "precision is a choice for float32 alone, got precision: ieee with bfloat16; leave it"),
        ({"dtype": "fp32", "precision": "fp16"}, "precision must be ieee, tf32 or tf32x3, got 'fp16'; correct it"),
        ({"dtype": "fp32", "precision": True}, "precision must be ieee, tf32 or tf32x3, got True; correct it"),
        (
            {"dtype": "fp32:tf32", "precision": "ieee"},
            "precision must stand in one place, got dtype: float32:tf32 and precision: ieee; keep one of them",
        ),
    ],
)
def test_a_wrong_problem_is_refused_at_its_place(changes: dict[str, object], fault: str) -> None:
    wrong = {key: value for key, value in {**FIELDS, **changes}.items() if value is not None}
    message = refusal(file_of(FIELDS, wrong))
    assert message.startswith("f.yaml: group 'one', problem 2")
    assert re.search(fault, message), message


@pytest.mark.parametrize("problem", [None, 1, "x", [FIELDS]])
def test_a_problem_is_a_mapping(problem: object) -> None:
    assert "problem 1 must be a mapping" in refusal(file_of(problem))


def test_a_null_value_is_not_an_absent_one() -> None:
    assert "heads_kv must be a whole number from 1 to 2147483647, got nothing" in refusal(
        file_of({**FIELDS, "heads_kv": None})
    )


# Grids and defaults


def test_lists_are_grids_and_the_last_key_changes_fastest() -> None:
    grid = problems_of({**FIELDS, "batch": [2, 1], "seq": [128, "64x256"], "mask": ["full", "causal"]})
    assert [(p.batch, p.seq_q, p.mask.causal) for p in grid] == [
        (batch, seq, causal) for batch in (2, 1) for seq in (128, 64) for causal in (False, True)
    ]


def test_the_lists_of_defaults_are_the_outer_loops() -> None:
    own = {key: value for key, value in FIELDS.items() if key not in ("dtype", "batch")}
    grid = problems_of({**own, "head_dim": [32, 64]}, defaults={"dtype": ["fp16", "bf16"], "batch": 1})
    assert [(p.dtype, p.head_dim) for p in grid] == [
        (dtype, head_dim) for dtype in (DType.FLOAT16, DType.BFLOAT16) for head_dim in (32, 64)
    ]


def test_the_nearest_value_counts() -> None:
    document = {
        "version": 1,
        "defaults": {**FIELDS, "batch": 1, "heads": 1, "head_dim": 16},
        "groups": {"one": {"defaults": {"heads": 2, "head_dim": 32}, "problems": [{"head_dim": 64}, {}]}},
    }
    problems = [named.problem for named in shapes_file.parse(document, "f.yaml")]
    assert [(p.batch, p.heads_q, p.head_dim) for p in problems] == [(1, 2, 64), (1, 2, 32)]


@pytest.mark.parametrize(
    ("below", "above", "expected"),
    [
        ({"seq": 64}, {"seq_q": 1, "seq_kv": 2}, {"seq": "1x2"}),
        ({"seq_q": 1, "seq_kv": 2}, {"seq": 64}, {"seq": 64}),
        ({"mask": "full"}, {"causal": True}, {"mask": "causal"}),
        ({"causal": True}, {"mask": "full"}, {"mask": "full"}),
    ],
)
def test_the_other_spelling_of_a_default_gives_way(
    below: dict[str, Any], above: dict[str, Any], expected: dict[str, Any]
) -> None:
    values = {key: value for key, value in FIELDS.items() if key != "seq"}
    document = file_of({**values, "seq": 64, **above}, defaults=below)
    if "seq_q" in above:
        document = file_of({**values, **above}, defaults=below)
    (named,) = shapes_file.parse(document, "f.yaml")
    assert named.problem == the_problem(**{"seq": 64, **expected})


def test_a_spelling_that_gave_way_does_not_come_back() -> None:
    document = file_of({"seq_q": 1})
    document["defaults"] = {key: value for key, value in FIELDS.items() if key != "seq"} | {"seq_q": 2, "seq_kv": 3}
    document["groups"]["one"]["defaults"] = {"seq": 64}
    assert "must say seq_kv" in refusal(document)  # the file's seq_kv went when the group said seq


def test_wrong_defaults_are_refused_at_their_place() -> None:
    assert refusal(file_of(FIELDS, defaults={"batch": 0})).startswith("f.yaml: defaults: batch must be")
    document = file_of(FIELDS)
    document["groups"]["one"]["defaults"] = {"seq": 1, "seq_q": 1}
    assert refusal(document).startswith("f.yaml: group 'one': defaults gives seq and seq_q")
    document["groups"]["one"]["defaults"] = [1]
    assert "defaults must be a mapping" in refusal(document)


def test_a_grid_above_ten_thousand_is_refused_before_it_unfolds() -> None:
    numbers = list(range(1, 101))
    assert len(problems_of({**FIELDS, "batch": numbers, "seq": numbers})) == 10_000
    message = refusal(file_of(FIELDS, {**FIELDS, "batch": numbers, "seq": numbers}))
    assert message == "f.yaml: group 'one', problem 2 takes the file above 10000 problems; shorten its lists"
    huge = list(range(1, 1000))
    refusal(file_of({key: "bf16" if key == "dtype" else huge for key in FIELDS}))  # 10^12 of them, at once


# Groups


def test_a_problem_listed_twice_is_one_with_all_its_groups() -> None:
    document = {
        "version": 1,
        "groups": {
            "first": {"problems": [FIELDS, FIELDS, {**FIELDS, "batch": 9}]},
            "second": {"problems": [{**FIELDS, "mask": "full"}]},
            "third": {"problems": [{**FIELDS, "batch": [8, 9]}]},
        },
    }
    named_problems = shapes_file.parse(document, "f.yaml")
    assert [(named.problem.batch, named.groups) for named in named_problems] == [
        (2, ("first", "second")),
        (9, ("first", "third")),
        (8, ("third",)),
    ]


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        (None, "f.yaml must hold version and groups, but it is empty"),
        ([], r"f.yaml must be a mapping of names to values, got \[\]"),
        ("text", "f.yaml must be a mapping"),
        ({}, "must say version: 1, all that this autoattn reads, got nothing"),
        ({"version": 2}, "must say version: 1, .* got 2"),
        ({"version": True}, "must say version: 1, .* got True"),
        ({"version": "1"}, "must say version: 1, .* got '1'"),
        ({"version": 1, "group": {}}, "unknown key 'group'; did you mean groups?"),
        ({"version": 1, 7: {}}, "unknown key 7"),
        ({"version": 1}, "groups must be a mapping of names to values, got nothing"),
        ({"version": 1, "groups": {}}, "groups must name at least one group, got none"),
        ({"version": 1, "groups": [FIELDS]}, "groups must be a mapping"),
        ({"version": 1, "groups": {"a": None}}, "group 'a' must be a mapping of names to values, got nothing"),
        ({"version": 1, "groups": {"a": {}}}, "group 'a' must list at least one problem, got nothing"),
        ({"version": 1, "groups": {"a": {"problems": []}}}, r"group 'a' must list at least one problem, got \[\]"),
        ({"version": 1, "groups": {"a": {"problems": FIELDS}}}, "group 'a' must list at least one problem"),
        ({"version": 1, "groups": {"a": {"problem": [FIELDS]}}}, "unknown key 'problem'; did you mean problems?"),
        ({"version": 1, "groups": {3: {"problems": [FIELDS]}}}, "group 3 must have a text for its name"),
        ({"version": 1, "groups": {"": {"problems": [FIELDS]}}}, "group '' must have a text for its name"),
        ({"version": 1, "groups": {"a": {"description": 1, "problems": [FIELDS]}}}, "description must be text, got 1"),
    ],
)
def test_a_wrong_file_is_refused(document: object, fault: str) -> None:
    assert re.search(fault, refusal(document))


def test_published_tables_are_not_read() -> None:
    for published in (None, 1, {"tables": {"a": {"rows": [[1, 2], "anything"]}}}):
        assert len(problems_of(FIELDS, published=published)) == 1


@pytest.mark.parametrize("key", ["batch", "seq", "mask", "causal", "dtype", "layout", "x" * 100_000])
def test_long_values_are_cut_in_messages(key: str) -> None:
    assert len(refusal(file_of({**FIELDS, key: "x" * 100_000}))) < 400
    assert len(refusal({"version": 1, "groups": {"g" * 100_000: None}})) < 350


# Files


def test_load_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(file_of(FIELDS)))
    assert [named.groups for named in shapes_file.load(path)] == [("one",)]
    for content in ("", "version: 1\nversion: 1\n", "a: [", "version: 2\n"):
        path.write_text(content)
        with pytest.raises(ShapesError, match=re.escape(str(path))):
            shapes_file.load(path)
    with pytest.raises(ShapesError, match="there is none"):
        shapes_file.load(tmp_path / "none.yaml")


def test_a_problem_may_lie_on_a_cache() -> None:
    assert the_problem().cache is None
    assert the_problem(cache="paged:16").cache == KeyCache(page=16)
    assert the_problem(cache="contiguous,rows,splits=2").cache == KeyCache(rows=True, splits=2)
    with pytest.raises(ShapesError, match="cache must be contiguous or paged:KEYS"):
        the_problem(cache="paged:0")


def test_sequences_in_a_cache_may_be_of_unequal_lengths() -> None:
    uneven = the_problem(cache="paged:16", lengths="90,uniform:10-40")
    assert uneven.key_lengths == KeyLengths(first=(90,), least=10, most=40)
    for words, message in (
        ({"cache": "paged:16", "lengths": 7}, "lengths must be uniform"),
        ({"lengths": "uniform:1-2"}, "no cache"),
    ):
        with pytest.raises(ShapesError, match=message):
            the_problem(**words)
