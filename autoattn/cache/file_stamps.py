"""Stamps of files, which change when a file is written, made or removed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeAlias

Stamp: TypeAlias = tuple[int, int, int]  # when a file was written, its bytes and its inode
Stamps: TypeAlias = tuple[Stamp | None, ...]


def of(paths: Iterable[str]) -> Stamps:
    """What changes when one of these files is written, made or removed."""
    stamps: list[Stamp | None] = []
    for path in paths:
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # ValueError: a NUL character in the path; reading says what is wrong
            stamps.append(None)
        else:
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(stamps)


def are_unchanged(paths: Iterable[str], stamps: Stamps) -> bool:
    """Whether `stamps` of these files are the same as before; for a file that is not there it takes a third."""
    for path, stamp in zip(paths, stamps, strict=True):
        try:
            if stamp is None:
                if os.access(path, os.F_OK):
                    return False
                continue
            status = os.stat(path)
        except (OSError, ValueError):
            if stamp is not None:
                return False
        else:
            if stamp != (status.st_mtime_ns, status.st_size, status.st_ino):
                return False
    return True
