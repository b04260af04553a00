"""Storage of studies: a journal file each, or a server that several hosts share (Optuna's storages)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import optuna
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend

from autoattn.errors import AutoattnError, CacheError, StorageError, UsageError

LOCK_SECONDS = 30.0  # a writer holds the journal for milliseconds; longer means a dead file system
CONNECT_SECONDS = 10  # until a server that does not answer is given up
RACE_SECONDS = 60.0  # of attempts: of two processes that make the tables of a fresh database at once, one fails
KNOWN = "postgresql://, mysql://, sqlite:/// or grpc://HOST:PORT"

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One of Optuna's storages, and how its failures are told."""

    kept: BaseStorage
    refusal: Callable[[Exception], AutoattnError]


class _Dialect(NamedTuple):
    driver: str | None  # that SQLAlchemy is told to take where the URL names none
    package: str | None  # which brings it
    timeout: str  # what it calls the seconds until it gives up


_DIALECTS = {
    "postgresql": _Dialect("psycopg", "psycopg", "connect_timeout"),
    "mysql": _Dialect("pymysql", "pymysql", "connect_timeout"),
    "sqlite": _Dialect(None, None, "timeout"),
}


def server(url: str) -> Storage:
    """The storage at a URL: SQL by its dialect, or Optuna's gRPC proxy.

    Raises:
        UsageError: no such kind of storage.
        StorageError: its driver is missing, it cannot be reached, or its tables are another Optuna's.
    """
    scheme, colon, rest = url.partition("://")
    dialect, _, driver = scheme.partition("+")
    if not colon or (scheme != "grpc" and dialect not in _DIALECTS):
        raise UsageError(f"--storage must be a URL that begins with {KNOWN}, got {shown(url)!r}; correct it")
    if scheme == "grpc":
        return _proxy(url, rest)
    facts = _DIALECTS[dialect]
    if not driver and facts.driver is not None:
        _need(f"{dialect} storage", facts.package, dialect)
        url = f"{dialect}+{facts.driver}://{rest}"
    known = dialect == "sqlite" or not driver or driver == facts.driver
    arguments = {"connect_args": {facts.timeout: CONNECT_SECONDS}} if known else {}
    return Storage(kept=_opened(url, {"pool_pre_ping": True, **arguments}), refusal=lambda error: _lost(url, error))


def shown(url: str) -> str:
    """A URL without its password and options, for people to read."""
    scheme, colon, rest = url.partition("://")
    rest = rest.partition("?")[0]
    user, at, place = rest.rpartition("@")
    return f"{scheme}{colon}{user.partition(':')[0]}{at}{place}"


def _opened(url: str, arguments: dict[str, Any]) -> BaseStorage:
    escaped = url.replace("{", "{{").replace("}", "}}")  # Optuna fills in a template
    end = time.monotonic() + RACE_SECONDS
    while True:
        try:
            kept = RDBStorage(escaped, arguments, skip_compatibility_check=True)
            there, wanted, ever = kept.get_current_version(), kept.get_head_version(), kept.get_all_versions()
        except Exception as error:  # SQLAlchemy's, its driver's or Optuna's own
            if not _raced(error) or time.monotonic() > end:
                raise _unopened(url, error) from None
            time.sleep(random.uniform(0.1, 0.5))
            continue
        if there != wanted:
            way = "run `optuna storage upgrade --storage URL`" if there in ever else "install a newer Optuna"
            raise StorageError(
                f"the tables of the storage {shown(url)} must be those of Optuna {optuna.__version__} ({wanted}), "
                f"got {there}; {way}, or name another database"
            )
        return get_storage(kept)


def _raced(error: Exception) -> bool:
    """Whether another process makes the same tables; MySQL and SQLite show each as soon as it is made."""
    said = _said(error)
    return type(error).__name__ == "IntegrityError" or "already exists" in said or "concurrently" in said


def _proxy(url: str, rest: str) -> Storage:
    host, colon, port = rest.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise UsageError(f"--storage must name a proxy as grpc://HOST:PORT, got {shown(url)!r}; correct it")
    _need("grpc storage", "grpc", "grpc")
    _need("grpc storage", "google.protobuf", "grpc")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            kept = GrpcStorageProxy(host=host, port=int(port))
        kept.wait_server_ready(timeout=CONNECT_SECONDS)
    except Exception as error:
        raise _unopened(url, error) from None
    return Storage(kept=kept, refusal=lambda error: _lost(url, error))


