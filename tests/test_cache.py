"""The cache file: what is written can be read and reviewed, what is there is kept, what is damaged is left alone."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import A30, H200, measured, predicted, problem

from autoattn import cache
from autoattn.device import Device
from autoattn.entry import CacheEntry
from autoattn.errors import CacheError
from autoattn.problem import Op
from autoattn.trial import Evidence

ROOT = Path(__file__).parent
FORWARD = Op.FORWARD


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(CacheError) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500
    return message


def left_behind(folder: Path) -> list[str]:
    """Every file in a folder but cache files and locks."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [str(path) for path in paths if path.suffix != ".lock" and path.name != "forward.json"]


# Round trips


def test_what_was_merged_is_read_back(folder: Path) -> None:
    tidy = [measured(time_us=400.0, rivals=(), choice="kernel", candidates=()), predicted(problem(batch=2))]
    tidy[0] = dataclasses.replace(
        tidy[0], measurement=dataclasses.replace(tidy[0].measurement, p20_us=396.0, p80_us=408.0, tflops=171.8)
    )
    tidy[1] = dataclasses.replace(tidy[1], candidates=())
    path = cache.merge(folder, H200, FORWARD, tidy)
    assert path == folder / "h200" / "forward.json" == cache.path_of(folder, H200, FORWARD)
    file = cache.read(path)
    assert (file.schema, file.op, file.device, file.fingerprint) == (1, FORWARD, "h200", H200.fingerprint)
    assert file.entries == cache.lookup(folder, H200, FORWARD) == {entry.problem.key: entry for entry in tidy}
    assert cache.read_folder(folder) == [file]


def test_merging_again_what_was_read_changes_no_byte(folder: Path) -> None:
    path = cache.merge(folder, H200, FORWARD, [measured(time_us=math.pi * 100), predicted(problem(batch=2))])
    before = path.read_bytes()
    cache.merge(folder, H200, FORWARD, cache.lookup(folder, H200, FORWARD).values())
    assert path.read_bytes() == before
    cache.merge(folder, H200, FORWARD, [])
    assert path.read_bytes() == before


def test_the_order_of_merging_leaves_no_trace(tmp_path: Path) -> None:
    entries = [predicted(problem(batch=batch)) for batch in (3, 1, 20)]
    one = cache.merge(tmp_path / "one", H200, FORWARD, entries)
    for entry in reversed(entries):
        two = cache.merge(tmp_path / "two", H200, FORWARD, [entry])
    assert one.read_bytes() == two.read_bytes()


def test_a_file_is_sorted_and_readable(folder: Path) -> None:
    path = cache.merge(folder, H200, FORWARD, [measured(problem(batch=batch)) for batch in (9, 1, 5)])
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
    path = cache.merge(folder, H200, FORWARD, [measured(time_us=1234.56789012)])
    assert '"median_us": 1234.57,' in path.read_text(encoding="utf-8")
    digits = [number.replace(".", "").lstrip("0") for number in re.findall(r"\d+\.\d+", path.read_text("utf-8"))]
    assert max(map(len, digits)) <= 6


def test_whole_numbers_keep_all_digits(folder: Path) -> None:
    record = dataclasses.replace(predicted().search, seed=123456789)
    cache.merge(folder, H200, FORWARD, [predicted(search=record)])
    (entry,) = cache.lookup(folder, H200, FORWARD).values()
    assert entry.search.seed == 123456789


def test_words_of_any_language_survive(folder: Path) -> None:
    versions = {"driver": "\u2603 \u00e9 \U0001f600 \x1b[31m \n"}
    path = cache.merge(folder, H200, FORWARD, [predicted(versions=versions)])
    assert "\u2603" in path.read_text(encoding="utf-8")
    (entry,) = cache.lookup(folder, H200, FORWARD).values()
    assert entry.versions == versions


def test_where_there_is_nothing_there_are_no_entries(folder: Path) -> None:
    assert cache.lookup(folder, H200, FORWARD) == {}
    assert cache.read_folder(folder) == []
    assert not folder.exists()
    assert "must be there, but there is none" in refusal(lambda: cache.read(cache.path_of(folder, H200, FORWARD)))


def test_read_folder_takes_the_operations_files_alone(folder: Path) -> None:
    cache.merge(folder, H200, FORWARD, [predicted()])
    cache.merge(folder, A30, FORWARD, [predicted()])
    (folder / "h200" / "notes.json").write_text("not ours")
    (folder / "forward.json").write_text("not ours")
    assert [file.device for file in cache.read_folder(folder)] == ["a30", "h200"]


