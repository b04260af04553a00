"""What came of a bench: its ratios, the table, the CSV, the chart, and the command that writes them."""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_device
import pytest
import samples

from autoattn.baselines import external, pytorch_sdpa
from autoattn.baselines.external import Peer
from autoattn.bench import kernel_bench
from autoattn.bench.kernel_results import Contestant, Options, Row, Run, State, Timing
from autoattn.cli.app import run
from autoattn.core.paired_stats import Pulse
from autoattn.core.problem import Problem
from autoattn.errors import StateError
from autoattn.report import kernel_chart, kernel_tables

SHAPES = """
version: 1
defaults: {dtype: float16, batch: 1, heads: 2, head_dim: 16}
groups:
  short: {problems: [{seq: 8, mask: [full, causal]}]}
  long: {problems: [{seq: 24}]}
"""
HOSTILE = "<script>alert('1')</script> | `code` \x1b[31m\n# head"


# --- ratios -----------------------------------------------------------------------------------------------------------


def contestant(name: str, *times_us: float, **facts: Any) -> Contestant:
    return Contestant(name=name, times_us=times_us, ours=name == "autoattn", **facts)


def row_of(problem: Problem, ours: float, *others: Contestant, **facts: Any) -> Row:
    variant = samples.measured(problem).variant
    first = contestant("autoattn", ours, route=variant.template, level="exact", variant=variant)
    return Row(problem=problem, contestants=(first, *others), **facts)


def run_of(*rows: Row, **facts: Any) -> Run:
    known: dict[str, Any] = {
        "machine": {"card": "NVIDIA H200, sm_90, 132 SMs", "torch": "2.11.0"},
        "command": "autoattn bench shapes.yaml --out bench",
        "options": Options(),
        "peers": ("sdpa-cudnn", "flex", "fa4"),
        "planned": len(rows),
        "rows": list(rows),
    }
    return Run(**known | facts)


@pytest.fixture
def two() -> Run:
    """Ours is 1.25 times and 0.8 times as fast as the best; fa4 is wrong once, flex runs out of memory once."""
    pulses = (
        Pulse(clock_mhz=1700, slowed=False, temperature_c=60, reasons=("power cap",)),
        Pulse(clock_mhz=1600, slowed=False, temperature_c=63),
    )
    first = row_of(
        samples.problem(),
        400.0,
        contestant("sdpa-cudnn", 490.0, 500.0, 700.0, first_s=0.5, max_error=1e-3, allowed=4e-3),
        contestant("flex", 600.0),
        Contestant(name="fa4", state=State.WRONG, detail="error 1 where 0.004 is allowed", times_us=(1.0,)),
        pulses=pulses,
    )
    second = row_of(
        samples.problem(seq_q=4096),
        1000.0,
        contestant("sdpa-cudnn", 900.0),
        Contestant(name="flex", state=State.MEMORY, detail="CUDA out of memory"),
        contestant("fa4", 800.0),
        timing=Timing.GRAPH,
    )
    return run_of(first, second)


def test_the_ratio_is_over_the_fastest_right_peer(two: Run) -> None:
    assert [row.best_peer.name for row in two.rows if row.best_peer] == ["sdpa-cudnn", "fa4"]
    assert [row.ratio for row in two.rows] == [1.25, 0.8]


def test_the_best_of_our_own_is_ours() -> None:
    row = row_of(samples.problem(), 400.0, contestant("flex", 500.0))
    faster = replace(contestant("variant 1", 300.0), ours=True)
    row = replace(row, contestants=(*row.contestants, faster))
    assert row.ours is faster
    assert row.ratio == pytest.approx(500 / 300)


def test_the_standings_are_geometric_means_with_the_lowest_row(two: Run) -> None:
    best = kernel_tables.against_best(two.rows)
    assert best is not None
    assert (best.rows, best.lowest, best.highest, best.below) == (2, 0.8, 1.25, 1)
    assert best.mean == pytest.approx(1.0)
    assert best.worst is two.rows[1]
    each = {standing.name: (standing.rows, standing.mean) for standing in kernel_tables.against_each(two.rows)}
    assert each["sdpa-cudnn"] == (2, pytest.approx((1.25 * 0.9) ** 0.5))
    assert each["flex"] == (1, 1.5)
    assert each["fa4"] == (1, 0.8)


def test_without_a_peer_there_is_no_standing() -> None:
    run_alone = run_of(row_of(samples.problem(), 400.0))
    assert kernel_tables.against_best(run_alone.rows) is None
    assert "400" in kernel_tables.markdown_text(run_alone)


# --- what is written --------------------------------------------------------------------------------------------------


