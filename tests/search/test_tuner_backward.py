"""Problems whose operation is backward go through the same tuner, to a file of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fake_pool
import gradient_kernels
import pytest
import samples
import typer.testing
from fake_workshop import SMALL, FakeWorkshop, run

from autoattn.cache import file_format, store
from autoattn.cli import app
from autoattn.codegen import search_space
from autoattn.core import kernel_kind, triton_release
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Op, Problem
from autoattn.core.variant import Variant
from autoattn.errors import ShapesError
from autoattn.report import figures
from autoattn.runtime.plan import cache_lookup
from autoattn.search import tuner
from autoattn.search.gpu_jobs import kind_of
from autoattn.search.trial_pipeline import Workshop
from autoattn.shapes import shapes_file
from autoattn.workers.worker_pool import Failure

BACKWARD = replace(SMALL, op=Op.BACKWARD)


class Both(FakeWorkshop):
    """A workshop for both operations."""

    def time_us(self, variant: Variant) -> float:
        return float(sum(int(value) for name, value in variant.params if "BLOCK" in name))


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> type[Both]:
    fresh = type("Fresh", (Both,), {"finals": [], "budgets": []})
    monkeypatch.setattr(tuner, "Workshop", fresh)
    return fresh


def test_each_operation_has_a_file_of_its_own(workshop: type[Both], tmp_path: Path) -> None:
    summary = run(tmp_path, SMALL, BACKWARD, measured=True)
    assert not summary.failed
    folder = tmp_path / samples.H200.name
    release = triton_release.installed_release()
    assert summary.written == tuple(folder / file_format.name_of(op, release) for op in (Op.BACKWARD, Op.FORWARD))
    for problem in (SMALL, BACKWARD):
        path = store.path_of(tmp_path, samples.H200, problem.op)
        assert list(store.read(path).entries) == [problem.key]
        assert store.read(path).entries[problem.key].template.endswith(f"/{problem.op.value}")
    again = run(tmp_path, SMALL, BACKWARD, measured=True)
    assert again.kept == 2


def test_a_tuned_backward_problem_is_explained_by_its_entry(workshop: type[Both], tmp_path: Path) -> None:
    entry = run(tmp_path, BACKWARD, measured=True).entries[BACKWARD.key]
    explanation = cache_lookup.explain(BACKWARD, samples.H200, tmp_path)
    assert (explanation.level, explanation.variant) == (cache_lookup.Level.EXACT, entry.variant)
    assert cache_lookup.explain(SMALL, samples.H200, tmp_path).level is not cache_lookup.Level.EXACT


def test_without_the_card_it_says_that_nothing_predicts_gradients(workshop: type[Both], tmp_path: Path) -> None:
    reason = run(tmp_path, BACKWARD).failed[BACKWARD.key]
    assert reason == ("it must be tuned on the card: the model knows forward kernels alone, and these are of backward")


def test_forward_problems_keep_their_names_and_backward_ones_have_others() -> None:
    assert SMALL.key.startswith("forward_float16_d16_")
    assert BACKWARD.key == SMALL.key.replace("forward", "backward", 1)
    assert str(BACKWARD) == f"backward {SMALL}"
    assert not kernel_kind.shares_kernels(SMALL, BACKWARD)
    assert BACKWARD.flops() == 5 * SMALL.flops() // 2
    other = replace(BACKWARD, head_dim_v=32)
    assert other.flops() * (16 + 32) == replace(other, op=Op.FORWARD).flops() * (3 * 16 + 2 * 32)
    # query, key and value with heads 2, 1 and 1 of 64 tokens and 16 elements, each with a gradient; output and its
    # gradient; the LSE
    assert BACKWARD.bytes() == 2 * 2 * 64 * 16 * (2 + 1 + 1) + 2 * 2 * 64 * 16 * 2 + 4 * 2 * 64


def test_a_shapes_file_names_the_operation() -> None:
    line = {"dtype": "bf16", "batch": 1, "heads": 2, "seq": 64, "head_dim": 16, "operation": ["forward", "backward"]}
    document = {"version": 1, "groups": {"one": {"problems": [line]}}}
    assert [named.problem.op for named in shapes_file.parse(document, "here")] == [Op.FORWARD, Op.BACKWARD]
    line["operation"] = "decode"
    with pytest.raises(ShapesError, match="operation must be forward or backward, got 'decode'"):
        shapes_file.parse(document, "here")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 80, "head_dim_v": 40},
        {"dtype": DType.BFLOAT16, "head_dim": 57},
        {"mask": Mask.blocks(128, 16, 0.25, "q_idx > kv_idx")},
    ],
    ids=str,
)
def test_a_structure_is_rehearsed_with_the_smallest_numbers(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pool.set_pool(monkeypatch)
    problem: Problem = replace(BACKWARD, **changes)  # type: ignore[arg-type]
    with Workshop(samples.H200, measured=False, jobs=1) as shop:
        verdict = shop.check(
            problem, gradient_kernels.variant(QUERIES_BLOCK_M=128, keys_num_warps=8, products="as_asked")
        )
    assert not isinstance(verdict, Failure)
    (job,) = fake_pool.benched(shop)
    assert job.problem == kind_of(job.problem)
    assert job.problem.op is Op.BACKWARD
    assert (job.problem.mask.block_q, job.problem.mask.block_kv) == ((32, 16) if problem.mask.sparse else (0, 0))
    assert (job.source.variant["QUERIES_BLOCK_M"], job.source.variant["keys_num_warps"]) == (16, 1)
    assert (job.problem.head_dim == job.problem.head_dim_v) == (problem.head_dim == problem.head_dim_v)


def test_a_tile_is_told_for_each_kernel() -> None:
    variant = gradient_kernels.variant(QUERIES_BLOCK_M=128, QUERIES_BLOCK_N=64, keys_num_warps=4)
    assert figures.tile_of(variant) == "queries 128x64 1w 1s, keys 16x16 4w 1s"
    one_walk = Variant.of("gluon/backward", {"BLOCK_M": 64, "num_stages": 2, "summing": "tma"})
    assert figures.tile_of(one_walk) == "64 queries a step 2s"


def test_what_times_outputs_alone_refuses_gradients(tmp_path: Path) -> None:
    path = tmp_path / "shapes.yaml"
    path.write_text(
        "version: 1\ngroups: {one: {problems: [{dtype: fp16, batch: 1, heads: 1, seq: 64, head_dim: 16, "
        "operation: backward}]}}\n"
    )
    words = ["ablate", str(path), "--out", str(tmp_path / "out"), "--device", "h200"]
    result = typer.testing.CliRunner().invoke(app.app, words)
    assert "ablate times outputs alone, got backward fp16" in str(result.exception)


def test_gradients_that_nobody_measured_have_a_default(tmp_path: Path) -> None:
    explanation = cache_lookup.explain(BACKWARD, samples.H200, tmp_path)
    assert (explanation.route, explanation.level) == ("kernel", cache_lookup.Level.DEFAULT)
    first = next(seed for space in search_space.of(Op.BACKWARD) for seed in space.seeds_for(BACKWARD, samples.H200))
    assert explanation.variant == first
