"""Entries that were checked before are read when they are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoattn.cache import file_format, store
from autoattn.cache.file_format import CacheFile, UnreadEntries
from autoattn.codegen import resources
from autoattn.errors import CacheError

PATH = resources.shipped_cache() / "h200" / "forward.triton-3.9.json"


@pytest.fixture(scope="module")
def file() -> CacheFile:
    return file_format.decode(PATH.read_bytes(), PATH)


def test_they_are_those_of_the_file(file: CacheFile) -> None:
    data = PATH.read_bytes()
    unread = file_format.decode(data, PATH, checked=True)
    assert isinstance(unread.entries, UnreadEntries)
    assert list(file_format.problems_of(unread)) == list(file_format.problems_of(file))
    assert len(unread.entries) == len(file.entries) > 0
    assert dict(unread.entries) == file.entries
    assert file_format.encode(unread) == data


def test_one_is_read_once(file: CacheFile) -> None:
    unread = file_format.decode(PATH.read_bytes(), PATH, checked=True).entries
    key = next(iter(unread))
    assert unread[key] is unread[key]
    with pytest.raises(KeyError):
        unread["no such problem"]


def test_who_was_absent_is_kept_and_an_older_entry_stays_as_it_is(file: CacheFile) -> None:
    (old, other) = list(file.entries.items())[:2]
    assert old[1].absent is None
    assert b"absent" not in file_format.encode(file)
    absent = {"fa4": "not installed (no module flash_attn)"}
    new = replace(file, entries=dict([(old[0], replace(old[1], absent=absent)), other]))
    read = file_format.decode(file_format.encode(new), PATH)
    assert [entry.absent for entry in read.entries.values()] == [absent, None]
    everybody = replace(file, entries={old[0]: replace(old[1], absent={})})
    (entry,) = file_format.decode(file_format.encode(everybody), PATH).entries.values()
    assert entry.absent == {}, "nobody was absent, which is more than that nobody recorded it"


def test_a_file_that_ends_early_is_refused() -> None:
    with pytest.raises(CacheError, match="is damaged"):
        file_format.decode(PATH.read_bytes()[:-100], PATH, checked=True)


@pytest.mark.parametrize("installed", [False, True])
def test_files_that_an_installed_autoattn_brings_are_not_checked_again(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "is_installed", lambda: installed)
    store.forget()
    try:
        assert isinstance(store.read(PATH).entries, UnreadEntries) is installed
    finally:
        store.forget()
