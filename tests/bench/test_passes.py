"""The tables of passes: which calls they have, how passes are checked, timed and weighed, and what is written of it."""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_device
import gradient_kernels
import pytest
import samples
import torch
from torch import Tensor

from autoattn.bench import kernel_bench, pass_bench, transformer
from autoattn.bench.pass_results import Case, Options, Part, Row, Run, Table, Time, over_ours
from autoattn.bench.training_results import Numbers, State, Whose
from autoattn.cache import store
from autoattn.cli.app import run
from autoattn.codegen import resources
from autoattn.errors import StateError
from autoattn.hardware.timer import Rounds
from autoattn.report import pass_tables as report
from autoattn.runtime.plan import gradient_problem

pytestmark = pytest.mark.sampled

FEW: dict[str, Any] = {"contexts": (128,), "head_dims": (16,)}
HOSTILE = "<script>alert('1')</script> | `code` \x1b[31m\n# head"


class Gauge:
    """A device that is the CPU: a call's time is 10 us a call that it makes, memory that of the tensors that live."""

    device = torch.device("cpu")

    def __init__(self, *, us: float = 10.0) -> None:
        self.us = us
        self.graphs: list[int] = []
        self.timed: list[list[str]] = []
        self.held = 1000
        self.log: list[str] = []
        self.breaks = self.refuses = False

    def samples(self, call: Callable[[], object], count: int) -> list[float]:
        for _ in range(count):
            call()
        return [self.us] * count

    def rounds(self, calls: Mapping[str, Callable[[], object]], *, seconds: float, seed: int) -> Rounds:
        for call in calls.values():
            call()
        self.timed.append([*calls])
        return Rounds(times_us={name: [self.us * 20, self.us * 20, self.us * 40] for name in calls}, pulses=[])

    def graph(self, make: Callable[[], Callable[[], object]], count: int) -> Callable[[], object]:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.graphs.append(count)
        make()()
        return lambda: None

    def allocated(self) -> int:
        self.log.append("allocated")
        self.held += 100_000
        return self.held

    def forget_peak(self) -> None:
        self.log.append("peak forgotten")

    def peak(self) -> int:
        self.log.append("peak")
        return self.held + 5000

    def clear(self) -> None:
        if self.breaks:
            raise RuntimeError("an illegal memory access was encountered")


def timed(gauge: Gauge | None = None, **options: Any) -> list[list[Row]]:
    return list(pass_bench.rows(Options(**FEW | {"tables": (Table.FLASH,)} | options), gauge or Gauge()))


def replaced(monkeypatch: pytest.MonkeyPatch, whose: Whose, attend: Callable[..., Tensor]) -> None:
    """One of the attentions, replaced."""
    known = transformer.attention_of
    monkeypatch.setattr(
        transformer,
        "attention_of",
        lambda attention, *given, **facts: attend if attention is whose else known(attention, *given, **facts),
    )


# --- what is run ------------------------------------------------------------------------------------------------------


def test_all_calls_of_both_tables_are_there_those_the_seed_lost_too() -> None:
    cases = Options().cases()
    assert [sum(case.table is table for case in cases) for table in Table] == [20, 54]
    lost = [str(case) for case in cases if case.lost]
    assert lost == [
        *(f"attention 16,384 D{head_dim} fp32" for head_dim in (16, 32, 64, 128)),
        *(f"flash 32,768 D{head_dim} fp32" for head_dim in (16, 32, 64)),
    ]
    problem = Case(table=Table.ATTENTION, context=256, head_dim=32, numbers=Numbers.FLOAT32).problem
    assert str(problem) == "fp32:ieee B8 H1 256x256 D32 full"


@pytest.mark.parametrize("table", list(Table))
def test_each_attention_is_right_and_has_each_part(table: Table) -> None:
    contexts = (256,) if table is Table.ATTENTION else (128,)
    for rows in timed(tables=(table,), contexts=contexts):
        assert [row.whose for row in rows] == [Whose.OURS, Whose.NAIVE, Whose.SDPA]
        for row in rows:
            assert (row.state, row.detail) == (State.OK, "")
            assert [*row.times] == list(Part)
            assert row.ran


def test_parts_are_timed_apart_and_by_graphs_where_the_host_may_be_slower() -> None:
    gauge = Gauge()
    (rows, _) = timed(gauge)
    assert gauge.timed == [["autoattn", "naive", "sdpa"]] * 6
    assert gauge.graphs == [20] * 18
    time = rows[0].times[Part.BOTH]
    assert (time.graph, time.calls, time.ms) == (True, 20, pytest.approx(0.01))
    slow = Gauge(us=1000.0)
    (rows, _) = timed(slow)
    assert not slow.graphs
    assert (rows[0].times[Part.BOTH].graph, rows[0].times[Part.BOTH].ms) == (False, 20.0)


