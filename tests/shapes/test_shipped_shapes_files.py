"""The shapes files that come with the project: the promise, the published tables, and the documentation's examples."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout_paths import CHECKOUT

from autoattn.codegen import resources
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Layout, Op, Precision, Problem
from autoattn.errors import ShapesError
from autoattn.shapes import shapes_file

OTHERS = (
    "changed_scores",
    "decode",
    "drawn_shared_keys",
    "float32",
    "h200_backward",
    "h200_dense",
    "h200_dense_online",
    "head_dims",
    "hopper",
    "modifiers",
    "packed",
    "repeated",
    "score_mods",
    "shared_keys",
    "sparse",
    "speed",
    "training",
    "variants",
)


def in_group(group: str) -> list[Problem]:
    return [named.problem for named in shapes_file.load(CHECKOUT / "shapes.yaml") if group in named.groups]


def test_the_root_file_holds_the_promise() -> None:
    named_problems = shapes_file.load(CHECKOUT / "shapes.yaml")
    assert Counter(named.groups for named in named_problems) == {
        ("flash2-a100",): 12,
        ("passes",): 81,
        ("varlen-a30",): 2,
    }


def test_flash2_a100_is_flash_attention_on_an_a100() -> None:
    facts = {(p.batch, p.seq_q, p.seq_kv, p.heads_kv, str(p.mask)) for p in in_group("flash2-a100")}
    assert facts == {
        (*sizes, heads_kv, mask)
        for sizes in ((16, 1024, 1024), (4, 1024, 4096), (1, 4096, 4096))
        for heads_kv in (32, 8)
        for mask in ("full", "causal:bottom-right")
    }
    assert {(p.dtype, p.heads_q, p.head_dim, p.layout) for p in in_group("flash2-a100")} == {
        (DType.BFLOAT16, 32, 128, Layout.BHSD)
    }


def test_passes_is_one_causal_head() -> None:
    facts = {(p.dtype, p.precision, p.head_dim, p.seq_q) for p in in_group("passes")}
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
    assert {(p.batch, p.heads_q, p.heads_kv, p.seq_q == p.seq_kv, p.mask.causal) for p in in_group("passes")} == {
        (1, 1, 1, True, True)
    }


def test_varlen_a30_is_one_long_packed_sequence() -> None:
    full, causal = in_group("varlen-a30")
    assert (full.batch, full.seq_q, full.heads_q, full.head_dim, full.layout) == (1, 65536, 128, 56, Layout.BSHD)
    assert not full.mask.causal
    assert causal.mask.causal
    assert full.bytes() == 4 * 896 * 1024**2  # four tensors of 896 MiB, as the table says


def test_every_row_of_varlen_a30_is_a_problem_of_its_file() -> None:
    """Causal overrides the right window, which leaves 12 of 18 rows; each is there as bshd and as packed sequences."""
    path = CHECKOUT / "benchmarks/shapes/varlen_a30.yaml"
    document: Any = resources.read_yaml(path)
    table = document["published"]["tables"]["run_mha_varlen_fwd"]
    place = list(table["columns"]).index
    published = {
        (row[0], row[1], row[2], row[4], Mask.window(row[5], row[6], causal=bool(row[place("causal")])))
        for row in table["rows"]
    }
    assert len(published) == 12
    for group in ("varlen-a30", "varlen-a30-packed"):
        listed = [named.problem for named in shapes_file.load(path) if group in named.groups]
        assert {(p.batch, p.seq_q, p.heads_q, p.head_dim, p.mask) for p in listed} == published
        assert {p.packed for p in listed} == {group == "varlen-a30-packed"}


def test_the_other_files_hold_what_their_names_say() -> None:
    problems = {
        name: [named.problem for named in shapes_file.load(CHECKOUT / f"benchmarks/shapes/{name}.yaml")]
        for name in OTHERS
    }
    assert {problem.mask.density for problem in problems["sparse"]} == {0.0, 0.5, 7 / 64}
    assert {problem.head_dim for problem in problems["sparse"] if problem.op is Op.FORWARD} == {80, 96, 128, 192}
    assert {problem.head_dim for problem in problems["sparse"] if problem.op is Op.BACKWARD} == {64, 80, 128, 256}
    assert {problem.packed for problem in problems["packed"]} == {True, False}
    assert all(problem.modifiers.score_mod for problem in problems["score_mods"])
    assert all(
        problem.heads_q > problem.heads_kv and problem not in problems["training"]
        for problem in problems["shared_keys"]
    )
    drawn, tuned = problems["drawn_shared_keys"], {*problems["training"], *problems["shared_keys"]}
    assert (len(drawn), all(problem.heads_q > problem.heads_kv and problem not in tuned for problem in drawn)) == (
        24,
        True,
    )
    assert {(problem.head_dim, problem.head_dim_v) for problem in problems["head_dims"]} == {
        (80, 80),
        (96, 96),
        (192, 128),
        (64, 512),
    }
    assert {problem.precision for problem in problems["float32"]} == set(Precision)
    assert {problem.dtype for problem in problems["hopper"]} == {DType.BFLOAT16, DType.FLOAT8}
    assert {str(problem.mask) for problem in problems["hopper"]} == {
        "window:128,0",
        "window:1024,0",
        "full",
        "causal:bottom-right",
    }
    assert {problem.seq_kv for problem in problems["hopper"] if problem.seq_q == 1} == {8192, 131072}
    alone = [problem.modifiers.names for problem in problems["modifiers"] if problem.dtype is DType.BFLOAT16]
    assert {len(names) for names in alone} == {0, 1}
    assert len(alone) == len(set(alone)) == 9


def test_the_dense_problems_of_the_h200_are_the_26_that_its_peers_were_timed_on() -> None:
    problems = [named.problem for named in shapes_file.load(CHECKOUT / "benchmarks/shapes/h200_dense.yaml")]
    facts = {(p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_kv, p.head_dim, str(p.mask)) for p in problems}
    training = [
        (batch, heads, heads, seq, seq, head_dim)
        for heads, head_dim in ((16, 128), (32, 64))
        for batch, seq in ((16, 1024), (4, 4096), (1, 16384))
    ] + [(4, 8, 8, 4096, 4096, 256)]
    flash2_a100 = [
        (batch, 32, heads_kv, seq_q, seq_kv, 128)
        for batch, seq_q, seq_kv in ((16, 1024, 1024), (4, 1024, 4096), (1, 4096, 4096))
        for heads_kv in (32, 8)
    ]
    assert facts == {(*sizes, mask) for sizes in training + flash2_a100 for mask in ("full", "causal:bottom-right")}
    assert len(problems) == 26
    assert {p.dtype for p in problems} == {DType.BFLOAT16}


def test_the_backward_problems_of_the_h200_are_its_18_with_float32_and_deterministic_ones() -> None:
    path = CHECKOUT / "benchmarks/shapes/h200_backward.yaml"
    groups = {group: [named.problem for named in shapes_file.load(path) if group in named.groups]
             for group in ("training", "float32", "deterministic")}  # fmt: skip
    facts = {(p.batch, p.heads_q, p.seq_q, p.head_dim, str(p.mask)) for p in groups["training"]}
    assert facts == {
        (batch, heads, seq, head_dim, mask)
        for heads, head_dim in ((16, 128), (32, 64), (8, 256))
        for batch, seq in ((16, 1024), (4, 4096), (1, 16384))
        for mask in ("full", "causal:bottom-right")
    }
    assert {(p.op, p.dtype, p.deterministic) for p in groups["training"]} == {(Op.BACKWARD, DType.BFLOAT16, False)}
    facts = {(p.dtype, p.precision, p.batch, p.heads_q, p.mask.causal, p.op) for p in groups["float32"]}
    assert facts == {(DType.FLOAT32, Precision.TF32, 1, 16, True, Op.BACKWARD)}
    assert sorted((p.seq_q, p.head_dim) for p in groups["float32"]) == [
        (4096, 64),
        (4096, 128),
        (16384, 64),
        (16384, 128),
    ]
    assert [len(problems) for problems in groups.values()] == [18, 4, 4]
    assert {replace(p, deterministic=False) for p in groups["deterministic"]} < set(groups["training"])
    assert all(p.deterministic for p in groups["deterministic"])


# Table -> rows, and one cell that was looked up by hand: (row, column, value).
PUBLISHED: dict[str, dict[str, tuple[int, tuple[int, str, object]]]] = {
    "varlen_a30": {
        "device": (1, (0, "l2", 24576)),
        "run_mha_varlen_fwd": (18, (13, "cold_gpu_ms", 12.830983)),
    },
    "passes": {
        "model_forward": (3, (2, "avg_forward", 0.0859365)),
        "model_forward_backward": (2, (1, "avg_backward", 0.0964797)),
        "benchmark_attn": (20, (14, "forward", "OOM")),
        "flash_attention": (54, (47, "backward_triton", 11.235)),
    },
    "sparse_patterns": {"implementations": (56, (39, "memory", 349.04))},
    "flash2_a100": {"not_causal": (6, (5, "no_softmax_tflops", 223.02)), "both_masks": (12, (2, "tflops", 98.10))},
    "language_models": {
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
FILES = [CHECKOUT / f"benchmarks/shapes/{name}.yaml" for name in PUBLISHED]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_published_tables_are_whole(path: Path) -> None:
    document: Any = resources.read_yaml(path)
    tables = document["published"]["tables"]
    assert set(tables) == set(PUBLISHED[path.stem])
    for name, (count, (row, column, value)) in PUBLISHED[path.stem].items():
        columns, rows = list(tables[name]["columns"]), tables[name]["rows"]
        assert len(rows) == count
        assert {len(cells) for cells in rows} == {len(columns)}
        assert rows[row][columns.index(column)] == value


def test_every_file_is_known_here() -> None:
    assert {path.stem for path in (CHECKOUT / "benchmarks/shapes").iterdir()} == {*PUBLISHED, *OTHERS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_shapes_yaml_promises_is_part_of_the_tables_own_file(path: Path) -> None:
    listed = {named.problem for named in shapes_file.load(path)}
    assert listed
    assert set(in_group(path.stem.replace("_", "-"))) <= listed


def test_published_times_and_operations_agree_with_the_problems() -> None:
    """The A100 table's rates follow from its times and our count of operations, but for its causal convention."""
    document: Any = resources.read_yaml(CHECKOUT / "benchmarks/shapes/flash2_a100.yaml")
    for causal, batch, seq_q, seq_kv, heads_kv, tflops, time in document["published"]["tables"]["both_masks"]["rows"]:
        full = Problem(
            dtype=DType.BFLOAT16, batch=batch, heads_q=32, heads_kv=heads_kv, seq_q=seq_q, seq_kv=seq_kv, head_dim=128
        )
        assert full.flops() / (2 if causal else 1) / time / 1e9 == pytest.approx(tflops, rel=0.002)


# Documentation


def test_the_examples_of_the_documentation_load() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (CHECKOUT / "docs/shapes.md").read_text(), flags=re.DOTALL)
    counts = [len(shapes_file.parse(yaml.safe_load(block), "docs/shapes.md")) for block in blocks]
    assert counts == [1, 3, 12, 1]


def test_the_error_of_the_documentation_is_the_real_one() -> None:
    wrong = {"dtype": "bfloat16", "batch": 4, "heads": 32, "heads_kv": 5, "seq": 2048, "head_dim": 128}
    document = {"version": 1, "groups": {"my-model": {"problems": [wrong]}}}
    with pytest.raises(ShapesError) as caught:
        shapes_file.parse(document, "my-shapes.yaml")
    assert str(caught.value) in (CHECKOUT / "docs/shapes.md").read_text()
