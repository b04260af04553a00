"""Files that are written whole: a reader finds the old content or the new, never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from autoattn.errors import CacheError


def write(path: Path, data: bytes) -> None:
    """Puts a file there whole, by renaming a finished copy over it.

    Raises:
        OSError: it cannot be written; what stood there stays.
    """
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


def write_new(path: Path, data: bytes) -> None:
    """Puts a file of a cache folder there whole, and makes its folders.

    Raises:
        CacheError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, data)
    except OSError as error:
        raise CacheError(
            f"the cache folder {path.parent!s:.500} must be writable, but {words(error)}; use another folder"
        ) from None


def remove(path: Path) -> None:
    """Removes a file of a cache folder.

    Raises:
        CacheError: it cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(f"the cache file {path!s:.500} must be removable, but {words(error)}; correct that") from None


def words(error: OSError) -> str:
    """Which file an error of the system is about, and what it says."""
    return f"{error.filename or 'writing'}: {error.strerror or error}"
