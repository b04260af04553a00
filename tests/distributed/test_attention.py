"""context_attention over gloo ranks: every method, sharding, mask and gradient, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import context_calls
import pytest
from context_calls import ContextCall
from process_groups import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_together_compute_what_one_process_computes(ranks: Ranks, size: int) -> None:
    calls = [ContextCall.draw(seed, size) for seed in range(12)]
    assert ranks.run(size, context_calls.faults, calls) == [[]] * size
