"""The cache: one readable JSON file per device and operation, reviewed like code.

A file is read whole or refused; it is written whole, by renaming a finished copy over it, under a lock that every
writer takes, so that two tuners that write at once lose nothing and a crash leaves the old file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import filelock

from autoattn.cache import file_format, precedence, whole_files
from autoattn.cache.file_format import CacheFile
from autoattn.codegen import render, resources, search_space
from autoattn.core import garbage_collection, triton_release
from autoattn.core.cache_entry import CacheEntry, Mark
from autoattn.core.device import Device
from autoattn.core.problem import Op, Problem
from autoattn.core.trial import Evidence
from autoattn.core.variant import Source
from autoattn.errors import AutoattnError, CacheError

LOCK_SECONDS = 30.0  # a writer holds the lock for milliseconds; longer means a dead file system


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What became of the entries of one file that was merged into a folder."""

    path: Path
    taken: tuple[Problem, ...] = ()
    same: tuple[Problem, ...] = ()  # were there, alike
    replaced: dict[Problem, str] = field(default_factory=dict)  # those taken in another's place -> why
    refused: dict[Problem, str] = field(default_factory=dict)  # problem -> why the entry that was there stays


def path_of(folder: Path, device: Device, op: Op, release: str | None = None) -> Path:
    """Where the entries of a device and an operation stand in a cache folder.

    Args:
        release: of Triton, as "3.9"; None is the one that is installed.
    """
    return folder / device.name / file_format.name_of(op, release or triton_release.installed_release())


def path_in(folder: Path, file: CacheFile) -> Path:
    """Where a file stands in a cache folder."""
    return folder / file.device / file.name


def read(path: Path) -> CacheFile:
    """Reads one cache file.

    Raises:
        CacheError: the file is missing, damaged, newer, foreign or unreadable; it is left as it is.
    """
    file = _file_at(path)
    if file is None:
        raise CacheError(f"the cache file {path} must be there, but there is none; tune first or correct the path")
    return file


def read_folder(folder: Path) -> list[CacheFile]:
    """Every cache file in a folder, sorted by device, operation and release; none when the folder is missing.

    Raises:
        CacheError: the folder or one of its files cannot be read.
    """
    try:
        # A glob would take a file, and a folder that may not be read, for an empty one.
        devices = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.exists() else []
        paths = [path for device in devices for path in sorted(device.iterdir()) if file_format.is_name(path.name)]
    except OSError as error:
        raise CacheError(f"the cache {folder} must be readable, but {whole_files.words(error)}; correct that") from None
    return [read(path) for path in paths]


def files_of(folder: Path, device: Device, op: Op) -> list[CacheFile]:
    """The cache files of a device and an operation in a folder: of the installed Triton, then of other supported ones.

    Raises:
        CacheError: a file is damaged, newer, foreign or unreadable.
    """
    return files_at(paths_of(folder, device, op))


def files_at(paths: Iterable[Path]) -> list[CacheFile]:
    """Those of these cache files that are there.

    Raises:
        CacheError: a file is damaged, newer, foreign or unreadable.
    """
    return [file for file in map(_file_at, paths) if file is not None]


def paths_of(folder: Path, device: Device, op: Op) -> list[Path]:
    """Where `files_of` looks."""
    return [path_of(folder, device, op, release) for release in triton_release.nearest_first()]


def lookup(folder: Path, device: Device, op: Op) -> dict[str, CacheEntry]:
    """The entries of a device in a folder that the installed Triton tuned; none when there is no file yet.

    Raises:
        CacheError: the file is damaged, newer, foreign or unreadable.
    """
    file = _file_at(path_of(folder, device, op))
    return dict(file.entries) if file is not None else {}


def merge(folder: Path, device: Device, op: Op, entries: Iterable[CacheEntry]) -> Path:
    """Adds entries that one release of Triton tuned to its file, in place of those of the same problem; others stay.

    A predicted entry never replaces a measured one.

    Raises:
        CacheError: the existing file is not a cache file of this device, an entry could not be read back or is of
            another release, or the folder cannot be written. The file is left as it is.
    """
    entries = list(entries)
    release = next((entry.triton_release for entry in entries), "") or triton_release.installed_release()
    path, file = path_of(folder, device, op, release), _empty(device, op, release)
    with _locked(path):
        for entry in entries:
            file_format.check(entry.problem.key, entry, release)
        whole_files.write(path, file_format.encode(_merged(path, _now(path), file, entries)))
    return path