def test_a_file_that_changed_is_read_anew(folder: Path) -> None:
    path = cache.merge(folder, H200, FORWARD, [predicted(time_us=500.0)])
    stamp = path.stat()
    assert [entry.time_us for entry in cache.read(path).entries.values()] == [500.0]
    assert cache.read(path) is cache.read(path)
    cache.merge(folder, H200, FORWARD, [predicted(time_us=400.0)])
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # two writes within one tick of the clock
    assert path.stat().st_size == stamp.st_size
    assert [entry.time_us for entry in cache.read(path).entries.values()] == [400.0]


# Merging


def test_merging_trusts_the_file_and_not_what_was_read_before(folder: Path) -> None:
    path = cache.merge(folder, H200, FORWARD, [predicted()])
    cache.read(path)
    stamp = path.stat()
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 7'))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    cache.merge(folder, H200, FORWARD, [predicted(problem(batch=2))])
    assert cache.lookup(folder, H200, FORWARD)[problem().key].search.seed == 7


def test_merging_keeps_the_others(folder: Path) -> None:
    cache.merge(folder, H200, FORWARD, [predicted(problem(batch=1)), predicted(problem(batch=2))])
    cache.merge(folder, H200, FORWARD, [predicted(problem(batch=2), time_us=7.0)])
    times = {entry.problem.batch: entry.time_us for entry in cache.lookup(folder, H200, FORWARD).values()}
    assert times == {1: 500.0, 2: 7.0}


def test_a_measured_entry_replaces_any_and_a_predicted_one_only_its_like(folder: Path) -> None:
    def merged(entry: CacheEntry) -> tuple[Evidence, float]:
        cache.merge(folder, H200, FORWARD, [entry])
        (found,) = cache.lookup(folder, H200, FORWARD).values()
        return found.evidence, found.time_us

    assert merged(predicted(time_us=500.0)) == (Evidence.PREDICTED, 500.0)
    assert merged(predicted(time_us=600.0)) == (Evidence.PREDICTED, 600.0)
    assert merged(measured(time_us=700.0)) == (Evidence.MEASURED, 700.0)
    assert merged(measured(time_us=800.0)) == (Evidence.MEASURED, 800.0)
    assert merged(predicted(time_us=1.0)) == (Evidence.MEASURED, 800.0)


def sister(device: Device) -> Device:
    """A card of the same name with fewer SMs."""
    return dataclasses.replace(device, sm_count=device.sm_count - 4)


def test_measurements_of_two_cards_never_share_a_file(folder: Path) -> None:
    path = cache.merge(folder, H200, FORWARD, [measured()])
    before = path.read_bytes()
    message = refusal(lambda: cache.merge(folder, sister(H200), FORWARD, [measured(problem(batch=2))]))
    assert H200.fingerprint in message
    assert sister(H200).fingerprint in message
    assert "--cache" in message
    assert path.read_bytes() == before


def test_predictions_never_claim_a_measured_file_for_another_card(folder: Path) -> None:
    path = cache.merge(folder, H200, FORWARD, [measured()])
    cache.merge(folder, sister(H200), FORWARD, [predicted(problem(batch=2))])
    assert cache.read(path).fingerprint == H200.fingerprint
    assert len(cache.read(path).entries) == 2


def test_the_first_measurement_makes_a_predicted_file_its_cards(folder: Path) -> None:
    path = cache.merge(folder, H200, FORWARD, [predicted()])
    cache.merge(folder, sister(H200), FORWARD, [measured(problem(batch=2))])
    assert cache.read(path).fingerprint == sister(H200).fingerprint
    assert len(cache.read(path).entries) == 2


WRITER = """
import sys
from pathlib import Path
from samples import H200, predicted, problem
from autoattn import cache
from autoattn.problem import Op
number = int(sys.argv[2])
problems = [problem(batch=1 + number * 20 + place) for place in range(20)]
entries = [predicted(one, report=None, candidates=()) for one in problems]  # small ones are quick
sys.stdin.readline()  # all begin together
for entry in entries:
    cache.merge(Path(sys.argv[1]), H200, Op.FORWARD, [entry])
"""


def test_writers_that_merge_at_once_lose_nothing(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT.parent}"}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(number)], stdin=subprocess.PIPE, env=environment
        )
        for number in range(8)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.close()
    assert [writer.wait() for writer in writers] == [0] * 8
    batches = sorted(entry.problem.batch for entry in cache.lookup(folder, H200, FORWARD).values())
    assert batches == list(range(1, 161))
    assert left_behind(folder) == []


