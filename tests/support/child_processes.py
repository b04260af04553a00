"""Child processes: whether they live, and what they noted."""

from __future__ import annotations

import time
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be noticed by its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def gone(*pids: int) -> bool:
    """Whether all of them end, given a moment."""
    for _ in range(500):
        if not any(map(alive, pids)):
            return True
        time.sleep(0.01)
    return False


def noted(note: Path) -> list[int]:
    """The process ids that a job wrote, once it did."""
    for _ in range(3000):
        if note.exists():
            return [int(word) for word in note.read_text().split()]
        time.sleep(0.01)
    raise AssertionError(f"{note} was never written")
