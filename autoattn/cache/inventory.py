"""The content of cache folders: what they hold, how two of them differ, and what one no longer needs."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

import filelock

from autoattn.cache import finals_samples, precedence, store
from autoattn.cache.file_format import CacheFile
from autoattn.cache.precedence import Overlay
from autoattn.codegen import resources
from autoattn.core.cache_entry import KERNEL, CacheEntry
from autoattn.core.problem import Op, Problem
from autoattn.core.trial import Evidence
from autoattn.errors import CacheError

JOURNAL = ".journal"
SUFFIXES = (JOURNAL, finals_samples.SUFFIX)  # of what a search leaves beside the entries
IDLE_SECONDS = 3600.0  # a journal that was written to since may have a tuner at it; a trial takes minutes at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one cache file holds."""

    path: Path
    device: str
    op: Op
    fingerprint: str
    measured: int
    predicted: int
    stale: int  # of both, those that are marked as wrong among them
    shadowed: int  # of all, those that give way to an entry of the same problem in another folder
    versions: tuple[str, ...]  # of what made the entries, each "autoattn 0.1.0, torch 2.13.0, triton 3.6.0"
    modified: str  # UTC, ISO 8601, to the second


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """In what two caches differ about one problem, or about the card of a file, whose problem is None."""

    device: str
    op: Op
    problem: Problem | None
    first: CacheEntry | None  # None where only the second has it
    second: CacheEntry | None
    words: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        """The second time over the first; None where there is one alone, or where one is predicted."""
        if self.first is None or self.second is None or self.first.evidence is not self.second.evidence:
            return None
        return self.second.time_us / self.first.time_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Unneeded:
    """What a cache folder could do without."""

    stale: dict[Path, tuple[CacheEntry, ...]]  # file -> entries that no longer speak of a kernel that there is
    journals: tuple[Path, ...]  # and raw samples, of studies whose problem has no entry, or will have none
    resting: tuple[Path, ...]  # such journals that were written to within IDLE_SECONDS: a tuner may be at them

    @property
    def entries(self) -> int:
        """How many entries are stale."""
        return sum(map(len, self.stale.values()))


def folders(named: Path | None) -> tuple[Path, ...]:
    """The cache folders that are read, first the one that goes before: `named`, else the user's own and the shipped.

    Raises:
        CacheError: `named` is no folder. The user's own need not be there yet.
    """
    if named is None:
        return tuple(dict.fromkeys((resources.user_cache(), resources.shipped_cache())))
    try:
        there, folder = named.exists(), named.is_dir()
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise CacheError(f"the cache {named!s:.500} must be readable, but {error}; correct that") from None
    if not folder:
        came = "is a file" if there else "does not exist"
        raise CacheError(f"the cache {named!s:.500} must be a folder that is there, but it {came}; correct the path")
    return (named,)


def read(named: Path | None) -> list[tuple[Path, CacheFile]]:
    """Every cache file of the `folders`, with its folder.

    Raises:
        CacheError: `named` is no folder, or a folder or one of its files cannot be read.
    """
    return [(folder, file) for folder in folders(named) for file in store.read_folder(folder)]


def overlays(named: Path | None, card: Callable[[str], str | None], device: str | None = None) -> list[Overlay]:
    """What the `folders` hold together (`precedence.overlay`), for each device and operation.

    Args:
        card: the fingerprint of the card that a device's name stands for here, None where nobody knows.
        device: the name of the only device to read; all of them when None.

    Raises:
        CacheError: `named` is no folder, or a folder or one of its files cannot be read.
    """
    files = [(folder, file) for folder, file in read(named) if device in (None, file.device)]
    return precedence.overlay(files, why_not=store.why_held_back, card=card)