def _need(what: str, package: str | None, extra: str) -> None:
    spec = None
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec(package or "")
    if spec is None:
        raise StorageError(
            f"a {what} needs the Python package {package}, which is not installed; "
            f"run `pip install 'autoattn[{extra}]'`"
        )


def _unopened(url: str, error: Exception) -> StorageError:
    words = _words(url, error)
    if isinstance(error, ImportError) or type(error).__name__ == "NoSuchModuleError":
        return StorageError(f"the storage {shown(url)} needs a driver that is not installed ({words}); install it")
    if any(word in words.lower() for word in ("password", "authentication", "access denied")):
        return StorageError(
            f"the storage {shown(url)} must let its user in, but {words}; correct the name or the password"
        )
    return StorageError(f"the storage {shown(url)} must answer, but {words}; start its server, or correct --storage")


def _lost(url: str, error: Exception) -> StorageError:
    return StorageError(
        f"the storage {shown(url)} must stay readable and writable, but {_words(url, error)}; "
        "mend it, and the same command goes on from there"
    )


def _words(url: str, error: Exception) -> str:
    """What the server or its driver said, without the password."""
    words = " ".join(_said(error).split()).rstrip(".")[:300]
    password = url.partition("://")[2].rpartition("@")[0].partition(":")[2]
    return words.replace(password, "***") if password else words


def _said(error: Exception) -> str:
    cause = error.__cause__ or error
    cause = getattr(cause, "orig", None) or cause
    details = getattr(cause, "details", None)  # a gRPC error's own words
    if callable(details):
        return str(details()) or type(cause).__name__
    if cause.args and all(isinstance(part, kind) for part, kind in zip(cause.args, (int, str), strict=False)):
        return " ".join(map(str, cause.args[1:]))  # MySQL's drivers put a number before the words
    return str(cause) or type(cause).__name__


# --- journals ---------------------------------------------------------------------------------------------------------


def journal(path: Path) -> Storage:
    """The journal file of a problem, made if there is none; mended where a writer was killed in the middle of a line.

    Raises:
        CacheError: the journal cannot be read or written, or is none.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        place = path.absolute()  # the program may change its folder before the last line is written
        # Optuna's own locks outlive a killed process; this one the kernel takes back.
        lock = filelock.FileLock(f"{place}.lock", timeout=LOCK_SECONDS)
        with lock:
            _mend(place)
        kept = JournalStorage(_Mended(str(place), lock))
    except Exception as error:  # Optuna replays what the file says without looking at it first
        raise _refused(path, error) from None
    return Storage(kept=kept, refusal=lambda error: _refused(path, error))


def unchanged(path: Path) -> Storage:
    """The journal file at a path, to be read only.

    Raises:
        CacheError: there is none, or it cannot be read.
    """
    if not path.is_file():
        raise CacheError(f"a journal must be a file that tune wrote, got {path}; name another")
    try:
        kept = JournalStorage(JournalFileBackend(str(path)))
    except Exception as error:
        raise _refused(path, error) from None
    return Storage(kept=kept, refusal=lambda error: _refused(path, error))


class _Mended(JournalFileBackend):
    """A journal that is mended before it is appended to: another process may have been killed as it wrote."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        path = Path(self._file_path)
        with self._lock:
            if _torn(path):
                _mend(path)
            super().append_logs(logs)


def _torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _mend(journal: Path) -> None:
    """Drops a last line that was not written whole; Optuna would append to it, and read neither."""
    if not journal.exists():
        return
    with journal.open("r+b") as file:
        data = file.read()
        if data and not data.startswith(_FIRST_BYTES[: len(data)]):
            raise ValueError("it does not begin as a journal")
        end = data.rfind(b"\n") + 1
        if end == len(data):  # else what follows is the line that was not written whole, and the one before it stays
            last = data.rfind(b"\n", 0, max(0, end - 1)) + 1
            try:
                json.loads(data[last:end] or b"{}")
            except ValueError:
                end = last
        if end < len(data):
            file.truncate(end)


_FIRST_BYTES = b'{"op_code":'  # of every journal that Optuna writes


def _refused(journal: Path, error: Exception) -> CacheError:
    words = " ".join(str(error).split())[:300]
    if isinstance(error, filelock.Timeout):
        return CacheError(f"the study's journal {journal} must be free, but another process holds it; wait for it")
    if isinstance(error, OSError):
        said = error.strerror or words
        return CacheError(
            f"the study's journal {journal} must be writable, but {said}; correct that or use --cache DIR"
        )
    kind = type(error).__name__
    return CacheError(f"the study's journal {journal} is damaged ({kind}: {words}); remove it to start anew")
