"""Times that others published: where they hold, and that they are those of the table that they are from."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from checkout_paths import BENCHMARKS

from autoattn.codegen import resources
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Layout, Problem
from autoattn.cost_model import published_times

TABLE = BENCHMARKS / "shapes/varlen_a30.yaml"
PROBLEM = Problem(
    dtype=DType.BFLOAT16, batch=1, heads_q=128, heads_kv=128, seq_q=65536, seq_kv=65536, head_dim=56,
    mask=Mask.parse("window:128,0"), layout=Layout.BSHD,
)  # fmt: skip


def test_the_times_are_the_means_of_the_rows_of_the_table() -> None:
    document: Any = resources.read_yaml(TABLE)
    table = document["published"]["tables"]["run_mha_varlen_fwd"]
    columns, times = list(table["columns"]), defaultdict(list)
    for cells in table["rows"]:
        row = dict(zip(columns, cells, strict=True))
        mask = Mask.window(row["window_left"], row["window_right"], causal=bool(row["causal"]))
        times[mask].append(row["cold_gpu_ms"])
    for words, ms in published_times.A30_MS.items():
        rows = times.pop(Mask.parse(words))
        assert ms == pytest.approx(sum(rows) / len(rows), abs=6e-4)
    assert not times


def test_a_time_holds_for_the_same_call_on_the_same_card_alone() -> None:
    published = published_times.time_of(PROBLEM, "a30")
    assert published is not None
    assert published.time_us == 12835.0
    assert published_times.time_of(PROBLEM, "a100") is None
    for change in (
        {"heads_kv": 64}, {"seq_kv": 4096}, {"head_dim": 64, "head_dim_v": 64}, {"dtype": DType.FLOAT32},
        {"layout": Layout.BHSD}, {"modifiers": Modifiers(softcap=True)}, {"mask": Mask.parse("window:64,0")},
    ):  # fmt: skip
        assert published_times.time_of(replace(PROBLEM, **change), "a30") is None
