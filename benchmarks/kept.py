"""Where the tables of the benchmarks are kept."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from datetime import date
from pathlib import Path

from autoattn import __version__

RESULTS = Path(__file__).parent / "results"


def keep(name: str, text: str) -> Path:
    """Writes a table under today's date and its name, and says where."""
    path = RESULTS / f"{date.today()}_{name}.md"
    path.write_text(text.rstrip() + "\n", encoding="utf-8")
    return path


def printed(lines: Iterable[str]) -> list[str]:
    """Prints lines as they come, and returns them."""
    gathered = []
    for line in lines:
        print(line, flush=True)
        gathered.append(line)
    return gathered


def tell(title: str, command: str, text: str, name: str | None) -> None:
    """Prints what a command found, with what it ran on, and keeps it under a name if there is one."""
    versions = f"autoattn {__version__}, Python {platform.python_version()}, {platform.system()}"
    text = "\n\n".join([f"# {title}", f"`{command}`", text, versions]) + "\n"
    print(text)
    if name:
        keep(name, text)
