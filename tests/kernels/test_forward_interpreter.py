"""The forward template's numbers, in Triton's interpreter: every structure, every awkward size, every stride."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import interpreted
import kernels
import pytest
from interpreted import Run, run

from autoattn.core.problem import DType, Layout, Problem
from autoattn.core.trial import Outcome, Verdict
from autoattn.core.variant import Source, Traits
from autoattn.search.gpu_jobs import Rehearse
from autoattn.workers.worker_pool import Failure, Pool

pytestmark = pytest.mark.interpreter

SOFTMAXES = ("online", "lazy", "first_max")


# --- structures -------------------------------------------------------------------------------------------------------

STRUCTURES = [
    {"mask_loop": mask_loop, "softmax": softmax, "mask": mask}
    for mask_loop, softmax, mask in itertools.product(("split", "every", "branch"), SOFTMAXES, kernels.MASKS)
]
SETTINGS = kernels.covering(
    {
        "row_order": ("descending", "ascending"),
        "PERSISTENT": (0, 1, 2),
        "HEAD_GROUP": (1, 4, 0),
        "dtype": (DType.FLOAT16, DType.FLOAT32),
        "head_dim": (16, 24),
        "lengths": ((17, 37), (37, 17), (32, 16), (5, 48)),
        "heads": ((2, 4, 2), (3, 1, 1), (1, 3, 1)),
        "layout": (Layout.BHSD, Layout.BSHD),
        "lse": (False, True),
    }
)
POINTS = [{**structure, **SETTINGS[place % len(SETTINGS)]} for place, structure in enumerate(STRUCTURES)]


def test_the_points_hold_every_pair_of_settings() -> None:
    assert len(SETTINGS) <= len(POINTS)
    for first, second in itertools.combinations(SETTINGS[0], 2):
        pairs = {(point[first], point[second]) for point in POINTS}
        assert len(pairs) == len({point[first] for point in POINTS}) * len({point[second] for point in POINTS})


def words(point: dict[str, Any]) -> str:
    return "-".join(str(getattr(value, "value", value)) for value in point.values())


@pytest.mark.parametrize("point", POINTS, ids=words)
def test_every_structure_matches_the_reference(child: Pool, point: dict[str, Any]) -> None:
    point = dict(point)
    seq_q, seq_kv = point.pop("lengths")
    batch, heads_q, heads_kv = point.pop("heads")
    facts = {name: point.pop(name) for name in ("mask", "dtype", "head_dim", "layout")}
    problem = kernels.problem(batch=batch, heads_q=heads_q, heads_kv=heads_kv, seq_q=seq_q, seq_kv=seq_kv, **facts)
    result = run(child, problem, sm_count=3, **point)
    assert result.ok, result


# --- rows that see nothing, and the log-sum-exp -----------------------------------------------------------------------


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("mask_loop", ["split", "every", "branch"])
def test_rows_that_see_no_key_give_zero_and_an_lse_of_minus_infinity(child: Pool, softmax: str, mask_loop: str) -> None:
    problem = kernels.problem(batch=1, seq_q=40, seq_kv=3, mask="causal:bottom-right")  # 37 blind rows, two whole tiles
    result = run(child, problem, softmax=softmax, mask_loop=mask_loop)
    assert result.lse_blind, "the LSE is -inf just where a row sees nothing"
    assert result.blind_zero
    assert result.ok, result


def test_the_lse_is_in_natural_logarithms(child: Pool) -> None:
    problem = kernels.problem(dtype=DType.FLOAT32, batch=1, heads_q=1, heads_kv=1, seq_q=1, seq_kv=64)
    result = run(child, problem, interpreted.zeros)  # the reference says log(64) = 4.16; log2(64) would be 6
    assert result.lse_error < 1e-5


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [1, 8, 16, 24, 40, 56, 57, 64, 80, 96, 111, 128, 192, 256])
def test_every_head_dim_matches_the_reference(child: Pool, head_dim: int) -> None:
    problem = kernels.problem(batch=1, heads_q=2, heads_kv=1, seq_q=7, seq_kv=21, head_dim=head_dim, mask="causal")
    result = run(child, problem)
    assert result.ok, result


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (3, 3), (2, 1), (4, 2), (6, 2), (8, 1)])
@pytest.mark.parametrize("batch", [1, 2])
def test_every_group_size_reads_its_own_key_head(child: Pool, batch: int, heads_q: int, heads_kv: int) -> None:
    problem = kernels.problem(batch=batch, heads_q=heads_q, heads_kv=heads_kv, seq_q=5, seq_kv=9)
    result = run(child, problem, HEAD_GROUP=4)
    assert result.ok, result


@pytest.mark.parametrize("mask", kernels.MASKS)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(1, 1), (1, 33), (33, 1), (16, 16), (17, 16), (16, 17), (31, 47)])
def test_every_length_matches_the_reference(child: Pool, seq_q: int, seq_kv: int, mask: str) -> None:
    problem = kernels.problem(batch=1, heads_q=2, heads_kv=1, seq_q=seq_q, seq_kv=seq_kv, mask=mask)
    result = run(child, problem)
    assert result.ok, result


@pytest.mark.parametrize("mask_loop", ["split", "branch"])
@pytest.mark.parametrize("shift", range(17))
def test_every_place_of_the_diagonal_in_a_block_matches_the_reference(child: Pool, shift: int, mask_loop: str) -> None:
    problem = kernels.problem(batch=1, heads_q=1, heads_kv=1, seq_q=17, seq_kv=17 + shift, mask="causal")
    result = run(child, problem, mask_loop=mask_loop)
    assert result.ok, result


@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32), (64, 16), (16, 64)])
@pytest.mark.parametrize("mask_loop", ["split", "branch"])
def test_tiles_need_not_be_square(child: Pool, block_m: int, block_n: int, mask_loop: str) -> None:
    problem = kernels.problem(batch=1, heads_q=1, heads_kv=1, seq_q=70, seq_kv=83, mask="causal")
    result = run(child, problem, BLOCK_M=block_m, BLOCK_N=block_n, mask_loop=mask_loop)
    assert result.ok, result


@pytest.mark.parametrize("sm_count", [1, 2, 7])
@pytest.mark.parametrize("head_group", [1, 4, 16, 0])
def test_every_tile_is_computed_once_in_any_program_order(child: Pool, sm_count: int, head_group: int) -> None:
    problem = kernels.problem(batch=3, heads_q=2, heads_kv=1, seq_q=17, seq_kv=16)
    result = run(child, problem, sm_count=sm_count, HEAD_GROUP=head_group, PERSISTENT=2)
    assert result.ok, result


# --- memory -----------------------------------------------------------------------------------------------------------

LAYOUTS_IN_MEMORY = (interpreted.dense, interpreted.transposed, interpreted.odd_strides, interpreted.expanded)


@pytest.mark.parametrize("layout", [Layout.BHSD, Layout.BSHD])
@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize("make", LAYOUTS_IN_MEMORY, ids=lambda make: make.__name__)
def test_any_strides_and_offsets_match_the_reference(child: Pool, make: Any, head_dim: int, layout: Layout) -> None:
    problem = kernels.problem(heads_q=2, seq_q=17, seq_kv=20, head_dim=head_dim, layout=layout, mask="causal")
    result = run(child, problem, make)
    assert result.ok, result


@pytest.mark.parametrize("wide", [False, True])
def test_kernels_for_any_stride_take_aligned_tensors_too(child: Pool, wide: bool) -> None:
    problem = kernels.problem(seq_q=17, seq_kv=20, mask="causal")
    result = run(child, problem, traits=Traits(alignment=1, wide=wide, lse=True))
    assert result.ok, result


@pytest.mark.parametrize("mask", kernels.MASKS)
@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("mask_loop", ["split", "every", "branch"])
def test_nan_behind_the_last_key_never_leaks(child: Pool, mask_loop: str, softmax: str, mask: str) -> None:
    """The inputs stand in rooms of NaN: behind 18 keys there are three rows of it, then the next head."""
    problem = kernels.problem(batch=1, heads_q=1, heads_kv=1, seq_q=18, seq_kv=18, mask=mask)
    result = run(child, problem, interpreted.inside_nan, mask_loop=mask_loop, softmax=softmax)
    assert result.ok, result


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-3, 0.5, 3.0])
def test_the_scale_is_the_callers(child: Pool, scale: float) -> None:
    problem = kernels.problem(dtype=DType.FLOAT32, batch=1, mask="causal", seq_q=17, seq_kv=20)
    result = run(child, problem, scale=scale)
    assert result.ok, result


SCORES = (interpreted.rising, interpreted.falling, interpreted.overflowing, interpreted.sunken)


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.FLOAT32])
@pytest.mark.parametrize("make", SCORES, ids=lambda make: make.__name__)
def test_scores_that_move_far_from_block_to_block_match_the_reference(
    child: Pool, make: Any, dtype: DType, softmax: str
) -> None:
    problem = kernels.problem(batch=1, heads_q=1, heads_kv=1, dtype=dtype, seq_q=17, seq_kv=70, mask="causal")
    result = run(child, problem, make, softmax=softmax)
    assert result.ok, result


@pytest.mark.parametrize(
    ("dtype", "make"), [(DType.FLOAT16, interpreted.rising), (DType.FLOAT32, interpreted.overflowing)]
)
def test_without_the_redo_pass_first_max_would_be_wrong_on_these_scores(child: Pool, dtype: DType, make: Any) -> None:
    problem = kernels.problem(batch=1, heads_q=1, heads_kv=1, dtype=dtype, seq_q=17, seq_kv=70)
    assert not interpreted.result(child, Run(source=without_redo(problem), problem=problem, make=make)).ok


def test_first_max_does_not_redo_tiles_of_ordinary_scores(child: Pool) -> None:
    problem = kernels.problem(batch=1, seq_q=17, seq_kv=70, mask="causal")
    assert interpreted.result(child, Run(source=without_redo(problem), problem=problem, make=interpreted.dense)).ok


def without_redo(problem: Problem) -> Source:
    source = kernels.source(problem, softmax="first_max")
    text = source.text.replace("if tl.max(tl.where(spoilt == 0.0, 0, 1)) > 0:", "if False:")
    assert text != source.text
    return replace(source, text=text)


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_a_nan_query_row_stays_alone(child: Pool, softmax: str) -> None:
    problem = kernels.problem(batch=1, heads_q=1, heads_kv=1, seq_q=12, seq_kv=70)
    all_rows = Run(source=kernels.source(problem, softmax=softmax), problem=problem, make=interpreted.nan_row)
    other_rows = interpreted.result(child, replace(all_rows, leave_out=5))
    assert other_rows.ok, other_rows
    assert interpreted.result(child, all_rows).max_error <= other_rows.allowed, "row 5 is NaN, as the reference's"


# --- the gate in the interpreter --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("softmax", "dtype", "mask"),
    [
        ("lazy", DType.FLOAT32, "causal"),
        ("first_max", DType.FLOAT16, "causal:top-left"),
        ("first_max", DType.FLOAT32, "full"),
    ],
)
def test_a_rehearsal_passes_the_gate_in_the_interpreter(child: Pool, softmax: str, dtype: DType, mask: str) -> None:
    problem = kernels.problem(head_dim=24, dtype=dtype, mask=mask)
    verdict = child.result(
        Rehearse(problem=problem, source=kernels.source(problem, softmax=softmax)), interpreted.SECONDS
    )
    assert isinstance(verdict, Verdict)
    assert verdict.ok, verdict.reason


def test_a_rehearsal_refuses_first_max_without_its_redo_pass(child: Pool) -> None:
    problem = kernels.problem(dtype=DType.FLOAT32)
    verdict = child.result(Rehearse(problem=problem, source=without_redo(problem)), interpreted.SECONDS)
    assert isinstance(verdict, Verdict)
    assert not verdict.ok
    assert "steep" in verdict.reason


def test_a_kernel_that_the_interpreter_cannot_run_is_no_wrong_kernel(child: Pool) -> None:
    right = kernels.source(kernels.problem())
    program = "tl.program_id(0)"
    assert program in right.text
    broken = replace(right, text=right.text.replace(program, f"tl.sqrt({program})", 1))
    result = child.result(Rehearse(problem=kernels.problem(), source=broken), interpreted.SECONDS)
    assert isinstance(result, Failure)
    assert result.outcome is Outcome.INTERPRETER_CRASH
    assert result.detail.startswith("ValueError: "), "the innermost exception, without the interpreter's wrappers"


def test_a_rehearsal_refuses_a_mask_that_is_wrong_by_one(child: Pool) -> None:
    problem = kernels.problem(head_dim=24, mask="causal")
    right = kernels.source(problem)
    wrong = replace(right, text=right.text.replace("<= o_m[:, None] + last", "< o_m[:, None] + last"))
    assert wrong != right
    verdict = child.result(Rehearse(problem=problem, source=wrong), interpreted.SECONDS)
    assert isinstance(verdict, Verdict)
    assert not verdict.ok