def test_where_a_graph_is_refused_all_are_timed_by_events_and_say_so() -> None:
    gauge = Gauge()
    gauge.refuses = True
    (rows, _) = timed(gauge)
    assert not any(time.graph for row in rows for time in row.times.values())
    assert all("both timed without CUDA graphs: RuntimeError: operation not permitted" in row.detail for row in rows)


def test_a_backward_pass_is_that_alone_and_both_are_both(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards: list[int] = []
    backwards: list[int] = []

    def noted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        forwards.append(1)
        output = transformer.sdpa(query, key, value)
        output.register_hook(lambda pull: backwards.append(1))
        return output

    counts: list[tuple[int, int]] = []

    class Counting(Gauge):
        """Notes what the two calls pass through that are timed before anything else of a part."""

        def samples(self, call: Callable[[], object], count: int) -> list[float]:
            forwards.clear(), backwards.clear()
            call(), call()
            counts.append((len(forwards), len(backwards)))
            return [self.us] * count

    replaced(monkeypatch, Whose.SDPA, noted)
    timed(Counting(), attention=(Whose.SDPA,), numbers=(Numbers.FLOAT32,))
    assert counts[: len(Part)] == [(2, 0), (0, 2), (2, 2)]


def test_memory_is_that_of_one_attention_alone_inputs_included() -> None:
    gauge = Gauge()
    (rows, _) = timed(gauge, attention=(Whose.SDPA,))
    inputs = 4 * 128 * 16 * 2  # of bfloat16
    assert gauge.log[:4] == ["allocated", "peak forgotten", "allocated", "peak"]
    assert rows[0].before_bytes == 100_000 + inputs
    assert rows[0].peak_bytes == 105_000 + inputs


def test_kernels_of_both_passes_are_known_before_so_that_all_cores_compile_them() -> None:
    cases = Options(tables=(Table.FLASH,), head_dims=(64,), contexts=(1024, 2048), numbers=(Numbers.BFLOAT16,)).cases()
    assert pass_bench.sources(cases, samples.A30) == [], "PyTorch's gradients are believed faster"
    problem = gradient_problem.backward_of(cases[0].problem)
    variant = gradient_kernels.variant()
    entry = samples.tuned(problem, variant)
    store.merge(resources.user_cache(), samples.H200, problem.op, [entry])
    sources = pass_bench.sources(cases, samples.H200)
    assert {(source.name, source.traits.lse) for source in sources} == {("forward", True), ("backward", False)}
    assert sum(source.name == "backward" for source in sources) == 1, "the other call's neighbour"


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "state"),
    [(torch.OutOfMemoryError("CUDA out of memory"), State.MEMORY), (RuntimeError("no kernel"), State.FAILED)],
)
def test_one_that_fails_says_so_and_the_others_go_on(
    error: Exception, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*tensors: Tensor) -> Tensor:
        raise error

    replaced(monkeypatch, Whose.NAIVE, fails)
    for rows in timed():
        assert [row.state for row in rows] == [State.OK, state, State.OK]
        assert str(error) in rows[1].detail
        assert not rows[1].times


