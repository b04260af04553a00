"""The bench on a real GPU: PyTorch's backends and FlexAttention on small problems."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from autoattn import bench, peers
from autoattn.cli.app import run
from autoattn.comparison import Inputs, Options, Row, State, Timing
from autoattn.mask import Mask
from autoattn.measure import Stopwatch
from autoattn.problem import DType, Problem

pytestmark = pytest.mark.gpu

NAMES = "sdpa,sdpa-flash,sdpa-cudnn,sdpa-efficient,flex"
SHAPES = """
version: 1
groups:
  small: {problems: [{dtype: bf16, batch: 1, heads: 4, seq: 256, head_dim: 64, mask: [full, causal]}]}
"""


def problem(seq: int, mask: str = "causal", **changes: object) -> Problem:
    facts = {"dtype": DType.BFLOAT16, "batch": 2, "heads_q": 8, "heads_kv": 4, "seq_q": seq, "seq_kv": seq,
             "head_dim": 64, "mask": Mask.parse(mask)} | changes  # fmt: skip
    return Problem(**facts)  # type: ignore[arg-type]


def benched(one: Problem, names: str = NAMES, **options: object) -> Row:
    return next(bench.rows([one], peers.named(names), Options(seconds=0.05, **options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("inputs", list(Inputs))
@pytest.mark.parametrize("mask", ["full", "causal", "window:100,0"])
def test_everybody_is_right_on_both_kinds_of_inputs(mask: str, inputs: Inputs) -> None:
    row = benched(problem(700, mask), inputs=inputs)
    states = {one.name: (one.state, one.detail) for one in row.contestants}
    assert states["autoattn"] == (State.OK, "")
    assert states["flex"][0] is State.OK
    assert State.WRONG not in {state for state, _ in states.values()}
    assert row.ratio is not None


def test_a_small_problem_is_timed_by_graph_and_a_large_one_by_events() -> None:
    small, large = benched(problem(256), "sdpa-flash"), benched(problem(8192, heads_q=16, batch=4), "sdpa-flash")
    assert (small.timing, large.timing) == (Timing.GRAPH, Timing.EVENTS), (small.note, large.note)
    assert small.ours is not None
    assert large.ours is not None
    assert small.ours.median_us < 50.0
    assert large.ours.host_us is not None
    assert all(one.times_us for one in (*small.contestants, *large.contestants))


def test_a_graph_of_several_calls_takes_as_long_as_the_calls() -> None:
    import torch

    stopwatch = Stopwatch(torch.device("cuda"))
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")

    def call() -> torch.Tensor:
        return matrix @ matrix

    call()
    stopwatch.warm()
    alone = min(stopwatch.samples(call, 10))
    together = min(stopwatch.samples(stopwatch.graph(call, 5), 10)) / 5
    assert 0.6 < together / alone < 1.2


def test_the_command_writes_what_ran(tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.yaml"
    shapes.write_text(SHAPES)
    out = tmp_path / "out"
    arguments = ["bench", str(shapes), "--peers", "sdpa-flash,fa4", "--rounds", "5", "--ours", "variants"]
    assert run([*arguments, "--out", str(out)]) == 0
    lines = list(csv.DictReader((out / "bench.csv").open()))
    assert {line["contestant"] for line in lines} >= {"autoattn", "sdpa-flash", "fa4", "variant 1"}
    assert {line["state"] for line in lines if line["contestant"] == "autoattn"} == {"ok"}
    assert all(int(line["samples"]) == 5 for line in lines if line["contestant"] in ("autoattn", "sdpa-flash"))