def holding(folder: Path, file: CacheFile, shadowed: int = 0) -> Holding:
    """What a file of a cache folder holds.

    Args:
        shadowed: how many of its entries give way to one of another folder.

    Raises:
        OSError: the file has gone meanwhile.
    """
    path, entries = store.path_in(folder, file), file.entries.values()
    modified = datetime.fromtimestamp(int(path.stat().st_mtime), tz=timezone.utc)
    measured = sum(entry.evidence is Evidence.MEASURED for entry in entries)
    return Holding(
        path=path,
        device=file.device,
        op=file.op,
        fingerprint=file.fingerprint,
        measured=measured,
        predicted=len(entries) - measured,
        stale=sum(store.why_held_back(entry) is not None for entry in entries),
        shadowed=shadowed,
        versions=tuple(sorted({_versions(entry) for entry in entries})),
        modified=modified.strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def differences(first: Iterable[CacheFile], second: Iterable[CacheFile]) -> list[Difference]:
    """In what two caches differ, by device, operation and problem; none when they hold the same.

    Files of one release of Triton are compared, then what is left of other releases.
    """
    changes = []
    for left, right in _pairs(list(first), list(second)):
        known_file = left or right
        assert known_file is not None
        device, op = known_file.device, known_file.op
        if left is not None and right is not None and left.fingerprint != right.fingerprint:
            words = (f"card {left.fingerprint} -> {right.fingerprint}",)
            changes.append(Difference(device=device, op=op, problem=None, first=None, second=None, words=words))
        ours, theirs = (file.entries if file is not None else {} for file in (left, right))
        pairs = [(ours.get(key), theirs.get(key)) for key in {*ours, *theirs}]
        for was, now in sorted(pairs, key=_order):
            if was != now:
                known = was or now
                assert known is not None
                changes.append(
                    Difference(
                        device=device, op=op, problem=known.problem, first=was, second=now, words=_words(was, now)
                    )
                )
    return changes


def _pairs(first: list[CacheFile], second: list[CacheFile]) -> list[tuple[CacheFile | None, CacheFile | None]]:
    """The files of two caches that speak of the same, by device and operation; None where one cache has none."""
    places = sorted({(file.device, file.op.value) for file in (*first, *second)})
    pairs: list[tuple[CacheFile | None, CacheFile | None]] = []
    for place in places:
        left, right = (
            {file.triton: file for file in files if (file.device, file.op.value) == place} for files in (first, second)
        )
        both = sorted({*left} & {*right})
        alone = [[file for release, file in sorted(files.items()) if release not in both] for files in (left, right)]
        pairs += [(left[release], right[release]) for release in both]
        pairs += list(itertools.zip_longest(alone[0], alone[1]))
    return pairs


def unneeded(folder: Path) -> Unneeded:
    """The stale entries of a cache folder, and the journals of studies whose problem has no other entry.

    Raises:
        CacheError: the folder or one of its files cannot be read.
    """
    files = store.read_folder(folder)
    stale = {
        store.path_in(folder, file): tuple(
            entry for entry in file.entries.values() if store.why_stale(entry) is not None
        )
        for file in files
    }
    kept = {
        (file.device, key)
        for file in files
        for key, entry in file.entries.items()
        if entry not in stale[store.path_in(folder, file)]
    }
    journals: list[Path] = []
    resting: list[Path] = []
    try:
        for path in sorted(path for suffix in SUFFIXES for path in folder.glob(f"*/studies/*{suffix}")):
            key = path.name.removesuffix(path.suffix if path.suffix == JOURNAL else finals_samples.SUFFIX)
            ours = key.startswith(tuple(f"{op.value}_" for op in Op)) and path.is_file()
            if ours and (path.parent.parent.name, key) not in kept:
                idle = time.time() - path.stat().st_mtime >= IDLE_SECONDS
                (journals if idle else resting).append(path)
    except OSError as error:
        raise _unreadable(folder, error) from None
    return Unneeded(
        stale={path: entries for path, entries in stale.items() if entries},
        journals=tuple(journals),
        resting=tuple(resting),
    )


def prune(unneeded: Unneeded) -> Unneeded:
    """Removes what was found, but for what changed meanwhile; returns what was removed.

    Raises:
        CacheError: a file cannot be written, or a journal not be removed.
    """
    stale = {path: store.drop(path, entries) for path, entries in unneeded.stale.items()}
    journals = tuple(path for path in unneeded.journals if _removed(path))
    return Unneeded(stale=stale, journals=journals, resting=unneeded.resting)


def _removed(journal: Path) -> bool:
    """Removes a journal that nobody holds or wrote to meanwhile; its lock stays, since another may wait for it.

    Raw samples have no lock: they are put there whole.
    """
    lock = filelock.FileLock(f"{journal}.lock", timeout=0) if journal.suffix == JOURNAL else contextlib.nullcontext()
    try:
        with lock:
            if time.time() - journal.stat().st_mtime < IDLE_SECONDS:
                return False
            journal.unlink()
    except (filelock.Timeout, FileNotFoundError):
        return False
    except (OSError, NotImplementedError) as error:
        raise _unreadable(journal.parent, error) from None
    return True


def _unreadable(folder: Path, error: Exception) -> CacheError:
    words = getattr(error, "strerror", None) or str(error)
    return CacheError(f"the folder {folder} must let journals be read and removed, but {words}; correct that")


def _order(pair: tuple[CacheEntry | None, CacheEntry | None]) -> tuple[str | int, ...]:
    known = pair[0] or pair[1]
    assert known is not None
    return known.problem.order


def _words(first: CacheEntry | None, second: CacheEntry | None) -> tuple[str, ...]:
    """In what two entries of one problem differ: what people ask for first, then the names of other facts."""
    if first is None or second is None:
        return ("only in the second",) if first is None else ("only in the first",)
    words = []
    pairs = {
        "evidence": (first.evidence.value, second.evidence.value),
        "runs on": (_choice(first), _choice(second)),
        "template": (first.template, second.template),
        "kernel": (first.source_digest, second.source_digest),
    }
    words += [f"{name} {was} -> {now}" for name, (was, now) in pairs.items() if was != now]
    if first.template == second.template:
        names = sorted({*first.params, *second.params})
        values = [(name, first.params.get(name, "-"), second.params.get(name, "-")) for name in names]
        words += [f"{name} {was} -> {now}" for name, was, now in values if was != now]
    if first.time_us != second.time_us:
        words.append(f"time {first.time_us:.6g} -> {second.time_us:.6g} us")
    if first.versions != second.versions:
        words.append(f"versions {_versions(first)} -> {_versions(second)}")
    named = {"evidence", "choice", "template", "source_digest", "params", "versions"}
    facts = [field.name for field in fields(CacheEntry) if field.name not in named]
    changed = [name for name in facts if getattr(first, name) != getattr(second, name)]
    return (*words, *([f"other facts: {', '.join(changed)}"] if changed else []))


def _choice(entry: CacheEntry) -> str:
    return entry.template if entry.choice == KERNEL else entry.choice


def _versions(entry: CacheEntry) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(entry.versions.items())) or "unknown"