def test_the_markdown_says_what_was_measured_and_what_was_not(two: Run) -> None:
    two.missing["fa2"] = "not installed (no module flash_attn)"
    two.peers += ("fa2",)
    text = kernel_tables.markdown_text(two)
    table = [line for line in text.splitlines() if line.startswith(("| Problem", "| bf16"))]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {11}
    assert "| 1.250x | sdpa-cudnn | triton/forward" in table[1]
    assert "| wrong |" in table[1]
    assert "(graph)" in table[2]
    assert "| out of memory |" in table[2]
    assert "**1.000x** as fast in the geometric mean of 2 rows; lowest 0.800x (bf16 B4" in text
    assert "1 of 2 rows below 1" in text
    assert "fa2, 2 of 2 rows: not installed (no module flash\\_attn)" in text
    assert "fa4, 1 of 2 rows: wrong: error 1 where 0.004 is allowed" in text
    assert "1650 MHz (1600 to 1700), 63 C, power cap in 50% of rounds" in text
    assert "```sh\nautoattn bench shapes.yaml --out bench\n```" in text
    assert "Not finished" not in text
    two.planned = 5
    assert "**Not finished: 2 of 5 problems are here.**" in kernel_tables.markdown_text(two)


def test_the_csv_has_a_line_for_each_contestant_with_every_sample(two: Run) -> None:
    lines = list(csv.DictReader(io.StringIO(kernel_tables.csv_text(two))))
    assert [(line["contestant"], line["state"]) for line in lines[:4]] == [
        ("autoattn", "ok"), ("sdpa-cudnn", "ok"), ("flex", "ok"), ("fa4", "wrong"),
    ]  # fmt: skip
    assert len(lines) == 8
    cudnn = lines[1]
    assert cudnn["samples_us"] == "490 500 700"
    assert (cudnn["median_us"], cudnn["over_ours"], cudnn["first_call_s"]) == ("500", "1.25", "0.5")
    flops = samples.problem().flops()
    assert float(cudnn["tflops"]) == pytest.approx(flops / 500 / 1e6, rel=1e-5)
    assert (cudnn["clock_mhz_median"], cudnn["clock_mhz_min"], cudnn["clock_reasons"]) == ("1650", "1600", "power cap")
    assert lines[0]["level"] == "exact"
    assert "BLOCK_M=" in lines[0]["params"]
    assert lines[6]["detail"] == "CUDA out of memory"


def bars(text: str) -> list[tuple[str, float]]:
    """(title, width) of each bar."""
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    titled_bars = [(rect.find(f"{space}title"), rect) for rect in root.iter(f"{space}rect")]
    return [(title.text or "", float(rect.get("width", ""))) for title, rect in titled_bars if title is not None]


def test_the_chart_draws_rates_and_leaves_out_what_is_wrong(two: Run) -> None:
    drawn = bars(kernel_chart.svg_text(two))
    names = [title.split(":")[0] for title, _ in drawn]
    assert names == ["autoattn", "sdpa-cudnn", "flex", "autoattn", "sdpa-cudnn", "fa4"]
    rates = [row.tflops(entrant) for row in two.rows for entrant in row.contestants if entrant.timed]
    widths = [width for _, width in drawn]
    for rate, width in zip(rates, widths, strict=True):
        assert width / max(widths) == pytest.approx(rate / max(rates), abs=2e-3)


def test_rows_of_very_different_speed_are_drawn_as_shares() -> None:
    slow = row_of(samples.problem(seq_q=1, seq_kv=1), 400.0, contestant("flex", 800.0))
    drawn = bars(kernel_chart.svg_text(run_of(slow, row_of(samples.problem(), 400.0))))
    assert drawn[0][1] == drawn[2][1] == pytest.approx(2 * drawn[1][1], abs=0.2)


def test_the_chart_loads_nothing_and_no_text_acts_in_it_or_in_the_table(two: Run) -> None:
    two.machine["card"] = HOSTILE
    two.rows[0] = replace(two.rows[0], note=HOSTILE)
    picture = kernel_chart.svg_text(two)
    ElementTree.fromstring(picture)
    assert "<script" not in picture
    assert "href" not in picture
    text = kernel_tables.markdown_text(two)
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\n# head" not in text


def test_a_row_without_inputs_and_a_run_without_rows_are_written_too(tmp_path: Path) -> None:
    empty = run_of(Row(problem=samples.problem(), note="no inputs: out of memory"))
    for bench_run in (empty, run_of()):
        for path in kernel_tables.write(bench_run, tmp_path / "bench"):
            assert path.stat().st_size > 0
    assert "no inputs" in kernel_tables.markdown_text(empty)
    assert "no inputs: out of memory" in kernel_tables.csv_text(empty)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.yaml"
    path.write_text(SHAPES)
    return path


