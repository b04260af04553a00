"""Files of measured problems, as `benchmarks/portfolios.py` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from autoattn.core.problem import Problem
from autoattn.core.variant import Variant


def written(path: Path, times_us: Mapping[Problem, Mapping[Variant, float]]) -> Path:
    """The path, where a file of these problems and the times of their variants now lies."""
    documents = [
        {
            "problem": msgspec.to_builtins(problem),
            "times_us": [[variant.template, variant.as_dict(), time_us] for variant, time_us in times.items()],
            "rivals_us": {},
        }
        for problem, times in times_us.items()
    ]
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return path
