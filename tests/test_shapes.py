"""Shapes files: the format, what it refuses, and the files that come with the project."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoattn import resources, shapes
from autoattn.errors import ShapesError
from autoattn.problem import DType, Layout, Mask, Precision, Problem

CHECKOUT = Path(__file__).parent.parent
SEEDS = sorted((CHECKOUT / "benchmarks/shapes").glob("*.yaml"))

ONE: dict[str, Any] = {"dtype": "bfloat16", "batch": 2, "heads": 4, "seq": 128, "head_dim": 64}


def file_of(*problems: object, **top: object) -> dict[str, Any]:
    return {"version": 1, "groups": {"one": {"problems": list(problems)}}, **top}


def problems_of(*problems: object, **top: object) -> list[Problem]:
    return [named.problem for named in shapes.parse(file_of(*problems, **top), "f.yaml")]


def the_problem(**changes: object) -> Problem:
    """The single problem that ONE with changes stands for; None removes a key."""
    values = {key: value for key, value in {**ONE, **changes}.items() if value is not None}
    (problem,) = problems_of(values)
    return problem


def refusal(document: object) -> str:
    with pytest.raises(ShapesError) as caught:
        shapes.parse(document, "f.yaml")
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
    ],
)
def test_dtype_carries_the_precision(text: str, dtype: DType, precision: Precision) -> None:
    assert (the_problem(dtype=text).dtype, the_problem(dtype=text).precision) == (dtype, precision)


def test_lengths_have_three_spellings() -> None:
    assert the_problem(seq="64x256") == the_problem(seq=None, seq_q=64, seq_kv=256)
    assert the_problem(seq="64x64") == the_problem(seq=64)


def test_masks_have_two_spellings() -> None:
    assert the_problem(seq="64x256", causal=True) == the_problem(seq="64x256", mask="causal:bottom-right")
    assert the_problem(causal=False) == the_problem(mask="full") == the_problem()


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
        ({"layout": "bsd"}, "layout must be bhsd or bshd, got 'bsd'"),
        ({"layout": []}, "layout must be a value or a list"),
        ({"layout": {}}, "layout must be bhsd or bshd, got {}"),
        ({"heads_kv": 3}, "heads_q must be a multiple of heads_kv, got 4 and 3"),
        ({"head_dim": 257}, "head_dim must be at most 256, got 257"),
        ({"head_dims": 64}, "unknown key 'head_dims'; did you mean head_dim?"),
        ({"zzz": 64}, "unknown key 'zzz'; known are batch, causal,"),
        ({"precision": "tf32"}, "unknown key 'precision'; write the precision behind the dtype"),
    ],
)
def test_a_wrong_problem_is_refused_at_its_place(changes: dict[str, object], fault: str) -> None:
    wrong = {key: value for key, value in {**ONE, **changes}.items() if value is not None}
    message = refusal(file_of(ONE, wrong))
    assert message.startswith("f.yaml: group 'one', problem 2")
    assert re.search(fault, message), message


@pytest.mark.parametrize("problem", [None, 1, "x", [ONE]])
def test_a_problem_is_a_mapping(problem: object) -> None:
    assert "problem 1 must be a mapping" in refusal(file_of(problem))


def test_a_null_value_is_not_an_absent_one() -> None:
    assert "heads_kv must be a whole number from 1 to 2147483647, got nothing" in refusal(
        file_of({**ONE, "heads_kv": None})
    )


# Grids and defaults


def test_lists_are_grids_and_the_last_key_changes_fastest() -> None:
    grid = problems_of({**ONE, "batch": [2, 1], "seq": [128, "64x256"], "mask": ["full", "causal"]})
    assert [(p.batch, p.seq_q, p.mask.causal) for p in grid] == [
        (batch, seq, causal) for batch in (2, 1) for seq in (128, 64) for causal in (False, True)
    ]


def test_the_lists_of_defaults_are_the_outer_loops() -> None:
    own = {key: value for key, value in ONE.items() if key not in ("dtype", "batch")}
    grid = problems_of({**own, "head_dim": [32, 64]}, defaults={"dtype": ["fp16", "bf16"], "batch": 1})
    assert [(p.dtype, p.head_dim) for p in grid] == [
        (dtype, head_dim) for dtype in (DType.FLOAT16, DType.BFLOAT16) for head_dim in (32, 64)
    ]


def test_the_nearest_value_counts() -> None:
    document = {
        "version": 1,
        "defaults": {**ONE, "batch": 1, "heads": 1, "head_dim": 16},
        "groups": {"one": {"defaults": {"heads": 2, "head_dim": 32}, "problems": [{"head_dim": 64}, {}]}},
    }
    found = [named.problem for named in shapes.parse(document, "f.yaml")]
    assert [(p.batch, p.heads_q, p.head_dim) for p in found] == [(1, 2, 64), (1, 2, 32)]


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
    values = {key: value for key, value in ONE.items() if key != "seq"}
    document = file_of({**values, "seq": 64, **above}, defaults=below)
    if "seq_q" in above:
        document = file_of({**values, **above}, defaults=below)
    (found,) = shapes.parse(document, "f.yaml")
    assert found.problem == the_problem(**{"seq": 64, **expected})


def test_a_spelling_that_gave_way_does_not_come_back() -> None:
    document = file_of({"seq_q": 1})
    document["defaults"] = {key: value for key, value in ONE.items() if key != "seq"} | {"seq_q": 2, "seq_kv": 3}
    document["groups"]["one"]["defaults"] = {"seq": 64}
    assert "must say seq_kv" in refusal(document)  # the file's seq_kv went when the group said seq


def test_wrong_defaults_are_refused_at_their_place() -> None:
    assert refusal(file_of(ONE, defaults={"batch": 0})).startswith("f.yaml: defaults: batch must be")
    document = file_of(ONE)
    document["groups"]["one"]["defaults"] = {"seq": 1, "seq_q": 1}
    assert refusal(document).startswith("f.yaml: group 'one': defaults gives seq and seq_q")
    document["groups"]["one"]["defaults"] = [1]
    assert "defaults must be a mapping" in refusal(document)


def test_a_grid_above_ten_thousand_is_refused_before_it_unfolds() -> None:
    numbers = list(range(1, 101))
    assert len(problems_of({**ONE, "batch": numbers, "seq": numbers})) == 10_000
    message = refusal(file_of(ONE, {**ONE, "batch": numbers, "seq": numbers}))
    assert message == "f.yaml: group 'one', problem 2 takes the file above 10000 problems; shorten its lists"
    huge = list(range(1, 1000))
    refusal(file_of({key: "bf16" if key == "dtype" else huge for key in ONE}))  # 10^12 of them, at once


# Groups


def test_a_problem_listed_twice_is_one_with_all_its_groups() -> None:
    document = {
        "version": 1,
        "groups": {
            "first": {"problems": [ONE, ONE, {**ONE, "batch": 9}]},
            "second": {"problems": [{**ONE, "mask": "full"}]},
            "third": {"problems": [{**ONE, "batch": [8, 9]}]},
        },
    }
    found = shapes.parse(document, "f.yaml")
    assert [(named.problem.batch, named.groups) for named in found] == [
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
        ({"version": 1, "groups": [ONE]}, "groups must be a mapping"),
        ({"version": 1, "groups": {"a": None}}, "group 'a' must be a mapping of names to values, got nothing"),
        ({"version": 1, "groups": {"a": {}}}, "group 'a' must list at least one problem, got nothing"),
        ({"version": 1, "groups": {"a": {"problems": []}}}, r"group 'a' must list at least one problem, got \[\]"),
        ({"version": 1, "groups": {"a": {"problems": ONE}}}, "group 'a' must list at least one problem"),
        ({"version": 1, "groups": {"a": {"problem": [ONE]}}}, "unknown key 'problem'; did you mean problems?"),
        ({"version": 1, "groups": {3: {"problems": [ONE]}}}, "group 3 must have a text for its name"),
        ({"version": 1, "groups": {"": {"problems": [ONE]}}}, "group '' must have a text for its name"),
        ({"version": 1, "groups": {"a": {"description": 1, "problems": [ONE]}}}, "description must be text, got 1"),
    ],
)
def test_a_wrong_file_is_refused(document: object, fault: str) -> None:
    assert re.search(fault, refusal(document))


def test_published_tables_are_not_read() -> None:
    for published in (None, 1, {"tables": {"a": {"rows": [[1, 2], "anything"]}}}):
        assert len(problems_of(ONE, published=published)) == 1


@pytest.mark.parametrize("key", ["batch", "seq", "mask", "causal", "dtype", "layout", "x" * 100_000])
def test_long_values_are_cut_in_messages(key: str) -> None:
    assert len(refusal(file_of({**ONE, key: "x" * 100_000}))) < 350
    assert len(refusal({"version": 1, "groups": {"g" * 100_000: None}})) < 350


# Files


def test_load_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(file_of(ONE)))
    assert [named.groups for named in shapes.load(path)] == [("one",)]
    for content in ("", "version: 1\nversion: 1\n", "a: [", "version: 2\n"):
        path.write_text(content)
        with pytest.raises(ShapesError, match=re.escape(str(path))):
            shapes.load(path)
    with pytest.raises(ShapesError, match="there is none"):
        shapes.load(tmp_path / "none.yaml")


def in_group(group: str) -> list[Problem]:
    return [named.problem for named in shapes.load(resources.shapes_path()) if group in named.groups]


def test_the_root_file_holds_the_promise() -> None:
    found = shapes.load(resources.shapes_path())
    assert Counter(named.groups for named in found) == {("seed-003",): 12, ("seed-001",): 81, ("seed-000",): 2}


def test_seed_003_is_flash_attention_on_an_a100() -> None:
    facts = {(p.batch, p.seq_q, p.seq_kv, p.heads_kv, str(p.mask)) for p in in_group("seed-003")}
    assert facts == {
        (*sizes, heads_kv, mask)
        for sizes in ((16, 1024, 1024), (4, 1024, 4096), (1, 4096, 4096))
        for heads_kv in (32, 8)
        for mask in ("full", "causal:bottom-right")
    }
    assert {(p.dtype, p.heads_q, p.head_dim, p.layout) for p in in_group("seed-003")} == {
        (DType.BFLOAT16, 32, 128, Layout.BHSD)
    }


def test_seed_001_is_one_causal_head() -> None:
    facts = {(p.dtype, p.precision, p.head_dim, p.seq_q) for p in in_group("seed-001")}
    assert facts == {
        (*kind, head_dim, 2**power)
        for kind in (
            (DType.BFLOAT16, Precision.IEEE),
            (DType.FLOAT32, Precision.TF32),
            (DType.FLOAT32, Precision.IEEE),
        )
        for head_dim in (16, 32, 64)
        for power in range(7, 16)
    }
    assert {(p.batch, p.heads_q, p.heads_kv, p.seq_q == p.seq_kv, p.mask.causal) for p in in_group("seed-001")} == {
        (1, 1, 1, True, True)
    }


def test_seed_000_is_one_long_packed_sequence() -> None:
    full, causal = in_group("seed-000")
    assert (full.batch, full.seq_q, full.heads_q, full.head_dim, full.layout) == (1, 65536, 128, 56, Layout.BSHD)
    assert not full.mask.causal
    assert causal.mask.causal
    assert full.bytes() == 4 * 896 * 1024**2  # four tensors of 896 MiB, as the table says


# Table -> rows, and one cell that was looked up by hand: (row, column, value).
PUBLISHED: dict[str, dict[str, tuple[int, tuple[int, str, object]]]] = {
    "seed_000": {
        "device": (1, (0, "l2", 24576)),
        "run_mha_varlen_fwd": (18, (13, "cold_gpu_ms", 12.830983)),
    },
    "seed_001": {
        "model_forward": (3, (2, "avg_forward", 0.0859365)),
        "model_forward_backward": (2, (1, "avg_backward", 0.0964797)),
        "benchmark_attn": (20, (14, "forward", "OOM")),
        "flash_attention": (54, (47, "backward_triton", 11.235)),
    },
    "seed_002": {"implementations": (56, (39, "memory", 349.04))},
    "seed_003": {"not_causal": (6, (5, "no_softmax_tflops", 223.02)), "both_masks": (12, (2, "tflops", 98.10))},
    "seed_004": {
        "models_macbook_air": (12, (11, "both", 4.24511)),
        "models_rtx_pro_6000": (5, (4, "backward", 0.160571)),
        "models_rtx_pro_6000_no_warmup": (5, (0, "backward", -0.00274821)),
        "models_rtx_pro_6000_one_warmup": (5, (1, "forward_std", 0.0310978)),
        "models_rtx_pro_6000_bfloat16": (5, (4, "forward", 0.0485177)),
        "models_rtx_pro_6000_compiled": (5, (1, "backward", 0.00021299)),
        "models_rtx_pro_6000_bfloat16_compiled": (5, (0, "both", 0.0144243)),
        "attention_m4": (4, (3, "both_std", 1.9964e-05)),
        "attention_m4_compiled": (4, (2, "backward", 0.00747273)),
        "attention_rtx_pro_6000": (20, (19, "memory_backward", 3838.97)),
        "attention_rtx_pro_6000_compiled": (20, (9, "forward_std", 2.30392e-05)),
        "attention_rtx_pro_6000_compiled_bfloat16": (20, (16, "forward", 0.00596216)),
        "accumulation": (4, (1, "result", 9.9531)),
    },
}


@pytest.mark.parametrize("path", SEEDS, ids=lambda path: path.stem)
def test_published_tables_are_whole(path: Path) -> None:
    document: Any = resources.read_yaml(path)
    tables = document["published"]["tables"]
    assert set(tables) == set(PUBLISHED[path.stem])
    for name, (count, (row, column, value)) in PUBLISHED[path.stem].items():
        columns, rows = list(tables[name]["columns"]), tables[name]["rows"]
        assert len(rows) == count
        assert {len(cells) for cells in rows} == {len(columns)}
        assert rows[row][columns.index(column)] == value


def test_there_is_a_file_for_every_seed() -> None:
    assert {path.stem for path in SEEDS} == set(PUBLISHED)


@pytest.mark.parametrize("path", SEEDS, ids=lambda path: path.stem)
def test_the_promise_is_part_of_the_seeds_own_file(path: Path) -> None:
    listed = {named.problem for named in shapes.load(path)}
    assert listed
    assert set(in_group(path.stem.replace("_", "-"))) <= listed


def test_published_times_and_operations_agree_with_the_problems() -> None:
    """Seed 003's rates follow from its times and our count of operations, but for its causal convention."""
    document: Any = resources.read_yaml(CHECKOUT / "benchmarks/shapes/seed_003.yaml")
    for causal, batch, seq_q, seq_kv, heads_kv, tflops, time in document["published"]["tables"]["both_masks"]["rows"]:
        full = the_problem(batch=batch, heads=32, heads_kv=heads_kv, seq=f"{seq_q}x{seq_kv}", head_dim=128)
        assert full.flops() / (2 if causal else 1) / time / 1e9 == pytest.approx(tflops, rel=0.002)


# Documentation


def test_the_examples_of_the_documentation_load() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (CHECKOUT / "docs/shapes.md").read_text(), flags=re.DOTALL)
    counts = [len(shapes.parse(yaml.safe_load(block), "docs/shapes.md")) for block in blocks]
    assert counts == [1, 12, 1]


def test_the_error_of_the_documentation_is_the_real_one() -> None:
    document = {"version": 1, "groups": {"my-model": {"problems": [{**ONE, "heads": 32, "heads_kv": 5}]}}}
    with pytest.raises(ShapesError) as caught:
        shapes.parse(document, "my-shapes.yaml")
    assert str(caught.value) in (CHECKOUT / "docs/shapes.md").read_text()
