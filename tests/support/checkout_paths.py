"""Where the files of the checkout lie, and the package that is tested."""

from __future__ import annotations

import os
from pathlib import Path

import autoattn

CHECKOUT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent
GOLDEN = CHECKOUT / "tests" / "golden"
BENCHMARKS = CHECKOUT / "benchmarks"
INSTALLED = Path(autoattn.__file__).parents[1]  # the checkout, or where a wheel was installed


def python_path(*folders: Path | str) -> str:
    """PYTHONPATH for a child process that imports helpers and the tested package."""
    inherited = filter(None, [os.environ.get("PYTHONPATH", "")])
    return os.pathsep.join([*map(str, folders), str(SUPPORT), str(INSTALLED), *inherited])
