"""Bundles: what was packed is read back, and what was changed on the way is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import zipfile
from pathlib import Path

import pytest
from cache_files import FORWARD, FORWARD_FILE, refusal
from finals_rounds import taken
from samples import A30, H200, certified, current, measured, predicted, problem

from autoattn.cache import file_format, finals_samples, store
from autoattn.cache.file_format import CacheFile
from autoattn.cache.finals_samples import Samples
from autoattn.core.variant import digest_of
from autoattn.errors import CacheError
from autoattn.tools import bundle


@pytest.fixture
def files(tmp_path: Path) -> list[CacheFile]:
    store.merge(tmp_path, H200, FORWARD, [current(measured()), current(predicted(problem(batch=1)))])
    store.merge(tmp_path, A30, FORWARD, [current(predicted())])
    return store.read_folder(tmp_path)


@pytest.fixture
def packed(files: list[CacheFile], tmp_path: Path) -> Path:
    path = tmp_path / "bundle.zip"
    path.write_bytes(bundle.pack(files))
    return path


def rewritten(path: Path, changes: dict[str, bytes | None], *, manifest: bool) -> Path:
    """The bundle with other contents; with a manifest that agrees, if asked."""
    with zipfile.ZipFile(path) as archive:
        held: dict[str, bytes] = {name: archive.read(name) for name in archive.namelist()}
    held = {name: data for name, data in {**held, **changes}.items() if data is not None}
    if manifest:
        facts = json.loads(held["manifest.json"])
        names = sorted(held.keys() - {"manifest.json"})
        facts["files"] = {name: hashlib.sha256(held[name]).hexdigest() for name in names}
        held["manifest.json"] = json.dumps(facts).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, data)
    return path


def test_what_was_packed_is_read_back(packed: Path, files: list[CacheFile]) -> None:
    assert bundle.unpack(packed).files == bundle.load(packed) == files


def test_the_same_entries_give_the_same_bytes(packed: Path, files: list[CacheFile]) -> None:
    assert bundle.pack(files) == packed.read_bytes()


def test_a_bundle_holds_kernels_and_the_commands_that_repeat_them(packed: Path, files: list[CacheFile]) -> None:
    with zipfile.ZipFile(packed) as archive:
        held = {name: archive.read(name).decode() for name in archive.namelist()}
    for file in files:
        for entry in file.entries.values():
            assert digest_of(held[f"{file.device}/kernels/{entry.source_digest}.py"]) == entry.source_digest
    assert held["README.md"].count("autoattn tune --device ") == 3
    assert "autoattn tune --device h200 --dtype bfloat16 --batch 4 --heads 32 --heads-kv 8" in held["README.md"]
    assert "torch 2.13.0" in held["README.md"]


def test_a_folder_a_file_and_a_bundle_load_alike(packed: Path, files: list[CacheFile], tmp_path: Path) -> None:
    assert bundle.load(tmp_path) == files
    assert bundle.load(tmp_path / "h200" / FORWARD_FILE) == [files[1]]


def test_a_file_is_found_from_its_own_folder(
    files: list[CacheFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "h200")
    assert bundle.load(Path(FORWARD_FILE)) == [files[1]]


def test_stale_entries_and_nothing_are_not_packed(files: list[CacheFile]) -> None:
    stale = dataclasses.replace(files[0], entries={problem().key: predicted()})
    assert "is stale" in refusal(lambda: bundle.pack([stale]))
    assert "got none" in refusal(lambda: bundle.pack([dataclasses.replace(files[0], entries={})]))


def test_a_byte_that_changed_anywhere_is_refused_or_means_nothing(packed: Path, files: list[CacheFile]) -> None:
    data, rng = packed.read_bytes(), random.Random(0)
    for _ in range(300):
        spoilt = bytearray(data)
        spoilt[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        packed.write_bytes(spoilt)
        try:
            unpacked = bundle.unpack(packed).files
        except CacheError:
            continue
        assert unpacked == files  # a date or a right of a member, which nobody reads


def test_a_bundle_cut_off_anywhere_is_refused(packed: Path) -> None:
    data = packed.read_bytes()
    for end in range(0, len(data), len(data) // 20):
        packed.write_bytes(data[:end])
        assert "is damaged" in refusal(lambda: bundle.unpack(packed).files)


@pytest.mark.parametrize(
    ("name", "data", "manifest", "words"),
    [
        (f"h200/{FORWARD_FILE}", b"{}", False, "is not what the manifest says"),
        ("README.md", None, False, "not in both"),
        ("more.py", b"", False, "not in both"),
        ("manifest.json", None, False, "got another zip"),
        ("manifest.json", b"[]", False, "got another zip"),
        ("manifest.json", b'{"bundle": 2, "files": {}}', False, "must have version 1, got 2; use a matching autoattn"),
        ("manifest.json", b'{"bundle": 1, "files": {}}', False, "not in both"),
        ("manifest.json", b"[" * 99999, False, "is damaged"),
        (f"h200/{FORWARD_FILE}", b"{}", True, "must be an autoattn cache file"),
        (f"../{FORWARD_FILE}", b"{}", True, "is no place in a cache"),
        (f"./{FORWARD_FILE}", b"{}", True, ""),
    ],
)  # fmt: skip
def test_a_bundle_that_was_changed_is_refused(
    packed: Path, name: str, data: bytes | None, manifest: bool, words: str
) -> None:
    path = rewritten(packed, {name: data}, manifest=manifest)
    if words:
        assert words in refusal(lambda: bundle.unpack(path).files)
    else:
        assert [file.device for file in bundle.unpack(path).files] == [
            "a30",
            "h200",
        ]


def test_a_kernel_that_is_not_the_entrys_is_refused(packed: Path, files: list[CacheFile]) -> None:
    (entry,) = files[0].entries.values()
    path = rewritten(packed, {f"a30/kernels/{entry.source_digest}.py": b"import os"}, manifest=True)
    assert f"lacks the kernel '{entry.source_digest}'" in refusal(lambda: bundle.unpack(path).files)


def test_a_device_that_leads_out_of_the_cache_is_refused(packed: Path, files: list[CacheFile]) -> None:
    data = file_format.encode(dataclasses.replace(files[0], device=".."))
    path = rewritten(packed, {f"../{FORWARD_FILE}": data}, manifest=True)
    assert "is no place in a cache" in refusal(lambda: bundle.unpack(path).files)


def test_what_says_that_it_holds_too_much_is_refused(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_BYTES", 1000)
    assert "must hold at most 1000 bytes" in refusal(lambda: bundle.unpack(packed).files)


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    assert "there is none" in refusal(lambda: bundle.load(tmp_path / "none"))
    (tmp_path / "text.zip").write_text("text")
    assert "is damaged" in refusal(lambda: bundle.load(tmp_path / "text.zip"))


def test_a_bundle_has_the_raw_samples_of_the_finals(tmp_path: Path) -> None:
    entry = current(certified())
    store.merge(tmp_path, H200, FORWARD, [entry, current(measured(problem(batch=2)))])
    files = store.read_folder(tmp_path)
    samples = taken(entry.source_digest)
    finals_samples.write(finals_samples.path_of(tmp_path, "h200", entry.problem.key), samples)
    path = tmp_path / "bundle.zip"
    path.write_bytes(bundle.pack(files, bundle.samples_of([(tmp_path, file) for file in files])))
    assert bundle.unpack(path).files == files
    name = f"h200/finals/{entry.problem.key}.json"
    with zipfile.ZipFile(path) as archive:
        assert [member for member in archive.namelist() if "finals" in member] == [name]
        assert finals_samples.decode(archive.read(name), path) == samples
        assert "raw samples" in archive.read("README.md").decode()
    other = finals_samples.encode(taken(entry.source_digest, rounds=9))
    assert "are those of other finals" in refusal(lambda: bundle.unpack(rewritten(path, {name: other}, manifest=True)))
    assert "are damaged" in refusal(lambda: bundle.unpack(rewritten(path, {name: b"{}"}, manifest=True)))


@pytest.mark.parametrize("samples", [taken("ff" * 8), taken(current(certified()).source_digest, rounds=130)])
def test_samples_of_other_finals_are_not_packed(tmp_path: Path, samples: Samples) -> None:
    store.merge(tmp_path, H200, FORWARD, [current(certified())])
    path = tmp_path / "bundle.zip"
    path.write_bytes(bundle.pack(store.read_folder(tmp_path), {("h200", problem().key): samples}))
    with zipfile.ZipFile(path) as archive:
        assert not [name for name in archive.namelist() if "finals" in name]
