"""Writing a file whole or not at all, and several into one folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write(path: Path, text: str | bytes) -> None:
    """Writes `text`, as UTF-8, to `path`; when that fails, what stood there before still stands there.

    Raises:
        OSError: the place cannot be written, or is full; the error names `path`.
    """
    data = text.encode() if isinstance(text, str) else text
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(data)  # a device or a pipe; a folder raises
        return
    try:
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(beside, 0o666 & ~_umask())
        os.replace(beside, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def write_all(out: Path, texts: Mapping[str, str]) -> tuple[Path, ...]:
    """Writes texts by their names into a folder, which is made when it is missing; gives the paths.

    Raises:
        OSError: the folder cannot be made or written.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write(out / name, text)
    return tuple(out / name for name in texts)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