def _empty(device: Device, op: Op, release: str) -> CacheFile:
    return CacheFile(
        schema=file_format.SCHEMA,
        op=op,
        device=device.name,
        triton=release,
        fingerprint=device.fingerprint,
        entries={},
    )


def combine(folder: Path, files: Iterable[CacheFile], *, any_time: bool = False) -> list[Merged]:
    """Adds the entries of other cache files to those of a folder; others stay.

    Where both have an entry of one problem, `precedence.merging` decides. A predicted entry never replaces a measured
    one, nor an entry that is held back one that holds.

    Args:
        any_time: times do not decide; the entries of `files` are taken where nothing else speaks against them.

    Raises:
        CacheError: one of the folder's files cannot be read or written, or both are measured, on different cards; what
            could not be merged was known before the first file was written.
    """
    files = list(files)
    for file in files:
        path = path_in(folder, file)
        _merged(path, _file_at(path), file, file.entries.values())
    return [_combined(path_in(folder, file), file, any_time) for file in files]


def _combined(path: Path, file: CacheFile, any_time: bool) -> Merged:
    taken: dict[str, CacheEntry] = {}
    same: list[Problem] = []
    replaced: dict[Problem, str] = {}
    refused: dict[Problem, str] = {}
    with _locked(path):
        old = _now(path)
        for key, entry in file.entries.items():
            known = old.entries.get(key) if old is not None else None
            if known == entry:
                same.append(entry.problem)
                continue
            if known is not None:
                decision = precedence.merging(known, entry, why_not=why_held_back, any_time=any_time)
                (replaced if decision.taken else refused)[entry.problem] = decision.reason
                if not decision.taken:
                    continue
            taken[key] = entry
        if taken:
            whole_files.write(path, file_format.encode(_merged(path, old, file, taken.values())))
    return Merged(
        path=path,
        taken=tuple(entry.problem for entry in taken.values()),
        same=tuple(same),
        replaced=replaced,
        refused=refused,
    )


def drop(path: Path, entries: Iterable[CacheEntry]) -> tuple[CacheEntry, ...]:
    """Removes entries from a file, but for those that became others meanwhile; returns what was removed.

    Raises:
        CacheError: the file cannot be read or written. It is left as it is.
    """
    entries = list(entries)
    with _locked(path):
        old = _now(path)
        known = dict(old.entries) if old is not None else {}
        gone = tuple(entry for entry in entries if known.get(entry.problem.key) == entry)
        for entry in gone:
            del known[entry.problem.key]
        if old is not None and gone:
            whole_files.write(path, file_format.encode(replace(old, entries=known)))
    return gone


def mark(folder: Path, device: Device, op: Op, verified: Iterable[tuple[CacheEntry, Mark | None]]) -> list[CacheEntry]:
    """Writes what a verification found into a folder's files, each entry's mark or none; returns what it changed.

    An entry that became another one meanwhile stays as it is. One that stands in another folder alone is added, with
    its mark, and shadows that one.

    Raises:
        CacheError: the file cannot be read or written, or is of another card. It is left as it is.
    """
    by_release: dict[str, list[tuple[CacheEntry, Mark | None]]] = {}
    for entry, entry_mark in verified:
        by_release.setdefault(entry.triton_release or triton_release.installed_release(), []).append(
            (entry, entry_mark)
        )
    return [
        entry for release, pairs in by_release.items() for entry in _marked(folder, _empty(device, op, release), pairs)
    ]


