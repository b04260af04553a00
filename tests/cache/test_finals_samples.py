"""Raw samples: what was written is read back, and what is damaged is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import samples
from cache_files import refusal
from finals_rounds import taken

from autoattn.cache import finals_samples

WINNER = "ab" * 8


def test_what_was_written_is_read_back_in_the_order_of_each_round(tmp_path: Path) -> None:
    path = finals_samples.path_of(tmp_path, "h200", samples.problem().key)
    assert finals_samples.read(path) is None
    known = taken(WINNER)
    finals_samples.write(path, known)
    read_back = finals_samples.read(path)
    assert read_back == known
    assert read_back is not None
    assert list(read_back.rounds[0].times_us) == ["finalist 1", "sdpa", "finalist 0"], "the order is kept"
    assert path == tmp_path / "h200" / "studies" / f"{samples.problem().key}.finals.json"


def test_a_file_has_a_line_for_each_round() -> None:
    lines = finals_samples.encode(taken(WINNER, rounds=5)).decode().splitlines()
    assert sum('"times_us"' in line for line in lines) == 5
    assert json.loads(finals_samples.encode(taken(WINNER, rounds=5)))["winner"] == WINNER


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: whole.update(schema=2),
        lambda whole: whole.update(rounds=[]),
        lambda whole: whole["rounds"][0]["times_us"].pop("sdpa"),
        lambda whole: whole["rounds"][0]["times_us"].update(sdpa=-1.0),
        lambda whole: whole["rounds"][0]["times_us"].update(sdpa="1"),
        lambda whole: whole["kernels"].update({"finalist 7": WINNER}),
        lambda whole: whole.pop("winner"),
    ],
)
def test_damaged_samples_are_refused_in_a_sentence(tmp_path: Path, change: object) -> None:
    assert callable(change)
    whole = json.loads(finals_samples.encode(taken(WINNER, rounds=3)))
    change(whole)
    path = tmp_path / "some.finals.json"
    path.write_text(json.dumps(whole))
    assert "are damaged" in refusal(lambda: finals_samples.read(path))
    assert "are damaged" in refusal(lambda: finals_samples.decode(b"\xff", path))


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "must be writable" in refusal(
        lambda: finals_samples.write(tmp_path / "file" / "x.finals.json", taken(WINNER))
    )
    (tmp_path / "folder.finals.json").mkdir()
    assert "must be readable" in refusal(lambda: finals_samples.read(tmp_path / "folder.finals.json"))
