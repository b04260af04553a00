"""What caches hold, in what two differ, how they are merged, and what is pruned."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import filelock
import pytest
from cache_files import FORWARD, left_behind, refusal
from samples import A30, H200, current, measured, predicted, problem

from autoattn.cache import inventory, store
from autoattn.cache.file_format import CacheFile
from autoattn.codegen import resources
from autoattn.core import triton_release
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device

SISTER = dataclasses.replace(H200, sm_count=H200.sm_count - 4)  # a card of the same name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def file_of(*entries: CacheEntry, device: Device = H200) -> CacheFile:
    return CacheFile(
        schema=1,
        op=FORWARD,
        device=device.name,
        triton=triton_release.installed_release(),
        fingerprint=device.fingerprint,
        entries={entry.problem.key: entry for entry in entries},
    )


def written(folder: Path, *entries: CacheEntry, device: Device = H200) -> CacheFile:
    return store.read(store.merge(folder, device, FORWARD, entries))


def test_a_holding_counts_evidence_and_stale_entries(folder: Path) -> None:
    file = written(folder, current(measured()), predicted(problem(batch=1)), predicted(problem(batch=2)))
    held = inventory.holding(folder, file)
    assert (held.measured, held.predicted, held.stale) == (1, 2, 2)
    assert (held.device, held.fingerprint) == ("h200", H200.fingerprint)
    assert held.versions == (f"autoattn 0.1.0, torch 2.13.0, triton {triton_release.installed()}",)
    assert held.path == store.path_of(folder, H200, FORWARD)
    assert held.modified.endswith("Z")


# Differences


def test_a_cache_does_not_differ_from_itself() -> None:
    file = file_of(measured(), predicted(problem(batch=1)))
    assert inventory.differences([file], [file]) == []


def test_any_fact_of_an_entry_that_differs_is_seen() -> None:
    entry = measured()
    search = dataclasses.replace(entry.search, seed=7)
    changes = {
        "evidence measured -> predicted": predicted(),
        "runs on sdpa-cudnn -> triton/forward": dataclasses.replace(entry, choice="kernel"),
        "kernel 0123456789abcdef -> ffff": dataclasses.replace(entry, source_digest="ffff"),
        "num_warps": dataclasses.replace(entry, params={**entry.params, "num_warps": 2}),
        "time 400 -> 200 us": measured(time_us=200.0),
        f"torch 2.13.0, triton {triton_release.installed()} -> torch 9": dataclasses.replace(
            entry, versions={"torch": "9"}
        ),
        "other facts: search": dataclasses.replace(entry, search=search),
    }
    for words, other in changes.items():
        (difference,) = inventory.differences([file_of(entry)], [file_of(other)])
        assert any(words in part for part in difference.words), words


def test_a_ratio_compares_like_with_like_alone() -> None:
    (difference,) = inventory.differences([file_of(measured())], [file_of(measured(time_us=300.0))])
    assert difference.ratio == 0.75
    (difference,) = inventory.differences([file_of(measured())], [file_of(predicted())])
    assert difference.ratio is None


def test_what_one_cache_alone_holds_differs() -> None:
    both, first, second = (predicted(problem(batch=batch)) for batch in (1, 2, 3))
    differences = inventory.differences([file_of(both, first)], [file_of(both, second), file_of(both, device=A30)])
    assert [
        (difference.device, difference.problem.batch if difference.problem else 0, difference.words)
        for difference in differences
    ] == [
        ("a30", 1, ("only in the second",)),
        ("h200", 2, ("only in the first",)),
        ("h200", 3, ("only in the second",)),
    ]


def test_another_card_of_the_same_name_differs() -> None:
    (difference,) = inventory.differences([file_of(measured())], [file_of(measured(), device=SISTER)])
    assert difference.problem is None
    assert H200.fingerprint in difference.words[0]
    assert SISTER.fingerprint in difference.words[0]


# Merging


def test_combining_takes_keeps_and_counts(folder: Path) -> None:
    there = [measured(), predicted(problem(batch=1)), predicted(problem(batch=2))]
    written(folder, *there)
    new, alike, better, worse = predicted(problem(batch=3)), there[1], measured(problem(batch=2)), predicted()
    (merged,) = store.combine(folder, [file_of(new, alike, better, worse)])
    assert merged.taken == (new.problem, better.problem)
    assert merged.same == (alike.problem,)
    assert list(merged.replaced.items()) == [(better.problem, "a measurement takes a prediction's place")]
    assert list(merged.refused) == [worse.problem]
    assert merged.refused[worse.problem].startswith("a prediction never takes a measurement's place")
    entries = store.read(merged.path).entries
    assert len(entries) == 4
    assert entries[worse.problem.key].evidence.value == "measured"
    assert entries[better.problem.key].evidence.value == "measured"
    assert left_behind(folder) == []


def test_a_stale_entry_never_takes_the_place_of_one_that_holds(folder: Path) -> None:
    held, stale = current(measured()), measured(time_us=1.0)
    written(folder, held)
    (merged,) = store.combine(folder, [file_of(stale)])
    assert (merged.taken, list(merged.refused)) == ((), [stale.problem])
    (merged,) = store.combine(folder, [file_of(current(measured(time_us=390.0)))])
    assert merged.taken == (held.problem,)


def test_combining_what_is_there_writes_nothing(folder: Path) -> None:
    file = written(folder, measured())
    before = store.path_in(folder, file).stat()
    (merged,) = store.combine(folder, [file])
    assert (merged.taken, merged.same) == ((), (measured().problem,))
    assert store.path_in(folder, file).stat().st_ino == before.st_ino


def test_of_several_files_none_is_written_when_one_is_of_another_card(folder: Path) -> None:
    path = store.path_in(folder, written(folder, measured()))
    before = path.read_bytes()
    files = [file_of(predicted(), device=A30), file_of(measured(problem(batch=9)), device=SISTER)]
    assert SISTER.fingerprint in refusal(lambda: store.combine(folder, files))
    assert path.read_bytes() == before
    assert not (folder / "a30").exists()


def test_a_damaged_file_is_never_merged_into(folder: Path) -> None:
    path = store.path_in(folder, written(folder, measured()))
    path.write_text("{")
    assert "is damaged" in refusal(lambda: store.combine(folder, [file_of(predicted())]))
    assert path.read_text() == "{"


# Pruning


def journal(folder: Path, name: str, *, hours: float) -> Path:
    path = folder / "h200" / "studies" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    then = time.time() - hours * 3600
    os.utime(path, (then, then))
    return path


def test_pruning_removes_stale_entries_and_idle_journals_without_entry(folder: Path) -> None:
    held, stale = current(measured()), predicted(problem(batch=1))
    path = store.path_in(folder, written(folder, held, stale))
    kept = journal(folder, f"{held.problem.key}.journal", hours=2)
    of_stale = journal(folder, f"{stale.problem.key}.journal", hours=2)
    orphan = journal(folder, f"{problem(batch=77).key}.journal", hours=2)
    busy = journal(folder, f"{problem(batch=78).key}.journal", hours=0.1)
    samples = journal(folder, f"{problem(batch=77).key}.finals.json", hours=2)
    kept_samples = journal(folder, f"{held.problem.key}.finals.json", hours=2)
    foreign = [journal(folder, name, hours=9) for name in ("notes.journal", "forward_notes.txt")]
    unneeded = inventory.unneeded(folder)
    assert unneeded.stale == {path: (stale,)}
    assert unneeded.journals == tuple(sorted((of_stale, orphan, samples)))
    assert unneeded.resting == (busy,)
    assert all(file.exists() for file in (kept, of_stale, orphan, busy, *foreign))  # looking removes nothing
    assert inventory.prune(unneeded) == unneeded
    assert list(store.read(path).entries) == [held.problem.key]
    assert [file.exists() for file in (kept, of_stale, orphan, busy, *foreign)] == [True, False, False, *[True] * 3]
    assert [kept_samples.exists(), samples.exists()] == [True, False]
    assert not samples.with_name(f"{samples.name}.lock").exists()
    assert inventory.unneeded(folder).entries == 0


def test_pruning_leaves_what_became_another_meanwhile(folder: Path) -> None:
    stale, again = predicted(), current(measured())
    path = store.path_in(folder, written(folder, stale))
    old = journal(folder, f"{problem(batch=77).key}.journal", hours=2)
    held = journal(folder, f"{problem(batch=78).key}.journal", hours=2)
    unneeded = inventory.unneeded(folder)
    written(folder, again)
    os.utime(old)
    with filelock.FileLock(f"{held}.lock"):
        gone = inventory.prune(unneeded)
    assert (gone.entries, gone.journals) == (0, ())
    (entry,) = store.read(path).entries.values()
    assert entry.source_digest == again.source_digest
    assert old.exists()
    assert held.exists()


def test_nothing_is_pruned_beside_a_damaged_file(folder: Path) -> None:
    written(folder, predicted())
    other = store.path_in(folder, written(folder, predicted(), device=A30))
    other.write_text("{")
    assert "is damaged" in refusal(lambda: inventory.unneeded(folder))


# Folders


def test_a_named_folder_is_read_alone_and_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "user_cache", lambda: tmp_path / "own")
    monkeypatch.setattr(resources, "shipped_cache", lambda: tmp_path / "shipped")
    assert inventory.folders(None) == (tmp_path / "own", tmp_path / "shipped")
    assert inventory.read(None) == [], "the own cache need not be there yet"
    assert inventory.folders(tmp_path) == (tmp_path,)
    (tmp_path / "text").write_text("text")
    for name, words in {"none": "it does not exist", "text": "it is a file", "nul\0": "it does not exist"}.items():
        assert words in refusal(lambda name=name: inventory.folders(tmp_path / name))  # type: ignore[misc]


def test_overlays_hold_the_entries_that_calls_take(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "user_cache", lambda: folder / "own")
    monkeypatch.setattr(resources, "shipped_cache", lambda: folder / "shipped")
    stale, held = measured(time_us=1.0), current(measured())
    written(folder / "own", stale, current(predicted(problem(batch=2))))
    written(folder / "shipped", held, current(measured(problem(batch=2))))
    written(folder / "shipped", held, device=A30)
    (overlay,) = inventory.overlays(None, lambda _: None, "h200")
    assert {place.folder.name for place in overlay.counting.values()} == {"shipped"}
    assert len(overlay.shadowed) == 2
    assert [per_card.device for per_card in inventory.overlays(None, lambda _: None)] == ["a30", "h200"]
    assert len(inventory.overlays(folder / "own", lambda _: None)[0].shadowed) == 0


# Merging into a folder


def test_a_merge_never_takes_a_slower_prediction(folder: Path) -> None:
    fast, slow = current(predicted(time_us=500.0)), current(predicted(time_us=600.0))
    path = store.path_in(folder, written(folder, fast))
    before = path.read_bytes()
    (merged,) = store.combine(folder, [file_of(slow)])
    assert merged.refused == {slow.problem: "it is not predicted faster: 600 us, 500 us there"}
    assert (merged.taken, merged.replaced, path.read_bytes()) == ((), {}, before)
    (merged,) = store.combine(folder, [file_of(slow)], any_time=True)
    assert merged.replaced == {slow.problem: "--replace asks for it"}
    (merged,) = store.combine(folder, [file_of(fast)])
    assert (merged.taken, merged.replaced) == (
        (fast.problem,), {fast.problem: "it is predicted faster: 500 us, 600 us there"},
    )  # fmt: skip