@pytest.fixture
def fake_rows(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Rows without a card; gives the problems that were asked for."""
    requested: list[Problem] = []

    def rows(problems: list[Problem], others: list[Peer], options: Options) -> Iterator[Row]:
        for problem in problems:
            requested.append(problem)
            yield row_of(problem, 100.0, contestant("sdpa-cudnn", 150.0))

    fake_device.set_device(monkeypatch, samples.H200)
    monkeypatch.setattr(kernel_bench, "rows", rows)
    return requested


def test_without_a_gpu_the_command_says_so_in_one_sentence(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_device.set_device(monkeypatch, None)
    assert run(["bench", str(shapes), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("autoattn: autoattn bench needs an NVIDIA GPU")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


MISTAKES = [
    (["--peers", "fa4,nobody"], "got 'nobody'"),
    (["--only", "D999"], "got 'D999'; "),
    (["--group", "none"], "it has short, long"),
    (["--seconds", "-1"], "--seconds must be at least 0"),
    (["--rounds", "0"], "--rounds must be at least 1"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_is_one_sentence(
    arguments: list[str], words: str, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", str(shapes), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_command_prints_each_row_and_writes_three_files(
    fake_rows: list[Problem], shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["bench", str(shapes), "--peers", "sdpa-cudnn,flex", "--out", str(out), "--only", "8x8"]) == 0
    assert [str(problem) for problem in fake_rows] == ["fp16 B1 H2 8x8 D16 full", "fp16 B1 H2 8x8 D16 causal"]
    said = capsys.readouterr().out
    assert "[1/2] fp16 B1 H2 8x8 D16 full: " in said
    assert "1.500x the best peer" in said
    assert "1.500 in the geometric mean of 2 problems" in said
    assert {path.name for path in out.iterdir()} == {"bench.md", "bench.csv", "bench.svg"}
    assert (
        f"autoattn bench {shapes} --peers sdpa-cudnn,flex --only 8x8 --inputs random --ours dispatch --seconds 0.2 "
        f"--seed 0 --out {out}"
    ) in (out / "bench.md").read_text()


def test_gradients_are_benched_like_outputs(
    fake_rows: list[Problem], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "backward.yaml"
    path.write_text(SHAPES.replace("batch: 1", "batch: 1, operation: [forward, backward]"))
    assert run(["bench", str(path), "--only", "backward", "--peers", "sdpa-cudnn", "--out", str(tmp_path)]) == 0
    assert [str(problem) for problem in fake_rows] == [
        "backward fp16 B1 H2 8x8 D16 full",
        "backward fp16 B1 H2 8x8 D16 causal",
        "backward fp16 B1 H2 24x24 D16 full",
    ]
    assert "Backward rows time the backward pass alone" in (tmp_path / "bench.md").read_text()
    lines = list(csv.DictReader((tmp_path / "bench.csv").open()))
    rates = {line["problem"]: float(line["tflops"]) for line in lines if line["contestant"] == "autoattn"}
    assert rates["backward fp16 B1 H2 8x8 D16 full"] == pytest.approx(2 * 5 * 2 * 8 * 8 * 16 / 100.0 / 1e6)


def test_ctrl_c_keeps_what_was_done(
    fake_rows: list[Problem], shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = kernel_bench.rows

    def rows(*arguments: Any) -> Iterator[Row]:
        yield next(whole(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel_bench, "rows", rows)
    assert run(["bench", str(shapes), "--out", str(tmp_path)]) == 130
    assert "Not finished: 1 of 3 problems are here" in (tmp_path / "bench.md").read_text()


def test_what_was_done_is_kept_when_the_card_breaks(
    fake_rows: list[Problem], shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = kernel_bench.rows

    def rows(*arguments: Any) -> Iterator[Row]:
        yield next(whole(*arguments))
        raise StateError("the GPU must go on, but it did not; try again")

    monkeypatch.setattr(kernel_bench, "rows", rows)
    assert run(["bench", str(shapes), "--out", str(tmp_path)]) == 1
    assert "Not finished: 1 of 3 problems are here" in (tmp_path / "bench.md").read_text()


def test_a_problem_without_our_answer_fails_the_command(
    fake_rows: list[Problem], shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    bad = Contestant(name="autoattn", ours=True, state=State.WRONG, detail="error 1 where 0.1 is allowed")
    monkeypatch.setattr(kernel_bench, "rows", lambda *_: iter([Row(problem=samples.problem(), contestants=(bad,))]))
    assert run(["bench", str(shapes), "--out", str(tmp_path)]) == 1
    assert "autoattn wrong, error 1 where 0.1 is allowed" in capsys.readouterr().out


def test_the_default_names_every_peer_but_sdpas_own_choice() -> None:
    from autoattn.cli.bench import PEERS

    assert [pytorch_sdpa.SDPA, *PEERS.split(",")] == list(external.PEERS)
