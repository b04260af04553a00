"""Keeps disassembled machine code for other processes: starting the disassembler takes as long as some compiles.

One JSON file per disassembler in Triton's cache, beside what it is about. It only saves time: a file that cannot be
read is as good as none.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from functools import cache
from pathlib import Path

from autoattn.codegen import resources
from autoattn.core.variant import digest_of

Names = dict[tuple[int, ...], str]  # what tells encodings apart -> name of the instruction

BITS = 3  # counts up when other bits tell encodings apart
read_times: dict[Path, int] = {}  # when the file was last changed, as we read it


def recall(tool: str) -> Names:
    """What other processes learned since this one last asked; empty where there is nothing new."""
    path = path_of(tool)
    try:
        changed = path.stat().st_mtime_ns
        if read_times.get(path) == changed:
            return {}
        names = _parsed(path.read_bytes())
    except (OSError, ValueError):
        return {}
    read_times[path] = changed
    return names


def keep(tool: str, names: Names) -> None:
    """Adds what this process learned; of two that write at once one may lose, and learns it again."""
    path = path_of(tool)
    with contextlib.suppress(OSError):  # a full disk, or a cache that nobody may write
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            names = {**_parsed(path.read_bytes()), **names}
        except (OSError, ValueError):
            names = dict(names)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(sorted([list(bits), name] for bits, name in names.items()), file)
        os.replace(temporary, path)


def _parsed(data: bytes) -> Names:
    try:
        names = {tuple(bits): name for bits, name in json.loads(data)}
    except TypeError as error:
        raise ValueError(str(error)) from error
    if not all(isinstance(name, str) and all(isinstance(bit, int) for bit in bits) for bits, name in names.items()):
        raise ValueError("bits must be whole numbers, and names text")
    return names


@cache
def _name_of(tool: str) -> str:
    """Names a disassembler by its file: another release may spell otherwise."""
    facts = Path(tool).stat()
    return digest_of(f"{tool} {facts.st_size} {facts.st_mtime_ns} {BITS}")


def path_of(tool: str) -> Path:
    """The file in which what a disassembler said is kept."""
    return resources.triton_cache() / "autoattn" / f"{_name_of(tool)}.json"
