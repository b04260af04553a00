"""The cache: one readable JSON file per device and operation, reviewed like code.

A file is read whole or refused; it is written whole, by renaming a finished copy over it, under a lock that every
writer takes, so that two tuners that write at once lose nothing and a crash leaves the old file.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import filelock
import msgspec

from autoattn import space
from autoattn.device import Device
from autoattn.entry import CacheEntry
from autoattn.errors import CacheError, UsageError
from autoattn.problem import Op
from autoattn.trial import Evidence

SCHEMA = 1
LOCK_SECONDS = 30.0  # a writer holds the lock for milliseconds; longer means a dead file system
MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFile:
    """All entries of one device and operation."""

    schema: int
    op: Op
    device: str  # the short name, also the folder
    fingerprint: str  # of the card; a measured entry holds only where it agrees
    entries: dict[str, CacheEntry]  # problem key -> entry, sorted


def path_of(folder: Path, device: Device, op: Op) -> Path:
    """Where the entries of a device and an operation stand in a cache folder."""
    return folder / device.name / f"{op.value}.json"


def read(path: Path) -> CacheFile:
    """Reads one cache file.

    Raises:
        CacheError: the file is damaged, newer, foreign or unreadable; it is left as it is.
    """
    try:
        stamp = path.stat()
        return _read(path, stamp.st_mtime_ns, stamp.st_size)
    except OSError as error:
        raise CacheError(f"the cache file {path} must be readable, but {_words(error)}; correct that") from None


def read_folder(folder: Path) -> list[CacheFile]:
    """Every cache file in a folder, sorted by device and operation; none when the folder is missing."""
    stems = [op.value for op in Op]
    return [read(path) for path in sorted(folder.glob("*/*.json")) if path.stem in stems]


def lookup(folder: Path, device: Device, op: Op) -> dict[str, CacheEntry]:
    """The entries of a device in a folder; none when there is no file yet."""
    path = path_of(folder, device, op)
    return read(path).entries if path.exists() else {}


def merge(folder: Path, device: Device, op: Op, entries: Iterable[CacheEntry]) -> Path:
    """Adds entries to a file, in place of those of the same problem; others stay.

    A predicted entry never replaces a measured one.

    Raises:
        CacheError: the existing file is not a cache file of this device, or the folder cannot be written.
    """
    path = path_of(folder, device, op)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(str(path.with_suffix(".lock")), timeout=LOCK_SECONDS):
            old = read(path) if path.exists() else None
            _write(path, _encode(_merged(path, old, device, op, list(entries))))
    except filelock.Timeout:
        raise CacheError(
            f"the cache file {path} must be free within {LOCK_SECONDS:.0f} s, but another process holds its lock; "
            "wait for it or remove the .lock file"
        ) from None
    except OSError as error:
        raise CacheError(f"the cache {folder} must be writable, but {_words(error)}; use --cache DIR") from None
    return path


def _merged(path: Path, old: CacheFile | None, device: Device, op: Op, entries: list[CacheEntry]) -> CacheFile:
    known = dict(old.entries) if old is not None else {}
    fingerprint = device.fingerprint
    if old is not None and old.fingerprint != fingerprint and any(map(_measured, known.values())):
        if any(map(_measured, entries)):
            raise CacheError(
                f"the cache file {path} must be of the card {fingerprint}, but was measured on {old.fingerprint}; "
                "use another --cache DIR"
            )
        fingerprint = old.fingerprint
    for entry in entries:
        if _measured(entry) or entry.problem.key not in known or not _measured(known[entry.problem.key]):
            known[entry.problem.key] = entry
    return CacheFile(
        schema=SCHEMA, op=op, device=device.name, fingerprint=fingerprint, entries=dict(sorted(known.items()))
    )


def _measured(entry: CacheEntry) -> bool:
    return entry.evidence is Evidence.MEASURED


def _encode(file: CacheFile) -> bytes:
    return json.dumps(_tidy(msgspec.to_builtins(file)), indent=1, ensure_ascii=False).encode() + b"\n"


def _tidy(value: Any) -> Any:
    """Floats with 6 significant digits: more would be noise in a diff."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _tidy(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_tidy(part) for part in value]
    return value


def _write(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@lru_cache(maxsize=64)
def _read(path: Path, modified_ns: int, size: int) -> CacheFile:
    if size > MAX_BYTES:
        raise CacheError(f"the cache file {path} must be at most {MAX_BYTES} bytes, got {size}; prune it")
    data = path.read_bytes()
    try:
        raw = msgspec.json.decode(data)
        if not isinstance(raw, dict) or "schema" not in raw or "entries" not in raw:
            raise CacheError(f"{path} must be an autoattn cache file, got something else; name another file")
        if raw["schema"] != SCHEMA:
            raise CacheError(f"{path} must have schema {SCHEMA}, got {raw['schema']!r:.40}; use a matching autoattn")
        file = msgspec.json.decode(data, type=CacheFile)
        for key, entry in file.entries.items():
            _check(key, entry)
    except (msgspec.DecodeError, UsageError, ValueError, RecursionError, UnicodeDecodeError) as error:
        raise CacheError(
            f"the cache file {path} is damaged ({' '.join(str(error).split())}); restore it or move it away"
        ) from None
    return file


def _check(key: str, entry: CacheEntry) -> None:
    if key != entry.problem.key:
        raise ValueError(f"the entry {key!r:.100} holds the problem {entry.problem.key}")
    space.load(entry.template).check(entry.params)


def _words(error: OSError) -> str:
    return f"{error.filename or 'writing'}: {error.strerror or error}"
