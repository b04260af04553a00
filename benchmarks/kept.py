"""Where the tables of the benchmarks are kept."""

from __future__ import annotations

from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def keep(name: str, text: str) -> Path:
    """Writes a table under today's date and its name, and says where."""
    path = RESULTS / f"{date.today()}_{name}.md"
    path.write_text(text.rstrip() + "\n", encoding="utf-8")
    return path
