"""What tests of the cache file share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autoattn.cache import file_format
from autoattn.core import triton_release
from autoattn.core.problem import Op
from autoattn.errors import CacheError

FORWARD = Op.FORWARD
# The cache file of forward problems and the installed Triton.
FORWARD_FILE = file_format.name_of(FORWARD, triton_release.installed_release())


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(CacheError) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500
    return message


def left_behind(folder: Path) -> list[str]:
    """Every file in a folder but cache files and locks."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [str(path) for path in paths if path.suffix != ".lock" and path.name != FORWARD_FILE]