# What is not a cache file of ours is refused in a sentence and left as it is


def valid(folder: Path) -> tuple[Path, str]:
    path = cache.merge(folder, H200, FORWARD, [measured(), predicted(problem(batch=1))])
    return path, path.read_text(encoding="utf-8")


def untouched(path: Path, data: bytes) -> str:
    """Writes `data`, checks that nobody reads it, that merging leaves it alone, and returns what reading says."""
    path.write_bytes(data)
    message = refusal(lambda: cache.read(path))
    folder = path.parent.parent
    assert refusal(lambda: cache.lookup(folder, H200, FORWARD)) == message
    assert refusal(lambda: cache.read_folder(folder)) == message
    assert refusal(lambda: cache.merge(folder, H200, FORWARD, [measured(problem(batch=3))])) == message
    assert path.read_bytes() == data
    assert left_behind(folder) == []
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is damaged"),
        (b"\n", "is damaged"),
        (b"null", "must be an autoattn cache file"),
        (b"[]", "must be an autoattn cache file"),
        (b"{}", "must be an autoattn cache file"),
        (b'{"schema": 1}', "must be an autoattn cache file"),
        (b'{"entries": {}}', "must be an autoattn cache file"),
        (b'{"schema": 2, "entries": {}}', "must have schema 1, got 2; use a matching autoattn"),
        (b'{"schema": "1", "entries": {}}', "must have schema 1, got '1'"),
        (b'{"schema": 1.0, "entries": {}}', "is damaged"),
        (b'{"schema": true, "entries": {}}', "is damaged"),
        (b'{"schema": 1, "entries": {}}', "missing required field"),
        (b'{"schema": ' + b"9" * 5000 + b', "entries": {}}', "is damaged"),
        (b'{"schema": "' + b"x" * 100_000 + b'", "entries": {}}', "must have schema 1, got 'xxx"),
        (b"[" * 100_000, "is damaged"),
        (b'{"schema": 1, "entries": {"a": ' * 50_000, "is damaged"),
        (b'{"a": 1, "a": 1}', "'a' stands twice in one object"),
        (b"\xff\xfe\x00", "is damaged"),
        (b"\x00" * 100, "is damaged"),
        (b"<<<<<<< HEAD\n", "is damaged"),
        (b"version: 1\n", "is damaged"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_foreign_or_newer_file_is_refused(folder: Path, data: bytes, words: str) -> None:
    assert words in untouched(valid(folder)[0], data)


def test_a_file_cut_off_anywhere_is_refused(folder: Path) -> None:
    path, text = valid(folder)
    for end in range(0, len(text) - 2, len(text) // 15):
        untouched(path, text.encode()[:end])


def test_a_file_that_is_not_utf8_is_refused(folder: Path) -> None:
    path, text = valid(folder)
    assert "is damaged" in untouched(path, text.replace("sdpa-flash", "sdpa-\xe9").encode("latin-1"))
    assert "is damaged" in untouched(path, text.encode("utf-16"))
    assert "is damaged" in untouched(path, text.replace("sdpa-flash", "\\ud800").encode())


def test_a_huge_file_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = valid(folder)
    monkeypatch.setattr(cache, "MAX_BYTES", len(text) - 1)
    assert "must be at most" in untouched(path, text.encode())


def test_a_file_never_grows_beyond_what_can_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = valid(folder)
    monkeypatch.setattr(cache, "MAX_BYTES", len(text) + 10)
    message = refusal(lambda: cache.merge(folder, H200, FORWARD, [measured(problem(batch=3))]))
    assert "it would be larger" in message
    assert path.read_text(encoding="utf-8") == text


def test_a_folder_in_place_of_the_file_is_refused(folder: Path) -> None:
    path = cache.path_of(folder, H200, FORWARD)
    path.mkdir(parents=True)
    assert "Is a directory" in refusal(lambda: cache.read(path))
    assert "Is a directory" in refusal(lambda: cache.lookup(folder, H200, FORWARD))
    assert "Is a directory" in refusal(lambda: cache.merge(folder, H200, FORWARD, [predicted()]))
    assert path.is_dir()


def test_a_file_of_another_device_is_refused(folder: Path) -> None:
    _, text = valid(folder)
    path = cache.path_of(folder, A30, FORWARD)
    path.parent.mkdir()
    path.write_text(text)
    for act in (
        lambda: cache.lookup(folder, A30, FORWARD),
        lambda: cache.merge(folder, A30, FORWARD, [predicted()]),
    ):
        assert "must hold forward on a30, got forward on 'h200'" in refusal(act)
    assert path.read_text() == text


def within(entry: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    part: Any = entry
    for step in path[:-1]:
        part = part[step]
    if value is ...:
        del part[path[-1]]
    else:
        part[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("template",), "../../etc/passwd", "a template is named family/operation"),
        (("template",), "gluon/forward", "there is none"),
        (("template",), "x" * 10**6, "a template is named family/operation"),
        (("params", "BLOCK_M"), 48, "BLOCK_M of triton/forward must be one of"),
        (("params", "BLOCK_M"), "64", "BLOCK_M of triton/forward must be one of"),
        (("params", "BLOCK_M"), 64.0, "got `float`"),
        (("params", "BLOCK_M"), 10**30, "BLOCK_M of triton/forward must be one of"),
        (("params", "PERSISTENT"), True, "PERSISTENT of triton/forward must be one of"),
        (("params", "softmax"), "online\n{{ 7 * 7 }}", "softmax of triton/forward must be one of"),
        (("params", "BLOCK_M"), ..., "got 'BLOCK_M' amiss"),
        (("params", "import os"), 1, "got 'import os' amiss"),
        (("candidates", 0, "params", "BLOCK_M"), 48, "BLOCK_M of triton/forward must be one of"),
        (("candidates", 0, "params", "zzz"), 48, "got 'zzz' amiss"),
        (("candidates", 0, "time_us"), 0.0, "is not above 0"),
        (("measurement", "median_us"), 0.0, "is not above 0"),
        (("measurement", "median_us"), -1.0, "is not above 0"),
        (("measurement", "median_us"), "1", "Expected `float`, got `str`"),
        (("measurement", "median_us"), math.nan, "is damaged"),
        (("measurement", "median_us"), math.inf, "is damaged"),
        (("measurement", "median_us"), 10**400, "is damaged"),
        (("measurement",), None, "a measured entry must rest on"),
        (("verdict", "ok"), False, "a measured entry must rest on"),
        (("verdict",), ..., "a measured entry must rest on"),
        (("evidence",), "predicted", "a predicted entry must rest on"),
        (("evidence",), "believed", "Invalid enum value 'believed'"),
        (("rivals", 0, "measurement", "median_us"), 0, "is not above 0"),
        (("choice",), "sdpa-other", "the choice 'sdpa-other' of forward_bfloat16"),
        (("problem", "head_dim"), 999, "head_dim must be at most 256, got 999"),
        (("problem", "heads_q"), 64, "holds the problem"),
        (("problem", "op"), "backward", "Invalid enum value"),
        (("search",), ..., "missing required field `search`"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_an_entry_that_no_tuner_wrote_is_refused(
    folder: Path, path: tuple[str | int, ...], value: Any, words: str
) -> None:
    file, text = valid(folder)
    document = json.loads(text)
    within(document["entries"][problem().key], path, value)
    assert words in untouched(file, json.dumps(document).encode())


def test_an_entry_under_another_key_is_refused(folder: Path) -> None:
    path, text = valid(folder)
    document = json.loads(text)
    document["entries"]["x" * 100_000] = document["entries"].pop(problem().key)
    assert "holds the problem" in untouched(path, json.dumps(document).encode())


def test_a_problem_that_stands_twice_is_refused(folder: Path) -> None:
    path, text = valid(folder)
    key = problem().key
    doubled = text.replace(f'"{problem(batch=1).key}": {{', f'"{key}": {{}},\n"{problem(batch=1).key}": {{')
    assert f"'{key}' stands twice" in untouched(path, doubled.encode())


# What could not be read back is never written


@pytest.mark.parametrize(
    "changes",
    [
        {"time_us": math.nan},
        {"time_us": math.inf},
        {"time_us": -1.0},
        {"rivals": (dataclasses.replace(measured().rivals[0], max_error=math.nan),), "choice": "kernel"},
        {"choice": "nobody"},
        {"params": {"BLOCK_M": 48}},
        {"template": "gluon/forward"},
        {"versions": {"driver": "\ud800"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_could_not_be_read_back_is_not_written(folder: Path, changes: dict[str, Any]) -> None:
    def merge() -> object:
        return cache.merge(folder, H200, FORWARD, [predicted(problem(batch=7)), measured(problem(batch=8), **changes)])

    assert "must hold what can be read back" in refusal(merge)
    assert not cache.path_of(folder, H200, FORWARD).exists()
    path, text = valid(folder)
    refusal(merge)
    assert path.read_text(encoding="utf-8") == text
    assert left_behind(folder) == []


# A world that does not let us write


def test_a_path_below_a_regular_file_is_refused(tmp_path: Path) -> None:
    below = tmp_path / "file" / "cache"
    below.parent.write_text("words")
    message = refusal(lambda: cache.merge(below, H200, FORWARD, [predicted()]))
    assert "must be writable" in message
    assert "Not a directory" in message
    assert "--cache DIR" in message
    assert below.parent.read_text() == "words"


@pytest.mark.parametrize("name", ["x" * 300, "nul\0"])
def test_a_path_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    for act in (
        lambda: cache.lookup(tmp_path / name, H200, FORWARD),
        lambda: cache.merge(tmp_path / name, H200, FORWARD, [predicted()]),
    ):
        refusal(act)


@pytest.mark.parametrize("call", ["fsync", "replace", "fdopen", "chmod"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path, text = valid(folder)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        message = refusal(lambda: cache.merge(folder, H200, FORWARD, [measured(problem(batch=3))]))
    assert "No space left on device" in message
    assert path.read_text(encoding="utf-8") == text
    assert left_behind(folder) == []
    cache.merge(folder, H200, FORWARD, [measured(problem(batch=3))])  # the lock was given back
    assert len(cache.lookup(folder, H200, FORWARD)) == 3


def test_an_interrupt_leaves_the_old_file_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = valid(folder)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.merge(folder, H200, FORWARD, [measured(problem(batch=3))])
    assert path.read_text(encoding="utf-8") == text
    assert left_behind(folder) == []


def test_a_lock_that_nobody_gives_back_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = valid(folder)
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.05)
    with filelock.FileLock(str(path.with_suffix(".lock"))):
        message = refusal(lambda: cache.merge(folder, H200, FORWARD, [predicted(problem(batch=3))]))
    assert "another process holds its lock" in message
    assert path.read_text(encoding="utf-8") == text


def test_a_file_system_without_locks_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise NotImplementedError("no flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", none)
    message = refusal(lambda: cache.merge(folder, H200, FORWARD, [predicted()]))
    assert "must be on a file system with locks" in message


# Any file


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path, text = valid(tmp_path_factory.mktemp("fuzz"))
    return path, text.encode()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON document."""
    if path:
        yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*path, key))


def read_or_refused(path: Path, data: bytes) -> None:
    """A file is what a tuner may have written, which merging then keeps, or refused."""
    path.write_bytes(data)
    try:
        file = cache.read(path)
    except CacheError as error:
        message = str(error)
        assert "\n" not in message
        assert path.read_bytes() == data
        return
    assert (file.device, file.op) == ("h200", FORWARD)
    for key, entry in file.entries.items():
        assert key == entry.problem.key
        assert 0 < entry.time_us < math.inf
        assert entry.tflops > 0
    before = set(file.entries)
    try:
        cache.merge(path.parent.parent, H200, FORWARD, [predicted(problem(batch=2))])
    except CacheError as error:
        message = str(error)
        assert "was measured on" in message  # the fingerprint was changed
        assert path.read_bytes() == data
    else:
        assert set(cache.read(path).entries) == {*before, problem(batch=2).key}


relaxed = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
    st.sampled_from(["kernel", "measured", "predicted", "causal", "\ud800", 2**63, -(2**64), 10**400, 1e308, 1e-320]),
)


splinters = st.binary(max_size=6) | st.sampled_from([b"0", b"-", b"e9", b'"', b"}", b"null"])


@relaxed
@given(st.data())
def test_a_file_with_any_value_changed_is_read_or_refused(sample: tuple[Path, bytes], data: st.DataObject) -> None:
    path, text = sample
    document = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(list(places(document))))
        within(document, place, data.draw(values | st.just(...)))
    read_or_refused(path, json.dumps(document).encode())


@relaxed
@given(st.data())
def test_a_file_with_any_bytes_changed_is_read_or_refused(sample: tuple[Path, bytes], data: st.DataObject) -> None:
    path, text = sample
    mutated = bytearray(text)
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(mutated)))
        end = begin + data.draw(st.integers(0, 12))
        mutated[begin:end] = data.draw(
            st.binary(max_size=6) | st.sampled_from([b"0", b"-", b"e9", b'"', b"}", b"null"])
        )
    read_or_refused(path, bytes(mutated))
