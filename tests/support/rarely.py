"""Cases that few runs of the tests have: `make test-exhaustive` runs them, `make test` does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import pytest


def rarely(cases: Collection[Any], often: Callable[[Any], bool]) -> list[Any]:
    """Cases to parametrize a test with; those that are not `often` run are marked exhaustive. Each run has some."""
    marked_cases = [
        case
        if often(case)
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)
        for case in cases
    ]
    assert any(often(case) for case in cases), "no run without the marker would have a case"
    return marked_cases


def diagonal(*axes: Collection[Any]) -> list[Any]:
    """All combinations of values of some axes; each value of each axis is in one that every run has.

    Each run has as many as the longest axis has values; the others are marked exhaustive.
    """
    values = [list(axis) for axis in axes]
    places = list(itertools.product(*(range(len(axis)) for axis in values)))
    often = {tuple(step % len(axis) for axis in values) for step in range(max(map(len, values)))}
    cases = [(place, tuple(axis[at] for axis, at in zip(values, place, strict=True))) for place in places]
    return [case if place in often else pytest.param(*case, marks=pytest.mark.exhaustive) for place, case in cases]
