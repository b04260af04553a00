"""A small version of `benchmarks/kills.py`: tuners and their workers are killed at random moments."""

from __future__ import annotations

import kills
import pytest


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("tuners", [1, 2])
def test_a_few_kills_lose_nothing(tuners: int) -> None:
    text, faults = kills.kills(1, 3, tuners, None, 0.4)
    assert faults == 0, text
