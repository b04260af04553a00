"""Failures of the machine rather than of a kernel: a folder that cannot be written, a full disk, a missing program.

They say nothing of a variant. So they are told by an outcome of their own, are never journalled, and end a run with one
sentence: what cannot be done, where, and the way out.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from autoattn.codegen import resources
from autoattn.core.trial import Outcome
from autoattn.errors import HostError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_READ_ONLY = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP,
    errno.ENAMETOOLONG,
}  # fmt: skip
_PROGRAM = re.compile(r"ptxas|nvdisasm|cuobjdump")
_MISSING = re.compile(r"Cannot find (?P<name>(?:ptxas|nvdisasm|cuobjdump)\S*)")  # Triton's words, a bare RuntimeError
# What ptxas says of a disk, in text alone.
_SAID_FULL = re.compile("|".join(re.escape(os.strerror(number)) for number in sorted(_FULL)))
# How older journals tell of an exception of the system, as they did of a kernel that does not run.
_ERRNO = re.compile(r"\[Errno \d+\]")


class Fault(NamedTuple):
    """What failed, for a person to read."""

    outcome: Outcome
    sentence: str  # what must be, what came, and the way out


def fault_of(error: BaseException) -> Fault | None:
    """What of the environment an exception tells, in itself or in what it was raised from; None where nothing is."""
    for cause in _chain(error):
        if isinstance(cause, HostError):
            return Fault(Outcome.HOST_ERROR, str(cause))
        if isinstance(cause, MemoryError):
            return _no_memory(str(cause) or "an allocation failed")
        if isinstance(cause, OSError) and cause.errno is not None:
            return _of_system(cause)
        if isinstance(cause, RuntimeError) and (missing := _MISSING.match(str(cause))):
            return _no_program(missing["name"], "Triton finds none")
        if (full := _SAID_FULL.search(str(cause))) is not None:
            return _no_room(None, full[0])
    return None


def killed(what: str) -> Fault:
    """A program that the system killed again and again, as it does when memory is short."""
    return _no_memory(f"{what} was killed (SIGKILL) each time")


def tells_of_environment(detail: str) -> bool:
    """Whether what a journal says of a failed trial is an exception of the system; older versions journalled those."""
    return _ERRNO.search(detail) is not None


def processes_killed_for_memory() -> int:
    """How many the system killed so far because memory was short; 0 where it does not say."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return 0
    return int(counters.get("oom_kill", 0))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it was raised from, the outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _of_system(error: OSError) -> Fault:
    said = error.strerror or str(error)
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else None
    if error.errno == errno.ENOMEM:
        return _no_memory(said)
    if error.errno in _FULL:
        return _no_room(path, said)
    if path is not None and _PROGRAM.match(path.name):
        return _no_program(str(path), said)
    if error.errno in _READ_ONLY:
        place, way = _place(path)
        return Fault(Outcome.READ_ONLY, f"{place} must be writable, but {said}; {way}")
    place = f" ({path})" if path is not None else ""
    return Fault(Outcome.HOST_ERROR, f"the system must do what a worker asks, but {said}{place}; correct that")


def _no_room(path: Path | None, said: str) -> Fault:
    place, way = _place(path)
    return Fault(Outcome.DISK_FULL, f"there must be room on the disk of {place}, but {said}; free some, or {way}")


def _no_program(name: str, said: str) -> Fault:
    return Fault(
        Outcome.MISSING_PROGRAM,
        f"the program {name} must be there and run, but {said}; reinstall triton, or name a program with "
        "TRITON_PTXAS_PATH or TRITON_NVDISASM_PATH",
    )


def _no_memory(said: str) -> Fault:
    return Fault(
        Outcome.OUT_OF_MEMORY,
        f"there must be memory for a compile, but {said}; free some, or run fewer compilers with --jobs",
    )


def _place(path: Path | None) -> tuple[str, str]:
    """What a path belongs to, in words, and how another one is named in its place."""
    compiled, temporary = resources.triton_cache(), Path(os.environ.get("TMPDIR") or _temporary())
    if path is None:
        place = f"Triton's cache {compiled} and of temporary files {temporary}"
        return place, "set TRITON_CACHE_DIR to a folder on another disk, and TMPDIR"
    if _related(path, compiled):
        return f"Triton's cache {compiled}", "set TRITON_CACHE_DIR to a folder that can be written"
    if _related(path, temporary):
        return f"the folder for temporary files {temporary}", "set TMPDIR to a folder that can be written"
    if _related(path, resources.user_cache()):
        return f"the cache {resources.user_cache()}", "name another with --cache DIR, or set AUTOATTN_CACHE"
    return str(path), "correct that"


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return "/tmp"


def _related(path: Path, folder: Path) -> bool:
    """Whether a path lies in a folder, or on the way to it."""
    path, folder = Path(os.path.abspath(path)), Path(os.path.abspath(folder))
    return path.is_relative_to(folder) or (folder.is_relative_to(path) and path != Path("/"))
