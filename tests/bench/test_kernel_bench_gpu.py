"""The bench on a real GPU: PyTorch's backends and FlexAttention on small problems."""

from __future__ import annotations

import csv
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import samples

from autoattn.baselines import external
from autoattn.bench import kernel_bench
from autoattn.bench.kernel_results import Inputs, Options, Row, State, Timing
from autoattn.cache import store
from autoattn.cli.app import run
from autoattn.codegen import search_space
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Op, Problem
from autoattn.hardware import nvidia
from autoattn.hardware.timer import Stopwatch

pytestmark = pytest.mark.gpu

NAMES = "sdpa,sdpa-flash,sdpa-cudnn,sdpa-efficient,flex"
SHAPES = """
version: 1
groups:
  small: {problems: [{dtype: bf16, batch: 1, heads: 4, seq: 256, head_dim: 64, mask: [full, causal]}]}
"""


def sized(seq: int, mask: str = "causal", **changes: object) -> Problem:
    facts = {"dtype": DType.BFLOAT16, "batch": 2, "heads_q": 8, "heads_kv": 4, "seq_q": seq, "seq_kv": seq,
             "head_dim": 64, "mask": Mask.parse(mask)} | changes  # fmt: skip
    return Problem(**facts)  # type: ignore[arg-type]


def benched(problem: Problem, names: str = NAMES, **options: object) -> Row:
    return next(kernel_bench.rows([problem], external.named(names), Options(seconds=0.05, **options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("inputs", list(Inputs))
@pytest.mark.parametrize("mask", ["full", "causal", "window:100,0"])
def test_everybody_is_right_on_both_kinds_of_inputs(mask: str, inputs: Inputs) -> None:
    row = benched(sized(700, mask), inputs=inputs)
    states = {contestant.name: (contestant.state, contestant.detail) for contestant in row.contestants}
    assert states["autoattn"] == (State.OK, "")
    assert states["flex"][0] is State.OK
    assert State.WRONG not in {state for state, _ in states.values()}
    assert row.ratio is not None


def test_a_small_problem_is_timed_by_graph_and_a_large_one_by_events() -> None:
    small, large = benched(sized(256), "sdpa-flash"), benched(sized(8192, heads_q=16, batch=4), "sdpa-flash")
    assert (small.timing, large.timing) == (Timing.GRAPH, Timing.EVENTS), (small.note, large.note)
    assert small.ours is not None
    assert large.ours is not None
    assert small.ours.median_us < 50.0
    assert large.ours.host_us is not None
    assert all(contestant.times_us for contestant in (*small.contestants, *large.contestants))


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


def test_calls_of_a_cold_graph_read_from_memory_what_warm_ones_find_in_the_l2() -> None:
    import torch

    stopwatch = Stopwatch(torch.device("cuda"))
    numbers = torch.zeros(4 * 2**20, device="cuda")  # 16 MB, which an L2 of 50 MB holds
    total = torch.zeros((), device="cuda")

    def call() -> torch.Tensor:
        return torch.sum(numbers, 0, out=total)

    call()
    stopwatch.warm()
    alone = statistics.median(stopwatch.samples(call, 20))
    warm = statistics.median(stopwatch.samples(stopwatch.graph(call, 20), 10)) / 20
    flush = statistics.median(stopwatch.samples(stopwatch.flushes(20), 10)) / 20
    cold = statistics.median(stopwatch.samples(stopwatch.cold_graph(call, 20), 10)) / 20 - flush
    assert 1.1 * warm < cold < alone


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Problem:
    """Gradients whose kernel is the template's default, as if it had been measured."""
    monkeypatch.setenv("AUTOATTN_CACHE", str(tmp_path))
    card, problem = nvidia.present(), sized(2048, op=Op.BACKWARD)
    assert card is not None
    variant = search_space.load("triton/backward").default(problem, card)
    store.merge(tmp_path, card, Op.BACKWARD, [samples.tuned(problem, variant)])
    return problem


@pytest.mark.parametrize("inputs", list(Inputs))
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_passes_are_right_and_timed_by_events(tuned: Problem, deterministic: bool, inputs: Inputs) -> None:
    row = benched(replace(tuned, deterministic=deterministic), f"{NAMES},fa2,fa4", inputs=inputs)
    states = {contestant.name: (contestant.state, contestant.detail) for contestant in row.contestants}
    assert states["autoattn"][0] is State.OK, states
    assert states["flex"][0] is State.OK, states
    assert states["sdpa-flash"][0] is State.OK, states
    assert states["sdpa-cudnn"][0] is (State.ABSENT if deterministic else State.OK), states
    assert State.WRONG not in {state for state, _ in states.values()}, states
    assert row.contestants[0].route == "triton/backward"
    assert row.timing is Timing.EVENTS
    assert all(contestant.host_us for contestant in row.contestants if contestant.timed)


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
