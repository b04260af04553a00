"""Cases that few runs of the tests have: `make test-exhaustive` runs them, `make test` does not."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest


def rarely(cases: Collection[Any], often: Callable[[Any], bool]) -> list[Any]:
    """Cases to parametrize a test with; those that are not `often` run are marked exhaustive. Each run has some."""
    found = [
        case
        if often(case)
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)
        for case in cases
    ]
    assert any(often(case) for case in cases), "no run without the marker would have a case"
    return found
