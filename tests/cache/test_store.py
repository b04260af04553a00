"""The cache file: what is written can be read and reviewed, and what is there is kept."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cache_files import FORWARD, FORWARD_FILE, left_behind, refusal
from checkout_paths import python_path
from samples import A30, H200, certified, measured, predicted, problem, worst

from autoattn.cache import file_format, store
from autoattn.codegen import resources
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.trial import Evidence


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# Round trips


def test_what_was_merged_is_read_back(folder: Path) -> None:
    tidy = [measured(time_us=400.0, rivals=(), choice="kernel", candidates=()), predicted(problem(batch=2))]
    assert tidy[0].measurement is not None
    short = dataclasses.replace(tidy[0].measurement, p20_us=396.0, p80_us=408.0, tflops=171.8)
    tidy[0] = dataclasses.replace(tidy[0], measurement=short)
    tidy[1] = dataclasses.replace(tidy[1], candidates=())
    path = store.merge(folder, H200, FORWARD, tidy)
    assert path == folder / "h200" / FORWARD_FILE == store.path_of(folder, H200, FORWARD)
    file = store.read(path)
    assert (file.schema, file.op, file.device, file.fingerprint) == (1, FORWARD, "h200", H200.fingerprint)
    assert file.entries == store.lookup(folder, H200, FORWARD) == {entry.problem.key: entry for entry in tidy}
    assert store.read_folder(folder) == [file]


def test_merging_again_what_was_read_changes_no_byte(folder: Path) -> None:
    path = store.merge(folder, H200, FORWARD, [measured(time_us=math.pi * 100), predicted(problem(batch=2))])
    before = path.read_bytes()
    store.merge(folder, H200, FORWARD, store.lookup(folder, H200, FORWARD).values())
    assert path.read_bytes() == before
    store.merge(folder, H200, FORWARD, [])
    assert path.read_bytes() == before


def test_the_order_of_merging_leaves_no_trace(tmp_path: Path) -> None:
    entries = [predicted(problem(batch=batch)) for batch in (3, 1, 20)]
    first = store.merge(tmp_path / "one", H200, FORWARD, entries)
    for entry in reversed(entries):
        second = store.merge(tmp_path / "two", H200, FORWARD, [entry])
    assert first.read_bytes() == second.read_bytes()


def test_a_file_is_sorted_and_readable(folder: Path) -> None:
    path = store.merge(folder, H200, FORWARD, [measured(problem(batch=batch)) for batch in (9, 1, 5)])
    text = path.read_text(encoding="utf-8")
    keys = list(json.loads(text)["entries"])
    assert keys == sorted(keys)
    assert len(keys) == 3
    assert text.endswith("}\n")
    assert max(map(len, text.splitlines())) < 120  # a line a fact
    params = list(json.loads(text)["entries"][keys[0]]["params"])
    assert params == sorted(params)
    assert path.stat().st_mode & 0o777 == 0o644


def test_numbers_have_six_significant_digits(folder: Path) -> None:
    path = store.merge(folder, H200, FORWARD, [measured(time_us=1234.56789012)])
    assert '"median_us": 1234.57,' in path.read_text(encoding="utf-8")
    digits = [number.replace(".", "").lstrip("0") for number in re.findall(r"\d+\.\d+", path.read_text("utf-8"))]
    assert max(map(len, digits)) <= 6


def test_whole_numbers_keep_all_digits(folder: Path) -> None:
    record = dataclasses.replace(predicted().search, seed=123456789)
    store.merge(folder, H200, FORWARD, [predicted(search=record)])
    (entry,) = store.lookup(folder, H200, FORWARD).values()
    assert entry.search.seed == 123456789


def test_words_of_any_language_survive(folder: Path) -> None:
    versions = {"driver": "\u2603 \u00e9 \U0001f600 \x1b[31m \n"}
    path = store.merge(folder, H200, FORWARD, [predicted(versions=versions)])
    assert "\u2603" in path.read_text(encoding="utf-8")
    (entry,) = store.lookup(folder, H200, FORWARD).values()
    assert entry.versions == versions


def test_where_there_is_nothing_there_are_no_entries(folder: Path) -> None:
    assert store.lookup(folder, H200, FORWARD) == {}
    assert store.read_folder(folder) == []
    assert not folder.exists()
    assert "must be there, but there is none" in refusal(lambda: store.read(store.path_of(folder, H200, FORWARD)))


def test_read_folder_takes_the_operations_files_alone(folder: Path) -> None:
    store.merge(folder, H200, FORWARD, [predicted()])
    store.merge(folder, A30, FORWARD, [predicted()])
    (folder / "h200" / "notes.json").write_text("not ours")
    (folder / FORWARD_FILE).write_text("not ours")
    assert [file.device for file in store.read_folder(folder)] == ["a30", "h200"]


def test_a_file_that_changed_is_read_anew(folder: Path) -> None:
    path = store.merge(folder, H200, FORWARD, [predicted(time_us=500.0)])
    stamp = path.stat()
    assert [entry.time_us for entry in store.read(path).entries.values()] == [500.0]
    assert store.read(path) is store.read(path)
    store.merge(folder, H200, FORWARD, [predicted(time_us=400.0)])
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # two writes within one tick of the clock
    assert path.stat().st_size == stamp.st_size
    assert [entry.time_us for entry in store.read(path).entries.values()] == [400.0]


def test_what_an_entry_does_not_have_of_its_finals_leaves_no_trace(folder: Path) -> None:
    path = store.merge(folder, H200, FORWARD, [measured(), predicted(problem(batch=2))])
    text = path.read_text(encoding="utf-8")
    for name in ("finals", "worst", "lead", "energy", "objective"):
        assert f'"{name}"' not in text
    assert text.count('"rms_error"') == 1, "of the verdict"
    assert [entry.finals for entry in store.read(path).entries.values()] == [None, None]


def test_what_an_entry_has_of_its_finals_is_read_back(folder: Path) -> None:
    search = dataclasses.replace(measured().search, objective="energy")
    path = store.merge(folder, H200, FORWARD, [certified(search=search)])
    (entry,) = store.read(path).entries.values()
    assert entry.search.objective == "energy"
    assert entry.finals == certified().finals
    assert [tie.source_digest for tie in entry.finals.tied] == ["aa" * 8]
    assert [(rival.lead, rival.energy) for rival in entry.rivals] == [
        (rival.lead, rival.energy) for rival in certified().rivals
    ]


def test_the_worst_case_of_an_entry_is_read_back(folder: Path) -> None:
    path = store.merge(folder, H200, FORWARD, [measured(worst=worst())])
    assert [entry.worst for entry in store.read(path).entries.values()] == [worst()]


def test_the_shipped_entries_read_as_they_always_did() -> None:
    for file in store.read_folder(resources.shipped_cache()):
        path = resources.shipped_cache() / file.device / file.name
        assert file_format.encode(file) == path.read_bytes()


# Merging


def test_merging_trusts_the_file_and_not_what_was_read_before(folder: Path) -> None:
    path = store.merge(folder, H200, FORWARD, [predicted()])
    store.read(path)
    stamp = path.stat()
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 7'))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    store.merge(folder, H200, FORWARD, [predicted(problem(batch=2))])
    assert store.lookup(folder, H200, FORWARD)[problem().key].search.seed == 7


def test_merging_keeps_the_others(folder: Path) -> None:
    store.merge(folder, H200, FORWARD, [predicted(problem(batch=1)), predicted(problem(batch=2))])
    store.merge(folder, H200, FORWARD, [predicted(problem(batch=2), time_us=7.0)])
    times = {entry.problem.batch: entry.time_us for entry in store.lookup(folder, H200, FORWARD).values()}
    assert times == {1: 500.0, 2: 7.0}


def test_a_measured_entry_replaces_any_and_a_predicted_one_only_its_like(folder: Path) -> None:
    def merged(entry: CacheEntry) -> tuple[Evidence, float]:
        store.merge(folder, H200, FORWARD, [entry])
        (stored,) = store.lookup(folder, H200, FORWARD).values()
        return stored.evidence, stored.time_us

    assert merged(predicted(time_us=500.0)) == (Evidence.PREDICTED, 500.0)
    assert merged(predicted(time_us=600.0)) == (Evidence.PREDICTED, 600.0)
    assert merged(measured(time_us=700.0)) == (Evidence.MEASURED, 700.0)
    assert merged(measured(time_us=800.0)) == (Evidence.MEASURED, 800.0)
    assert merged(predicted(time_us=1.0)) == (Evidence.MEASURED, 800.0)


def sister(device: Device) -> Device:
    """A card of the same name with fewer SMs."""
    return dataclasses.replace(device, sm_count=device.sm_count - 4)


def test_measurements_of_two_cards_never_share_a_file(folder: Path) -> None:
    path = store.merge(folder, H200, FORWARD, [measured()])
    before = path.read_bytes()
    message = refusal(lambda: store.merge(folder, sister(H200), FORWARD, [measured(problem(batch=2))]))
    assert H200.fingerprint in message
    assert sister(H200).fingerprint in message
    assert "--cache" in message
    assert path.read_bytes() == before


def test_predictions_never_claim_a_measured_file_for_another_card(folder: Path) -> None:
    path = store.merge(folder, H200, FORWARD, [measured()])
    store.merge(folder, sister(H200), FORWARD, [predicted(problem(batch=2))])
    assert store.read(path).fingerprint == H200.fingerprint
    assert len(store.read(path).entries) == 2


def test_the_first_measurement_makes_a_predicted_file_its_cards(folder: Path) -> None:
    path = store.merge(folder, H200, FORWARD, [predicted()])
    store.merge(folder, sister(H200), FORWARD, [measured(problem(batch=2))])
    assert store.read(path).fingerprint == sister(H200).fingerprint
    assert len(store.read(path).entries) == 2


WRITER = """
import sys
from pathlib import Path
from samples import H200, predicted, problem
from autoattn.cache import store
from autoattn.core.problem import Op
number = int(sys.argv[2])
problems = [problem(batch=1 + number * 20 + place) for place in range(20)]
entries = [predicted(one, report=None, candidates=()) for one in problems]  # small ones are quick
sys.stdin.readline()  # all begin together
for entry in entries:
    store.merge(Path(sys.argv[1]), H200, Op.FORWARD, [entry])
"""


def test_writers_that_merge_at_once_lose_nothing(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": python_path()}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(number)], stdin=subprocess.PIPE, env=environment
        )
        for number in range(4)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.close()
    assert [writer.wait() for writer in writers] == [0] * 4
    batches = sorted(entry.problem.batch for entry in store.lookup(folder, H200, FORWARD).values())
    assert batches == list(range(1, 81))
    assert left_behind(folder) == []
