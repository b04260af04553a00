"""autoattn.frames: what a cache, a journal, samples of finals and a benchmark hold, as data frames of stated dtypes."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import finals_rounds
import pytest
import samples
import searched
from checkout_paths import CHECKOUT
from command_line import Run, autoattn, user_cache  # noqa: F401 - fixtures

from autoattn import frames
from autoattn.cache import finals_samples, store
from autoattn.core.problem import Op
from autoattn.errors import HostError, UsageError
from autoattn.report import history

PAGE = (CHECKOUT / "docs" / "frames.md").read_text(encoding="utf-8")
MISSING = "needs pandas, which is not installed"
BENCH = (
    "problem,key,contestant,ours,state,median_us,slowed,samples_us\n"
    'one,a,autoattn,1,ok,10.5,0,"10.5 11 10"\none,a,sdpa,0,ok,12,0,"12 12.5 11"\none,a,fa4,0,absent,,,\n'
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with a search and its finals, and a predicted entry."""
    entry = searched.entry_of(samples.problem())
    searched.folder_of(tmp_path / "cache", [entry], trials=12)
    store.merge(tmp_path / "cache", samples.H200, Op.FORWARD, [samples.predicted(samples.problem(batch=1))])
    known = finals_samples.encode(finals_rounds.taken(entry.source_digest, rounds=4))
    finals_samples.path_of(tmp_path / "cache", "h200", entry.problem.key).write_bytes(known)
    return tmp_path / "cache"


def journal_of(folder: Path) -> Path:
    return history.path_of(folder, "h200", searched.entry_of(samples.problem()))


def samples_of(folder: Path) -> Path:
    return finals_samples.path_of(folder, "h200", samples.problem().key)


def test_entries_have_a_row_each_with_their_dtypes_and_no_time_mixes_evidence(folder: Path) -> None:
    pytest.importorskip("pandas", reason=MISSING)
    frame = frames.entries(folder)
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == frames.ENTRIES
    assert list(frame.evidence) == ["measured", "predicted"]
    assert list(frame.time_us) == [400.0, 500.0]
    assert frame.ratio[0] == pytest.approx(0.91)
    assert frame.isna().ratio[1]
    assert len(frames.rivals(folder)) == 3


def test_trials_have_a_row_each_with_a_column_for_each_parameter(folder: Path) -> None:
    pytest.importorskip("pandas", reason=MISSING)
    frame = frames.trials(journal_of(folder))
    assert len(frame) == 12
    assert frame.iloc[-1].time_us == 400.0
    assert set(frame[frame.time_us.isna()].outcome) <= {"compile error"}
    assert str(frame["param.BLOCK_M"].dtype) == "Int64"
    assert frame.ended.is_monotonic_increasing


def test_samples_of_finals_have_a_row_for_each_round_and_contestant(folder: Path) -> None:
    pytest.importorskip("pandas", reason=MISSING)
    frame = frames.finals(samples_of(folder))
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == frames.FINALS
    assert len(frame) == 4 * 3
    assert frame[frame.contestant == "sdpa"].time_us.median() == 431.5
    assert frame[frame.contestant == "sdpa"].digest.isna().all()
    with pytest.raises(UsageError, match="does not exist"):
        frames.finals(folder / "none.finals.json")


def test_a_benchmark_has_its_samples_as_floats_and_another_csv_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason=MISSING)
    (tmp_path / "bench.csv").write_text(BENCH)
    frame = frames.bench(tmp_path / "bench.csv")
    assert list(frame.samples_us) == [[10.5, 11.0, 10.0], [12.0, 12.5, 11.0], []]
    assert list(frame.ours) == [True, False, False]
    assert str(frame.median_us.dtype) == "Float64"
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="must have the columns problem and samples_us"):
        frames.bench(tmp_path / "other.csv")


def test_without_pandas_a_sentence_says_how_to_install_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for call in (frames.entries, frames.rivals, frames.trials, frames.finals, frames.bench):
        with pytest.raises(
            HostError, match=r"need pandas, which is not installed; run pip install 'autoattn\[frames\]'"
        ):
            call(folder)


def test_show_writes_csv_without_pandas(autoattn: Run, user_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    code, out, _ = autoattn("show", "--format", "csv", "--device", "h200", "--evidence", "measured")
    head, *rows = out.splitlines()
    assert (code, head.split(",")) == (0, list(frames.ENTRIES))
    assert any(row.startswith("h200,forward,bf16 B4 H32/8 1024x4096") for row in rows)
    code, _, error = autoattn("show", "--format", "parquet")
    assert (code, "add --out entries.parquet" in error) == (UsageError.exit_code, True)
    code, _, error = autoattn("show", "--format", "parquet", "--out", user_cache / "entries.parquet")
    assert (code, "pip install 'autoattn[frames]'" in error) == (HostError.exit_code, True)


def test_parquet_holds_the_rows_and_their_dtypes(folder: Path) -> None:
    pandas = pytest.importorskip("pandas", reason=MISSING)
    pytest.importorskip("pyarrow", reason="needs pyarrow, which is not installed")
    entry = samples.measured()
    data = frames.parquet(frames.entry_rows([(folder, "h200", entry)]), frames.ENTRIES)
    frame = pandas.read_parquet(io.BytesIO(data))
    assert list(frame.columns) == list(frames.ENTRIES)
    assert (frame.time_us[0], frame.clock_mhz[0]) == (400.0, 1755)


def test_the_page_lists_every_column_in_order() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, flags=re.MULTILINE))
    columns = {"entries": frames.ENTRIES, "rivals": frames.RIVALS, "trials": frames.TRIALS, "finals": frames.FINALS}
    assert {name: row.removesuffix(", param.NAME").split(", ") for name, row in rows.items()} == {
        name: list(known) for name, known in columns.items()
    }


def test_the_examples_of_the_page_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas", reason=MISSING)
    monkeypatch.chdir(folder.parent)
    Path("bench.csv").write_text(BENCH)
    names = {"journal": journal_of(folder), "samples_file": samples_of(folder), "csv": "bench.csv"}
    for example in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(example, names)
    assert names["rounds"].median().idxmin() == "finalist 0"  # type: ignore[attr-defined]
