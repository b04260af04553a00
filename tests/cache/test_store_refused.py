"""The cache file: what is damaged is refused in one sentence and left alone."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
from cache_files import FORWARD, left_behind, refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import A30, H200, certified, measured, predicted, problem

from autoattn.cache import file_format, store
from autoattn.codegen import search_space
from autoattn.core.modifiers import Modifiers
from autoattn.errors import CacheError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# What is not a cache file of ours is refused in a sentence and left as it is


def valid(folder: Path) -> tuple[Path, str]:
    path = store.merge(folder, H200, FORWARD, [measured(), predicted(problem(batch=1))])
    return path, path.read_text(encoding="utf-8")


def untouched(path: Path, data: bytes) -> str:
    """Writes `data`, checks that nobody reads it, that merging leaves it alone, and returns what reading says."""
    path.write_bytes(data)
    message = refusal(lambda: store.read(path))
    folder = path.parent.parent
    assert refusal(lambda: store.lookup(folder, H200, FORWARD)) == message
    assert refusal(lambda: store.read_folder(folder)) == message
    assert refusal(lambda: store.merge(folder, H200, FORWARD, [measured(problem(batch=3))])) == message
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


@pytest.mark.parametrize("change", [{"left": -1}, {"right": 3}, {"block_q": 64}], ids=str)
def test_a_mask_with_numbers_of_another_kind_is_refused(folder: Path, change: dict[str, int]) -> None:
    path, text = valid(folder)
    document = json.loads(text)
    for entry in document["entries"].values():
        assert entry["problem"]["mask"]["kind"] == "causal"
        entry["problem"]["mask"] |= change
    assert "numbers that no mask of its kind has" in untouched(path, json.dumps(document).encode())


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
    monkeypatch.setattr(file_format, "MAX_BYTES", len(text) - 1)
    assert "must be at most" in untouched(path, text.encode())


def test_a_file_never_grows_beyond_what_can_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = valid(folder)
    monkeypatch.setattr(file_format, "MAX_BYTES", len(text) + 10)
    message = refusal(lambda: store.merge(folder, H200, FORWARD, [measured(problem(batch=3))]))
    assert "it would be larger" in message
    assert path.read_text(encoding="utf-8") == text


def test_a_folder_in_place_of_the_file_is_refused(folder: Path) -> None:
    path = store.path_of(folder, H200, FORWARD)
    path.mkdir(parents=True)
    assert "Is a directory" in refusal(lambda: store.read(path))
    assert "Is a directory" in refusal(lambda: store.lookup(folder, H200, FORWARD))
    assert "Is a directory" in refusal(lambda: store.merge(folder, H200, FORWARD, [predicted()]))
    assert path.is_dir()


def test_a_file_of_another_device_is_refused(folder: Path) -> None:
    _, text = valid(folder)
    path = store.path_of(folder, A30, FORWARD)
    path.parent.mkdir()
    path.write_text(text)
    for act in (
        lambda: store.lookup(folder, A30, FORWARD),
        lambda: store.merge(folder, A30, FORWARD, [predicted()]),
    ):
        assert re.search(r"must hold forward\.triton-\S+ on a30, got 'forward\.triton-\S+' on 'h200'", refusal(act))
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
        (("template",), "cutlass/forward", "there is none"),
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
        (("absent",), {"sdpa-flash": "not there"}, "is recorded as absent"),
        (("absent",), {"fa4": 1}, "Expected `str`, got `int`"),
        (("choice",), "sdpa-other", "the choice 'sdpa-other' of forward_bfloat16"),
        (("problem", "head_dim"), 999, "head_dim must be at most 256, got 999"),
        (("problem", "heads_q"), 64, "holds the problem"),
        (("problem", "op"), "sideways", "Invalid enum value 'sideways'"),
        (("problem", "op"), "backward", "holds the problem backward_"),
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


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("finals", "finalists", 0, "source_digest"), "ff", "is not its winner"),
        (("finals", "finalists"), [], "is not its winner"),
        (("finals", "finalists", 1, "lead", "low"), 2.0, "an interval must hold its ratio"),
        (("finals", "finalists", 0, "num_warps"), 0, "its warps at least 1"),
        (("rivals", 0, "energy", "joules"), -1.0, "must be above 0"),
        (("rivals", 0, "lead", "high"), "2", "Expected `float`, got `str`"),
    ],
)
def test_finals_that_nobody_held_are_refused(folder: Path, path: tuple[str | int, ...], value: Any, words: str) -> None:
    file = store.merge(folder, H200, FORWARD, [certified()])
    document = json.loads(file.read_text(encoding="utf-8"))
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
        {"template": "cutlass/forward"},
        {"versions": {"driver": "\ud800"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_could_not_be_read_back_is_not_written(folder: Path, changes: dict[str, Any]) -> None:
    def merge() -> object:
        return store.merge(folder, H200, FORWARD, [predicted(problem(batch=7)), measured(problem(batch=8), **changes)])

    assert "must hold what can be read back" in refusal(merge)
    assert not store.path_of(folder, H200, FORWARD).exists()
    path, text = valid(folder)
    refusal(merge)
    assert path.read_text(encoding="utf-8") == text
    assert left_behind(folder) == []


# A world that does not let us write


def test_a_path_below_a_regular_file_is_refused(tmp_path: Path) -> None:
    below = tmp_path / "file" / "cache"
    below.parent.write_text("words")
    message = refusal(lambda: store.merge(below, H200, FORWARD, [predicted()]))
    assert "must be writable" in message
    assert "Not a directory" in message
    assert "--cache DIR" in message
    assert below.parent.read_text() == "words"


@pytest.mark.parametrize("name", ["x" * 300, "nul\0"])
def test_a_path_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    for act in (
        lambda: store.lookup(tmp_path / name, H200, FORWARD),
        lambda: store.merge(tmp_path / name, H200, FORWARD, [predicted()]),
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
        message = refusal(lambda: store.merge(folder, H200, FORWARD, [measured(problem(batch=3))]))
    assert "No space left on device" in message
    assert path.read_text(encoding="utf-8") == text
    assert left_behind(folder) == []
    store.merge(folder, H200, FORWARD, [measured(problem(batch=3))])  # the lock was given back
    assert len(store.lookup(folder, H200, FORWARD)) == 3


def test_an_interrupt_leaves_the_old_file_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = valid(folder)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.merge(folder, H200, FORWARD, [measured(problem(batch=3))])
    assert path.read_text(encoding="utf-8") == text
    assert left_behind(folder) == []


def test_a_lock_that_nobody_gives_back_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = valid(folder)
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.05)
    with filelock.FileLock(str(path.with_suffix(".lock"))):
        message = refusal(lambda: store.merge(folder, H200, FORWARD, [predicted(problem(batch=3))]))
    assert "another process holds its lock" in message
    assert path.read_text(encoding="utf-8") == text


def test_a_file_system_without_locks_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise NotImplementedError("no flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", none)
    message = refusal(lambda: store.merge(folder, H200, FORWARD, [predicted()]))
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
        file = store.read(path)
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
        store.merge(path.parent.parent, H200, FORWARD, [predicted(problem(batch=2))])
    except CacheError as error:
        message = str(error)
        assert "was measured on" in message  # the fingerprint was changed
        assert path.read_bytes() == data
    else:
        assert set(store.read(path).entries) == {*before, problem(batch=2).key}


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


# What can be read, but not rendered


def test_an_entry_whose_template_cannot_read_its_tensors_is_stale() -> None:
    gluon = search_space.load("gluon/forward")
    params = gluon.default(problem(), H200).as_dict()
    entry = measured(problem(head_dim=17), template="gluon/forward", params=params, space_digest=gluon.digest)
    assert "the TMA unit reads rows" in str(store.why_stale(entry))


def test_an_entry_with_an_expression_that_is_none_is_stale() -> None:
    stale_problem = problem(modifiers=Modifiers(score_mod="81f578f256f7ac21"))
    assert "an expression must be arithmetic" in str(
        store.why_stale(dataclasses.replace(measured(), problem=stale_problem))
    )


@pytest.mark.parametrize("unreadable", ["cache", "cache/h200"])
def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(
    unreadable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache" / "h200").mkdir(parents=True)
    listed = Path.iterdir

    def refused(folder: Path) -> Iterator[Path]:  # as by the system, to who is not root
        if folder == tmp_path / unreadable:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", refused)
    message = refusal(lambda: store.read_folder(tmp_path / "cache"))
    assert f"must be readable, but {tmp_path / unreadable}: Permission denied" in message


def test_a_file_is_not_taken_for_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    assert "Not a directory" in refusal(lambda: store.read_folder(tmp_path / "cache"))
    assert store.read_folder(tmp_path / "none") == []
