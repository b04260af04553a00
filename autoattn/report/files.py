"""Writing a file whole or not at all, and several into one folder; numbers as CSV."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
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


def write_charted(out: Path, name: str, *, markdown: str, numbers: str, chart: str, memory: str) -> tuple[Path, ...]:
    """Writes `name`.md, .csv, .svg and -memory.svg into a folder, which is made when it is missing; gives the paths.

    Raises:
        OSError: the folder cannot be made or written.
    """
    texts = {".md": markdown, ".csv": numbers, ".svg": chart, "-memory.svg": memory}
    return write_all(out, {f"{name}{end}": text for end, text in texts.items()})


def csv_text(columns: Sequence[str], lines: Iterable[Mapping[str, object]]) -> str:
    """A head and a line for each of `lines`, whose values go by their columns; nothing where one has none.

    Raises:
        ValueError: a line has what is no column.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