@pytest.mark.parametrize("pass_", ["output", "gradient"])
def test_wrong_numbers_are_not_timed(pass_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = transformer.sdpa(query, key, value)
        return output + 1.0 if pass_ == "output" else 2.0 * output - output.detach()

    replaced(monkeypatch, Whose.OURS, wrong)
    for rows in timed():
        assert [row.state for row in rows] == [State.WRONG, State.OK, State.OK]
        assert pass_ in rows[0].detail
        assert not rows[0].times


def test_a_broken_context_ends_the_run_with_a_sentence() -> None:
    gauge = Gauge()
    gauge.breaks = True
    with pytest.raises(StateError, match="one of autoattn, naive, sdpa broke it on flash 128 D16 bf16"):
        timed(gauge)


# --- what is written --------------------------------------------------------------------------------------------------

CASE = Case(table=Table.FLASH, context=32768, head_dim=64, numbers=Numbers.FLOAT32)


def row_of(whose: Whose, both: float, **facts: Any) -> Row:
    parts = {Part.FORWARD: both / 3, Part.BACKWARD: both / 2, Part.BOTH: both}
    times = {part: Time(samples_us=(ms * 1e3,) * 3, graph=ms < 0.1) for part, ms in parts.items()}
    known: dict[str, Any] = {"before_bytes": 8 << 20, "peak_bytes": 16 << 20, "ran": "flash"} | facts
    return Row(case=CASE, whose=whose, times=times, **known)


ROWS = [
    row_of(Whose.OURS, 0.12),
    Row(case=CASE, whose=Whose.NAIVE, state=State.MEMORY, detail=HOSTILE),
    row_of(Whose.SDPA, 0.36),
]


def run_of(*cases: list[Row]) -> Run:
    return Run(
        machine={"card": "NVIDIA H200, sm_90, 132 SMs"}, command="autoattn bench passes", options=Options(),
        cases=list(cases),
    )  # fmt: skip


def test_the_tables_have_every_part_mark_and_reason() -> None:
    text = report.markdown_text(run_of(ROWS))
    lines = [line for line in text.splitlines() if line.startswith("| 32,768 †")]
    assert lines[0] == (
        "| 32,768 † | 64 | fp32 | 0.040 g | 0.060 g | 0.120 | out of memory | out of memory | out of memory | 0.120 "
        "| 0.180 | 0.360 | - | - | - | 3.00x | 3.00x | 3.00x |"
    )
    assert lines[1] == (
        "| 32,768 † | 64 | fp32 | 8.0 | 16.0 | - | - | 8.0 | 16.0 | autoattn: flash; naive: -; sdpa: flash |"
    )
    assert "**Not finished: 1 of 74 calls are here.**" in text
    assert "- flash 32,768 D64 fp32, naive: out of memory, " in text
    assert "<script>" not in text
    assert "\x1b" not in text


def test_every_line_of_a_table_has_as_many_cells() -> None:
    blocks = re.findall(r"(?:^\|.*\n)+", report.markdown_text(run_of(ROWS, ROWS)), flags=re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        assert len({len(re.split(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
        assert len(block.splitlines()) == 4


def test_the_csv_has_every_sample() -> None:
    rows = list(csv.DictReader(io.StringIO(report.csv_text(run_of(ROWS)))))
    assert [(row["attention"], row["part"]) for row in rows[:4]] == [
        ("autoattn", "forward"), ("autoattn", "backward"), ("autoattn", "both"), ("naive", "forward"),
    ]  # fmt: skip
    assert rows[0]["samples_us"] == "40 40 40"
    assert (rows[0]["timing"], rows[2]["timing"], rows[3]["timing"]) == ("graph", "events", "")
    assert (rows[6]["over_autoattn"], rows[6]["peak_bytes"]) == ("3", str(16 << 20))


@pytest.mark.parametrize("draw", [report.time_text, report.memory_text])
def test_the_charts_have_a_bar_for_each_row_with_numbers(draw: Any) -> None:
    root = ElementTree.fromstring(draw(run_of(ROWS)))
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert [(title or "").partition(":")[0] for title in titles] == ["autoattn", "sdpa"]


def test_bars_of_memory_share_one_scale_so_that_growth_is_seen() -> None:
    half = [replace(row_of(Whose.OURS, 1.0), case=replace(CASE, context=16384), peak_bytes=8 << 20)]
    root = ElementTree.fromstring(report.memory_text(run_of(half, ROWS)))
    bars = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.find("{*}title") is not None]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[1] == pytest.approx(2 * widths[0], rel=1e-2)


def test_ours_is_compared_part_by_part() -> None:
    assert over_ours(ROWS, Whose.SDPA, Part.BACKWARD) == pytest.approx(3.0)
    assert over_ours(ROWS, Whose.NAIVE, Part.BACKWARD) != over_ours(ROWS, Whose.NAIVE, Part.BACKWARD)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """A card whose rows are ROWS; gives the options that were asked for."""
    requested: list[Options] = []

    def rows(options: Options) -> Iterator[list[Row]]:
        requested.append(options)
        yield ROWS

    monkeypatch.setattr(kernel_bench, "machine", lambda peers: {"card": "NVIDIA H200, sm_90, 132 SMs"})
    monkeypatch.setattr(pass_bench, "rows", rows)
    return requested


def test_the_command_writes_tables_and_plots_and_says_how_to_repeat_it(
    planted: list[Options], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--tables", "flash", "--contexts", "32768", "--head-dims", "64", "--dtype", "fp32"]
    assert run(["bench", "passes", *words, "--out", str(tmp_path)]) == 0
    assert planted == [
        Options(tables=(Table.FLASH,), contexts=(32768,), head_dims=(64,), numbers=(Numbers.FLOAT32,))
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "passes-memory.svg", "passes.csv", "passes.md", "passes.svg",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "[1/1] flash 32,768 D64 fp32: autoattn 0.040 g / 0.060 g / 0.120 ms, 16.0 MiB; naive out of memory" in said
    assert (
        "autoattn bench passes --tables flash --contexts 32768 --head-dims 64 --attention autoattn,naive,sdpa "
        f"--dtype fp32 --seconds 0.1 --seed 0 --out {tmp_path}"
    ) in (tmp_path / "passes.md").read_text(encoding="utf-8")


def test_all_of_the_seed_runs_by_default(planted: list[Options], tmp_path: Path) -> None:
    assert run(["bench", "passes", "--out", str(tmp_path)]) == 0
    assert planted == [Options(numbers=(Numbers.FLOAT32, Numbers.BFLOAT16))]


def test_without_a_gpu_it_refuses_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_device.set_device(monkeypatch, None)
    assert run(["bench", "passes", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--tables", "naive"), "--tables must be of attention, flash, got 'naive'"),
        (("--head-dims", "a"), "--head-dims must be whole numbers from 1, got 'a'"),
        (("--dtype", "fp16"), "--dtype must be of fp32, bf16, got 'fp16'"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    words: tuple[str, str], sentence: str, planted: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "passes", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not planted
