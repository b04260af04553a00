"""What came of timed training steps: shares, the table, the CSV, the charts, and the command that writes them."""

from __future__ import annotations

import csv
import io
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_device
import pytest

from autoattn.bench import kernel_bench, training_bench
from autoattn.bench.training_results import Mode, Numbers, Options, Row, Run, State, Times, Whose, over_ours
from autoattn.cli.app import run
from autoattn.errors import StateError
from autoattn.report import training_tables

HOSTILE = "<script>alert('1')</script> | `code` \x1b[31m\n# head"


def times(total: float) -> Times:
    return Times(forward_ms=total / 4, backward_ms=total / 2, total_ms=total)


def row_of(whose: Whose, *totals: float, alone: float = 1.0, **facts: Any) -> Row:
    known: dict[str, Any] = {
        "model": "S", "context": 1024, "batch": 4, "layers": 12, "numbers": Numbers.BFLOAT16, "mode": Mode.COMPILED,
        "peak_bytes": 3 << 30, "loss": 9.25, "ran": "cudnn",
    }  # fmt: skip
    return Row(whose=whose, times=tuple(map(times, totals)), alone=(times(alone),) * 3, **known | facts)


def lost(whose: Whose, state: State, detail: str) -> Row:
    return Row(
        model="S", context=1024, batch=4, layers=12, numbers=Numbers.BFLOAT16, mode=Mode.COMPILED, whose=whose,
        state=state, detail=detail,
    )  # fmt: skip


def run_of(*rows: Row, **facts: Any) -> Run:
    return Run(
        machine={"card": "NVIDIA H200, sm_90, 132 SMs"},
        command="autoattn bench model --out bench",
        options=Options(models=("S",), contexts=(1024,)),
        rows=list(rows),
        **facts,
    )


THREE = (
    row_of(Whose.OURS, 36.0, 40.0, 44.0, alone=2.0),
    lost(Whose.NAIVE, State.MEMORY, "CUDA out of memory"),
    row_of(Whose.SDPA, 50.0, 50.0, 50.0),
)


def test_a_row_s_figures_are_those_of_its_steps() -> None:
    ours = THREE[0]
    assert (ours.mean("forward_ms"), ours.mean("backward_ms"), ours.mean("total_ms")) == (10.0, 20.0, 40.0)
    assert ours.spread("total_ms") == pytest.approx(4.0)
    assert ours.share == pytest.approx(12 * 1.5 / 40.0)
    assert ours.bound == pytest.approx(1 / (1 - 0.45))
    assert ours.tokens_per_second == pytest.approx(4 * 1024 / 0.040)


def test_attention_that_takes_longer_alone_than_the_step_has_no_bound() -> None:
    assert math.isnan(row_of(Whose.OURS, 10.0, alone=2.0).bound)
    assert math.isnan(THREE[1].share)


def test_ours_is_compared_within_a_case_alone_by_the_median_of_rounds() -> None:
    assert over_ours(list(THREE), Whose.SDPA) == pytest.approx(1.25)
    assert over_ours(list(THREE), Whose.NAIVE) is None
    assert over_ours([THREE[2]], Whose.SDPA) is None
    other = row_of(Whose.SDPA, 10.0, context=256)
    assert [len(rows) for rows in run_of(*THREE, other).cases()] == [3, 1]


def test_the_table_says_every_time_share_and_reason() -> None:
    text = training_tables.markdown_text(run_of(*THREE))
    lines = [line for line in text.splitlines() if line.startswith("| S 1,024 bf16 compiled")]
    assert lines[0] == (
        "| S 1,024 bf16 compiled | autoattn | 10.00 ± 1.00 | 20.00 ± 2.00 | 40.00 ± 4.00 | 1.00x | 45% | 1.82x | 3.00 "
        "| cudnn |"
    )
    assert lines[1] == "| S 1,024 bf16 compiled | naive | out of memory | - | - | - | - | - | - | - |"
    assert lines[2].split(" | ")[5] == "1.25x"
    assert "- S 1,024 bf16 compiled, naive: out of memory, CUDA out of memory" in text
    assert "3 steps of warm-up" in text
    assert "**Not finished: 3 of 16 rows are here.**" in text