def _marked(folder: Path, file: CacheFile, pairs: Iterable[tuple[CacheEntry, Mark | None]]) -> list[CacheEntry]:
    path = path_in(folder, file)
    with _locked(path):
        old = _now(path)
        known = old.entries if old is not None else {}
        changed = []
        for entry, its in pairs:
            here, wanted = known.get(entry.problem.key), replace(entry, mark=its)
            there = here is not None and replace(here, mark=its) == wanted
            if (there and here != wanted) or (here is None and its is not None):
                changed.append(wanted)
        if changed:
            whole_files.write(path, file_format.encode(_merged(path, old, file, changed)))
    return changed


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, makes its folder, and turns what goes wrong into a CacheError."""
    folder = path.parent.parent
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(str(path.with_suffix(".lock")), timeout=LOCK_SECONDS):
            yield
    except filelock.Timeout:
        raise CacheError(
            f"the cache file {path} must be free within {LOCK_SECONDS:.0f} s, but another process holds its lock; "
            "wait for it or remove the .lock file"
        ) from None
    except OSError as error:
        raise CacheError(
            f"the cache {folder} must be writable, but {whole_files.words(error)}; use another --cache DIR"
        ) from None
    except NotImplementedError:
        raise CacheError(
            f"the cache {folder} must be on a file system with locks, but has none; use another --cache DIR"
        ) from None
    except ValueError as error:
        raise CacheError(
            f"the cache file {path} must hold what can be read back, but {file_format.clipped(error)}; tune that "
            "problem again"
        ) from None


def _now(path: Path) -> CacheFile | None:
    # Never from memory: another writer may have been here within a tick of the file system's clock.
    return _parse(path) if path.exists() else None


def why_stale(entry: CacheEntry) -> str | None:
    """Why an entry no longer speaks of a kernel that there is, in words; None while it does.

    An entry holds as long as its variant renders as the text that was tuned, so that a change of a template leaves the
    entries of those kernels valid that it does not touch.
    """
    if not search_space.load(entry.template).holds(entry.params):
        return f"it was tuned in another search space of {entry.template}; run autoattn tune again"
    try:
        digest = render.digest_of_source(entry.problem, entry.variant, entry.triton_release or None)
    except AutoattnError as error:  # tensors that it cannot read, an expression that is none
        return f"{entry.template} has no kernel for it by now: {error}"
    if digest != entry.source_digest:
        return f"it was tuned for another text of {entry.template}; run autoattn tune again"
    return None


def why_held_back(entry: CacheEntry) -> str | None:
    """Why an entry must not be dispatched, in words: it is stale, or marked as wrong or as one that does not run."""
    if entry.mark is not None and entry.mark.holds_back:
        return f"{entry.mark}; run autoattn tune again"
    return why_stale(entry)


def source_of(entry: CacheEntry) -> Source:
    """The kernel of an entry, in the names of the release of Triton that it was tuned with.

    A call runs the same template in the names of the release that is installed.

    Raises:
        AutoattnError: the template has no such kernel by now.
    """
    return render.render(entry.problem, entry.variant, release=entry.triton_release or None)


def _merged(path: Path, old: CacheFile | None, file: CacheFile, entries: Iterable[CacheEntry]) -> CacheFile:
    """`old` with `entries`, which are of the card of `file`."""
    entries = list(entries)
    known = dict(old.entries) if old is not None else {}
    fingerprint = file.fingerprint
    if old is not None and old.fingerprint != fingerprint and any(map(_measured, known.values())):
        if any(map(_measured, entries)):
            raise CacheError(
                f"the cache file {path} must be of the card {fingerprint}, but was measured on {old.fingerprint}; "
                "use another --cache DIR, or folder to merge into"
            )
        fingerprint = old.fingerprint
    for entry in entries:
        if _measured(entry) or entry.problem.key not in known or not _measured(known[entry.problem.key]):
            known[entry.problem.key] = entry
    return replace(file, schema=file_format.SCHEMA, fingerprint=fingerprint, entries=dict(sorted(known.items())))


def _measured(entry: CacheEntry) -> bool:
    return entry.evidence is Evidence.MEASURED


def _file_at(path: Path) -> CacheFile | None:
    """The file, from memory when it has not changed; None when there is none."""
    try:
        stamp = path.stat()
        return _read(path, stamp.st_mtime_ns, stamp.st_size, stamp.st_ino)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        words = whole_files.words(error) if isinstance(error, OSError) else error
        raise CacheError(f"the cache file {path!s:.500} must be readable, but {words}; correct that") from None


def forget() -> None:
    """Reads every file anew from now on."""
    _read.cache_clear()


@lru_cache(maxsize=64)
def _read(path: Path, modified_ns: int, size: int, inode: int) -> CacheFile:
    return _parse(path)


def _parse(path: Path) -> CacheFile:
    with path.open("rb") as stream:
        data = stream.read(file_format.MAX_BYTES + 1)
    if len(data) > file_format.MAX_BYTES:
        raise CacheError(
            f"the cache file {path} must be at most {file_format.MAX_BYTES} bytes, but it is larger; prune it"
        )
    shipped = resources.is_installed() and resources.shipped_cache() in path.parents
    with garbage_collection.paused():
        return file_format.decode(data, path, checked=shipped)