def test_every_line_of_the_table_has_as_many_cells() -> None:
    text = training_tables.markdown_text(run_of(*THREE, lost(Whose.FLEX, State.FAILED, HOSTILE)))
    counts = {len(re.split(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")}
    assert len(counts) == 1
    assert "<script>" not in text
    assert "\x1b" not in text


def test_the_csv_has_every_sample() -> None:
    rows = list(csv.DictReader(io.StringIO(training_tables.csv_text(run_of(*THREE)))))
    assert [row["attention"] for row in rows] == ["autoattn", "naive", "sdpa"]
    ours = rows[0]
    assert ours["total_samples_ms"] == "36 40 44"
    assert ours["forward_samples_ms"] == "9 10 11"
    assert (ours["attention_share"], ours["peak_bytes"], ours["warmup"]) == ("0.45", str(3 << 30), "3")
    assert (rows[1]["state"], rows[1]["total_ms"], rows[1]["detail"]) == ("out of memory", "", "CUDA out of memory")


@pytest.mark.parametrize("draw", [training_tables.speed_text, training_tables.memory_text])
def test_the_charts_have_a_bar_for_each_row_with_times(draw: Any) -> None:
    root = ElementTree.fromstring(draw(run_of(*THREE)))
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert [(title or "").partition(":")[0] for title in titles] == ["autoattn", "sdpa"]


def test_bars_of_memory_share_one_scale() -> None:
    small, large = (
        row_of(Whose.OURS, 1.0, peak_bytes=1 << 30),
        row_of(Whose.OURS, 1.0, context=2048, peak_bytes=4 << 30),
    )
    root = ElementTree.fromstring(training_tables.memory_text(run_of(small, large)))
    bars = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.find("{*}title") is not None]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[1] == pytest.approx(4 * widths[0], rel=1e-2)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """A card whose rows are THREE; gives the options that were asked for."""
    requested: list[Options] = []

    def rows(sizes: Any, options: Options) -> Iterator[Row]:
        requested.append(options)
        yield from THREE

    monkeypatch.setattr(kernel_bench, "machine", lambda peers: {"card": "NVIDIA H200, sm_90, 132 SMs"})
    monkeypatch.setattr(training_bench, "rows", rows)
    return requested


def test_without_a_gpu_the_command_refuses_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_device.set_device(monkeypatch, None)
    assert run(["bench", "model", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said == (
        "autoattn: autoattn bench needs an NVIDIA GPU in this machine, found none; run it where there is one\n"
    )
    assert not (tmp_path / "out").exists()


def test_the_command_writes_table_csv_and_charts(
    planted: list[Options], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--models", "S,2.7B", "--contexts", "256,1024", "--dtype", "bf16", "--modes", "compiled", "--steps", "7"]
    assert run(["bench", "model", *words, "--out", str(tmp_path)]) == 0
    assert planted == [
        Options(
            models=("S", "2.7B"), contexts=(256, 1024), numbers=(Numbers.BFLOAT16,), modes=(Mode.COMPILED,), steps=7
        )
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model-memory.svg", "model.csv", "model.md", "model.svg",
    ]  # fmt: skip
    assert "total 40.00 ms, attention 45%" in capsys.readouterr().out
    text = (tmp_path / "model.md").read_text(encoding="utf-8")
    assert (
        "autoattn bench model --models S,2.7B --contexts 256,1024 --attention autoattn,naive,sdpa,flex --dtype bf16 "
        f"--modes compiled --batch 4 --warmup 3 --steps 7 --limit 120 --out {tmp_path}"
    ) in text


def test_all_of_the_seed_runs_by_default(planted: list[Options], tmp_path: Path) -> None:
    assert run(["bench", "model", "--out", str(tmp_path)]) == 0
    assert planted == [Options(models=("S", "M", "L", "XL", "2.7B"))]
    assert planted[0].planned == 5 * 6 * 4 * 2 * 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--models", "S,XXL"), "--models must be of S, M, L, XL, 2.7B, got 'S,XXL'"),
        (("--contexts", "1k"), "--contexts must be whole numbers from 1, got '1k'"),
        (("--attention", ""), "--attention must be of autoattn, naive, sdpa, flex, got ''"),
        (("--dtype", "fp16"), "--dtype must be of fp32, bf16, got 'fp16'"),
        (("--steps", "0"), "--steps"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    words: tuple[str, str], sentence: str, planted: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "model", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not planted


def test_an_interrupted_run_keeps_its_rows(
    planted: list[Options], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def rows(sizes: Any, options: Options) -> Iterator[Row]:
        yield THREE[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(training_bench, "rows", rows)
    assert run(["bench", "model", "--out", str(tmp_path)]) == 130
    assert "40.00 ± 4.00" in (tmp_path / "model.md").read_text(encoding="utf-8")


def test_a_broken_card_keeps_the_rows_before(
    planted: list[Options], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def rows(sizes: Any, options: Options) -> Iterator[Row]:
        yield THREE[0]
        raise StateError("the GPU must go on after each row")

    monkeypatch.setattr(training_bench, "rows", rows)
    assert run(["bench", "model", "--out", str(tmp_path)]) == 1
    assert "40.00 ± 4.00" in (tmp_path / "model.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", [("bench", "./model"), ("bench", "shapes/model"), ("bench", "nothere.yaml")])
def test_other_words_behind_bench_are_shapes_files(
    words: tuple[str, ...], planted: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert "must be a YAML file" in capsys.readouterr().err
    assert not planted


def test_a_file_named_model_is_reached_by_its_folder_or_behind_options(
    planted: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "--seed", "0", "model"]) == 2
    assert "model must be a YAML file" in capsys.readouterr().err


def test_help_tells_the_two_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert "autoattn bench [OPTIONS] {SHAPES}" in text
    assert "autoattn bench model" in text
    assert run(["bench", "model", "--help"]) == 0
    assert "autoattn bench model [OPTIONS]" in capsys.readouterr().out
    assert run(["--help"]) == 0
    assert "bench model" in capsys.readouterr().out
